//! Rates of all devices, as tables.

use std::sync::Arc;
use std::time::Duration;

use kvplane::device::{Device, DeviceInfo, DeviceMemory};
use kvplane_fake_devices::Control;

use crate::cards::{self, Cards};
use crate::copies::PlainCopies;
use crate::peer::Peer;
use crate::pool::{Pool, PoolClient};
use crate::table::{Row, Table};
use crate::{Error, table};

/// Lengths that are measured.
pub(crate) const SIZES: [u64; 4] = [1 << 20, 8 << 20, 64 << 20, 256 << 20];
/// Lengths of a short run.
pub(crate) const QUICK: [u64; 2] = [64 << 10, (3 << 20) + 4096];
/// Rounds of a measurement, of which the first counts as little as any other.
const ROUNDS: u64 = 9;
/// Largest object's multiple that the pool has.
const POOL: u64 = 4;

/// Bytes a second.
pub(crate) type Rate = f64;

/// Measures something a few times; returns the median rate of `bytes`.
pub(crate) fn median(bytes: u64, mut run: impl FnMut(u64) -> Result<Duration, Error>) -> Result<Rate, Error> {
    let mut times = (0..ROUNDS).map(&mut run).collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    Ok(bytes as f64 / times[times.len() / 2].as_secs_f64())
}

/// Compares bytes with the pattern of a seed.
pub(crate) fn check(found: &[u8], seed: u64, what: &str) -> Result<(), Error> {
    let wrong = found.iter().zip(Control::pattern(seed, found.len() as u64)).position(|(one, other)| *one != other);
    wrong.map_or(Ok(()), |at| Err(format!("{what} of {} bytes: byte {at} is wrong", found.len()).into()))
}

/// Measures all devices and prints a table for each; without a device, prints why.
pub(crate) fn run(sizes: &[u64]) -> Result<(), Error> {
    let cards = cards::find();
    if cards.found.is_empty() {
        print!("{cards}");
        return Ok(());
    }
    for info in &cards.found {
        print!("{}", measure(&cards, info, sizes)?);
    }
    Ok(())
}

fn measure(cards: &Cards, info: &DeviceInfo, sizes: &[u64]) -> Result<Table, Error> {
    let control = cards::load(info.id.family)?;
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let device = Device::open(info.id)?;
    let next = Device::open(cards.after(info.id))?;
    let allocate = |device: &Arc<Device>| DeviceMemory::allocate(device, longest);
    let (ours, others) = (allocate(&device)?, allocate(&next)?);
    let pool = Pool::start((POOL * longest).max(64 << 20))?;
    let mut plain = PlainCopies::new(&device, longest)?;
    let mut client = PoolClient::new(&pool, Arc::clone(&ours), control)?;
    let mut peer = Peer::start(next.id(), &ours, control)?;
    let mut table = Table::new(cards::title(info, control), next.id());
    for &bytes in sizes {
        let (to_host, to_device) = (plain.measure_to_host(&ours, bytes)?, plain.measure_to_device(&ours, bytes)?);
        let between = plain.measure_between(&ours, &others, bytes)?;
        let [put, get] = client.measure(bytes)?;
        let to_peer = peer.measure(bytes)?;
        table.rows.push(Row {
            bytes,
            pairs: [
                table::Pair { plain: to_host, ours: put },
                table::Pair { plain: to_device, ours: get },
                table::Pair { plain: between, ours: to_peer },
            ],
        });
    }
    table.transports = peer.transports();
    peer.end()?;
    Ok(table)
}
