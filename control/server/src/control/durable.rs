//! Durability of changes: of the cluster's records, and of the Conductor's.

use kvplane_cluster::Change;
use kvplane_rpc::{Refusal, RefusalCode};

use super::{Control, Core};
use crate::store::StoreError;

impl Control {
    /// Makes changes durable, all or none. After a failure no further change is accepted and the control plane stops.
    pub(super) fn persist(&self, core: &mut Core, changes: &[Change]) -> Result<(), Refusal> {
        let outcome = core.store.commit(changes);
        self.check_outcome(core, outcome)
    }

    /// Makes changes durable, together with the identity of the adopted state.
    pub(super) fn adopt(&self, core: &mut Core, state: u64, changes: &[Change]) -> Result<(), Refusal> {
        let outcome = core.store.adopt(state, changes);
        self.check_outcome(core, outcome)
    }

    fn check_outcome(&self, core: &mut Core, outcome: Result<(), StoreError>) -> Result<(), Refusal> {
        let Err(error) = outcome else { return Ok(()) };
        let reason = error.to_string();
        tracing::error!("the state cannot be written: {reason}");
        core.failure = Some(reason.clone());
        self.failed.send_replace(Some(reason.clone()));
        Err(Refusal::new(RefusalCode::Storage, reason))
    }

    /// Makes changes of the Conductor's records durable.
    pub(crate) fn keep(&self, changes: &[Change]) -> Result<(), Refusal> {
        self.persist(&mut *self.core()?, changes)
    }

    /// Refuses if no change can be made durable at present.
    pub(crate) fn check_durable(&self) -> Result<(), Refusal> {
        match self.core()?.store.doubt() {
            Some(reason) => Err(Refusal::new(RefusalCode::Storage, reason)),
            None => Ok(()),
        }
    }
}
