//! kvplane's side: `kvplane tebench`, with a target that stays and an initiator for each cell.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cells::Cell;
use super::meter::{Meter, Usage};
use super::process::{self, Process};
use super::row::Figures;
use super::side::Side;
use crate::Failure;

const PATIENCE: Duration = Duration::from_secs(30);

/// kvplane's engine over one transport with one pacing.
pub(crate) struct Ours {
    pub(crate) binary: PathBuf,
    /// Value of `--xport_type`.
    pub(crate) transport: &'static str,
    pub(crate) pacing: &'static str,
    pub(crate) checksum: bool,
    target: Option<Target>,
}

struct Target {
    process: Process,
    name: String,
    buffer_bytes: u64,
}

impl Ours {
    pub(crate) fn new(binary: PathBuf, transport: &'static str, pacing: &'static str, checksum: bool) -> Self {
        Self { binary, transport, pacing, checksum, target: None }
    }

    fn tebench(&self, buffer_bytes: u64) -> Command {
        let mut command = process::tied(&self.binary);
        command.arg("tebench").args(["--xport_type", self.transport, "--pacing", self.pacing]);
        command.arg(format!("--total_buffer_size={buffer_bytes}")).arg(format!("--checksum={}", self.checksum));
        command
    }
}

impl Side for Ours {
    fn start(&mut self, buffer_bytes: u64) -> Result<String, Failure> {
        let mut process = Process::start(&mut self.tebench(buffer_bytes))?;
        let name = process.expect(PATIENCE, segment_name)?;
        process.halt()?;
        self.target = Some(Target { process, name, buffer_bytes });
        Ok(format!("kvplane-{}", env!("CARGO_PKG_VERSION")))
    }

    fn measure(&mut self, cell: Cell, seconds: f64, _round: usize) -> Result<Option<(Figures, Usage)>, Failure> {
        let target = self.target.as_ref().ok_or("it was not started")?;
        let (block, batch) = (cell.block_bytes, cell.batch);
        // No more memory than the cell needs, because filling it takes longer than measuring.
        let mut command = self.tebench(cell.bytes().max(1 << 20).min(target.buffer_bytes));
        command.arg(format!("--target_seg_name={}", target.name)).args(["--json", "-", "--op_type", cell.op.word()]);
        command.arg(format!("--start_block_size={block}")).arg(format!("--max_block_size={block}"));
        command.arg(format!("--start_batch_size={batch}")).arg(format!("--max_batch_size={batch}"));
        command.arg(format!("--duration={seconds}")).arg(format!("--warm_up={}", seconds.min(0.3)));
        target.process.resume()?;
        let mut initiator = Process::start(&mut command)?;
        let meter = Meter::start(&[initiator.pid(), target.process.pid()]);
        let outcome = answer(&mut initiator);
        target.process.halt()?;
        let (text, end) = outcome?;
        let usage = meter.finish(end, seconds);
        Ok(Some((figures(&text, seconds)?, usage)))
    }

    fn buffers(&self) -> u64 {
        1
    }

    fn stop(&mut self) {
        self.target = None;
    }
}

/// Returns the initiator's JSON and the time of its arrival: the measurement ended just before.
fn answer(initiator: &mut Process) -> Result<(String, Instant), Failure> {
    let mut text = initiator.expect(PATIENCE, |line| line.starts_with('{').then(|| line.to_owned()))?;
    let end = Instant::now();
    while serde_json::from_str::<Value>(&text).is_err() {
        text.push('\n');
        text += &initiator.expect(PATIENCE, |line| Some(line.to_owned()))?;
    }
    Ok((text, end))
}

fn segment_name(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("--target_seg_name=")?;
    rest.split_whitespace().next().map(str::to_owned)
}

fn figures(text: &str, seconds: f64) -> Result<Figures, Failure> {
    let report: Value = serde_json::from_str(text)?;
    let case = report["cases"].get(0).ok_or_else(|| format!("tebench gave no case: {text}"))?;
    let number = |name: &str| case[name].as_f64().ok_or_else(|| format!("tebench gave no {name}"));
    Ok(Figures {
        calls: case["batches"].as_u64().unwrap_or(0),
        seconds,
        gb_s: number("bandwidth_gb_s")?,
        p50_us: Some(number("p50_transfer_us")?),
        p99_us: Some(number("p99_transfer_us")?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_targets_name_is_found_in_its_hint() {
        let line = "  ./tebench --target_seg_name=127.0.0.1:15003 --seg_type=DRAM --backend=kvplane";
        assert_eq!(segment_name(line).as_deref(), Some("127.0.0.1:15003"));
        assert_eq!(segment_name("Press Ctrl-C"), None);
    }

    #[test]
    fn a_report_becomes_figures() {
        let text = r#"{"cases":[{"batches":7,"bandwidth_gb_s":2.5,"p50_transfer_us":3.0,"p99_transfer_us":4.0}]}"#;
        let found = figures(text, 0.4).unwrap();
        assert_eq!((found.calls, found.gb_s, found.p50_us), (7, 2.5, Some(3.0)));
        assert!(figures(r#"{"cases":[]}"#, 0.4).is_err());
    }
}
