//! `kvplane control`: the control plane as a process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvplane::rpc::RuntimeDirectory;
use kvplane_conductor::cost::DecodeModel;
use kvplane_conductor::index::MAX_BLOCKS;
use kvplane_conductor::policy::PolicyName;
use kvplane_server::{
    ConductorConfig, ControlConfig, ControlHandle, ControlServer, EtcdConfig, HttpToken, MetadataLimits, Objects,
    ObjectsAccess, TicketConfig,
};

use crate::command::Failure;
use crate::command::ctl::conductor::PolicyChoice;
use crate::command::objects::ClusterArguments;
use crate::command::process::log::{Level, Log};
use crate::command::process::stop;

/// How long a stopping control plane may take.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// The Conductor, where it is hosted.
#[derive(Args, Clone)]
struct Conductor {
    /// Host the Conductor: schedulers ask it who should serve a request.
    #[arg(long = "conductor")]
    hosted: bool,
    /// Blocks of each model that the Conductor's index holds; 15 bytes each, twice.
    #[arg(long = "conductor-blocks", default_value_t = 4 << 20, value_name = "BLOCKS", requires = "hosted",
        value_parser = clap::value_parser!(u64).range(1..=MAX_BLOCKS as u64))]
    blocks: u64,
    /// How requests are placed at first: `kvplane ctl conductor policy` changes it.
    #[arg(long = "conductor-policy", value_enum, default_value = "kvplane", requires = "hosted")]
    policy: PolicyChoice,
    /// Memory that copies of hot prefixes may take, which the Conductor has the store make on second nodes where
    /// requests wait for the first; 0: it makes none.
    #[arg(long = "conductor-copies", default_value = "16G", value_parser = kvplane::parse_bytes, value_name = "BYTES",
        requires = "hosted")]
    copies: u64,
    /// Bytes a second that a node of the cluster can send: what the Conductor predicts transfers by.
    #[arg(long = "conductor-nic", default_value = "87000000000", value_parser = some_bytes,
        value_name = "BYTES", requires = "hosted")]
    nic: u64,
    /// Refuse requests at once whose first token is predicted to come later than this, in milliseconds.
    #[arg(long, value_name = "MS", requires = "hosted", value_parser = clap::value_parser!(u64).range(1..))]
    promise_ttft_ms: Option<u64>,
    /// Refuse requests at once whose tokens are predicted to come slower than this, in milliseconds: see
    /// `--conductor-decode`.
    #[arg(long, value_name = "MS", requires = "hosted", value_parser = clap::value_parser!(u64).range(1..))]
    promise_tbt_ms: Option<u64>,
    /// How long a step of decode takes, for every model: milliseconds, nanoseconds for each resident token, and
    /// microseconds for each request of the batch. The default is published of LLaMA3-70B on A800.
    #[arg(
        long = "conductor-decode",
        value_name = "BASE_MS[,TOKEN_NS[,REQUEST_US]]",
        default_value = "26.2,36",
        requires = "hosted"
    )]
    decode: DecodeModel,
}

impl Conductor {
    fn config(&self) -> Result<Option<ConductorConfig>, Failure> {
        if !self.hosted {
            return Ok(None);
        }
        let promises = self.promise_ttft_ms.is_some() || self.promise_tbt_ms.is_some();
        if promises && !PolicyName::from(self.policy).heeds_promises() {
            let policy = self.policy.label();
            let what =
                format!("--conductor-policy {policy} refuses nobody: kvplane, local and algorithm-1 keep promises");
            return Err(what.into());
        }
        let mut config = ConductorConfig::default();
        // It is in range, and numbers of this machine have 64 bits.
        let blocks = usize::try_from(self.blocks).unwrap_or(MAX_BLOCKS);
        (config.scheduler.index.max_blocks, config.scheduler.index.max_records) = (blocks, blocks);
        let ns = |ms: Option<u64>| ms.map_or(u64::MAX, |ms| ms.saturating_mul(1_000_000));
        (config.scheduler.slo.ttft_ns, config.scheduler.slo.tbt_ns) =
            (ns(self.promise_ttft_ms), ns(self.promise_tbt_ms));
        (config.copies.most_bytes, config.scheduler.nic_bytes_s) = (self.copies, self.nic);
        config.scheduler.decode_model = self.decode;
        config.policy = self.policy.into();
        config.refuses = promises;
        Ok(Some(config))
    }
}

/// A number of bytes that is not 0.
fn some_bytes(text: &str) -> Result<u64, String> {
    match kvplane::parse_bytes(text) {
        Ok(0) => Err("0 bytes a second move nothing".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error),
    }
}

/// What is served over HTTP, and where.
#[derive(Args, Clone)]
pub(crate) struct Http {
    /// Address for /health, /metrics, /debug/shards and Mooncake's paths. Beyond loopback it needs --http-token-file.
    #[arg(long = "http", default_value = "127.0.0.1:0", value_name = "HTTP")]
    address: SocketAddr,
    /// A file, readable by its owner alone, with the token that whoever asks over HTTP must bring, as Authorization:
    /// Bearer TOKEN. Only /health and Mooncake's metadata go without.
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Allow --mooncake-metadata on an address that other machines reach; its protocol has no authentication, so
    /// whoever reaches it may read and write it.
    #[arg(long)]
    http_without_authentication: bool,
    /// Loopback address at which to publish what becomes of objects over ZeroMQ, as Mooncake's master does with its KV
    /// events; without it, kvplane ctl events still shows them.
    #[arg(long, value_name = "ADDRESS")]
    kv_events: Option<SocketAddr>,
    /// Let only tenants put that kvplane ctl tenants has set; else others have no quota.
    #[arg(long)]
    strict_tenants: bool,
    #[command(flatten)]
    conductor: Conductor,
    /// Be the metadata server of Mooncake engines too: http://ADDRESS/metadata in their configuration.
    #[arg(long)]
    mooncake_metadata: bool,
}

/// The control plane.
#[derive(Args)]
pub(crate) struct Control {
    /// TOML file with settings: its keys are the names of these flags, which count instead where both are given.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the cluster.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    /// Address for QUIC; mutual TLS is always on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    http: Http,
    /// Where the state is, which survives a kill: a directory, which then has the authority's key too; or
    /// etcd://HOST:PORT,HOST:PORT for several control planes of one cluster, of which one leads and the others stand
    /// by.
    #[arg(long, value_name = "DIRECTORY or etcd://...")]
    state: PathBuf,
    /// Directory with ca.pem, client.pem and client.key for an etcd that is not on loopback.
    #[arg(long, value_name = "DIRECTORY")]
    etcd_certs: Option<PathBuf>,
    /// Where this control plane is reached, as standbys tell who calls them; else the address of --listen.
    #[arg(long, value_name = "ADDRESS")]
    advertise: Option<SocketAddr>,
    /// Directory with ca.pem, control.pem and control.key, where the authority's key is kept elsewhere (kvplane ctl
    /// cert); with client.pem and client.key too, /get_all_keys and /api/v1/remove_all are served. Without it, the
    /// authority is in --state, and processes of this user find identities in the runtime directory.
    #[arg(long, value_name = "DIRECTORY")]
    identity: Option<PathBuf>,
    /// How long members have to say which map they follow, where the state has none, before others may join: it may be
    /// a new cluster's, or one that was lost. 6 where certificates are older than the state, else 0.
    #[arg(long, value_name = "SECONDS")]
    adoption_wait: Option<u32>,
    /// Nodes that may keep each object, best effort: 1, or 2 for a second copy of what puts request one of.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    replicas: u8,
    /// Directory for identities of local processes, instead of the user's runtime directory.
    #[arg(long)]
    runtime_directory: Option<PathBuf>,
    /// Let nodes serve whoever reaches their data ports, without a ticket. They listen on loopback only then.
    #[arg(long, conflicts_with = "ticket_lifetime")]
    no_tickets: bool,
    /// How long a ticket for data connections is good, in seconds; clients get another after a third of it.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(3..=86_400))]
    ticket_lifetime: u64,
}

/// What a control plane is made of, beside HTTP.
pub(crate) struct Setup<'a> {
    pub(crate) cluster: &'a str,
    pub(crate) listen: SocketAddr,
    pub(crate) state: Option<PathBuf>,
    /// The state in etcd, instead.
    pub(crate) etcd: Option<EtcdConfig>,
    pub(crate) identity: Option<PathBuf>,
    pub(crate) replicas: u8,
    pub(crate) runtime_directory: Option<&'a PathBuf>,
    /// How tickets for data connections are made, if they are.
    pub(crate) tickets: Option<TicketConfig>,
    /// How long members of a lost state have to come, where there is no map; none where no state can be lost.
    pub(crate) adoption_wait: Option<Duration>,
}

/// How long members have to come of a state that may have been lost: the longest wait between their tries to connect,
/// and a heartbeat.
const ADOPTION_WAIT: Duration = Duration::from_secs(6);

pub(crate) fn start(setup: Setup<'_>, http: &Http) -> Result<ControlHandle, Failure> {
    let Setup { cluster, listen, state, etcd, identity, replicas, runtime_directory, tickets, adoption_wait } = setup;
    let publish = match runtime_directory {
        Some(path) => RuntimeDirectory::at(path),
        None => RuntimeDirectory::of_user()?,
    };
    let mut config = ControlConfig::new(cluster);
    config.cluster.replicas = replicas;
    config.cluster.adoption_wait_ns = adoption_wait.map(|wait| u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
    config.listen = listen;
    config.http_listen = Some(http.address);
    config.kv_events_listen = http.kv_events;
    config.http_token = http.http_token_file.as_deref().map(HttpToken::read).transpose()?;
    config.http_without_authentication_anywhere = http.http_without_authentication;
    config.mooncake_metadata = http.mooncake_metadata.then(MetadataLimits::default);
    config.strict_tenants = http.strict_tenants;
    config.conductor = http.conductor.config()?;
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
    // One that may stand by is named by who calls it; what it left here would say that it leads.
    config.publish = etcd.is_none().then_some(publish);
    config.etcd = etcd;
    config.identity_directory = identity;
    let control = ControlServer::start(config)?;
    if let Some(asked) = asked {
        asked.listens(control.address());
    }
    Ok(control)
}

/// Fails when the control plane has ended by itself.
pub(crate) fn watch(control: &mut ControlHandle) -> Result<(), Failure> {
    match control.ended_within(Duration::ZERO) {
        None => Ok(()),
        Some(Ok(())) => Err("the control plane ended by itself".into()),
        Some(Err(error)) => Err(error.into()),
    }
}

impl Http {
    /// Says where it is.
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
            tickets: (!self.no_tickets)
                .then(|| TicketConfig { lifetime_s: self.ticket_lifetime, ..TicketConfig::default() }),
            adoption_wait: Some(self.adoption_wait()),
        };
        let mut control = start(setup, &self.http)?;
        announce!("control plane of {:?} on {} (QUIC)", self.cluster, control.address());
        self.http.announce(&control);
        stop::wait(|| watch(&mut control))?;
        Ok(control.shutdown(SHUTDOWN)?)
    }

    /// How long members of a lost state have to come. Where the authority is as new as the directory of the state,
    /// nobody has a certificate of it: it is a new cluster.
    fn adoption_wait(&self) -> Duration {
        let is_new = self.identity.is_none() && !self.state.join("ca.key").exists();
        match self.adoption_wait {
            Some(seconds) => Duration::from_secs(seconds.into()),
            None if is_new => Duration::ZERO,
            None => ADOPTION_WAIT,
        }
    }

    /// Where the state is: in a directory, or in etcd.
    fn place(&self) -> Result<(Option<PathBuf>, Option<EtcdConfig>), Failure> {
        let text = self.state.to_str().filter(|text| EtcdConfig::is_one(text));
        match text {
            Some(text) => {
                let etcd = EtcdConfig::parse(text, self.etcd_certs.clone())?;
                Ok((None, Some(EtcdConfig { advertise: self.advertise, ..etcd })))
            }
            None if self.etcd_certs.is_some() || self.advertise.is_some() => {
                Err("--etcd-certs and --advertise are for a state in etcd: --state etcd://HOST:PORT".into())
            }
            None => Ok((Some(self.state.clone()), None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_made_only_by_policies_that_keep_them() {
        let conductor = |policy, promise_ttft_ms| Conductor {
            hosted: true,
            blocks: 1 << 10,
            policy,
            copies: 0,
            nic: 1,
            promise_ttft_ms,
            promise_tbt_ms: None,
            decode: DecodeModel::default(),
        };
        let heedless = conductor(PolicyChoice::Random, Some(1)).config();
        assert!(heedless.is_err_and(|error| error.to_string().contains("random refuses nobody")));
        assert!(conductor(PolicyChoice::Random, None).config().is_ok_and(|config| config.is_some()));
        assert!(conductor(PolicyChoice::Local, Some(1)).config().is_ok_and(|config| config.is_some()));
    }
}
