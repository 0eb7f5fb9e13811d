//! Whether a put may come now, or never, by what the SSD takes and by what waits for it.

use kvplane_proto::Status;
use kvplane_proto::message::PutAck;

use super::super::Service;
use super::super::objects::reserve_status;
use super::Tiering;
use super::writes::is_for_ssd;
use crate::ReserveError;

impl Service {
    /// Whether the SSD would take an object of so many bytes. A longer one is refused, so that its client puts it in
    /// stripes: else it would be gone when memory drops it. A draft cannot be striped any more; where an answer
    /// promises nothing of the SSD it may be kept in memory alone.
    pub(in crate::service) fn may_be_so_long(
        &self,
        bytes: u64,
        asked: Option<PutAck>,
        is_draft: bool,
    ) -> Result<(), Status> {
        let Some(tiered) = &self.tiered else { return Ok(()) };
        let may_stay_in_memory = is_draft && tiered.policy.ack_of(asked) == PutAck::Memory;
        let fits = bytes <= u64::from(tiered.tier.config().max_object_bytes);
        if fits || may_stay_in_memory { Ok(()) } else { Err(Status::TooLarge) }
    }

    /// Whether a put of so many bytes is to be taken up now, or comes at a time when the SSD cannot keep up.
    pub(in crate::service) fn may_put(&mut self, bytes: u64, asked: Option<PutAck>) -> Result<(), Status> {
        let Some(tiered) = &mut self.tiered else { return if is_for_ssd(asked) { Err(Status::NoSsd) } else { Ok(()) } };
        if tiered.policy.must_write(asked) && tiered.fits(bytes) && !tiered.has_room(bytes) {
            // What waits may be less than half of what may: then nothing else would have it written before its time.
            tiered.pressed = true;
            return Err(Status::Busy);
        }
        Ok(())
    }

    /// A put found no room in memory, or none in what its account may take. Where objects wait for the SSD, they are in
    /// the way for a while only: they get in line, and the put is to come again.
    pub(in crate::service) fn no_room(&mut self, error: ReserveError, account: u16) -> Status {
        if let Some(tiered) = &mut self.tiered {
            let passes = match error {
                ReserveError::NoSpace { .. } => tiered.held > 0,
                ReserveError::Quota { bytes, lease_bytes, .. } => bytes <= lease_bytes && tiered.holds_of(account),
                _ => false,
            };
            if passes {
                tiered.pressed = true;
                return Status::Busy;
            }
        }
        reserve_status(error)
    }
}

impl Tiering {
    /// True while objects that are charged to an account wait for the SSD.
    fn holds_of(&self, account: u16) -> bool {
        self.held_of.contains_key(&account)
    }

    /// An object of an account begins to wait for the SSD, or does not any more.
    pub(super) fn count_held(&mut self, account: u16, begins: bool) {
        let held = self.held_of.entry(account).or_default();
        *held = if begins { *held + 1 } else { held.saturating_sub(1) };
        if *held == 0 {
            self.held_of.remove(&account);
        }
    }
}
