//! Operators' control of the Conductor: the placement policy with its objective, and held instances.

use kvplane_conductor::conductor::Conductor;
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use kvplane_rpc::placement::{Placement, ServiceShown, SetPlacement, SetWeight};
use kvplane_rpc::{Refusal, RefusalCode};

/// Converts an objective: none is 0 on the wire, and the longest time in the Conductor.
pub(super) const fn promise_in(ns: u64) -> u64 {
    if ns == 0 { u64::MAX } else { ns }
}

pub(super) const fn promise_out(ns: u64) -> u64 {
    if ns == u64::MAX { 0 } else { ns }
}

/// Returns what an operator set, or the configuration: the policy, the objective, and the held instances.
pub(super) fn shown(conductor: &mut Conductor, now_ns: u64) -> Placement {
    let (policy, _, slo) = conductor.placement();
    let held = conductor.table(now_ns).instances.into_iter().filter(|row| row.held);
    let held = held.map(|row| row.status.instance.to_string()).collect();
    let set = SetPlacement { policy, ttft_ns: promise_out(slo.ttft_ns), tbt_ns: promise_out(slo.tbt_ns) };
    Placement { set, held }
}

/// Returns the classes, and the weights that were set.
pub(super) fn service(conductor: &mut Conductor) -> ServiceShown {
    let levels = conductor.service();
    let classes = levels.classes().iter().map(|(class, terms)| (class.clone(), *terms)).collect();
    let weights = levels.weights().map(|(tenant, flow, weight)| SetWeight {
        tenant: tenant.to_owned(),
        flow: flow.to_owned(),
        weight: Some(weight),
    });
    ServiceShown { classes, weights: weights.collect() }
}

/// Sets a policy with its objective: requests that would miss it are refused. The probability of promises stays.
pub(super) fn set(conductor: &mut Conductor, policy: PlacementPolicy, slo: Slo, now_ns: u64) {
    let (_, _, former) = conductor.placement();
    let slo = Slo { probability: former.probability, ..slo };
    conductor.set_placement(policy, slo.is_some(), slo, now_ns);
}

/// Returns the objective of a call, with the default probability; refuses one that its policy would not keep.
pub(super) fn slo_in(call: &SetPlacement) -> Result<Slo, Refusal> {
    let slo = Slo { ttft_ns: promise_in(call.ttft_ns), tbt_ns: promise_in(call.tbt_ns), ..Slo::NONE };
    if slo.is_some() && !call.policy.heeds_promises() {
        let policy = call.policy.label();
        let reason = format!("policy {policy} rejects no request, so it keeps no objective; only kvplane keeps them");
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(slo)
}
