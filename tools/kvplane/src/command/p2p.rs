//! `kvplane p2p`: files and directories as objects of the P2P store: put one, get it elsewhere, list what there is.
//!
//! An object has a buffer for each file that is not empty, and says the files' names in its words about it.

mod destination;
mod files;
mod names;
mod progress;
mod reshard;
mod safetensors;

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::rpc::Role;
use kvplane::{GetOptions, Object, P2pConfig, P2pStore, PublishOptions, Ranks, interrupt};

use crate::command::Failure;
use crate::command::process::stop;
use crate::command::size;
use crate::command::which::Which;
use files::Files;
use names::printable;
use progress::Bar;
use reshard::Reshard;

/// Share big files between machines, each of which sends them on.
#[derive(Args)]
pub(crate) struct P2p {
    #[command(flatten)]
    which: Which,
    /// The cluster's name.
    #[arg(long, default_value = "dev", global = true)]
    cluster: String,
    /// Directory where a local control plane says where it is; this user's own unless set.
    #[arg(long, value_name = "DIRECTORY", global = true)]
    runtime_directory: Option<PathBuf>,
    /// The role of our certificate; without it, the first of these of which --identity has one.
    #[arg(long, value_parser = ["client", "node", "admin"], global = true)]
    role: Option<String>,
    /// Whose objects; without it, those of the tenant that our certificate is for, else of the default one.
    #[arg(long, default_value = "", global = true)]
    tenant: String,
    /// Where peers reach this process, who prove tickets: its data port. 0 takes a free one. Another address than a
    /// loopback one needs a control plane that makes tickets. Without it, the address of this host that leads to the
    /// control plane, where that is on another host and makes tickets, else a loopback one.
    #[arg(long, value_name = "ADDRESS", global = true)]
    listen: Option<SocketAddr>,
    /// Keep to TCP, also between processes of one host.
    #[arg(long, global = true)]
    no_shared_memory: bool,
    /// Label of the host; its own identity unless set. One copy of an object comes to a host.
    #[arg(long, global = true)]
    host: Option<String>,
    /// Label of the rack: sources in it come first.
    #[arg(long, default_value = "", global = true)]
    rack: String,
    /// Most bytes per second that others fetch from here, such as 1g; 0 for no limit.
    #[arg(long, default_value = "0", value_parser = size::parse, global = true)]
    upload: u64,
    /// Most bytes per second that are fetched; 0 for no limit.
    #[arg(long, default_value = "0", value_parser = size::parse, global = true)]
    download: u64,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Serve a file, or all files of a directory, until told to stop.
    Put(Put),
    /// Fetch an object into a directory, checked shard by shard; run again, it goes on where it ended.
    Get(Get),
    /// List objects.
    Ls(Ls),
    /// Pull a checkpoint under another parallel layout than it was written under: only what overlaps is read.
    Reshard(Reshard),
}

#[derive(Args)]
struct Put {
    /// Name of the object.
    name: String,
    /// File or directory.
    path: PathBuf,
    /// Its version; without one, the one after the newest.
    #[arg(long)]
    version: Option<u64>,
    /// Size of a shard, the piece in which it travels; without, one that suits the object: at least 256 shards, of
    /// 64 KiB to 64 MiB.
    #[arg(long, value_parser = size::parse_some)]
    shard: Option<u64>,
    /// Read the files into memory first. Without, they are served from where they are, and must be neither changed nor
    /// made shorter meanwhile: changed bytes are found out by who fetches them, a shorter file ends this process, which
    /// says so.
    #[arg(long)]
    copy: bool,
}

#[derive(Args)]
struct Get {
    /// Name of the object.
    name: String,
    /// Directory for its files.
    directory: PathBuf,
    /// Its version; without one, the newest.
    #[arg(long)]
    version: Option<u64>,
    /// How long it may take, in seconds; until then parts are waited for that nobody has, as who had them may be
    /// starting again. Without it an hour, and 12 s for those.
    #[arg(long)]
    deadline: Option<u64>,
    /// How long to serve it to others afterwards, in seconds.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Which one this is of several processes that all fetch the object at about the same time, from 0 on: they fetch
    /// it from each other by a schedule.
    #[arg(long, requires = "ranks")]
    rank: Option<u32>,
    /// How many there are of those.
    #[arg(long, requires = "rank")]
    ranks: Option<u32>,
    /// Their job's name, which is the same for all of them.
    #[arg(long, default_value = "", requires = "rank")]
    job: String,
    /// How long to wait for another rank, in seconds, until its shards are fetched from others.
    #[arg(long, default_value_t = 2.0, requires = "rank", value_parser = seconds)]
    patience: f64,
}

#[derive(Args)]
struct Ls {
    /// What names begin with.
    #[arg(default_value = "")]
    prefix: String,
    /// Who holds each object, and how much of it.
    #[arg(long, short)]
    long: bool,
    /// As JSON, one object a line.
    #[arg(long)]
    json: bool,
}

impl P2p {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut config = P2pConfig::new(self.which.control(&self.cluster, self.runtime_directory.clone()));
        config.role = match self.role.as_deref().and_then(Role::from_name) {
            Some(role) => role,
            // An operator may look, and share nothing.
            None if matches!(self.action, Action::Ls(_)) => {
                config.control.role_among(&[Role::Client, Role::Node, Role::Admin])?
            }
            None => config.control.role_among(&[Role::Client, Role::Node])?,
        };
        config.tenant = self.tenant;
        config.by_route = self.listen.is_none();
        if let Some(listen) = self.listen {
            config.engine.listen = SocketAddr::new(listen.ip(), 0);
            config.engine.data_port = listen.port();
        }
        config.engine.shared_memory = !self.no_shared_memory;
        config.engine.runtime_directory = self.runtime_directory;
        config.host = self.host.unwrap_or(config.host);
        config.rack = self.rack;
        (config.upload_bytes_per_second, config.download_bytes_per_second) = (self.upload, self.download);
        let store = P2pStore::connect(config)?;
        match self.action {
            Action::Put(put) => put.run(&store),
            Action::Get(get) => get.run(&store),
            Action::Ls(ls) => ls.run(&store),
            Action::Reshard(reshard) => reshard.run(&store),
        }
    }
}

/// A day at most.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| format!("{text:?}: give seconds, 86400 at most"))
}

/// A line on stderr; nothing where nobody reads it.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Put {
    fn run(self, store: &P2pStore) -> Result<(), Failure> {
        let files = Files::read(&self.path, self.copy)?;
        let options = PublishOptions { version: self.version, shard_bytes: self.shard, about: files.about()? };
        let version = store.register(&self.name, &files.regions(), &options)?;
        let (bytes, count) = (size::show(files.bytes()), files.count());
        // The name that peers open it by begins with its address.
        let name = store.name().trim_start_matches("kvplane://");
        let at = name.split('/').next().unwrap_or(name);
        println!("serves {:?} version {version}: {bytes} in {count} files, at {at}", self.name);
        stop::wait(|| files.check_lengths())?;
        Ok(store.unregister(&self.name, Some(version))?)
    }
}

/// Whether what arrives cannot be written: the fetch is to end. Who waits asks a question without a state of its own,
/// and a process fetches one object.
static CANNOT_WRITE: AtomicBool = AtomicBool::new(false);

fn cannot_write() -> bool {
    CANNOT_WRITE.load(Ordering::Relaxed)
}

impl Get {
    /// Fetches what is missing and writes it; the bytes that were fetched are the answer.
    fn fetch(&self, store: &P2pStore, object: &Object, files: &Files) -> Result<u64, Failure> {
        let bar = Bar::new(object.layout.total_bytes())?;
        let failure: Mutex<Option<String>> = Mutex::new(None);
        let each = |progress: kvplane::Progress| {
            let Some(place) = object.layout.place(progress.shard).filter(|_| !cannot_write()) else { return };
            if let Err(error) = files.write(place) {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.to_string());
                CANNOT_WRITE.store(true, Ordering::Relaxed);
            }
            bar.inc(place.bytes);
        };
        let ranks = |(rank, ranks)| Ranks {
            job: self.job.clone(),
            patience: Duration::from_secs_f64(self.patience),
            ..Ranks::new(rank, ranks)
        };
        let options = GetOptions {
            ranks: self.rank.zip(self.ranks).map(ranks),
            resume: true,
            deadline: self.deadline.map(Duration::from_secs),
            each: Some(&each),
            ..GetOptions::default()
        };
        let fetched = interrupt::watched(cannot_write, || store.get_replica(object, &files.regions(), &options));
        // It is why the fetch was ended.
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(format!("{error}: no more is fetched; once that is mended, the same get goes on here").into());
        }
        let fetched = fetched?;
        bar.finish();
        Ok(fetched)
    }

    fn run(self, store: &P2pStore) -> Result<(), Failure> {
        let object = store.find(&self.name, self.version)?;
        let mut files = Files::open(&self.directory, &object)?;
        let fetched = self.fetch(store, &object, &files)?;
        files.finish(&self.directory, &object)?;
        println!(
            "has {:?} version {}: {} in {} files, {} of it fetched",
            object.name,
            object.version,
            size::show(object.layout.total_bytes()),
            files.count(),
            size::show(fetched)
        );
        if self.seed > 0 {
            let until = std::time::Instant::now() + Duration::from_secs(self.seed);
            let over = || if std::time::Instant::now() < until { Ok(()) } else { Err(Failure::from("")) };
            // Told to stop, or the time is over: both are the end.
            let _ = stop::wait(over);
        }
        Ok(store.delete_replica(&object.name, Some(object.version))?)
    }
}

impl Ls {
    fn run(self, store: &P2pStore) -> Result<(), Failure> {
        for object in store.list(&self.prefix)? {
            if self.json {
                let line = serde_json::json!({
                    "name": object.name,
                    "version": object.version,
                    "bytes": object.total_bytes,
                    "shard_bytes": object.shard_bytes,
                    "shards": object.shards,
                    "members": object.members,
                });
                println!("{line}");
                continue;
            }
            let bytes = size::show(object.total_bytes);
            let name = printable(&object.name);
            println!("{bytes:>12}  {:>6} members  {name}@{}", object.members, object.version);
            if !self.long {
                continue;
            }
            let found = store.describe(&object.name, Some(object.version))?;
            for member in found.members {
                let what = if member.origin { "origin" } else { "member" };
                let wrong = if member.excluded.is_empty() { String::new() } else { format!("  {}", member.excluded) };
                let (segment, wrong) = (printable(&member.segment), printable(&wrong));
                println!("{segment:>12}  {what}  {} of {} shards{wrong}", member.have, object.shards);
            }
            if found.lost > 0 {
                println!("{:>12}  {} shards are nowhere", "", found.lost);
            }
        }
        Ok(())
    }
}
