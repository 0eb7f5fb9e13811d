//! Peers that are external programs: UCX's perftest and iperf3. Both stream, so one figure serves many batches.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cells::{Cell, Op};
use super::meter::{Meter, Usage};
use super::process::{self, Process};
use super::row::Figures;
use super::side::Side;
use crate::Failure;

const PATIENCE: Duration = Duration::from_secs(40);
const START: Duration = Duration::from_millis(150);

type Measurement = Option<(Figures, Usage)>;

fn free_port() -> Result<String, Failure> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port().to_string())
}

/// UCX's `ucx_perftest`: a stream of puts for writes, one blocking get after the other for reads.
pub(crate) struct Perftest {
    /// Unpacked package, with `bin` and `lib`.
    root: PathBuf,
    transports: &'static str,
    /// Puts of the round, which do not depend on the batch.
    puts: Option<(usize, u64, (Figures, Usage))>,
}

impl Perftest {
    pub(crate) fn new(root: PathBuf, transports: &'static str) -> Self {
        Self { root, transports, puts: None }
    }

    fn command(&self, test: &str, block_bytes: u64, iterations: u64, port: &str) -> Command {
        let (lib, warm_up) = (self.root.join("lib"), (iterations / 10).clamp(1, 1000));
        let mut command = process::tied(self.root.join("bin/ucx_perftest"));
        command.env("LD_LIBRARY_PATH", format!("{0}:{0}/ucx", lib.display()));
        command.env("UCX_TLS", self.transports).env("UCX_NET_DEVICES", "lo").env("UCX_LOG_LEVEL", "error");
        command.args(["-t", test, "-f", "-p", port, "-s", &block_bytes.to_string()]);
        command.args(["-n", &iterations.to_string(), "-w", &warm_up.to_string()]);
        command.stderr(Stdio::null());
        command
    }

    fn once(&self, test: &str, block_bytes: u64, seconds: f64) -> Result<(Figures, Usage), Failure> {
        let port = free_port()?;
        let fixed_us = if test == "ucp_get" { 12.0 } else { 3.0 };
        let call_us = fixed_us + block_bytes as f64 / 3e3;
        let iterations = (seconds * 1e6 / call_us).clamp(4.0, 4e5) as u64;
        let server = Process::start(&mut self.command(test, block_bytes, iterations, &port))?;
        std::thread::sleep(START);
        let mut client = self.command(test, block_bytes, iterations, &port);
        let mut client = Process::start(client.arg("127.0.0.1"))?;
        let meter = Meter::start(&[client.pid(), server.pid()]);
        let (calls, p50_us, mean_us) = client.expect(PATIENCE, perftest_line)?;
        let end = Instant::now();
        let seconds = calls as f64 * mean_us / 1e6;
        let p50_us = (test == "ucp_get").then_some(p50_us);
        let figures = Figures { calls, seconds, gb_s: block_bytes as f64 / mean_us / 1e3, p50_us, p99_us: None };
        Ok((figures, meter.finish(end, seconds)))
    }
}

impl Side for Perftest {
    fn start(&mut self, _buffer_bytes: u64) -> Result<String, Failure> {
        self.puts = None;
        let (lib, info) = (self.root.join("lib"), self.root.join("bin/ucx_info"));
        let output = Command::new(info).arg("-v").env("LD_LIBRARY_PATH", lib).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = text.lines().next().and_then(|line| line.rsplit(' ').next()).unwrap_or("unknown");
        Ok(format!("ucx-{version}"))
    }

    fn measure(&mut self, cell: Cell, seconds: f64, round: usize) -> Result<Measurement, Failure> {
        let block = cell.block_bytes;
        match (cell.op, self.puts, cell.batch) {
            (Op::Read, _, 1) => self.once("ucp_get", block, seconds).map(Some),
            (Op::Read, ..) => Ok(None),
            (Op::Write, Some((known, size, puts)), _) if (known, size) == (round, block) => Ok(Some(puts)),
            (Op::Write, ..) => {
                let puts = self.once("ucp_put_bw", block, seconds)?;
                self.puts = Some((round, block, puts));
                Ok(Some(puts))
            }
        }
    }

    fn stop(&mut self) {}
}

/// Parses iterations, median and overall mean in µs from the last line of a test, which only some tests label.
fn perftest_line(line: &str) -> Option<(u64, f64, f64)> {
    let line = line.trim_start();
    let mut words = line.strip_prefix("Final:").unwrap_or(line).split_whitespace();
    let iterations = words.next()?.parse().ok()?;
    let figures: Vec<f64> = words.map_while(|word| word.parse().ok()).collect();
    let (median, overall) = (figures.first()?, figures.get(2)?);
    (figures.len() >= 5 && *overall > 0.0).then_some((iterations, *median, *overall))
}

/// Side of `iperf3` with one stream: the better of writes of 128 KiB and of 1 MiB.
pub(crate) struct Iperf {
    server: Option<(Process, String)>,
    known: Option<(usize, (Figures, Usage))>,
}

impl Iperf {
    pub(crate) const fn new() -> Self {
        Self { server: None, known: None }
    }

    fn once(&self, write_bytes: &str) -> Result<(Figures, Usage), Failure> {
        let (server, port) = self.server.as_ref().ok_or("it was not started")?;
        let mut client = Command::new("iperf3")
            .args(["-c", "127.0.0.1", "-p", port, "-J", "-t", "1", "-l", write_bytes])
            .stdout(Stdio::piped())
            .spawn()?;
        let meter = Meter::start(&[client.id(), server.pid()]);
        let text = process::output(&mut client, PATIENCE)?;
        let end = Instant::now();
        client.wait()?;
        let report: Value = serde_json::from_str(&text)?;
        let sum = &report["end"]["sum_received"];
        let (Some(bytes), Some(seconds)) = (sum["bytes"].as_f64(), sum["seconds"].as_f64()) else {
            return Err(format!("iperf3 says: {}", report["error"]).into());
        };
        let figures = Figures { calls: 1, seconds, gb_s: bytes / seconds / 1e9, p50_us: None, p99_us: None };
        Ok((figures, meter.finish(end, seconds)))
    }
}

impl Side for Iperf {
    fn start(&mut self, _buffer_bytes: u64) -> Result<String, Failure> {
        let port = free_port()?;
        let mut command = process::tied("iperf3");
        let server = Process::start(command.args(["-s", "-B", "127.0.0.1", "-p", &port]))?;
        std::thread::sleep(START);
        (self.server, self.known) = (Some((server, port)), None);
        let output = Command::new("iperf3").arg("-v").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(format!("iperf3-{}", text.split_whitespace().nth(1).unwrap_or("unknown")))
    }

    fn measure(&mut self, cell: Cell, _seconds: f64, round: usize) -> Result<Measurement, Failure> {
        if cell.block_bytes < 64 << 10 || cell.batch == 1 {
            return Ok(None);
        }
        match self.known {
            Some((known, best)) if known == round => Ok(Some(best)),
            _ => {
                let (one, other) = (self.once("128K")?, self.once("1M")?);
                let best = if one.0.gb_s > other.0.gb_s { one } else { other };
                self.known = Some((round, best));
                Ok(Some(best))
            }
        }
    }

    fn stop(&mut self) {
        self.server = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_perftest_is_understood() {
        let line =
            "Final:                 74074      3.190     3.512     3.512     1112.25    1112.25   284736  284736";
        assert_eq!(perftest_line(line), Some((74074, 3.190, 3.512)));
        let plain = "          50000      6.109     6.312     6.312      618.85     618.85      158424      158424";
        assert_eq!(perftest_line(plain), Some((50000, 6.109, 6.312)));
        assert_eq!(perftest_line("|    Stage     | # iterations | 50.0%ile"), None);
    }
}
