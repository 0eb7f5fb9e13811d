//! Connection table of a driver, with the ownership of the shared receive buffers.

use kvplane_proto::frame::{FrameError, Header};

use super::connection::{Connection, State};
use super::sealed::Wire;
use super::staging::Staging;
use crate::table::Table;
use crate::types::{CloseCause, ConnectionId};

/// All connections of a driver, by index.
pub(super) struct Connections {
    table: Table<Connection>,
}

impl Connections {
    pub(super) const fn new() -> Self {
        Self { table: Table::new() }
    }

    /// Returns the number of connections, including those whose `Gone` event was not taken yet.
    pub(super) const fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns the number of indexes.
    pub(super) const fn positions(&self) -> u32 {
        self.table.positions()
    }

    /// Returns the id that the next connection gets.
    pub(super) fn next_id(&self) -> ConnectionId {
        self.table.next_id()
    }

    pub(super) fn insert(&mut self, connection: Connection) -> ConnectionId {
        self.table.insert(connection)
    }

    /// Returns a connection unless it is ending.
    #[inline]
    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.table.get_mut(id).filter(|connection| connection.state != State::Ending)
    }

    /// Returns true if this is the id of the entry's current connection, or of its last one.
    pub(super) fn is_current(&self, id: ConnectionId) -> bool {
        self.table.is_current(id)
    }

    /// Returns the connection at an index, even if it is ending.
    #[inline]
    pub(super) fn at(&self, index: u32) -> Option<&Connection> {
        self.table.at(index)
    }

    /// Returns the connection at an index mutably, see [`Self::at`].
    #[inline]
    pub(super) fn at_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.table.at_mut(index)
    }

    /// Returns the id of the connection at an index.
    #[inline]
    pub(super) fn id_at(&self, index: u32) -> ConnectionId {
        self.table.id_at(index)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.table.iter().map(|(_, connection)| connection)
    }

    /// Removes a connection if the predicate holds.
    pub(super) fn take_if(&mut self, index: u32, is_so: impl FnOnce(&mut Connection) -> bool) -> Option<Connection> {
        self.table.take_if(index, is_so)
    }

    /// Frees the index of a removed connection.
    pub(super) fn free(&mut self, id: ConnectionId) {
        self.table.free(id);
    }

    /// Returns true if a connection exists and its handshake has not completed.
    pub(super) fn awaits_handshake(&self, id: ConnectionId) -> bool {
        self.table.get(id).is_some_and(|connection| !connection.is_agreed())
    }

    /// Returns the next frame of a connection, if it has arrived completely; `check` validates its header first.
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

    /// Receives on a connection once. Returns the number of bytes, or `None` if the socket is drained.
    pub(super) fn receive(&mut self, index: u32, staging: &mut Staging) -> Result<Option<usize>, CloseCause> {
        self.claim(index, staging);
        let Some(connection) = self.table.at_mut(index) else { return Ok(None) };
        connection.reader.receive(&connection.socket, staging)
    }

    /// Makes the connection at this index the owner of the frame staging.
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

    /// Makes the connection at this index the owner of the staging of TLS records.
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
