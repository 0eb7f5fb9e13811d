//! `kvplane p2p`: publishes files and directories as objects of the P2P store, fetches and lists them.
//!
//! An object has a buffer for each file that is not empty; its metadata holds the names of the files.

mod destination;
mod files;
mod names;
mod progress;
mod reshard;
mod safetensors;

use std::fmt;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::rpc::Role;
use kvplane::{GetOptions, Object, P2pConfig, P2pStore, PublishOptions, Ranks, interrupt};

use crate::command::process::{durations, stop};
use crate::command::which::Which;
use crate::command::{Failure, size};
use files::Files;
use names::printable;
use progress::Bar;
use reshard::Reshard;

/// Distribute large files between machines over P2P; each machine that has a file sends it on.
#[derive(Args)]
pub(crate) struct P2p {
    #[command(flatten)]
    which: Which,
    /// Name of the cluster.
    #[arg(long, default_value = "dev", global = true)]
    cluster: String,
    /// Directory of local identities. Default: the user's runtime directory.
    #[arg(long, value_name = "DIRECTORY", global = true)]
    runtime_directory: Option<PathBuf>,
    /// Role of the certificate to use. Default: the first of these roles that --identity has a certificate of.
    #[arg(long, value_parser = ["client", "node", "admin"], global = true)]
    role: Option<String>,
    /// Tenant of the objects. Default: the tenant of the certificate, else the default tenant.
    #[arg(long, default_value = "", global = true)]
    tenant: String,
    /// Address of this process's data port, which serves peers with tickets; port 0: a free port is picked. An address
    /// beyond loopback needs a control plane that issues tickets. Default: the address of this host that routes to the
    /// control plane if that is on another host and issues tickets, else a loopback address.
    #[arg(long, value_name = "ADDRESS", global = true)]
    listen: Option<SocketAddr>,
    /// Use only TCP, also between processes of one host.
    #[arg(long, global = true)]
    no_shared_memory: bool,
    /// Label of the host: an object is fetched once for a host. Default: the host's identity.
    #[arg(long, global = true)]
    host: Option<String>,
    /// Label of the rack: members of the same rack are preferred as sources.
    #[arg(long, default_value = "", global = true)]
    rack: String,
    /// Upload limit, in bytes per second, such as 1g. 0: no limit.
    #[arg(long, default_value = "0", value_parser = size::parse, global = true)]
    upload: u64,
    /// Download limit, in bytes per second. 0: no limit.
    #[arg(long, default_value = "0", value_parser = size::parse, global = true)]
    download: u64,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Publish a file, or all files of a directory, and serve it until stopped.
    Put(Put),
    /// Fetch an object into a directory and verify each shard; an interrupted fetch is resumed when run again.
    Get(Get),
    /// List objects.
    Ls(Ls),
    /// Fetch a checkpoint under another parallel layout than it was written under; only overlapping ranges are read.
    Reshard(Reshard),
}

#[derive(Args)]
struct Put {
    /// Name of the object.
    name: String,
    /// File or directory to publish.
    path: PathBuf,
    /// Version of the object. Default: the one after the newest.
    #[arg(long)]
    version: Option<u64>,
    /// Size of a shard, the unit of transfer, in bytes. Default: chosen from the object's size, for at least 256 shards
    /// of 64 KiB to 64 MiB.
    #[arg(long, value_parser = size::parse_some)]
    shard: Option<u64>,
    /// Read the files into memory first. Without it, they are mapped, and must neither change nor shrink while they are
    /// served: peers detect changed bytes by their checksums; a file that shrinks ends this process with an error.
    #[arg(long)]
    copy: bool,
}

#[derive(Args)]
struct Get {
    /// Name of the object.
    name: String,
    /// Directory for the object's files.
    directory: PathBuf,
    /// Version of the object. Default: the newest.
    #[arg(long)]
    version: Option<u64>,
    /// Time limit of the fetch, in seconds. Shards that no member holds are waited for until then, as their holder may
    /// be restarting. Default: one hour, of which at most 12 seconds for shards that no member holds.
    #[arg(long, value_parser = durations::seconds())]
    deadline: Option<u64>,
    /// Time to serve the object to others after the fetch, in seconds.
    #[arg(long, default_value_t = 0, value_parser = durations::seconds())]
    seed: u64,
    /// Rank of this process, from 0, among processes that all fetch the object at about the same time: ranks fetch it
    /// from each other by a schedule.
    #[arg(long, requires = "ranks")]
    rank: Option<u32>,
    /// Number of these ranks.
    #[arg(long, requires = "rank")]
    ranks: Option<u32>,
    /// Name of the ranks' job, the same for all of them.
    #[arg(long, default_value = "", requires = "rank")]
    job: String,
    /// Time to wait for another rank, in seconds, before its shards are fetched from other members.
    #[arg(long, default_value_t = 2.0, requires = "rank", value_parser = seconds)]
    patience: f64,
}

#[derive(Args)]
struct Ls {
    /// Prefix of the names to list. Default: all objects.
    #[arg(default_value = "")]
    prefix: String,
    /// List the members of each object too, with the number of shards that each holds.
    #[arg(long, short)]
    long: bool,
    /// Print as JSON, one object a line.
    #[arg(long)]
    json: bool,
}

impl P2p {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut config = P2pConfig::new(self.which.control(&self.cluster, self.runtime_directory.clone()));
        config.role = match self.role.as_deref().and_then(Role::from_name) {
            Some(role) => role,
            // An operator's certificate may list objects, but not share them.
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

/// Error of a text that is no number of seconds within a day.
#[derive(Clone, PartialEq, Eq, Debug)]
struct SecondsError {
    text: String,
}

impl fmt::Display for SecondsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(f, "{text:?}: give seconds, 86400 at most")
    }
}

impl std::error::Error for SecondsError {}

/// Parses seconds, at most a day.
fn seconds(text: &str) -> Result<f64, SecondsError> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| SecondsError { text: text.to_owned() })
}

/// Prints a line on stderr; a failed write is ignored.
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

/// Set when arrived shards cannot be written, which cancels the fetch. It is static because the cancellation callback
/// of a fetch carries no state; a process runs one fetch.
static CANNOT_WRITE: AtomicBool = AtomicBool::new(false);

fn cannot_write() -> bool {
    CANNOT_WRITE.load(Ordering::Relaxed)
}

impl Get {
    /// Fetches the missing shards and writes them; returns the number of bytes fetched.
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
        // A write error is the cause of the cancelled fetch.
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(
                format!("{error}: the fetch was stopped; fix the cause and repeat the get, which resumes it").into()
            );
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
            // A signal and the end of the seeding time both end the wait.
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
                println!("{:>12}  {} shards are held by no member", "", found.lost);
            }
        }
        Ok(())
    }
}
