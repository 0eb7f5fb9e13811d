//! `kvplane ctl conductor`: who takes requests, how it is decided, and what operators change about that.

use std::sync::mpsc;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use kvplane::ControlLink;
use kvplane::rpc::conductor::{InstancePart, InstanceTable, WatchInstances};
use kvplane::rpc::placement::{CopiesShown, HoldInstance, PlacementPolicy, SetPlacement, ShowCopies, ShowPlacement};
use kvplane_conductor::policy::PolicyName;
use serde_json::json;

use crate::command::Failure;

/// How long the first table may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What to look at or to do.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// How requests are placed, and the instances that take them.
    Show {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take an instance out: it gets no new requests, what it has goes on, and others may fetch from it.
    Hold {
        /// Its name.
        instance: String,
    },
    /// Let an instance take requests again.
    Release {
        /// Its name.
        instance: String,
    },
    /// Say how requests are placed from now on, for every model, also after a restart.
    Policy(Policy),
}

/// How requests are placed.
#[derive(Args)]
pub(crate) struct Policy {
    /// By what.
    #[arg(value_enum)]
    name: PolicyChoice,
    /// Refuse requests at once whose first token is predicted to come later than this, in milliseconds.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    promise_ttft_ms: Option<u64>,
    /// Refuse requests at once whose tokens are predicted to come slower than this, in milliseconds: by the control
    /// plane's `--conductor-decode`.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    promise_tbt_ms: Option<u64>,
}

/// By what requests are placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PolicyChoice {
    /// By lot.
    Random,
    /// In turn.
    RoundRobin,
    /// The least loaded.
    LoadBalance,
    /// As SGLang's router does it.
    SglangLike,
    /// As Dynamo's router does it.
    DynamoLike,
    /// Algorithm 1 of the Mooncake paper without transfers.
    Local,
    /// Algorithm 1 of the Mooncake paper.
    #[value(name = "algorithm-1")]
    Algorithm1,
    /// Our own.
    Kvplane,
}

impl PolicyChoice {
    /// Its name in the protocol.
    pub(crate) const fn on_the_wire(self) -> PlacementPolicy {
        match self {
            Self::Random => PlacementPolicy::Random,
            Self::RoundRobin => PlacementPolicy::RoundRobin,
            Self::LoadBalance => PlacementPolicy::LoadBalance,
            Self::SglangLike => PlacementPolicy::SglangLike,
            Self::DynamoLike => PlacementPolicy::DynamoLike,
            Self::Local => PlacementPolicy::Local,
            Self::Algorithm1 => PlacementPolicy::Algorithm1,
            Self::Kvplane => PlacementPolicy::Kvplane,
        }
    }

    /// Its name on the command line.
    pub(crate) fn label(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn label_of(policy: PlacementPolicy) -> String {
        let known = Self::value_variants().iter().find(|known| known.on_the_wire() == policy);
        known.map_or_else(String::new, |known| known.label())
    }
}

impl From<PolicyChoice> for PolicyName {
    fn from(choice: PolicyChoice) -> Self {
        kvplane_server::policy_named(choice.on_the_wire())
    }
}

pub(super) fn run(link: &ControlLink, action: &Action) -> Result<(), Failure> {
    match action {
        Action::Show { json } => show(link, *json),
        Action::Hold { instance } => {
            let requests = link.call(HoldInstance { instance: instance.clone(), held: true })?.requests;
            println!("instance {instance} gets no new requests; {requests} are booked there");
            Ok(())
        }
        Action::Release { instance } => {
            link.call(HoldInstance { instance: instance.clone(), held: false })?;
            println!("instance {instance} takes requests");
            Ok(())
        }
        Action::Policy(policy) => {
            let ns = |ms: Option<u64>| ms.map_or(0, |ms| ms.saturating_mul(1_000_000));
            let (ttft_ns, tbt_ns) = (ns(policy.promise_ttft_ms), ns(policy.promise_tbt_ms));
            link.call(SetPlacement { policy: policy.name.on_the_wire(), ttft_ns, tbt_ns })?;
            println!("requests are placed by {}", policy.name.label());
            Ok(())
        }
    }
}

/// All instances as they are now.
fn table(link: &ControlLink) -> Result<InstanceTable, Failure> {
    let (tell, told) = mpsc::channel();
    link.stream(WatchInstances, move |table| {
        // One is enough; whoever asked may be gone.
        let _ = tell.send(table);
        false
    })?;
    told.recv_timeout(PATIENCE).map_err(|_| format!("no table of instances came within {PATIENCE:?}").into())
}

/// What there is of copies of hot prefixes, for programs.
fn in_json(copies: &CopiesShown) -> serde_json::Value {
    json!({
        "most_bytes": copies.most_bytes,
        "possible": copies.possible,
        "bytes": copies.bytes,
        "prefixes": copies.prefixes,
        "coming": copies.coming,
        "made": copies.made,
        "failed": copies.failed,
        "forgotten": copies.forgotten,
    })
}

/// The same, for people.
fn in_words(copies: &CopiesShown) -> String {
    match (copies.most_bytes, copies.possible) {
        (0, _) => "hot prefixes are not copied: --conductor-copies is 0".to_owned(),
        (_, false) => "hot prefixes are not copied: the cluster keeps one copy of everything".to_owned(),
        (most, true) => format!(
            "hot prefixes copied: {} with {} of {most} bytes, {} coming; {} made, {} failed, {} forgotten",
            copies.prefixes, copies.bytes, copies.coming, copies.made, copies.failed, copies.forgotten
        ),
    }
}

fn show(link: &ControlLink, as_json: bool) -> Result<(), Failure> {
    let (placement, copies, table) = (link.call(ShowPlacement)?, link.call(ShowCopies)?, table(link)?);
    let ms = |ns: u64| (ns > 0).then_some(ns / 1_000_000);
    let (ttft, tbt) = (ms(placement.set.ttft_ns), ms(placement.set.tbt_ns));
    let part = |part: InstancePart| match part {
        InstancePart::Prefill => "prefill",
        InstancePart::Decode => "decode",
        InstancePart::Mixed => "mixed",
    };
    let state = |name: &String, doubted: bool| match (placement.held.contains(name), doubted) {
        (true, _) => "held",
        (false, true) => "doubted",
        (false, false) => "takes",
    };
    if as_json {
        let rows = table.instances.iter().map(|row| {
            json!({
                "instance": row.instance,
                "tenant": row.tenant,
                "model": row.model,
                "part": part(row.part),
                "state": state(&row.instance, row.doubted),
                "prefills": row.prefills,
                "wait_ns": row.wait_ns,
                "decodes": row.decodes,
                "decode_tokens": row.decode_tokens,
            })
        });
        let rows: Vec<_> = rows.collect();
        let policy = PolicyChoice::label_of(placement.set.policy);
        println!(
            "{}",
            json!({
                "policy": policy,
                "promise_ttft_ms": ttft,
                "promise_tbt_ms": tbt,
                "copies": in_json(&copies),
                "instances": rows,
            })
        );
        return Ok(());
    }
    let promise = |what: &str, ms: Option<u64>| ms.map_or_else(String::new, |ms| format!(", {what} within {ms} ms"));
    println!(
        "requests are placed by {}{}{}",
        PolicyChoice::label_of(placement.set.policy),
        promise("first tokens", ttft),
        promise("tokens", tbt)
    );
    println!("{}", in_words(&copies));
    println!(
        "{:<24} {:<24} {:<8} {:<8} {:>8} {:>10} {:>8}",
        "instance", "model", "part", "state", "prefills", "wait ms", "decodes"
    );
    for row in &table.instances {
        println!(
            "{:<24} {:<24} {:<8} {:<8} {:>8} {:>10} {:>8}",
            row.instance,
            row.model,
            part(row.part),
            state(&row.instance, row.doubted),
            row.prefills,
            row.wait_ns / 1_000_000,
            row.decodes
        );
    }
    Ok(())
}
