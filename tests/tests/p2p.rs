//! The P2P store from end to end: real engines, a real control plane, bytes over loopback TCP.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvplane::{GetOptions, HugePages, Object, P2pConfig, P2pStore, PublishOptions, Region, RegionOptions};

mod bed;

use bed::Bed;

const KIB: usize = 1 << 10;
const SHARD: usize = 64 * KIB;
/// Two buffers, neither of them a multiple of the shard.
const SIZES: [usize; 2] = [3 << 20, (1 << 20) + 12_345];

fn store(bed: &Bed, host: &str) -> P2pStore {
    let mut config = P2pConfig::new(bed.control_name());
    config.engine.shared_memory = false;
    config.engine.runtime_directory = Some(std::env::temp_dir().join(format!("kvplane-p2p-{}", std::process::id())));
    config.host = host.to_owned();
    P2pStore::connect(config).expect("a store")
}

fn regions() -> Vec<Arc<Region>> {
    let region = |bytes| {
        let options = RegionOptions { shared: true, huge: HugePages::Never, ..RegionOptions::new("test", bytes) };
        Region::allocate(&options).expect("memory")
    };
    SIZES.into_iter().map(region).collect()
}

/// Bytes that say where they belong.
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
    PublishOptions { shard_bytes: SHARD as u64, ..PublishOptions::default() }
}

fn get(store: &P2pStore, object: &Object, regions: &[Arc<Region>]) -> Result<u64, kvplane::Error> {
    store.get_replica(object, regions, &GetOptions { deadline: Duration::from_secs(60), ..GetOptions::default() })
}

fn total() -> u64 {
    SIZES.iter().sum::<usize>() as u64
}

#[test]
fn everybody_gets_all_of_it_and_the_origin_sends_it_about_once() {
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
    // Without it, one who comes late fetches from the others.
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
    assert!(error.contains("is not what its hash says") && error.contains(origin.name()), "{error}");
    // One who has the right bytes is enough; what was right before is not fetched again.
    let other = store(&bed, "c");
    other.register("o", &filled(2), &publish()).expect("the same object");
    let memory = regions();
    get(&receiver, &object, &memory).expect("fetched");
    check(&memory, 2);
}

#[test]
fn a_get_goes_on_where_another_ended_and_takes_what_is_wanted() {
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
fn versions_do_not_mix_and_what_makes_no_sense_is_refused() {
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
    // The same version with other bytes, a version that is held, other sizes, and nobody's object.
    let again = PublishOptions { version: Some(1), ..publish() };
    assert!(origin.register("o", &two, &again).unwrap_err().to_string().contains("objects do not change"));
    assert!(origin.register("o", &one, &again).unwrap_err().to_string().contains("held here already"));
    assert!(get(&receiver, &object, &memory[..1]).unwrap_err().to_string().contains("2 buffers, and 1 are given"));
    assert!(receiver.find("nobody's", None).is_err() && origin.unregister("nobody's", None).is_err());
    assert!(receiver.find("o", Some(3)).unwrap_err().to_string().contains("version 3"));
    let empty = origin.register("empty", &[], &publish()).expect("an object of 0 bytes");
    assert_eq!(get(&receiver, &receiver.find("empty", Some(empty)).expect("there"), &[]).expect("at once"), 0);
    origin.unregister("o", Some(1)).expect("nobody reads");
    origin.unregister("o", Some(2)).expect("nobody reads");
    assert!(origin.unregister("o", None).is_err(), "it is not held any more");
}

/// The catalog is in memory: a control plane that starts anew hears of everything again.
#[test]
fn a_control_plane_that_starts_again_learns_what_there_is() {
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
