//! Benchmark of `fio` on a file of its own: the raw performance of device, file system and kernel.

use std::fs::OpenOptions;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::figures::Figures;
use crate::Failure;

/// Range of a file that `fio` reads and writes.
pub(crate) struct Fio {
    path: PathBuf,
    range: Range<u64>,
}

impl Fio {
    /// Selects a range of whole blocks.
    pub(crate) fn on(path: &Path, range: Range<u64>) -> Self {
        Self { path: path.to_owned(), range }
    }

    /// Writes the range once, so that neither reads find holes nor writes have to allocate.
    pub(crate) fn lay_out(&self) -> Result<(), Failure> {
        // fio recreates a file that is too short for its writes, which would lose the bytes of others.
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&self.path)?;
        file.set_len(file.metadata()?.len().max(self.range.end))?;
        self.run(&["--rw=write", "--bs=1M", "--iodepth=8", "--end_fsync=1"]).map(drop)
    }

    /// Reads or writes for this time; `rw` is fio's mode.
    pub(crate) fn measure(
        &self,
        time: Duration,
        rw: &str,
        bytes: u32,
        depth: usize,
        more: &[&str],
    ) -> Result<Figures, Failure> {
        let words = [
            format!("--rw={rw}"),
            format!("--bs={bytes}"),
            format!("--iodepth={depth}"),
            format!("--runtime={}ms", time.as_millis()),
            format!("--fixedbufs={}", u8::from(is_fixed())),
        ];
        let mut all: Vec<&str> = words.iter().map(String::as_str).collect();
        all.extend(["--time_based", "--norandommap", "--randrepeat=0", "--registerfiles=1"]);
        all.extend(more);
        let report = self.run(&all)?;
        let job = &report["jobs"][0];
        let of = &job[if rw.contains("read") { "read" } else { "write" }];
        let number = |value: &Value| value.as_f64().unwrap_or(0.0);
        let percentile = |name: &str| number(&of["clat_ns"]["percentile"][name]) / 1e3;
        let (per_s, share) = (number(&of["iops"]), number(&job["usr_cpu"]) + number(&job["sys_cpu"]));
        Ok(Figures {
            per_s,
            mb_s: number(&of["bw_bytes"]) / 1e6,
            p50_us: percentile("50.000000"),
            p99_us: percentile("99.000000"),
            cpu_us: share / 100.0 * 1e6 / per_s.max(1.0),
        })
    }

    /// Returns a process that writes until it is ended.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("fio");
        command.args(["--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json", "--fallocate=none"]);
        let (start, bytes) = (self.range.start, self.range.end - self.range.start);
        command.args([format!("--filename={}", self.path.display()), format!("--offset={start}")]);
        command.arg(format!("--size={bytes}")).args(words);
        command
    }

    fn run(&self, words: &[&str]) -> Result<Value, Failure> {
        let output = self.command(words).output().map_err(|error| format!("fio: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let start = text.find('{').unwrap_or(0);
        let report: Result<Value, _> = serde_json::from_str(&text[start..]);
        match report {
            Ok(report) if output.status.success() => Ok(report),
            _ => Err(format!("fio failed: {}{text}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }
}

/// Returns true if fio can pin its buffers: it cannot where memory may not be locked.
fn is_fixed() -> bool {
    kvplane_sys::cpu::raise_memlock_limit().is_ok_and(|bytes| bytes > 256 << 20)
}
