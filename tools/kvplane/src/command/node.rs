//! `kvplane node`: a storage node as a process.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use kvplane::{HugePages, MetricsServer, NodeConfig, NodeId, RdmaUse};

use super::tebench::{PacingChoice, values};
use super::{Failure, metrics, size, stop};

/// Whether a node offers RDMA.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RdmaChoice {
    /// On the devices that there are.
    Auto,
    /// Not at all.
    Never,
    /// On devices that must be there.
    Require,
}

impl From<RdmaChoice> for RdmaUse {
    fn from(choice: RdmaChoice) -> Self {
        match choice {
            RdmaChoice::Auto => Self::Auto,
            RdmaChoice::Never => Self::Never,
            RdmaChoice::Require => Self::Require,
        }
    }
}

/// A storage node.
#[derive(Args)]
pub(crate) struct Node {
    /// Name of the cluster; its control plane is found in the user's runtime directory.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    #[command(flatten)]
    shape: Shape,
}

/// What a storage node is made of.
#[derive(Args, Clone)]
pub(crate) struct Shape {
    /// Memory for objects, over all shards.
    #[arg(long, value_parser = size::parse, default_value = "1G")]
    pool: u64,
    /// Number of shards; without it, what suits the machine.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    shards: Option<u16>,
    /// Stable number of this node, above 0; without it, one is drawn.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    node_id: Option<u64>,
    /// Address of the data ports; only loopback, as data connections carry no credentials yet.
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Data port of the first shard, the others follow; 0 picks free ones.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Share of the keys relative to other nodes; without it, in proportion to the memory.
    #[arg(long)]
    weight: Option<u32>,
    /// Copies of an object are kept in different failure domains; without it, the host.
    #[arg(long)]
    failure_domain: Option<String>,
    /// How shards wait; without it, what suits the machine.
    #[arg(long, value_enum)]
    pacing: Option<PacingChoice>,
    /// RDMA: where it can be had (auto), never, or with an error where it cannot (require).
    #[arg(long, value_enum, default_value = "auto")]
    rdma: RdmaChoice,
    /// RDMA devices to use, separated by commas, in this order: each is connected to that of the same place in the
    /// other side's list. Without it, all.
    #[arg(long, alias = "rdma_devices", value_delimiter = ',')]
    rdma_devices: Vec<String>,
    /// Port of loopback for /metrics, what the shards counted as Prometheus text; 0 picks one. Without it, there is
    /// none.
    #[arg(long, alias = "metrics_port")]
    metrics_port: Option<u16>,
    /// Directory of local identities and sockets, instead of the user's runtime directory.
    #[arg(long)]
    pub(crate) runtime_directory: Option<PathBuf>,
}

impl Shape {
    pub(crate) fn start(&self, cluster: &str) -> Result<(Arc<kvplane::Node>, Option<MetricsServer>), Failure> {
        let config = NodeConfig {
            control: kvplane::Control::Local {
                cluster: cluster.to_owned(),
                runtime_directory: self.runtime_directory.clone(),
            },
            node: self.node_id.map(NodeId),
            listen: self.listen,
            port: self.port,
            shards: self.shards.map(usize::from),
            weight: self.weight,
            failure_domain: self.failure_domain.clone(),
            runtime_directory: self.runtime_directory.clone(),
            pacing: self.pacing.map(Into::into),
            huge: HugePages::Try,
            rdma: values::rdma("--rdma-devices", self.rdma.into(), &self.rdma_devices)?,
            ..NodeConfig::local(cluster, self.pool)
        };
        let node = Arc::new(kvplane::Node::start(&config)?);
        println!("node {} with {} for objects", node.id(), size::show(self.pool));
        node.notes().iter().for_each(|note| println!("  {note}"));
        let shown = Arc::downgrade(&node);
        let server = metrics::serve(self.metrics_port, move || shown.upgrade()?.metrics_text().ok())?;
        if let Some(server) = &server {
            println!("{}", metrics::say(server, "counters of the shards"));
        }
        Ok((node, server))
    }
}

impl Node {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let (node, _metrics) = self.shape.start(&self.cluster)?;
        let mut said = None;
        stop::wait(|| {
            let trouble = node.trouble();
            if trouble != said
                && let Some(trouble) = &trouble
            {
                eprintln!("kvplane: serving by the last map: {trouble}");
            }
            said = trouble;
            node.check()?;
            Ok(())
        })
    }
}
