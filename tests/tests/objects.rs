//! Tests of objects from and into many pieces of memory, and of object sessions: over shared memory and over the
//! network, with a real node.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvplane::{
    AsyncClient, BeginOutcome, Buffer, Client, ClientConfig, Digest, Fill, Node, ObjectRange, Put, PutOptions,
    PutSession, RangeOutcome, Region, RegionOptions, Slice, Status,
};
use kvplane_proto::message::Part;

mod bed;
#[path = "objects/c_library.rs"]
mod c_library;
#[path = "../../tools/capi/tests/compiled/mod.rs"]
mod compiled;

use bed::{Bed, value};

const IDLE: Duration = Duration::from_secs(20);

fn memory(client: &mut Client, bytes: usize) -> Buffer {
    client.register(Region::allocate(&RegionOptions::new("memory", bytes)).expect("memory"))
}

fn read(buffer: &Buffer, offset: usize, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    buffer.region().copy_out(offset, &mut found);
    found
}

/// Returns the bytes in the memory of the only node's store that are not free.
fn in_use(bed: &Bed) -> (u64, u64) {
    let store = bed.nodes[0].snapshots().expect("a living node")[0].store.expect("a store");
    (store.reserved_bytes + store.quarantined_bytes, store.objects)
}

#[test]
fn an_object_is_put_from_and_read_into_many_pieces() {
    let bed = Bed::start(2, 32 << 20);
    for shared in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let (from, into) = (memory(&mut client, 4 << 20), memory(&mut client, 4 << 20));
        from.region().copy_in(0, &value(7, 4 << 20));
        // Pieces of many lengths, backwards in memory, some of them large.
        let lengths: Vec<usize> = (0..300).map(|at| if at % 50 == 7 { 40_000 } else { 1 + at * 31 % 700 }).collect();
        let mut end = 4 << 20;
        let mut pieces = Vec::new();
        for bytes in &lengths {
            end -= bytes + 13;
            pieces.push((end, *bytes));
        }
        let whole: Vec<u8> = pieces.iter().flat_map(|(at, bytes)| read(&from, *at, *bytes)).collect();
        let slices: Vec<Slice> = pieces.iter().map(|(at, bytes)| from.slice(*at, *bytes)).collect();
        let keys: Vec<String> = (0..20).map(|n| format!("parts-{shared}-{n}")).collect();
        let items: Vec<(&String, &[Slice])> = keys.iter().enumerate().map(|(n, key)| (key, &slices[n..])).collect();
        for put in client.scatter_gather().batch_put_from(&items, &PutOptions::default()).expect("a batch") {
            assert!(matches!(put, Ok(Put::Stored(_))), "{put:?}");
        }
        assert_eq!(client.get(keys[0].as_bytes()).expect("a get").as_deref(), Some(&whole[..]), "over {shared}");

        // The destination pieces have other borders, and the last is longer than the rest of the object.
        let cuts = [1, 5000, 100_000, whole.len()];
        let mut at = 0;
        let targets: Vec<Slice> = cuts
            .iter()
            .map(|bytes| {
                at += 64 + bytes;
                into.slice(at - bytes, *bytes)
            })
            .collect();
        let got = client.scatter_gather().get_into(keys[0].as_bytes(), &targets).expect("a get").expect("the object");
        assert_eq!(got.bytes as usize, whole.len());
        let (mut at, mut found) = (0, Vec::new());
        for bytes in cuts {
            at += 64 + bytes;
            found.extend(read(&into, at - bytes, bytes.min(whole.len() - found.len())));
        }
        assert!(found == whole);

        let small =
            client.scatter_gather().get_into(keys[0].as_bytes(), &targets[..2]).expect_err("two pieces of four");
        assert_eq!(small.status(), Some(Status::BufferTooSmall), "{small}");
        assert_eq!(client.scatter_gather().get_into(b"nobody", &targets).expect("a get"), None);
        let twice = [into.slice(0, 100), into.slice(50, 100)];
        assert!(
            client
                .scatter_gather()
                .get_into(keys[0].as_bytes(), &twice)
                .expect_err("overlapping")
                .to_string()
                .contains("over")
        );
        let none: [Slice; 0] = [];
        assert!(client.scatter_gather().put_from(b"none", &none, &PutOptions::default()).is_err(), "nothing to store");
        let many = vec![from.slice(0, 1); 5000];
        assert!(
            client
                .scatter_gather()
                .put_from(b"many", &many, &PutOptions::default())
                .expect_err("5000")
                .to_string()
                .contains("4096")
        );
    }
}

fn begin(client: &mut Client, key: &str, bytes: usize, options: &PutOptions, idle: Duration) -> PutSession {
    match client.put_sessions().open(key.as_bytes(), bytes as u64, options, idle).expect("a session") {
        BeginOutcome::Session(session) => session,
        BeginOutcome::Exists => panic!("{key} exists"),
    }
}

fn outcome(client: &mut Client, key: &str, offset: usize, into: Slice) -> RangeOutcome {
    let range = ObjectRange { key: key.as_bytes(), offset: offset as u64, into };
    client.ranges().get_as_they_come(&[range]).expect("an answer").pop().expect("one").expect("no error")
}

#[test]
fn layers_are_written_and_read_as_they_come() {
    const LAYERS: usize = 16;
    const LAYER: usize = 70_000;
    let bed = Bed::start(1, 32 << 20);
    for (shared, readers) in [(true, false), (false, true), (true, true), (false, false)] {
        let mut writer = Client::connect(&bed.client_config(shared)).expect("a client");
        let mut reader = Client::connect(&bed.client_config(readers)).expect("a client");
        let (from, into) = (memory(&mut writer, LAYERS * LAYER), memory(&mut reader, LAYERS * LAYER));
        let key = format!("layers-{shared}-{readers}");
        let whole = value(3, LAYERS * LAYER);
        from.region().copy_in(0, &whole);
        assert_eq!(outcome(&mut reader, &key, 0, into.slice(0, 10)), RangeOutcome::Missing);
        let session = begin(&mut writer, &key, LAYERS * LAYER, &PutOptions::default(), IDLE);
        // The order of layers is mixed: even numbers first.
        for (nth, layer) in (0..LAYERS).step_by(2).chain((1..LAYERS).step_by(2)).enumerate() {
            let (at, next) = (layer * LAYER, (layer + 1) % LAYERS * LAYER);
            assert_eq!(outcome(&mut reader, &key, at, into.slice(at, LAYER)), RangeOutcome::Pending, "layer {layer}");
            let fill = Fill { session: &session, offset: at as u64, from: from.slice(at, LAYER) };
            writer.put_sessions().fill(&[fill]).expect("a batch").pop().expect("one").expect("a fill");
            assert_eq!(outcome(&mut reader, &key, at, into.slice(at, LAYER)), RangeOutcome::Written);
            assert!(read(&into, at, LAYER) == whole[at..at + LAYER], "layer {layer}");
            if nth == 0 {
                let beyond = outcome(&mut reader, &key, next, into.slice(next, LAYER));
                assert_eq!(beyond, RangeOutcome::Pending, "what was not written is not read");
                let early = writer.put_sessions().commit(&session).expect_err("most is missing");
                assert_eq!(early.status(), Some(Status::Pending), "{early}");
                assert_eq!(reader.get(key.as_bytes()).expect("a get"), None, "it is not there before it is committed");
            }
        }
        let again = Fill { session: &session, offset: 0, from: from.slice(LAYER, LAYER) };
        writer
            .put_sessions()
            .fill(&[again])
            .expect("a batch")
            .pop()
            .expect("one")
            .expect("it is written already, and left as it is");
        let Put::Stored(version) = writer.put_sessions().commit(&session).expect("all is there") else {
            panic!("it exists")
        };
        assert_eq!(writer.put_sessions().commit(&session).expect("it was"), Put::Stored(version), "a repeated commit");
        assert_eq!(outcome(&mut reader, &key, 5, into.slice(0, 10)), RangeOutcome::Whole(version));
        assert!(reader.get(key.as_bytes()).expect("a get").as_deref() == Some(&whole[..]), "checksum and all");
        let late = Fill { session: &session, offset: 0, from: from.slice(0, LAYER) };
        let late = writer.put_sessions().fill(&[late]).expect("a batch").pop().expect("one").expect_err("it is over");
        assert_eq!(late.status(), Some(Status::Stale));

        let mut session = reader.ranges().open_session(key.as_bytes()).expect("an answer").expect("the object");
        assert_eq!(session.bytes(), whole.len() as u64);
        let range = |offset| ObjectRange { key: key.as_bytes(), offset, into: into.slice(0, 100) };
        assert!(reader.ranges().read_session(&mut session, &[range(7)]).expect("a range"));
        writer.upsert(key.as_bytes(), &value(4, LAYERS * LAYER)).expect("another version");
        let stale = reader.ranges().read_session(&mut session, &[range(9)]).expect_err("it was replaced");
        assert_eq!(stale.status(), Some(Status::Stale));

        // The object is replaced before the first range by a longer one, whose length the session does not know.
        let mut session = reader.ranges().open_session(key.as_bytes()).expect("an answer").expect("the object");
        writer.upsert(key.as_bytes(), &value(5, LAYERS * LAYER + 1)).expect("a longer version");
        for _ in 0..2 {
            let stale = reader.ranges().read_session(&mut session, &[range(7)]).expect_err("it was replaced");
            assert_eq!(stale.status(), Some(Status::Stale));
        }
        assert!(writer.remove(key.as_bytes()).expect("an answer"));
        assert!(!reader.ranges().read_session(&mut session, &[range(7)]).expect("an answer"), "there is none");
    }
}

#[test]
fn bad_ranges_of_sessions_are_refused_and_nothing_is_left() {
    let bed = Bed::start(1, 32 << 20);
    for shared in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let mut other = Client::connect(&bed.client_config(shared)).expect("a client");
        let (ours, theirs) = (memory(&mut client, 1 << 20), memory(&mut other, 1 << 20));
        let session = begin(&mut client, "bad", 1000, &PutOptions::default(), IDLE);
        let fill = |client: &mut Client, buffer: &Buffer, offset, bytes| {
            let fill = Fill { session: &session, offset, from: buffer.slice(0, bytes) };
            client.put_sessions().fill(&[fill]).expect("a batch").pop().expect("one").map_err(|error| error.status())
        };
        assert_eq!(fill(&mut client, &ours, 990, 11), Err(Some(Status::OutOfRange)));
        assert_eq!(fill(&mut client, &ours, u64::MAX - 20, 11), Err(Some(Status::OutOfRange)));
        assert_eq!(fill(&mut other, &theirs, 0, 10), Err(Some(Status::Stale)), "another's session");
        assert_eq!(fill(&mut client, &ours, 100, 100), Ok(()));
        assert_eq!(fill(&mut client, &ours, 150, 100), Err(Some(Status::BadRequest)), "half of it is written");
        assert!(in_use(&bed).0 >= 1000);
        assert_eq!(client.put_sessions().batch_abort(&[&session]).expect("an answer"), [true]);
        assert_eq!(client.put_sessions().batch_abort(&[&session]).expect("an answer"), [false]);
        assert_eq!(in_use(&bed).0, 0, "an aborted session leaves nothing");
        let zero = client.put_sessions().open(b"zero", 0, &PutOptions::default(), IDLE).expect_err("0 bytes");
        assert!(zero.to_string().contains("0 bytes"), "{zero}");
        let large = client.put_sessions().open(b"large", 1 << 30, &PutOptions::default(), IDLE).expect_err("a GiB");
        assert_eq!(large.status(), Some(Status::TooLarge));
        let long = client.put_sessions().open(b"long", 10, &PutOptions::default(), Duration::from_secs(3600));
        assert!(long.expect_err("an hour").to_string().contains("600000"));
        client.put(b"there", b"value").expect("a put");
        let there = client.put_sessions().open(b"there", 10, &PutOptions::default(), IDLE).expect("an answer");
        assert!(matches!(there, BeginOutcome::Exists));
        // A replacing put: the former object stays until the commit.
        let replace = PutOptions { replace: true, ..PutOptions::default() };
        let session = begin(&mut client, "there", 100, &replace, IDLE);
        let all = Fill { session: &session, offset: 0, from: ours.slice(0, 100) };
        client.put_sessions().fill(&[all]).expect("a batch").pop().expect("one").expect("a fill");
        assert_eq!(client.get(b"there").expect("a get").as_deref(), Some(&b"value"[..]));
        assert!(matches!(client.put_sessions().commit(&session), Ok(Put::Stored(_))));
        assert_eq!(client.size(b"there").expect("a size"), Some(100));
        client.remove(b"there").expect("a remove");
    }
}

#[test]
fn a_session_whose_writer_is_gone_or_idle_is_given_up() {
    let bed = Bed::start(1, 32 << 20);
    for shared in [true, false] {
        let mut writer = Client::connect(&bed.client_config(shared)).expect("a client");
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let buffer = memory(&mut writer, 1 << 20);
        let idle = Duration::from_millis(300);
        let left = begin(&mut writer, "left", 1 << 20, &PutOptions::default(), idle);
        let fill = Fill { session: &left, offset: 0, from: buffer.slice(0, 4096) };
        writer.put_sessions().fill(&[fill]).expect("a batch").pop().expect("one").expect("a fill");
        assert!(in_use(&bed).0 >= 1 << 20);
        // Writes to an aborted session have no effect: one of these fills comes too late.
        let mut offset = 4096;
        let late = loop {
            std::thread::sleep(Duration::from_millis(if offset > 20_000 { 400 } else { 20 }));
            let fill = Fill { session: &left, offset, from: buffer.slice(0, 4096) };
            let outcome = writer.put_sessions().fill(&[fill]).expect("a batch").pop().expect("one");
            offset += 4096;
            if let Err(error) = outcome {
                break error;
            }
        };
        assert_eq!(late.status(), Some(Status::Stale), "{late}");
        assert_eq!(in_use(&bed), (0, 0));
        assert_eq!(writer.put_sessions().commit(&left).expect_err("it is over").status(), Some(Status::Stale));
        // A writer that has disconnected.
        let session = begin(&mut writer, "gone", 1 << 20, &PutOptions::default(), idle);
        assert!(in_use(&bed).0 >= 1 << 20);
        let _ = session;
        drop(writer);
        for _ in 0..200 {
            if in_use(&bed) == (0, 0) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(in_use(&bed), (0, 0));
        client.put(b"after", &value(1, 3 << 20)).expect("the room is there again");
        client.remove(b"after").expect("a remove");
    }
}

#[test]
fn large_objects_lie_in_stripes_and_behave_as_others() {
    let bed = Bed::start(2, 24 << 20);
    for shared in [true, false] {
        let config = ClientConfig { stripe_bytes: 1 << 20, ..bed.client_config(shared) };
        let mut client = Client::connect(&config).expect("a client");
        // Another client stripes only above a larger size, and reads the first client's objects all the same.
        let mut other = Client::connect(&bed.client_config(shared)).expect("a client");
        let (from, into) = (memory(&mut client, 8 << 20), memory(&mut client, 8 << 20));
        let bytes = (7 << 20) + 12_345;
        let whole = value(11, bytes);
        from.region().copy_in(0, &whole);
        assert!(matches!(client.put_from(b"large", from.slice(0, bytes)), Ok(Put::Stored(_))));
        assert_eq!(client.put_from(b"large", from.slice(0, bytes)).expect("an answer"), Put::Exists);
        assert_eq!(client.put(b"large", b"small").expect("an answer"), Put::Exists, "of whatever size");
        assert!(client.exists(b"large").expect("an answer"));
        assert_eq!(client.size(b"large").expect("an answer"), Some(bytes as u64));
        let got = client.get_into(b"large", into.slice(0, 8 << 20)).expect("a get").expect("the object");
        assert!(got.bytes == bytes as u64 && read(&into, 0, bytes) == whole);
        assert!(other.get(b"large").expect("a get").as_deref() == Some(&whole[..]));
        let small = client.get_into(b"large", into.slice(0, 4 << 20)).expect_err("half the room");
        assert_eq!(small.status(), Some(Status::BufferTooSmall), "{small}");
        for (offset, length) in [(0, 10), ((1 << 20) - 5, 10), (500_000, 3 << 20), (bytes - 1, 1)] {
            let range = ObjectRange { key: b"large", offset: offset as u64, into: into.slice(64, length) };
            assert!(client.ranges().get(&[range]).expect("a batch")[0].as_ref().is_ok_and(Option::is_some));
            assert!(read(&into, 64, length) == whole[offset..offset + length], "{length} bytes at {offset}");
        }
        let past = ObjectRange { key: b"large", offset: bytes as u64 - 1, into: into.slice(0, 2) };
        let past = client.ranges().get(&[past]).expect("a batch").pop().expect("one").expect_err("past the end");
        assert_eq!(past.status(), Some(Status::OutOfRange));
        let page = client.keys().list(None).expect("a page");
        let mut keys = page.keys;
        let mut next = page.next;
        while let Some(cursor) = next {
            let page = client.keys().list(Some(cursor)).expect("a page");
            keys.extend(page.keys);
            next = page.next;
        }
        let listed: Vec<(&[u8], u64)> = keys.iter().map(|key| (&key.key[..], key.bytes)).collect();
        assert_eq!(listed, [(&b"large"[..], bytes as u64)], "one object, not its stripes");
        // The object is replaced by another large one, and that by a small one.
        let options = PutOptions { replace: true, ..PutOptions::default() };
        let shorter = 3 << 20;
        assert!(matches!(client.put_from_with(b"large", from.slice(4096, shorter), &options), Ok(Put::Stored(_))));
        assert!(other.get(b"large").expect("a get").as_deref() == Some(&whole[4096..4096 + shorter]));
        // The same from the client's own memory, where the former stripe head must not interfere.
        let again = value(12, 5 << 20);
        assert!(matches!(client.put_with(b"large", &again, &options), Ok(Put::Stored(_))));
        assert!(other.get(b"large").expect("a get").as_deref() == Some(&again[..]));
        assert!(client.remove(b"large").expect("an answer"));
        assert!(!client.remove(b"large").expect("an answer") && !client.exists(b"large").expect("an answer"));
        assert_eq!(objects(&bed), 0, "stripes go with their object");
        // A put that does not fit leaves nothing behind.
        let error = client.put(b"huge", &vec![7; 60 << 20]).expect_err("more than both nodes");
        assert_eq!(error.status(), Some(Status::TooLarge), "{error}");
        assert_eq!(objects(&bed), 0, "nor of what was refused");
    }
}

/// A large object that lost stripes with a node is a miss, and its remains block no new put.
#[test]
fn an_object_that_lost_stripes_can_be_put_again() {
    const LENGTH: usize = (2 << 20) + 77;
    for shared in [true, false] {
        let mut bed = Bed::start(2, 24 << 20);
        let config = ClientConfig { stripe_bytes: 1 << 20, ..bed.client_config(shared) };
        let mut client = Client::connect(&config).expect("a client");
        let from = memory(&mut client, 4 << 20);
        let keys: Vec<String> = (0..8).map(|n| format!("lost-{n}")).collect();
        for (n, key) in keys.iter().enumerate() {
            from.region().copy_in(0, &value(n as u32, LENGTH));
            let put = client.put_from(key.as_bytes(), from.slice(0, LENGTH)).expect("a put");
            assert!(matches!(put, Put::Stored(_)));
        }
        drop(bed.nodes.remove(0));
        let there = client.batch_exists(&keys).expect("answers");
        let (mut headed, mut headless) = (0, 0);
        for (n, key) in keys.iter().enumerate() {
            let before = objects(&bed);
            if let Some(whole) = client.get(key.as_bytes()).expect("a get") {
                assert!(there[n] && whole == value(n as u32, LENGTH), "{key} lay on the other node altogether");
                continue;
            }
            assert!(!there[n], "{key} exists for nobody who cannot get it");
            // The get removes the stripe head, if it is left, and the stripes that it names.
            let removed = objects(&bed) < before;
            headed += u32::from(removed);
            headless += u64::from(!removed);
            let range = ObjectRange { key: key.as_bytes(), offset: 0, into: from.slice(0, LENGTH) };
            let found = client.ranges().get(&[range]).expect("a batch").pop().expect("one").expect("an answer");
            assert!(found.is_none(), "all of {key} in one range");
            assert!(!client.exists(key.as_bytes()).expect("an answer"), "{key}");
            let anew = value(n as u32 + 10, (1 << 20) + 5);
            let put = client.put(key.as_bytes(), &anew).expect("a put");
            assert!(matches!(put, Put::Stored(_)), "{key}, whose head was there: {removed}");
            assert!(client.get(key.as_bytes()).expect("a get").as_deref() == Some(&anew[..]), "{key}");
            assert_eq!(client.put(key.as_bytes(), b"other").expect("a put"), Put::Exists, "all of it is there");
        }
        for key in &keys {
            assert!(client.remove(key.as_bytes()).expect("a remove"));
        }
        assert!(headed > 0, "of no object a head and not all stripes were left");
        assert!(objects(&bed) <= 3 * headless, "stripes that a head named go when that is replaced");
    }
}

/// The remains of another client's striped object come between the stripes and the stripe head of a put: the put
/// replaces them by its own stripe head.
#[test]
fn a_striped_put_replaces_remains_that_came_during_it() {
    const LENGTH: usize = 16 << 20;
    let bed = Bed::start(1, 96 << 20);
    let config = ClientConfig { stripe_bytes: 1 << 20, ..bed.client_config(true) };
    let mut client = Client::connect(&config).expect("a client");
    let mut other = Client::connect(&config).expect("another client");
    let from = memory(&mut client, LENGTH);
    let mut replaced = 0;
    for round in 0..200 {
        if replaced == 3 {
            return;
        }
        let (key, whole) = (format!("between-{round}"), value(round, LENGTH));
        from.region().copy_in(0, &whole);
        let (put, remains) = std::thread::scope(|scope| {
            let put = scope.spawn(|| client.put_from(key.as_bytes(), from.slice(0, LENGTH)).expect("a put"));
            while objects(&bed) == 0 && !put.is_finished() {
                std::hint::spin_loop();
            }
            let head = stripe_head(2 << 20, 1 << 20, u64::from(round));
            let options = PutOptions { part: Part::Head, ..PutOptions::default() };
            let remains = other.put_with(key.as_bytes(), &head, &options).expect("a put");
            (put.join().expect("no panic"), remains)
        });
        assert!(matches!(put, Put::Stored(_)), "{key}");
        assert!(client.get(key.as_bytes()).expect("a get").as_deref() == Some(&whole[..]), "{key}: {remains:?}");
        replaced += u32::from(matches!(remains, Put::Stored(_)));
        assert!(client.remove(key.as_bytes()).expect("a remove"));
    }
    panic!("only {replaced} of 200 puts met remains");
}

/// Returns a stripe head of an object whose stripes do not exist.
fn stripe_head(bytes: u64, stripe_bytes: u64, nonce: u64) -> Vec<u8> {
    let words = [bytes, stripe_bytes, nonce, 0].map(u64::to_le_bytes);
    [&b"KVPSTRP1"[..], words.as_flattened()].concat()
}

/// Returns the number of objects on all nodes.
fn objects(bed: &Bed) -> u64 {
    let stores = bed.nodes.iter().map(|node| node.snapshots().expect("a living node")[0].store.expect("a store"));
    stores.map(|store| store.objects).sum()
}

#[test]
fn thousands_of_lookups_are_one_request() {
    let bed = Bed::start(1, 16 << 20);
    for shared in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let keys: Vec<String> = (0..32_768).map(|n| format!("asked-{n}")).collect();
        for key in keys.iter().step_by(1000) {
            client.put(key.as_bytes(), b"value").expect("a put");
        }
        let asked = |bed: &Bed| bed.nodes[0].snapshots().expect("a living node")[0].service.requests;
        let before = asked(&bed);
        let there = client.batch_exists(&keys).expect("answers");
        assert!(there.iter().enumerate().all(|(n, there)| *there == (n % 1000 == 0)));
        let frames = asked(&bed) - before;
        // Over a network there is one request on each lane.
        assert!(frames <= if shared { 1 } else { 2 }, "{frames} requests");
        let sizes = client.batch_size(&keys).expect("answers");
        assert_eq!(sizes.iter().flatten().count(), 33);
        let removed = client.batch_remove(&keys).expect("answers");
        assert_eq!(removed.iter().filter(|removed| **removed).count(), 33);
    }
}

#[test]
fn lookups_are_answered_after_an_owner_left_and_another_joined() {
    for shared in [true, false] {
        let mut bed = Bed::start(2, 16 << 20);
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let keys: Vec<String> = (0..600).map(|n| format!("left-{n}")).collect();
        for key in keys.iter().step_by(2) {
            client.put(key.as_bytes(), b"value").expect("a put");
        }
        let kept: Vec<bool> = client.batch_exists(&keys).expect("answers");
        assert!(kept.iter().enumerate().all(|(n, there)| *there == (n % 2 == 0)));
        // The node's connections end, but the client's map still names it.
        let gone = bed.nodes.remove(0);
        let owners = client.placement().owners(&keys).expect("a map");
        let left = bed.nodes[0].snapshots().expect("a living node")[0].store.expect("a store").objects;
        drop(gone);
        let digests: Vec<Digest> = keys.iter().map(|key| client.digest(key.as_bytes()).expect("a key")).collect();
        for found in [client.batch_exists(&keys), client.batch_exists_by_digest(&digests)] {
            let found = found.expect("the owners of the next map answer");
            // The objects of the remaining node are found, and any that it fetched from the other.
            assert!(found.iter().filter(|there| **there).count() as u64 >= left);
            assert!(found.iter().zip(&kept).all(|(found, kept)| *kept || !*found));
        }
        let third = Node::start(&bed.node_config(3, 16 << 20)).expect("a node");
        bed.nodes.push(third);
        // Slots migrate to the new node once its map is published, and it fetches objects that it does not have.
        let until = Instant::now() + Duration::from_secs(60);
        while client.placement().owners(&keys).expect("a map").iter().flatten().collect::<BTreeSet<_>>().len() < 2 {
            assert!(Instant::now() < until, "no map with the third node came; before: {owners:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let found = client.batch_exists(&keys).expect("answers");
        assert!(found.iter().filter(|there| **there).count() as u64 >= left);
        assert!(
            client.batch_exists(&["good", ""]).is_err()
                && client.batch_exists(&[] as &[&str]).expect("none").is_empty()
        );
    }
}

#[test]
fn futures_have_options_ranges_sizes_and_removals() {
    let bed = Bed::start(1, 16 << 20);
    for shared in [true, false] {
        let client = AsyncClient::connect(&bed.client_config(shared)).expect("a client");
        let region = Region::allocate(&RegionOptions::new("memory", 1 << 20)).expect("memory");
        let memory = client.register(region).expect("a registration");
        memory.region().copy_in(0, &value(5, 10_000));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let replace = PutOptions { replace: true, group: 7, ..PutOptions::default() };
            client.put_from(b"one", memory.slice(0, 100)).await.expect("a put");
            let put = client.put_from_with(b"one", memory.slice(0, 10_000), &replace).await.expect("a put");
            let Put::Stored(version) = put else { panic!("it replaces what is there") };
            let puts = client.batch_put_from_with(&[(b"two", memory.slice(0, 50))], &replace).await.expect("a batch");
            assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored(_)))));
            let long = PutOptions { soft_pin_ms: u32::MAX, ..PutOptions::default() };
            assert!(client.put_from_with(b"one", memory.slice(0, 1), &long).await.is_err());
            let sizes = client.batch_size(&["one", "two", "three"]).await.expect("sizes");
            assert_eq!(sizes, [Some(10_000), Some(50), None]);
            let range = ObjectRange { key: b"one", offset: 9_000, into: memory.slice(20_000, 1_000) };
            let missing = ObjectRange { key: b"three", into: memory.slice(30_000, 1_000), ..range };
            let ranges = client.ranges().get(&[range, missing]).await.expect("a batch");
            assert!(matches!(&ranges[..], [Ok(Some(found)), Ok(None)] if *found == version), "{ranges:?}");
            assert!(read(&memory, 20_000, 1_000) == value(5, 10_000)[9_000..]);
            assert_eq!(client.batch_remove(&["one", "two", "three"]).await.expect("removals"), [true, true, false]);
        });
    }
}
