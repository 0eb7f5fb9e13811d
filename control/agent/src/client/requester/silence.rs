//! Reports of unresponsive nodes to the control plane: it probes the ports of a reported node at once. Where it cannot
//! probe them, the reports decide failure detection, beside missed heartbeats.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvplane_client::ClientMetrics;
use kvplane_engine::Initiator;
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::message::ReportSilence;

use crate::link::ControlLink;

/// Time for which a node leaves requests unanswered, without any sign of life, before it is reported.
const SILENT: Duration = Duration::from_millis(250);
/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(50);
/// Backoff after the first report of a node; it doubles with each report, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Returns the nodes that leave requests unanswered for so long that they are reported.
pub(super) fn unresponsive(books: ClientMetrics<'_>) -> impl Iterator<Item = (NodeId, Incarnation)> {
    books.silent_nodes(SILENT.as_nanos() as u64)
}

/// Times of the reports of unresponsive nodes.
#[derive(Debug, Default)]
pub(super) struct Reports {
    looked: Option<Instant>,
    /// Unresponsive nodes, each with the time of its next report and the backoff after that.
    silent: BTreeMap<(NodeId, Incarnation), (Instant, Duration)>,
}

impl Reports {
    /// Reports unresponsive nodes to the control plane. Does nothing where slots have a single owner, which no failover
    /// can replace.
    pub(super) fn send(&mut self, initiator: &mut Initiator, link: &ControlLink) {
        let now = Instant::now();
        if self.looked.is_some_and(|at| now.duration_since(at) < LOOK) {
            return;
        }
        self.looked = Some(now);
        let silent: Vec<_> = unresponsive(initiator.books()).collect();
        if silent.is_empty() && self.silent.is_empty() {
            return;
        }
        if link.map().is_none_or(|map| map.replicas < 2) {
            return;
        }
        for (node, incarnation) in self.due(&silent, now) {
            link.tell(ReportSilence { node: node.0, incarnation: incarnation.0 });
        }
    }

    /// Returns those of the unresponsive nodes that are due for a report.
    fn due(&mut self, silent: &[(NodeId, Incarnation)], now: Instant) -> Vec<(NodeId, Incarnation)> {
        // A node that answered again starts with a fresh backoff.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_node_is_reported_with_backoff_until_it_answers() {
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
