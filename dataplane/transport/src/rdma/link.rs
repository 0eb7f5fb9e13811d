//! One connection: a queue pair, its credits, and what waits on it in both directions.

use std::collections::{HashMap, HashSet, VecDeque};

use kvplane_proto::frame::Header;
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_sys::IoBuf;
use kvplane_sys::verbs::{Mtu, QueuePair};

use super::credits::Credits;
use super::endpoints::EndpointId;
use super::foreign::Foreign;
use super::mixing::MixedMap;
use super::wire::{Envelope, Place, SegmentKey};
use crate::types::{CloseCause, OutgoingPayload, Pieces};

/// What a link is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// We made an offer and wait for the answer.
    Offered,
    /// In use.
    Open,
    /// It ends when the device holds nothing of it any more.
    Closing,
}

/// What a request on the queue pair was for: its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Nothing that anybody waits for.
    Nothing,
    /// A message in this slot.
    Slot(u32),
    /// The last write of this payload.
    Push(u32),
    /// A read of the payload that arrives.
    Pull,
    /// A part of a copy that is not its last.
    CopyPart,
    /// The last part of the copy of this token, or all of it.
    Copy(u64),
}

/// Where a token has the kind of its work.
const KIND_SHIFT: u32 = 60;
const COPY: u64 = 5;

impl Work {
    pub(super) const fn to_bits(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Slot(slot) => 1 << KIND_SHIFT | slot as u64,
            Self::Push(index) => 2 << KIND_SHIFT | index as u64,
            Self::Pull => 3 << KIND_SHIFT,
            Self::CopyPart => 4 << KIND_SHIFT,
            Self::Copy(token) => COPY << KIND_SHIFT | token,
        }
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        match bits >> KIND_SHIFT {
            1 => Self::Slot(bits as u32),
            2 => Self::Push(bits as u32),
            3 => Self::Pull,
            4 => Self::CopyPart,
            COPY => Self::Copy(bits & Self::MOST_TOKEN),
            _ => Self::Nothing,
        }
    }

    /// Whether this is [`Self::Copy`].
    #[inline]
    pub(super) const fn is_copy(bits: u64) -> bool {
        bits >> KIND_SHIFT == COPY
    }

    /// The largest token of a copy.
    pub(super) const MOST_TOKEN: u64 = (1 << KIND_SHIFT) - 1;
}

/// A message that tells something by itself.
#[derive(Clone, Copy, Debug)]
pub(super) enum Control {
    /// A payload was fetched, or its part was.
    Pulled(u64),
    /// The next part of a payload lies here.
    Part {
        token: u64,
        place: Place,
        more: bool,
    },
    AskKey(SegmentId),
    Key(SegmentId, SegmentKey),
    SegmentGone(SegmentId),
}

/// A frame that waits to be sent.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) payload: Option<OutgoingPayload>,
    /// Where its answers may be written.
    pub(super) offers: Vec<Place>,
}

/// A record that is being sent, from `at` on.
pub(super) struct OutgoingRecord {
    pub(super) envelope: Envelope,
    pub(super) record: Vec<u8>,
    pub(super) at: usize,
}

/// A payload that is lent until it was written to the peer or fetched by it.
pub(super) struct LentPayload {
    pub(super) hold: Option<u64>,
    /// Keeps the memory.
    pub(super) pieces: Pieces,
    /// What went through a bounce buffer so far, and the buffer.
    pub(super) bounced: Option<(u32, usize)>,
}

/// The payload of a frame that the host has seen.
pub(super) enum ArrivedPayload {
    /// It came along.
    Eager(Vec<u8>),
    /// It was written here.
    Pushed(Pieces),
    /// It waits there.
    Pull { token: u64, sources: VecDeque<Place>, parts: bool },
}

/// What arrives next.
pub(super) enum Expect {
    /// A frame.
    Frame,
    /// The host has a frame and will say where its payload goes.
    Decision { arrived: ArrivedPayload, bytes: u64 },
    /// A payload is being fetched.
    Pull(Pull),
    /// A payload is in place.
    Done(Option<u64>),
}

/// A payload that is being fetched.
pub(super) struct Pull {
    pub(super) token: u64,
    pub(super) sources: VecDeque<Place>,
    pub(super) parts: bool,
    /// Where it goes; nowhere when it is not wanted.
    pub(super) pieces: Vec<IoBuf>,
    /// The first piece with room, and what is filled of it.
    pub(super) next: usize,
    pub(super) filled: usize,
    /// Bytes not asked for yet.
    pub(super) left_bytes: u64,
    pub(super) wanted: bool,
    pub(super) checksum: bool,
    /// Reads under way.
    pub(super) reading: u32,
    /// Another part was asked for.
    pub(super) asked: bool,
    /// The read that goes through a bounce buffer, and where its bytes belong.
    pub(super) bounce: Option<(u32, IoBuf)>,
}

/// What we know of a peer's segment.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyState {
    /// The question is under way.
    Asked,
    Known(SegmentKey),
}

/// A copy between our memory and a peer's segment.
pub(super) struct Copy {
    pub(super) token: u64,
    pub(super) segment: SegmentId,
    pub(super) offset: u64,
    pub(super) local: IoBuf,
    pub(super) write: bool,
}

/// One connection.
pub(super) struct Link {
    pub(super) nic: u32,
    pub(super) endpoint: EndpointId,
    pub(super) state: State,
    pub(super) queue_pair: QueuePair,
    pub(super) packet_number: u32,
    pub(super) credits: Credits,
    pub(super) grant: u16,
    /// Requests that the queue pair takes.
    pub(super) send_depth: usize,
    /// The longest message that both sides take.
    pub(super) message_bytes: usize,
    /// The slower of both ports; 0 when that is not known.
    pub(super) bits_per_second: u64,
    /// The longest packets that both ports take.
    pub(super) path_mtu: Mtu,
    /// Whether we asked for it.
    pub(super) asks: bool,
    /// Answers that are outstanding.
    pub(super) awaited: u64,
    // In which lists of the driver it is.
    pub(super) ready: bool,
    pub(super) dirty: bool,
    /// Input is not taken because too many answers wait to be sent.
    pub(super) paused: bool,
    // Receiving.
    pub(super) inbox: VecDeque<(Envelope, u32)>,
    /// A record that is not complete, and how it began.
    pub(super) assembly: Vec<u8>,
    pub(super) began: Option<Envelope>,
    pub(super) expect: Expect,
    /// Where the peer wants answers.
    pub(super) wanted_at: HashMap<RequestId, Vec<Place>>,
    /// Where we want answers.
    pub(super) offered: HashMap<RequestId, Pieces>,
    // Sending.
    pub(super) control: VecDeque<Control>,
    pub(super) frames: VecDeque<Frame>,
    /// Pieces of memory of the queued frames beyond the first of each.
    pub(super) extra_pieces: usize,
    pub(super) sending: Option<OutgoingRecord>,
    pub(super) lent: slab::Slab<LentPayload>,
    /// What the next frame offers.
    pub(super) offering: Vec<Place>,
    // Copies.
    /// The one that was used last: most copies in a row are of one segment.
    pub(super) last_key: Option<(SegmentId, SegmentKey)>,
    pub(super) keys: MixedMap<SegmentId, KeyState>,
    /// Segments whose keys the peer has from us.
    pub(super) told: HashSet<SegmentId>,
    pub(super) waiting: VecDeque<Copy>,
    /// How an earlier part of the copy failed whose last part has not ended yet.
    pub(super) part_failed: Option<Status>,
    /// What makes it one with a stock engine, if it is.
    pub(super) foreign: Option<Box<Foreign>>,
    // The end.
    pub(super) why: Option<CloseCause>,
    pub(super) closing_since_ns: Option<u64>,
    /// Since when nothing has been seen to happen on it, or its peer was asked for a sign of life.
    pub(super) idle_since_ns: Option<u64>,
    pub(super) last_receive: bool,
    /// Close once everything is sent.
    pub(super) closing_after_send: Option<CloseCause>,
}

impl Link {
    /// A link that is not connected.
    pub(super) fn new((nic, endpoint): (u32, EndpointId), queue_pair: QueuePair, grant: u16, asks: bool) -> Self {
        Self {
            nic,
            endpoint,
            state: State::Offered,
            queue_pair,
            packet_number: 0,
            credits: Credits::new(grant, 0),
            grant,
            send_depth: 0,
            message_bytes: 0,
            bits_per_second: 0,
            path_mtu: Mtu::Bytes256,
            asks,
            awaited: 0,
            ready: false,
            dirty: false,
            paused: false,
            inbox: VecDeque::new(),
            assembly: Vec::new(),
            began: None,
            expect: Expect::Frame,
            wanted_at: HashMap::new(),
            offered: HashMap::new(),
            control: VecDeque::new(),
            frames: VecDeque::new(),
            extra_pieces: 0,
            sending: None,
            lent: slab::Slab::new(),
            offering: Vec::new(),
            last_key: None,
            keys: MixedMap::default(),
            told: HashSet::new(),
            waiting: VecDeque::new(),
            part_failed: None,
            foreign: None,
            why: None,
            closing_since_ns: None,
            idle_since_ns: None,
            last_receive: false,
            closing_after_send: None,
        }
    }

    /// What waits to be sent, where it is an answer.
    pub(super) fn backlog(&self) -> usize {
        self.frames.len() + if self.asks { 0 } else { self.extra_pieces }
    }

    /// Whether nothing is under way on it, in no direction.
    pub(super) fn is_idle(&self) -> bool {
        self.state == State::Open
            && self.is_sent()
            && self.awaited == 0
            && self.inbox.is_empty()
            && self.began.is_none()
            && matches!(self.expect, Expect::Frame)
            && self.waiting.is_empty()
            && self.wanted_at.is_empty()
            && self.queue_pair.unsent() == 0
            && self.queue_pair.outstanding() == 0
    }

    /// Whether nothing waits to be sent or fetched.
    pub(super) fn is_sent(&self) -> bool {
        self.frames.is_empty() && self.sending.is_none() && self.control.is_empty() && self.lent.is_empty()
    }
}

impl Frame {
    pub(super) fn extra_pieces(&self) -> usize {
        self.payload.as_ref().map_or(0, |payload| payload.buffers.as_slice().len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_survives_the_device() {
        let all = [
            Work::Nothing,
            Work::Slot(7),
            Work::Push(u32::MAX),
            Work::Pull,
            Work::CopyPart,
            Work::Copy(Work::MOST_TOKEN),
        ];
        for work in all {
            assert_eq!(Work::from_bits(work.to_bits()), work);
        }
    }
}
