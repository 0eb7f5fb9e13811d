//! Receive path of connections: frames and payloads for the host, decrypted if the connection uses TLS.

use std::os::fd::AsFd;
use std::sync::Arc;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FrameError, Header};
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::status::Status;
use kvplane_proto::{FrameFlags, Limits};
use kvplane_sys::net;
use kvplane_tls::{DataTls, FIRST_BYTE, Keychain};

use super::Tcp;
use super::connection::State;
use super::reader::Expect;
use super::sealed::Wire;
use super::tls::Turn;
use crate::types::{CloseCause, ConnectionId, Event, Input, Target};

impl Tcp {
    /// Sets the TLS keys and mode; connections use the keychain's contents at the time they begin.
    pub fn set_tls(&mut self, keychain: Arc<Keychain>) {
        self.tls.set(keychain);
    }

    /// Returns the next input of a connection. The body of a frame replaces `scratch`. After a frame with a payload,
    /// the host calls [`Self::receive_payload`] before it calls this again.
    pub fn input(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        loop {
            let Some(connection) = self.connections.get(id) else { return Input::Wait };
            if connection.state != State::Open || connection.closing_after_send.is_some() {
                return Input::Wait;
            }
            match connection.reader.expect() {
                Expect::Decision { .. } => return Input::Wait,
                Expect::Payload(payload) if payload.left_bytes == 0 => {
                    let checksum = payload.checksum.as_ref().map(PayloadChecksum::finish);
                    connection.reader.finish_payload();
                    return Input::Payload(checksum);
                }
                Expect::Payload(_) => {}
                Expect::Frame if connection.writer.lending.has_answer() => {
                    // The host must take the earlier events first, which report the request's payload as sent.
                    if self.events.is_empty()
                        && let Some((header, body)) = connection.writer.lending.take_answer()
                    {
                        *scratch = body;
                        return Input::Frame(header);
                    }
                    self.rounds.again.push(id.index);
                    return Input::Wait;
                }
                Expect::Frame if connection.backlog() >= Limits::REPLIES_QUEUED => {
                    connection.reader.paused = true;
                    return Input::Wait;
                }
                Expect::Frame => {
                    let unauthenticated = self.unauthenticated.as_ref();
                    let check = |header: &Header| {
                        unauthenticated.map_or(Ok(()), |unauthenticated| unauthenticated.check(id, header))
                    };
                    match self.connections.take_frame(id.index, &mut self.staging, scratch, check) {
                        Ok(Some(header)) if self.ends_for_want_of_tls(id, &header) => return Input::Wait,
                        Ok(Some(header)) if self.keep_back(id, &header, scratch) => continue,
                        Ok(Some(header)) => return Input::Frame(header),
                        Ok(None) => {}
                        Err(error) => {
                            self.close(id, why_no_frame(error));
                            return Input::Wait;
                        }
                    }
                }
            }
            match self.bring(id) {
                Ok(true) => {}
                Ok(false) => return Input::Wait,
                Err(why) => {
                    self.close(id, why);
                    return Input::Wait;
                }
            }
        }
    }

    /// Obtains more bytes: decrypts received records, or receives. Returns false if there is nothing more, or not in
    /// this round.
    fn bring(&mut self, id: ConnectionId) -> Result<bool, CloseCause> {
        let Some(connection) = self.connections.get(id) else { return Ok(false) };
        let plain = matches!(connection.wire, Wire::Plain);
        if !plain {
            match self.tls.open_next(id.index, &mut self.connections, &mut self.staging)? {
                Turn::Opened => return Ok(true),
                Turn::Stepped { done } => {
                    self.stepped(id, done);
                    if done {
                        return Ok(true);
                    }
                }
                Turn::Later => {
                    self.rounds.again.push(id.index);
                    return Ok(false);
                }
                Turn::Receive => {}
            }
        }
        let Some(connection) = self.connections.get(id) else { return Ok(false) };
        if !connection.reader.readable {
            return Ok(false);
        }
        if connection.reader.is_spent() {
            self.rounds.again.push(id.index);
            return Ok(false);
        }
        let received = if plain {
            self.connections.receive(id.index, &mut self.staging)?
        } else {
            self.tls.receive(id.index, &mut self.connections)?
        };
        if let Some(bytes) = received {
            self.moved_bytes += bytes;
            self.active.touch(id.index);
        }
        Ok(true)
    }

    /// Sets the destination of the payload of the last frame. [`Self::input`] then delivers it.
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        if self.connections.get(id).is_some() {
            self.connections.claim(id.index, &mut self.staging);
        }
        if let Some(connection) = self.connections.get(id) {
            connection.reader.place_payload(target, &mut self.staging);
        }
    }

    /// Handles the establishment of an outgoing connection: reports it, or begins the TLS handshake.
    pub(super) fn opened(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(id) else { return };
        let address = net::peer_address(connection.socket.as_fd()).ok();
        match self.tls.wire_to(address) {
            Ok(Wire::Tls(sealed)) => connection.wire = Wire::Tls(sealed),
            Ok(Wire::Plain | Wire::Unknown) => {
                self.events.push_back(Event::Connected(id));
                return;
            }
            Err(why) => {
                self.close(id, why);
                return;
            }
        }
        self.tls.await_handshake(id, &self.connections);
        match self.tls.step_first(id.index, &mut self.connections) {
            Ok(Turn::Stepped { done }) => self.stepped(id, done),
            Ok(_) => {}
            Err(why) => self.close(id, why),
        }
    }

    /// Handles a completed handshake step: its output is sent, and the connection may be reported to the host.
    fn stepped(&mut self, id: ConnectionId, done: bool) {
        if done && self.connections.get(id).is_some_and(|connection| connection.asks) {
            self.events.push_back(Event::Connected(id));
        }
        self.rounds.dirty.mark(id.index);
    }

    /// Returns true if this frame ends the connection: it arrived in plaintext although TLS is required, or is the
    /// peer's demand for TLS.
    fn ends_for_want_of_tls(&mut self, id: ConnectionId, header: &Header) -> bool {
        let Some(connection) = self.connections.get(id) else { return false };
        if connection.must_be_refused {
            if let Kind::Request(operation) = header.kind {
                let reply = Header::reply(Kind::Reply(operation), header.request, Status::WantsTls);
                self.send(id, &reply, b"", None);
            }
            // The peer reconnects with TLS, as every peer in mode `offer` does: the operator need not act.
            if matches!(header.kind, Kind::Request(Operation::Hello)) && header.flags.has(FrameFlags::OFFERS_TLS) {
                self.close_after_sending(id, CloseCause::Closed);
                return true;
            }
            let text = "a peer connected without TLS, which --data-tls require rejects; start it with --data-tls offer \
                        or require";
            self.close_after_sending(id, CloseCause::Tls(text.to_owned()));
            return true;
        }
        let plain = matches!(connection.wire, Wire::Plain);
        let refused = connection.asks && plain && header.status == Status::WantsTls;
        if !refused || self.tls.mode() != DataTls::Offer {
            return false;
        }
        self.tls.learn(net::peer_address(connection.socket.as_fd()).ok());
        self.close(id, CloseCause::Peer);
        true
    }
}

/// Returns the close cause of a connection whose bytes are not a frame.
fn why_no_frame(error: FrameError) -> CloseCause {
    match error {
        FrameError::Magic(found) if found & 0xff == u32::from(FIRST_BYTE) => {
            let text = "a peer began with TLS, but --data-tls is off here; start this process with offer or require";
            CloseCause::Tls(text.to_owned())
        }
        error => CloseCause::Frame(error),
    }
}
