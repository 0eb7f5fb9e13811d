//! Peer that is driven from Python by one of the scripts in `benches/peers`, and halted between measurements.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::cells::Cell;
use super::meter::{Meter, Usage};
use super::process::{self, Process};
use super::row::Figures;
use super::side::Side;
use crate::Failure;

const PATIENCE: Duration = Duration::from_secs(60);

/// Script with its interpreter.
pub(crate) struct Driver {
    pub(crate) python: PathBuf,
    pub(crate) script: PathBuf,
    pub(crate) arguments: &'static [&'static str],
    running: Option<(Process, Vec<u32>)>,
}

impl Driver {
    pub(crate) fn new(python: PathBuf, script: PathBuf, arguments: &'static [&'static str]) -> Self {
        Self { python, script, arguments, running: None }
    }
}

impl Side for Driver {
    fn start(&mut self, buffer_bytes: u64) -> Result<String, Failure> {
        let mut command = process::tied(&self.python);
        // Peers write debug output to standard error; results come as replies.
        command.arg(&self.script).arg(buffer_bytes.to_string()).args(self.arguments).stderr(Stdio::null());
        let mut process = Process::start(&mut command)?;
        let ready = process.expect(PATIENCE, json).map_err(|error| format!("{}: {error}", self.script.display()))?;
        let pids = ready["pids"].as_array().into_iter().flatten();
        let pids = pids.filter_map(Value::as_u64).filter_map(|pid| u32::try_from(pid).ok()).collect();
        process.halt()?;
        self.running = Some((process, pids));
        Ok(ready["version"].as_str().unwrap_or("unknown").to_owned())
    }

    fn measure(&mut self, cell: Cell, seconds: f64, _round: usize) -> Result<Option<(Figures, Usage)>, Failure> {
        let (process, pids) = self.running.as_mut().ok_or("it was not started")?;
        process.resume()?;
        let meter = Meter::start(pids);
        process.say(&format!("{} {} {} {seconds}", cell.op.word(), cell.block_bytes, cell.batch))?;
        let answer = process.expect(PATIENCE, json);
        let end = Instant::now();
        process.halt()?;
        let figures = figures(&answer?, cell)?;
        Ok(Some((figures, meter.finish(end, figures.seconds))))
    }

    fn buffers(&self) -> u64 {
        2
    }

    fn stop(&mut self) {
        self.running = None;
    }
}

fn json(line: &str) -> Option<Value> {
    if line.starts_with('{') { serde_json::from_str(line).ok() } else { None }
}

fn figures(answer: &Value, cell: Cell) -> Result<Figures, Failure> {
    if let Some(problem) = answer["error"].as_str() {
        return Err(problem.into());
    }
    let (calls, seconds) = (answer["calls"].as_u64().unwrap_or(0), answer["secs"].as_f64().unwrap_or(0.0));
    if calls == 0 || seconds <= 0.0 {
        return Err(format!("no figures in the answer {answer}").into());
    }
    let gb_s = calls as f64 * cell.bytes() as f64 / seconds / 1e9;
    Ok(Figures { calls, seconds, gb_s, p50_us: answer["p50_us"].as_f64(), p99_us: answer["p99_us"].as_f64() })
}

#[cfg(test)]
mod tests {
    use super::super::cells::Op;
    use super::*;

    #[test]
    fn answers_become_figures_or_errors() {
        let cell = Cell { op: Op::Read, block_bytes: 1 << 20, batch: 2 };
        let answer = json(r#"{"calls": 1000, "secs": 2.0, "p50_us": 5.5, "p99_us": 9.0}"#).unwrap();
        let found = figures(&answer, cell).unwrap();
        assert!((found.gb_s - 1.048_576).abs() < 1e-9 && found.p99_us == Some(9.0));
        assert!(figures(&json(r#"{"error": "no"}"#).unwrap(), cell).is_err());
        assert!(figures(&json("{}").unwrap(), cell).is_err());
        assert!(json("WARNING: Logging").is_none());
    }
}
