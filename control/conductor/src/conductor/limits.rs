//! Limits of the Conductor: their ranges, the flags of the control plane that set them, and their use.

use std::fmt;

use bincode::{Decode, Encode};

use super::Conductor;
use super::config::{ConductorConfig, MAX_PROMPT_BLOCKS};

/// Limit of the Conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Pools: [`ConductorConfig::max_pools`].
    Models,
    /// Instances: [`ConductorConfig::max_instances`].
    Instances,
    /// Queued requests of a pool: [`crate::scheduler::SchedulerConfig::max_queue`].
    Queued,
    /// Requests that wait or are booked: [`ConductorConfig::max_requests`].
    Requests,
    /// Blocks in the prompts of these requests: [`ConductorConfig::max_request_blocks`].
    PromptBlocks,
    /// Wait of a request, in seconds: [`ConductorConfig::wait_ns`].
    WaitSeconds,
}

impl Limit {
    /// All limits.
    pub const ALL: [Self; 6] =
        [Self::Models, Self::Instances, Self::Queued, Self::Requests, Self::PromptBlocks, Self::WaitSeconds];

    /// Returns the flag of the control plane that sets the limit, without its dashes.
    #[must_use]
    pub const fn flag(self) -> &'static str {
        match self {
            Self::Models => "conductor-models",
            Self::Instances => "conductor-instances",
            Self::Queued => "conductor-queued",
            Self::Requests => "conductor-requests",
            Self::PromptBlocks => "conductor-prompt-blocks",
            Self::WaitSeconds => "conductor-wait",
        }
    }

    /// Returns the name of what is limited, in the plural.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Models => "models",
            Self::Instances => "instances",
            Self::Queued => "queued requests of a model",
            Self::Requests => "queued and booked requests",
            Self::PromptBlocks => "blocks of the prompts of requests",
            Self::WaitSeconds => "seconds of wait",
        }
    }

    /// Returns the least and the greatest value that the limit may have.
    #[must_use]
    pub const fn range(self) -> (u64, u64) {
        match self {
            Self::Models => (1, 1_024),
            // The index of a pool has room for these and for parts of the store: `MAX_HOLDERS`.
            Self::Instances => (1, 8_000),
            Self::Queued => (1, 65_536),
            Self::Requests => (1, 1 << 20),
            // A single prompt of the greatest length fits.
            Self::PromptBlocks => (MAX_PROMPT_BLOCKS as u64, 1 << 30),
            Self::WaitSeconds => (1, 86_400),
        }
    }
}

/// Limit outside its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitError {
    /// The limit.
    pub limit: Limit,
    /// Value that was set.
    pub value: u64,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (least, most) = self.limit.range();
        let (flag, name) = (self.limit.flag(), self.limit.name());
        write!(f, "--{flag} is {}; the limit of {name} must be {least} to {most}", self.value)
    }
}

impl std::error::Error for LimitError {}

/// Limits of the Conductor, each with its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct LimitUse {
    /// Models, and the most.
    pub models: (u64, u64),
    /// Instances, and the most.
    pub instances: (u64, u64),
    /// Queued requests of the model that has the most of them, and the most of each model.
    pub queued: (u64, u64),
    /// Queued and booked requests, and the most.
    pub requests: (u64, u64),
    /// Blocks of the prompts of these, and the most.
    pub prompt_blocks: (u64, u64),
    /// Longest wait of a queued request, in nanoseconds.
    pub wait_ns: u64,
}

impl LimitUse {
    /// Returns the limits of a Conductor, each with its use.
    #[must_use]
    pub fn of(conductor: &Conductor) -> Self {
        let Conductor { config, pools, instances, requests, .. } = conductor;
        let used = |used: usize, limit| (used as u64, config.limit(limit));
        let queued = pools.iter().map(|(_, pool)| pool.scheduler.waiting()).max().unwrap_or(0);
        let (open, prompt_blocks) = requests.open();
        Self {
            models: used(pools.iter().count(), Limit::Models),
            instances: used(instances.len(), Limit::Instances),
            queued: used(queued, Limit::Queued),
            requests: used(open, Limit::Requests),
            prompt_blocks: used(prompt_blocks, Limit::PromptBlocks),
            wait_ns: config.wait_ns,
        }
    }
}

impl ConductorConfig {
    /// Returns the value of a limit.
    #[must_use]
    pub const fn limit(&self, limit: Limit) -> u64 {
        match limit {
            Limit::Models => self.max_pools as u64,
            Limit::Instances => self.max_instances as u64,
            Limit::Queued => self.scheduler.max_queue as u64,
            Limit::Requests => self.max_requests as u64,
            Limit::PromptBlocks => self.max_request_blocks as u64,
            Limit::WaitSeconds => self.wait_ns / 1_000_000_000,
        }
    }

    /// Sets a limit, and what follows from it: the index of a pool has room for all instances.
    ///
    /// # Errors
    /// When the value is out of range.
    pub fn set_limit(&mut self, limit: Limit, value: u64) -> Result<(), LimitError> {
        let (least, most) = limit.range();
        if !(least..=most).contains(&value) {
            return Err(LimitError { limit, value });
        }
        // No limit exceeds 32 bits.
        let count = usize::try_from(value).unwrap_or(usize::MAX);
        match limit {
            Limit::Models => self.max_pools = count,
            Limit::Instances => {
                self.max_instances = count;
                let holders = &mut self.scheduler.index.max_holders;
                *holders = (*holders).max(count + STORE_PARTS);
            }
            Limit::Queued => self.scheduler.max_queue = count,
            Limit::Requests => self.max_requests = count,
            Limit::PromptBlocks => self.max_request_blocks = count,
            Limit::WaitSeconds => self.wait_ns = value.saturating_mul(1_000_000_000),
        }
        Ok(())
    }
}

/// Room in the index of a pool beside that for instances: for parts of the store, and for holders that were retired
/// lately.
const STORE_PARTS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::MAX_HOLDERS;

    #[test]
    fn limits_are_set_within_their_ranges_and_the_index_has_room_for_all_instances() {
        let mut config = ConductorConfig::default();
        let holders = config.scheduler.index.max_holders;
        for limit in Limit::ALL {
            let (least, most) = limit.range();
            let default = config.limit(limit);
            assert!((least..=most).contains(&default), "{limit:?}: {default}");
            for value in [0, least - 1, most + 1, u64::MAX] {
                let error = config.set_limit(limit, value).expect_err("out of range").to_string();
                assert!(error.contains(limit.flag()) && error.contains(&most.to_string()), "{error}");
                assert_eq!(config.limit(limit), default);
            }
        }
        assert_eq!(config.scheduler.index.max_holders, holders);
        for limit in Limit::ALL {
            let (least, most) = limit.range();
            for value in [least, most] {
                config.set_limit(limit, value).expect("in range");
                assert_eq!(config.limit(limit), value);
            }
        }
        let held = config.scheduler.index.max_holders;
        assert!(held > config.max_instances && held <= MAX_HOLDERS, "{held}");
    }
}
