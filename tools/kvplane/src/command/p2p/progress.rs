//! Progress of a fetch: a bar on a terminal, otherwise a line at intervals.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::super::Failure;
use super::say;

/// Interval between two lines.
const EVERY: Duration = Duration::from_secs(10);

pub(super) struct Bar {
    bar: ProgressBar,
    /// Thread that prints lines where there is no terminal; it ends when the channel closes.
    teller: Option<(Sender<()>, JoinHandle<()>)>,
    begun: Instant,
}

impl Bar {
    pub(super) fn new(bytes: u64) -> Result<Self, Failure> {
        let bar = ProgressBar::new(bytes);
        let style = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left";
        bar.set_style(ProgressStyle::with_template(style)?);
        let begun = Instant::now();
        let teller = if bar.is_hidden() { Some(tell(bar.clone(), begun)?) } else { None };
        Ok(Self { bar, teller, begun })
    }

    pub(super) fn inc(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Completes the bar and prints the last line.
    pub(super) fn finish(mut self) {
        if self.quiet() {
            say(&line(&self.bar, self.begun));
        }
        self.clear();
    }

    /// Completes the bar; the caller prints the outcome.
    pub(super) fn clear(self) {
        self.bar.finish_and_clear();
    }

    /// Ends the thread that prints lines; returns true if there was one.
    fn quiet(&mut self) -> bool {
        let Some((told, teller)) = self.teller.take() else { return false };
        drop(told);
        // A panic of the thread is of no consequence.
        let _ = teller.join();
        true
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.quiet();
    }
}

fn tell(bar: ProgressBar, begun: Instant) -> Result<(Sender<()>, JoinHandle<()>), Failure> {
    let (told, wait) = channel();
    let lines = move || {
        while wait.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            say(&line(&bar, begun));
        }
    };
    Ok((told, std::thread::Builder::new().name("kvp-progress".to_owned()).spawn(lines)?))
}

/// Formats a line. Bytes that existed before the fetch are not counted as fetched.
fn line(bar: &ProgressBar, begun: Instant) -> String {
    let (bytes, all) = (bar.position(), bar.length().unwrap_or(0));
    format!("fetched {} of {} in {:.1} s", HumanBytes(bytes), HumanBytes(all), begun.elapsed().as_secs_f64())
}
