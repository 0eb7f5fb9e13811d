//! `kvplane ctl`: look at and operate a cluster.

pub(crate) mod cert;
pub(crate) mod conductor;
pub(crate) mod drain_wait;
pub(crate) mod events;
pub(crate) mod keys;
pub(crate) mod shards;
pub(crate) mod tasks;
pub(crate) mod tenants;
pub(crate) mod tier;
pub(crate) mod tier_wait;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::rpc::Role;
use kvplane::rpc::message::{
    Drain, GetIncarnation, Leave, ListSegments, MemberStatus, Owner, RotateTickets, Segment, Status, Undrain,
};
use kvplane::{Client, ClientConfig, Control, ControlLink, DataTls, Put, PutOptions};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::node::AckChoice;
use crate::command::roles;
use crate::command::size;
use crate::command::which::Which;

/// Look at and operate a cluster.
#[derive(Args)]
pub(crate) struct Ctl {
    /// Name of the cluster; its control plane is found in the user's runtime directory.
    #[arg(long, default_value = "dev", global = true)]
    cluster: String,
    /// Directory of local identities, instead of the user's runtime directory.
    #[arg(long, global = true)]
    runtime_directory: Option<PathBuf>,
    #[command(flatten)]
    which: Which,
    /// TLS 1.3 on data connections over TCP: off; offer, where a node wants it; or require, with no other nodes.
    #[arg(long, value_name = "off|offer|require", default_value_t = DataTls::Offer, global = true)]
    data_tls: DataTls,
    /// A get whose node says nothing for at most so many milliseconds asks the node with the copy; 0: only when the
    /// first cannot be reached.
    #[arg(long, value_name = "MS", default_value_t = ClientConfig::HEDGE.as_millis() as u64, global = true)]
    hedge_ms: u64,
    /// The tenant whose objects are meant; without it, the one that our certificate is for, else the default one.
    #[arg(long, global = true)]
    tenant: Option<String>,
    #[command(subcommand)]
    action: Action,
}

/// What to do about tickets.
#[derive(Subcommand)]
enum Tickets {
    /// Make them with a new key from now on, as every hour: when one may have leaked. Those under the former one are
    /// good until they end.
    Rotate,
}

#[derive(Subcommand)]
enum Action {
    /// Members, their states and loads.
    Status {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Segments in the catalog.
    Segments {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Every shard: what it holds, what it did, how long requests took.
    Shards(shards::Shards),
    /// A live view of the shards' speeds.
    Top(shards::Top),
    /// The objects that nodes are asked for most, of late.
    Hot(shards::Hot),
    /// What becomes of objects, beginning with those there are.
    Events(events::Follow),
    /// The SSDs under nodes.
    #[command(subcommand)]
    Tier(tier::Action),
    /// Certificates: the cluster's authority, and what it issues.
    #[command(subcommand)]
    Cert(cert::Action),
    /// Tenants: their quotas, and what they have.
    #[command(subcommand)]
    Tenants(tenants::Action),
    /// The Conductor: who takes requests, and how they are placed.
    #[command(subcommand)]
    Conductor(conductor::Action),
    /// Tickets for data connections.
    #[command(subcommand)]
    Tickets(Tickets),
    /// Take a node out of the map.
    Remove {
        /// Its number.
        node: u64,
    },
    /// Have a node give its slots to others, which fetch what was in them. It stays reachable, without slots, until it
    /// ends or starts again.
    Drain {
        /// Its number.
        node: u64,
        /// Give it its share of the slots again instead. What others have fetched stays with them until it moves back.
        #[arg(long, conflicts_with = "wait")]
        cancel: bool,
        /// Wait until the node has no objects left, in memory or on its SSDs, at most so many seconds: an error if it
        /// has then.
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        wait: u64,
    },
    /// What is under way: nodes that are drained, and what they have left; objects that are copied, and tasks of late.
    Tasks(tasks::Tasks),
    /// Have objects copied to a second node, as if they had been put so, and wait for that.
    Copy(tasks::CopyKeys),
    /// Store a file's content, or standard input, under a key.
    Put {
        /// The key.
        key: String,
        /// The file; `-` is standard input.
        file: String,
        #[command(flatten)]
        keep: Keep,
    },
    /// The objects that are there.
    Keys {
        /// Say of each its length, version and where it is.
        #[arg(long, short)]
        long: bool,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        /// At most so many.
        #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
        limit: u64,
    },
    /// Remove all objects whose keys match a regular expression.
    DeleteMatching {
        /// The expression; it matches anywhere in a key unless it says `^` and `$`.
        pattern: String,
    },
    /// Remove all objects of all tenants, whoever put them. Not with `--tenant`.
    DeleteAll,
    /// Write the object under a key to standard output.
    Get {
        /// The key.
        key: String,
    },
    /// Whether there is an object under a key, and how long it is.
    Size {
        /// The key.
        key: String,
    },
    /// Remove the object under a key.
    Delete {
        /// The key.
        key: String,
    },
}

impl Action {
    /// Its name on the command line.
    const fn name(&self) -> &'static str {
        match self {
            Self::Status { .. } => "status",
            Self::Segments { .. } => "segments",
            Self::Shards(_) => "shards",
            Self::Top(_) => "top",
            Self::Hot(_) => "hot",
            Self::Events(_) => "events",
            Self::Tier(_) => "tier",
            Self::Cert(_) => "cert",
            Self::Tenants(_) => "tenants",
            Self::Conductor(_) => "conductor",
            Self::Tickets(_) => "tickets",
            Self::Remove { .. } => "remove",
            Self::Drain { .. } => "drain",
            Self::Tasks(_) => "tasks",
            Self::Copy(_) => "copy",
            Self::Put { .. } => "put",
            Self::Keys { .. } => "keys",
            Self::DeleteMatching { .. } => "delete-matching",
            Self::DeleteAll => "delete-all",
            Self::Get { .. } => "get",
            Self::Size { .. } => "size",
            Self::Delete { .. } => "delete",
        }
    }
}

/// How an object is to be kept.
#[derive(Args)]
struct Keep {
    /// Replace an object that is there.
    #[arg(long)]
    replace: bool,
    /// Never evict it.
    #[arg(long)]
    hard_pin: bool,
    /// Keep it before others for so many milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    soft_pin_ms: u32,
    /// The group that it belongs to, whose objects go together.
    #[arg(long, default_value_t = 0)]
    group: u64,
    /// What it is, by a number.
    #[arg(long, default_value_t = 0)]
    data_type: u8,
    /// How many nodes are to have it, as far as slots have so many owners: see `kvplane control --replicas`.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    replicas: u8,
    /// When the put is done; left out, as the node's `--ssd-ack` says.
    #[arg(long, value_enum)]
    ack: Option<AckChoice>,
}

impl Keep {
    fn options(&self) -> PutOptions {
        let Self { replace, hard_pin, soft_pin_ms, group, data_type, replicas, ack } = *self;
        let ack = ack.map(Into::into);
        PutOptions { replace, hard_pin, soft_pin_ms, group, data_type, replicas, ack, ..PutOptions::default() }
    }
}

/// Segments asked for at once.
const PAGE: u32 = 512;

impl Ctl {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match &self.action {
            Action::Status { json } => self.status(*json),
            Action::Segments { json } => self.segments(*json),
            Action::Shards(shards) => shards.run(&self.link()?),
            Action::Top(top) => top.run(&self.link()?),
            Action::Hot(hot) => hot.run(&self.link()?),
            Action::Events(follow) => follow.run(&self.link()?),
            Action::Tier(action) => tier::run(&self.link()?, action),
            Action::Cert(action) => cert::run(&self.cluster, action),
            Action::Tenants(action) => tenants::run(&self.link()?, action),
            Action::Conductor(action) => conductor::run(&self.link()?, action),
            Action::Tickets(Tickets::Rotate) => {
                self.link()?.call(RotateTickets)?;
                println!("tickets are made with a new key now; those under the former one are good until they end");
                Ok(())
            }
            Action::Remove { node } => {
                let (link, incarnation) = self.link_about(*node)?;
                link.call(Leave { node: *node, incarnation })?;
                println!("node {node} is out of the map");
                Ok(())
            }
            Action::Drain { node, cancel: true, .. } => {
                let (link, incarnation) = self.link_about(*node)?;
                link.call(Undrain { node: *node, incarnation })?;
                println!("node {node} gets its share of the slots again, when what moves has come");
                Ok(())
            }
            Action::Drain { node, wait, .. } => self.drain(*node, *wait),
            Action::Tasks(tasks) => tasks.run(&self.link()?),
            Action::Copy(copy) => copy.run(&mut self.client()?),
            Action::Put { key, file, keep } => self.put(key, file, &keep.options()),
            Action::Keys { long, json, limit } => keys::list(&mut self.client()?, *long, *json, *limit),
            Action::DeleteMatching { pattern } => {
                println!("{} objects removed", self.client()?.remove_matching(pattern)?);
                Ok(())
            }
            Action::DeleteAll => self.delete_all(),
            Action::Get { key } => {
                let value = self.client()?.get(key.as_bytes())?.ok_or_else(|| format!("no object under {key:?}"))?;
                Ok(std::io::Write::write_all(&mut std::io::stdout(), &value)?)
            }
            Action::Size { key } => {
                let bytes = self.client()?.size(key.as_bytes())?.ok_or_else(|| format!("no object under {key:?}"))?;
                println!("{bytes}");
                Ok(())
            }
            Action::Delete { key } => match self.client()?.remove(key.as_bytes())? {
                true => Ok(()),
                false => Err(format!("no object under {key:?}").into()),
            },
        }
    }

    fn delete_all(&self) -> Result<(), Failure> {
        let whole = "delete-all removes the objects of all tenants, not of";
        if let Some(of) = &self.tenant {
            return Err(format!("{whole} {of:?} alone: use delete-matching '' for that, or leave out --tenant").into());
        }
        let mut client = self.client()?;
        if let Some(of) = client.link().own_tenant() {
            return Err(format!("{whole} {of:?} alone, for which this certificate is: use delete-matching ''").into());
        }
        println!("{} objects removed", client.remove_all(true)?);
        Ok(())
    }

    fn control(&self) -> Control {
        self.which.control(&self.cluster, self.runtime_directory.clone())
    }

    fn link(&self) -> Result<ControlLink, Failure> {
        Ok(self.link_as()?.0)
    }

    /// A line to the control plane, and the role in which it was made.
    fn link_as(&self) -> Result<(ControlLink, Role), Failure> {
        let control = self.control();
        let role = control.role_among(&roles::of(self.action.name()))?;
        Ok((ControlLink::to_within(&control, role, ControlLink::RESTART)?, role))
    }

    /// A line to the control plane for a request about a node, and the incarnation that the request has to name: an
    /// operator means the present one, a node's own certificate has to say which.
    fn link_about(&self, node: u64) -> Result<(ControlLink, Option<u64>), Failure> {
        let (link, role) = self.link_as()?;
        let incarnation = if role == Role::Node { Some(link.call(GetIncarnation { node })?.incarnation) } else { None };
        Ok((link, incarnation))
    }

    fn client(&self) -> Result<Client, Failure> {
        let (control, data_tls) = (self.control(), self.data_tls);
        let tenant = self.tenant.clone().unwrap_or_default();
        let hedge = std::time::Duration::from_millis(self.hedge_ms);
        let config = ClientConfig { control, tenant, data_tls, hedge, ..ClientConfig::local(&self.cluster) };
        // A cluster that was never started is a mistake, of which the operator is to hear at once.
        match Client::connect(&ClientConfig { connect: std::time::Duration::ZERO, ..config.clone() }) {
            Err(error) if error.may_restart() => Ok(Client::connect(&config)?),
            connected => Ok(connected?),
        }
    }

    fn put(&self, key: &str, file: &str, options: &PutOptions) -> Result<(), Failure> {
        let value = if file == "-" {
            let mut value = Vec::new();
            std::io::Read::read_to_end(&mut std::io::stdin(), &mut value)?;
            value
        } else {
            std::fs::read(file).map_err(|error| format!("{file}: {error}"))?
        };
        let (put, copies) = self.put_counted(key.as_bytes(), &value, options)?;
        match put {
            Put::Stored(version) => println!("stored {} bytes, version {version}{copies}", value.len()),
            Put::Exists => println!("there is an object under {key:?} already; it was left as it is"),
        }
        Ok(())
    }

    /// Stores an object. The second is what to print of its copies, where several were requested.
    fn put_counted(&self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<(Put, String), Failure> {
        let wanted = options.replicas;
        let mut client = self.client()?;
        if wanted <= 1 {
            return Ok((client.put_with(key, value, options)?, String::new()));
        }
        match client.put_replicas(key, value, options) {
            Ok((put, copies)) if copies < wanted => {
                let why = "see `kvplane control --replicas`, the number of nodes and their room";
                Ok((put, format!(", {copies} of {wanted} copies: {why}")))
            }
            Ok((put, copies)) => Ok((put, format!(", {copies} copies"))),
            // Over the limit of one shard it is stored in stripes, whose copies nobody counts.
            Err(kvplane::Error::Status { status: kvplane::Status::TooLarge, .. }) => {
                let put = client.put_with(key, value, options)?;
                Ok((put, "; it is in stripes, whose copies are not counted".to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn drain(&self, node: u64, wait: u64) -> Result<(), Failure> {
        let (link, incarnation) = self.link_about(node)?;
        link.call(Drain { node, incarnation })?;
        drain_wait::wait(&link, node, Duration::from_secs(wait))
    }

    fn status(&self, as_json: bool) -> Result<(), Failure> {
        let status = self.link()?.call(Status)?;
        if as_json {
            let members: Vec<Value> = status.members.iter().map(member_json).collect();
            let shown = json!({
                "cluster": status.cluster,
                "software": status.software,
                "epoch": status.epoch,
                "replicas": status.replicas,
                "segments": status.segments,
                "uptime_ns": status.uptime_ns,
                "members": members,
            });
            println!("{shown:#}");
            return Ok(());
        }
        println!("cluster {:?}, epoch {}, {}", self.cluster, status.epoch, status.software);
        println!(
            "{:>20}  {:8}  {:>6}  {:>10}  {:>24}  domain",
            "node", "state", "shards", "objects", "used / capacity"
        );
        for member in &status.members {
            let load = member.load.unwrap_or_default();
            let used = format!("{} / {}", size::show(load.used_bytes), size::show(member.capacity_bytes));
            println!(
                "{:>20}  {:8}  {:>6}  {:>10}  {used:>24}  {}",
                member.node, member.state, member.shards, load.objects, member.failure_domain
            );
        }
        Ok(())
    }

    fn segments(&self, as_json: bool) -> Result<(), Failure> {
        let link = self.link()?;
        let (mut after, mut listed) = (None, Vec::new());
        loop {
            let page = link.call(ListSegments { after: after.clone(), limit: PAGE })?;
            for segment in &page.segments {
                if as_json {
                    listed.push(segment_json(segment));
                    continue;
                }
                println!("{:40}  {:>12}  {}", segment.name, size::show(segment.bytes), segment.address);
            }
            match page.segments.last() {
                Some(last) if page.more => after = Some(last.name.clone()),
                _ => break,
            }
        }
        if as_json {
            println!("{:#}", json!({ "segments": listed }));
        }
        Ok(())
    }
}

fn member_json(member: &MemberStatus) -> Value {
    let load = member.load.unwrap_or_default();
    json!({
        "node": member.node,
        "incarnation": member.incarnation,
        "state": member.state,
        "weight": member.weight,
        "shards": member.shards,
        "failure_domain": member.failure_domain,
        "host": member.host,
        "version": member.version,
        "silent_ns": member.silent_ns,
        "objects": load.objects,
        "used_bytes": load.used_bytes,
        "capacity_bytes": member.capacity_bytes,
    })
}

fn segment_json(segment: &Segment) -> Value {
    let owner = match segment.owner {
        Owner::Node { node, incarnation } => json!({ "node": node, "incarnation": incarnation }),
        Owner::Client { client } => json!({ "client": client }),
    };
    json!({
        "name": segment.name,
        "kind": format!("{:?}", segment.kind).to_lowercase(),
        "bytes": segment.bytes,
        "address": segment.address.to_string(),
        "owner": owner,
    })
}
