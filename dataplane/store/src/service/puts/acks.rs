//! What puts in flight asked their answers to wait for.
//!
//! Most leave that to the node, so it is kept beside their reservations and not in them.

use std::collections::BTreeMap;

use kvplane_proto::ids::ReservationId;
use kvplane_proto::message::PutAck;

/// By the reservation's place. That of a put that was given up stays until its place is used again by one that asks:
/// there are no more than reservations have places.
#[derive(Debug, Default)]
pub(super) struct Acks(BTreeMap<u32, (ReservationId, PutAck)>);

impl Acks {
    /// A reservation was made for a put that asked for this.
    pub(super) fn note(&mut self, reservation: ReservationId, asked: Option<PutAck>) {
        if let Some(asked) = asked {
            self.0.insert(reservation.index, (reservation, asked));
        }
    }

    /// What the put of a reservation that is committed asked for.
    pub(super) fn take(&mut self, reservation: ReservationId) -> Option<PutAck> {
        // What is there may be of one that was never committed.
        let (of, asked) = self.0.remove(&reservation.index)?;
        (of == reservation).then_some(asked)
    }
}
