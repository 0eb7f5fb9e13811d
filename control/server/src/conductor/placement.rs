//! Operators' control of the Conductor: held instances, and the placement policy.

use kvplane_conductor::policy::{PolicyName, Slo};
use kvplane_rpc::message::EmptyReply;
use kvplane_rpc::placement::{HoldInstance, InstanceHeld, Placement, PlacementPolicy, SetPlacement};
use kvplane_rpc::{Refusal, RefusalCode};

use super::Host;

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

/// Hint at the policies with admission.
const HEED: &str = "objectives are kept by kvplane, local and algorithm-1";

impl Host {
    pub(crate) fn hold(&self, call: &HoldInstance) -> Result<InstanceHeld, Refusal> {
        let requests = self.change(|core, now_ns| core.conductor.hold(&call.instance, call.held, now_ns))?;
        tracing::info!(
            instance = call.instance,
            held = call.held,
            requests,
            "an operator held or released an instance"
        );
        Ok(InstanceHeld { requests })
    }

    pub(crate) fn set_placement(&self, call: &SetPlacement) -> Result<EmptyReply, Refusal> {
        let slo = Slo { ttft_ns: promise_in(call.ttft_ns), tbt_ns: promise_in(call.tbt_ns) };
        let refuses = slo != Slo::NONE;
        if refuses && !policy_named(call.policy).heeds_promises() {
            let reason = format!("{:?} rejects no request, so it keeps no objective; {HEED}", call.policy);
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        self.change(|core, now_ns| {
            core.conductor.set_placement(policy_named(call.policy), refuses, slo, now_ns);
            Ok(())
        })?;
        tracing::info!(policy = ?call.policy, call.ttft_ns, call.tbt_ns, "an operator changed the placement policy");
        Ok(EmptyReply)
    }

    pub(crate) fn placement(&self) -> Placement {
        let now_ns = self.now_ns();
        let mut core = self.core();
        let (policy, _, slo) = core.conductor.placement();
        let held = core.conductor.table(now_ns).instances.into_iter().filter(|row| row.held);
        let held = held.map(|row| row.name.to_string()).collect();
        let set = SetPlacement {
            policy: policy_out(policy),
            ttft_ns: promise_out(slo.ttft_ns),
            tbt_ns: promise_out(slo.tbt_ns),
        };
        Placement { set, held }
    }
}
