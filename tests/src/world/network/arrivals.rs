//! Arrivals at a client: replies, and payloads that the kernel writes into the caller's memory.

use kvplane_client::PayloadTo;
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{HEADER_BYTES, Header};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::network::End;
use crate::world::network::pipe::{Destination, IncomingPayload, Piece};
use crate::world::scenario::Mischief;

impl World {
    /// Delivers a piece to the client.
    pub(crate) fn arrive_at_client(&mut self, index: u32, piece: Piece) {
        let Some(connection) = self.connections.get(&index) else { return };
        match (piece, connection.client_end) {
            (Piece::End, End::Opening | End::Open | End::Closing) => self.client_end_gone(index),
            (Piece::Head(bytes), End::Open) => self.answer_arrives(index, &bytes),
            (Piece::Chunk(bytes), End::Open | End::Closing) => self.payload_arrives(index, &bytes),
            (Piece::Chunk(bytes), End::Gone) if self.scenario.has(Mischief::KeepLateBytes) => {
                self.payload_arrives(index, &bytes);
            }
            _ => {}
        }
    }

    fn answer_arrives(&mut self, index: u32, bytes: &[u8]) {
        let Some(header) = decode(bytes) else {
            self.client_end_gone(index);
            return;
        };
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, lane) = (connection.client, connection.lane);
        let body = &bytes[HEADER_BYTES..];
        let to = self.clients[client].client.frame(lane, &header, body, self.now_ns);
        self.detail(header.request.to_bits(), || {
            format!("client {client} receives {:?} {:?}", header.kind, header.status)
        });
        if header.payload_bytes > 0 {
            let destination = match to {
                PayloadTo::Discard => Destination::Discard,
                PayloadTo::Local { local, slice } => Destination::Local { local, slice },
                PayloadTo::Scatter { .. } => {
                    self.violate(broken(Rule::Protocol, "ranges are read, but none were requested".to_owned()));
                    return;
                }
            };
            let receiving = IncomingPayload { header, destination, done: 0, checksum: PayloadChecksum::new() };
            if let Some(connection) = self.connections.get_mut(&index) {
                connection.to_client.receiving = Some(receiving);
            }
        }
        self.drain_client(client);
    }

    /// Writes payload bytes into the caller's memory, as the kernel does, whatever the client's thread is doing.
    fn payload_arrives(&mut self, index: u32, bytes: &[u8]) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (client, open) = (connection.client, connection.client_end == End::Open);
        let Some(receiving) = &mut connection.to_client.receiving else { return };
        let (from, destination) = (receiving.done, receiving.destination);
        receiving.done += bytes.len() as u64;
        receiving.checksum.update(bytes);
        let done = receiving.done == receiving.header.payload_bytes;
        let (header, sum) = (receiving.header, receiving.checksum.finish());
        if done {
            connection.to_client.receiving = None;
        }
        let Destination::Local { local, slice } = destination else { return };
        let written = self.clients[client].memory.write(local.offset + from, bytes);
        self.require(written);
        if done && open {
            let sum = if self.scenario.has(Mischief::TrustGetChecksum) { header.payload_checksum } else { sum };
            self.clients[client].client.payload_done(slice, Some(sum), self.now_ns);
            self.drain_client(client);
        }
    }
}

/// Decodes a frame's header, if header and body are intact.
pub(crate) fn decode(bytes: &[u8]) -> Option<Header> {
    let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::decode(head).ok()?;
    (body.len() == header.body_bytes as usize && header.check_body(body).is_ok()).then_some(header)
}
