//! `kvplane tebench`: Mooncake's tebench over our engine: its flags, roles, sweep order and columns, and a check that
//! finds misplaced bytes.
//!
//! Without `--target_seg_name` it is a target: it registers memory and waits. With it, it is an initiator.

pub(crate) mod engine;
mod gate;
mod initiator;
mod load;
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

/// What an initiator does.
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
    /// Reads and checks that pattern.
    ReadVerify,
}

/// What moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Api {
    /// A session for each thread.
    Session,
    /// The engine, which the threads share.
    Engine,
}

/// How to wait for completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PacingChoice {
    /// Never park.
    Spin,
    /// Spin while it pays.
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

/// When payloads leave without a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ZeroCopyChoice {
    /// Never.
    Never,
    /// Where it can pay.
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

/// Measure the transfer engine.
#[derive(Args, Clone)]
#[command(args_override_self = true)]
pub(crate) struct Tebench {
    /// Segments to transfer to and from, separated by commas: names of engines, file:///path, or local for this
    /// process; without any, this process is a target.
    #[arg(long = "target_seg_name", default_value = "")]
    target_seg_name: String,
    /// Measure the drive under this directory instead: a file of --total_buffer_size is made there, is the target as
    /// file:///path would be, and goes with the run.
    #[arg(long = "tier", value_name = "DIRECTORY")]
    tier: Option<PathBuf>,
    #[command(flatten)]
    engine: engine::EngineFlags,
    #[command(flatten)]
    load: load::LoadFlags,
    /// What moves the bytes: a session for each thread, or the engine that all share; without it, sessions for what
    /// they can do.
    #[arg(long = "api", value_enum)]
    api: Option<Api>,
    /// Sets of connections that threads share through the engine; without it one for each thread, and one in all
    /// where classes or deadlines are held against each other.
    #[arg(long = "initiators", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    initiators: Option<usize>,
    /// Write the rows as JSON to this file; `-` is standard output.
    #[arg(long = "json")]
    json: Option<String>,
    /// Write a page with plots to this file.
    #[arg(long = "plot")]
    plot: Option<PathBuf>,
}

impl Tebench {
    pub(crate) fn run(mut self) -> Result<(), Failure> {
        let file = match &self.tier {
            Some(_) if !self.target_seg_name.is_empty() => {
                return Err("--tier makes a target of its own: not with --target_seg_name".into());
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
        let regions = self.engine.serve(&engine)?;
        // Readers that verify find the pattern there without a writer having been first.
        for region in &regions {
            region.fill_with(0, region.bytes(), &mut |offset, part| pattern::fill(TARGET_SEED, offset, part));
        }
        let notices = take_notices(&engine);
        // In a file, or read by a program, colours are noise.
        let (begin, end) = if std::io::stdout().is_terminal() { ("\x1b[33m", "\x1b[0m") } else { ("", "") };
        if let Some(server) = &server {
            println!("{}", metrics::say(server, "metrics"));
        }
        println!(
            "{begin}To start initiators, run\n  ./tebench --target_seg_name={} --seg_type={} --backend={}\n\
             Press Ctrl-C to terminate{end}",
            engine.name(),
            self.engine.seg_type,
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

/// Takes notices as they come, until the process ends, so that there is room for more; counts them.
fn take_notices(engine: &Arc<TransferEngine>) -> Arc<AtomicU64> {
    let taken = Arc::new(AtomicU64::new(0));
    let (count, engine) = (Arc::clone(&taken), Arc::downgrade(engine));
    std::thread::spawn(move || {
        let mut pause = NOTICES_IDLE;
        while let Some(engine) = engine.upgrade() {
            let found = engine.take_notices().len() as u64;
            drop(engine);
            count.fetch_add(found, Ordering::Relaxed);
            // Whoever leaves none costs next to nothing; whoever leaves many finds room.
            pause = if found > 0 { NOTICES_BUSY } else { (pause * 2).min(NOTICES_IDLE) };
            std::thread::sleep(pause);
        }
    });
    taken
}

/// How often notices are looked for while there are some, and while there are none.
const NOTICES_BUSY: Duration = Duration::from_millis(2);
const NOTICES_IDLE: Duration = Duration::from_millis(128);

/// Seed of the pattern that `write_seed` writes and `read_verify` expects.
pub(crate) const TARGET_SEED: u64 = 0x7465_6265_6e63_6801;

/// What is written at a time to the file of `--tier`.
const FILL_BYTES: usize = 4 << 20;

/// The file under a run with `--tier`, which goes with it.
struct TierFile(PathBuf);

impl TierFile {
    fn below(directory: &Path) -> Result<Self, Failure> {
        let named = |error| format!("--tier {}: {error}", directory.display());
        let directory = directory.canonicalize().map_err(named)?;
        Ok(Self(directory.join(format!("kvplane-tebench-{}", std::process::id()))))
    }

    /// It as the name of a segment of this length, written: where a file has holes, nobody reads a drive.
    fn segment(&self, bytes: u64) -> Result<String, Failure> {
        let Some(path) = self.0.to_str().filter(|path| !path.contains([',', '?', '%'])) else {
            return Err(format!("--tier: {} cannot be the name of a segment", self.0.display()).into());
        };
        self.write(bytes).map_err(|error| format!("--tier: {path}: {error}"))?;
        Ok(format!("file://{path}"))
    }

    /// Writes what readers that verify look for.
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
