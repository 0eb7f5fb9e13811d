//! What instances say of themselves when they register and report, and what of that is accepted.

use super::config::MAX_ID_BYTES;
use super::error::{ConductorError, bad};
use super::pools::PoolKey;
use crate::index::MAX_NAME_BYTES;

/// The shortest and the longest time between reports, in nanoseconds.
const REPORTS_NS: (u64, u64) = (10_000_000, 60_000_000_000);
/// The most bytes of an instance's address.
const ADDRESS_BYTES: usize = 256;

/// What an instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Prefills.
    Prefill,
    /// Decodes.
    Decode,
    /// Both.
    Mixed,
}

/// An instance as it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Its name, unique among all.
    pub name: String,
    /// Its incarnation: larger each time that it starts, such as the time of its start.
    pub incarnation: u64,
    /// Whose requests it serves; empty for the default tenant's.
    pub tenant: String,
    /// The model it serves.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token; 0 for the default.
    pub token_bytes: u64,
    /// What it does.
    pub part: Part,
    /// Tokens of KV cache that it has room for when it decodes.
    pub capacity_tokens: u64,
    /// How often it will report, in nanoseconds; 0 for never, then it is believed until it is taken out.
    pub report_ns: u64,
    /// Where routers reach it: not looked at, but told.
    pub address: String,
    /// Where its events are read; none where it reports its cache by calls, or not at all. Not looked at, but kept.
    pub events: Option<Publisher>,
}

/// Where an instance publishes what becomes of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publisher {
    /// The address of its publisher.
    pub publisher: String,
    /// The address of its replay socket; empty for none.
    pub replay: String,
    /// The topic of its events; empty for all.
    pub topic: String,
    /// True where it hashes as vLLM does, which its first blocks prove or disprove.
    pub is_vllm: bool,
}

/// What an instance is told when it registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Whether nothing is known of its cache: it sends a snapshot.
    pub fresh: bool,
    /// True for an instance that was registered already, in the same incarnation.
    pub again: bool,
    /// After how long without a report it is not chosen any more; 0 for never.
    pub doubted_after_ns: u64,
}

/// What an instance says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Grows with each report.
    pub seq: u64,
    /// Tokens of prompts that wait there or are computed, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// Those requests.
    pub decodes: u32,
}

impl InstanceSpec {
    pub(super) fn check(&self) -> Result<(), ConductorError> {
        let name = self.name.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("an instance's name has 1 to {MAX_ID_BYTES} bytes, not {name}")));
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
            return Err(bad(format!("blocks of {} tokens; 1 to {}", self.block_tokens, 1 << 20)));
        }
        if self.token_bytes > 1 << 30 {
            return Err(bad(format!("{} bytes of KV cache a token; at most {}", self.token_bytes, 1 << 30)));
        }
        if self.report_ns != 0 && !(REPORTS_NS.0..=REPORTS_NS.1).contains(&self.report_ns) {
            return Err(bad(format!(
                "reports every {} ns; {} to {}, or 0",
                self.report_ns, REPORTS_NS.0, REPORTS_NS.1
            )));
        }
        Ok(())
    }

    /// The pool that it is in.
    #[must_use]
    pub fn pool(&self) -> PoolKey {
        PoolKey { tenant: self.tenant.clone(), model: self.model.clone(), block_tokens: self.block_tokens }
    }
}
