//! Execution of requests: the work of the NICs at both ends of a reliable connection, without the wire between them.
//!
//! Lengths, keys and rights are checked before a byte is moved. An error fails the same queue pairs as on a NIC; their
//! posted requests are flushed.

use crate::fabric::{QueuePair, State};
use crate::work::{Receive, Send};
use kvplane_sys::verbs::QueueState;
use kvplane_sys::verbs::provider::*;

/// Completion statuses, by their numbers in verbs.
const LOCAL_LENGTH: u32 = 1;
const LOCAL_PROTECTION: u32 = 4;
const FLUSHED: u32 = 5;
const REMOTE_INVALID: u32 = 9;
const REMOTE_ACCESS: u32 = 10;
const REMOTE_OPERATION: u32 = 11;
const RETRY_EXCEEDED: u32 = 12;
const NOT_READY: u32 = 13;

/// Memory that a request names: a key, and the accessed range.
struct KeyRange {
    key: u32,
    address: u64,
    bytes: u64,
}

/// Outcome of a request.
enum Outcome {
    Done,
    /// The request stays queued.
    Waits,
    /// Status for the requester; `peer` is true if the peer's queue pair fails too.
    Failed {
        status: u32,
        peer: bool,
    },
}

const fn failed(status: u32) -> Outcome {
    Outcome::Failed { status, peer: false }
}

const fn both_failed(status: u32) -> Outcome {
    Outcome::Failed { status, peer: true }
}

impl State {
    /// Resumes waiting requests that can proceed.
    pub(crate) fn progress(&mut self) {
        let waiting: Vec<u32> = self.waiting.iter().copied().collect();
        for number in waiting {
            self.run(number);
        }
    }

    /// Executes a queue pair's requests in order until one has to wait.
    pub(crate) fn run(&mut self, number: u32) {
        while let Some(queue) = self.queue_pairs.get_mut(&number) {
            if queue.state == QueueState::Error {
                self.flush(number);
                break;
            }
            let ready = queue.state == QueueState::ReadyToSend;
            let Some(send) = (if ready { queue.sends.pop_front() } else { None }) else { break };
            let device = queue.device;
            if self.ports[device].paused {
                self.put_back(number, send);
                return;
            }
            match self.carry_out(number, &send) {
                Outcome::Done => {
                    if send.signalled() {
                        self.complete_send(number, &send, 0);
                    }
                }
                Outcome::Waits => {
                    self.put_back(number, send);
                    return;
                }
                Outcome::Failed { status, peer } => {
                    self.complete_send(number, &send, status);
                    let peer = peer.then(|| self.queue_pairs.get(&number).map(|queue| queue.peer)).flatten();
                    self.fail(number);
                    if let Some(peer) = peer {
                        self.fail(peer);
                    }
                }
            }
        }
        self.waiting.remove(&number);
    }

    fn put_back(&mut self, number: u32, send: Send) {
        if let Some(queue) = self.queue_pairs.get_mut(&number) {
            queue.sends.push_front(send);
            self.waiting.insert(number);
        }
    }

    /// Moves a queue pair to its error state and flushes it.
    pub(crate) fn fail(&mut self, number: u32) {
        if let Some(queue) = self.queue_pairs.get_mut(&number) {
            let already = std::mem::replace(&mut queue.state, QueueState::Error) == QueueState::Error;
            let (context, place, shares) = (queue.context, queue.place, queue.shared.is_some());
            self.flush(number);
            if shares && !already {
                // It consumes no more receives of its shared queue.
                self.tell(context, EVENT_QP_LAST_WQE_REACHED, place);
            }
        }
    }

    fn flush(&mut self, number: u32) {
        let Some(queue) = self.queue_pairs.get_mut(&number) else { return };
        let (sends, receives) = (std::mem::take(&mut queue.sends), std::mem::take(&mut queue.receives));
        let completions = queue.completions;
        let ids = sends.iter().map(|send| send.wr_id).chain(receives.iter().map(|receive| receive.wr_id));
        for wr_id in ids {
            let entry = ibv_wc { wr_id, status: FLUSHED, qp_num: number, ..ibv_wc::default() };
            self.complete(completions, entry, false);
        }
        self.waiting.remove(&number);
    }

    fn complete_send(&mut self, number: u32, send: &Send, status: u32) {
        let Some(queue) = self.queue_pairs.get(&number) else { return };
        let entry = ibv_wc {
            wr_id: send.wr_id,
            status,
            opcode: send.completion_opcode(),
            byte_len: send.bytes() as u32,
            qp_num: number,
            ..ibv_wc::default()
        };
        self.complete(queue.completions, entry, false);
    }

    fn carry_out(&mut self, number: u32, send: &Send) -> Outcome {
        let queue = &self.queue_pairs[&number];
        let reads = send.opcode == WR_RDMA_READ;
        let local = if reads { ACCESS_LOCAL_WRITE } else { 0 };
        if send.inline.is_none() && !self.pieces_allow(queue.domain, &send.pieces, local) {
            return failed(LOCAL_PROTECTION);
        }
        let peer_number = queue.peer;
        let Some(peer) = self.reachable_peer(number) else { return failed(RETRY_EXCEEDED) };
        if !matches!(send.opcode, WR_SEND | WR_SEND_WITH_IMM) && send.bytes() > 0 {
            let needed = if reads { ACCESS_REMOTE_READ } else { ACCESS_REMOTE_WRITE };
            let range = KeyRange { key: send.remote_key, address: send.remote_address, bytes: send.bytes() };
            if peer.access & needed == 0 || !self.allows(peer.domain, &range, needed) {
                let (context, place) = (peer.context, peer.place);
                self.tell(context, EVENT_QP_ACCESS_ERR, place);
                return both_failed(REMOTE_ACCESS);
            }
        }
        if send.takes_receive() {
            return self.deliver(number, peer_number, send);
        }
        if reads {
            self.scatter(self.remote_place(send), send.bytes(), &send.pieces);
        } else {
            self.gather(send, self.remote_place(send));
        }
        Outcome::Done
    }

    /// Returns the queue pair at the other end, if it would respond.
    pub(crate) fn reachable_peer(&self, number: u32) -> Option<&QueuePair> {
        let queue = &self.queue_pairs[&number];
        let peer = self.queue_pairs.get(&queue.peer)?;
        let answers = matches!(peer.state, QueueState::ReadyToReceive | QueueState::ReadyToSend)
            && queue.peer_device == Some(peer.device)
            && peer.peer == number
            && peer.path_mtu == queue.path_mtu
            && self.ports[queue.device].up
            && self.ports[peer.device].up;
        answers.then_some(peer)
    }

    /// Delivers a message, or a write with immediate: consumes one of the peer's receives.
    fn deliver(&mut self, number: u32, peer_number: u32, send: &Send) -> Outcome {
        let Some(receive) = self.take_receive(peer_number) else { return self.not_ready(number) };
        let peer = &self.queue_pairs[&peer_number];
        let completions = peer.completions;
        let is_write = send.opcode == WR_RDMA_WRITE_WITH_IMM;
        let room: u64 = receive.pieces.iter().map(|piece| u64::from(piece.length)).sum();
        let (status, requester) = if is_write {
            (0, 0)
        } else if room < send.bytes() {
            (LOCAL_LENGTH, REMOTE_INVALID)
        } else if !self.pieces_allow(peer.domain, &receive.pieces, ACCESS_LOCAL_WRITE) {
            (LOCAL_PROTECTION, REMOTE_OPERATION)
        } else {
            (0, 0)
        };
        if status == 0 {
            if is_write {
                self.gather(send, self.remote_place(send));
            } else {
                self.scatter_message(send, &receive.pieces);
            }
        }
        let entry = ibv_wc {
            wr_id: receive.wr_id,
            status,
            opcode: if is_write { WC_RECV_RDMA_WITH_IMM } else { WC_RECV },
            byte_len: send.bytes() as u32,
            imm_data: send.immediate,
            wc_flags: if send.has_immediate() { WC_WITH_IMM } else { 0 },
            qp_num: peer_number,
            ..ibv_wc::default()
        };
        self.complete(completions, entry, send.flags & SEND_SOLICITED != 0);
        if status != 0 {
            return both_failed(requester);
        }
        if let Some(queue) = self.queue_pairs.get_mut(&number) {
            queue.retries.left = queue.retries.limit;
        }
        Outcome::Done
    }

    fn take_receive(&mut self, number: u32) -> Option<Receive> {
        let queue = self.queue_pairs.get_mut(&number)?;
        match queue.shared {
            Some(shared) => self.shared.get_mut(&shared)?.receives.pop_front(),
            None => queue.receives.pop_front(),
        }
    }

    fn not_ready(&mut self, number: u32) -> Outcome {
        let Some(queue) = self.queue_pairs.get_mut(&number) else { return failed(RETRY_EXCEEDED) };
        match queue.retries.left {
            7 => Outcome::Waits,
            0 => failed(NOT_READY),
            _ => {
                queue.retries.left -= 1;
                Outcome::Waits
            }
        }
    }

    fn pieces_allow(&self, domain: u32, pieces: &[ibv_sge], access: u32) -> bool {
        let range = |piece: &ibv_sge| KeyRange { key: piece.lkey, address: piece.addr, bytes: piece.length.into() };
        pieces.iter().all(|piece| self.allows(domain, &range(piece), access))
    }

    /// Returns true if a key of this domain covers a range with these rights.
    fn allows(&self, domain: u32, range: &KeyRange, access: u32) -> bool {
        let Some(memory) = self.memories.get(&range.key) else { return false };
        let inside = range.address >= memory.address
            && range.address.checked_add(range.bytes).is_some_and(|end| end <= memory.address + memory.bytes);
        memory.domain == domain && inside && memory.access & access == access
    }

    /// Returns true if a posted request uses this key.
    pub(crate) fn is_posted(&self, key: u32) -> bool {
        let names = |pieces: &[ibv_sge]| pieces.iter().any(|piece| piece.lkey == key);
        let sent = |send: &Send| send.inline.is_none() && names(&send.pieces);
        self.queue_pairs
            .values()
            .any(|queue| queue.sends.iter().any(sent) || queue.receives.iter().any(|receive| names(&receive.pieces)))
            || self.shared.values().any(|shared| shared.receives.iter().any(|receive| names(&receive.pieces)))
    }
}

/// Copies between two ranges of registered memory.
fn move_bytes(to: u64, from: u64, bytes: u64) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: the caller checked that both ranges are registered, and registrations hold their memory mapped and, if
    // they state so, writable; the fabric is locked, so none of them ends meanwhile. Other threads may access the same
    // bytes, which these copies allow.
    unsafe { copy_bytes(to, from, bytes as usize) };
}

impl State {
    /// Returns where a registered piece is accessed.
    fn place(&self, piece: &ibv_sge) -> u64 {
        self.memories.get(&piece.lkey).map_or(piece.addr, |memory| memory.place(piece.addr))
    }

    /// Returns where the peer's end of a one-sided request is accessed.
    fn remote_place(&self, send: &Send) -> u64 {
        let memory = self.memories.get(&send.remote_key);
        memory.filter(|_| send.bytes() > 0).map_or(send.remote_address, |memory| memory.place(send.remote_address))
    }

    /// Copies a request's pieces, or its inline bytes, to one range.
    fn gather(&self, send: &Send, mut to: u64) {
        if let Some(bytes) = &send.inline {
            move_bytes(to, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64);
            return;
        }
        for piece in &send.pieces {
            move_bytes(to, self.place(piece), piece.length.into());
            to += u64::from(piece.length);
        }
    }

    /// Copies one range to pieces that have room for it.
    fn scatter(&self, mut from: u64, mut bytes: u64, pieces: &[ibv_sge]) {
        for piece in pieces {
            let part = bytes.min(piece.length.into());
            move_bytes(self.place(piece), from, part);
            (from, bytes) = (from + part, bytes - part);
        }
    }

    /// Copies a request's pieces to a receive's pieces, which have room for them.
    fn scatter_message(&self, send: &Send, pieces: &[ibv_sge]) {
        let inline = send.inline.as_ref().map(|bytes| (bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64));
        let sources = match inline {
            Some(source) => vec![source],
            None => send.pieces.iter().map(|piece| (self.place(piece), u64::from(piece.length))).collect(),
        };
        let mut places = pieces.iter().map(|piece| (self.place(piece), u64::from(piece.length)));
        let (mut to, mut room) = places.next().unwrap_or((0, 0));
        for (mut from, mut bytes) in sources {
            while bytes > 0 {
                if room == 0 {
                    match places.next() {
                        Some(place) => (to, room) = place,
                        None => return,
                    }
                }
                let part = bytes.min(room);
                move_bytes(to, from, part);
                (from, bytes, to, room) = (from + part, bytes - part, to + part, room - part);
            }
        }
    }
}
