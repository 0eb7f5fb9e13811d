//! The fault decorator over real sockets: order under delays, corruption that checksums detect, and ends without
//! leftovers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::RequestId;
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_sys::{HugePages, IoBuf, Poller, Readiness, Region, RegionOptions, net};
use kvplane_transport::{
    CloseCause, ConnectionId, Event, Fault, FaultPlan, Input, OutgoingPayload, Target, Token, ZeroCopyOptions,
};

const PAYLOAD_BYTES: usize = 100_000;

/// Events of one end, in order.
#[derive(PartialEq, Debug)]
enum EndEvent {
    Frame(u32, Vec<u8>),
    Payload(Option<u64>),
}

/// A driver, its poller, and memory for payloads.
struct End {
    poller: Poller,
    tcp: Fault,
    readiness: Vec<Readiness>,
    memory: Arc<Region>,
    now_ns: u64,
    connected: Option<ConnectionId>,
    gone: Option<CloseCause>,
    holds: u64,
    seen: Vec<EndEvent>,
}

impl End {
    fn new(plan: Option<&FaultPlan>) -> Self {
        let options = RegionOptions {
            huge: HugePages::Never,
            prefault: false,
            ..RegionOptions::new("fault-test", PAYLOAD_BYTES)
        };
        Self {
            poller: Poller::new().expect("a poller"),
            tcp: Fault::new(plan, ZeroCopyOptions::default()),
            readiness: Vec::new(),
            memory: Region::allocate(&options).expect("memory"),
            now_ns: 1,
            connected: None,
            gone: None,
            holds: 0,
            seen: Vec::new(),
        }
    }

    fn round(&mut self) {
        let longest = Duration::from_millis(u64::from(self.tcp.poll_timeout() != Some(0)));
        self.poller.wait(longest, &mut self.readiness).expect("a working poller");
        for readiness in core::mem::take(&mut self.readiness) {
            let token = Token::from_bits(readiness.token).expect("a token of the driver");
            self.tcp.ready(&self.poller, token, &readiness);
        }
        while let Some(event) = self.tcp.poll_event() {
            match event {
                Event::Accepted(id) | Event::Connected(id) => self.connected = Some(id),
                Event::Sent(_) => self.holds -= 1,
                Event::Gone(_, why) => self.gone = Some(why),
            }
        }
        while let Some(id) = self.tcp.next_ready(self.now_ns) {
            let mut scratch = Vec::new();
            loop {
                match self.tcp.input(id, &mut scratch, self.now_ns) {
                    Input::Wait => break,
                    Input::Frame(header) => {
                        self.seen.push(EndEvent::Frame(header.request.index, scratch.clone()));
                        if header.payload_bytes > 0 {
                            let target = Target::Memory { buffer: self.buffer(), checksum: true };
                            self.tcp.receive_payload(id, target);
                        }
                    }
                    Input::Payload(checksum) => self.seen.push(EndEvent::Payload(checksum)),
                }
            }
        }
        self.tcp.flush(&self.poller);
    }

    fn buffer(&self) -> IoBuf {
        IoBuf::whole(Arc::clone(&self.memory)).slice(0, PAYLOAD_BYTES)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; PAYLOAD_BYTES];
        self.buffer().copy_out(&mut bytes);
        bytes
    }

    fn send(&mut self, number: u32, body: &[u8], payload: bool) -> bool {
        let id = self.connected.expect("a connection");
        let request = RequestId { index: number, generation: 1 };
        let mut header = Header::request(Kind::Request(Operation::Put), request).with_body(body, 1);
        let payload = payload.then(|| {
            header = header.with_payload(PAYLOAD_BYTES as u64, Some(payload_checksum(&self.bytes())));
            self.holds += 1;
            OutgoingPayload { buffers: self.buffer().into(), hold: Some(1) }
        });
        self.tcp.send(id, &header, body, payload)
    }
}

fn until(ends: &mut [&mut End], mut done: impl FnMut(&[&mut End]) -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !done(ends) {
        assert!(Instant::now() < limit, "no event arrives any more");
        ends.iter_mut().for_each(|end| end.round());
    }
}

/// Creates a connected sender and receiver, each with its plan.
fn pair(sender: Option<&FaultPlan>, receiver: Option<&FaultPlan>) -> (End, End) {
    let (mut sender, mut receiver) = (End::new(sender), End::new(receiver));
    let listener = net::tcp_listener(([127, 0, 0, 1], 0).into(), 8).expect("a port");
    let address = listener.local_addr().expect("an address");
    receiver.tcp.listen(&receiver.poller, listener).expect("a poller with room");
    sender.tcp.connect(&sender.poller, address).expect("a socket");
    until(&mut [&mut sender, &mut receiver], |ends| {
        ends[0].gone.is_some() || ends.iter().all(|end| end.connected.is_some())
    });
    (sender, receiver)
}

#[test]
fn a_delayed_frame_delays_the_frames_behind_it() {
    const FRAMES: u32 = 20;
    let plan = FaultPlan { seed: 3, delay_per_frame: 0.5, delay_max_ns: 1_000_000, ..FaultPlan::default() };
    let (mut sender, mut receiver) = pair(None, Some(&plan));
    for number in 0..FRAMES {
        sender.send(number, &number.to_le_bytes(), number % 3 == 0);
    }
    let mut steps = 0;
    loop {
        // While time stands still, the next delayed frame is not delivered.
        let all =
            |end: &End| end.seen.iter().filter(|seen| matches!(seen, EndEvent::Frame(..))).count() == FRAMES as usize;
        // A timeout of 0 means more input than fits into a round.
        let held = |end: &End| end.tcp.poll_timeout().is_some_and(|due_ns| due_ns > 0);
        until(&mut [&mut sender, &mut receiver], |ends| held(ends[1]) || all(ends[1]));
        let Some(due_ns) = receiver.tcp.poll_timeout() else { break };
        assert!((receiver.now_ns..=receiver.now_ns + 1_000_000).contains(&due_ns));
        if due_ns > receiver.now_ns {
            let before = receiver.seen.len();
            (0..3).for_each(|_| receiver.round());
            assert_eq!(receiver.seen.len(), before);
            receiver.now_ns = due_ns;
        }
        receiver.round();
        steps += 1;
    }
    until(&mut [&mut sender, &mut receiver], |ends| ends[0].holds == 0 && ends[1].seen.len() == 27);
    let numbers: Vec<u32> = receiver
        .seen
        .iter()
        .filter_map(|seen| if let EndEvent::Frame(n, _) = seen { Some(*n) } else { None })
        .collect();
    assert_eq!(numbers, (0..FRAMES).collect::<Vec<_>>());
    for seen in &receiver.seen {
        if let EndEvent::Frame(number, body) = seen {
            assert_eq!(body, &number.to_le_bytes(), "a held frame keeps its body");
        }
    }
    assert_eq!(receiver.tcp.counters().delayed, steps);
    assert!(steps > 5, "{steps}");
}

#[test]
fn a_corrupted_payload_differs_in_memory_and_checksum() {
    let plan = FaultPlan { seed: 5, corrupt_per_payload: 1.0, ..FaultPlan::default() };
    let (mut sender, mut receiver) = pair(None, Some(&plan));
    let sent: Vec<u8> = (0..PAYLOAD_BYTES).map(|i| (i * 31 / 7) as u8).collect();
    sender.buffer().copy_in(&sent);
    sender.send(1, b"", true);
    until(&mut [&mut sender, &mut receiver], |ends| ends[1].seen.len() == 2);
    let found = receiver.bytes();
    let bits: u32 = sent.iter().zip(&found).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!(bits, 1, "exactly one bit is wrong");
    assert_eq!(receiver.seen[1], EndEvent::Payload(Some(payload_checksum(&found))));
    assert_ne!(payload_checksum(&found), payload_checksum(&sent));
    assert_eq!(receiver.tcp.counters().corrupted, 1);
}

#[test]
fn a_cut_on_arrival_ends_both_sides() {
    let plan = FaultPlan { cut_per_frame: 1.0, ..FaultPlan::default() };
    let (mut sender, mut receiver) = pair(None, Some(&plan));
    sender.send(1, b"body", true);
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| end.gone.is_some()));
    assert_eq!(receiver.gone, Some(CloseCause::Kernel(104)));
    assert_eq!((receiver.seen.len(), receiver.tcp.counters().cut_arriving), (0, 1));
    // The payload lent for the send was returned before the end was reported.
    assert_eq!((sender.holds, sender.tcp.open(), receiver.tcp.open()), (0, 0, 0));
}

#[test]
fn a_cut_on_departure_loses_the_frame_or_its_reply() {
    let (mut before, mut after) = (0, 0);
    for seed in 0..12 {
        let plan = FaultPlan { seed, cut_per_frame: 1.0, ..FaultPlan::default() };
        let (mut sender, mut receiver) = pair(Some(&plan), None);
        assert!(sender.send(1, b"body", true));
        until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| end.gone.is_some()));
        assert_eq!(sender.gone, Some(CloseCause::Kernel(104)));
        assert_eq!((sender.holds, sender.tcp.counters().cut_leaving), (0, 1));
        match receiver.seen.len() {
            0 => before += 1,
            _ => after += 1,
        }
    }
    assert!(before > 0 && after > 0, "{before} frames never left, {after} did");
}

#[test]
fn a_refused_connection_ends_like_a_kernel_refusal() {
    let plan = FaultPlan { refuse_connect: 1.0, ..FaultPlan::default() };
    let (sender, _receiver) = pair(Some(&plan), None);
    assert_eq!((sender.gone, sender.tcp.open()), (Some(CloseCause::Kernel(111)), 0));
    assert_eq!((sender.connected, sender.tcp.counters().refused), (None, 1));
}

#[test]
fn an_index_is_not_reused_before_its_end_was_taken() {
    let (mut sender, _receiver) = pair(None, None);
    let first = sender.connected.expect("a connection");
    sender.tcp.close(first, CloseCause::Closed);
    assert_eq!(sender.tcp.poll_timeout(), Some(0), "a closed connection stays");
    assert_eq!(sender.tcp.open(), 1);
    // Its end was not taken yet: the index must still denote the former connection.
    let address = net::tcp_listener(([127, 0, 0, 1], 0).into(), 8).and_then(|l| l.local_addr()).expect("a port");
    let second = sender.tcp.connect(&sender.poller, address).expect("a socket");
    assert_ne!(second.index, first.index);
    assert!(matches!(sender.tcp.poll_event(), Some(Event::Gone(id, CloseCause::Closed)) if id == first));
    let third = sender.tcp.connect(&sender.poller, address).expect("a socket");
    assert_eq!((third.index, third.generation), (first.index, first.generation + 1));
}
