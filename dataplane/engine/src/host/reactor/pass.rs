//! Passes over the connections of one driver: return their input, one frame or payload at a time.
//!
//! A pass holds no borrow of the reactor, so a shell that takes an arrival may send and close in between.

use kvplane_transport::{ConnectionId, Input};

use super::Reactor;
use super::connections::Connections;
use super::links::Link;

/// Frames taken from one connection in one round, so that none starves the others.
const FRAMES_PER_ROUND: usize = 128;

/// Frame or payload that arrived on a connection.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub(crate) struct Arrival {
    pub(crate) link: Link,
    /// Frame or payload. The body of a frame is in the pass: [`Pass::body`].
    pub(crate) input: Input,
    /// Time of arrival.
    pub(crate) now_ns: u64,
}

/// Pass over the connections of a driver that have input.
pub(crate) struct Pass {
    body: Vec<u8>,
    current: Option<ConnectionId>,
    /// Frames and payloads taken from the current connection.
    frames: usize,
    /// Connections that have used up their share: they are ready again in the next round.
    again: Vec<ConnectionId>,
    /// Index from which rings in shared memory are still to be visited.
    from: u32,
    /// Lanes to stock engines that may still have a turn.
    turns: usize,
}

impl Pass {
    /// Returns the body of the last frame.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    fn begin(&mut self, id: ConnectionId) -> ConnectionId {
        (self.current, self.frames) = (Some(id), 0);
        id
    }
}

/// Operations of a driver whose payloads follow their frames.
struct Streams {
    link: fn(ConnectionId) -> Link,
    /// Returns the next connection that has input.
    next: fn(&mut Connections, u64) -> Option<ConnectionId>,
    input: fn(&mut Connections, ConnectionId, &mut Vec<u8>, u64) -> Input,
    /// Marks a connection as ready again.
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
    /// Begins a pass over one driver. The caller must run it to its end: the pass takes the buffer for bodies.
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

    /// Returns the next input of a TCP connection; `None` at the end of the pass.
    #[inline]
    pub(crate) fn next_tcp(&mut self, pass: &mut Pass) -> Option<Arrival> {
        self.next_of(pass, &TCP)
    }

    /// Returns the next input of an RDMA connection; `None` at the end of the pass.
    #[inline]
    pub(crate) fn next_rdma(&mut self, pass: &mut Pass) -> Option<Arrival> {
        self.next_of(pass, &RDMA)
    }

    /// Inlined, so that the driver is known at the call site: this runs for every frame.
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

    /// Returns the next input of a connection over shared memory; `None` at the end of the pass.
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

    /// Returns the next input of a lane to a stock engine; `None` at the end of the pass. [`Input::Wait`] is returned
    /// too, because events may be queued then: a request's memory is returned before its answer is handled.
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use kvplane_proto::RequestId;
    use kvplane_proto::frame::Header;
    use kvplane_proto::message::{Kind, Operation};
    use kvplane_transport::{Event, Fault, ZeroCopyOptions};

    use super::*;

    #[test]
    fn a_connection_has_its_share_of_each_pass() {
        let connections = Connections::new(Fault::new(None, ZeroCopyOptions::default()), None, None);
        let mut reactor = Reactor::new(connections.expect("a poller"));
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        let mut peer = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
        reactor.connections.listen_tcp(listener).expect("a listener");
        let frames = FRAMES_PER_ROUND + 10;
        let header = Header::request(Kind::Request(Operation::Hello), RequestId::default()).with_body(b"body", 0);
        let frame = [&header.encode()[..], b"body"].concat();
        peer.write_all(&frame.repeat(frames)).expect("room in a socket");
        let mut shares = Vec::new();
        while shares.iter().sum::<usize>() < frames {
            reactor.wait(Duration::from_millis(10)).expect("a working poller");
            reactor.look(|_| unreachable!("there is no server for stock engines")).expect("a working poller");
            while let Some(event) = reactor.connections.tcp.poll_event() {
                assert!(matches!(event, Event::Accepted(_)), "{event:?} after {shares:?}");
            }
            let (mut share, mut pass) = (0, reactor.begin_pass());
            while let Some(arrival) = reactor.next_tcp(&mut pass) {
                assert!(matches!(arrival.input, Input::Frame(_)) && pass.body() == b"body");
                share += 1;
            }
            // Ends the round: connections that have used up their share become ready again.
            reactor.connections.flush();
            shares.push(share);
            assert!(shares.len() < 1000, "the frames do not come: {shares:?}");
        }
        assert!(shares.iter().all(|share| *share <= FRAMES_PER_ROUND), "{shares:?}");
    }
}
