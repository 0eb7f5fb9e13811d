//! Time until the memory and the pins of a killed client are released, while another client works.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvplane::{Client, Region, RegionOptions};

use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::peer::Peer;
use crate::rounds::Series;

const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("killed-client: kill -9 of a client amid puts and gets of 4 MiB; until its pins and space are back");
    let bed = Bed::start(256 << 20, "adaptive")?;
    for way in ["shm", "tcp"] {
        let mut series = Series::new(format!("{way}: time until all is back"), "ms");
        let (mut caught, stop, calls) = (0u32, AtomicBool::new(false), AtomicU64::new(0));
        let bystander = std::thread::scope(|scope| {
            let bystander =
                scope.spawn(|| bystander(way, bed.directory.text(), &stop, &calls).map_err(|e| e.to_string()));
            let outcome = kills(&bed, way, rounds * 5, &mut series, &mut caught).map_err(|error| error.to_string());
            stop.store(true, Ordering::Relaxed);
            let bystander = bystander.join().unwrap_or_else(|_| Err("it panicked".to_owned()));
            outcome.and(bystander.map_err(|error| format!("the other client: {error}")))
        });
        bystander?;
        series.show();
        println!(
            "  {way}: {} kills, {caught} of them with pins or space held; the other client made {} calls without an \
             error",
            rounds * 5,
            calls.load(Ordering::Relaxed)
        );
    }
    Ok(())
}

fn kills(bed: &Bed, way: &str, kills: usize, series: &mut Series, caught: &mut u32) -> Result<(), Failure> {
    for round in 0..kills {
        let mut victim = Peer::start(&["victim", way, bed.directory.text()])?;
        // Each victim is killed later in its work, by odd steps.
        std::thread::sleep(Duration::from_micros(20_000 + round as u64 * 1_370));
        victim.kill();
        let start = Instant::now();
        let mut held = held_bytes(bed)?;
        *caught += u32::from(held > 0);
        while held > 0 {
            if start.elapsed() > PATIENCE {
                return Err(format!("{held} bytes were still held after {} s", PATIENCE.as_secs()).into());
            }
            held = held_bytes(bed)?;
        }
        series.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    Ok(())
}

/// Returns the bytes of objects above the bystander's size that are pinned or reserved.
fn held_bytes(bed: &Bed) -> Result<u64, Failure> {
    let stores = bed.node.snapshots()?.into_iter().filter_map(|snapshot| snapshot.store);
    let held: u64 = stores.map(|s| s.pinned_bytes + s.reserved_bytes + s.quarantined_bytes).sum();
    // The bystander may hold one small object at a time.
    Ok(if held <= SMALL_BYTES as u64 { 0 } else { held })
}

const SMALL_BYTES: usize = 4096;

fn bystander(way: &str, directory: &str, stop: &AtomicBool, calls: &AtomicU64) -> Result<(), Failure> {
    let mut client = Client::connect(&client_config(way, "adaptive", directory)?)?;
    let memory = client.register(Region::allocate(&RegionOptions::new("bystander", SMALL_BYTES))?);
    let slice = memory.slice(0, SMALL_BYTES);
    for number in 0u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let key = format!("bystander-{way}-{number}");
        memory.region().fill_with(0, SMALL_BYTES, &mut |_, part| part.fill(number as u8 ^ 0x5a));
        client.put_from(key.as_bytes(), slice)?;
        memory.region().fill_with(0, SMALL_BYTES, &mut |_, part| part.fill(0));
        // The object may have been evicted by the victim's puts; if it exists, it must be right.
        if client.get_into(key.as_bytes(), slice)?.is_some() {
            let mut wrong = false;
            memory.region().read_with(0, SMALL_BYTES, &mut |_, part| {
                wrong |= part.iter().any(|&byte| byte != number as u8 ^ 0x5a);
            });
            if wrong {
                return Err(format!("object {number} came back wrong").into());
            }
        }
        calls.fetch_add(2, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}
