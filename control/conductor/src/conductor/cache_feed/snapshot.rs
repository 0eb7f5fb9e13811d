//! Snapshots of pools: the prefix index, with the position of each instance's cache feed.
//!
//! A snapshot is no proof of anything. A new Conductor takes it after its instances were restored, and hides all of its
//! blocks. An instance's blocks are answered once its publisher has confirmed them; if it does not, they are dropped.

use std::collections::BTreeSet;

use crate::conductor::Conductor;
use crate::conductor::cache_feed::{ConfirmedBy, FeedPosition};
use crate::conductor::pools::{Aliases, PoolKey};
use crate::index::{MAX_HOLDERS, PrefixIndex, Reader, SnapshotError, invalid, put, put_name};

/// First bytes of a snapshot of a pool: "KVPP" and the format's version.
const MAGIC: u64 = 0x0000_0001_5050_564b;

/// Position of an instance in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeptFeed {
    instance: String,
    incarnation: u64,
    /// Slot of its holder in the index.
    slot: u16,
    position: FeedPosition,
}

/// Snapshot of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSnapshot {
    pool: PoolKey,
    feeds: Vec<KeptFeed>,
    /// Aliases of the blocks, as they are written.
    aliases: Vec<u8>,
    /// Snapshot of the index, without its checksum.
    index: Vec<u8>,
}

impl PoolSnapshot {
    /// Returns the key of the pool.
    #[must_use]
    pub const fn pool(&self) -> &PoolKey {
        &self.pool
    }

    /// Returns the snapshot as bytes. They have no checksum: their host adds one.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.index.len() + 64 + self.feeds.len() * 96);
        put(&mut out, MAGIC);
        put_name(&mut out, &self.pool.tenant);
        put_name(&mut out, &self.pool.model);
        put(&mut out, u64::from(self.pool.block_tokens));
        put(&mut out, self.feeds.len() as u64);
        for KeptFeed { instance, incarnation, slot, position } in &self.feeds {
            put_name(&mut out, instance);
            put(&mut out, *incarnation);
            let flags = u64::from(position.degraded)
                | u64::from(position.mark.is_some()) << 1
                | u64::from(position.by_hash_only) << 2;
            put(&mut out, u64::from(*slot) << 8 | flags);
            put(&mut out, position.next);
            let mark = position.mark.unwrap_or(0);
            put(&mut out, mark as u64);
            put(&mut out, (mark >> 64) as u64);
        }
        put(&mut out, self.aliases.len() as u64);
        out.extend_from_slice(&self.aliases);
        out.extend_from_slice(&self.index);
        out
    }

    /// Reads a snapshot.
    ///
    /// # Errors
    /// When the bytes are of another format, end too soon, or have a value out of range.
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let mut reader = Reader::new(bytes);
        reader.format(MAGIC)?;
        let (tenant, model) = (reader.name()?, reader.name()?);
        let block_tokens = u32::try_from(reader.word()?).map_err(|_| invalid("tokens of a block", u64::MAX))?;
        let mut feeds = Vec::new();
        for _ in 0..reader.count("instances", MAX_HOLDERS)? {
            let (instance, incarnation) = (reader.name()?, reader.word()?);
            let word = reader.word()?;
            let slot = u16::try_from(word >> 8).map_err(|_| invalid("a holder's slot", word >> 8))?;
            let next = reader.word()?;
            let mark = u128::from(reader.word()?) | u128::from(reader.word()?) << 64;
            let mark = (word & 2 != 0).then_some(mark);
            let (degraded, by_hash_only) = (word & 1 != 0, word & 4 != 0);
            let position = FeedPosition { next, mark, degraded, by_hash_only };
            feeds.push(KeptFeed { instance, incarnation, slot, position });
        }
        let slots: BTreeSet<u16> = feeds.iter().map(|feed| feed.slot).collect();
        if slots.len() < feeds.len() {
            return Err(invalid("the number of different holders", slots.len() as u64));
        }
        let length = reader.count("bytes of aliases", bytes.len())?;
        let from = reader.at();
        reader.skip(length)?;
        let aliases = bytes[from..from + length].to_vec();
        let index = bytes[reader.at()..].to_vec();
        Ok(Self { pool: PoolKey { tenant, model, block_tokens }, feeds, aliases, index })
    }

    /// Returns the pools of a Conductor, each with the number of batches of cache events that have changed its index:
    /// if the number has not changed, neither has what a snapshot would hold of its instances.
    #[must_use]
    pub fn changes(conductor: &Conductor) -> Vec<(PoolKey, u64)> {
        conductor.pools.iter().map(|(_, pool)| (pool.key.clone(), pool.batches)).collect()
    }

    /// Takes a snapshot of a pool, in time and size proportional to the blocks of its index; none if there is no such
    /// pool, or nothing is known of its instances' caches.
    #[must_use]
    pub fn take(conductor: &mut Conductor, key: &PoolKey) -> Option<Self> {
        let number = conductor.pools.find(key)?;
        let pool = conductor.pools.get_mut(number)?;
        let mut feeds = Vec::new();
        for (name, known) in conductor.instances.iter().filter(|(_, known)| known.pool == number) {
            let holder = known.numbers.prefill.and_then(|at| pool.scheduler.holder(at).ok());
            let Some((holder, position)) = holder.zip(known.cache.position()) else { continue };
            let (instance, incarnation) = (name.to_string(), known.spec.incarnation);
            feeds.push(KeptFeed { instance, incarnation, slot: holder.slot(), position });
        }
        if feeds.is_empty() {
            return None;
        }
        let mut aliases = Vec::new();
        pool.aliases().put(&mut aliases);
        Some(Self { pool: key.clone(), feeds, aliases, index: pool.index().snapshot_body() })
    }

    /// Makes a Conductor take over the index, whose instances were restored and which has served no call yet. Blocks
    /// are kept of instances that are registered in the same incarnation, and are hidden until they are confirmed: of
    /// an instance that reports by calls, by its reports; of one that is followed, by [`FollowedFeed::confirm`], if its
    /// events can be replayed. Returns the number of instances whose blocks are kept; 0 if no instance of that model is
    /// registered any more.
    ///
    /// [`FollowedFeed::confirm`]: crate::conductor::FollowedFeed::confirm
    ///
    /// # Errors
    /// When the snapshot is damaged or exceeds a limit; its pool remains empty then.
    pub fn adopt(self, conductor: &mut Conductor) -> Result<usize, SnapshotError> {
        let Self { pool: key, feeds, aliases, index } = self;
        let Some(number) = conductor.pools.find(&key) else { return Ok(0) };
        let mut kept = Vec::new();
        for feed in feeds {
            let Some(known) = conductor.instances.get(&feed.instance) else { continue };
            let is_same = known.pool == number && known.spec.incarnation == feed.incarnation;
            let by = match &known.spec.events {
                None => ConfirmedBy::Reports,
                Some(source) if !source.replay.is_empty() && feed.position.mark.is_some() => ConfirmedBy::Host,
                Some(_) => continue,
            };
            if let Some(at) = known.numbers.prefill.filter(|_| is_same && known.cache.is_fresh()) {
                kept.push((at, by, feed));
            }
        }
        let Some(pool) = conductor.pools.get_mut(number).filter(|_| !kept.is_empty()) else { return Ok(0) };
        let limits = conductor.config.scheduler.index;
        let mut index = PrefixIndex::restore_body(limits, &index)?;
        let mut reader = Reader::new(&aliases);
        let aliases = Aliases::read(&mut reader, limits.max_blocks, limits.seed)?;
        let slots: Vec<u16> = kept.iter().map(|(_, _, feed)| feed.slot).collect();
        let mut holders = Vec::new();
        for ((at, _, feed), holder) in kept.iter().zip(index.hide_and_retire(&slots)) {
            let holder = holder.ok_or_else(|| invalid("the slot of no holder", u64::from(feed.slot)))?;
            holders.push((*at, holder));
        }
        let (value, most) = (pool.instances as u64, limits.max_holders as u64);
        pool.adopt_index(index, &holders, aliases).map_err(|_| SnapshotError::TooLarge {
            what: "holders",
            value,
            most,
        })?;
        for (_, by, feed) in &kept {
            // The instance was found above.
            if let Ok(cache) = conductor.instances.feed(&feed.instance, feed.incarnation) {
                cache.keep(feed.position, *by);
            }
        }
        Ok(kept.len())
    }
}
