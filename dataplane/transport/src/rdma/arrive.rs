//! Event handling of RDMA devices: completions, received messages, and port events.

use kvplane_proto::{SegmentId, Status as Outcome};
use kvplane_sys::verbs::{AsyncEvent, Mtu, RetiredRequest, Status};

use super::link::{State, flushes};
use super::links::Links;
use super::nic::POLLED;
use super::segments::Segments;
use super::wire::{ENVELOPE_BYTES, Envelope, MessageKind, RemoteRange, SegmentKey};
use super::work::Work;
use crate::types::{CloseCause, ConnectionId};

/// Limit of completion batches taken from one device in one round: bounds the delay of the other devices.
const LOTS: usize = 16;

/// A received message.
#[derive(Clone, Copy)]
pub(super) struct ReceivedMessage {
    /// Link of the queue pair that received it.
    link: Option<u32>,
    /// Receive buffer that holds it.
    receive: u32,
    bytes: u32,
    status: Status,
}

impl Links {
    /// Handles the completions of a device. Returns true if there were any.
    pub(super) fn take_completions(&mut self, nic: usize, segments: &mut Segments) -> bool {
        let mut progress = false;
        self.nics[nic].completions.set_emptied(false);
        for _ in 0..LOTS {
            let (mut retired, mut received) = (core::mem::take(&mut self.retired), core::mem::take(&mut self.received));
            let entry = &mut self.nics[nic];
            let full = match entry.completions.poll() {
                Ok(polled) => {
                    let full = polled.len() == POLLED;
                    progress |= polled.len() > 0;
                    for completion in polled {
                        let link = entry.links.get(&completion.qp_num()).copied();
                        if completion.is_receive() {
                            if let Some(one) = entry.receives.retire(&completion) {
                                let (receive, bytes) = (one.token as u32, completion.bytes());
                                let status = completion.status();
                                received.push(ReceivedMessage { link, receive, bytes, status });
                            }
                        } else if let Some(index) = link {
                            let id = self.table.id_at(index);
                            let Some(link) = self.table.at_mut(index) else { continue };
                            self.books.counters.signalled += 1;
                            link.retire(id, &completion, &mut self.books.copied, &mut retired);
                            self.rounds.dirty.mark(index);
                        }
                    }
                    full
                }
                Err(error) => {
                    entry.failed.get_or_insert_with(|| error.to_string());
                    false
                }
            };
            for (index, one) in retired.drain(..) {
                self.work_over(index, one);
            }
            for one in received.drain(..) {
                self.message(nic, one, segments);
            }
            (self.retired, self.received) = (retired, received);
            if !full {
                self.nics[nic].completions.set_emptied(true);
                break;
            }
        }
        progress
    }

    /// Handles the completion of a request and resumes the work that waited for it.
    fn work_over(&mut self, index: u32, retired: RetiredRequest) {
        let RetiredRequest { token, status, .. } = retired;
        let id = self.table.id_at(index);
        let Some((link, nic, books)) = self.parts(id) else { return };
        link.work_over(id, Work::from_bits(token), status, nic, books);
        if status != Status::Success && link.state == State::Open {
            let why = describe(nic.context.name(), status, link.path.mtu);
            self.close(id, why);
        }
        if self.table.at(index).is_some() {
            self.rounds.dirty.mark(index);
        }
    }

    fn message(&mut self, nic: usize, message: ReceivedMessage, segments: &mut Segments) {
        let ReceivedMessage { link: index, receive, bytes, status } = message;
        let id = index.map(|index| self.table.id_at(index));
        let (Some(id), Some((link, entry, books))) = (id, id.and_then(|id| self.open_parts(id))) else {
            self.nics[nic].receives.repost(receive);
            return;
        };
        if status != Status::Success {
            entry.receives.repost(receive);
            let why = describe(entry.context.name(), status, link.path.mtu);
            self.close(id, why);
            return;
        }
        let front = (bytes as usize).min(ENVELOPE_BYTES);
        entry.arena.read_receive(receive, front, &mut books.message);
        let envelope = match Envelope::decode(&books.message, bytes as usize) {
            Ok(envelope) => envelope,
            Err(error) => {
                entry.receives.repost(receive);
                self.close(id, CloseCause::Rdma(error.to_string()));
                return;
            }
        };
        entry.endpoints.touch(link.endpoint);
        if link.sends.credits.arrived(envelope.credits).is_err() {
            entry.receives.repost(receive);
            self.close(id, CloseCause::Rdma("the peer violated the credit protocol".to_owned()));
            return;
        }
        if matches!(envelope.kind, MessageKind::Frame | MessageKind::More) {
            link.intake.push(envelope, receive);
            self.rounds.ready.mark(id.index);
            self.rounds.dirty.mark(id.index);
            return;
        }
        entry.arena.read_receive(receive, bytes as usize, &mut books.message);
        entry.receives.repost(receive);
        link.sends.credits.reposted();
        if let Err(why) = self.control(id, &envelope, segments) {
            self.close(id, why);
        }
        if self.table.at(id.index).is_some() {
            self.rounds.dirty.mark(id.index);
        }
    }

    /// Handles a control message; its bytes are in `books.message`.
    fn control(&mut self, id: ConnectionId, envelope: &Envelope, segments: &mut Segments) -> Result<(), CloseCause> {
        let Some((link, nic, books)) = self.parts(id) else { return Ok(()) };
        let message = core::mem::take(&mut books.message);
        let content = &message[ENVELOPE_BYTES..];
        let segment = SegmentId::from_bits(envelope.token);
        let result = match envelope.kind {
            MessageKind::Pulled => link.outbox.pulled(envelope.token, nic, books),
            MessageKind::Part => RemoteRange::decode_all(content)
                .map_err(|error| CloseCause::Rdma(error.to_string()))
                .and_then(|places| link.intake.next_part(envelope.token, places, envelope.parts)),
            MessageKind::AskKey => {
                let offset = content.first_chunk().map(|offset| u64::from_le_bytes(*offset));
                let key = segments.key_on(segment, offset, link.nic as usize, nic);
                link.answer_key(segment, key)
            }
            MessageKind::Key => SegmentKey::decode(content)
                .map(|key| link.copies.keys.learn(segment, key))
                .map_err(|error| CloseCause::Rdma(error.to_string())),
            MessageKind::Flush => link.answer_flush(segment, segments.flush(segment)),
            MessageKind::Flushed => match flushes::decode(content) {
                Some(outcome) => {
                    link.take_flushed(id, segment, outcome, &mut books.copied);
                    Ok(())
                }
                None => Err(CloseCause::Rdma("the peer's reply to a flush has no meaning".to_owned())),
            },
            MessageKind::SegmentGone => {
                link.copies.keys.learn(segment, SegmentKey::refused(Outcome::Stale));
                Ok(())
            }
            MessageKind::Credit | MessageKind::Frame | MessageKind::More => Ok(()),
        };
        self.books.message = message;
        result
    }

    /// Handles asynchronous events of a device and of its port.
    pub(super) fn take_events(&mut self, nic: usize) {
        while let Some(event) = self.nics[nic].next_event() {
            let entry = &mut self.nics[nic];
            let name = entry.context.name().to_owned();
            match event {
                AsyncEvent::PortError { port } => {
                    entry.port = None;
                    self.close_all(nic, &format!("{name}: port {port} is down"));
                }
                AsyncEvent::PortActive { .. } | AsyncEvent::GidChange { .. } | AsyncEvent::LidChange { .. } => {
                    entry.look_at_port();
                }
                AsyncEvent::DeviceFatal | AsyncEvent::CompletionQueueError | AsyncEvent::SharedQueueError => {
                    let why = format!("{name} failed: {event:?}");
                    entry.failed.get_or_insert_with(|| why.clone());
                    self.close_all(nic, &why);
                }
                AsyncEvent::QueuePairFatal { qp_num } | AsyncEvent::QueuePairAccess { qp_num } => {
                    if let Some(id) = self.link_of(nic, qp_num) {
                        self.close(id, CloseCause::Rdma(format!("{name}: {event:?}")));
                    }
                }
                AsyncEvent::LastReceive { qp_num } => {
                    if let Some((link, _, _)) = self.link_of(nic, qp_num).and_then(|id| self.parts(id)) {
                        link.shutdown.last_receive = true;
                    }
                }
                AsyncEvent::Other(_) => {}
            }
        }
        if let Some(why) = self.nics[nic].failed.clone() {
            self.close_all(nic, &why);
        }
    }

    fn link_of(&self, nic: usize, qp_num: u32) -> Option<ConnectionId> {
        self.nics[nic].links.get(&qp_num).map(|&index| self.table.id_at(index))
    }
}

/// Describes the failure of a connection for operators.
fn describe(device: &str, status: Status, path_mtu: Mtu) -> CloseCause {
    // A switch that drops a packet longer than its MTU does not report it.
    let perhaps = || {
        format!(
            "if small transfers work, the network in between drops packets of our MTU of {} bytes: set that of all \
             its ports to the same, larger one",
            path_mtu.bytes()
        )
    };
    CloseCause::Rdma(match status {
        Status::RetryExceeded => format!("{device}: the peer does not answer; {}", perhaps()),
        Status::RemoteAccess => format!("{device}: the peer's memory is not registered for it any more"),
        Status::ReceiverNotReady => format!("{device}: the peer has no receive posted"),
        // A flushed request carries no cause, or the cause was reported for another request.
        Status::Flushed => format!("{device}: the connection failed; {}", perhaps()),
        status => format!("{device}: a request failed: {status:?}"),
    })
}
