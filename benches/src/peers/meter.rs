//! CPU meter of processes and of the whole machine, which samples during a run and is read afterwards.
//!
//! An external program reports how long it measured, not when. So a thread samples every ten milliseconds, and the
//! window is cut out when its end is known.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(10);
/// Number of samples kept: ten minutes.
const MOST_SAMPLES: usize = 60_000;
/// Kernel ticks per second of the figures in `/proc/stat`, fixed on Linux.
const TICKS_PER_S: f64 = 100.0;

struct Sample {
    at: Instant,
    own_s: f64,
    busy_s: f64,
    steal_s: f64,
}

/// CPU cost of a window of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    /// CPU seconds of the watched processes.
    pub(crate) own_s: f64,
    /// Cores that other processes used meanwhile.
    pub(crate) foreign_cores: f64,
    /// Cores that the hypervisor gave to other machines.
    pub(crate) steal_cores: f64,
}

/// Foreign load from which figures say little: noise moves them both ways.
const NOISY_CORES: f64 = 0.25;

impl Usage {
    /// Returns true if other processes and machines used little CPU meanwhile.
    pub(crate) fn is_quiet(&self) -> bool {
        self.foreign_cores + self.steal_cores <= NOISY_CORES
    }
}

/// A running meter.
pub(crate) struct Meter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Meter {
    /// Starts to watch these processes.
    pub(crate) fn start(pids: &[u32]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, pids) = (Arc::clone(&stop), pids.to_vec());
        let thread = std::thread::spawn(move || {
            let (mut samples, mut threads) = (Vec::new(), HashMap::new());
            while samples.len() < MOST_SAMPLES {
                let stopping = seen.load(Ordering::Relaxed);
                samples.push(sample(&pids, &mut threads));
                if stopping {
                    break;
                }
                std::thread::sleep(INTERVAL);
            }
            samples
        });
        Self { stop, thread }
    }

    /// Returns the cost of the last `seconds` before `end`.
    pub(crate) fn finish(self, end: Instant, seconds: f64) -> Usage {
        self.stop.store(true, Ordering::Relaxed);
        let samples = self.thread.join().unwrap_or_default();
        window(&samples, end, seconds)
    }
}

/// Totals at one moment, for measurements whose begin and end are known.
pub(crate) struct Mark {
    sample: Sample,
    threads: HashMap<String, f64>,
}

impl Mark {
    pub(crate) fn now(pids: &[u32]) -> Self {
        let mut threads = HashMap::new();
        Self { sample: sample(pids, &mut threads), threads }
    }

    /// Returns the cost since then.
    pub(crate) fn until_now(mut self, pids: &[u32]) -> Usage {
        let end = sample(pids, &mut self.threads);
        let seconds = (end.at - self.sample.at).as_secs_f64();
        let at = end.at;
        window(&[self.sample, end], at, seconds)
    }
}

fn window(samples: &[Sample], end: Instant, seconds: f64) -> Usage {
    let begin = end.checked_sub(Duration::from_secs_f64(seconds.max(0.0))).unwrap_or(end);
    let delta = |value: fn(&Sample) -> f64| (at(samples, end, value) - at(samples, begin, value)).max(0.0);
    let own_s = delta(|sample| sample.own_s);
    let foreign_s = (delta(|sample| sample.busy_s) - own_s).max(0.0);
    let per_s = 1.0 / seconds.max(1e-9);
    let steal_cores = delta(|sample| sample.steal_s) * per_s;
    Usage { own_s, foreign_cores: foreign_s * per_s, steal_cores }
}

/// Returns a running total at a moment, interpolated between the samples around it.
fn at(samples: &[Sample], moment: Instant, value: fn(&Sample) -> f64) -> f64 {
    let after = samples.partition_point(|sample| sample.at < moment);
    match (after.checked_sub(1).and_then(|before| samples.get(before)), samples.get(after)) {
        (Some(before), Some(after)) => {
            let share = (moment - before.at).as_secs_f64() / (after.at - before.at).as_secs_f64().max(1e-9);
            value(before) + (value(after) - value(before)) * share
        }
        (Some(one), None) | (None, Some(one)) => value(one),
        (None, None) => 0.0,
    }
}

/// Returns the totals now. Ended threads keep their totals, which would decrease otherwise.
fn sample(pids: &[u32], threads: &mut HashMap<String, f64>) -> Sample {
    for pid in pids {
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let ns = text.split_ascii_whitespace().next().and_then(|word| word.parse::<f64>().ok());
            if let Some(ns) = ns {
                threads.insert(format!("{pid}/{}", task.file_name().to_string_lossy()), ns / 1e9);
            }
        }
    }
    let (busy_s, steal_s) = machine();
    Sample { at: Instant::now(), own_s: threads.values().sum(), busy_s, steal_s }
}

/// Returns busy and stolen core seconds of the whole machine since it started.
fn machine() -> (f64, f64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line.split_ascii_whitespace().skip(1).map(|word| word.parse().unwrap_or(0.0)).collect();
    let tick = |index: usize| ticks.get(index).copied().unwrap_or(0.0) / TICKS_PER_S;
    // user, nice, system, then idle and iowait, then irq, softirq, steal
    (tick(0) + tick(1) + tick(2) + tick(5) + tick(6), tick(7))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_cut_between_samples() {
        let begin = Instant::now();
        let samples: Vec<Sample> = (0..5u32)
            .map(|n| Sample {
                at: begin + Duration::from_secs(n.into()),
                own_s: f64::from(n),
                busy_s: f64::from(n) * 1.5,
                steal_s: 0.0,
            })
            .collect();
        let usage = window(&samples, begin + Duration::from_millis(3500), 2.0);
        assert!((usage.own_s - 2.0).abs() < 1e-9 && (usage.foreign_cores - 0.5).abs() < 1e-9, "{usage:?}");
        assert_eq!(window(&[], begin, 1.0), Usage::default());
    }

    #[test]
    fn this_process_can_be_watched() {
        let meter = Meter::start(&[std::process::id()]);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(60) {
            std::hint::spin_loop();
        }
        let usage = meter.finish(Instant::now(), begin.elapsed().as_secs_f64());
        assert!(usage.own_s > 0.0);
    }
}
