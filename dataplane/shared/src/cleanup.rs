//! Cleanup: packs, and streams of shards that are gone, that are not needed any more.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::ShardKey;

use crate::config::SharedConfig;
use crate::format::{PackRow, Stream, manifest_number};
use crate::index::Index;
use crate::types::ListedObject;

/// Time beyond the lifetime for which abandoned streams are kept, in milliseconds: clocks are read at different times.
const LONGER_MS: u64 = 3_600_000;

/// Returns true if a stream is of this shard, in any of its incarnations: they share one limit.
pub(crate) fn is_of(shard: ShardKey, mine: ShardKey) -> bool {
    (shard.node, shard.shard) == (mine.node, mine.shard)
}

/// Returns true if a pack of a former incarnation may be deleted: the takeovers from that one are over.
pub(crate) const fn is_settled(pack: &PackRow, now_ms: u64) -> bool {
    now_ms.saturating_sub(pack.written_ms) > LONGER_MS
}

/// Returns the packs whose lifetime is over, and the oldest packs of this shard beyond its limit, those of its former
/// incarnations first.
pub(crate) fn outdated(index: &Index, config: &SharedConfig, mine: ShardKey, now_ms: u64) -> Vec<PackRow> {
    let SharedConfig { lifetime_ms, most_bytes, .. } = *config;
    let (mut dropped, mut own): (Vec<PackRow>, Vec<PackRow>) = (Vec::new(), Vec::new());
    for state in index.packs().filter(|state| !state.is_gone) {
        let is_old = lifetime_ms > 0 && now_ms.saturating_sub(state.pack.written_ms) > lifetime_ms;
        if is_old {
            dropped.push(state.pack);
        } else if is_of(state.pack.shard, mine) {
            own.push(state.pack);
        }
    }
    own.sort_by_key(|pack| (pack.shard.incarnation, pack.number));
    let mut bytes: u64 = own.iter().map(|pack| pack.bytes).sum();
    for pack in own {
        if most_bytes == 0 || bytes <= most_bytes {
            break;
        }
        bytes -= pack.bytes;
        dropped.push(pack);
    }
    dropped
}

/// Returns the names of objects of streams whose shards are not `members` any more, and whose lifetime is over: of each
/// the manifests first, so that nothing counts any more, and the rest with the next list.
pub(crate) fn abandoned(
    listed: &[ListedObject],
    own: Stream,
    members: &BTreeSet<(NodeId, Incarnation)>,
    config: &SharedConfig,
    now_ms: u64,
) -> Vec<String> {
    let mut streams: BTreeMap<Stream, Vec<(&ListedObject, bool)>> = BTreeMap::new();
    for one in listed {
        if let Some((stream, rest)) = Stream::parse(own.cluster, &one.name) {
            streams.entry(stream).or_default().push((one, manifest_number(rest).is_some()));
        }
    }
    let mut names = Vec::new();
    for (stream, objects) in streams {
        let ShardKey { node, incarnation, .. } = stream.shard;
        let is_live = stream.state == own.state && members.contains(&(node, incarnation));
        let newest_ms = objects.iter().map(|(one, _)| one.written_ms).max().unwrap_or(now_ms);
        if is_live || now_ms.saturating_sub(newest_ms) <= config.lifetime_ms.saturating_add(LONGER_MS) {
            continue;
        }
        let has_manifest = objects.iter().any(|(_, is_manifest)| *is_manifest);
        let over = objects.into_iter().filter(|(_, is_manifest)| *is_manifest || !has_manifest);
        names.extend(over.map(|(one, _)| one.name.clone()));
    }
    names
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::ShardId;

    use super::*;

    fn stream(node: u64) -> Stream {
        let shard = ShardKey { node: NodeId(node), incarnation: Incarnation(9), shard: ShardId(0) };
        Stream { cluster: 1, state: 2, shard }
    }

    #[test]
    fn streams_of_shards_that_are_gone_lose_their_manifests_first() {
        let config = SharedConfig { lifetime_ms: 1000, ..SharedConfig::default() };
        let one = |name: String, written_ms| ListedObject { name, bytes: 1, written_ms };
        let (old, now_ms) = (5, 10_000_000);
        let all = |with_manifest: bool| {
            let mut all = vec![one(stream(1).pack(1), old), one(stream(1).manifest(1), old)];
            all.extend([one(stream(2).pack(1), old), one(stream(2).checkpoint(1), old)]);
            all.extend(with_manifest.then(|| one(stream(2).manifest(3), old)));
            all.extend([one(stream(3).pack(1), old), one(stream(3).manifest(1), now_ms)]);
            all
        };
        let members = BTreeSet::from([(NodeId(1), Incarnation(9))]);
        let over = |with_manifest| abandoned(&all(with_manifest), stream(1), &members, &config, now_ms);
        assert_eq!(over(true), [stream(2).manifest(3)]);
        assert_eq!(over(false), [stream(2).pack(1), stream(2).checkpoint(1)]);
    }

    #[test]
    fn old_packs_and_the_oldest_beyond_the_limit_are_dropped() {
        let mut index = Index::default();
        let (mine, other) = (stream(1).shard, stream(2).shard);
        for (shard, number, written_ms) in [(mine, 1, 0), (mine, 2, 5000), (mine, 3, 6000), (other, 1, 7000)] {
            index.add_pack(PackRow { shard, number, bytes: 100, written_ms }, shard != mine);
        }
        let numbers = |config: &SharedConfig| -> Vec<u64> {
            outdated(&index, config, mine, 7000).iter().map(|pack| pack.number).collect()
        };
        let config = SharedConfig { lifetime_ms: 6500, most_bytes: 0, ..SharedConfig::default() };
        assert_eq!(numbers(&config), [1]);
        assert_eq!(numbers(&SharedConfig { most_bytes: 150, ..config }), [1, 2]);
        // One limit for all incarnations of a shard.
        let before = ShardKey { incarnation: Incarnation(8), ..mine };
        index.add_pack(PackRow { shard: before, number: 9, bytes: 100, written_ms: 900 }, true);
        let numbers = |config: &SharedConfig| -> Vec<u64> {
            outdated(&index, config, mine, 7000).iter().map(|pack| pack.number).collect()
        };
        assert_eq!(numbers(&SharedConfig { most_bytes: 250, ..config }), [1, 9]);
        assert_eq!(numbers(&SharedConfig { most_bytes: 150, ..config }), [1, 9, 2]);
        assert_eq!(numbers(&SharedConfig { lifetime_ms: 0, ..config }), [0; 0]);
    }
}
