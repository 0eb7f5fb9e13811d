//! Cache feed of one instance: numbered batches, replay of gaps, snapshots; and the trust in its reports.
//!
//! A batch after a gap changes nothing: its publisher is asked to replay from the first missing number. A publisher
//! that cannot replay reports a loss; then the index drops the instance's blocks until they are reported again, so that
//! no request is placed on blocks that may be gone, and the instance counts as degraded until a snapshot.

use bincode::{Decode, Encode};

use super::error::{ConductorError, bad};
use crate::index::BlockTier;

/// Maximum number of changes in a batch.
const MOST_CHANGES: usize = 65_536;
/// Time without a connection to its publisher after which an instance that reports no load is excluded, in nanoseconds.
pub const AWAY_SUSPECT_NS: u64 = 15_000_000_000;
/// Time without a connection after which the index drops the instance's blocks, in nanoseconds.
pub const AWAY_FORGOTTEN_NS: u64 = 60_000_000_000;
/// Number of consecutive prompts with far fewer cached tokens than reported after which an instance is not believed.
const BROKEN: u32 = 4;

/// Batch of changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CacheBatch {
    /// Number of the batch: one more than that of the previous one.
    pub seq: u64,
    /// Kind of the batch.
    pub kind: CacheReport,
    /// Changes, in order.
    pub changes: Vec<BlockChange>,
}

/// Kind of a batch. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheReport {
    /// Follows the previous batch.
    Goes,
    /// Begins with an empty cache: the whole contents follow, in this batch and the next ones.
    Snapshot,
    /// Batches before this one are lost for good.
    Lost,
}

/// Change of an instance's cache. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum BlockChange {
    /// Blocks were stored.
    Stored {
        /// LoRA adapter; empty for none.
        lora: String,
        /// Other inputs of the hashes; empty for none.
        salt: String,
        /// Tier that they were stored in.
        tier: BlockTier,
        /// Hash of the block before the first one, if there is one.
        parent: Option<u64>,
        /// Rolling hashes, in the order of the prompt.
        hashes: Vec<u64>,
    },
    /// Blocks were removed.
    Removed {
        /// LoRA adapter.
        lora: String,
        /// Other inputs of the hashes.
        salt: String,
        /// Tier that they were removed from; all tiers if unknown.
        tier: Option<BlockTier>,
        /// Hashes of the blocks.
        hashes: Vec<u64>,
    },
    /// The cache was cleared.
    Cleared,
    /// Blocks were stored whose tokens are known.
    StoredTokens(StoredTokens),
}

/// Blocks that were stored, with their contents: they are found by tokens, whatever the engine's hash scheme. Their
/// engine hashes depend on adapter and salt already.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct StoredTokens {
    /// Tier that they were stored in.
    pub tier: BlockTier,
    /// Engine hash of the block before the first one, if there is one.
    pub parent: Option<u64>,
    /// Engine hashes, in the order of the prompt.
    pub hashes: Vec<u64>,
    /// Contents, one for each hash: see [`crate::engine::tokens`].
    pub contents: Vec<u64>,
    /// Number of tokens of the last block if it is partial; 0 if it is full.
    pub part_tokens: u32,
}

impl StoredTokens {
    /// Checks that it describes blocks of `block_tokens` tokens.
    fn check(&self, block_tokens: u32) -> Result<(), ConductorError> {
        let Self { hashes, contents, part_tokens, .. } = self;
        if hashes.len() != contents.len() {
            return Err(bad(format!("{} hashes with {} contents; one each", hashes.len(), contents.len())));
        }
        if *part_tokens >= block_tokens || (*part_tokens > 0 && hashes.is_empty()) {
            return Err(bad(format!("a partial block of {part_tokens} tokens, in blocks of {block_tokens}")));
        }
        Ok(())
    }
}

impl CacheBatch {
    /// Checks a batch of an instance whose blocks have `block_tokens` tokens.
    pub(super) fn check(&self, block_tokens: u32) -> Result<(), ConductorError> {
        if self.changes.len() > MOST_CHANGES {
            return Err(bad(format!("{} changes in a batch; at most {MOST_CHANGES}", self.changes.len())));
        }
        self.changes.iter().try_for_each(|change| match change {
            BlockChange::StoredTokens(stored) => stored.check(block_tokens),
            _ => Ok(()),
        })
    }
}

/// Answer to the publisher of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CacheTaken {
    /// Number of the next batch.
    pub next: u64,
    /// Further request to the publisher.
    pub wanted: CacheWanted,
}

/// Request to a publisher. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheWanted {
    /// No request.
    Nothing,
    /// Replay the batches from [`CacheTaken::next`] on, or report that they are lost.
    Replay,
    /// Send a snapshot, when possible.
    Snapshot,
}

/// Outcome of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchOutcome {
    /// It was accepted before.
    Duplicate(CacheTaken),
    /// Batches before it are missing: it changes nothing.
    Gap(CacheTaken),
    /// Its changes are to be applied.
    Taken {
        /// Answer to the publisher.
        ack: CacheTaken,
        /// True if the instance's blocks are dropped from the index before.
        clears: bool,
        /// True if it is the first report of this cache.
        begins: bool,
    },
}

/// State of an instance's cache feed.
#[derive(Clone, Debug, Default)]
pub(super) struct CacheFeed {
    /// Number of the next batch of events; none while nothing is known of the cache.
    next: Option<u64>,
    /// True while the cache is not completely known: batches are missing, or it was never reported in full.
    degraded: bool,
    /// True once the cache was reported or followed.
    reported: bool,
    /// True while there is no connection to its publisher.
    away: bool,
    /// Number of consecutive prompts with far fewer cached tokens than reported.
    broken: u32,
    /// True if it has blocks that are found by its hashes only, since it was last cleared.
    by_hash_only: bool,
}

impl CacheFeed {
    /// Creates the feed of an instance that registers; `reported` is true if its publisher is followed.
    pub(super) fn new(reported: bool) -> Self {
        Self { reported, ..Self::default() }
    }

    /// Creates the feed of an instance that is restored after a restart of the Conductor: its cache is unknown if it
    /// had reported one.
    pub(super) fn restored(reported: bool, prefills: bool) -> Self {
        Self { reported, degraded: reported && prefills, ..Self::default() }
    }

    /// Returns true if nothing is known of the cache: a snapshot is needed.
    pub(super) const fn is_fresh(&self) -> bool {
        self.next.is_none()
    }

    pub(super) const fn is_reported(&self) -> bool {
        self.reported
    }

    pub(super) const fn is_away(&self) -> bool {
        self.away
    }

    pub(super) const fn is_by_hash_only(&self) -> bool {
        self.by_hash_only
    }

    /// Returns true if the cache is not, or may not be, completely known.
    pub(super) const fn is_incomplete(&self) -> bool {
        self.degraded || self.away
    }

    /// Examines a batch, and returns its outcome.
    pub(super) fn take(&mut self, batch: &CacheBatch) -> BatchOutcome {
        let first = self.next.is_none();
        let begins = !std::mem::replace(&mut self.reported, true);
        let next = self.next.unwrap_or(batch.seq);
        let clears = match batch.kind {
            CacheReport::Snapshot => {
                self.degraded = false;
                true
            }
            // Known blocks are dropped: some may be gone. A cache that was unknown is no worse than before.
            CacheReport::Lost if batch.seq >= next => {
                self.degraded = true;
                true
            }
            CacheReport::Goes | CacheReport::Lost if batch.seq < next => {
                return BatchOutcome::Duplicate(CacheTaken { next, wanted: CacheWanted::Nothing });
            }
            _ if batch.seq > next => {
                self.degraded = true;
                return BatchOutcome::Gap(CacheTaken { next, wanted: CacheWanted::Replay });
            }
            // The first batches are numbered 0 or 1; blocks stored before later numbers are unknown. If the feed was
            // degraded already, only number 0 proves that no batch precedes it.
            _ => {
                if first {
                    self.degraded = batch.seq > u64::from(!self.degraded);
                }
                false
            }
        };
        let next = batch.seq.wrapping_add(1);
        self.next = Some(next);
        // After a clear, the whole cache is known again, whatever was lost before.
        let empties = batch.changes.contains(&BlockChange::Cleared);
        self.degraded &= !empties;
        self.by_hash_only &= !(empties || clears);
        let wanted = if self.degraded { CacheWanted::Snapshot } else { CacheWanted::Nothing };
        BatchOutcome::Taken { ack: CacheTaken { next, wanted }, clears, begins }
    }

    /// Sets whether its publisher is unreachable; returns true if that changed.
    pub(super) fn set_away(&mut self, away: bool) -> bool {
        std::mem::replace(&mut self.away, away) != away
    }

    /// Drops everything known of the cache, and restarts its events; returns true if anything was known. The instance
    /// may still hold its blocks, and is degraded until they are known again, even once its publisher is reachable.
    pub(super) fn forget(&mut self, prefills: bool) -> bool {
        let forgets = self.next.take().is_some() && prefills;
        self.by_hash_only &= !forgets;
        self.degraded |= forgets;
        forgets
    }

    /// Notes that it has blocks that are found by its hashes only.
    pub(super) fn set_by_hash_only(&mut self) {
        self.by_hash_only = true;
    }

    /// Compares the reported tokens of a prompt with the reused ones; returns true if the instance is no longer
    /// believed.
    pub(super) fn note_reuse(&mut self, said_tokens: u32, reused_tokens: u32) -> bool {
        self.broken = if reused_tokens < said_tokens / 2 { self.broken + 1 } else { 0 };
        if self.broken < BROKEN {
            return false;
        }
        (self.broken, self.degraded) = (0, true);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(seq: u64, kind: CacheReport) -> CacheBatch {
        CacheBatch { seq, kind, changes: Vec::new() }
    }

    fn taken(next: u64, wanted: CacheWanted, clears: bool, begins: bool) -> BatchOutcome {
        BatchOutcome::Taken { ack: CacheTaken { next, wanted }, clears, begins }
    }

    #[test]
    fn gaps_change_nothing_and_losses_request_a_snapshot() {
        use CacheReport::{Goes, Lost, Snapshot};
        let mut feed = CacheFeed::new(false);
        assert!(feed.is_fresh() && !feed.is_reported());
        assert_eq!(feed.take(&batch(1, Goes)), taken(2, CacheWanted::Nothing, false, true));
        assert_eq!(
            feed.take(&batch(1, Goes)),
            BatchOutcome::Duplicate(CacheTaken { next: 2, wanted: CacheWanted::Nothing })
        );
        assert_eq!(feed.take(&batch(4, Goes)), BatchOutcome::Gap(CacheTaken { next: 2, wanted: CacheWanted::Replay }));
        assert!(feed.is_incomplete());
        assert_eq!(feed.take(&batch(4, Lost)), taken(5, CacheWanted::Snapshot, true, false));
        assert_eq!(feed.take(&batch(5, Snapshot)), taken(6, CacheWanted::Nothing, true, false));
        assert!(!feed.is_incomplete());
    }

    #[test]
    fn only_batch_0_proves_that_a_degraded_feed_is_complete() {
        for (seq, is_incomplete) in [(0, false), (1, true), (2, true)] {
            let mut feed = CacheFeed::restored(true, true);
            feed.take(&batch(seq, CacheReport::Goes));
            assert_eq!(feed.is_incomplete(), is_incomplete, "from {seq} on");
        }
        let mut feed = CacheFeed::restored(true, false);
        assert!(!feed.is_incomplete(), "the cache of a decode instance does not count");
        assert!(!feed.forget(false));
    }

    #[test]
    fn unreachable_publisher_is_forgotten_and_degraded_after_its_return() {
        let mut feed = CacheFeed::new(true);
        feed.take(&batch(0, CacheReport::Goes));
        assert!(feed.set_away(true) && !feed.set_away(true) && feed.is_incomplete());
        assert!(feed.forget(true) && !feed.forget(true));
        assert!(feed.set_away(false) && feed.is_incomplete() && feed.is_fresh());
    }

    #[test]
    fn four_consecutive_false_reports_are_not_believed() {
        let mut feed = CacheFeed::new(true);
        let said: Vec<bool> = [10, 60, 10, 10, 10, 10].map(|reused| feed.note_reuse(100, reused)).into();
        assert_eq!(said, [false, false, false, false, false, true]);
        assert!(feed.is_incomplete());
    }
}
