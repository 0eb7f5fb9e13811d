//! Instances: they come, say what they hold and how busy they are, are doubted, and go.
//!
//! Numbers of instances are used again once their instance is gone, so tables are as long as the most instances that
//! there were at one time.

use std::sync::Arc;

use super::books::{DecodeBook, PrefillBook};
use super::{Conductor, ConductorError, Request, Reservation};
use crate::index::{ContextId, HolderId, Tier};

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

/// Instances that a request must not go to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExcludedInstances {
    /// Numbers of prefill instances.
    pub prefill: Arc<[u32]>,
    /// Numbers of decode instances.
    pub decode: Arc<[u32]>,
}

/// The longest time that is believed of an instance that says how much it has to do.
const MOST_FOREIGN_NS: u64 = 3_600_000_000_000;

impl Conductor {
    /// A new prefill instance; its number.
    ///
    /// # Errors
    /// When there are too many.
    pub fn add_prefill(&mut self) -> Result<usize, ConductorError> {
        let holder = self.index.register()?;
        let routed = match self.routed.register() {
            Ok(routed) => routed,
            Err(error) => {
                self.index.retire(holder)?;
                return Err(error.into());
            }
        };
        let book = PrefillBook::new(holder, routed);
        // A number is free once its instance is gone: what was booked there went with it.
        let at = match self.prefill.iter().position(|book| !book.alive) {
            Some(at) => {
                self.prefill[at] = book;
                at
            }
            None => {
                self.prefill.push(book);
                self.prefill.len() - 1
            }
        };
        self.note_slots(at);
        Ok(at)
    }

    fn note_slots(&mut self, at: usize) {
        let book = &self.prefill[at];
        self.by_slot[usize::from(book.holder.slot())] = at as u32;
        self.routed_by_slot[usize::from(book.routed.slot())] = at as u32;
    }

    /// A new decode instance with room for `capacity` tokens of KV cache; its number.
    pub fn add_decode(&mut self, capacity: u64) -> usize {
        let book = DecodeBook::new(capacity);
        match self.decode.iter().position(|book| !book.alive) {
            Some(at) => {
                self.decode[at] = book;
                at
            }
            None => {
                self.decode.push(book);
                self.decode.len() - 1
            }
        }
    }

    /// The holder that a prefill instance is in the index.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn holder(&self, instance: usize) -> Result<HolderId, ConductorError> {
        Ok(self.instance(instance)?.holder)
    }

    /// The prefill instance that a holder of the index is, if it is one.
    #[must_use]
    pub fn instance_of(&self, holder: HolderId) -> Option<usize> {
        let at = *self.by_slot.get(usize::from(holder.slot()))? as usize;
        self.prefill.get(at).filter(|book| book.alive && book.holder == holder).map(|_| at)
    }

    /// An instance has blocks that others can fetch.
    ///
    /// # Errors
    /// Unknown instance or context.
    pub fn stored(&mut self, instance: usize, context: ContextId, hashes: &[u64]) -> Result<(), ConductorError> {
        self.stored_in(instance, context, Tier::Dram, None, hashes)
    }

    /// An instance has blocks in `tier`, after the block `parent` where that is known.
    ///
    /// # Errors
    /// Unknown instance or context.
    pub fn stored_in(
        &mut self,
        instance: usize,
        context: ContextId,
        tier: Tier,
        parent: Option<u64>,
        hashes: &[u64],
    ) -> Result<(), ConductorError> {
        let holder = self.instance(instance)?.holder;
        self.index.stored(context, holder, tier, parent, hashes)?;
        Ok(())
    }

    /// An instance no longer has blocks.
    ///
    /// # Errors
    /// Unknown instance or context.
    pub fn removed(&mut self, instance: usize, context: ContextId, hashes: &[u64]) -> Result<(), ConductorError> {
        self.removed_from(instance, context, Tier::Dram, hashes)
    }

    /// An instance no longer has blocks in `tier`.
    ///
    /// # Errors
    /// Unknown instance or context.
    pub fn removed_from(
        &mut self,
        instance: usize,
        context: ContextId,
        tier: Tier,
        hashes: &[u64],
    ) -> Result<(), ConductorError> {
        let holder = self.instance(instance)?.holder;
        self.index.removed(context, holder, tier, hashes)?;
        Ok(())
    }

    /// An instance has nothing any more, in no tier and no context.
    ///
    /// # Errors
    /// Unknown instance, or no room for it to begin anew.
    pub fn cleared(&mut self, instance: usize) -> Result<(), ConductorError> {
        let former = self.instance(instance)?.holder;
        self.index.retire(former)?;
        let holder = self.index.register();
        // One slot was just given back, so there is one; if not, the instance holds nothing for good.
        self.prefill[instance].holder = holder?;
        self.note_slots(instance);
        Ok(())
    }

    /// Whether a prefill instance gets new requests; what it has goes on.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn set_prefill_takes(&mut self, instance: usize, takes: bool) -> Result<(), ConductorError> {
        let book = self.prefill.get_mut(instance).filter(|book| book.alive);
        book.ok_or(ConductorError::UnknownInstance { instance })?.takes = takes;
        Ok(())
    }

    /// Whether a decode instance gets new requests; what it has goes on.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn set_decode_takes(&mut self, instance: usize, takes: bool) -> Result<(), ConductorError> {
        let book = self.decode.get_mut(instance).filter(|book| book.alive);
        book.ok_or(ConductorError::UnknownInstance { instance })?.takes = takes;
        Ok(())
    }

    /// What a prefill instance says it has to do. What is booked there is never counted less for it, so that who says
    /// too little is not preferred, and not more than an hour is believed.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn prefill_load(&mut self, instance: usize, load: Foreign) -> Result<(), ConductorError> {
        let book = self.prefill.get_mut(instance).filter(|book| book.alive);
        let book = book.ok_or(ConductorError::UnknownInstance { instance })?;
        let others = u32::try_from(load.queued_tokens.saturating_sub(book.uncached)).unwrap_or(u32::MAX);
        let predicted_ns = if others == 0 { 0 } else { self.model.predict_ns(others, 0) };
        book.foreign_ns = predicted_ns.min(MOST_FOREIGN_NS);
        Ok(())
    }

    /// What a decode instance says it has to do; as [`Self::prefill_load`].
    ///
    /// # Errors
    /// Unknown instance.
    pub fn decode_load(&mut self, instance: usize, load: Foreign) -> Result<(), ConductorError> {
        let book = self.decode.get_mut(instance).filter(|book| book.alive);
        let book = book.ok_or(ConductorError::UnknownInstance { instance })?;
        let (tokens, requests) = book.booked();
        let most = u64::from(u32::MAX);
        let others = load.decode_tokens.saturating_sub(tokens).min(most);
        book.foreign = (others, load.decodes.saturating_sub(requests).min(1 << 20));
        Ok(())
    }

    /// A prefill instance is lost: its blocks are forgotten, and its requests that were not prefilled come back. The
    /// caller schedules them again, with their old arrival times.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn lose_prefill(&mut self, instance: usize) -> Result<Vec<Request>, ConductorError> {
        let book = self.prefill.get_mut(instance).filter(|book| book.alive);
        let book = book.ok_or(ConductorError::UnknownInstance { instance })?;
        book.alive = false;
        self.index.retire(book.holder)?;
        self.routed.retire(book.routed)?;
        Ok(self.take_back(|kept| kept.placement.prefill == instance && !kept.prefilled))
    }

    /// A decode instance is lost: its requests come back, prefilled or not.
    ///
    /// # Errors
    /// Unknown instance.
    pub fn lose_decode(&mut self, instance: usize) -> Result<Vec<Request>, ConductorError> {
        let book = self.decode.get_mut(instance).filter(|book| book.alive);
        book.ok_or(ConductorError::UnknownInstance { instance })?.alive = false;
        Ok(self.take_back(|kept| kept.placement.decode == Some(instance)))
    }

    fn take_back(&mut self, lost: impl Fn(&Reservation) -> bool) -> Vec<Request> {
        let ids: Vec<u64> = self.booked.iter().filter(|(_, kept)| lost(kept)).map(|(id, _)| *id).collect();
        // They were just found, and an index that lost the instance needs nothing taken out.
        ids.into_iter().filter_map(|id| self.withdraw(id).ok()).collect()
    }
}
