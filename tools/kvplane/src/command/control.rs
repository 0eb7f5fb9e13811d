//! `kvplane control`: runs the control plane as a process.

pub(crate) mod failures;
mod groups;
mod limits;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvplane::rpc::RuntimeDirectory;
use kvplane_conductor::cost::DecodeModel;
use kvplane_conductor::index::MAX_BLOCKS;
use kvplane_conductor::policy::{PlacementPolicy, Probability};
use kvplane_server::{
    ConductorConfig, ControlConfig, ControlHandle, ControlServer, EtcdConfig, HttpToken, MetadataLimits, Objects,
    ObjectsAccess, SnapshotConfig, TicketConfig,
};

use crate::command::Failure;
use crate::command::control::failures::FailureDeadlines;
use crate::command::control::groups::GroupLimits;
use crate::command::control::limits::ConductorLimits;
use crate::command::ctl::conductor::policies;
use crate::command::objects::ClusterArguments;
use crate::command::process::log::{Level, Log};
use crate::command::process::stop;
use crate::command::size;

/// Longest time that a control plane takes to stop.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// Settings of the Conductor.
#[derive(Args, Clone)]
struct Conductor {
    /// Host the Conductor, which places the requests of inference schedulers on instances.
    #[arg(long = "conductor")]
    hosted: bool,
    /// Capacity of the prefix index, in blocks for each model; a block takes 14 to 20 bytes, and 27 to 55
    /// more if its tokens are known.
    #[arg(long = "conductor-blocks", default_value_t = 4 << 20, value_name = "BLOCKS", requires = "hosted",
        value_parser = clap::value_parser!(u64).range(1..=MAX_BLOCKS as u64))]
    blocks: u64,
    /// Placement policy of a new Conductor; `kvplane ctl conductor policy` changes it at run time.
    #[arg(long = "conductor-policy", value_parser = policies(), default_value = "kvplane", requires = "hosted")]
    policy: PlacementPolicy,
    /// Directory of the snapshots of the prefix index, from which it continues after a restart. Default: index in the
    /// state directory; with the state in etcd or in memory there are no snapshots.
    #[arg(long = "conductor-snapshots", value_name = "DIRECTORY", requires = "hosted")]
    snapshots: Option<PathBuf>,
    /// Least time between two snapshots of the prefix index of a model, in seconds. 0: no snapshots are kept.
    #[arg(long = "conductor-snapshot-every", value_name = "SECONDS", default_value_t = 10, requires = "hosted",
        value_parser = clap::value_parser!(u64).range(..=86_400))]
    snapshot_s: u64,
    /// Memory budget for replicas of hot prefixes, in bytes: the Conductor replicates a prefix to a second node when
    /// requests wait for the first. 0: no prefix is replicated.
    #[arg(long = "conductor-replicas", default_value = "16G", value_parser = kvplane::parse_bytes, value_name = "BYTES",
        requires = "hosted")]
    copies: u64,
    /// Network bandwidth of a node, in bytes per second, from which the Conductor predicts transfer times.
    #[arg(long = "conductor-nic", default_value = "87000000000", value_parser = size::parse_bandwidth,
        value_name = "BYTES", requires = "hosted")]
    nic: u64,
    /// Objective for the time to first token (TTFT), in milliseconds: requests predicted to miss it are rejected at
    /// once. Default: none.
    #[arg(long, value_name = "MS", requires = "hosted", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    promise_ttft_ms: Option<u64>,
    /// Objective for the time between tokens (TBT), in milliseconds: requests predicted to miss it are rejected at
    /// once. Default: none. See `--conductor-decode`.
    #[arg(long, value_name = "MS", requires = "hosted", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    promise_tbt_ms: Option<u64>,
    /// Probability with which an admitted request is to have its first token within its objective, in percent from 50
    /// to 99.9. The higher it is, the larger is the margin of predictions, and the more requests are rejected.
    #[arg(long, value_name = "PERCENT", default_value_t = Probability::DEFAULT, requires = "hosted")]
    promise_percent: Probability,
    /// Duration of a decode step until reports tell it, for every model: milliseconds, nanoseconds for each resident
    /// token, microseconds for each request of the batch. The default is the published one of LLaMA3-70B on A800.
    #[arg(
        long = "conductor-decode",
        value_name = "BASE_MS[,TOKEN_NS[,REQUEST_US]]",
        default_value = "26.2,36",
        requires = "hosted"
    )]
    decode: DecodeModel,
    #[command(flatten)]
    limits: ConductorLimits,
}

impl Conductor {
    fn snapshots(&self) -> SnapshotConfig {
        SnapshotConfig { directory: self.snapshots.clone(), every: Duration::from_secs(self.snapshot_s) }
    }

    fn config(&self) -> Result<Option<ConductorConfig>, Failure> {
        if !self.hosted {
            return Ok(None);
        }
        let promises = self.promise_ttft_ms.is_some() || self.promise_tbt_ms.is_some();
        if promises && !self.policy.heeds_promises() {
            let policy = self.policy.label();
            return Err(format!("--conductor-policy {policy} rejects no requests: objectives need kvplane").into());
        }
        let mut config = ConductorConfig::default();
        self.limits.set(&mut config)?;
        // The argument's range is checked, and `usize` has 64 bits on supported machines.
        let blocks = usize::try_from(self.blocks).unwrap_or(MAX_BLOCKS);
        (config.scheduler.index.max_blocks, config.scheduler.index.max_records) = (blocks, blocks);
        let ns = |ms: Option<u64>| ms.map_or(u64::MAX, |ms| ms.saturating_mul(1_000_000));
        (config.scheduler.slo.ttft_ns, config.scheduler.slo.tbt_ns) =
            (ns(self.promise_ttft_ms), ns(self.promise_tbt_ms));
        config.scheduler.slo.probability = self.promise_percent;
        (config.copies.most_bytes, config.scheduler.nic_bytes_s) = (self.copies, self.nic);
        config.scheduler.decode_model = self.decode;
        config.policy = self.policy;
        config.refuses = promises;
        Ok(Some(config))
    }
}

/// Services of the control plane over HTTP.
#[derive(Args, Clone)]
pub(crate) struct Http {
    /// Address of the HTTP server: /health, /metrics, /debug/shards and Mooncake's paths. An address beyond loopback
    /// needs --http-token-file.
    #[arg(long = "http", default_value = "127.0.0.1:0", value_name = "HTTP")]
    address: SocketAddr,
    /// File with the token of the HTTP server, readable by its owner only. Clients send it as "Authorization: Bearer
    /// TOKEN", except to /health and to Mooncake's metadata.
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Allow --mooncake-metadata on an address beyond loopback. Its protocol has no authentication: every host that
    /// reaches the address can read and write the metadata.
    #[arg(long)]
    http_without_authentication: bool,
    /// Loopback address at which events of objects are published over ZeroMQ, in the format of Mooncake's KV events.
    /// Default: not published; `kvplane ctl events` shows them anyway.
    #[arg(long, value_name = "ADDRESS")]
    kv_events: Option<SocketAddr>,
    /// Refuse puts of tenants that `kvplane ctl tenants` has not set. Default: such tenants have no quota.
    #[arg(long)]
    strict_tenants: bool,
    #[command(flatten)]
    conductor: Conductor,
    #[command(flatten)]
    groups: GroupLimits,
    /// Serve as the metadata server of Mooncake engines, at http://ADDRESS/metadata.
    #[arg(long)]
    mooncake_metadata: bool,
}

/// Run the control plane.
#[derive(Args)]
pub(crate) struct Control {
    /// TOML file with settings; its keys are the names of these flags. A flag on the command line overrides the file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the cluster.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    /// Address that the control plane listens on (QUIC with mutual TLS).
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    http: Http,
    /// Location of the cluster state, which outlives the process: a directory, which then holds the authority's key
    /// too; or etcd://HOST:PORT,HOST:PORT, shared by several control planes of one cluster: one leader and its
    /// standbys. Default with --stop-when-idle: in memory.
    #[arg(long, value_name = "DIRECTORY or etcd://...", required_unless_present = "stop_when_idle")]
    state: Option<PathBuf>,
    /// Stop once no process of a world has reported for this time, in seconds: for a control plane of process groups
    /// alone, which one of their processes starts. It also stops if none registers within this time.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    stop_when_idle: Option<u64>,
    /// Directory with ca.pem, client.pem and client.key for an etcd beyond loopback.
    #[arg(long, value_name = "DIRECTORY")]
    etcd_certs: Option<PathBuf>,
    /// Address of this control plane that standbys name to callers while it leads. Default: the address of --listen.
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<SocketAddr>,
    /// Directory with ca.pem, control.pem and control.key, issued by `kvplane ctl cert` from an authority kept
    /// elsewhere. With client.pem and client.key of a client of all tenants too, /get_all_keys and /api/v1/remove_all
    /// are served. Default: the authority is in --state, and processes of this user find identities in the runtime
    /// directory.
    #[arg(long, value_name = "DIRECTORY")]
    identity: Option<PathBuf>,
    /// Time for members to offer their cluster maps for adoption before new nodes may join, in seconds, if the state
    /// has no map (a new cluster, or a lost state). Default: 6 if the authority is older than the state, else 0.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    adoption_wait: Option<u32>,
    /// Owners of each slot, 1 to 8, each in another failure domain: the most replicas of objects whose puts request
    /// several, best effort. Above 2, all nodes have to be of this version.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Directory of identities for local processes. Default: the user's runtime directory.
    #[arg(long)]
    runtime_directory: Option<PathBuf>,
    #[command(flatten)]
    failures: FailureDeadlines,
    #[command(flatten)]
    tickets: Tickets,
}

/// Tickets for data connections.
#[derive(Args)]
struct Tickets {
    /// Let nodes serve data connections without a ticket. Nodes then listen on loopback only.
    #[arg(long, conflicts_with = "ticket_lifetime")]
    no_tickets: bool,
    /// Lifetime of a ticket for data connections, in seconds. Clients renew it after a third of that time.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(3..=86_400))]
    ticket_lifetime: u64,
}

impl Tickets {
    fn config(&self) -> Option<TicketConfig> {
        (!self.no_tickets).then(|| TicketConfig { lifetime_s: self.ticket_lifetime, ..TicketConfig::default() })
    }
}

/// Settings of a control plane, except HTTP.
pub(crate) struct Setup<'a> {
    pub(crate) cluster: &'a str,
    pub(crate) listen: SocketAddr,
    pub(crate) state: Option<PathBuf>,
    /// Location of the state in etcd, instead of `state`.
    pub(crate) etcd: Option<EtcdConfig>,
    pub(crate) identity: Option<PathBuf>,
    pub(crate) replicas: u8,
    pub(crate) runtime_directory: Option<&'a PathBuf>,
    /// Deadlines of failure detection.
    pub(crate) failures: FailureDeadlines,
    /// Settings of tickets for data connections; `None` issues none.
    pub(crate) tickets: Option<TicketConfig>,
    /// Time for members of a lost state to offer their maps, where there is no map; `None` where no state can be lost.
    pub(crate) adoption_wait: Option<Duration>,
    /// Time without a report of a process of a world after which it stops; `None` where it does not.
    pub(crate) stop_when_idle: Option<Duration>,
}

/// Default time for members of a lost state to offer their maps: their longest backoff between connection attempts, and
/// a heartbeat.
const ADOPTION_WAIT: Duration = Duration::from_secs(6);

pub(crate) fn start(setup: Setup<'_>, http: &Http) -> Result<ControlHandle, Failure> {
    let Setup {
        cluster,
        listen,
        state,
        etcd,
        identity,
        replicas,
        runtime_directory,
        failures,
        tickets,
        adoption_wait,
        stop_when_idle,
    } = setup;
    let publish = match runtime_directory {
        Some(path) => RuntimeDirectory::at(path),
        None => RuntimeDirectory::of_user()?,
    };
    let mut config = ControlConfig::new(cluster);
    config.cluster.replicas = replicas;
    failures.set(&mut config.cluster)?;
    config.cluster.adoption_wait_ns = adoption_wait.map(|wait| u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
    config.listen = listen;
    config.http_listen = Some(http.address);
    config.kv_events_listen = http.kv_events;
    config.http_token = http.http_token_file.as_deref().map(HttpToken::read).transpose()?;
    config.http_without_authentication_anywhere = http.http_without_authentication;
    config.mooncake_metadata = http.mooncake_metadata.then(MetadataLimits::default);
    config.strict_tenants = http.strict_tenants;
    config.worlds = http.groups.config()?;
    config.stop_when_idle = stop_when_idle;
    config.conductor = http.conductor.config()?;
    config.conductor_snapshots = http.conductor.snapshots();
    let asked = ClusterArguments::new(cluster, runtime_directory, identity.as_deref()).map(Arc::new);
    if let (None, Some(directory)) = (&asked, &identity) {
        announce!(
            "/get_all_keys and /api/v1/remove_all are answered 501: {} has no client.pem and client.key of a client of \
             all tenants (kvplane ctl cert issue client)",
            directory.display()
        );
    }
    config.objects = ObjectsAccess(asked.clone().map(|asked| asked as Arc<dyn Objects>));
    config.tickets = tickets;
    config.state_directory = state;
    // Clients name the addresses of control planes that may be standbys; an entry in the runtime directory would claim
    // that this one leads.
    config.publish = etcd.is_none().then_some(publish);
    config.etcd = etcd;
    config.identity_directory = identity;
    let control = ControlServer::start(config)?;
    if let Some(asked) = asked {
        asked.listens(control.address());
    }
    Ok(control)
}

/// Fails if the control plane has ended by itself.
pub(crate) fn watch(control: &mut ControlHandle) -> Result<(), Failure> {
    match control.ended_within(Duration::ZERO) {
        None => Ok(()),
        Some(Ok(())) => Err("the control plane ended by itself".into()),
        Some(Err(error)) => Err(error.into()),
    }
}

impl Http {
    /// Prints the addresses of the services.
    pub(crate) fn announce(&self, control: &ControlHandle) {
        let Some(address) = control.http_address() else { return };
        announce!("health and metrics on http://{address}/health and /metrics");
        if let Some(events) = control.events_address() {
            announce!("events of objects on tcp://{events} (ZeroMQ)");
        }
        if self.mooncake_metadata {
            announce!("metadata server of Mooncake engines: http://{address}/metadata");
        }
    }
}

impl Control {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.log.begin(Level::Info)?;
        let (state, etcd) = self.place()?;
        let setup = Setup {
            cluster: &self.cluster,
            listen: self.listen,
            state,
            etcd,
            identity: self.identity.clone(),
            replicas: self.replicas,
            runtime_directory: self.runtime_directory.as_ref(),
            failures: self.failures.clone(),
            tickets: self.tickets.config(),
            adoption_wait: self.adoption_wait(),
            stop_when_idle: self.stop_when_idle.map(Duration::from_secs),
        };
        let mut control = start(setup, &self.http)?;
        announce!("control plane of {:?} on {} (QUIC)", self.cluster, control.address());
        self.http.announce(&control);
        let mut was_idle = false;
        let waited = stop::wait(|| match control.ended_within(Duration::ZERO) {
            Some(Ok(())) if self.stop_when_idle.is_some() => {
                was_idle = true;
                Err("no process of a world has reported for the time of --stop-when-idle".into())
            }
            _ => watch(&mut control),
        });
        match waited {
            Err(reason) if was_idle => announce!("{reason}: the control plane stops"),
            waited => waited?,
        }
        Ok(control.shutdown(SHUTDOWN)?)
    }

    /// Returns the time for members of a lost state to offer their maps; none if the state is in memory. A control
    /// plane that has yet to create its authority belongs to a new cluster: no member can have a certificate of it.
    fn adoption_wait(&self) -> Option<Duration> {
        let state = self.state.as_ref()?;
        let is_new = self.identity.is_none() && !state.join("ca.key").exists();
        Some(match self.adoption_wait {
            Some(seconds) => Duration::from_secs(seconds.into()),
            None if is_new => Duration::ZERO,
            None => ADOPTION_WAIT,
        })
    }

    /// Returns the location of the state: a directory, or etcd.
    fn place(&self) -> Result<(Option<PathBuf>, Option<EtcdConfig>), Failure> {
        let text = self.state.as_ref().and_then(|state| state.to_str()).filter(|text| EtcdConfig::is_one(text));
        match text {
            Some(text) => {
                let etcd = EtcdConfig::parse(text, self.etcd_certs.clone())?;
                Ok((None, Some(EtcdConfig { advertise: self.advertise, ..etcd })))
            }
            None if self.etcd_certs.is_some() || self.advertise.is_some() => {
                Err("--etcd-certs and --advertise need a state in etcd: --state etcd://HOST:PORT".into())
            }
            None => Ok((self.state.clone(), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_need_a_policy_that_supports_them() {
        let conductor = |policy, promise_ttft_ms| Conductor {
            hosted: true,
            blocks: 1 << 10,
            policy,
            snapshots: None,
            snapshot_s: 0,
            copies: 0,
            nic: 1,
            promise_ttft_ms,
            promise_tbt_ms: None,
            promise_percent: Probability::DEFAULT,
            decode: DecodeModel::default(),
            limits: ConductorLimits::default(),
        };
        let heedless = conductor(PlacementPolicy::Random, Some(1)).config();
        assert!(heedless.is_err_and(|error| error.to_string().contains("random rejects no requests")));
        assert!(conductor(PlacementPolicy::Random, None).config().is_ok_and(|config| config.is_some()));
        assert!(conductor(PlacementPolicy::Kvplane, Some(1)).config().is_ok_and(|config| config.is_some()));
    }
}
