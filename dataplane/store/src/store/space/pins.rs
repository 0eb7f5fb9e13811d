//! Pins of objects after their puts: soft pins, and retentions, which are hard pins that end.

use core::fmt;

use kvplane_proto::digest::Digest;
use kvplane_proto::message::ObjectPriority;

use super::Space;
use crate::entry::{EntryId, Mark};
use crate::eviction::EvictionPolicy;
use crate::order::RETENTIONS_MOST;

/// Reason why an object is not pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinError {
    /// There is no such object in memory.
    NotFound,
    /// The object is in the device pool, where nothing is pinned.
    OnDevice,
    /// The object does not fit within the limit of hard pins.
    PinLimit {
        /// Bytes that are hard pinned.
        pinned_bytes: u64,
        /// Bytes that may be.
        limit_bytes: u64,
        /// True if it is the limit of the tenant, false if it is the shard's.
        of_tenant: bool,
    },
    /// The object belongs to as many retentions as it may.
    TooManyRetentions,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("there is no such object in memory"),
            Self::OnDevice => f.write_str("the object is in the device pool; it has to move to memory first"),
            Self::PinLimit { pinned_bytes, limit_bytes, of_tenant } => {
                let whose = if *of_tenant { "the tenant's" } else { "all" };
                write!(f, "{pinned_bytes} bytes of {whose} hard pins, of at most {limit_bytes}: release some")
            }
            Self::TooManyRetentions => write!(f, "the object belongs to {RETENTIONS_MOST} retentions: release some"),
        }
    }
}

impl core::error::Error for PinError {}

/// Pins of a store's objects that are set and ended after their puts, with an eviction policy of type `P`.
pub struct ObjectPins<'a, P> {
    pub(in crate::store) space: &'a mut Space<P>,
}

impl<P: EvictionPolicy> ObjectPins<'_, P> {
    /// Gives an object a soft pin of this duration from now, in place of one that it has; 0 ends it.
    ///
    /// # Errors
    /// `NotFound` or `OnDevice`.
    pub fn pin_softly(&mut self, digest: Digest, duration_ns: u64) -> Result<(), PinError> {
        let id = self.find(digest)?;
        let Space { order, objects, .. } = &mut *self.space;
        order.pin_softly(objects.entries_mut(), id, duration_ns);
        Ok(())
    }

    /// Sets the priority of an object, in memory or in the device pool. Its soft pin and retentions go before.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_priority(&mut self, digest: Digest, priority: ObjectPriority) -> Result<(), PinError> {
        let Space { order, objects, .. } = &mut *self.space;
        let id = objects.find(digest).ok_or(PinError::NotFound)?;
        order.set_priority(objects.entries_mut(), id, priority);
        Ok(())
    }

    /// Adds an object to a retention of its tenant, which lasts for this duration from now at least.
    ///
    /// # Errors
    /// See [`PinError`]; then nothing changes.
    pub fn retain(&mut self, digest: Digest, number: u64, duration_ns: u64) -> Result<(), PinError> {
        let id = self.find(digest)?;
        self.retain_one(id, number, duration_ns)
    }

    /// Adds the objects of a tenant's group to a retention of the tenant with the number of the group; returns their
    /// number. Objects that are put into the group later do not belong to it.
    ///
    /// # Errors
    /// See [`PinError`]; objects that were added before stay.
    pub fn retain_group(&mut self, account: u16, group: u64, duration_ns: u64) -> Result<u64, PinError> {
        let members = self.space.order.group(account, group);
        for id in &members {
            self.retain_one(*id, group, duration_ns)?;
        }
        Ok(members.len() as u64)
    }

    /// Makes a tenant's retention last for this duration from now at least; returns the number of its objects.
    pub fn renew(&mut self, account: u16, number: u64, duration_ns: u64) -> u64 {
        let Space { order, objects, .. } = &mut *self.space;
        order.renew(objects.entries_mut(), account, number, duration_ns) as u64
    }

    /// Ends a tenant's retention; returns the number of its objects.
    pub fn release(&mut self, account: u16, number: u64) -> u64 {
        let Space { order, objects, .. } = &mut *self.space;
        order.release(objects.entries_mut(), account, number) as u64
    }

    /// Adds a live object to a retention, within the limits of hard pins.
    fn retain_one(&mut self, id: EntryId, number: u64, duration_ns: u64) -> Result<(), PinError> {
        let entry = &self.space.objects.entries()[id];
        let (granules, account, is_hard) = (entry.granules(), entry.account() as u16, entry.is(Mark::Hard));
        if !is_hard
            && !self.space.may_pin(granules, account)
            && let Some((pinned_bytes, limit_bytes, of_tenant)) =
                self.space.order.tenants_mut().refused_pin(granules, account)
        {
            return Err(PinError::PinLimit { pinned_bytes, limit_bytes, of_tenant });
        }
        let Space { order, objects, .. } = &mut *self.space;
        match order.retain(objects.entries_mut(), id, number, duration_ns) {
            true => Ok(()),
            false => Err(PinError::TooManyRetentions),
        }
    }

    fn find(&self, digest: Digest) -> Result<EntryId, PinError> {
        let objects = &self.space.objects;
        let id = objects.find(digest).ok_or(PinError::NotFound)?;
        if objects.entries()[id].is_on_device() { Err(PinError::OnDevice) } else { Ok(id) }
    }
}
