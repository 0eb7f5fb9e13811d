//! Reports of nodes about their SSD tiers, and the nodes' outstanding orders. In memory only: the next heartbeats bring
//! new reports, and an operator repeats a lost order.

use std::collections::BTreeMap;

use kvplane_rpc::message::{ReportTiers, TierAction, TierNode, TierOrder, TierShard};

use crate::nodes::reports::Reports;

/// Tiers of one node.
#[derive(Debug, Default)]
struct NodeTiers {
    carried_out: u64,
    last_order: u64,
    /// At most one order of each kind.
    orders: Vec<TierOrder>,
    shards: BTreeMap<u16, TierShard>,
}

/// Tiers of all nodes. Bounded by the number of members with SSDs.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    nodes: Reports<NodeTiers>,
}

impl Tiers {
    /// Records a report, and returns the node's outstanding orders.
    pub(crate) fn report(&mut self, report: ReportTiers, now_ns: u64) -> Vec<TierOrder> {
        let node = self.nodes.hear(report.node, report.incarnation, now_ns);
        node.carried_out = report.carried_out;
        // Numbers from before this control plane's start are not reused.
        node.last_order = node.last_order.max(report.carried_out);
        node.orders.retain(|order| order.number > report.carried_out);
        node.shards.extend(report.shards.into_iter().map(|shard| (shard.shard, shard)));
        node.orders.clone()
    }

    /// Adds an order for one node, or for all; returns the nodes and the orders' numbers.
    pub(crate) fn order(&mut self, node: Option<u64>, action: TierAction) -> Vec<(u64, u64)> {
        let same = |order: &TierOrder| std::mem::discriminant(&order.action) == std::mem::discriminant(&action);
        let ordered = self.nodes.chosen_mut(node).map(|(number, node)| {
            node.last_order += 1;
            node.orders.retain(|order| !same(order));
            node.orders.push(TierOrder { number: node.last_order, action });
            (number, node.last_order)
        });
        ordered.collect()
    }

    /// Returns the last reports of one node, or of all.
    pub(crate) fn list(&self, node: Option<u64>, now_ns: u64) -> Vec<TierNode> {
        let listed = self.nodes.chosen(node).map(|(node, reported)| TierNode {
            node,
            incarnation: reported.incarnation,
            age_ns: reported.age_ns(now_ns),
            carried_out: reported.what.carried_out,
            shards: reported.what.shards.values().cloned().collect(),
        });
        listed.collect()
    }

    /// Keeps only the incarnations that `keep` accepts.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.nodes.retain(keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(node: u64, incarnation: u64, carried_out: u64, shards: &[u16]) -> ReportTiers {
        let shards = shards.iter().map(|shard| TierShard { shard: *shard, ..TierShard::default() }).collect();
        ReportTiers { node, incarnation, carried_out, shards }
    }

    #[test]
    fn orders_are_repeated_until_they_are_carried_out() {
        let mut tiers = Tiers::default();
        let verify = TierAction::Verify { bytes_per_s: 5 };
        assert!(tiers.order(None, verify).is_empty(), "nobody is there");
        assert!(tiers.report(report(7, 1, 40, &[0, 1]), 10).is_empty());
        tiers.report(report(8, 1, 0, &[0]), 10);
        assert_eq!(tiers.order(None, verify), [(7, 41), (8, 1)]);
        assert_eq!(tiers.order(Some(7), TierAction::Reclaim { free_percent: 9 }), [(7, 42)]);
        let faster = TierAction::Verify { bytes_per_s: 6 };
        assert_eq!(tiers.order(Some(7), faster), [(7, 43)], "in place of the earlier one");
        for _ in 0..2 {
            let told = tiers.report(report(7, 1, 40, &[2]), 20);
            assert_eq!(told.iter().map(|order| order.number).collect::<Vec<_>>(), [42, 43]);
        }
        assert!(tiers.report(report(7, 1, 43, &[]), 30).is_empty());
        let listed = tiers.list(Some(7), 50);
        let shards: Vec<u16> = listed[0].shards.iter().map(|shard| shard.shard).collect();
        assert_eq!((listed.len(), listed[0].age_ns, listed[0].carried_out, shards), (1, 20, 43, vec![0, 1, 2]));
    }

    #[test]
    fn another_incarnation_begins_anew() {
        let mut tiers = Tiers::default();
        tiers.report(report(7, 1, 3, &[0, 1]), 10);
        tiers.order(None, TierAction::Reclaim { free_percent: 9 });
        assert!(tiers.report(report(7, 2, 0, &[0]), 20).is_empty());
        assert_eq!(tiers.list(None, 20)[0].shards.len(), 1);
        tiers.retain(|node, incarnation| (node, incarnation) != (7, 2));
        assert!(tiers.list(None, 20).is_empty());
    }
}
