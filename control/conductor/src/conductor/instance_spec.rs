//! Registration and load reports of instances, and the checks of them.

use bincode::{Decode, Encode};

use super::config::MAX_ID_BYTES;
use super::error::{ConductorError, bad};
use super::pools::PoolKey;
use crate::cost::DecodeSteps;
use crate::index::MAX_NAME_BYTES;
use crate::scheduler::InstanceCapabilities;

/// Minimum and maximum interval between load reports, in nanoseconds.
const REPORTS_NS: (u64, u64) = (10_000_000, 60_000_000_000);
/// Maximum length of an instance's address, in bytes.
const ADDRESS_BYTES: usize = 256;

/// Phases that an instance serves. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum InstancePart {
    /// Prefills.
    Prefill,
    /// Decodes.
    Decode,
    /// Both.
    Mixed,
}

impl InstancePart {
    /// Returns the name for operators.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }
}

/// Registers an instance. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RegisterInstance {
    /// Name, unique among all instances.
    pub instance: String,
    /// Incarnation: greater at each start of the instance, such as the time of the start.
    pub incarnation: u64,
    /// Tenant whose requests it serves; empty for the default tenant.
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV cache per token; 0 for the default.
    pub token_bytes: u64,
    /// Phases that it serves.
    pub part: InstancePart,
    /// Capacity of its KV cache for decoding, in tokens.
    pub capacity_tokens: u64,
    /// Interval of its load reports, in nanoseconds; 0 for never, then it is never excluded for silence.
    pub report_ns: u64,
    /// Address at which routers reach it; opaque to the Conductor.
    pub address: String,
    /// Sockets of its events; none if it reports its cache by calls, or not at all. Opaque to the Conductor.
    pub events: Option<EventSource>,
}

/// Registers an instance that has capabilities. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RegisterCapabilities {
    /// Registration of the instance.
    pub register: RegisterInstance,
    /// Capabilities beside prefills and decodes of its own.
    pub capabilities: InstanceCapabilities,
}

/// Sockets on which an instance publishes changes of its cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct EventSource {
    /// Address of the publisher.
    pub publisher: String,
    /// Address of the replay socket; empty for none.
    pub replay: String,
    /// Topic of its events; empty for all.
    pub topic: String,
}

/// Registration of an instance, with what the host knows of its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Registration of the instance.
    pub call: RegisterInstance,
    /// True if its hashes are vLLM's `sha256_cbor`, which can be computed from tokens.
    pub has_vllm_hashes: bool,
    /// Capabilities beside prefills and decodes of its own.
    pub capabilities: InstanceCapabilities,
}

impl From<RegisterInstance> for InstanceSpec {
    fn from(call: RegisterInstance) -> Self {
        Self { call, has_vllm_hashes: false, capabilities: InstanceCapabilities::default() }
    }
}

impl From<RegisterCapabilities> for InstanceSpec {
    fn from(call: RegisterCapabilities) -> Self {
        Self { call: call.register, has_vllm_hashes: false, capabilities: call.capabilities }
    }
}

/// Answer to a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceRegistered {
    /// True if nothing is known of its cache: it must send a snapshot.
    pub fresh: bool,
    /// Time without a report after which it is excluded; 0 for never.
    pub suspect_after_ns: u64,
}

/// Outcome of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Answer to the instance.
    pub answer: InstanceRegistered,
    /// True if the instance was registered already, in the same incarnation.
    pub again: bool,
}

/// Load report of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct InstanceLoad {
    /// Number of the report; grows with each one.
    pub seq: u64,
    /// Tokens of prompts that wait there or are being prefilled, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// Number of these requests.
    pub decodes: u32,
    /// Decode steps since the last report; none if they are not known.
    pub steps: DecodeSteps,
}

impl RegisterInstance {
    /// Creates the registration of an instance in its incarnation 1, for the default tenant. It has no capacity for
    /// decoding and no address, and reports neither its load nor, by events, its cache.
    #[must_use]
    pub fn new(instance: impl Into<String>, model: impl Into<String>, block_tokens: u32, part: InstancePart) -> Self {
        Self {
            instance: instance.into(),
            incarnation: 1,
            tenant: String::new(),
            model: model.into(),
            block_tokens,
            token_bytes: 0,
            part,
            capacity_tokens: 0,
            report_ns: 0,
            address: String::new(),
            events: None,
        }
    }

    pub(super) fn check(&self, capabilities: &InstanceCapabilities) -> Result<(), ConductorError> {
        let name = self.instance.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("an instance's name must have 1 to {MAX_ID_BYTES} bytes, not {name}")));
        }
        for (what, text) in [("tenant", &self.tenant), ("model", &self.model)] {
            if text.len() > MAX_NAME_BYTES {
                return Err(bad(format!("a {what} of {} bytes; at most {MAX_NAME_BYTES}", text.len())));
            }
        }
        if self.address.len() > ADDRESS_BYTES {
            return Err(bad(format!("an address of {} bytes; at most {ADDRESS_BYTES}", self.address.len())));
        }
        if let Some(events) = &self.events {
            for (what, text) in
                [("publisher", &events.publisher), ("replay socket", &events.replay), ("topic", &events.topic)]
            {
                if text.len() > ADDRESS_BYTES {
                    return Err(bad(format!("a {what} of {} bytes; at most {ADDRESS_BYTES}", text.len())));
                }
            }
        }
        if self.block_tokens == 0 || self.block_tokens > 1 << 20 {
            return Err(bad(format!("blocks of {} tokens; must be 1 to {}", self.block_tokens, 1 << 20)));
        }
        if self.token_bytes > 1 << 30 {
            return Err(bad(format!("{} bytes of KV cache per token; at most {}", self.token_bytes, 1 << 30)));
        }
        if self.report_ns != 0 && !(REPORTS_NS.0..=REPORTS_NS.1).contains(&self.report_ns) {
            return Err(bad(format!(
                "reports every {} ns; must be {} to {}, or 0",
                self.report_ns, REPORTS_NS.0, REPORTS_NS.1
            )));
        }
        capabilities.check(self.block_tokens, self.part != InstancePart::Decode)?;
        Ok(())
    }

    /// Returns the key of its pool.
    #[must_use]
    pub fn pool(&self) -> PoolKey {
        PoolKey { tenant: self.tenant.clone(), model: self.model.clone(), block_tokens: self.block_tokens }
    }
}
