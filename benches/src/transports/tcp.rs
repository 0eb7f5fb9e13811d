//! Loopback TCP, 1 MiB blocks, one initiator, against the best single stream of iperf3.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane::{HugePages, Pacing, RegionOptions, Transfer, cpu};

use super::initiator::Initiator;
use crate::Failure;
use crate::bed::Directory;
use crate::peer::Peer;
use crate::rounds::Series;

const BLOCK_BYTES: usize = 1 << 20;
/// Number of blocks in flight.
const BATCH: usize = 8;
const ROUND: Duration = Duration::from_secs(2);

pub(crate) fn run(rounds: usize) -> Result<(), Failure> {
    println!("tcp-stream: 1 MiB blocks, {BATCH} in flight, one initiator, against iperf3 with one stream");
    let Some(iperf) = Iperf::start()? else {
        println!("  skipped: iperf3 is not installed; `cargo x setup bench` installs it");
        return Ok(());
    };
    let directory = Directory::new()?;
    let checked = Ours::start("tcp", &directory)?;
    let unchecked = Ours::start("tcp-unchecked", &directory)?;
    let mut sides = [(checked, "with checksums"), (unchecked, "without")];
    let mut best = Series::new("iperf3, best of 128 KiB and 1 MiB writes", "GB/s");
    let mut series = Vec::new();
    for (_, what) in &sides {
        for operation in ["read", "write"] {
            series.push(Series::new(format!("{operation} {what}"), "GB/s"));
            series.push(Series::new(format!("{operation} {what}, CPU of the initiator"), "s/GB"));
        }
    }
    for _ in 0..rounds {
        best.push(iperf.measure("128K")?.max(iperf.measure("1M")?));
        let mut at = 0;
        for (side, _) in &mut sides {
            for write in [false, true] {
                let (gigabytes_per_s, cpu_s_per_gigabyte) = side.measure(write)?;
                series[at].push(gigabytes_per_s);
                series[at + 1].push(cpu_s_per_gigabyte);
                at += 2;
            }
        }
    }
    best.show();
    series.iter().for_each(Series::show);
    series.iter().step_by(2).for_each(|ours| ours.show_ratio(&best, "at least 0.85"));
    Ok(())
}

struct Ours(Initiator);

impl Ours {
    fn start(way: &str, directory: &Directory) -> Result<Self, Failure> {
        // The two targets exist in turns: one that spins while the other is measured would take its core.
        let target = Peer::start(&["target", way, "adaptive", directory.text()])?;
        let memory = RegionOptions {
            huge: HugePages::Try,
            prefault: true,
            ..RegionOptions::new("bench-initiator", BLOCK_BYTES * BATCH)
        };
        Ok(Self(Initiator::open(target, way, Pacing::Spin, &memory, directory)?))
    }

    fn measure(&mut self, write: bool) -> Result<(f64, f64), Failure> {
        let transfers: Vec<Transfer> = (0..BATCH)
            .map(|block| Transfer {
                local: self.0.buffer.slice(block * BLOCK_BYTES, BLOCK_BYTES),
                region: 0,
                offset: (block * BLOCK_BYTES) as u64,
                write,
            })
            .collect();
        let (start, cpu_ns) = (Instant::now(), cpu::thread_cpu_ns());
        let mut bytes = 0;
        while start.elapsed() < ROUND {
            self.0.run(&transfers)?;
            bytes += BLOCK_BYTES * BATCH;
        }
        let gigabytes = bytes as f64 / 1e9;
        let cpu_s = (cpu::thread_cpu_ns() - cpu_ns) as f64 / 1e9;
        Ok((gigabytes / start.elapsed().as_secs_f64(), cpu_s / gigabytes))
    }
}

/// Server of iperf3.
struct Iperf {
    server: Child,
    port: u16,
}

impl Iperf {
    fn start() -> Result<Option<Self>, Failure> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let server = Command::new("iperf3")
            .args(["-s", "-B", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match server {
            Ok(server) => {
                std::thread::sleep(Duration::from_millis(300));
                Ok(Some(Self { server, port }))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the received GB/s of one stream.
    fn measure(&self, write_bytes: &str) -> Result<f64, Failure> {
        let seconds = ROUND.as_secs().to_string();
        let port = self.port.to_string();
        let output = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", &port, "-J", "-t", &seconds, "-l", write_bytes])
            .output()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
        Ok(bits.ok_or_else(|| format!("iperf3 says: {}", report["error"]))? / 8e9)
    }
}

impl Drop for Iperf {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
