//! Feed of an instance whose publisher the host follows: what the host knows of it beside its batches.

use crate::conductor::Conductor;
use crate::conductor::cache_feed::FeedPosition;
use crate::conductor::error::ConductorError;

/// Feed of an instance that the host follows, in one incarnation.
#[derive(Clone, Copy, Debug)]
pub struct FollowedFeed<'a> {
    instance: &'a str,
    incarnation: u64,
}

impl<'a> FollowedFeed<'a> {
    /// Names the feed of an instance.
    #[must_use]
    pub const fn of(instance: &'a str, incarnation: u64) -> Self {
        Self { instance, incarnation }
    }

    /// Returns the position of a snapshot from which the events continue, if the restored blocks of the instance wait
    /// for their confirmation.
    #[must_use]
    pub fn unconfirmed(self, conductor: &mut Conductor) -> Option<FeedPosition> {
        conductor.instances.feed(self.instance, self.incarnation).ok()?.unconfirmed_position()
    }

    /// Notes the digest of the batch that was applied last. After a restart, the digest proves that the publisher has
    /// not restarted.
    ///
    /// # Errors
    /// When the instance is not registered in this incarnation.
    pub fn set_mark(self, conductor: &mut Conductor, mark: u128) -> Result<(), ConductorError> {
        conductor.instances.feed(self.instance, self.incarnation)?.set_mark(mark);
        Ok(())
    }

    /// Notes that the publisher has published all batches before number `newest`: the instance is degraded until they
    /// are applied.
    ///
    /// # Errors
    /// When the instance is not registered in this incarnation.
    pub fn note_published(self, conductor: &mut Conductor, newest: u64) -> Result<(), ConductorError> {
        conductor.instances.feed(self.instance, self.incarnation)?.note_published(newest);
        Ok(())
    }

    /// Answers the restored blocks from now on: the publisher is in the same incarnation, and everything that it
    /// published after the snapshot was applied. Does nothing if they do not wait for it.
    ///
    /// # Errors
    /// When the instance is not registered in this incarnation.
    pub fn confirm(self, conductor: &mut Conductor) -> Result<(), ConductorError> {
        conductor.instances.settle(self.instance, self.incarnation, true, &mut conductor.pools)
    }

    /// Drops the restored blocks: the publisher has restarted, or no longer has the batches that followed the snapshot.
    /// Does nothing if they do not wait for a confirmation.
    ///
    /// # Errors
    /// When the instance is not registered in this incarnation.
    pub fn drop_unconfirmed(self, conductor: &mut Conductor) -> Result<(), ConductorError> {
        conductor.instances.settle(self.instance, self.incarnation, false, &mut conductor.pools)
    }
}
