//! What nodes report of their shards. In memory only: reports come again with the next heartbeats.

use std::collections::BTreeMap;

use kvplane_rpc::message::{ReportShard, ShardFigures, ShardNode};

/// One node's.
#[derive(Debug, Default)]
struct Reported {
    incarnation: u64,
    heard_ns: u64,
    shards: BTreeMap<u16, ShardFigures>,
}

/// All nodes'. As many as there are members.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    nodes: BTreeMap<u64, Reported>,
}

impl Shards {
    /// Takes a report.
    pub(crate) fn report(&mut self, report: ReportShard, now_ns: u64) {
        let node = self.nodes.entry(report.node).or_default();
        if node.incarnation != report.incarnation {
            *node = Reported { incarnation: report.incarnation, ..Reported::default() };
        }
        node.heard_ns = now_ns;
        node.shards.insert(report.shard.shard, report.shard);
    }

    /// What a node reported, or all did.
    pub(crate) fn list(&self, node: Option<u64>, now_ns: u64) -> Vec<ShardNode> {
        let chosen = self.nodes.iter().filter(|(number, _)| node.is_none_or(|node| node == **number));
        chosen
            .map(|(number, node)| ShardNode {
                node: *number,
                incarnation: node.incarnation,
                age_ns: now_ns.saturating_sub(node.heard_ns),
                shards: node.shards.values().cloned().collect(),
            })
            .collect()
    }

    /// Keeps only lives that `keep` says.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.nodes.retain(|number, node| keep(*number, node.incarnation));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_add_up_by_shard_and_end_with_their_life() {
        let report = |incarnation, shard, objects| ReportShard {
            node: 7,
            incarnation,
            shard: ShardFigures { shard, objects, ..ShardFigures::default() },
        };
        let mut shards = Shards::default();
        shards.report(report(1, 0, 5), 10);
        shards.report(report(1, 1, 6), 20);
        shards.report(report(1, 0, 7), 30);
        let listed = shards.list(Some(7), 50);
        let objects: Vec<u64> = listed[0].shards.iter().map(|shard| shard.objects).collect();
        assert_eq!((listed[0].age_ns, objects), (20, vec![7, 6]));
        assert!(shards.list(Some(8), 50).is_empty());
        shards.report(report(2, 0, 1), 60);
        assert_eq!(shards.list(None, 60)[0].shards.len(), 1);
        shards.retain(|_, life| life == 1);
        assert!(shards.list(None, 60).is_empty());
    }
}
