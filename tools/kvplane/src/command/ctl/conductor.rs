//! `kvplane ctl conductor`: shows the instances of the Conductor and their placement policy, and changes them.

use std::sync::mpsc;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use kvplane::ControlLink;
use kvplane::rpc::conductor::{
    AssignedGroup, Assignment, ExplainPlacement, InstanceTable, ModelStatus, PlacementExplained, ScheduleReply,
    WatchInstances,
};
use kvplane::rpc::placement::{
    ClassTerms, CopiesShown, DEFAULT_FLOW_WEIGHT, FeedShown, HoldInstance, LimitUse, MAX_FLOW_WEIGHT, MAX_PRIORITY,
    PlacementPolicy, ServiceShown, SetClass, SetPlacement, SetWeight, ShowCopies, ShowFeeds, ShowLimits, ShowPlacement,
    ShowService,
};
use serde_json::json;

use crate::command::Failure;

/// Time limit for the first table of instances.
const PATIENCE: Duration = Duration::from_secs(5);

/// Operations on the Conductor.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Show the placement policy, the objectives, the limits and the instances.
    Show {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show where a request was placed, where it would be placed now, and the cost of each instance; of a pipeline
    /// group, its stages.
    Explain {
        /// Id that its scheduler gave the request.
        request: String,
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
    /// Set the priority and the objective of a class of requests; it is durable.
    Class(Class),
    /// Set the weight of a flow, in whose proportion flows get prefill time; it is durable.
    Flow(Flow),
}

/// Class of requests to set.
#[derive(Args)]
pub(crate) struct Class {
    /// Name of the class, which requests give.
    name: String,
    /// Priority of its requests among those of the flows whose turn it is; higher ones go first.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i8).range(-i64::from(MAX_PRIORITY)..=i64::from(MAX_PRIORITY)))]
    priority: i8,
    /// Objective for the time to first token (TTFT), in milliseconds, instead of that of all requests: those predicted
    /// to miss it are rejected at once. Default: that of all requests.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    promise_ttft_ms: Option<u64>,
    /// Remove the class: requests that give it are rejected from then on.
    #[arg(long, conflicts_with_all = ["priority", "promise_ttft_ms"])]
    remove: bool,
}

/// Flow whose weight is set.
#[derive(Args)]
pub(crate) struct Flow {
    /// Name of the flow, which requests give; empty for that of requests without one.
    name: String,
    /// Its weight. Default: 100, which all flows have that were not set.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FLOW_WEIGHT)))]
    weight: Option<u32>,
    /// Tenant whose requests the flow has. Default: the default tenant.
    #[arg(long, default_value = "")]
    tenant: String,
}

/// Placement policy to set.
#[derive(Args)]
pub(crate) struct Policy {
    /// Name of the policy.
    #[arg(value_parser = policies())]
    name: PlacementPolicy,
    /// Objective for the time to first token (TTFT), in milliseconds: requests predicted to miss it are rejected at
    /// once. Default: none.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    promise_ttft_ms: Option<u64>,
    /// Objective for the time between tokens (TBT), in milliseconds: requests predicted to miss it are rejected at
    /// once, by the learned duration of decode steps. Default: none.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    promise_tbt_ms: Option<u64>,
}

/// Parses the label of a placement policy.
pub(crate) fn policies() -> impl TypedValueParser<Value = PlacementPolicy> {
    let shown = PlacementPolicy::ALL.map(|policy| {
        PossibleValue::new(policy.label()).help(match policy {
            PlacementPolicy::Random => "A random instance",
            PlacementPolicy::RoundRobin => "Each instance in turn",
            PlacementPolicy::LoadBalance => "The least loaded instance",
            PlacementPolicy::Kvplane => "kvplane's own policy",
        })
    });
    PossibleValuesParser::new(shown).try_map(|label| PlacementPolicy::labelled(&label).ok_or("no such policy"))
}

pub(super) fn run(link: &ControlLink, action: &Action) -> Result<(), Failure> {
    match action {
        Action::Show { json } => show(link, *json),
        Action::Explain { request } => {
            explain(request, &link.call(ExplainPlacement { request: request.clone() })?);
            Ok(())
        }
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
            link.call(SetPlacement { policy: policy.name, ttft_ns, tbt_ns })?;
            println!("requests are placed by {}", policy.name.label());
            Ok(())
        }
        Action::Class(class) => {
            let ttft_ns = class.promise_ttft_ms.map(|ms| ms.saturating_mul(1_000_000));
            let terms = (!class.remove).then_some(ClassTerms { priority: class.priority, ttft_ns });
            link.call(SetClass { class: class.name.clone(), terms })?;
            println!("class {:?}: {}", class.name, terms.map_or_else(|| "removed".to_owned(), in_terms));
            Ok(())
        }
        Action::Flow(Flow { name, weight, tenant }) => {
            link.call(SetWeight { tenant: tenant.clone(), flow: name.clone(), weight: *weight })?;
            println!("flow {name:?}: weight {}", weight.unwrap_or(DEFAULT_FLOW_WEIGHT));
            Ok(())
        }
    }
}

/// Prints a placement, with the stages of a pipeline group.
fn print_assignment(what: &str, assignment: &Assignment, group: Option<&AssignedGroup>) {
    let ms = |ns: u64| ns / 1_000_000;
    let decode = assignment.decode.as_ref().map(|decode| format!(", decode on {decode}")).unwrap_or_default();
    println!(
        "{what}: prefill on {}{decode}; {} tokens reused, waits {} ms, takes {} ms",
        assignment.prefill,
        assignment.reuse_tokens,
        ms(assignment.wait_ns),
        ms(assignment.prefill_ns)
    );
    let Some(group) = group else { return };
    println!("  pipeline group {}, chunks of {} tokens", group.name, group.chunk_tokens);
    for (at, stage) in group.stages.iter().enumerate() {
        println!(
            "  stage {at}: {}, layers {} to {}, fetches {} tokens, waits {} ms, busy for {} ms",
            stage.instance,
            stage.first_layer,
            stage.first_layer + stage.layers - 1,
            stage.load_tokens,
            ms(stage.wait_ns),
            ms(stage.busy_ns)
        );
    }
}

/// Prints the explanation of a placement.
fn explain(request: &str, found: &PlacementExplained) {
    match &found.explained.answer {
        ScheduleReply::Assigned(assignment) => print_assignment(request, assignment, found.group.as_ref()),
        ScheduleReply::AssignedGroup(assigned) => {
            print_assignment(request, &assigned.assignment, Some(&assigned.group));
        }
        ScheduleReply::Queued { .. } => println!("{request}: queued"),
        ScheduleReply::Refused { why, .. } => println!("{request}: rejected, {why:?}"),
    }
    if let Some(now) = &found.explained.now {
        print_assignment("now", now, found.group_now.as_ref());
    }
    println!("all holders together have {} tokens", found.explained.pooled_tokens);
    for candidate in &found.explained.candidates {
        println!(
            "{}: {}has {} tokens, free in {} ms, its NIC in {} ms, {:.2} times the model's durations",
            candidate.instance,
            if candidate.takes { "" } else { "not to be chosen, " },
            candidate.held_tokens,
            candidate.wait_ns / 1_000_000,
            candidate.egress_wait_ns / 1_000_000,
            f64::from(candidate.factor_permille) / 1000.0
        );
    }
}

/// Formats the terms of a class as text.
fn in_terms(terms: ClassTerms) -> String {
    let objective = terms.ttft_ns.map(|ns| format!(", first tokens within {} ms", ns / 1_000_000));
    format!("priority {}{}", terms.priority, objective.unwrap_or_default())
}

/// Formats classes and weights as JSON.
fn service_json(service: &ServiceShown) -> serde_json::Value {
    let classes = service.classes.iter().map(|(class, terms)| {
        let ttft_ms = terms.ttft_ns.map(|ns| ns / 1_000_000);
        json!({ "class": class, "priority": terms.priority, "promise_ttft_ms": ttft_ms })
    });
    let flows = service.weights.iter().map(|SetWeight { tenant, flow, weight }| {
        json!({ "tenant": tenant, "flow": flow, "weight": weight.unwrap_or(DEFAULT_FLOW_WEIGHT) })
    });
    json!({ "classes": classes.collect::<Vec<_>>(), "flows": flows.collect::<Vec<_>>() })
}

/// Prints classes and weights, if any were set.
fn print_service(service: &ServiceShown) {
    for (class, terms) in &service.classes {
        println!("class {class:?}: {}", in_terms(*terms));
    }
    for SetWeight { tenant, flow, weight } in &service.weights {
        let of = if tenant.is_empty() { String::new() } else { format!(" of tenant {tenant:?}") };
        println!("flow {flow:?}{of}: weight {}", weight.unwrap_or(DEFAULT_FLOW_WEIGHT));
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

/// Formats how much of an instance's cache is known.
fn cache_in_words(degraded: bool, feed: Option<&FeedShown>) -> String {
    // A feed tells of the same moment as its numbers.
    match (feed.map_or(degraded, |feed| feed.degraded), feed) {
        (false, None) => "not reported".to_owned(),
        (false, Some(_)) => "known".to_owned(),
        (true, None) => "degraded".to_owned(),
        (true, Some(feed)) if feed.unconfirmed => format!("degraded: unconfirmed at batch {}", feed.next),
        (true, Some(feed)) if feed.newest > feed.next => {
            format!("degraded: {} of {} batches", feed.next, feed.newest)
        }
        (true, Some(_)) => "degraded: earlier blocks are not known".to_owned(),
    }
}

/// Formats what is learned of a model's decodes as JSON.
fn decode_in_json(model: &ModelStatus) -> serde_json::Value {
    let decode = &model.decode;
    json!({
        "tenant": model.tenant,
        "model": model.model,
        "prefill_error_permille": model.error_permille,
        "decode_base_ns": decode.base_ns,
        "decode_token_ps": decode.token_ps,
        "decode_request_ns": decode.request_ns,
        "decode_reports": decode.reports,
        "decode_error_permille": decode.error_permille,
        "output_p50": decode.output_p50,
        "output_p90": decode.output_p90,
        "output_error_permille": decode.output_error_permille,
        "output_within_permille": decode.output_within_permille,
        "sessions": model.sessions,
    })
}

/// Formats what is learned of a model's decodes as text.
fn decode_in_words(model: &ModelStatus) -> String {
    let decode = &model.decode;
    let percent = |permille: u32| f64::from(permille) / 10.0;
    let learned = match decode.reports {
        0 => "initial constants".to_owned(),
        reports => format!("error {:.1} %, {reports} reports", percent(decode.error_permille)),
    };
    let outputs = match decode.output_p90 {
        0 => "outputs not known yet".to_owned(),
        p90 => format!(
            "outputs p50 {}, p90 {p90} tokens, error {:.1} %",
            decode.output_p50,
            percent(decode.output_error_permille)
        ),
    };
    format!(
        "model {}: decode step {:.1} ms + {:.1} ns a token + {:.1} us a request ({learned}); {outputs}; sessions {}",
        model.model,
        decode.base_ns as f64 / 1e6,
        decode.token_ps as f64 / 1e3,
        decode.request_ns as f64 / 1e3,
        model.sessions
    )
}

/// Formats limits and their use as JSON.
fn limits_in_json(limits: &LimitUse) -> serde_json::Value {
    let of = |(used, most): (u64, u64)| json!({ "used": used, "most": most });
    json!({
        "models": of(limits.models),
        "instances": of(limits.instances),
        "queued": of(limits.queued),
        "requests": of(limits.requests),
        "prompt_blocks": of(limits.prompt_blocks),
        "wait_ms": limits.wait_ns / 1_000_000,
    })
}

/// Formats limits and their use as text.
fn limits_in_words(limits: &LimitUse) -> String {
    let of = |(used, most): (u64, u64)| format!("{used} of {most}");
    format!(
        "limits: models {}, instances {}, requests {}, of a model queued {}, blocks of prompts {}, waits {} s",
        of(limits.models),
        of(limits.instances),
        of(limits.requests),
        of(limits.queued),
        of(limits.prompt_blocks),
        limits.wait_ns / 1_000_000_000
    )
}

fn show(link: &ControlLink, as_json: bool) -> Result<(), Failure> {
    let (placement, copies, table) = (link.call(ShowPlacement)?, link.call(ShowCopies)?, table(link)?);
    let (service, limits) = (link.call(ShowService)?, link.call(ShowLimits)?);
    let feeds = link.call(ShowFeeds)?.feeds;
    let feed = |name: &str| feeds.binary_search_by(|feed| (*feed.instance).cmp(name)).ok().map(|at| &feeds[at]);
    let ms = |ns: u64| (ns > 0).then_some(ns / 1_000_000);
    let (ttft, tbt) = (ms(placement.set.ttft_ns), ms(placement.set.tbt_ns));
    let state = |name: &str, suspect: bool| match (placement.held.iter().any(|held| held == name), suspect) {
        (true, _) => "held",
        (false, true) => "suspect",
        (false, false) => "takes",
    };
    if as_json {
        let rows = table.instances.iter().map(|row| {
            json!({
                "instance": &*row.instance,
                "tenant": row.tenant,
                "model": row.model,
                "part": row.part.name(),
                "state": state(&row.instance, row.suspect),
                "degraded": row.degraded,
                "cache": feed(&row.instance).map(|feed| json!({
                    "next": feed.next,
                    "newest": feed.newest,
                    "unconfirmed": feed.unconfirmed,
                })),
                "prefills": row.prefills,
                "wait_ns": row.wait_ns,
                "decodes": row.decodes,
                "decode_tokens": row.decode_tokens,
                "decode_factor_permille": row.decode_factor_permille,
            })
        });
        let rows: Vec<_> = rows.collect();
        let policy = placement.set.policy.label();
        println!(
            "{}",
            json!({
                "policy": policy,
                "promise_ttft_ms": ttft,
                "promise_tbt_ms": tbt,
                "service": service_json(&service),
                "copies": in_json(&copies),
                "limits": limits_in_json(&limits),
                "models": table.models.iter().map(decode_in_json).collect::<Vec<_>>(),
                "instances": rows,
            })
        );
        return Ok(());
    }
    let promise = |what: &str, ms: Option<u64>| ms.map_or_else(String::new, |ms| format!(", {what} within {ms} ms"));
    println!(
        "requests are placed by {}{}{}",
        placement.set.policy.label(),
        promise("first tokens", ttft),
        promise("tokens", tbt)
    );
    println!("{}\n{}", in_words(&copies), limits_in_words(&limits));
    print_service(&service);
    table.models.iter().for_each(|model| println!("{}", decode_in_words(model)));
    println!(
        "{:<24} {:<24} {:<8} {:<8} {:>8} {:>10} {:>8}  cache",
        "instance", "model", "part", "state", "prefills", "wait ms", "decodes"
    );
    for row in &table.instances {
        println!(
            "{:<24} {:<24} {:<8} {:<8} {:>8} {:>10} {:>8}  {}",
            row.instance,
            row.model,
            row.part.name(),
            state(&row.instance, row.suspect),
            row.prefills,
            row.wait_ns / 1_000_000,
            row.decodes,
            cache_in_words(row.degraded, feed(&row.instance))
        );
    }
    Ok(())
}
