//! Reservations and pins that a shard gave out and that have ended: their ids name nothing any more, also when another
//! has their place of the table.

use std::collections::BTreeMap;

use kvplane_proto::ids::{PinId, ReservationId};
use kvplane_store::Store;

use super::{CheckResult, Rule, broken};

/// The newest ids that ended, by their place in the shard's tables.
#[derive(Default)]
pub(crate) struct Handles {
    reservations: BTreeMap<u32, u32>,
    pins: BTreeMap<u32, u32>,
}

impl Handles {
    /// A reservation was given out. The one before it at the same place must hold no room.
    pub(crate) fn reserved(&mut self, store: &Store, id: ReservationId) -> CheckResult {
        let Some(generation) = self.reservations.insert(id.index, id.generation) else { return Ok(()) };
        let ended = ReservationId { generation, ..id };
        match store.reserved_extent(ended).filter(|_| ended != id) {
            Some(extent) => Err(broken(Rule::Ledger, format!("{ended:?} has ended and names {extent:?} of {id:?}"))),
            None => Ok(()),
        }
    }

    /// A pin was given out. The one before it at the same place must hold nothing.
    pub(crate) fn pinned(&mut self, store: &Store, id: PinId) -> CheckResult {
        let Some(generation) = self.pins.insert(id.index, id.generation) else { return Ok(()) };
        let ended = PinId { generation, ..id };
        match store.held(ended).filter(|_| ended != id) {
            Some(object) => Err(broken(Rule::Ledger, format!("{ended:?} has ended and names {object:?} of {id:?}"))),
            None => Ok(()),
        }
    }
}
