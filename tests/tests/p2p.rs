//! End-to-end tests of the P2P store: real engines, a real control plane, bytes over loopback TCP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use kvplane::rpc::Role;
use kvplane::rpc::message::RotateTickets;
use kvplane::{
    ControlLink, GetOptions, HugePages, Object, P2pConfig, P2pStore, PublishOptions, ReadBytes, ReadOptions, Region,
    RegionOptions, TransferEngine, TransferEngineConfig, reshard,
};
use kvplane_server::TicketConfig;

mod bed;
#[path = "p2p/c_library.rs"]
mod c_library;
#[path = "../../tools/capi/tests/compiled/mod.rs"]
mod compiled;
#[path = "p2p/held.rs"]
mod held;
#[path = "p2p/ranks.rs"]
mod ranks;
#[path = "p2p/shards.rs"]
mod shards;
#[path = "p2p/waits.rs"]
mod waits;
#[path = "p2p/widen.rs"]
mod widen;

use bed::Bed;

const KIB: usize = 1 << 10;
const SHARD: usize = 64 * KIB;
/// Sizes of two buffers, neither of them a multiple of the shard size.
const SIZES: [usize; 2] = [3 << 20, (1 << 20) + 12_345];

fn store(bed: &Bed, host: &str) -> P2pStore {
    P2pStore::connect(config(bed, host)).expect("a store")
}

fn config(bed: &Bed, host: &str) -> P2pConfig {
    let mut config = P2pConfig::new(bed.control_name());
    config.engine.shared_memory = false;
    config.engine.runtime_directory = Some(std::env::temp_dir().join(format!("kvplane-p2p-{}", std::process::id())));
    config.host = host.to_owned();
    config
}

fn regions() -> Vec<Arc<Region>> {
    let region = |bytes| {
        let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("test", bytes) };
        Region::allocate(&options).expect("memory")
    };
    SIZES.into_iter().map(region).collect()
}

/// Returns a byte that identifies its location.
fn byte(seed: u64, buffer: usize, at: u64) -> u8 {
    let mixed = (seed ^ (buffer as u64) << 40 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

fn filled(seed: u64) -> Vec<Arc<Region>> {
    let regions = regions();
    for (buffer, region) in regions.iter().enumerate() {
        region.fill_with(0, region.bytes(), &mut |offset, part| {
            part.iter_mut().zip(offset..).for_each(|(out, at)| *out = byte(seed, buffer, at));
        });
    }
    regions
}

fn check(regions: &[Arc<Region>], seed: u64) {
    for (buffer, region) in regions.iter().enumerate() {
        region.read_with(0, region.bytes(), &mut |offset, part| {
            for (&found, at) in part.iter().zip(offset..) {
                assert_eq!(found, byte(seed, buffer, at), "byte {at} of buffer {buffer}");
            }
        });
    }
}

fn publish() -> PublishOptions {
    PublishOptions { shard_bytes: Some(SHARD as u64), ..PublishOptions::default() }
}

fn get(store: &P2pStore, object: &Object, regions: &[Arc<Region>]) -> Result<u64, kvplane::Error> {
    store.get_replica(
        object,
        regions,
        &GetOptions { deadline: Some(Duration::from_secs(600)), ..GetOptions::default() },
    )
}

fn total() -> u64 {
    SIZES.iter().sum::<usize>() as u64
}

#[test]
fn all_members_get_the_object_and_the_origin_sends_it_about_once() {
    let bed = Bed::start(0, 0);
    let origin = store(&bed, "origin");
    let memory = filled(1);
    let name = "models/a/b";
    assert_eq!(origin.register(name, &memory, &publish()).expect("published"), 1);
    let receivers: Vec<P2pStore> = (0..4).map(|number| store(&bed, &format!("r{number}"))).collect();
    std::thread::scope(|scope| {
        for receiver in &receivers {
            scope.spawn(|| {
                let object = receiver.find(name, None).expect("there");
                let memory = regions();
                assert_eq!(get(receiver, &object, &memory).expect("fetched"), total());
                check(&memory, 1);
            });
        }
    });
    let found = origin.describe(name, None).expect("there");
    assert_eq!((found.members.len(), found.lost), (5, 0));
    assert!(found.members.iter().all(|member| member.need == 0 && member.have == 65), "{found:?}");
    let sent = origin.engine().snapshot().expect("its figures").service.read_bytes;
    println!("the origin sent {:.3} x the object", sent as f64 / total() as f64);
    assert!(sent as f64 <= 1.5 * total() as f64, "the origin sent {sent} of {} bytes", total());
    // After the origin has left, a late member fetches from the others.
    origin.unregister(name, None).expect("nobody reads");
    let late = store(&bed, "late");
    let memory = regions();
    get(&late, &late.find(name, None).expect("there"), &memory).expect("fetched");
    check(&memory, 1);
    for receiver in &receivers {
        receiver.delete_replica(name, Some(1)).expect("nobody reads");
    }
    assert_eq!(late.list("models/").expect("listed")[0].members, 1);
}

#[test]
fn a_source_whose_bytes_changed_is_excluded_and_named() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    let memory = filled(2);
    origin.register("o", &memory, &publish()).expect("published");
    memory[0].copy_in(5 * SHARD + 7, &[byte(2, 0, (5 * SHARD + 7) as u64) ^ 1]);
    let object = receiver.find("o", None).expect("there");
    let error = get(&receiver, &object, &regions()).expect_err("a shard is nowhere").to_string();
    assert!(error.contains("does not match its hash") && error.contains(origin.name()), "{error}");
    // One member with the right bytes is enough; shards that were right before are not fetched again.
    let other = store(&bed, "c");
    other.register("o", &filled(2), &publish()).expect("the same object");
    let memory = regions();
    get(&receiver, &object, &memory).expect("fetched");
    check(&memory, 2);
}

/// Shards of several pieces, over TCP and by CMA: a byte of the last piece is verified, too.
#[test]
fn shards_of_several_pieces_are_checked_to_their_last_byte() {
    let bed = Bed::start(0, 0);
    let of = |host: &str, shared: bool| {
        let mut config = config(&bed, host);
        config.engine.shared_memory = shared;
        P2pStore::connect(config).expect("a store")
    };
    for shared in [false, true] {
        let (origin, receiver) = (of("a", shared), of("b", shared));
        let (memory, name) = (filled(6), format!("pieces-{shared}"));
        let long = PublishOptions { shard_bytes: Some(64 << 20), ..PublishOptions::default() };
        origin.register(&name, &memory, &long).expect("published");
        let object = receiver.find(&name, None).expect("there");
        assert_eq!(object.layout.shards(), 2, "each of several pieces");
        let into = regions();
        assert_eq!(get(&receiver, &object, &into).expect("fetched"), total());
        check(&into, 6);
        receiver.delete_replica(&name, None).expect("nobody reads");
        memory[0].copy_in(SIZES[0] - 1, &[byte(6, 0, SIZES[0] as u64 - 1) ^ 1]);
        let error = get(&receiver, &object, &regions()).expect_err("a byte has changed").to_string();
        assert!(error.contains("shard 0 does not match its hash"), "{error}");
    }
}

#[test]
fn a_get_resumes_an_interrupted_one_and_fetches_selected_shards() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    origin.register("o", &filled(3), &publish()).expect("published");
    let object = receiver.find("o", None).expect("there");
    let memory = regions();
    let arrived = AtomicU32::new(0);
    let each = |_| {
        arrived.fetch_add(1, Ordering::Relaxed);
    };
    let (first, count) = object.layout.covering(1, 0, SIZES[1] as u64).expect("the second buffer");
    let some = GetOptions { shards: Some(vec![(first, count)]), each: Some(&each), ..GetOptions::default() };
    assert_eq!(receiver.get_replica(&object, &memory, &some).expect("fetched"), SIZES[1] as u64);
    assert_eq!(arrived.load(Ordering::Relaxed), count);
    receiver.delete_replica("o", None).expect("nobody reads");
    let rest = GetOptions { resume: true, ..GetOptions::default() };
    assert_eq!(receiver.get_replica(&object, &memory, &rest).expect("fetched"), SIZES[0] as u64);
    check(&memory, 3);
}

#[test]
fn versions_do_not_mix_and_invalid_calls_are_refused() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    let (one, two) = (filled(4), filled(5));
    assert_eq!(origin.register("o", &one, &publish()).expect("published"), 1);
    let object = receiver.find("o", None).expect("there");
    assert_eq!(origin.register("o", &two, &publish()).expect("published"), 2);
    let memory = regions();
    get(&receiver, &object, &memory).expect("the first version");
    check(&memory, 4);
    let newest = receiver.find("o", None).expect("there");
    let error = get(&receiver, &newest, &memory).expect_err("peers read the first one there").to_string();
    assert!(error.contains("overlaps"), "{error}");
    let other = regions();
    get(&receiver, &newest, &other).expect("the second version");
    check(&memory, 4);
    check(&other, 5);
    // The same version with other bytes, a version that is held, other sizes, and an unknown object.
    let again = PublishOptions { version: Some(1), ..publish() };
    assert!(origin.register("o", &two, &again).unwrap_err().to_string().contains("objects are immutable"));
    assert!(origin.register("o", &one, &again).unwrap_err().to_string().contains("held here already"));
    assert!(get(&receiver, &object, &memory[..1]).unwrap_err().to_string().contains("2 buffers, but 1 are given"));
    assert!(receiver.find("nobody's", None).is_err() && origin.unregister("nobody's", None).is_err());
    assert!(receiver.find("o", Some(3)).unwrap_err().to_string().contains("version 3"));
    let empty = origin.register("empty", &[], &publish()).expect("an object of 0 bytes");
    assert_eq!(get(&receiver, &receiver.find("empty", Some(empty)).expect("there"), &[]).expect("at once"), 0);
    origin.unregister("o", Some(1)).expect("nobody reads");
    origin.unregister("o", Some(2)).expect("nobody reads");
    assert!(origin.unregister("o", None).is_err(), "it is not held any more");
}

/// The catalog is in memory: a restarted control plane is informed of everything again.
#[test]
fn a_restarted_control_plane_relearns_the_catalog() {
    let mut bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    origin.register("o", &filled(6), &publish()).expect("published");
    bed.restart_control();
    let until = std::time::Instant::now() + Duration::from_secs(60);
    let object = loop {
        if let Ok(object) = receiver.find("o", None) {
            break object;
        }
        assert!(std::time::Instant::now() < until, "it was not announced again");
        std::thread::sleep(Duration::from_millis(50));
    };
    let memory = regions();
    get(&receiver, &object, &memory).expect("fetched");
    check(&memory, 6);
}

/// With tickets, peers without one, or with one of another tenant, are rejected; and keys change while peers fetch.
#[test]
fn peers_prove_tickets_and_others_read_nothing() {
    let tickets = TicketConfig { lifetime_s: 3, ..TicketConfig::default() };
    let bed = Bed::start_with(0, 0, |config| config.tickets = Some(tickets));
    let of = |tenant: &str, host: &str, shared: bool| {
        let mut config = config(&bed, host);
        config.tenant = tenant.to_owned();
        config.engine.shared_memory = shared;
        P2pStore::connect(config).expect("a store")
    };
    let origin = of("one", "a", true);
    let memory = filled(7);
    origin.register("o", &memory, &publish()).expect("published");
    let operator = ControlLink::to(&bed.control_name(), Role::Admin).expect("an operator");
    for shared in [false, true] {
        let peer = of("one", "b", shared);
        let memory = regions();
        get(&peer, &peer.find("o", None).expect("there"), &memory).expect("of the same tenant");
        check(&memory, 7);
        operator.call(RotateTickets).expect("another key");
    }
    // The wait is longer than a ticket's lifetime: this member's ticket was renewed, and it knows the newer keys.
    std::thread::sleep(Duration::from_secs(4));
    let late = of("one", "c", false);
    get(&late, &late.find("o", None).expect("there"), &regions()).expect("with a ticket under the newest key");
    // The same bytes for another tenant, whose peers know the addresses of the first one's memory.
    let other = of("two", "d", false);
    assert!(other.find("o", None).is_err(), "its catalog is another one");
    assert!(other.engine().open_segment(origin.name()).is_err(), "its tickets are those of another tenant");
    let stranger = TransferEngineConfig { cluster: "test".to_owned(), ..config(&bed, "e").engine };
    let stranger = TransferEngine::start(stranger).expect("it needs nobody");
    assert!(stranger.open_segment(origin.name()).is_err(), "it has no ticket");
    assert!(origin.engine().open_segment(stranger.name()).is_err(), "a peer that proves nothing is not asked");
    assert!(origin.engine().snapshot().expect("its figures").service.unauthenticated > 0);
}

#[test]
fn without_tickets_it_listens_on_loopback_only() {
    let bed = Bed::start(0, 0);
    let mut config = config(&bed, "a");
    config.engine.listen = ([0, 0, 0, 0], 0).into();
    config.engine.open_to_network = true;
    let error = P2pStore::connect(config).expect_err("whoever reaches it could read").to_string();
    assert!(error.contains("issues no tickets"), "{error}");
}

fn region(bytes: usize) -> Arc<Region> {
    let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("test", bytes) };
    Region::allocate(&options).expect("memory")
}

/// Names with slashes and of 4 KiB, sizes of a byte, of less than a shard, and of one more than a shard.
#[test]
fn names_and_sizes_may_be_odd() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    let long = format!("/a//b/../{}", "\u{e9}/".repeat(2000));
    let long = &long[..4095];
    for (number, name) in ["/", "a/b/", " ", "..", long].into_iter().enumerate() {
        let memory: Vec<Arc<Region>> = [1, SHARD - 1, SHARD, SHARD + 1, 1].into_iter().map(region).collect();
        for (buffer, one) in memory.iter().enumerate() {
            one.fill_with(0, one.bytes(), &mut |offset, part| {
                part.iter_mut().zip(offset..).for_each(|(out, at)| *out = byte(number as u64, buffer, at));
            });
        }
        origin.register(name, &memory, &publish()).expect("published");
        let object = receiver.find(name, Some(1)).expect("there");
        assert_eq!((object.layout.shards(), object.name.as_str()), (6, name));
        let copy: Vec<Arc<Region>> = memory.iter().map(|one| region(one.bytes())).collect();
        assert_eq!(get(&receiver, &object, &copy).expect("fetched"), 3 * SHARD as u64 + 2);
        check(&copy, number as u64);
        assert_eq!(receiver.list(name).expect("listed").first().map(|found| found.name.clone()), Some(name.to_owned()));
    }
    let too_long = format!("{long}xx");
    let error = origin.register(&too_long, &[region(1)], &publish()).expect_err("4,097 bytes").to_string();
    assert!(error.contains("4097 bytes"), "{error}");
    let none = PublishOptions { shard_bytes: Some(0), ..PublishOptions::default() };
    assert!(origin.register("o", &[region(1)], &none).unwrap_err().to_string().contains("shards of 0 bytes"));
}

/// Memory that overlaps memory of another object is refused, and both objects stay as they were.
#[test]
fn overlapping_memory_is_refused() {
    let bed = Bed::start(0, 0);
    let (origin, receiver) = (store(&bed, "a"), store(&bed, "b"));
    let memory = filled(8);
    origin.register("o", &memory, &publish()).expect("published");
    let twice = [Arc::clone(&memory[0]), Arc::clone(&memory[0])];
    assert!(origin.register("twice", &twice, &publish()).is_ok(), "it is read in both places");
    origin.register("again", &memory[..1], &publish()).expect("read by peers of both");
    let object = receiver.find("o", None).expect("there");
    // Memory that peers read is not written.
    let error = get(&origin, &origin.find("o", None).expect("there"), &memory).expect_err("it is in use").to_string();
    assert!(error.contains("held here already") || error.contains("overlaps"), "{error}");
    let own = regions();
    let both = [Arc::clone(&own[0]), Arc::clone(&own[0])];
    let object_twice = receiver.find("twice", None).expect("there");
    let error = get(&receiver, &object_twice, &both).expect_err("two buffers in one place").to_string();
    assert!(error.contains("overlaps"), "{error}");
    origin.unregister("twice", None).expect("nobody reads");
    origin.unregister("again", None).expect("nobody reads");
    get(&receiver, &object, &own).expect("the first one is still served");
    check(&own, 8);
}

/// Unregistering during a fetch waits for peers that were directed to this member; the others fetch elsewhere, or learn
/// that no member is left. No peer gets wrong bytes.
#[test]
fn unregistering_during_a_fetch_waits_and_mixes_no_versions() {
    let bed = Bed::start(0, 0);
    let (origin, other) = (store(&bed, "a"), store(&bed, "b"));
    let memory = filled(9);
    origin.register("o", &memory, &publish()).expect("published");
    other.register("o", &filled(9), &publish()).expect("the same object");
    let receivers: Vec<P2pStore> = (0..3).map(|number| store(&bed, &format!("r{number}"))).collect();
    let arrived = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for receiver in &receivers {
            scope.spawn(|| {
                let object = receiver.find("o", None).expect("there");
                let each = |_| {
                    arrived.fetch_add(1, Ordering::Relaxed);
                };
                let memory = regions();
                let options =
                    GetOptions { each: Some(&each), deadline: Some(Duration::from_secs(60)), ..GetOptions::default() };
                receiver.get_replica(&object, &memory, &options).expect("from those who are left");
                check(&memory, 9);
            });
        }
        while arrived.load(Ordering::Relaxed) < 20 {
            std::thread::yield_now();
        }
        origin.unregister("o", None).expect("who reads is waited for");
        // No peer reads the memory any more, so it may be overwritten.
        memory.iter().for_each(|region| region.fill_with(0, region.bytes(), &mut |_, part| part.fill(0xee)));
    });
    assert!(origin.unregister("o", None).is_err(), "it is gone");
}

/// Ranges are read from the nearest members that have the buffer, in turn. The members stop holding it and write other
/// bytes into it before the second of them is read, which then serves these: they are not accepted.
#[test]
fn ranges_of_departed_members_are_not_accepted() {
    let bed = Bed::start(0, 0);
    let near = [store(&bed, "here"), store(&bed, "here")];
    let (far, reader) = (store(&bed, "elsewhere"), store(&bed, "here"));
    let memory = [filled(4), filled(4)];
    for (near, memory) in near.iter().zip(&memory) {
        near.register("o", memory, &publish()).expect("published");
    }
    far.register("o", &filled(4), &publish()).expect("the same");
    let object = reader.find("o", None).expect("there");
    // There are more copies than are read at a time, from the end to the beginning, with gaps.
    let copies: Vec<reshard::Copy> = (0..5000u64)
        .map(|number| reshard::Copy { source_offset: (5000 - number) * 40, target_offset: number * 24, bytes: 24 })
        .collect();
    let into = Region::allocate(&RegionOptions { huge: HugePages::Never, ..RegionOptions::new("into", 5000 * 24) });
    let into = into.expect("memory");
    let gone = AtomicBool::new(false);
    let each = |_| {
        if !gone.swap(true, Ordering::Relaxed) {
            for (near, memory) in near.iter().zip(&memory) {
                near.unregister("o", None).expect("no member has a grant to fetch from it");
                memory[0].fill_with(0, memory[0].bytes(), &mut |_, part| part.fill(0xee));
                near.register("other", memory, &publish()).expect("published");
            }
        }
    };
    let options = ReadOptions { deadline: Some(Duration::from_secs(60)), each: Some(&each) };
    assert_eq!(reader.read_ranges(&object, 0, &copies, &into, &options).expect("read").bytes, 5000 * 24);
    for copy in &copies {
        into.read_with(copy.target_offset as usize, 24, &mut |offset, part| {
            for (&found, at) in part.iter().zip(copy.source_offset + offset..) {
                assert_eq!(found, byte(4, 0, at), "byte {at}");
            }
        });
    }
    let beyond = [reshard::Copy { source_offset: SIZES[1] as u64, target_offset: 0, bytes: 1 }];
    let error = reader.read_ranges(&object, 1, &beyond, &into, &options).expect_err("beyond").to_string();
    assert!(error.contains("buffer 1 of \"o\" has"), "{error}");
    // No member has the object any more.
    far.unregister("o", None).expect("nobody reads");
    assert!(reader.read_ranges(&object, 0, &copies, &into, &ReadOptions::default()).is_err());
}

fn read_all(reader: &P2pStore, object: &Object, copies: &[reshard::Copy]) -> Result<(ReadBytes, Arc<Region>), String> {
    let into = region(SIZES[0]);
    let options = ReadOptions { deadline: Some(Duration::from_secs(60)), each: None };
    let read = reader.read_ranges(object, 0, copies, &into, &options).map_err(|error| error.to_string())?;
    Ok((read, into))
}

/// Ranges are compared with hashes where they cover a whole shard, whatever the order of its pieces: one of two sources
/// with wrong bytes is detected and avoided, and without another source no bytes are accepted.
#[test]
fn whole_shards_among_ranges_are_checked() {
    let bed = Bed::start(0, 0);
    let (right, wrong, reader) = (store(&bed, "here"), store(&bed, "here"), store(&bed, "here"));
    let memory = [filled(10), filled(10)];
    right.register("o", &memory[0], &publish()).expect("published");
    wrong.register("o", &memory[1], &publish()).expect("the same");
    let object = reader.find("o", None).expect("there");
    let place = 3 * SHARD + 5;
    memory[1][0].copy_in(place, &[byte(10, 0, place as u64) ^ 1]);
    // All but the last byte, from the end to the beginning, in as many copies as make several batches.
    let piece = |at: u64| reshard::Copy { source_offset: at, target_offset: at, bytes: 256 };
    let mut copies: Vec<reshard::Copy> = (0..SIZES[0] as u64 / 256).rev().map(|number| piece(number * 256)).collect();
    copies[0].bytes -= 1;
    let (read, into) = read_all(&reader, &object, &copies).expect("from the right one");
    assert_eq!(read.bytes, SIZES[0] as u64 - 1);
    assert_eq!(read.checked, (SIZES[0] - SHARD) as u64, "all but the shard whose last byte is not read");
    into.read_with(0, SIZES[0] - 1, &mut |offset, part| {
        assert!(part.iter().zip(offset..).all(|(&found, at)| found == byte(10, 0, at)), "from {offset} on");
    });
    right.unregister("o", None).expect("no member has a grant to fetch from it");
    let error = read_all(&reader, &object, &copies).expect_err("only the wrong one is left");
    assert!(error.contains("shard 3 from") && error.contains(wrong.name()), "{error}");
    // Without the shard's last byte it cannot be verified.
    let some: Vec<reshard::Copy> = copies.iter().copied().filter(|copy| copy.source_offset < place as u64).collect();
    let (read, _) = read_all(&reader, &object, &some).expect("read");
    assert_eq!(read.checked, 3 * SHARD as u64);
}
