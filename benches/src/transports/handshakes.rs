//! Cost of an idle, a half-open and a garbage connection to the handshake port for other peers.

use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

use kvplane::{TransferEngine, TransferEngineConfig};

use crate::Failure;
use crate::bed::Directory;
use crate::rounds::Series;

/// Number of probes of one round.
const PROBES: usize = 200;

/// Returns the slowest probe of a round, in milliseconds.
fn slowest_ms(asker: &TransferEngine, name: &str) -> Result<f64, Failure> {
    let mut slowest = 0f64;
    for _ in 0..PROBES {
        let start = Instant::now();
        asker.directory().probe(name)?;
        slowest = slowest.max(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(slowest)
}

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("handshakes: the slowest of {PROBES} probes, alone and beside connections that say nothing or nonsense");
    let directory = Directory::new()?;
    let config =
        || TransferEngineConfig { runtime_directory: Some(directory.0.clone()), ..TransferEngineConfig::default() };
    let (target, asker) = (TransferEngine::start(config())?, TransferEngine::start(config())?);
    let address = target.directory().address();
    let mut alone = Series::new("alone", "ms");
    let mut beside = Series::new("beside an idle, a half-open and a garbage one", "ms");
    for _ in 0..rounds {
        alone.push(slowest_ms(&asker, target.name())?);
        let idle = TcpStream::connect(address)?;
        let mut half = TcpStream::connect(address)?;
        // A length without a message.
        half.write_all(&100u64.to_le_bytes())?;
        let mut garbage = TcpStream::connect(address)?;
        garbage.write_all(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")?;
        beside.push(slowest_ms(&asker, target.name())?);
        drop((idle, half, garbage));
    }
    alone.show();
    beside.show();
    println!("  {:44} wanted: a delay under 5 ms", "");
    Ok(())
}
