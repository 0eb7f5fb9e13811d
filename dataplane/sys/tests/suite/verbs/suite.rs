//! Cases that must hold on every device, software or not. Each case takes the devices of the two ends.

use super::bed::{End, MEMORY_BYTES, byte, connect, fill, options, pair, pattern, read};
use kvplane_sys::verbs::{
    Access, Device, Operation, Payload, Piece, QueuePairOptions, QueueState, Refusal, Remote, Request, Status,
    VerbsError,
};
use kvplane_sys::{Interest, IoBuf, Poller, Region, RegionOptions};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

type Case = (&'static str, fn(&Device, &Device));

/// All cases, by name.
pub(crate) const CASES: &[Case] = &[
    ("ports_and_addresses", ports_and_addresses),
    ("writes_and_reads_move_the_right_bytes", writes_and_reads_move_the_right_bytes),
    ("messages_arrive_in_order", messages_arrive_in_order),
    ("a_write_tells_of_itself", a_write_tells_of_itself),
    ("inline_bytes_are_copied_when_pushed", inline_bytes_are_copied_when_pushed),
    ("few_completions_and_doorbells", few_completions_and_doorbells),
    ("a_shared_queue_feeds_receives", a_shared_queue_feeds_receives),
    ("a_wrong_key_or_range_fails_the_queue", a_wrong_key_or_range_fails_the_queue),
    ("without_a_receive", without_a_receive),
    ("a_peer_that_is_gone", a_peer_that_is_gone),
    ("failing_flushes_everything", failing_flushes_everything),
    ("a_reset_queue_connects_again", a_reset_queue_connects_again),
    ("requests_hold_their_memory", requests_hold_their_memory),
    ("a_parked_thread_is_woken", a_parked_thread_is_woken),
    ("bad_requests_change_nothing", bad_requests_change_nothing),
    ("states_are_kept", states_are_kept),
    ("memory_in_chunks", memory_in_chunks),
    ("sizes_beyond_the_device", sizes_beyond_the_device),
];

fn ports_and_addresses(first: &Device, _: &Device) {
    let context = first.open().expect("opened");
    let port = context.active_port().expect("active");
    assert!(port.is_active() && port.bits_per_second >= 1_000_000_000, "{port:?}");
    assert!(context.limits().queue_depth >= 128 && context.limits().ports >= 1, "{:?}", context.limits());
    let gids = context.gids(port.port).expect("gids");
    let ranks: Vec<_> = gids.iter().map(kvplane_sys::verbs::GidEntry::rank).collect();
    assert!(ranks.is_sorted() && ranks[0].is_some(), "{gids:?}");
    assert!(gids.iter().all(|entry| entry.index < port.gids), "{gids:?}");
    assert!(matches!(context.port(200), Err(VerbsError::Refused { .. })));
}

fn writes_and_reads_move_the_right_bytes(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    fill(&a.region, 1, 0, MEMORY_BYTES);
    fill(&b.region, 2, 0, MEMORY_BYTES);
    // Three pieces, of uneven lengths, to one unaligned location.
    let memory = a.memory.clone();
    let piece = |offset, bytes| memory.piece(offset, bytes).expect("inside");
    let pieces = [piece(11, 1000), piece(50_000, 100_001), piece(7, 1)];
    let operation = Operation::Write { to: b.remote(4321) };
    let request = Request { signalled: true, ..Request::new(5, operation, Payload::Pieces(&pieces)) };
    a.queue_pair.push(&request).expect("pushed");
    a.queue_pair.flush(false).expect("posted");
    let over = a.wait_one();
    assert_eq!((over.token, over.status), (5, Status::Success));
    let mut wanted = pattern(2, 0, 4321);
    wanted.extend([pattern(1, 11, 1000), pattern(1, 50_000, 100_001), pattern(1, 7, 1)].concat());
    wanted.extend(pattern(2, wanted.len(), MEMORY_BYTES - wanted.len()));
    assert!(read(&b.region, 0, MEMORY_BYTES) == wanted, "only the range was written");
    // Back, in two pieces.
    let from = b.remote(700_003);
    let pieces = [piece(0, 3), piece(300_000, 200_000)];
    let request = Request::new(6, Operation::Read { from }, Payload::Pieces(&pieces));
    a.queue_pair.push(&request).expect("pushed");
    a.queue_pair.flush(true).expect("posted");
    assert_eq!(a.wait_one().status, Status::Success);
    assert_eq!(read(&a.region, 0, 3), pattern(2, 700_003, 3));
    assert_eq!(read(&a.region, 300_000, 200_000), pattern(2, 700_006, 200_000));
    assert_eq!(read(&a.region, 3, 8), pattern(1, 3, 8));
    assert!(b.poll().is_empty(), "one-sided requests say nothing to the other side");
}

fn messages_arrive_in_order(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    fill(&a.region, 3, 0, MEMORY_BYTES);
    for round in 0..4u64 {
        for index in 0..16u64 {
            b.receive(round * 16 + index, index as usize * 4096, 4096);
        }
        for index in 0..16u64 {
            let operation = match index % 2 {
                0 => Operation::Send,
                _ => Operation::SendImmediate { immediate: (round * 16 + index) as u32 + 0xabcd_0000 },
            };
            a.push(index, operation, index as usize * 8192, 100 + index as usize);
        }
        assert_eq!(a.queue_pair.flush(true).expect("posted"), 16);
        let sent: Vec<u64> = a.wait(16).iter().map(|over| over.token).collect();
        assert!(sent.into_iter().eq(0..16));
        for (index, over) in b.wait(16).into_iter().enumerate() {
            let token = round * 16 + index as u64;
            let immediate = (index % 2 == 1).then_some(token as u32 + 0xabcd_0000);
            assert_eq!((over.token, over.status, over.receive), (token, Status::Success, true));
            assert_eq!((over.bytes, over.immediate, over.remote_write), (100 + index as u32, immediate, false));
            let content = read(&b.region, index * 4096, 100 + index);
            assert_eq!(content, pattern(3, index * 8192, 100 + index), "message {index} of round {round}");
        }
    }
}

fn a_write_tells_of_itself(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    fill(&a.region, 4, 0, 1000);
    b.receive(9, 0, 64);
    a.post(1, Operation::WriteImmediate { to: b.remote(5000), immediate: 0x0102_0304 }, 0, 1000);
    let over = b.wait_one();
    assert_eq!((over.token, over.status, over.immediate), (9, Status::Success, Some(0x0102_0304)));
    assert!(over.remote_write && over.bytes == 1000, "{over:?}");
    assert_eq!(read(&b.region, 5000, 1000), pattern(4, 0, 1000));
    assert_eq!(a.wait_one().token, 1);
}

fn inline_bytes_are_copied_when_pushed(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    assert!(a.queue_pair.inline_bytes() >= 64);
    b.receive(1, 0, 4096);
    let mut bytes: Vec<u8> = (0..64).map(|at| byte(5, at)).collect();
    let operation = Operation::Write { to: b.remote(8000) };
    a.queue_pair.push(&Request::new(1, operation, Payload::Inline(&bytes))).expect("pushed");
    a.queue_pair.push(&Request::new(2, Operation::Send, Payload::Inline(&bytes[..10]))).expect("pushed");
    a.queue_pair.push(&Request::new(3, operation, Payload::Inline(&[]))).expect("an empty one");
    bytes.fill(0);
    assert_eq!(a.queue_pair.flush(true).expect("posted"), 3);
    let tokens: Vec<u64> = a.wait(3).iter().map(|over| over.token).collect();
    assert_eq!((tokens, a.completions), (vec![1, 2, 3], 1));
    assert_eq!(b.wait_one().bytes, 10);
    assert_eq!(read(&b.region, 8000, 64), pattern(5, 0, 64));
    assert_eq!(read(&b.region, 0, 10), pattern(5, 0, 10));
}

fn few_completions_and_doorbells(first: &Device, second: &Device) {
    let (mut a, b) = pair(first, second);
    fill(&a.region, 6, 0, MEMORY_BYTES);
    let memory = a.memory.clone();
    let mut over = Vec::new();
    let mut flushes = 0;
    for index in 0..405u64 {
        let offset = index as usize * 2048;
        let piece = memory.piece(offset, 2048).expect("inside");
        let operation = Operation::Write { to: b.remote(offset) };
        while a.queue_pair.room() == 0 {
            over.extend(a.poll());
        }
        a.queue_pair.push(&Request::new(index, operation, Payload::Pieces(&[piece]))).expect("pushed");
        if a.queue_pair.unsent() == 32 {
            assert_eq!(a.queue_pair.flush(false).expect("posted"), 32);
            flushes += 1;
        }
    }
    assert!(a.queue_pair.has_silent_tail());
    flushes += usize::from(a.queue_pair.flush(true).expect("posted") > 0);
    assert!(!a.queue_pair.has_silent_tail());
    let missing = 405 - over.len();
    over.extend(a.wait(missing));
    assert!(over.iter().enumerate().all(|(index, over)| over.token == index as u64 && over.status == Status::Success));
    assert_eq!((flushes, a.completions), (13, 26), "one of 16 is signalled, one of 32 is a doorbell");
    assert_eq!(a.queue_pair.outstanding(), 0);
    assert!(read(&b.region, 0, 405 * 2048) == pattern(6, 0, 405 * 2048));
}

fn a_shared_queue_feeds_receives(first: &Device, second: &Device) {
    let (mut a, mut b) = (End::new(first, &options(), false), End::new(second, &options(), true));
    connect(&mut a, &mut b);
    fill(&a.region, 7, 0, MEMORY_BYTES);
    assert_eq!(b.queue_pair.push_receive(1, &[]), Err(Refusal::Shared));
    for round in 0..5u64 {
        for index in 0..10u64 {
            b.receive(100 * round + index, index as usize * 1024, 1024);
        }
        for index in 0..10 {
            a.push(index as u64, Operation::Send, index * 512, 512);
        }
        a.queue_pair.flush(true).expect("posted");
        a.wait(10);
        for over in b.wait(10) {
            let index = over.token as usize % 100;
            assert_eq!((over.status, over.bytes, over.token / 100), (Status::Success, 512, round));
            assert_eq!(read(&b.region, index * 1024, 512), pattern(7, index * 512, 512));
        }
    }
    assert_eq!(b.shared.as_ref().expect("shared").room(), 32);
}

fn a_wrong_key_or_range_fails_the_queue(first: &Device, second: &Device) {
    for read_it in [false, true] {
        let (mut a, b) = pair(first, second);
        fill(&b.region, 8, 0, MEMORY_BYTES);
        let mut place = b.remote(0);
        if read_it {
            place.address += MEMORY_BYTES as u64 - 10;
        } else {
            place.key ^= 0x5a5a;
        }
        let operation = if read_it { Operation::Read { from: place } } else { Operation::Write { to: place } };
        a.push(1, operation, 0, 4096);
        a.push(2, Operation::Write { to: b.remote(100) }, 0, 10);
        a.queue_pair.flush(true).expect("posted");
        let over = a.wait(2);
        assert_eq!((over[0].token, over[0].status), (1, Status::RemoteAccess));
        assert_eq!((over[1].token, over[1].status), (2, Status::Flushed));
        assert_eq!(a.queue_pair.state(), QueueState::Error);
        assert!(read(&b.region, 0, MEMORY_BYTES) == pattern(8, 0, MEMORY_BYTES), "nothing was written");
    }
}

fn without_a_receive(first: &Device, second: &Device) {
    let (mut a, mut b) = (End::new(first, &options(), false), End::new(second, &options(), false));
    let (mut to_b, to_a) = (a.connection(&b), b.connection(&a));
    to_b.not_ready_retries = 0;
    a.queue_pair.connect(&to_b).expect("connected");
    b.queue_pair.connect(&to_a).expect("connected");
    a.post(1, Operation::Send, 0, 8);
    assert_eq!(a.wait_one().status, Status::ReceiverNotReady);
    // With more retries, the receive may be posted later.
    let (mut a, mut b) = pair(first, second);
    fill(&a.region, 9, 0, 8);
    a.post(1, Operation::Send, 0, 8);
    assert!(a.poll().is_empty());
    b.receive(2, 0, 8);
    let start = std::time::Instant::now();
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    while sent.is_empty() || received.is_empty() {
        assert!(start.elapsed() < super::bed::DEADLINE, "{sent:?} {received:?}");
        sent.extend(a.poll());
        received.extend(b.poll());
    }
    assert_eq!((sent[0].status, received[0].status), (Status::Success, Status::Success));
    assert_eq!(read(&b.region, 0, 8), pattern(9, 0, 8));
}

fn a_peer_that_is_gone(first: &Device, second: &Device) {
    let (mut a, b) = pair(first, second);
    let place = b.remote(0);
    drop(b);
    for token in 0..3 {
        a.push(token, Operation::Write { to: place }, 0, 4096);
    }
    a.queue_pair.flush(true).expect("posted");
    let over = a.wait(3);
    assert_eq!(over[0].status, Status::RetryExceeded);
    assert!(over[1..].iter().all(|over| over.status == Status::Flushed), "{over:?}");
    assert_eq!(a.queue_pair.outstanding(), 0);
}

fn failing_flushes_everything(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    for token in 0..8 {
        b.receive(token, 0, 64);
    }
    b.queue_pair.fail().expect("failed");
    let over = b.wait(8);
    assert!(over.iter().all(|over| over.status == Status::Flushed && over.receive));
    assert!(over.iter().map(|over| over.token).eq(0..8));
    assert_eq!(b.queue_pair.receives_outstanding(), 0);
    // Requests posted to a failed queue are flushed too.
    a.queue_pair.fail().expect("failed");
    a.post(5, Operation::Write { to: b.remote(0) }, 0, 64);
    assert_eq!(a.wait_one().status, Status::Flushed);
    a.queue_pair.fail().expect("failing twice changes nothing");
}

fn a_reset_queue_connects_again(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    b.receive(1, 0, 64);
    b.receive(2, 0, 64);
    let mut told = Vec::new();
    b.queue_pair.reset(|retired| told.push((retired.token, retired.status))).expect("reset");
    assert_eq!(told, [(1, Status::Flushed), (2, Status::Flushed)]);
    let wrong = a.queue_pair.connect(&a.connection(&b));
    assert!(matches!(wrong, Err(VerbsError::Transition { from: QueueState::ReadyToSend, .. })), "{wrong:?}");
    a.queue_pair.reset(|_| panic!("nothing was posted")).expect("reset");
    connect(&mut a, &mut b);
    fill(&a.region, 10, 0, 64);
    b.receive(3, 128, 64);
    a.post(4, Operation::Send, 0, 64);
    assert_eq!((a.wait_one().status, b.wait_one().token), (Status::Success, 3));
    assert_eq!(read(&b.region, 128, 64), pattern(10, 0, 64));
}

fn requests_hold_their_memory(first: &Device, second: &Device) {
    let (mut a, b) = pair(first, second);
    let region = Region::allocate(&RegionOptions::new("held", 4096)).expect("memory");
    let own = a.domain.register(&IoBuf::whole(Arc::clone(&region)), Access::LOCAL).expect("registered");
    let other = own.separate();
    assert!(!own.is_last());
    drop(other);
    assert!(own.is_last());
    a.queue_pair.push_receive(1, &[own.piece(0, 64).expect("inside")]).expect("pushed");
    assert!(!own.is_last(), "held from before it is posted");
    a.queue_pair.flush_receives().expect("posted");
    let weak = Arc::downgrade(&region);
    drop((region, own));
    assert_eq!(weak.strong_count(), 1, "the receive holds it");
    let End { queue_pair, .. } = a;
    let mut told = Vec::new();
    queue_pair.close(|retired| told.push(retired.token));
    assert_eq!((told, weak.strong_count()), (vec![1], 0), "the device has forgotten it");
    drop(b);
}

fn a_parked_thread_is_woken(first: &Device, second: &Device) {
    let (mut a, mut b) = pair(first, second);
    let poller = Poller::new().expect("poller");
    poller.add(b.channel.as_fd(), 1, Interest::Readable).expect("watched");
    assert!(b.channel.take().expect("asked").is_none());
    for round in 0..3 {
        b.receive(round, 0, 64);
        b.queue.arm().expect("armed");
        assert!(b.poll().is_empty(), "no completion before it was armed");
        a.post(round, Operation::Send, 0, 64);
        let mut ready = Vec::new();
        while ready.is_empty() {
            poller.wait(Duration::from_secs(20), &mut ready).expect("waited");
        }
        assert_eq!(b.channel.take().expect("asked"), Some(77));
        assert!(b.channel.take().expect("asked").is_none());
        assert_eq!(b.wait_one().token, round);
        a.wait_one();
    }
}

fn request<'a>(to: Remote, pieces: &'a [Piece<'a>]) -> Request<'a> {
    Request::new(1, Operation::Write { to }, Payload::Pieces(pieces))
}

fn bad_requests_change_nothing(first: &Device, second: &Device) {
    let tiny = QueuePairOptions { send_depth: 4, batch: 2, send_pieces: 1, ..options() };
    let (mut a, mut b) = (End::new(first, &tiny, false), End::new(second, &tiny, false));
    let to = b.remote(0);
    let stranger = b.memory.clone();
    let memory = a.memory.clone();
    let piece = memory.piece(0, 8).expect("inside");
    assert_eq!(a.queue_pair.push(&request(to, &[piece])), Err(Refusal::State(QueueState::Reset)));
    assert_eq!(a.queue_pair.push_receive(1, &[piece]), Err(Refusal::State(QueueState::Reset)));
    connect(&mut a, &mut b);
    assert!(memory.piece(MEMORY_BYTES - 7, 8).is_none() && memory.piece(usize::MAX, 8).is_none());
    assert!(memory.piece_at(memory.address() - 1, 1).is_none() && memory.piece_at(memory.address() + 8, 8).is_some());
    let refused = a.queue_pair.push(&request(to, &[piece, piece]));
    assert_eq!(refused, Err(Refusal::TooManyPieces { pieces: 2, limit: 1 }));
    let refused = a.queue_pair.push(&request(to, &[stranger.piece(0, 8).expect("inside")]));
    assert_eq!(refused, Err(Refusal::OtherDomain));
    let long = Request::new(1, Operation::Send, Payload::Inline(&[0; 65]));
    assert_eq!(a.queue_pair.push(&long), Err(Refusal::TooLongInline { bytes: 65, limit: 64 }));
    let read = Request::new(1, Operation::Read { from: to }, Payload::Inline(&[0; 8]));
    assert_eq!(a.queue_pair.push(&read), Err(Refusal::InlineRead));
    let read_only = Access { local_write: false, remote_write: false, ..Access::REMOTE };
    let fixed = a.domain.register(&IoBuf::whole(Arc::clone(&a.region)), read_only).expect("registered");
    let piece_of_fixed = [fixed.piece(0, 8).expect("inside")];
    let into = Request::new(1, Operation::Read { from: to }, Payload::Pieces(&piece_of_fixed));
    assert_eq!(a.queue_pair.push(&into), Err(Refusal::NotWritable));
    assert_eq!(a.queue_pair.push_receive(1, &piece_of_fixed), Err(Refusal::NotWritable));
    assert_eq!((a.queue_pair.unsent(), a.queue_pair.room()), (0, 4));
    for _ in 0..2 {
        a.queue_pair.push(&request(to, &[piece])).expect("room");
    }
    assert_eq!(a.queue_pair.push(&request(to, &[piece])), Err(Refusal::BatchFull));
    a.queue_pair.flush(false).expect("posted");
    for _ in 0..2 {
        a.queue_pair.push(&request(to, &[piece])).expect("room");
    }
    assert_eq!(a.queue_pair.push(&request(to, &[piece])), Err(Refusal::Full));
    let mut dropped = 0;
    a.queue_pair.abandon(|_| dropped += 1);
    assert_eq!((dropped, a.queue_pair.unsent(), a.queue_pair.room()), (2, 0, 2));
    assert!(a.queue_pair.has_silent_tail());
    a.post(9, Operation::Write { to }, 0, 0);
    assert_eq!(a.wait(3).len(), 3, "posted requests proceed");
}

fn states_are_kept(first: &Device, second: &Device) {
    let (mut a, b) = (End::new(first, &options(), false), End::new(second, &options(), false));
    let connection = a.connection(&b);
    let refused = a.queue_pair.start_sending(&connection);
    let text = refused.expect_err("too early").to_string();
    assert!(text.contains("from Reset to ReadyToSend"), "{text}");
    a.queue_pair.initialize(connection.port, 0, connection.access).expect("initialized");
    assert_eq!(a.queue_pair.state(), QueueState::Initialized);
    a.queue_pair.accept_from(&connection).expect("ready to receive");
    a.queue_pair.start_sending(&connection).expect("ready to send");
    assert_eq!(a.queue_pair.state(), QueueState::ReadyToSend);
}

fn memory_in_chunks(first: &Device, second: &Device) {
    let (mut a, b) = pair(first, second);
    let region = Region::allocate(&RegionOptions::new("chunks", 1_000_000)).expect("memory");
    let whole = IoBuf::whole(Arc::clone(&region));
    let chunks = b.domain.register_chunks(&whole, Access::REMOTE, 300_000, 4).expect("registered");
    let lengths: Vec<usize> = chunks.iter().map(kvplane_sys::verbs::MemoryRegion::bytes).collect();
    assert_eq!(lengths, [300_000, 300_000, 300_000, 100_000]);
    fill(&a.region, 11, 0, 100_000);
    let last = &chunks[3];
    let to = Remote { address: last.address(), key: last.remote_key() };
    a.post(1, Operation::Write { to }, 0, 100_000);
    assert_eq!(a.wait_one().status, Status::Success);
    assert_eq!(read(&region, 900_000, 100_000), pattern(11, 0, 100_000));
}

fn sizes_beyond_the_device(first: &Device, _: &Device) {
    let end = End::new(first, &options(), false);
    let limits = end.context.limits();
    let vast = QueuePairOptions { send_depth: u32::MAX, ..options() };
    let refused = kvplane_sys::verbs::QueuePair::new(&end.domain, &end.queue, None, &vast);
    assert!(matches!(refused, Err(VerbsError::Limit { .. })), "{refused:?}");
    let many = kvplane_sys::verbs::CompletionQueue::new(&end.context, u32::MAX, None);
    assert!(matches!(many, Err(VerbsError::Limit { .. })), "{many:?}");
    // 512 entries, of which the first queue pair reserved 192.
    let second = kvplane_sys::verbs::QueuePair::new(&end.domain, &end.queue, None, &options()).expect("room");
    let third = kvplane_sys::verbs::QueuePair::new(&end.domain, &end.queue, None, &options());
    assert!(matches!(third, Err(VerbsError::Limit { wanted: 192, offered: 128, .. })), "{third:?}");
    let (index, generation) = (second.id().index, second.id().generation);
    drop(second);
    let again = kvplane_sys::verbs::QueuePair::new(&end.domain, &end.queue, None, &options()).expect("room");
    assert_eq!((again.id().index, again.id().generation), (index, generation + 1));
    if !limits.on_demand {
        let lazy = Access { on_demand: true, ..Access::LOCAL };
        let refused = end.domain.register(&IoBuf::whole(Arc::clone(&end.region)), lazy);
        assert!(matches!(refused, Err(VerbsError::NotOffered { .. })), "{refused:?}");
    }
}
