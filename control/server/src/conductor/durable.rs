//! Durability of the Conductor over restarts and takeovers: records of instances, masters, seeds, the placement policy,
//! classes of requests and weights of flows.
//!
//! A call that changes one of them is refused while the state cannot be written, and durable before its answer. An
//! instance that is lost while the state cannot be written keeps its record until it can; if the process ends before,
//! the instance is restored and lost again.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use kvplane_cluster::{
    CapabilitiesRecord, Change, ClassRecord, ConductorKey, ConductorRecord, EventsRecord, InstanceDuty, InstanceRecord,
    MasterRecord, PlacementRecord, Record, RecordKey, SeedRecord, StageRecord, WeightRecord,
};
use kvplane_conductor::conductor::{
    ClassTerms, Conductor, ConductorConfig, ConductorError, Durable, DurableInstance, EventSource,
    InstanceCapabilities, InstancePart, PipelineMembership, PoolKey, RegisterInstance,
};
use kvplane_conductor::policy::{PlacementPolicy, Slo};

use super::master::MasterSpec;
use super::placement::{promise_in, promise_out};
use super::seeds::Seeds;
use super::subscriber::{EventOrigin, Feed};

/// Decoded records of the Conductor.
#[derive(Default)]
pub(crate) struct DecodedRecords {
    instances: Vec<DurableInstance>,
    masters: Vec<MasterSpec>,
    seeds: Vec<(PoolKey, String)>,
    /// Policy and objectives; the probability of promises is a flag, and not stored.
    placement: Option<(PlacementPolicy, Slo)>,
    classes: Vec<ClassRecord>,
    weights: Vec<WeightRecord>,
}

/// A Conductor with what was stored of it and beside it.
pub(crate) struct RestoredConductor {
    pub(crate) conductor: Conductor,
    /// Masters that were registered.
    pub(super) masters: Vec<MasterSpec>,
    pub(super) seeds: Seeds,
}

/// Reason why the Conductor cannot be restored from its records.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ConductorRestoreError {
    /// The stored placement policy is not known, as one of a later version is.
    Policy { policy: String },
    /// A stored instance exceeds the limits.
    Instance { name: String, source: ConductorError },
    /// A stored class or weight of a flow exceeds the limits.
    Service { name: String, source: ConductorError },
}

impl fmt::Display for ConductorRestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy { policy } => {
                write!(f, "the stored policy {policy:?} is not known to this version: use the version that stored it")
            }
            Self::Instance { name, source } => write!(f, "the stored instance {name:?}: {source}"),
            Self::Service { name, source } => write!(f, "the stored class or flow {name:?}: {source}"),
        }
    }
}

impl Error for ConductorRestoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Policy { .. } => None,
            Self::Instance { source, .. } | Self::Service { source, .. } => Some(source),
        }
    }
}

impl DecodedRecords {
    /// Picks the Conductor's records out of all records and decodes them.
    ///
    /// # Errors
    /// When a policy is unknown, as one of a later version is.
    pub(crate) fn of(records: &[Record]) -> Result<Self, ConductorRestoreError> {
        let mut restored = Self::default();
        let ours = records.iter().filter_map(|record| match record {
            Record::Conductor(record) => Some(record.clone()),
            _ => None,
        });
        for record in ours {
            match record {
                ConductorRecord::Instance(record) => restored.instances.push(instance_in(record)),
                ConductorRecord::Master(MasterRecord { name, tenant, model, block_tokens, publisher }) => {
                    restored.masters.push(MasterSpec { name, tenant, model, block_tokens, publisher });
                }
                ConductorRecord::Seed(SeedRecord { tenant, model, block_tokens, seed }) => {
                    restored.seeds.push((PoolKey { tenant, model, block_tokens }, seed));
                }
                ConductorRecord::Class(class) => restored.classes.push(class),
                ConductorRecord::Weight(weight) => restored.weights.push(weight),
                ConductorRecord::Placement(PlacementRecord { policy, ttft_ns, tbt_ns }) => {
                    let Some(policy) = PlacementPolicy::labelled(&policy) else {
                        return Err(ConductorRestoreError::Policy { policy });
                    };
                    let slo = Slo { ttft_ns: promise_in(ttft_ns), tbt_ns: promise_in(tbt_ns), ..Slo::NONE };
                    restored.placement = Some((policy, slo));
                }
            }
        }
        Ok(restored)
    }

    /// Restores a Conductor from them. For `grace` no instance is suspect for its silence. A placement policy that an
    /// operator has set overrides the configured one.
    ///
    /// # Errors
    /// When the limits do not allow all of them.
    pub(crate) fn restore(
        self,
        mut config: ConductorConfig,
        first: u64,
        grace: Duration,
    ) -> Result<RestoredConductor, ConductorRestoreError> {
        let graced_ns = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        if let Some((policy, slo)) = self.placement {
            let slo = Slo { probability: config.scheduler.slo.probability, ..slo };
            if (policy, slo) != (config.policy, config.scheduler.slo) {
                tracing::info!(
                    policy = policy.label(),
                    "the policy that an operator set last overrides the configuration"
                );
            }
            (config.policy, config.refuses, config.scheduler.slo) = (policy, slo.is_some(), slo);
        }
        let mut conductor = Conductor::new(config, first);
        for ClassRecord { name, priority, ttft_ns } in self.classes {
            let terms = ClassTerms { priority, ttft_ns: (ttft_ns > 0).then_some(ttft_ns) };
            let restored = conductor.service().restore_class(&name, terms);
            restored.map_err(|source| ConductorRestoreError::Service { name, source })?;
        }
        for WeightRecord { tenant, flow, weight } in self.weights {
            let restored = conductor.service().restore_weight(&tenant, &flow, weight);
            restored.map_err(|source| ConductorRestoreError::Service { name: flow, source })?;
        }
        for instance in self.instances {
            let name = instance.spec.instance.clone();
            conductor
                .restore(instance, graced_ns)
                .map_err(|source| ConductorRestoreError::Instance { name, source })?;
        }
        Ok(RestoredConductor { conductor, masters: self.masters, seeds: Seeds::restored(self.seeds) })
    }
}

/// Returns the event source of an instance, if it publishes events.
pub(super) fn followed(spec: &RegisterInstance) -> Option<EventOrigin> {
    let source = spec.events.clone()?;
    let (instance, incarnation, block_tokens) = (spec.instance.clone(), spec.incarnation, spec.block_tokens);
    Some(EventOrigin { source, feed: Feed::Engine { instance, incarnation, block_tokens } })
}

/// Returns the change that stores a master.
pub(super) fn master_change(spec: &MasterSpec) -> Change {
    let MasterSpec { name, tenant, model, block_tokens, publisher } = spec.clone();
    let record = MasterRecord { name, tenant, model, block_tokens, publisher };
    Change::Put(Record::Conductor(ConductorRecord::Master(record)))
}

/// Returns the change that removes a master.
pub(super) fn master_gone(name: &str) -> Change {
    Change::Remove(RecordKey::Conductor(ConductorKey::Master(name.to_owned())))
}

/// Returns the record's change for one of the Conductor's.
pub(super) fn change_out(durable: Durable) -> Change {
    let put = |record| Change::Put(Record::Conductor(record));
    match durable {
        Durable::Gone(name) => Change::Remove(RecordKey::Conductor(ConductorKey::Instance(name.to_string()))),
        Durable::Instance(instance) => put(ConductorRecord::Instance(instance_out(*instance))),
        Durable::Class(name, None) => Change::Remove(RecordKey::Conductor(ConductorKey::Class(name))),
        Durable::Class(name, Some(ClassTerms { priority, ttft_ns })) => {
            put(ConductorRecord::Class(ClassRecord { name, priority, ttft_ns: ttft_ns.unwrap_or(0) }))
        }
        Durable::Weight { tenant, flow, weight } => {
            let record = WeightRecord { tenant, flow, weight: weight.unwrap_or_default() };
            match weight {
                Some(_) => put(ConductorRecord::Weight(record)),
                None => Change::Remove(RecordKey::Conductor(ConductorKey::Weight(record.digest()))),
            }
        }
        Durable::Placement(policy, slo) => put(ConductorRecord::Placement(PlacementRecord {
            policy: policy.label().to_owned(),
            ttft_ns: promise_out(slo.ttft_ns),
            tbt_ns: promise_out(slo.tbt_ns),
        })),
    }
}

fn instance_out(instance: DurableInstance) -> InstanceRecord {
    let DurableInstance { spec, has_vllm_hashes, capabilities, pool_token_bytes, held, reports_cache } = instance;
    let events = |EventSource { publisher, replay, topic }| EventsRecord { publisher, replay, topic, has_vllm_hashes };
    InstanceRecord {
        name: spec.instance,
        incarnation: spec.incarnation,
        tenant: spec.tenant,
        model: spec.model,
        block_tokens: spec.block_tokens,
        token_bytes: spec.token_bytes,
        pool_token_bytes,
        duty: match spec.part {
            InstancePart::Prefill => InstanceDuty::Prefill,
            InstancePart::Decode => InstanceDuty::Decode,
            InstancePart::Mixed => InstanceDuty::Mixed,
        },
        capacity_tokens: spec.capacity_tokens,
        report_ns: spec.report_ns,
        address: spec.address,
        held,
        reports_cache,
        events: spec.events.map(events),
        capabilities: capabilities_out(capabilities),
    }
}

fn capabilities_out(capabilities: InstanceCapabilities) -> Option<Box<CapabilitiesRecord>> {
    if capabilities == InstanceCapabilities::default() {
        return None;
    }
    let InstanceCapabilities { layer_wise, layers, stage } = capabilities;
    let stage = stage.map(|PipelineMembership { group, stage, stages, chunk_tokens, activation_bytes }| StageRecord {
        group,
        stage,
        stages,
        chunk_tokens,
        activation_bytes,
    });
    Some(Box::new(CapabilitiesRecord { layer_wise, layers, stage }))
}

fn capabilities_in(record: Option<CapabilitiesRecord>) -> InstanceCapabilities {
    let Some(CapabilitiesRecord { layer_wise, layers, stage }) = record else { return InstanceCapabilities::default() };
    let stage = stage.map(|StageRecord { group, stage, stages, chunk_tokens, activation_bytes }| PipelineMembership {
        group,
        stage,
        stages,
        chunk_tokens,
        activation_bytes,
    });
    InstanceCapabilities { layer_wise, layers, stage }
}

fn instance_in(record: InstanceRecord) -> DurableInstance {
    let has_vllm_hashes = record.events.as_ref().is_some_and(|events| events.has_vllm_hashes);
    let capabilities = capabilities_in(record.capabilities.map(|capabilities| *capabilities));
    let events = |EventsRecord { publisher, replay, topic, .. }| EventSource { publisher, replay, topic };
    let spec = RegisterInstance {
        instance: record.name,
        incarnation: record.incarnation,
        tenant: record.tenant,
        model: record.model,
        block_tokens: record.block_tokens,
        token_bytes: record.token_bytes,
        part: match record.duty {
            InstanceDuty::Prefill => InstancePart::Prefill,
            InstanceDuty::Decode => InstancePart::Decode,
            InstanceDuty::Mixed => InstancePart::Mixed,
        },
        capacity_tokens: record.capacity_tokens,
        report_ns: record.report_ns,
        address: record.address,
        events: record.events.map(events),
    };
    let (pool_token_bytes, held, reports_cache) = (record.pool_token_bytes, record.held, record.reports_cache);
    DurableInstance { spec, has_vllm_hashes, capabilities, pool_token_bytes, held, reports_cache }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_round_trip() {
        let spec = |events| RegisterInstance {
            instance: "e".to_owned(),
            incarnation: 7,
            tenant: "t".to_owned(),
            model: "m".to_owned(),
            block_tokens: 16,
            token_bytes: 0,
            part: InstancePart::Prefill,
            capacity_tokens: 5,
            report_ns: 1_000_000_000,
            address: "h:1".to_owned(),
            events,
        };
        let publisher =
            EventSource { publisher: "tcp://h:2".to_owned(), replay: "tcp://h:3".to_owned(), topic: "kv".to_owned() };
        for (part, held, events) in [
            (InstancePart::Prefill, true, None),
            (InstancePart::Decode, false, Some(publisher.clone())),
            (InstancePart::Mixed, true, None),
        ] {
            let has_vllm_hashes = events.is_some();
            let spec = RegisterInstance { part, ..spec(events) };
            let group = "g".to_owned();
            let stage = PipelineMembership { group, stage: 1, stages: 2, chunk_tokens: 1_024, activation_bytes: 3 };
            for capabilities in [
                InstanceCapabilities::default(),
                InstanceCapabilities { layer_wise: true, layers: 9, stage: None },
                InstanceCapabilities { layer_wise: false, layers: 0, stage: Some(stage) },
            ] {
                let (spec, pool_token_bytes, reports_cache) = (spec.clone(), 9, !held);
                let instance =
                    DurableInstance { spec, has_vllm_hashes, capabilities, pool_token_bytes, held, reports_cache };
                assert_eq!(instance_in(instance_out(instance.clone())), instance);
            }
        }
        for policy in PlacementPolicy::ALL {
            let slo = Slo { ttft_ns: 3, ..Slo::NONE };
            let Change::Put(record) = change_out(Durable::Placement(policy, slo)) else { panic!("a record") };
            assert_eq!(DecodedRecords::of(&[record]).expect("known").placement, Some((policy, slo)));
        }
        let later = PlacementRecord { policy: "later".to_owned(), ttft_ns: 0, tbt_ns: 0 };
        let later = Record::Conductor(ConductorRecord::Placement(later));
        assert!(DecodedRecords::of(&[later]).is_err_and(|error| error.to_string().contains("later")));
    }
}
