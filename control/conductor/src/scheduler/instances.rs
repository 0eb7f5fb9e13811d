//! Instances: they come, say what they hold and how busy they are, are doubted, and go.

use super::error::SchedulerError;
use super::reservations::Reservation;
use super::{Request, Scheduler};
use crate::index::{ContextId, HolderId, Tier};

/// The numbers of an instance: one for each part that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceNumbers {
    /// Among those that prefill.
    pub prefill: Option<usize>,
    /// Among those that decode.
    pub decode: Option<usize>,
}

/// What an instance says that it has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Foreign {
    /// Tokens of prompts that wait there or are computed, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// Those requests.
    pub decodes: u32,
}

/// The longest time that is believed of an instance that says how much it has to do.
const MOST_FOREIGN_NS: u64 = 3_600_000_000_000;

impl Scheduler {
    /// A new prefill instance; its number.
    ///
    /// # Errors
    /// When there are too many.
    pub fn add_prefill(&mut self) -> Result<usize, SchedulerError> {
        let holder = self.caches.register()?;
        let at = self.bookings.add_prefill();
        self.caches.enter(at, holder);
        Ok(at)
    }

    /// A new decode instance with room for `capacity` tokens of KV cache; its number.
    pub fn add_decode(&mut self, capacity: u64) -> usize {
        self.bookings.add_decode(capacity)
    }

    /// The holder that a prefill instance is in the index.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn holder(&self, instance: usize) -> Result<HolderId, SchedulerError> {
        self.caches.holder(instance)
    }

    /// The prefill instance that a holder of the index is, if it is one.
    #[must_use]
    pub fn instance_of(&self, holder: HolderId) -> Option<usize> {
        self.caches.instance_of(holder)
    }

    /// An instance has blocks in `tier`, after the block `parent` where that is known.
    ///
    /// # Errors
    /// Unknown instance or context.
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

    /// An instance no longer has blocks in `tier`.
    ///
    /// # Errors
    /// Unknown instance or context.
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

    /// An instance has nothing any more, in no tier and no context.
    ///
    /// # Errors
    /// Unknown instance, or no room for it to begin anew.
    pub fn cleared(&mut self, instance: usize) -> Result<(), SchedulerError> {
        self.caches.clear(instance)
    }

    /// Whether an instance gets new requests; what it has goes on.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn set_takes(&mut self, instance: InstanceNumbers, takes: bool) -> Result<(), SchedulerError> {
        if let Some(at) = instance.prefill {
            self.bookings.prefill(at)?.takes = takes;
        }
        if let Some(at) = instance.decode {
            self.bookings.decode(at)?.takes = takes;
        }
        Ok(())
    }

    /// What an instance says it has to do. What is booked there is never counted less for it, so that who says too
    /// little is not preferred, and of prefills not more than an hour is believed.
    ///
    /// # Errors
    /// Unknown instance.
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
        }
        Ok(())
    }

    /// A prefill instance is lost: its blocks are forgotten, and its requests that were not prefilled come back. The
    /// caller schedules them again, with their old arrival times.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn lose_prefill(&mut self, instance: usize) -> Result<Vec<Request>, SchedulerError> {
        self.bookings.prefill(instance)?.alive = false;
        self.caches.lose(instance)?;
        Ok(self.take_back(|kept| kept.placement.prefill == instance && !kept.prefilled))
    }

    /// A decode instance is lost: its requests come back, prefilled or not.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn lose_decode(&mut self, instance: usize) -> Result<Vec<Request>, SchedulerError> {
        self.bookings.decode(instance)?.alive = false;
        Ok(self.take_back(|kept| kept.placement.decode == Some(instance)))
    }

    fn take_back(&mut self, lost: impl Fn(&Reservation) -> bool) -> Vec<Request> {
        let ids = self.reservations.ids_where(lost);
        // They were just found, and an index that lost the instance needs nothing taken out.
        ids.into_iter().filter_map(|id| self.withdraw(id).ok()).collect()
    }
}
