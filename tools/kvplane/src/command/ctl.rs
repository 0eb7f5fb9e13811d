//! `kvplane ctl`: inspects and operates a cluster.

pub(crate) mod cert;
pub(crate) mod conductor;
pub(crate) mod drain_wait;
pub(crate) mod events;
pub(crate) mod groups;
pub(crate) mod keys;
pub(crate) mod pins;
pub(crate) mod shards;
pub(crate) mod tasks;
pub(crate) mod tenants;
pub(crate) mod tier;
pub(crate) mod tier_wait;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::handover::{self, UpgradeOrder, UpgradeOutcome, UpgradeReport};
use kvplane::rpc::Role;
use kvplane::rpc::message::{
    Drain, GetIncarnation, Leave, ListSegments, MemberStatus, RotateTickets, Segment, SegmentOwner, Status,
    StatusReply, Undrain,
};
use kvplane::{Client, ClientConfig, Control, ControlLink, DataTls, NodeId, ObjectPriority, Put, PutOptions};
use serde_json::{Value, json};

use crate::command::node::AckChoice;
use crate::command::process::{durations, upgrades};
use crate::command::which::Which;
use crate::command::{Failure, roles, size};

/// Inspect and operate a cluster.
#[derive(Args)]
pub(crate) struct Ctl {
    /// Name of the cluster. Without `--control`, its control plane is found in the user's runtime directory.
    #[arg(long, default_value = "dev", global = true)]
    cluster: String,
    /// Directory of local identities. Default: the user's runtime directory.
    #[arg(long, global = true)]
    runtime_directory: Option<PathBuf>,
    #[command(flatten)]
    which: Which,
    /// TLS 1.3 on TCP data connections. off: none; offer: where a node requires it; require: always, and nodes without
    /// it are not used.
    #[arg(long, value_name = "off|offer|require", default_value_t = DataTls::Offer, global = true)]
    data_tls: DataTls,
    /// Longest delay before a get is hedged, in milliseconds: a get that the owner has not answered by then is sent to
    /// the replica owner too. 0: only if the owner cannot be reached.
    #[arg(long, value_name = "MS", default_value_t = ClientConfig::HEDGE.as_millis() as u64, global = true,
        value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    hedge_ms: u64,
    /// Tenant whose objects are accessed. Default: the tenant of the certificate, else the default tenant.
    #[arg(long, global = true)]
    tenant: Option<String>,
    #[command(subcommand)]
    action: Action,
}

/// Operations on tickets.
#[derive(Subcommand)]
enum Tickets {
    /// Issue tickets with a new key at once, as happens every hour anyway: use it if the key may have leaked. Tickets
    /// of the former key stay valid until they expire.
    Rotate,
}

#[derive(Subcommand)]
enum Action {
    /// List the members with their states and loads.
    Status {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// List the segments of the catalog.
    Segments {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the contents, counters and latencies of each shard.
    Shards(shards::Shards),
    /// Show the rates of each shard, live.
    Top(shards::Top),
    /// List the hottest objects: those with the most gets lately.
    Hot(shards::Hot),
    /// Print events of objects as they happen, after the objects that exist already.
    Events(events::Follow),
    /// List the worlds of processes, or show the processes and groups of one.
    Groups(groups::Groups),
    /// Operate the SSD tier of nodes.
    #[command(subcommand)]
    Tier(tier::Action),
    /// Manage certificates: the cluster's authority and the certificates that it issues.
    #[command(subcommand)]
    Cert(cert::Action),
    /// Manage tenants: their quotas, weights and use of memory.
    #[command(subcommand)]
    Tenants(tenants::Action),
    /// Operate the Conductor: its instances and its placement policy.
    #[command(subcommand)]
    Conductor(conductor::Action),
    /// Operate the tickets for data connections.
    #[command(subcommand)]
    Tickets(Tickets),
    /// Remove a node from the cluster map.
    Remove {
        /// Number of the node.
        node: u64,
    },
    /// Drain a node: its slots migrate to other nodes, which fetch their objects. The node stays reachable, without
    /// slots, until it ends or restarts.
    Drain {
        /// Number of the node.
        node: u64,
        /// Cancel the drain: the node gets its share of the slots again. Objects that other nodes have fetched stay
        /// there until their slots migrate back.
        #[arg(long, conflicts_with = "wait")]
        cancel: bool,
        /// Time to wait until the node has no objects left, in memory or on its SSDs, in seconds; fails if it still has
        /// some then. 0: do not wait.
        #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = durations::seconds())]
        wait: u64,
    },
    /// Upgrade a node of this host without losing an object: its process starts its program again, which may be a new
    /// version, and hands memory and ports over to it. Run it on the node's host, as its user. Fails, and leaves the
    /// node as it is, where that is not possible. If it is interrupted, or its time is over, the node gives the upgrade
    /// up, unless its memory was being handed over.
    Upgrade {
        /// Number of the node.
        node: u64,
        /// Program to start instead of the one that the process was started as.
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
        /// Drain the node, for at most this time in seconds, where its memory cannot be handed over (another format,
        /// other settings of memory, far memory, device pools): its objects migrate to other nodes, and its process
        /// ends with status 1, for its supervisor to start the next one. Default: fail instead.
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
        or_drain: Option<u64>,
        /// Time to wait for the upgrade, in seconds, beside that for a drain.
        #[arg(
            long,
            value_name = "SECONDS",
            default_value_t = 600,
            value_parser = clap::value_parser!(u64).range(1..=86_400)
        )]
        wait: u64,
    },
    /// List tasks in flight: drains with the objects that they have left, and copy tasks, also those that ended lately.
    Tasks(tasks::Tasks),
    /// Replicate objects to a second node, as if they had been put with two replicas, and wait for it.
    Copy(tasks::CopyKeys),
    /// Put a file, or standard input, as an object.
    Put {
        /// Key of the object.
        key: String,
        /// File to read; `-` is standard input.
        file: String,
        #[command(flatten)]
        keep: Keep,
    },
    /// List the objects.
    Keys {
        /// Print the length, version and location of each object too.
        #[arg(long, short)]
        long: bool,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
        /// Most objects to list. Default: all.
        #[arg(long, default_value_t = u64::MAX, hide_default_value = true)]
        limit: u64,
    },
    /// Pin objects in memory for a time, or end that: soft pins, and retentions; and set their priority.
    #[command(subcommand)]
    Pins(pins::Action),
    /// Remove all objects whose keys match a regular expression.
    DeleteMatching {
        /// Regular expression; it matches anywhere in a key unless anchored with `^` and `$`.
        pattern: String,
    },
    /// Remove all objects of all tenants, including those of other clients. Not with `--tenant`.
    DeleteAll,
    /// Write the value of an object to standard output.
    Get {
        /// Key of the object.
        key: String,
    },
    /// Print the length of an object in bytes; fails if it does not exist.
    Size {
        /// Key of the object.
        key: String,
    },
    /// Remove an object.
    Delete {
        /// Key of the object.
        key: String,
    },
}

impl Action {
    /// Returns the name of the subcommand on the command line.
    const fn name(&self) -> &'static str {
        match self {
            Self::Status { .. } => "status",
            Self::Segments { .. } => "segments",
            Self::Shards(_) => "shards",
            Self::Top(_) => "top",
            Self::Hot(_) => "hot",
            Self::Events(_) => "events",
            Self::Groups(_) => "groups",
            Self::Tier(_) => "tier",
            Self::Cert(_) => "cert",
            Self::Tenants(_) => "tenants",
            Self::Conductor(_) => "conductor",
            Self::Tickets(_) => "tickets",
            Self::Remove { .. } => "remove",
            Self::Drain { .. } => "drain",
            Self::Upgrade { .. } => "upgrade",
            Self::Tasks(_) => "tasks",
            Self::Copy(_) => "copy",
            Self::Put { .. } => "put",
            Self::Keys { .. } => "keys",
            Self::Pins(_) => "pins",
            Self::DeleteMatching { .. } => "delete-matching",
            Self::DeleteAll => "delete-all",
            Self::Get { .. } => "get",
            Self::Size { .. } => "size",
            Self::Delete { .. } => "delete",
        }
    }
}

/// Options of a put.
#[derive(Args)]
struct Keep {
    /// Replace an existing object.
    #[arg(long)]
    replace: bool,
    /// Pin the object until its removal (hard pin): it is never evicted.
    #[arg(long)]
    hard_pin: bool,
    /// Pin the object for this time (soft pin), in milliseconds: it is evicted after others. 0: no soft pin.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    soft_pin_ms: u32,
    /// Number of the object's group; the objects of a group are evicted together. 0: no group.
    #[arg(long, default_value_t = 0)]
    group: u64,
    /// Priority of the object, from -4 to 4: within a tenant, objects of a lower one are evicted before.
    #[arg(long, default_value = "0", allow_negative_numbers = true, value_parser = pins::priority_of)]
    priority: ObjectPriority,
    /// Type of the data, a number of the application's choice.
    #[arg(long, default_value_t = 0)]
    data_type: u8,
    /// Replicas of the object, 1 to 8, best effort: the cluster needs as many owners of each slot (`kvplane control
    /// --replicas`). The answer says how many there are.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Number of the replicas that the put waits for, for at most a second: up to --replicas, which is the default.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=8))]
    wait_replicas: Option<u8>,
    /// Acknowledgement level of the put. Default: the node's `--ssd-ack`.
    #[arg(long, value_enum)]
    ack: Option<AckChoice>,
}

impl Keep {
    fn options(&self) -> PutOptions {
        let Self { replace, hard_pin, soft_pin_ms, group, priority, data_type, replicas, wait_replicas, ack } = *self;
        let ack = ack.map(Into::into);
        let wait_replicas = wait_replicas.unwrap_or(replicas);
        PutOptions {
            replace,
            hard_pin,
            soft_pin_ms,
            group,
            priority,
            data_type,
            replicas,
            wait_replicas,
            ack,
            ..PutOptions::default()
        }
    }
}

/// Segments of one page of the catalog.
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
            Action::Groups(groups) => groups.run(&self.link()?, self.tenant.as_deref()),
            Action::Tier(action) => tier::run(&self.link()?, action),
            Action::Cert(action) => cert::run(&self.cluster, action),
            Action::Tenants(action) => tenants::run(&self.link()?, action),
            Action::Conductor(action) => conductor::run(&self.link()?, action),
            Action::Tickets(Tickets::Rotate) => {
                self.link()?.call(RotateTickets)?;
                println!(
                    "tickets are issued with a new key now; tickets of the former key are valid until they expire"
                );
                Ok(())
            }
            Action::Remove { node } => {
                let (link, incarnation) = self.link_about(*node)?;
                link.call(Leave { node: *node, incarnation })?;
                println!("node {node} is removed from the cluster map");
                Ok(())
            }
            Action::Drain { node, cancel: true, .. } => {
                let (link, incarnation) = self.link_about(*node)?;
                let state = |status: StatusReply| status.members.into_iter().find(|member| member.node == *node);
                // The certificate of the node itself may not list members.
                let is_draining = link.call(Status).ok().and_then(state).is_none_or(|it| it.state == "draining");
                link.call(Undrain { node: *node, incarnation })?;
                match is_draining {
                    true => {
                        println!("node {node} gets its share of the slots again, once migrations in flight are done");
                    }
                    false => println!("node {node} was not draining"),
                }
                Ok(())
            }
            Action::Drain { node, wait, .. } => self.drain(*node, *wait),
            Action::Upgrade { node, program, or_drain, wait } => {
                let order = UpgradeOrder {
                    node: NodeId(*node),
                    program: program.as_deref(),
                    or_drain: or_drain.map(Duration::from_secs),
                    within: Duration::from_secs(*wait),
                };
                match handover::upgrade(&self.cluster, self.runtime_directory.as_deref(), order)? {
                    UpgradeOutcome::Upgraded(report) => {
                        let (UpgradeReport { from, to, pid, .. }, said) = (&report, upgrades::describe(&report));
                        println!("node {node} is upgraded from {from} to {to}, process {pid}: {said}");
                    }
                    UpgradeOutcome::Drained { why } => println!(
                        "node {node} is drained, and its process ends: start the new version if no supervisor does \
                         ({why})"
                    ),
                }
                Ok(())
            }
            Action::Tasks(tasks) => tasks.run(&self.link()?),
            Action::Copy(copy) => copy.run(&mut self.client()?),
            Action::Put { key, file, keep } => self.put(key, file, &keep.options()),
            Action::Keys { long, json, limit } => keys::list(&mut self.client()?, *long, *json, *limit),
            Action::Pins(action) => pins::run(&mut self.client()?, action),
            Action::DeleteMatching { pattern } => {
                println!("{} objects removed", self.client()?.keys().remove_matching(pattern)?);
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
            return Err(format!("{whole} {of:?} alone: use delete-matching '' instead, or leave out --tenant").into());
        }
        let mut client = self.client()?;
        if let Some(of) = client.link().own_tenant() {
            return Err(
                format!("{whole} {of:?} alone, the only tenant of this certificate: use delete-matching ''").into()
            );
        }
        println!("{} objects removed", client.keys().remove_all(true)?);
        Ok(())
    }

    fn control(&self) -> Control {
        self.which.control(&self.cluster, self.runtime_directory.clone())
    }

    fn link(&self) -> Result<ControlLink, Failure> {
        Ok(self.link_as()?.0)
    }

    /// Connects to the control plane; returns the link and the role of its certificate.
    fn link_as(&self) -> Result<(ControlLink, Role), Failure> {
        let control = self.control();
        let role = control.role_among(&roles::of(self.action.name()))?;
        Ok((ControlLink::to_within(&control, role, ControlLink::RESTART)?, role))
    }

    /// Connects to the control plane for a request about a node; returns the link and the incarnation that the request
    /// has to name. An operator means the present incarnation; the node's own certificate has to name it.
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
        // The first attempt does not wait: a cluster that was never started is a mistake, which is reported at once.
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
            Put::Exists => {
                println!("an object with key {key:?} exists and was left as it is; use --replace to replace it");
            }
        }
        Ok(())
    }

    /// Stores an object. The string is the text to print about its replicas, if more than one was requested.
    fn put_counted(&self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<(Put, String), Failure> {
        let wanted = options.replicas;
        let mut client = self.client()?;
        if wanted <= 1 {
            return Ok((client.put_with(key, value, options)?, String::new()));
        }
        match client.replicas().put(key, value, options) {
            Ok((put, copies)) if copies < options.wait_replicas => {
                let why =
                    "see `kvplane control --replicas`, the number of failure domains and their nodes' free memory";
                Ok((put, format!(", {copies} of {wanted} replicas: {why}")))
            }
            Ok((put, copies)) if copies < wanted => {
                Ok((put, format!(", {copies} of {wanted} replicas so far: it waited for {}", options.wait_replicas)))
            }
            Ok((put, copies)) => Ok((put, format!(", {copies} replicas"))),
            // An object over the limit of one shard is stored in stripes.
            Err(kvplane::Error::Status { status: kvplane::Status::TooLarge, .. }) => {
                let put = client.put_with(key, value, options)?;
                if matches!(put, Put::Exists) {
                    return Ok((put, String::new()));
                }
                let copies = client.replicas().count(key)?;
                let of = if copies < wanted { format!("{copies} of {wanted}") } else { copies.to_string() };
                Ok((put, format!(", in stripes with {of} replicas of each")))
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
            // A control plane that was just started has no reports yet.
            let known = |value: Option<String>| value.unwrap_or_else(|| "?".to_owned());
            let objects = known(member.load.map(|load| load.objects.to_string()));
            let used = known(member.load.map(|load| size::show(load.used_bytes)));
            let used = format!("{used} / {}", size::show(member.capacity_bytes));
            println!(
                "{:>20}  {:8}  {:>6}  {objects:>10}  {used:>24}  {}",
                member.node, member.state, member.shards, member.failure_domain
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
        "objects": member.load.map(|load| load.objects),
        "used_bytes": member.load.map(|load| load.used_bytes),
        "capacity_bytes": member.capacity_bytes,
    })
}

fn segment_json(segment: &Segment) -> Value {
    let owner = match segment.owner {
        SegmentOwner::Node { node, incarnation } => json!({ "node": node.0, "incarnation": incarnation.0 }),
        SegmentOwner::Client { client } => json!({ "client": client.0 }),
    };
    json!({
        "name": segment.name,
        "kind": format!("{:?}", segment.kind).to_lowercase(),
        "bytes": segment.bytes,
        "address": segment.address.to_string(),
        "owner": owner,
    })
}
