//! Reports of nodes about their shards. In memory only: the next heartbeats bring new reports.

use std::collections::BTreeMap;

use kvplane_rpc::message::{
    HOT_PER_REPORT, HotShard, NAME_PER_REPORT_BYTES, ReportHot, ReportShard, SLOW_PER_REPORT, ShardFigures, ShardNode,
};

use crate::nodes::reports::Reports;

/// Reports of all nodes. Bounded by the number of members.
#[derive(Debug, Default)]
pub(crate) struct Shards {
    nodes: Reports<BTreeMap<u16, ShardFigures>>,
    hot: Reports<BTreeMap<u16, HotShard>>,
}

impl Shards {
    /// Takes a report.
    pub(crate) fn report(&mut self, report: ReportShard, now_ns: u64) {
        let shards = self.nodes.hear(report.node, report.incarnation, now_ns);
        shards.insert(report.shard.shard, report.shard);
    }

    /// Returns true if a report of hot objects is within its limits.
    pub(crate) fn is_sound(shard: &HotShard) -> bool {
        let short = |name: &[u8]| name.len() <= NAME_PER_REPORT_BYTES;
        shard.hot.len() <= HOT_PER_REPORT
            && shard.names.len() <= HOT_PER_REPORT + SLOW_PER_REPORT
            && shard.names.iter().all(|one| short(&one.tenant) && short(&one.key))
    }

    /// Takes a report of hot objects.
    pub(crate) fn report_hot(&mut self, report: ReportHot, now_ns: u64) {
        let shards = self.hot.hear(report.node, report.incarnation, now_ns);
        shards.insert(report.shard.shard, report.shard);
    }

    /// Returns the hot objects that one node, or all nodes, reported.
    pub(crate) fn list_hot(&self, node: Option<u64>) -> Vec<(u64, Vec<HotShard>)> {
        let listed = self.hot.chosen(node).map(|(node, of)| (node, of.what.values().cloned().collect()));
        listed.collect()
    }

    /// Returns the last reports of one node, or of all.
    pub(crate) fn list(&self, node: Option<u64>, now_ns: u64) -> Vec<ShardNode> {
        let listed = self.nodes.chosen(node).map(|(node, reported)| ShardNode {
            node,
            incarnation: reported.incarnation,
            age_ns: reported.age_ns(now_ns),
            shards: reported.what.values().cloned().collect(),
        });
        listed.collect()
    }

    /// Returns the bytes of the pools and SSDs of a node's shards; none unless all of them have reported in this
    /// incarnation.
    pub(crate) fn room_of(&self, node: u64, incarnation: u64, shards: usize) -> Option<u64> {
        if shards == 0 {
            return Some(0);
        }
        let (_, reported) = self.nodes.chosen(Some(node)).find(|(_, reported)| reported.incarnation == incarnation)?;
        let bytes = |shard: &ShardFigures| shard.pool.bytes.saturating_add(shard.ssd.map_or(0, |ssd| ssd.bytes));
        let all = reported.what.values().map(bytes).fold(0, u64::saturating_add);
        (reported.what.len() >= shards).then_some(all)
    }

    /// Keeps only the incarnations that `keep` accepts.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.nodes.retain(&keep);
        self.hot.retain(&keep);
    }
}

#[cfg(test)]
mod tests {
    use kvplane_rpc::message::{HotFigures, ObjectFigures, PoolFigures, SsdFigures};

    use super::*;

    /// Only the second shard has one.
    fn ssd(shard: u16) -> Option<SsdFigures> {
        (shard == 1).then(|| SsdFigures { bytes: 1000, ..SsdFigures::default() })
    }

    #[test]
    fn hot_objects_are_listed_by_node_within_limits_and_end_with_their_incarnation() {
        let hot = HotFigures { digest: 5, gets: 6, bytes: 7 };
        let names = vec![ObjectFigures { digest: 5, tenant: Vec::new(), key: vec![b'k'; NAME_PER_REPORT_BYTES] }];
        let shard = HotShard { shard: 1, over_ns: 8, hot: vec![hot; HOT_PER_REPORT], names };
        assert!(Shards::is_sound(&shard));
        let many = HotShard { hot: vec![hot; HOT_PER_REPORT + 1], ..shard.clone() };
        let long = ObjectFigures { digest: 5, tenant: Vec::new(), key: vec![b'k'; NAME_PER_REPORT_BYTES + 1] };
        assert!(!Shards::is_sound(&many) && !Shards::is_sound(&HotShard { names: vec![long], ..shard.clone() }));
        let mut shards = Shards::default();
        shards.report_hot(ReportHot { node: 7, incarnation: 1, shard: shard.clone() }, 10);
        assert_eq!(shards.list_hot(Some(7)), [(7, vec![shard])]);
        assert!(shards.list_hot(Some(8)).is_empty());
        shards.retain(|_, incarnation| incarnation == 2);
        assert!(shards.list_hot(None).is_empty());
    }

    #[test]
    fn reports_add_up_by_shard_and_end_with_their_incarnation() {
        let pool = PoolFigures { bytes: 100, ..PoolFigures::default() };
        let report = |incarnation, shard, objects| ReportShard {
            node: 7,
            incarnation,
            shard: ShardFigures { shard, objects, pool, ssd: ssd(shard), ..ShardFigures::default() },
        };
        let mut shards = Shards::default();
        shards.report(report(1, 0, 5), 10);
        assert_eq!((shards.room_of(7, 1, 1), shards.room_of(7, 1, 2)), (Some(100), None), "one has not said");
        assert_eq!((shards.room_of(8, 1, 1), shards.room_of(8, 1, 0)), (None, Some(0)));
        shards.report(report(1, 1, 6), 20);
        shards.report(report(1, 0, 7), 30);
        assert_eq!((shards.room_of(7, 1, 2), shards.room_of(7, 2, 2)), (Some(1200), None), "another incarnation");
        let listed = shards.list(Some(7), 50);
        let objects: Vec<u64> = listed[0].shards.iter().map(|shard| shard.objects).collect();
        assert_eq!((listed[0].age_ns, objects), (20, vec![7, 6]));
        assert!(shards.list(Some(8), 50).is_empty());
        shards.report(report(2, 0, 1), 60);
        assert_eq!(shards.list(None, 60)[0].shards.len(), 1);
        shards.retain(|_, incarnation| incarnation == 1);
        assert!(shards.list(None, 60).is_empty());
    }
}
