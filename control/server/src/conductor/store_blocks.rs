//! Blocks in this cluster's store: feeds the Conductor with shards' events of objects whose keys are those of blocks.
//!
//! Events are followed from the first registration of an instance on. An object counts as present while it is in memory
//! or on an SSD of its shard. A new model causes a snapshot, since its blocks were not indexed before.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane_conductor::engine::keys::{BlockKey, read_key};
use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectMedium};
use kvplane_rpc::codec::decode;
use kvplane_rpc::message::{EventReport, Events, NodeEvents};
use tokio::time::sleep;

use super::host::ConductorHost;
use crate::cluster::ClusterHost;

/// Most indexed blocks, about 200 bytes each; schedulers do not see further ones.
const BLOCKS: usize = 1 << 20;
/// Wait before the subscription to events is retried.
const RETRY: Duration = Duration::from_secs(1);

/// A block in the store.
struct Block {
    tenant: String,
    key: BlockKey,
    /// Media that hold it, one bit each.
    media: u8,
}

/// Contents of stores, part by part.
#[derive(Default)]
pub(super) struct StoreState {
    /// Blocks, by part and object.
    blocks: HashMap<(u64, u128), Block>,
    /// Object of a block, by the block's hash; the latest one if several tenants or models have that hash.
    objects: HashMap<u64, (u64, u128)>,
}

/// Change for the Conductor: tenant, block, and whether it is present.
pub(super) type Change = (String, BlockKey, bool);

/// Media, as bits.
pub(super) const MEMORY: u8 = 1;
pub(super) const SSD: u8 = 2;

impl StoreState {
    /// Drops everything known of a part.
    pub(super) fn void(&mut self, part: u64) {
        self.blocks.retain(|(of, _), _| *of != part);
        self.objects.retain(|_, (of, _)| *of != part);
    }

    /// Returns the object in this cluster's store that holds a tenant's block of a model, if known.
    pub(super) fn object(&self, tenant: &str, model: &str, hash: u64) -> Option<Digest> {
        let name = self.objects.get(&hash)?;
        let block = self.blocks.get(name)?;
        let named = block.key.model == model || model.rsplit('/').next() == Some(block.key.model.as_str());
        (block.tenant == tenant && named).then_some(Digest(name.1))
    }

    /// Records that an object is stored; `block` returns its tenant and block.
    pub(super) fn stored(
        &mut self,
        name: (u64, u128),
        media: u8,
        block: impl FnOnce() -> Option<(String, BlockKey)>,
    ) -> Option<Change> {
        if let Some(known) = self.blocks.get_mut(&name) {
            known.media |= media;
            return None;
        }
        if self.blocks.len() >= BLOCKS {
            return None;
        }
        let (tenant, key) = block()?;
        self.blocks.insert(name, Block { tenant: tenant.clone(), key: key.clone(), media });
        self.objects.insert(key.hash, name);
        Some((tenant, key, true))
    }

    /// Records that an object was removed from media.
    pub(super) fn removed(&mut self, name: (u64, u128), media: u8) -> Option<Change> {
        let known = self.blocks.get_mut(&name)?;
        known.media &= !media;
        if known.media != 0 {
            return None;
        }
        let Block { tenant, key, .. } = self.blocks.remove(&name)?;
        if self.objects.get(&key.hash) == Some(&name) {
            self.objects.remove(&key.hash);
        }
        Some((tenant, key, false))
    }

    /// Records that all objects of a part were removed from media.
    pub(super) fn cleared(&mut self, part: u64, media: u8, changes: &mut Vec<Change>) {
        self.blocks.retain(|(of, _), block| {
            block.media &= if *of == part { !media } else { u8::MAX };
            if block.media == 0 {
                changes.push((block.tenant.clone(), block.key.clone(), false));
            }
            block.media != 0
        });
        let blocks = &self.blocks;
        self.objects.retain(|_, name| blocks.contains_key(name));
    }

    /// Returns all blocks, by part, as additions.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Change)> {
        self.blocks.iter().map(|((part, _), block)| (*part, (block.tenant.clone(), block.key.clone(), true)))
    }

    /// Applies a shard's report; returns whether its former blocks are void, and the changes.
    fn take(&mut self, shard: u64, report: NodeEvents) -> (bool, Vec<Change>) {
        let void = matches!(report.part, EventReport::SnapshotBegins | EventReport::Gone) || report.lost > 0;
        if void {
            self.void(shard);
        }
        let names = report.names.into_iter().filter_map(|name| {
            let key = read_key(std::str::from_utf8(&name.key).ok()?)?;
            Some((name.at, (String::from_utf8(name.tenant).ok()?, key)))
        });
        let mut names: HashMap<u32, (String, BlockKey)> = names.collect();
        let mut changes = Vec::new();
        for (at, event) in report.events.into_iter().enumerate() {
            let media = match event.medium {
                ObjectMedium::Memory => MEMORY,
                ObjectMedium::Ssd => SSD,
            };
            let name = (shard, event.digest.0);
            match event.change {
                ObjectChange::Stored => changes.extend(self.stored(name, media, || names.remove(&(at as u32)))),
                ObjectChange::Removed => changes.extend(self.removed(name, media)),
                ObjectChange::Cleared => self.cleared(shard, media, &mut changes),
            }
        }
        (void, changes)
    }
}

/// Known blocks of this cluster's store, by its events. The lock protects them alone.
#[derive(Default)]
pub(crate) struct StoreBlocks {
    known: Mutex<StoreState>,
}

impl StoreBlocks {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        // The state is consistent between reports.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the objects that hold those of a tenant's blocks of a model that are known to be stored.
    pub(super) fn objects(&self, tenant: &str, model: &str, hashes: &[u64]) -> Vec<Digest> {
        let known = self.lock();
        hashes.iter().filter_map(|hash| known.object(tenant, model, *hash)).collect()
    }
}

/// Follows the store's events until the control plane ends.
pub(crate) async fn follow(host: Arc<ConductorHost>, blocks: Arc<StoreBlocks>, cluster: Arc<ClusterHost>) {
    let mut fresh = host.models();
    // The host lives as long as this task.
    if *fresh.borrow_and_update() == 0 && fresh.changed().await.is_err() {
        return;
    }
    loop {
        let Ok(mut events) = cluster.watch_events() else {
            sleep(RETRY).await;
            continue;
        };
        // A snapshot of every shard comes first.
        *blocks.lock() = StoreState::default();
        let mut shards = BTreeSet::new();
        loop {
            tokio::select! {
                item = events.recv() => {
                    let Some(frame) = item else { break };
                    // The frame was encoded by this process.
                    let Ok(Events { events }) = decode::<Events>(&frame) else { continue };
                    let shard = events.node << 16 ^ u64::from(events.shard);
                    let (void, changes) = blocks.lock().take(shard, events);
                    shards.insert(shard);
                    host.store_changed(shard, void, &changes);
                }
                Ok(()) = fresh.changed() => cluster.want_snapshot(),
            }
        }
        // The task did not keep up, so its stream was closed.
        shards.into_iter().for_each(|shard| host.store_changed(shard, true, &[]));
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::events::ObjectEvent;
    use kvplane_rpc::message::EventName;

    use super::*;

    fn event(change: ObjectChange, medium: ObjectMedium, digest: u128) -> ObjectEvent {
        ObjectEvent { change, medium, digest: Digest(digest), bytes: 5 }
    }

    fn report(part: EventReport, events: Vec<ObjectEvent>, keys: &[&str]) -> NodeEvents {
        let name =
            |(at, key): (usize, &&str)| EventName { at: at as u32, tenant: Vec::new(), key: key.as_bytes().to_vec() };
        let names = keys.iter().enumerate().map(name).collect();
        NodeEvents { node: 7, incarnation: 1, shard: 2, part, first: 1, lost: 0, events, names }
    }

    #[test]
    fn a_block_is_indexed_until_no_medium_holds_it() {
        use ObjectChange::{Cleared, Removed, Stored};
        use ObjectMedium::{Memory, Ssd};
        let mut known = StoreState::default();
        let key = "m@tp_rank:0@00000000000000000000000000000005";
        let mut take = |part, events, keys: &[&str]| {
            let (void, changes) = known.take(1, report(part, events, keys));
            (void, changes.into_iter().map(|(_, key, there)| (key.hash, there)).collect::<Vec<_>>())
        };
        let live = EventReport::Live;
        let both = vec![event(Stored, Memory, 9), event(Stored, Memory, 8)];
        assert_eq!(take(live, both, &[key, "no block"]), (false, vec![(5, true)]));
        assert_eq!(take(live, vec![event(Stored, Ssd, 9), event(Removed, Memory, 9)], &[]), (false, vec![]));
        assert_eq!(take(live, vec![event(Removed, Ssd, 9)], &[]), (false, vec![(5, false)]));
        assert_eq!(take(live, vec![event(Removed, Ssd, 9)], &[]), (false, vec![]));
        take(live, vec![event(Stored, Memory, 9)], &[key]);
        assert_eq!(take(live, vec![event(Cleared, Memory, 0)], &[]), (false, vec![(5, false)]));
        assert_eq!(take(EventReport::Gone, vec![], &[]), (true, vec![]));
    }

    #[test]
    fn the_object_of_a_block_is_known_while_the_block_is_stored() {
        use ObjectChange::{Cleared, Removed, Stored};
        use ObjectMedium::Memory;
        let mut known = StoreState::default();
        let key = "m@tp_rank:0@00000000000000000000000000000005";
        let mut after = |part, change| {
            known.take(1, report(part, vec![event(change, Memory, 9)], &[key]));
            let of = |tenant, model, hash| known.object(tenant, model, hash);
            assert_eq!((of("other", "m", 5), of("", "n", 5), of("", "m", 6)), (None, None, None));
            assert_eq!(of("", "org/m", 5), of("", "m", 5));
            of("", "m", 5)
        };
        let there = Some(Digest(9));
        assert_eq!(after(EventReport::Live, Stored), there);
        assert_eq!(after(EventReport::Live, Removed), None);
        assert_eq!(after(EventReport::Live, Stored), there);
        assert_eq!(after(EventReport::Live, Cleared), None);
        assert_eq!(after(EventReport::Live, Stored), there);
        assert_eq!(after(EventReport::SnapshotBegins, Stored), there);
        assert_eq!(after(EventReport::Gone, Removed), None);
    }
}
