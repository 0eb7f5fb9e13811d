//! Checker of epochs: they never go back at any observer, and one epoch has one map, also when the control plane is
//! killed and restarts.

use std::collections::BTreeMap;
use std::rc::Rc;

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::ClusterMap;

use super::{CheckResult, Rule, broken};

/// Maps published so far.
#[derive(Default)]
pub(crate) struct Epochs {
    published: BTreeMap<u64, Rc<ClusterMap>>,
}

impl Epochs {
    /// Records a map that the control plane publishes.
    pub(crate) fn publish(&mut self, map: &Rc<ClusterMap>) -> CheckResult {
        let newest = self.published.keys().next_back().copied().unwrap_or(0);
        let epoch = map.epoch.0;
        if epoch < newest {
            return Err(broken(Rule::Epoch, format!("epoch {epoch} is published after {newest}")));
        }
        let first = self.published.entry(epoch).or_insert_with(|| Rc::clone(map));
        if first != map {
            return Err(broken(Rule::Epoch, format!("epoch {epoch} has two maps: {first:?} and {map:?}")));
        }
        Ok(())
    }

    /// Checks an observer whose epoch changes from `before` to `after`.
    pub(crate) fn observe(who: &str, before: Epoch, after: Epoch) -> CheckResult {
        if after < before {
            return Err(broken(Rule::Epoch, format!("{who} went from epoch {before} to {after}")));
        }
        Ok(())
    }
}
