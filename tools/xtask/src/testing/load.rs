//! Load beside repeated tests, which shows failures that occur on a busy machine only now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::process::Failure;

/// Most busy loops for each core.
const LOOPS_MOST: usize = 64;

/// Values of `--busy LOOPS` and `--times COUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Busy threads for each core while the tests run.
    pub loops_per_core: usize,
    /// Number of runs of each test, regardless of failures.
    pub times: usize,
}

impl Load {
    /// Parses the two flags; returns the other arguments in their order.
    ///
    /// # Errors
    /// Fails if one of the flags has no valid number.
    pub fn of(arguments: &[String]) -> Result<(Self, Vec<String>), Failure> {
        let mut load = Self { loops_per_core: 0, times: 1 };
        let (mut others, mut words) = (Vec::new(), arguments.iter());
        while let Some(word) = words.next() {
            let (place, most) = match word.as_str() {
                "--busy" => (&mut load.loops_per_core, LOOPS_MOST),
                "--times" => (&mut load.times, usize::MAX),
                // Words after `--` are for the test binaries.
                "--" => {
                    others.push(word.clone());
                    others.extend(words.by_ref().cloned());
                    break;
                }
                _ => {
                    others.push(word.clone());
                    continue;
                }
            };
            let number =
                words.next().and_then(|number| number.parse().ok()).filter(|number| (1..=most).contains(number));
            *place = number.ok_or_else(|| Failure::new(format!("{word} takes a number from 1 to {most}")))?;
        }
        Ok((load, others))
    }
}

/// Busy threads, which end when this is dropped.
pub struct BusyThreads {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
    /// Starts this number of threads for each core.
    #[must_use]
    pub fn start(loops_per_core: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let over = Arc::new(AtomicBool::new(false));
        let turn = || {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let threads = (0..cores * loops_per_core).map(|_| turn()).collect();
        Self { over, threads }
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // An empty loop does not panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &str) -> Result<(Load, Vec<String>), Failure> {
        Load::of(&words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn the_load_is_taken_out_of_the_arguments() {
        let (load, others) = of("slot --busy 2 -p kvplane-proto --times 30 -- --busy").expect("good arguments");
        assert_eq!(load, Load { loops_per_core: 2, times: 30 });
        assert_eq!(others, ["slot", "-p", "kvplane-proto", "--", "--busy"]);
        let (plain, none) = of("").expect("good arguments");
        assert_eq!((plain, none), (Load { loops_per_core: 0, times: 1 }, Vec::new()));
        for words in ["--busy", "--busy many", "--busy 0", "--busy 65", "--times 0", "--times"] {
            assert!(of(words).is_err(), "{words}");
        }
    }

    #[test]
    fn threads_turn_until_they_are_dropped() {
        let turning = BusyThreads::start(1);
        assert!(!turning.threads.is_empty());
        let over = Arc::clone(&turning.over);
        drop(turning);
        assert_eq!((over.load(Ordering::Relaxed), Arc::strong_count(&over)), (true, 1));
    }
}
