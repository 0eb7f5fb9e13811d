//! Cost of our own code per slice posted through verbs, measured on a null device that ignores its requests.
//!
//! `cargo run --release -p kvplane-sys --example verbs_null [slices] [threads] [shared]`; to count instructions, run
//! the same program under `valgrind --tool=callgrind` with two numbers of slices, whose difference excludes the
//! startup. With `shared` all threads use one handle of the memory, to compare its cost with `MemoryRegion::separate`.

use kvplane_soft_verbs::null_verbs;
use kvplane_sys::verbs::{
    Access, CompletionQueue, Connection, Context, Entry, MemoryRegion, Mtu, Operation, Payload, PeerAccess,
    ProtectionDomain, QueuePair, QueuePairOptions, Remote, Request, Route, Status,
};
use kvplane_sys::{IoBuf, Region, RegionOptions};
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

const SLICE_BYTES: u32 = 64 << 10;
const PLACES: u64 = 16;
const FLUSH: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let slices: u64 = words.next().map_or(Ok(10_000_000), |word| word.parse())?;
    let threads: u64 = words.next().map_or(Ok(1), |word| word.parse())?;
    let shared = words.next().is_some_and(|word| word == "shared");
    let context = null_verbs().device("null0")?.open()?;
    let domain = ProtectionDomain::new(&context)?;
    let region = Region::allocate(&RegionOptions::new("slices", SLICE_BYTES as usize * PLACES as usize))?;
    let memory = domain.register(&IoBuf::whole(region), Access::REMOTE)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (context, domain) = (&context, &domain);
            let memory = if shared { memory.clone() } else { memory.separate() };
            scope.spawn(move || post(context, domain, &memory, slices).expect("posted"));
        }
    });
    let elapsed_ns = start.elapsed().as_nanos() as f64;
    let each_ns = elapsed_ns / slices as f64;
    println!("{threads} threads, {slices} slices each: {each_ns:.1} ns a slice, {:.1} M/s a thread", 1e3 / each_ns);
    Ok(())
}

/// Posts and retires `slices` slices on a queue pair of the thread.
fn post(
    context: &Arc<Context>,
    domain: &ProtectionDomain,
    memory: &MemoryRegion,
    slices: u64,
) -> Result<(), Box<dyn Error>> {
    let mut queue = CompletionQueue::new(context, 1024, None)?;
    let options = QueuePairOptions { send_depth: 256, batch: FLUSH as u32, ..QueuePairOptions::default() };
    let mut queue_pair = QueuePair::new(domain, &queue, None, &options)?;
    queue_pair.connect(&anywhere())?;
    let (mut entries, mut posted, mut done, mut completions, mut doorbells) = (Entry::many(32), 0, 0, 0u64, 0u64);
    while done < slices {
        while queue_pair.room() > 0 && queue_pair.unsent() < FLUSH {
            let place = (posted % PLACES) as usize * SLICE_BYTES as usize;
            let piece = [memory.piece(place, SLICE_BYTES).expect("inside")];
            let to = Remote { address: posted * u64::from(SLICE_BYTES), key: 1 };
            queue_pair.push(&Request::new(posted, Operation::Write { to }, Payload::Pieces(&piece)))?;
            posted += 1;
        }
        doorbells += u64::from(queue_pair.flush(false)? > 0);
        for completion in queue.poll(&mut entries)? {
            completions += 1;
            queue_pair.retire(&completion, |retired| done += u64::from(retired.status == Status::Success));
        }
    }
    assert!(completions * 16 <= posted && doorbells * 8 <= posted, "{completions} and {doorbells} of {posted}");
    Ok(())
}

/// Returns connection attributes; the null device ignores them.
fn anywhere() -> Connection {
    let route = Route { gid: None, gid_index: 0, lid: 0, hop_limit: 1, traffic_class: 0, service_level: 0 };
    Connection {
        port: 1,
        pkey_index: 0,
        access: PeerAccess::default(),
        path_mtu: Mtu::Bytes4096,
        route,
        peer_qp_num: 1,
        peer_packet_number: 0,
        packet_number: 0,
        reads_served: 1,
        reads_started: 1,
        not_ready_timer: 12,
        timeout: 14,
        retries: 7,
        not_ready_retries: 7,
    }
}
