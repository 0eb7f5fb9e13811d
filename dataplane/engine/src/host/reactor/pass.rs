//! Passes over the connections of one driver: what they bring, one frame or payload after the other.
//!
//! A pass holds no borrow of the reactor, so whoever takes an arrival may send and close in between.

use kvplane_transport::{ConnectionId, Input};

use super::Reactor;
use super::connections::Connections;
use super::links::Link;

/// Frames taken from one connection in one round, so that none starves the others.
const FRAMES_PER_ROUND: usize = 128;

/// A frame or a payload that came on a connection.
pub(crate) struct Arrival {
    /// The connection.
    pub(crate) link: Link,
    /// What came. The body of a frame is the pass's: [`Pass::body`].
    pub(crate) input: Input,
    /// When it came.
    pub(crate) now_ns: u64,
}

/// One pass over the connections of a driver that have input.
pub(crate) struct Pass {
    body: Vec<u8>,
    current: Option<ConnectionId>,
    /// Frames and payloads of the current connection.
    frames: usize,
    /// Connections that have used up their share: they come again in the next round.
    again: Vec<ConnectionId>,
    /// Position from which rings in shared memory are still to be looked at.
    from: u32,
    /// How many more lanes to stock engines may have a turn.
    turns: usize,
}

impl Pass {
    /// The body of the frame that came last.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    fn begin(&mut self, id: ConnectionId) -> ConnectionId {
        (self.current, self.frames) = (Some(id), 0);
        id
    }
}

/// How a pass goes over a driver whose payloads follow their frames.
struct Streams {
    link: fn(ConnectionId) -> Link,
    /// The next connection that has some input.
    next: fn(&mut Connections, u64) -> Option<ConnectionId>,
    input: fn(&mut Connections, ConnectionId, &mut Vec<u8>, u64) -> Input,
    /// Has a connection come again.
    again: fn(&mut Connections, ConnectionId),
}

const TCP: Streams = Streams {
    link: Link::Tcp,
    next: |connections, now_ns| connections.tcp.next_ready(now_ns),
    input: |connections, id, body, now_ns| connections.tcp.input(id, body, now_ns),
    again: |connections, id| connections.tcp.ready_again(id),
};

const RDMA: Streams = Streams {
    link: Link::Rdma,
    next: |connections, _| connections.rdma.next_ready(),
    input: |connections, id, body, _| connections.rdma.input(id, body),
    again: |connections, id| connections.rdma.ready_again(id),
};

impl Reactor {
    /// Begins a pass over one driver. It is to be taken to its end: the buffer for bodies goes along with it.
    pub(crate) fn begin_pass(&mut self) -> Pass {
        Pass {
            body: core::mem::take(&mut self.scratch),
            current: None,
            frames: 0,
            again: Vec::new(),
            from: 0,
            turns: self.connections.stock_lanes.ready_len(),
        }
    }

    /// What a connection over TCP brings next; nothing at the end of the pass.
    #[inline]
    pub(crate) fn next_tcp(&mut self, pass: &mut Pass) -> Option<Arrival> {
        self.next_of(pass, &TCP)
    }

    /// What a connection over RDMA brings next; nothing at the end of the pass.
    #[inline]
    pub(crate) fn next_rdma(&mut self, pass: &mut Pass) -> Option<Arrival> {
        self.next_of(pass, &RDMA)
    }

    /// Inlined, so that what differs between drivers is known where it is called: this runs for every frame.
    #[inline(always)]
    fn next_of(&mut self, pass: &mut Pass, driver: &Streams) -> Option<Arrival> {
        loop {
            let id = match pass.current {
                Some(id) => id,
                None => match (driver.next)(&mut self.connections, self.rounds.now_ns()) {
                    Some(id) => pass.begin(id),
                    None => break,
                },
            };
            if pass.frames == FRAMES_PER_ROUND {
                pass.again.push(id);
                pass.current = None;
                continue;
            }
            let input = (driver.input)(&mut self.connections, id, &mut pass.body, self.rounds.now_ns());
            if matches!(input, Input::Wait) {
                pass.current = None;
                continue;
            }
            pass.frames += 1;
            return Some(Arrival { link: (driver.link)(id), input, now_ns: self.arrival_ns() });
        }
        for id in pass.again.drain(..) {
            (driver.again)(&mut self.connections, id);
        }
        self.scratch = core::mem::take(&mut pass.body);
        None
    }

    /// What a connection over shared memory brings next; nothing at the end of the pass.
    #[inline]
    pub(crate) fn next_shm(&mut self, pass: &mut Pass) -> Option<Arrival> {
        loop {
            let id = match pass.current {
                Some(id) if pass.frames < FRAMES_PER_ROUND => id,
                _ => match self.connections.shm.next_ready(pass.from) {
                    Some(id) => {
                        pass.from = id.index + 1;
                        pass.begin(id)
                    }
                    None => break,
                },
            };
            let Connections { poller, shm, .. } = &mut self.connections;
            let input = shm.input(poller, id, &mut pass.body);
            if matches!(input, Input::Wait) {
                pass.current = None;
                continue;
            }
            pass.frames += 1;
            return Some(Arrival { link: Link::Shm(id), input, now_ns: self.arrival_ns() });
        }
        self.scratch = core::mem::take(&mut pass.body);
        None
    }

    /// What a lane to a stock engine brings next; nothing at the end of the pass. Comes with [`Input::Wait`] too, as
    /// there may be events then: a request's memory is back before its answer is looked at.
    pub(crate) fn next_stock(&mut self, pass: &mut Pass) -> Option<Arrival> {
        loop {
            let id = match pass.current {
                Some(id) => id,
                None if pass.turns == 0 => break,
                None => match self.connections.stock_lanes.next_ready() {
                    Some(id) => {
                        pass.turns -= 1;
                        pass.begin(id)
                    }
                    None => break,
                },
            };
            if pass.frames == FRAMES_PER_ROUND {
                self.connections.stock_lanes.ready_again(id);
                pass.current = None;
                continue;
            }
            let Connections { poller, stock_lanes, .. } = &mut self.connections;
            let input = stock_lanes.input(poller, id, &mut pass.body);
            let now_ns = match input {
                Input::Wait => {
                    pass.current = None;
                    self.rounds.now_ns()
                }
                _ => {
                    pass.frames += 1;
                    self.arrival_ns()
                }
            };
            return Some(Arrival { link: Link::Mooncake(id), input, now_ns });
        }
        self.scratch = core::mem::take(&mut pass.body);
        None
    }
}
