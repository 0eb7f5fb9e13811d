//! What one instance says of its cache: numbered batches, gaps that are asked for again, snapshots; and how far it is
//! believed.
//!
//! A batch that leaves a gap changes nothing: its publisher is told from which number on to repeat. Who cannot repeat
//! says that something is lost; then the instance holds nothing until it says so again, so that nobody is sent to
//! where blocks may be gone, and counts as degraded until a snapshot.

use crate::index::Tier;

/// The most changes of a batch.
pub(super) const MOST_CHANGES: usize = 65_536;
/// After how long without reach of what it publishes an instance that promised no reports is not chosen any more.
pub const AWAY_DOUBTED_NS: u64 = 15_000_000_000;
/// After how long it is taken to hold nothing.
pub const AWAY_FORGOTTEN_NS: u64 = 60_000_000_000;
/// How often in a row an instance may have much less cached than it said.
const BROKEN: u32 = 4;

/// Changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheBatch {
    /// Its number: one more than that of the batch before.
    pub seq: u64,
    /// What kind of batch this is.
    pub change: CacheChange,
    /// What changed, in order.
    pub events: Vec<CacheEvent>,
}

/// What kind of batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheChange {
    /// Follows the one before.
    Goes,
    /// Begins with an empty cache: everything that is there follows, in this batch and the next ones.
    Snapshot,
    /// Batches before it are lost for good.
    Lost,
}

/// A change of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks are there.
    Stored {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// What else their hashes depend on; empty for nothing.
        salt: String,
        /// Where.
        tier: Tier,
        /// The block before the first, where there is one.
        parent: Option<u64>,
        /// Rolling hashes, in the order of the prompt.
        hashes: Vec<u64>,
    },
    /// Blocks are there no more.
    Removed {
        /// The LoRA adapter.
        lora: String,
        /// What else their hashes depend on.
        salt: String,
        /// Where; everywhere where that is not said.
        tier: Option<Tier>,
        /// Their hashes.
        hashes: Vec<u64>,
    },
    /// Nothing is there.
    Cleared,
}

/// What the publisher of a batch is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The number of the batch that comes next.
    pub next: u64,
    /// What is wanted besides.
    pub wanted: CacheRequest,
}

/// What is wanted of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRequest {
    /// Nothing.
    Nothing,
    /// The batches from [`Ack::next`] on, again; or a word that they are lost.
    Replay,
    /// Everything, anew, when it can.
    Snapshot,
}

/// What becomes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchOutcome {
    /// It was taken before.
    Duplicate(Ack),
    /// Batches are missing before it: it changes nothing.
    Gap(Ack),
    /// Its changes are to be made.
    Taken {
        /// What its publisher is told.
        ack: Ack,
        /// Whether what was known of the cache goes first.
        clears: bool,
        /// Whether it is the first word of this cache.
        begins: bool,
    },
}

/// How what is known of an instance's cache follows what it says.
#[derive(Clone, Debug, Default)]
pub(super) struct CacheFeed {
    /// The number of the next batch of events.
    next: Option<u64>,
    /// Whether something of its cache is not known.
    degraded: bool,
    /// True once its cache was reported or followed.
    reported: bool,
    /// Whether nobody reaches what it publishes.
    away: bool,
    /// Times in a row that it had much less cached than it said.
    broken: u32,
    /// Whether it was seen to hash otherwise than it should.
    alien: bool,
}

impl CacheFeed {
    /// Of an instance that registers; `reported` says that it is followed.
    pub(super) fn new(reported: bool) -> Self {
        Self { reported, ..Self::default() }
    }

    /// Of an instance that goes on after a restart of the Conductor: what it holds is not known if it reported that.
    pub(super) fn restored(reported: bool, prefills: bool) -> Self {
        Self { reported, degraded: reported && prefills, ..Self::default() }
    }

    /// Whether nothing is known of the cache: a snapshot is wanted.
    pub(super) const fn is_fresh(&self) -> bool {
        self.next.is_none()
    }

    pub(super) const fn is_reported(&self) -> bool {
        self.reported
    }

    pub(super) const fn is_away(&self) -> bool {
        self.away
    }

    pub(super) const fn is_alien(&self) -> bool {
        self.alien
    }

    /// Whether something of the cache is not known, or may not be.
    pub(super) const fn is_incomplete(&self) -> bool {
        self.degraded || self.away
    }

    /// Looks at a batch, and says what is to be done with it.
    pub(super) fn take(&mut self, batch: &CacheBatch) -> BatchOutcome {
        let first = self.next.is_none();
        let begins = !std::mem::replace(&mut self.reported, true);
        let next = self.next.unwrap_or(batch.seq);
        let clears = match batch.change {
            CacheChange::Snapshot => {
                self.degraded = false;
                true
            }
            // What was known goes: some of it may be gone. What was not known at all is no worse than before.
            CacheChange::Lost if batch.seq >= next => {
                self.degraded = true;
                true
            }
            CacheChange::Goes | CacheChange::Lost if batch.seq < next => {
                return BatchOutcome::Duplicate(Ack { next, wanted: CacheRequest::Nothing });
            }
            _ if batch.seq > next => {
                self.degraded = true;
                return BatchOutcome::Gap(Ack { next, wanted: CacheRequest::Replay });
            }
            // The first batches are numbered 0 or 1; what came before others is not known. Where something was missing
            // already, only number 0 says that nothing came before.
            _ => {
                if first {
                    self.degraded = batch.seq > u64::from(!self.degraded);
                }
                false
            }
        };
        let next = batch.seq.wrapping_add(1);
        self.next = Some(next);
        // From there on all is known again, whatever was lost before.
        if batch.events.contains(&CacheEvent::Cleared) {
            self.degraded = false;
        }
        let wanted = if self.degraded { CacheRequest::Snapshot } else { CacheRequest::Nothing };
        BatchOutcome::Taken { ack: Ack { next, wanted }, clears, begins }
    }

    /// Whether what it publishes is within reach; true where that is new.
    pub(super) fn set_away(&mut self, away: bool) -> bool {
        std::mem::replace(&mut self.away, away) != away
    }

    /// It is taken to hold nothing, and its events begin anew; true where something of a cache was known. It may hold
    /// what it held, and is degraded until that is known again, also when it is within reach.
    pub(super) fn forget(&mut self, prefills: bool) -> bool {
        let forgets = self.next.take().is_some() && prefills;
        self.degraded |= forgets;
        forgets
    }

    /// Whether it hashes as it should; true where that is new.
    pub(super) fn set_alien(&mut self, alien: bool) -> bool {
        std::mem::replace(&mut self.alien, alien) != alien
    }

    /// A prompt of which it had said to have so many tokens had so many cached; true where it is not believed any more.
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

    fn batch(seq: u64, change: CacheChange) -> CacheBatch {
        CacheBatch { seq, change, events: Vec::new() }
    }

    fn taken(next: u64, wanted: CacheRequest, clears: bool, begins: bool) -> BatchOutcome {
        BatchOutcome::Taken { ack: Ack { next, wanted }, clears, begins }
    }

    #[test]
    fn gaps_change_nothing_and_what_is_lost_wants_a_snapshot() {
        use CacheChange::{Goes, Lost, Snapshot};
        let mut feed = CacheFeed::new(false);
        assert!(feed.is_fresh() && !feed.is_reported());
        assert_eq!(feed.take(&batch(1, Goes)), taken(2, CacheRequest::Nothing, false, true));
        assert_eq!(feed.take(&batch(1, Goes)), BatchOutcome::Duplicate(Ack { next: 2, wanted: CacheRequest::Nothing }));
        assert_eq!(feed.take(&batch(4, Goes)), BatchOutcome::Gap(Ack { next: 2, wanted: CacheRequest::Replay }));
        assert!(feed.is_incomplete());
        assert_eq!(feed.take(&batch(4, Lost)), taken(5, CacheRequest::Snapshot, true, false));
        assert_eq!(feed.take(&batch(5, Snapshot)), taken(6, CacheRequest::Nothing, true, false));
        assert!(!feed.is_incomplete());
    }

    #[test]
    fn only_number_0_proves_that_nothing_came_before_where_something_was_missing() {
        for (seq, is_incomplete) in [(0, false), (1, true), (2, true)] {
            let mut feed = CacheFeed::restored(true, true);
            feed.take(&batch(seq, CacheChange::Goes));
            assert_eq!(feed.is_incomplete(), is_incomplete, "from {seq} on");
        }
        let mut feed = CacheFeed::restored(true, false);
        assert!(!feed.is_incomplete(), "who only decodes has no cache that counts");
        assert!(!feed.forget(false));
    }

    #[test]
    fn who_is_away_for_long_holds_nothing_and_is_degraded_when_it_is_back() {
        let mut feed = CacheFeed::new(true);
        feed.take(&batch(0, CacheChange::Goes));
        assert!(feed.set_away(true) && !feed.set_away(true) && feed.is_incomplete());
        assert!(feed.forget(true) && !feed.forget(true));
        assert!(feed.set_away(false) && feed.is_incomplete() && feed.is_fresh());
    }

    #[test]
    fn who_has_not_what_it_said_four_times_in_a_row_is_not_believed() {
        let mut feed = CacheFeed::new(true);
        let said: Vec<bool> = [10, 60, 10, 10, 10, 10].map(|reused| feed.note_reuse(100, reused)).into();
        assert_eq!(said, [false, false, false, false, false, true]);
        assert!(feed.is_incomplete());
    }
}
