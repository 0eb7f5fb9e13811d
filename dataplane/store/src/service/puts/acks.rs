//! Acknowledgement levels of puts in flight.
//!
//! Most puts leave the level to the node, so that it is kept beside their reservations and not in them.

use std::collections::BTreeMap;

use kvplane_proto::ids::ReservationId;
use kvplane_proto::message::PutAck;

/// Levels by the index of the reservation. The level of an aborted put stays until another put with a level uses the
/// index: there are no more of them than reservations.
#[derive(Debug, Default)]
pub(super) struct Acks(BTreeMap<u32, (ReservationId, PutAck)>);

impl Acks {
    /// Records the acknowledgement level of a reservation's put.
    pub(super) fn note(&mut self, reservation: ReservationId, asked: Option<PutAck>) {
        if let Some(asked) = asked {
            self.0.insert(reservation.index, (reservation, asked));
        }
    }

    /// Takes the acknowledgement level of a reservation that is committed.
    pub(super) fn take(&mut self, reservation: ReservationId) -> Option<PutAck> {
        // The entry may belong to an earlier reservation that was never committed.
        let (of, asked) = self.0.remove(&reservation.index)?;
        (of == reservation).then_some(asked)
    }
}
