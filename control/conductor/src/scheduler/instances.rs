//! Instances of a scheduler: addition, cache events, load reports, exclusion and loss.

use super::error::SchedulerError;
use super::reservations::Reservation;
use super::{Request, Scheduler};
use crate::cost::DecodeSteps;
use crate::index::{ContextId, HolderId, Tier};

/// Numbers of an instance: one for each phase that it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceNumbers {
    /// Number among the prefill instances.
    pub prefill: Option<usize>,
    /// Number among the decode instances.
    pub decode: Option<usize>,
}

/// Load that an instance reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Foreign {
    /// Tokens of prompts that wait there or are being prefilled, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// Number of these requests.
    pub decodes: u32,
    /// Decode steps since its last report.
    pub steps: DecodeSteps,
}

/// Maximum plausible work in a load report.
const MOST_FOREIGN_NS: u64 = 3_600_000_000_000;

impl Scheduler {
    /// Adds a prefill instance; returns its number.
    ///
    /// # Errors
    /// When there are too many holders.
    pub fn add_prefill(&mut self) -> Result<usize, SchedulerError> {
        let holder = self.caches.register()?;
        let at = self.bookings.add_prefill();
        self.caches.enter(at, holder);
        Ok(at)
    }

    /// Adds a decode instance with a capacity of `capacity` tokens of KV cache; returns its number. `prefill` is its
    /// number among the prefill instances, if it prefills too: a request that it does both for is not handed over.
    pub fn add_decode(&mut self, capacity: u64, prefill: Option<usize>) -> usize {
        self.bookings.add_decode(capacity, prefill)
    }

    /// Returns the holder of a prefill instance in the index.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn holder(&self, instance: usize) -> Result<HolderId, SchedulerError> {
        self.caches.holder(instance)
    }

    /// Returns the prefill instance of a holder in the index, if it is an instance.
    #[must_use]
    pub fn instance_of(&self, holder: HolderId) -> Option<usize> {
        self.caches.instance_of(holder)
    }

    /// Notes that an instance has blocks in `tier`, after the block `parent` if that is known.
    ///
    /// # Errors
    /// When the instance or context is unknown.
    pub fn stored(
        &mut self,
        instance: usize,
        context: ContextId,
        tier: Tier,
        parent: Option<u64>,
        hashes: &[u64],
    ) -> Result<(), SchedulerError> {
        let holder = self.caches.holder(instance)?;
        self.caches.index().stored(context, holder, tier, parent, hashes)?;
        Ok(())
    }

    /// Notes that an instance no longer has blocks in `tier`.
    ///
    /// # Errors
    /// When the instance or context is unknown.
    pub fn removed(
        &mut self,
        instance: usize,
        context: ContextId,
        tier: Tier,
        hashes: &[u64],
    ) -> Result<(), SchedulerError> {
        let holder = self.caches.holder(instance)?;
        self.caches.index().removed(context, holder, tier, hashes)?;
        Ok(())
    }

    /// Drops all blocks of an instance, in every tier and context.
    ///
    /// # Errors
    /// When the instance is unknown, or its holder cannot be registered again.
    pub fn cleared(&mut self, instance: usize) -> Result<(), SchedulerError> {
        self.caches.clear(instance)
    }

    /// Sets whether an instance gets new requests; its present ones continue.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn set_takes(&mut self, instance: InstanceNumbers, takes: bool) -> Result<(), SchedulerError> {
        if let Some(at) = instance.prefill {
            self.bookings.prefill(at)?.takes = takes;
        }
        if let Some(at) = instance.decode {
            self.bookings.decode(at)?.takes = takes;
        }
        Ok(())
    }

    /// Notes the load report of an instance. Bookings there never count less because of it, so that an instance that
    /// reports too little is not preferred; of prefills, at most an hour of work is believed.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn report_load(&mut self, instance: InstanceNumbers, load: Foreign) -> Result<(), SchedulerError> {
        if let Some(at) = instance.prefill {
            let book = self.bookings.prefill(at)?;
            let others = u32::try_from(load.queued_tokens.saturating_sub(book.uncached)).unwrap_or(u32::MAX);
            let predicted_ns = if others == 0 { 0 } else { self.model.predict_ns(others, 0) };
            book.foreign_ns = predicted_ns.min(MOST_FOREIGN_NS);
        }
        if let Some(at) = instance.decode {
            let book = self.bookings.decode(at)?;
            let (tokens, requests) = book.booked();
            let most = u64::from(u32::MAX);
            let others = load.decode_tokens.saturating_sub(tokens).min(most);
            book.foreign = (others, load.decodes.saturating_sub(requests).min(1 << 20));
            let usual = self.bookings.usual_decode_factor();
            self.decodes.learn_steps(self.bookings.decode(at)?, usual, &load.steps, true);
        }
        Ok(())
    }

    /// Removes a lost prefill instance with its blocks, and returns its requests that were not prefilled, with those of
    /// its pipeline group. The caller schedules them again, with their old arrival times.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn lose_prefill(&mut self, instance: usize) -> Result<Vec<Request>, SchedulerError> {
        self.bookings.prefill(instance)?.alive = false;
        self.caches.lose(instance)?;
        self.sessions.lose(instance);
        self.groups.leave(instance);
        Ok(self.take_back(|kept| kept.placement.involves(instance) && !kept.prefilled))
    }

    /// Removes a lost decode instance, and returns its requests, prefilled or not.
    ///
    /// # Errors
    /// When the instance is unknown.
    pub fn lose_decode(&mut self, instance: usize) -> Result<Vec<Request>, SchedulerError> {
        self.bookings.decode(instance)?.alive = false;
        Ok(self.take_back(|kept| kept.placement.decode == Some(instance)))
    }

    fn take_back(&mut self, lost: impl Fn(&Reservation) -> bool) -> Vec<Request> {
        let ids = self.reservations.ids_where(lost);
        // The reservations were found above, and the index has already dropped the blocks of the lost instance.
        ids.into_iter().filter_map(|id| self.withdraw(id).ok()).collect()
    }
}
