//! Reports of a client about nodes that do not answer it: where the control plane cannot probe them itself, it
//! takes such a report, beside heartbeats that are missing, for the sign that others should take over.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::message::ReportSilence;

use super::Client;

/// How long a node owes an answer, and is not heard of, before it is reported.
const SILENT: Duration = Duration::from_millis(450);
/// How often is looked.
const LOOK: Duration = Duration::from_millis(50);
/// The pause after the first report of a node; it doubles with each, up to the longest.
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Reports of a client.
#[derive(Debug, Default)]
pub(super) struct Reports {
    looked: Option<Instant>,
    /// Nodes that are silent, when each is reported next, and the pause after that.
    silent: BTreeMap<(NodeId, Incarnation), (Instant, Duration)>,
}

impl Reports {
    /// Which of these, all that are silent now, are to be reported now.
    fn due(&mut self, silent: &[(NodeId, Incarnation)], now: Instant) -> Vec<(NodeId, Incarnation)> {
        // Who was heard again begins anew.
        self.silent.retain(|of, _| silent.contains(of));
        let mut due = Vec::new();
        for of in silent {
            let (at, pause) = self.silent.entry(*of).or_insert((now, PAUSE));
            if *at <= now {
                (*at, *pause) = (now + *pause, (*pause * 2).min(LONGEST_PAUSE));
                due.push(*of);
            }
        }
        due
    }
}

impl Client {
    /// Tells of nodes that say nothing, now and then. Where slots have one owner nobody could take over.
    pub(super) fn report_silence(&mut self) {
        let now = Instant::now();
        if self.reports.looked.is_some_and(|at| now.duration_since(at) < LOOK) {
            return;
        }
        self.reports.looked = Some(now);
        let silent: Vec<_> = self.initiator.books().silent_nodes(SILENT.as_nanos() as u64).collect();
        if silent.is_empty() && self.reports.silent.is_empty() {
            return;
        }
        if self.link.map().is_none_or(|map| map.replicas < 2) {
            return;
        }
        for (node, incarnation) in self.reports.due(&silent, now) {
            self.link.tell(ReportSilence { node: node.0, incarnation: incarnation.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_node_is_reported_at_once_and_ever_more_rarely_until_it_is_heard() {
        let (mut reports, begun, node) = (Reports::default(), Instant::now(), (NodeId(3), Incarnation(7)));
        let mut told = Vec::new();
        for ms in (0..20_000).step_by(50) {
            if !reports.due(&[node], begun + Duration::from_millis(ms)).is_empty() {
                told.push(ms);
            }
        }
        assert_eq!(told, [0, 250, 750, 1_750, 3_750, 7_750, 15_750]);
        let later = begun + Duration::from_secs(20);
        assert!(reports.due(&[node], later).is_empty());
        assert!(reports.due(&[], later).is_empty());
        assert_eq!(reports.due(&[node], later), [node], "it was heard meanwhile");
    }
}
