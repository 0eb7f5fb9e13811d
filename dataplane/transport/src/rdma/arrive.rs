//! What a device tells: requests that are over, messages that came, ports that went down.

use kvplane_proto::{Limits, SegmentId, Status as Outcome};
use kvplane_sys::verbs::{AsyncEvent, Completion, Mtu, RetiredRequest, Status};

use super::Rdma;
use super::ended::CopyCompletions;
use super::link::{Control, KeyState, Link, State, Work};
use super::wire::{ENVELOPE_BYTES, Envelope, MessageKind, Place, SegmentKey};
use crate::types::{CloseCause, ConnectionId, Event};

/// Completions taken from one device in one round, in lots: bounds how long others wait.
const LOTS: usize = 16;
/// Things that one connection may have to tell by messages of their own.
const CONTROLS: usize = 2 * Limits::SEGMENTS;

/// A message that came: on which queue pair, into which receive, how long, and how that went.
type ReceivedMessage = (Option<u32>, u32, u32, Status);

impl Rdma {
    /// Takes what the devices tell. Whether there was anything.
    pub fn poll(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        let mut progress = false;
        let told = core::mem::take(&mut self.told);
        for nic in 0..self.nics.len() {
            if told || !self.closing.is_empty() || self.nics[nic].failed.is_some() {
                self.take_events(nic);
            }
            progress |= self.take_completions(nic);
        }
        progress |= self.see_off();
        self.look_after_idle();
        progress
    }

    pub(super) fn take_completions(&mut self, nic: usize) -> bool {
        let mut progress = false;
        self.nics[nic].emptied = false;
        for _ in 0..LOTS {
            let (mut retired, mut received) = (core::mem::take(&mut self.retired), core::mem::take(&mut self.received));
            let entry = &mut self.nics[nic];
            let full = match entry.queue.poll(&mut entry.entries) {
                Ok(polled) => {
                    let full = polled.len() == super::LOT;
                    progress |= polled.len() > 0;
                    for completion in polled {
                        let link = entry.links.get(&completion.qp_num()).copied();
                        if completion.is_receive() {
                            if let Some(one) = entry.shared.retire(&completion) {
                                received.push((link, one.token as u32, completion.bytes(), completion.status()));
                            }
                        } else if let Some(index) = link
                            && let Some(link) = self.links[index as usize].as_deref_mut()
                        {
                            self.books.counters.signalled += 1;
                            let id = ConnectionId { index, generation: self.generations[index as usize] };
                            link.retire(id, &completion, &mut self.books.copied, &mut retired);
                            if !core::mem::replace(&mut link.dirty, true) {
                                self.dirty.push_back(index);
                            }
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
                self.message(nic, one);
            }
            (self.retired, self.received) = (retired, received);
            if !full {
                self.nics[nic].emptied = true;
                break;
            }
        }
        progress
    }

    /// A request is over: whatever waited for it goes on.
    fn work_over(&mut self, index: u32, RetiredRequest { token, status, .. }: RetiredRequest) {
        let Some(link) = self.links[index as usize].as_deref_mut() else { return };
        let id = ConnectionId { index, generation: self.generations[index as usize] };
        let nic = &mut self.nics[link.nic as usize];
        let success = status == Status::Success;
        match Work::from_bits(token) {
            Work::Nothing => {}
            Work::Slot(slot) => nic.free_slot(slot),
            Work::Push(lent) => {
                if let Some(lent) = link.lent.try_remove(lent as usize) {
                    self.books.events.extend(lent.hold.map(Event::Sent));
                }
            }
            Work::Pull => link.fetched(success, nic),
            Work::CopyPart => link.copy_over(id, None, status, &mut self.books),
            Work::Copy(token) => link.copy_over(id, Some(token), status, &mut self.books),
        }
        if !success && link.state == State::Open {
            let why = describe(nic.context.name(), status, link.path_mtu);
            self.close(id, why);
        }
        self.mark_dirty(index);
    }

    fn message(&mut self, nic: usize, (index, receive, bytes, status): ReceivedMessage) {
        let link = index.and_then(|index| self.links[index as usize].as_deref_mut());
        let open = link.filter(|link| link.state == State::Open);
        let (Some(link), Some(index)) = (open, index) else {
            self.nics[nic].repost(receive);
            return;
        };
        let id = ConnectionId { index, generation: self.generations[index as usize] };
        let entry = &mut self.nics[nic];
        if status != Status::Success {
            entry.repost(receive);
            let why = describe(entry.context.name(), status, link.path_mtu);
            self.close(id, why);
            return;
        }
        let front = (bytes as usize).min(ENVELOPE_BYTES);
        entry.read_receive(receive, front, &mut self.books.message);
        let envelope = match Envelope::decode(&self.books.message, bytes as usize) {
            Ok(envelope) => envelope,
            Err(error) => {
                entry.repost(receive);
                self.close(id, CloseCause::Rdma(error.to_string()));
                return;
            }
        };
        entry.endpoints.touch(link.endpoint);
        if link.credits.arrived(envelope.credits).is_err() {
            entry.repost(receive);
            self.close(id, CloseCause::Rdma("the peer broke the rules of credits".to_owned()));
            return;
        }
        if matches!(envelope.kind, MessageKind::Frame | MessageKind::More) {
            link.inbox.push_back((envelope, receive));
            self.mark_ready(index);
            self.mark_dirty(index);
            return;
        }
        entry.read_receive(receive, bytes as usize, &mut self.books.message);
        entry.repost(receive);
        link.credits.reposted();
        if let Err(why) = self.control(id, &envelope) {
            self.close(id, why);
        }
        self.mark_dirty(index);
    }

    /// A message that tells something by itself; it is in the scratch.
    fn control(&mut self, id: ConnectionId, envelope: &Envelope) -> Result<(), CloseCause> {
        let message = core::mem::take(&mut self.books.message);
        let content = &message[ENVELOPE_BYTES..];
        let segment = SegmentId::from_bits(envelope.token);
        let key = if envelope.kind == MessageKind::AskKey { Some(self.key_of(id, segment)) } else { None };
        let result = match self.parts(id) {
            Some((link, nic, books)) => match envelope.kind {
                MessageKind::Pulled => link.pulled(envelope.token, nic, books),
                MessageKind::Part => Place::decode_all(content)
                    .map_err(|error| CloseCause::Rdma(error.to_string()))
                    .and_then(|places| link.next_part(envelope.token, places, envelope.parts)),
                MessageKind::AskKey => link.answer_key(segment, key),
                MessageKind::Key => SegmentKey::decode(content)
                    .map(|key| link.learn_key(segment, key))
                    .map_err(|error| CloseCause::Rdma(error.to_string())),
                MessageKind::SegmentGone => {
                    link.learn_key(segment, SegmentKey::refused(Outcome::Stale));
                    Ok(())
                }
                MessageKind::Credit | MessageKind::Frame | MessageKind::More => Ok(()),
            },
            None => Ok(()),
        };
        self.books.message = message;
        result
    }

    fn take_events(&mut self, nic: usize) {
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
                        link.last_receive = true;
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
        let index = *self.nics[nic].links.get(&qp_num)?;
        Some(ConnectionId { index, generation: self.generations[index as usize] })
    }

    fn close_all(&mut self, nic: usize, why: &str) {
        let links: Vec<u32> = self.nics[nic].links.values().copied().collect();
        for index in links {
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            self.close(id, CloseCause::Rdma(why.to_owned()));
        }
    }
}

impl Link {
    /// Takes back what a completion ends. Copies that succeeded are most of it, and need nothing else of the link.
    #[inline]
    fn retire(
        &mut self,
        id: ConnectionId,
        completion: &Completion<'_>,
        copied: &mut CopyCompletions,
        others: &mut Vec<(u32, RetiredRequest)>,
    ) {
        self.queue_pair.retire_runs(completion, |tokens, status| {
            if status == Status::Success && copied.push_all(id, tokens) {
                return;
            }
            for &token in tokens {
                match Work::from_bits(token) {
                    // The parts before it have succeeded too.
                    Work::Copy(token) if status == Status::Success => copied.push(id, token, Ok(())),
                    Work::CopyPart if status == Status::Success => {}
                    _ => others.push((id.index, RetiredRequest { token, status, receive: false })),
                }
            }
        });
    }

    fn answer_key(&mut self, segment: SegmentId, key: Option<SegmentKey>) -> Result<(), CloseCause> {
        if self.control.len() >= CONTROLS {
            return Err(CloseCause::Rdma("the peer asks for keys faster than it takes them".to_owned()));
        }
        let key = key.unwrap_or(SegmentKey::refused(Outcome::Stale));
        if key.status == Outcome::Ok {
            self.told.insert(segment);
        }
        self.control.push_back(Control::Key(segment, key));
        Ok(())
    }

    fn learn_key(&mut self, segment: SegmentId, key: SegmentKey) {
        // What was not asked for is of no use.
        if let Some(state) = self.keys.get_mut(&segment) {
            *state = KeyState::Known(key);
            self.last_key = None;
        }
    }
}

/// Why a connection failed, for people.
fn describe(device: &str, status: Status, path_mtu: Mtu) -> CloseCause {
    // Nobody says of a packet that it was too long for a switch in between.
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
        // The device did not say why, or said it of something else.
        Status::Flushed => format!("{device}: the connection failed; {}", perhaps()),
        status => format!("{device}: a request failed: {status:?}"),
    })
}
