//! `kvplane tebench`: Mooncake's tebench over kvplane's engine: its flags, roles, sweep order and columns, and a check
//! that finds misplaced bytes.
//!
//! Without `--target_seg_name` the process is a target: it registers memory and waits. With it, the process is an
//! initiator.

pub(crate) mod engine;
mod gate;
mod initiator;
mod load;
pub(crate) mod memory;
pub(crate) mod thread_error;
pub(crate) mod transfer_engine_bench;
pub(crate) mod values;
mod worker;

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvplane::{Pacing, TransferEngine, ZeroCopy};
use kvplane_tools::pattern;

use super::Failure;
use super::process::{metrics, stop};

/// Operation of an initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum OpType {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes in turn.
    Mix,
    /// Writes a pattern that follows from the target address.
    WriteSeed,
    /// Reads and verifies that pattern.
    ReadVerify,
}

/// Interface that moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Api {
    /// A session of its own for each thread.
    Session,
    /// The engine, shared by all threads.
    Engine,
}

/// Waiting strategy for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PacingChoice {
    /// Spin, never park.
    Spin,
    /// Spin while it pays, then park.
    Adaptive,
    /// Park at once.
    Park,
}

impl From<PacingChoice> for Pacing {
    fn from(choice: PacingChoice) -> Self {
        match choice {
            PacingChoice::Spin => Self::Spin,
            PacingChoice::Adaptive => Self::default(),
            PacingChoice::Park => Self::Park,
        }
    }
}

/// Use of zero-copy sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ZeroCopyChoice {
    /// Never.
    Never,
    /// To other hosts, as long as the kernel does not copy anyway.
    Auto,
    /// Always.
    Always,
}

impl From<ZeroCopyChoice> for ZeroCopy {
    fn from(choice: ZeroCopyChoice) -> Self {
        match choice {
            ZeroCopyChoice::Never => Self::Never,
            ZeroCopyChoice::Auto => Self::Auto,
            ZeroCopyChoice::Always => Self::Always,
        }
    }
}

/// Benchmark the transfer engine.
#[derive(Args, Clone)]
#[command(args_override_self = true)]
pub(crate) struct Tebench {
    /// Target segments, separated by commas: names of engines, file:///path, or local for this process. Default: this
    /// process is a target itself.
    #[arg(long = "target_seg_name", default_value = "")]
    target_seg_name: String,
    /// Measure the drive of this directory instead: a file of --total_buffer_size is created in it, used as a
    /// file:///path target, and removed at the end of the run.
    #[arg(long = "tier", value_name = "DIRECTORY")]
    tier: Option<PathBuf>,
    #[command(flatten)]
    engine: engine::EngineFlags,
    #[command(flatten)]
    load: load::LoadFlags,
    /// Interface that moves the bytes: a session for each thread, or the engine, shared by all. Default: sessions where
    /// they can do the work.
    #[arg(long = "api", value_enum)]
    api: Option<Api>,
    /// Number of sets of connections that threads share through the engine. Default: one for each thread, or a single
    /// one where classes or deadlines compete with each other.
    #[arg(long = "initiators", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    initiators: Option<usize>,
    /// File to write the rows to as JSON; `-` is standard output.
    #[arg(long = "json")]
    json: Option<String>,
    /// File to write a page with plots to, as HTML.
    #[arg(long = "plot")]
    plot: Option<PathBuf>,
}

impl Tebench {
    pub(crate) fn run(mut self) -> Result<(), Failure> {
        let file = match &self.tier {
            Some(_) if !self.target_seg_name.is_empty() => {
                return Err("--tier creates a target of its own: not with --target_seg_name".into());
            }
            Some(directory) => Some(TierFile::below(directory)?),
            None => None,
        };
        if let Some(file) = &file {
            self.target_seg_name = file.segment(self.engine.total_buffer_size)?;
        }
        if self.target_seg_name.is_empty() { self.target() } else { initiator::run(&self) }
    }

    fn target(&self) -> Result<(), Failure> {
        self.load.work(self.engine.total_buffer_size)?;
        let engine = self.engine.start(1, true)?;
        let server = self.engine.serve_metrics(&engine)?;
        let memories = self.engine.serve(&engine)?;
        // Verifying readers find the pattern without a writer having run first.
        for memory in &memories {
            let bytes = memory.backing().bytes();
            memory.fill_with(0, bytes, &mut |offset, part| pattern::fill(TARGET_SEED, offset, part))?;
        }
        let notices = take_notices(&engine);
        // In a file or a pipe, escape codes for color would be noise.
        let (begin, end) = if std::io::stdout().is_terminal() { ("\x1b[33m", "\x1b[0m") } else { ("", "") };
        if let Some(server) = &server {
            println!("{}", metrics::say(server, "metrics"));
        }
        println!(
            "{begin}To start initiators, run\n  ./tebench --target_seg_name={} --seg_type={} --backend={}\n\
             Press Ctrl-C to terminate{end}",
            engine.name(),
            self.engine.seg_type.name(),
            self.engine.backend.name()
        );
        stop::wait(|| Ok(()))?;
        let taken = notices.load(Ordering::Relaxed) + engine.take_notices().len() as u64;
        if taken > 0 {
            println!("{taken} notices");
        }
        Ok(())
    }
}

/// Takes and counts notices until the process ends, so that there is space for new ones.
fn take_notices(engine: &Arc<TransferEngine>) -> Arc<AtomicU64> {
    let taken = Arc::new(AtomicU64::new(0));
    let (count, engine) = (Arc::clone(&taken), Arc::downgrade(engine));
    std::thread::spawn(move || {
        let mut pause = NOTICES_IDLE;
        while let Some(engine) = engine.upgrade() {
            let found = engine.take_notices().len() as u64;
            drop(engine);
            count.fetch_add(found, Ordering::Relaxed);
            // Polling costs next to nothing while there are no notices, and is frequent enough while there are many.
            pause = if found > 0 { NOTICES_BUSY } else { (pause * 2).min(NOTICES_IDLE) };
            std::thread::sleep(pause);
        }
    });
    taken
}

/// Polling interval for notices while they arrive, and while none arrive.
const NOTICES_BUSY: Duration = Duration::from_millis(2);
const NOTICES_IDLE: Duration = Duration::from_millis(128);

/// Seed of the pattern that `write_seed` writes and `read_verify` expects.
pub(crate) const TARGET_SEED: u64 = 0x7465_6265_6e63_6801;

/// Bytes that are written at a time to the file of `--tier`.
const FILL_BYTES: usize = 4 << 20;

/// File of a run with `--tier`, removed at the end.
struct TierFile(PathBuf);

impl TierFile {
    fn below(directory: &Path) -> Result<Self, Failure> {
        let named = |error| format!("--tier {}: {error}", directory.display());
        let directory = directory.canonicalize().map_err(named)?;
        Ok(Self(directory.join(format!("kvplane-tebench-{}", std::process::id()))))
    }

    /// Writes the file and returns its name as a segment of this length. It is written because reads of holes would not
    /// reach the drive.
    fn segment(&self, bytes: u64) -> Result<String, Failure> {
        let Some(path) = self.0.to_str().filter(|path| !path.contains([',', '?', '%'])) else {
            return Err(format!("--tier: {} cannot be the name of a segment", self.0.display()).into());
        };
        self.write(bytes).map_err(|error| format!("--tier: {path}: {error}"))?;
        Ok(format!("file://{path}"))
    }

    /// Writes the pattern that verifying readers expect.
    fn write(&self, bytes: u64) -> io::Result<()> {
        let mut file = File::create_new(&self.0)?;
        let mut block = vec![0; FILL_BYTES];
        for offset in (0..bytes).step_by(FILL_BYTES) {
            let part = &mut block[..FILL_BYTES.min((bytes - offset) as usize)];
            pattern::fill(TARGET_SEED, offset, part);
            file.write_all(part)?;
        }
        file.sync_all()
    }
}

impl Drop for TierFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
