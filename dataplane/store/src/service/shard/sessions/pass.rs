//! Rights of a connection, by the ticket that its client has proved, and the challenge that the client answers.

use kvplane_proto::message::Hello;
use kvplane_ticket::{Challenge, Rights, Ticket};

/// Greeting of a connection that was challenged.
pub(super) struct ChallengedHello {
    pub(super) hello: Hello,
    pub(super) challenge: Challenge,
}

/// Rights of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct Pass {
    pub(super) rights: Rights,
    /// Only tenant whose objects the connection may use; `None` for all.
    pub(in crate::service) tenant: Option<u32>,
    pub(super) shown: Option<ShownTicket>,
}

/// Ticket of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShownTicket {
    pub(super) ticket: Ticket,
    /// End of the ticket, grace included, in seconds of ticket time as known here.
    pub(super) end: u64,
    /// Time of the next check, in nanoseconds.
    pub(super) look_ns: u64,
}

impl Pass {
    /// Rights of connections that need no ticket.
    pub(super) const ALL: Self =
        Self { rights: Rights::READ.and(Rights::WRITE).and(Rights::FETCH), tenant: None, shown: None };

    /// Returns the ticket that was proved last.
    pub(super) fn ticket(&self) -> Option<Ticket> {
        self.shown.map(|shown| shown.ticket)
    }
}
