//! `kvplane ctl conductor`: shows the instances of the Conductor and their placement policy, and changes them.

use std::sync::mpsc;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use kvplane::ControlLink;
use kvplane::rpc::conductor::{InstancePart, InstanceTable, WatchInstances};
use kvplane::rpc::placement::{CopiesShown, HoldInstance, PlacementPolicy, SetPlacement, ShowCopies, ShowPlacement};
use kvplane_conductor::policy::PolicyName;
use serde_json::json;

use crate::command::Failure;

/// Time limit for the first table of instances.
const PATIENCE: Duration = Duration::from_secs(5);

/// Operations on the Conductor.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Show the placement policy, the objectives and the instances.
    Show {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Hold an instance: it gets no new requests, finishes those that it has, and other instances may still fetch from
    /// it.
    Hold {
        /// Name of the instance.
        instance: String,
    },
    /// Let a held instance take requests again.
    Release {
        /// Name of the instance.
        instance: String,
    },
    /// Set the placement policy for every model; it is durable.
    Policy(Policy),
}

/// Placement policy to set.
#[derive(Args)]
pub(crate) struct Policy {
    /// Name of the policy.
    #[arg(value_enum)]
    name: PolicyChoice,
    /// Objective for the time to first token (TTFT), in milliseconds: requests predicted to miss it are rejected at
    /// once. Default: none.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    promise_ttft_ms: Option<u64>,
    /// Objective for the time between tokens (TBT), in milliseconds: requests predicted to miss it are rejected at
    /// once, by the control plane's `--conductor-decode`. Default: none.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    promise_tbt_ms: Option<u64>,
}

/// Placement policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PolicyChoice {
    /// A random instance.
    Random,
    /// Each instance in turn.
    RoundRobin,
    /// The least loaded instance.
    LoadBalance,
    /// Like SGLang's router.
    SglangLike,
    /// Like Dynamo's router.
    DynamoLike,
    /// Algorithm 1 of the Mooncake paper, without transfers.
    Local,
    /// Algorithm 1 of the Mooncake paper, with transfers.
    #[value(name = "algorithm-1")]
    Algorithm1,
    /// kvplane's own policy.
    Kvplane,
}

impl PolicyChoice {
    /// Returns the policy's value in the protocol.
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

    /// Returns the policy's name on the command line.
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

/// Returns the present table of instances.
fn table(link: &ControlLink) -> Result<InstanceTable, Failure> {
    let (tell, told) = mpsc::channel();
    link.stream(WatchInstances, move |table| {
        // One table is enough. The send fails if the caller has timed out.
        let _ = tell.send(table);
        false
    })?;
    told.recv_timeout(PATIENCE).map_err(|_| format!("no table of instances arrived within {PATIENCE:?}").into())
}

/// Formats the state of replicas of hot prefixes as JSON.
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

/// Formats the state of replicas of hot prefixes as text.
fn in_words(copies: &CopiesShown) -> String {
    match (copies.most_bytes, copies.possible) {
        (0, _) => "hot prefixes are not replicated: --conductor-replicas is 0".to_owned(),
        (_, false) => {
            "hot prefixes are not replicated: slots have one owner, see kvplane control --replicas".to_owned()
        }
        (most, true) => format!(
            "hot prefixes replicated: {} with {} of {most} bytes, {} in flight; {} done, {} failed, {} forgotten",
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
    let state = |name: &String, suspect: bool| match (placement.held.contains(name), suspect) {
        (true, _) => "held",
        (false, true) => "suspect",
        (false, false) => "takes",
    };
    if as_json {
        let rows = table.instances.iter().map(|row| {
            json!({
                "instance": row.instance,
                "tenant": row.tenant,
                "model": row.model,
                "part": part(row.part),
                "state": state(&row.instance, row.suspect),
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
            state(&row.instance, row.suspect),
            row.prefills,
            row.wait_ns / 1_000_000,
            row.decodes
        );
    }
    Ok(())
}
