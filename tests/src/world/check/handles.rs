//! Checker of reservations and pins that have ended: their ids are invalid, also after their index in the table is
//! reused.

use std::collections::BTreeMap;

use kvplane_proto::ids::{PinId, ReservationId};
use kvplane_store::Store;

use super::{CheckResult, Rule, broken};

/// Newest ended ids, by their index in the shard's tables.
#[derive(Default)]
pub(crate) struct Handles {
    reservations: BTreeMap<u32, u32>,
    pins: BTreeMap<u32, u32>,
}

impl Handles {
    /// Records a new reservation. The one before it at the same index must hold no memory.
    pub(crate) fn reserved(&mut self, store: &Store, id: ReservationId) -> CheckResult {
        let Some(generation) = self.reservations.insert(id.index, id.generation) else { return Ok(()) };
        let ended = ReservationId { generation, ..id };
        match store.reserved(ended).map(|reserved| store.pool().extent(reserved)).filter(|_| ended != id) {
            Some(extent) => Err(broken(Rule::Ledger, format!("{ended:?} has ended and names {extent:?} of {id:?}"))),
            None => Ok(()),
        }
    }

    /// Records a new pin. The one before it at the same index must pin nothing.
    pub(crate) fn pinned(&mut self, store: &Store, id: PinId) -> CheckResult {
        let Some(generation) = self.pins.insert(id.index, id.generation) else { return Ok(()) };
        let ended = PinId { generation, ..id };
        match store.held(ended).filter(|_| ended != id) {
            Some(object) => Err(broken(Rule::Ledger, format!("{ended:?} has ended and names {object:?} of {id:?}"))),
            None => Ok(()),
        }
    }
}
