//! Cache feed of one instance: numbered batches, replay of gaps, snapshots; and the trust in its reports.
//!
//! A batch after a gap changes nothing: its publisher is asked to replay from the first missing number. A publisher
//! that cannot replay reports a loss; then the index drops the instance's blocks until they are reported again, so that
//! no request is placed on blocks that may be gone, and the instance counts as degraded until a snapshot.
//!
//! After a restart the blocks of a snapshot are kept, and hidden, until the publisher has confirmed them: it is in the
//! same incarnation, and what followed the snapshot was applied.

pub(super) mod followed;
pub(super) mod snapshot;

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
    /// Blocks moved from one tier to another. One that the index does not know in the former tier of this instance
    /// stays unknown: its hash alone does not tell how many tokens it covers.
    Moved {
        /// Tier that they were in.
        from: BlockTier,
        /// Tier that they are in now.
        to: BlockTier,
        /// Engine hashes of the blocks.
        hashes: Vec<u64>,
    },
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
        /// True if the instance's restored blocks may be answered from now on.
        confirms: bool,
    },
}

/// Proof that the restored blocks of an instance wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfirmedBy {
    /// Its reports, which carry its incarnation, reach the newest one.
    Reports,
    /// The host has compared the last applied batch with its publisher's, and has applied the following ones.
    Host,
}

/// Position of a cache feed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeedPosition {
    /// Number of the next batch.
    pub next: u64,
    /// Digest of the batch before it, if its publisher is followed.
    pub mark: Option<u128>,
    /// True if the cache was not completely known at this position.
    pub degraded: bool,
    /// True if it had blocks that are found by its hashes only.
    pub by_hash_only: bool,
}

/// Progress of a cache feed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeedProgress {
    /// Number of the next batch to apply: all before it are applied, or lost.
    pub next: u64,
    /// Number after the newest batch that is known to be published: above `next` if batches are missing.
    pub newest: u64,
    /// True while its blocks are those of a snapshot of an earlier process, which are not answered.
    pub unconfirmed: bool,
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
    /// True until its publisher was reached for the first time and has replayed what it still has: blocks that it has
    /// removed since may count until then.
    catches_up: bool,
    /// Number after the newest batch that is known to be published; 0 while none is known.
    newest: u64,
    /// Digest of the batch before `next`, if its publisher is followed.
    mark: Option<u128>,
    /// Proof that its restored blocks wait for; none if they are confirmed, or were not restored.
    unconfirmed: Option<ConfirmedBy>,
    /// Number of consecutive prompts with far fewer cached tokens than reported.
    broken: u32,
    /// True if it has blocks that are found by its hashes only, since it was last cleared.
    by_hash_only: bool,
}

impl CacheFeed {
    /// Creates the feed of an instance that registers; `followed` is true if its publisher is followed.
    pub(super) fn new(followed: bool, prefills: bool) -> Self {
        Self { reported: followed, catches_up: followed && prefills, ..Self::default() }
    }

    /// Creates the feed of an instance that is restored after a restart of the Conductor: its cache is unknown if it
    /// had reported one.
    pub(super) fn restored(reported: bool, followed: bool, prefills: bool) -> Self {
        Self { reported, degraded: reported && prefills, ..Self::new(followed, prefills) }
    }

    /// Continues at the position of a snapshot, whose blocks are hidden until they are confirmed.
    pub(super) fn keep(&mut self, position: FeedPosition, by: ConfirmedBy) {
        (self.next, self.mark, self.degraded) = (Some(position.next), position.mark, position.degraded);
        (self.by_hash_only, self.unconfirmed) = (position.by_hash_only, Some(by));
    }

    /// Returns the position, if anything is known of the cache.
    pub(super) fn position(&self) -> Option<FeedPosition> {
        let (next, mark) = (self.next?, self.mark);
        Some(FeedPosition { next, mark, degraded: self.degraded, by_hash_only: self.by_hash_only })
    }

    /// Returns the position of a snapshot that the host has to confirm.
    pub(super) fn unconfirmed_position(&self) -> Option<FeedPosition> {
        self.position().filter(|_| self.unconfirmed == Some(ConfirmedBy::Host))
    }

    /// Returns the progress, of a cache that was ever reported.
    pub(super) fn progress(&self) -> Option<FeedProgress> {
        let next = self.next.unwrap_or(0);
        let (newest, unconfirmed) = (self.newest.max(next), self.unconfirmed.is_some());
        self.reported.then_some(FeedProgress { next, newest, unconfirmed })
    }

    /// Notes the digest of the batch that was applied last.
    pub(super) fn set_mark(&mut self, mark: u128) {
        self.mark = Some(mark);
    }

    /// Notes that the publisher has published all batches before `newest`.
    pub(super) fn note_published(&mut self, newest: u64) {
        self.newest = self.newest.max(newest);
    }

    /// Notes that the host has confirmed the restored blocks; returns true if they were unconfirmed.
    pub(super) fn confirm(&mut self) -> bool {
        self.unconfirmed.take().is_some()
    }

    pub(super) const fn is_unconfirmed(&self) -> bool {
        self.unconfirmed.is_some()
    }

    /// Returns true if published batches are missing.
    fn is_behind(&self) -> bool {
        self.newest > self.next.unwrap_or(0)
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
    pub(super) fn is_incomplete(&self) -> bool {
        self.degraded || self.away || self.catches_up || self.unconfirmed.is_some() || self.is_behind()
    }

    /// Examines a batch, and returns its outcome.
    pub(super) fn take(&mut self, batch: &CacheBatch) -> BatchOutcome {
        let goes_back =
            batch.kind == CacheReport::Goes && self.next.is_some_and(|next| batch.seq.saturating_add(1) < next);
        // An instance repeats at most its last batch unasked: if this one is older, its numbers are not those of the
        // snapshot.
        let drops = goes_back && self.unconfirmed.is_some() && self.forget(true);
        let first = self.next.is_none();
        let begins = !std::mem::replace(&mut self.reported, true);
        let next = self.next.unwrap_or(batch.seq);
        let clears = match batch.kind {
            CacheReport::Snapshot => {
                (self.degraded, self.newest, self.unconfirmed) = (false, 0, None);
                true
            }
            // Known blocks are dropped: some may be gone. A cache that was unknown is no worse than before.
            CacheReport::Lost if batch.seq >= next => {
                (self.degraded, self.unconfirmed) = (true, None);
                true
            }
            CacheReport::Goes | CacheReport::Lost if batch.seq < next => {
                // What follows a snapshot may have reached the former process only.
                let replays = self.unconfirmed.is_some() || self.is_behind();
                let wanted = if replays { CacheWanted::Replay } else { CacheWanted::Nothing };
                return BatchOutcome::Duplicate(CacheTaken { next, wanted });
            }
            _ if batch.seq > next => {
                self.note_published(batch.seq.saturating_add(1));
                return BatchOutcome::Gap(CacheTaken { next, wanted: CacheWanted::Replay });
            }
            // The first batches are numbered 0 or 1; blocks stored before later numbers are unknown. If the feed was
            // degraded already, only number 0 proves that no batch precedes it.
            _ => {
                if first {
                    self.degraded = batch.seq > u64::from(!self.degraded);
                }
                drops
            }
        };
        let next = batch.seq.wrapping_add(1);
        (self.next, self.mark) = (Some(next), None);
        // After a clear, the whole cache is known again, whatever was lost before.
        let empties = batch.changes.contains(&BlockChange::Cleared);
        self.degraded &= !empties;
        self.by_hash_only &= !(empties || clears);
        let confirms = self.unconfirmed == Some(ConfirmedBy::Reports) && !self.is_behind() && self.confirm();
        let wanted = match (self.degraded, self.is_behind()) {
            (true, _) => CacheWanted::Snapshot,
            (false, true) => CacheWanted::Replay,
            (false, false) => CacheWanted::Nothing,
        };
        BatchOutcome::Taken { ack: CacheTaken { next, wanted }, clears, begins, confirms }
    }

    /// Sets whether its publisher is unreachable; returns true if that changed anything. One that is reachable has
    /// replayed what it still has.
    pub(super) fn set_away(&mut self, away: bool) -> bool {
        let caught_up = !away && std::mem::replace(&mut self.catches_up, false);
        std::mem::replace(&mut self.away, away) != away || caught_up
    }

    /// Drops everything known of the cache, and restarts its events; returns true if anything was known. The instance
    /// may still hold its blocks, and is degraded until they are known again, even once its publisher is reachable.
    pub(super) fn forget(&mut self, prefills: bool) -> bool {
        let forgets = self.next.take().is_some() && prefills;
        (self.newest, self.mark, self.unconfirmed) = (0, None, None);
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
        BatchOutcome::Taken { ack: CacheTaken { next, wanted }, clears, begins, confirms: false }
    }

    /// Returns a feed that continues at batch 5 of a snapshot.
    fn kept(by: ConfirmedBy) -> CacheFeed {
        let mut feed = CacheFeed::restored(true, false, true);
        feed.keep(FeedPosition { next: 5, mark: Some(7), ..FeedPosition::default() }, by);
        feed
    }

    #[test]
    fn restored_blocks_are_confirmed_by_the_batch_that_follows_or_by_a_replay_of_all() {
        use CacheReport::Goes;
        let confirmed = |feed: &mut CacheFeed, seq| match feed.take(&batch(seq, Goes)) {
            BatchOutcome::Taken { confirms, clears, .. } => confirms && !clears,
            _ => false,
        };
        let mut feed = kept(ConfirmedBy::Reports);
        assert!(feed.is_incomplete() && !feed.is_fresh());
        assert!(confirmed(&mut feed, 5) && !feed.is_incomplete());
        // Batches 5 to 7 reached the former process only.
        let mut feed = kept(ConfirmedBy::Reports);
        assert_eq!(feed.take(&batch(8, Goes)), BatchOutcome::Gap(CacheTaken { next: 5, wanted: CacheWanted::Replay }));
        assert_eq!(feed.progress(), Some(FeedProgress { next: 5, newest: 9, unconfirmed: true }));
        assert!([5, 6, 7].iter().all(|seq| !confirmed(&mut feed, *seq) && feed.is_incomplete()));
        assert!(confirmed(&mut feed, 8) && !feed.is_incomplete());
        // The last batch before the snapshot, repeated, proves nothing about the following ones.
        let mut feed = kept(ConfirmedBy::Reports);
        let again = CacheTaken { next: 5, wanted: CacheWanted::Replay };
        assert_eq!(feed.take(&batch(4, Goes)), BatchOutcome::Duplicate(again));
        assert!(feed.is_incomplete());
        // The host confirms what it follows.
        let mut feed = kept(ConfirmedBy::Host);
        assert!(!confirmed(&mut feed, 5) && feed.is_incomplete());
        assert!(feed.confirm() && !feed.confirm() && !feed.is_incomplete());
    }

    #[test]
    fn restored_blocks_are_dropped_when_the_numbers_are_not_those_of_the_snapshot() {
        use CacheReport::{Goes, Lost, Snapshot};
        for (seq, kind, is_incomplete) in [(0, Goes, false), (1, Goes, true), (9, Lost, true), (2, Snapshot, false)] {
            let mut feed = kept(ConfirmedBy::Reports);
            let outcome = feed.take(&batch(seq, kind));
            assert!(matches!(outcome, BatchOutcome::Taken { clears: true, confirms: false, .. }), "{seq}: {outcome:?}");
            assert!(!feed.is_unconfirmed(), "{seq}");
            assert_eq!(feed.is_incomplete(), is_incomplete, "{seq}");
        }
    }

    #[test]
    fn gaps_change_nothing_and_losses_request_a_snapshot() {
        use CacheReport::{Goes, Lost, Snapshot};
        let mut feed = CacheFeed::new(false, true);
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
            let mut feed = CacheFeed::restored(true, false, true);
            feed.take(&batch(seq, CacheReport::Goes));
            assert_eq!(feed.is_incomplete(), is_incomplete, "from {seq} on");
        }
        let mut feed = CacheFeed::restored(true, true, false);
        assert!(!feed.is_incomplete(), "the cache of a decode instance does not count");
        assert!(!feed.forget(false));
    }

    #[test]
    fn unreachable_publisher_is_forgotten_and_degraded_after_its_return() {
        let mut feed = CacheFeed::new(true, true);
        feed.take(&batch(0, CacheReport::Goes));
        assert!(feed.is_incomplete(), "its publisher may have removed that block since");
        assert!(feed.set_away(false) && !feed.set_away(false) && !feed.is_incomplete());
        assert!(feed.set_away(true) && !feed.set_away(true) && feed.is_incomplete());
        assert!(feed.forget(true) && !feed.forget(true));
        assert!(feed.set_away(false) && feed.is_incomplete() && feed.is_fresh());
    }

    #[test]
    fn four_consecutive_false_reports_are_not_believed() {
        let mut feed = CacheFeed::new(true, true);
        let said: Vec<bool> = [10, 60, 10, 10, 10, 10].map(|reused| feed.note_reuse(100, reused)).into();
        assert_eq!(said, [false, false, false, false, false, true]);
        assert!(feed.is_incomplete());
    }
}
