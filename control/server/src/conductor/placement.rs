//! Operators' control of the Conductor: the placement policy with its objective, and held instances.

use kvplane_conductor::conductor::Conductor;
use kvplane_conductor::policy::{PolicyName, Slo};
use kvplane_rpc::placement::{Placement, PlacementPolicy, SetPlacement};
use kvplane_rpc::{Refusal, RefusalCode};

/// Converts a policy to the Conductor's type.
#[must_use]
pub const fn policy_named(policy: PlacementPolicy) -> PolicyName {
    match policy {
        PlacementPolicy::Random => PolicyName::Random,
        PlacementPolicy::RoundRobin => PolicyName::RoundRobin,
        PlacementPolicy::LoadBalance => PolicyName::LoadBalance,
        PlacementPolicy::SglangLike => PolicyName::SglangLike,
        PlacementPolicy::DynamoLike => PolicyName::DynamoLike,
        PlacementPolicy::Local => PolicyName::Local,
        PlacementPolicy::Algorithm1 => PolicyName::Algorithm1,
        PlacementPolicy::Kvplane => PolicyName::Ours,
    }
}

const fn policy_out(policy: PolicyName) -> PlacementPolicy {
    match policy {
        PolicyName::Random => PlacementPolicy::Random,
        PolicyName::RoundRobin => PlacementPolicy::RoundRobin,
        PolicyName::LoadBalance => PlacementPolicy::LoadBalance,
        PolicyName::SglangLike => PlacementPolicy::SglangLike,
        PolicyName::DynamoLike => PlacementPolicy::DynamoLike,
        PolicyName::Local => PlacementPolicy::Local,
        PolicyName::Algorithm1 => PlacementPolicy::Algorithm1,
        PolicyName::Ours => PlacementPolicy::Kvplane,
    }
}

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
    let held = held.map(|row| row.name.to_string()).collect();
    let set =
        SetPlacement { policy: policy_out(policy), ttft_ns: promise_out(slo.ttft_ns), tbt_ns: promise_out(slo.tbt_ns) };
    Placement { set, held }
}

/// Sets a policy with its objective: requests that would miss it are refused.
pub(super) fn set(conductor: &mut Conductor, policy: PlacementPolicy, slo: Slo, now_ns: u64) {
    conductor.set_placement(policy_named(policy), slo != Slo::NONE, slo, now_ns);
}

/// Hint at the policies with admission.
const HEED: &str = "objectives are kept by kvplane, local and algorithm-1";

/// Returns the objective of a call; refuses one that its policy would not keep.
pub(super) fn slo_in(call: &SetPlacement) -> Result<Slo, Refusal> {
    let slo = Slo { ttft_ns: promise_in(call.ttft_ns), tbt_ns: promise_in(call.tbt_ns) };
    if slo != Slo::NONE && !policy_named(call.policy).heeds_promises() {
        let reason = format!("{:?} rejects no request, so it keeps no objective; {HEED}", call.policy);
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(slo)
}
