//! Durable records of the Conductor: registered instances, followed masters, hash seeds, placement policy, classes of
//! requests, weights of flows.
//!
//! The cluster's state machine keeps none of these records; it only passes them through. The Conductor's host persists
//! them before it replies to a registration, and restores them after a restart or a takeover. The prefix index is not
//! among them: the publishers of events rebuild it.
//!
//! ```text
//! instance:  16 u8 | incarnation u64 | block_tokens u32 | token_bytes u64 | pool_token_bytes u64 | part u8 |
//!            capacity_tokens u64 | report_ns u64 | flags u8 | name, tenant, model, address: long texts |
//!            with events: publisher, replay, topic: long texts |
//!            with capabilities: layers u32 | layer-wise u8 | 1 u8, stage u32, stages u32, chunk_tokens u32,
//!            activation_bytes u32, group: long text; or 0 u8
//!            flags: 1 held, 2 reports its cache, 4 has events, 8 events are vLLM's, 16 has capabilities
//! master:    17 u8 | block_tokens u32 | name, tenant, model, publisher: long texts
//! placement: 18 u8 | ttft_ns u64 | tbt_ns u64 | policy text
//! seed:      19 u8 | block_tokens u32 | tenant, model, seed: long texts
//! class:     20 u8 | priority u8, two's complement | ttft_ns u64, 0 for none | name: long text
//! weight:    21 u8 | weight u32 | tenant, flow: long texts
//! ```

use kvplane_proto::Digest;
use kvplane_proto::map::codec::{DecodeError, Reader, put_long_text, put_text};

/// Maximum length of each text in these records, in bytes.
pub const MAX_CONDUCTOR_TEXT_BYTES: usize = 512;
/// Maximum length of a policy's name, in bytes.
const MAX_POLICY_NAME_BYTES: usize = 64;

/// Durable record of the Conductor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConductorRecord {
    /// A registered instance.
    Instance(InstanceRecord),
    /// Store of another kind whose events the Conductor follows.
    Master(MasterRecord),
    /// Placement policy and objectives that an operator set.
    Placement(PlacementRecord),
    /// The hash seed of a model.
    Seed(SeedRecord),
    /// A class of requests.
    Class(ClassRecord),
    /// The weight of a flow.
    Weight(WeightRecord),
}

/// Key under which a record of the Conductor is stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConductorKey {
    /// The instance of this name.
    Instance(String),
    /// The master of this name.
    Master(String),
    /// The placement: there is one.
    Placement,
    /// Digest of tenant, model and block size: see [`SeedRecord::digest`].
    Seed(u128),
    /// The class of this name.
    Class(String),
    /// Digest of tenant and flow: see [`WeightRecord::digest`].
    Weight(u128),
}

/// The phases of a request that an instance runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceDuty {
    /// Prefills.
    Prefill,
    /// Decodes.
    Decode,
    /// Both.
    Mixed,
}

/// A registered instance.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct InstanceRecord {
    /// Name, unique among all instances.
    pub name: String,
    pub incarnation: u64,
    /// Tenant that the instance serves; empty for the default tenant.
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV cache per token as registered; 0 for the default.
    pub token_bytes: u64,
    /// Bytes of KV cache per token of the instance's model at its registration.
    pub pool_token_bytes: u64,
    /// Phases that the instance runs.
    pub duty: InstanceDuty,
    /// Capacity of the instance's KV cache, in tokens.
    pub capacity_tokens: u64,
    /// Interval of its load reports, in nanoseconds; 0 for never.
    pub report_ns: u64,
    /// Address at which routers reach the instance.
    pub address: String,
    /// True while an operator holds it: it gets no new requests.
    pub held: bool,
    /// True once its cache was reported or followed: after a restart the index must learn it again.
    pub reports_cache: bool,
    /// Sockets of its events, if it publishes any.
    pub events: Option<EventsRecord>,
    /// Capabilities beside prefills and decodes of its own, if it has any.
    pub capabilities: Option<Box<CapabilitiesRecord>>,
}

/// Capabilities of an instance, beside prefills and decodes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapabilitiesRecord {
    /// True if a prefill overlaps with the fetch of its prefix, layer by layer.
    pub layer_wise: bool,
    /// Number of its model's layers as registered; 0 for the default.
    pub layers: u32,
    /// Its stage in a pipeline group, if it is in one.
    pub stage: Option<StageRecord>,
}

/// Stage of an instance in a pipeline group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct StageRecord {
    /// Name of the group.
    pub group: String,
    pub stage: u32,
    pub stages: u32,
    pub chunk_tokens: u32,
    /// Bytes of activations for a token as registered; 0 for the default.
    pub activation_bytes: u32,
}

/// Sockets on which an instance publishes changes of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsRecord {
    /// Address of the publisher.
    pub publisher: String,
    /// Address of the replay socket; empty for none.
    pub replay: String,
    /// Topic; empty for all.
    pub topic: String,
    /// True if the instance's hashes are vLLM's `sha256_cbor`, which can be computed from tokens.
    pub has_vllm_hashes: bool,
}

/// Master that the Conductor follows: a store of another kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct MasterRecord {
    pub name: String,
    pub tenant: String,
    /// Model that the master was registered for.
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Address of the publisher.
    pub publisher: String,
}

/// Placement policy and objectives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementRecord {
    /// Name of the policy.
    pub policy: String,
    /// Objective for the time to first token, in nanoseconds; 0 for none.
    pub ttft_ns: u64,
    /// Objective for the time between tokens, in nanoseconds; 0 for none.
    pub tbt_ns: u64,
}

/// Hash seed of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SeedRecord {
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    pub seed: String,
}

/// Class of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ClassRecord {
    pub name: String,
    pub priority: i8,
    /// Objective for the time to first token, in nanoseconds; 0 for none.
    pub ttft_ns: u64,
}

/// Weight of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WeightRecord {
    pub tenant: String,
    pub flow: String,
    pub weight: u32,
}

impl WeightRecord {
    /// Returns a digest of tenant and flow, under which the weight is stored.
    #[must_use]
    pub fn digest(&self) -> u128 {
        Digest::of(self.tenant.as_bytes(), self.flow.as_bytes()).0
    }
}

impl SeedRecord {
    /// Returns a digest of tenant, model and block size, under which the seed is stored.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let name = [self.model.as_bytes(), &self.block_tokens.to_le_bytes()].concat();
        Digest::of(self.tenant.as_bytes(), &name).0
    }
}

impl ConductorKey {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Instance(name) => [&[16], name.as_bytes()].concat(),
            Self::Master(name) => [&[17], name.as_bytes()].concat(),
            Self::Placement => vec![18],
            Self::Seed(digest) => [&[19][..], &digest.to_be_bytes()].concat(),
            Self::Class(name) => [&[20], name.as_bytes()].concat(),
            Self::Weight(digest) => [&[21][..], &digest.to_be_bytes()].concat(),
        }
    }
}

impl ConductorRecord {
    /// Returns the key under which this record is stored.
    #[must_use]
    pub fn key(&self) -> ConductorKey {
        match self {
            Self::Instance(instance) => ConductorKey::Instance(instance.name.clone()),
            Self::Master(master) => ConductorKey::Master(master.name.clone()),
            Self::Placement(_) => ConductorKey::Placement,
            Self::Seed(seed) => ConductorKey::Seed(seed.digest()),
            Self::Class(class) => ConductorKey::Class(class.name.clone()),
            Self::Weight(weight) => ConductorKey::Weight(weight.digest()),
        }
    }

    /// Appends kind and contents of the record.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Instance(instance) => put_instance(out, instance),
            Self::Master(master) => {
                out.push(17);
                out.extend_from_slice(&master.block_tokens.to_le_bytes());
                put_all(out, &[&master.name, &master.tenant, &master.model, &master.publisher]);
            }
            Self::Placement(placement) => {
                out.push(18);
                out.extend_from_slice(&placement.ttft_ns.to_le_bytes());
                out.extend_from_slice(&placement.tbt_ns.to_le_bytes());
                put_text(out, &placement.policy);
            }
            Self::Seed(seed) => {
                out.push(19);
                out.extend_from_slice(&seed.block_tokens.to_le_bytes());
                put_all(out, &[&seed.tenant, &seed.model, &seed.seed]);
            }
            Self::Class(class) => {
                out.extend_from_slice(&[20, class.priority as u8]);
                out.extend_from_slice(&class.ttft_ns.to_le_bytes());
                put_all(out, &[&class.name]);
            }
            Self::Weight(weight) => {
                out.push(21);
                out.extend_from_slice(&weight.weight.to_le_bytes());
                put_all(out, &[&weight.tenant, &weight.flow]);
            }
        }
    }

    /// Reads the contents of a record of this kind; returns `None` for a kind that is not the Conductor's.
    pub(crate) fn read(kind: u8, reader: &mut Reader<'_>) -> Result<Option<Self>, DecodeError> {
        Ok(Some(match kind {
            16 => Self::Instance(instance(reader)?),
            17 => {
                let block_tokens = reader.u32()?;
                let (name, tenant, model) = (text(reader)?, text(reader)?, text(reader)?);
                Self::Master(MasterRecord { name, tenant, model, block_tokens, publisher: text(reader)? })
            }
            18 => {
                let (ttft_ns, tbt_ns) = (reader.u64()?, reader.u64()?);
                let policy = reader.text("policy")?;
                check_length("length of a policy's name", policy.len(), MAX_POLICY_NAME_BYTES)?;
                Self::Placement(PlacementRecord { policy, ttft_ns, tbt_ns })
            }
            19 => {
                let block_tokens = reader.u32()?;
                let (tenant, model) = (text(reader)?, text(reader)?);
                Self::Seed(SeedRecord { tenant, model, block_tokens, seed: text(reader)? })
            }
            20 => {
                let (priority, ttft_ns) = (reader.u8()? as i8, reader.u64()?);
                Self::Class(ClassRecord { name: text(reader)?, priority, ttft_ns })
            }
            21 => {
                let weight = reader.u32()?;
                let tenant = text(reader)?;
                Self::Weight(WeightRecord { tenant, flow: text(reader)?, weight })
            }
            _ => return Ok(None),
        }))
    }
}

const HELD: u8 = 1;
const REPORTS_CACHE: u8 = 2;
const HAS_EVENTS: u8 = 4;
const HAS_VLLM_HASHES: u8 = 8;
const HAS_CAPABILITIES: u8 = 16;

fn put_instance(out: &mut Vec<u8>, instance: &InstanceRecord) {
    out.push(16);
    out.extend_from_slice(&instance.incarnation.to_le_bytes());
    out.extend_from_slice(&instance.block_tokens.to_le_bytes());
    out.extend_from_slice(&instance.token_bytes.to_le_bytes());
    out.extend_from_slice(&instance.pool_token_bytes.to_le_bytes());
    out.push(match instance.duty {
        InstanceDuty::Prefill => 0,
        InstanceDuty::Decode => 1,
        InstanceDuty::Mixed => 2,
    });
    out.extend_from_slice(&instance.capacity_tokens.to_le_bytes());
    out.extend_from_slice(&instance.report_ns.to_le_bytes());
    let flag = |is: bool, bit: u8| if is { bit } else { 0 };
    let events = instance.events.as_ref();
    out.push(
        flag(instance.held, HELD)
            | flag(instance.reports_cache, REPORTS_CACHE)
            | flag(events.is_some(), HAS_EVENTS)
            | flag(events.is_some_and(|events| events.has_vllm_hashes), HAS_VLLM_HASHES)
            | flag(instance.capabilities.is_some(), HAS_CAPABILITIES),
    );
    put_all(out, &[&instance.name, &instance.tenant, &instance.model, &instance.address]);
    if let Some(events) = events {
        put_all(out, &[&events.publisher, &events.replay, &events.topic]);
    }
    if let Some(capabilities) = &instance.capabilities {
        out.extend_from_slice(&capabilities.layers.to_le_bytes());
        out.extend_from_slice(&[u8::from(capabilities.layer_wise), u8::from(capabilities.stage.is_some())]);
        if let Some(of) = &capabilities.stage {
            for number in [of.stage, of.stages, of.chunk_tokens, of.activation_bytes] {
                out.extend_from_slice(&number.to_le_bytes());
            }
            put_all(out, &[&of.group]);
        }
    }
}

fn capabilities(reader: &mut Reader<'_>) -> Result<CapabilitiesRecord, DecodeError> {
    let layers = reader.u32()?;
    let mut bit = || match reader.u8()? {
        found @ 0..=1 => Ok(found == 1),
        found => Err(DecodeError::Field { what: "flag of an instance's capabilities", found: found.into() }),
    };
    let (layer_wise, has_stage) = (bit()?, bit()?);
    let mut stage = None;
    if has_stage {
        let (at, stages) = (reader.u32()?, reader.u32()?);
        let (chunk_tokens, activation_bytes) = (reader.u32()?, reader.u32()?);
        stage = Some(StageRecord { group: text(reader)?, stage: at, stages, chunk_tokens, activation_bytes });
    }
    Ok(CapabilitiesRecord { layer_wise, layers, stage })
}

fn instance(reader: &mut Reader<'_>) -> Result<InstanceRecord, DecodeError> {
    let (incarnation, block_tokens) = (reader.u64()?, reader.u32()?);
    let (token_bytes, pool_token_bytes) = (reader.u64()?, reader.u64()?);
    let duty = match reader.u8()? {
        0 => InstanceDuty::Prefill,
        1 => InstanceDuty::Decode,
        2 => InstanceDuty::Mixed,
        found => return Err(DecodeError::Field { what: "duty of an instance", found: found.into() }),
    };
    let (capacity_tokens, report_ns) = (reader.u64()?, reader.u64()?);
    let flags = reader.u8()?;
    let is = |bit: u8| flags & bit != 0;
    if flags > 31 || (is(HAS_VLLM_HASHES) && !is(HAS_EVENTS)) {
        return Err(DecodeError::Field { what: "flags of an instance", found: flags.into() });
    }
    let (name, tenant, model, address) = (text(reader)?, text(reader)?, text(reader)?, text(reader)?);
    let events = if is(HAS_EVENTS) {
        let (publisher, replay, topic) = (text(reader)?, text(reader)?, text(reader)?);
        Some(EventsRecord { publisher, replay, topic, has_vllm_hashes: is(HAS_VLLM_HASHES) })
    } else {
        None
    };
    let capabilities = if is(HAS_CAPABILITIES) { Some(Box::new(capabilities(reader)?)) } else { None };
    Ok(InstanceRecord {
        name,
        incarnation,
        tenant,
        model,
        block_tokens,
        token_bytes,
        pool_token_bytes,
        duty,
        capacity_tokens,
        report_ns,
        address,
        held: is(HELD),
        reports_cache: is(REPORTS_CACHE),
        events,
        capabilities,
    })
}

fn put_all(out: &mut Vec<u8>, texts: &[&str]) {
    for text in texts {
        assert!(text.len() <= MAX_CONDUCTOR_TEXT_BYTES, "a text of {} bytes reached the encoder", text.len());
        put_long_text(out, text);
    }
}

fn text(reader: &mut Reader<'_>) -> Result<String, DecodeError> {
    let text = reader.long_text("text of the Conductor")?;
    check_length("length of a text of the Conductor", text.len(), MAX_CONDUCTOR_TEXT_BYTES)?;
    Ok(text)
}

fn check_length(what: &'static str, bytes: usize, limit_bytes: usize) -> Result<(), DecodeError> {
    if bytes > limit_bytes { Err(DecodeError::Field { what, found: bytes as u64 }) } else { Ok(()) }
}
