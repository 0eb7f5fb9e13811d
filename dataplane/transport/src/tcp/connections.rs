//! The connections of a driver, and which of them has a place that they share.

use kvplane_proto::frame::{FrameError, Header};

use super::connection::{Connection, State};
use super::sealed::Wire;
use super::staging::Staging;
use crate::table::Table;
use crate::types::{CloseCause, ConnectionId};

/// All connections of a driver, by position.
pub(super) struct Connections {
    table: Table<Connection>,
}

impl Connections {
    pub(super) const fn new() -> Self {
        Self { table: Table::new() }
    }

    /// How many there are, those that have ended and whose end was not taken yet among them.
    pub(super) const fn len(&self) -> usize {
        self.table.len()
    }

    /// How many positions there are.
    pub(super) const fn positions(&self) -> u32 {
        self.table.positions()
    }

    /// The name that the next connection gets.
    pub(super) fn next_id(&self) -> ConnectionId {
        self.table.next_id()
    }

    pub(super) fn insert(&mut self, connection: Connection) -> ConnectionId {
        self.table.insert(connection)
    }

    /// A connection that is not ending.
    #[inline]
    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.table.get_mut(id).filter(|connection| connection.state != State::Ending)
    }

    /// Whether this is the name of the position's present connection, or of its last one.
    pub(super) fn is_current(&self, id: ConnectionId) -> bool {
        self.table.is_current(id)
    }

    /// The connection at a position, one that is ending too.
    #[inline]
    pub(super) fn at(&self, index: u32) -> Option<&Connection> {
        self.table.at(index)
    }

    /// As [`Self::at`], to be changed.
    #[inline]
    pub(super) fn at_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.table.at_mut(index)
    }

    /// The name of the connection at a position.
    #[inline]
    pub(super) fn id_at(&self, index: u32) -> ConnectionId {
        self.table.id_at(index)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.table.iter().map(|(_, connection)| connection)
    }

    /// Takes a connection out, if it is so.
    pub(super) fn take_if(&mut self, index: u32, is_so: impl FnOnce(&mut Connection) -> bool) -> Option<Connection> {
        self.table.take_if(index, is_so)
    }

    /// The position of a connection that was taken out may be another's.
    pub(super) fn free(&mut self, id: ConnectionId) {
        self.table.free(id);
    }

    /// Whether a connection is there and its handshake has not begun or is not done.
    pub(super) fn awaits_handshake(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|connection| !connection.is_agreed())
    }

    /// The next frame of a connection, if it is there as a whole; `check` looks at its header first.
    pub(super) fn take_frame(
        &mut self,
        index: u32,
        staging: &mut Staging,
        scratch: &mut Vec<u8>,
        check: impl FnOnce(&Header) -> Result<(), FrameError>,
    ) -> Result<Option<Header>, FrameError> {
        let Some(connection) = self.table.at_mut(index) else { return Ok(None) };
        if !staging.is_owner(index) && !connection.reader.has_kept() {
            return Ok(None);
        }
        self.claim(index, staging);
        let Some(connection) = self.table.at_mut(index) else { return Ok(None) };
        let header = connection.reader.take_frame(staging, scratch, check)?;
        if header.is_some() {
            connection.awaited = connection.awaited.saturating_sub(1);
        }
        Ok(header)
    }

    /// Receives on a connection once. How many bytes came; none when the socket has nothing.
    pub(super) fn receive(&mut self, index: u32, staging: &mut Staging) -> Result<Option<usize>, CloseCause> {
        self.claim(index, staging);
        let Some(connection) = self.table.at_mut(index) else { return Ok(None) };
        connection.reader.receive(&connection.socket, staging)
    }

    /// Makes the staging of frames that of the connection at this position.
    #[inline]
    pub(super) fn claim(&mut self, index: u32, staging: &mut Staging) {
        if staging.is_owner(index) {
            return;
        }
        if let Some(owner) = staging.owner().and_then(|owner| self.table.at_mut(owner)) {
            owner.reader.keep(staging.unread());
        }
        match self.table.at_mut(index) {
            Some(connection) => connection.reader.enter(index, staging),
            None => staging.give_to(index, &[]),
        }
    }

    /// Makes the place where records arrive that of the connection at this position.
    pub(super) fn claim_sealed(&mut self, index: u32, arrived: &mut Staging) {
        if arrived.is_owner(index) {
            return;
        }
        let owner = arrived.owner().and_then(|owner| self.table.at_mut(owner));
        if let Some(Wire::Tls(sealed)) = owner.map(|owner| &mut owner.wire) {
            sealed.keep(arrived.unread());
        }
        match self.table.at_mut(index) {
            Some(Connection { wire: Wire::Tls(sealed), .. }) => sealed.enter(index, arrived),
            _ => arrived.give_to(index, &[]),
        }
    }
}
