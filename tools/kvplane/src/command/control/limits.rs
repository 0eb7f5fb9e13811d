//! Flags of the Conductor's limits.

use std::ops::RangeInclusive;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use kvplane_conductor::conductor::{ConductorConfig, Limit, LimitError};

/// Limits of the Conductor.
#[derive(Args, Clone)]
pub(super) struct ConductorLimits {
    /// Most models, counted for each tenant and block size. Each has an index of --conductor-blocks.
    #[arg(long = Limit::Models.flag(), default_value_t = of(Limit::Models), value_name = "MODELS", requires = "hosted",
        value_parser = values(Limit::Models))]
    models: u64,
    /// Most instances of all models; one takes about 1 KiB.
    #[arg(long = Limit::Instances.flag(), default_value_t = of(Limit::Instances), value_name = "INSTANCES",
        requires = "hosted", value_parser = values(Limit::Instances))]
    instances: u64,
    /// Most queued requests of a model: beyond, requests are refused as "full". They count among
    /// --conductor-requests too.
    #[arg(long = Limit::Queued.flag(), default_value_t = of(Limit::Queued), value_name = "REQUESTS",
        requires = "hosted", value_parser = values(Limit::Queued))]
    queued: u64,
    /// Most queued and booked requests of all models: beyond, requests are refused as "full". One takes about 8 KiB,
    /// and the blocks of its prompt.
    #[arg(long = Limit::Requests.flag(), default_value_t = of(Limit::Requests), value_name = "REQUESTS",
        requires = "hosted", value_parser = values(Limit::Requests))]
    requests: u64,
    /// Most blocks in the prompts of queued and booked requests: beyond, requests are refused as "full". A block takes
    /// 8 bytes.
    #[arg(long = Limit::PromptBlocks.flag(), default_value_t = of(Limit::PromptBlocks), value_name = "BLOCKS",
        requires = "hosted", value_parser = values(Limit::PromptBlocks))]
    prompt_blocks: u64,
    /// Longest wait of a queued request, in seconds, and the wait of one that names none: then it is refused as
    /// "waited".
    #[arg(long = Limit::WaitSeconds.flag(), default_value_t = of(Limit::WaitSeconds), value_name = "SECONDS",
        requires = "hosted", value_parser = values(Limit::WaitSeconds))]
    wait_seconds: u64,
}

/// Returns the default of a limit.
fn of(limit: Limit) -> u64 {
    ConductorConfig::default().limit(limit)
}

/// Parses a value within the range of a limit.
fn values(limit: Limit) -> RangedU64ValueParser<u64> {
    let (least, most) = limit.range();
    clap::value_parser!(u64).range(RangeInclusive::new(least, most))
}

impl ConductorLimits {
    /// Sets the limits of a Conductor.
    pub(super) fn set(&self, config: &mut ConductorConfig) -> Result<(), LimitError> {
        let Self { models, instances, queued, requests, prompt_blocks, wait_seconds } = *self;
        let values = [
            (Limit::Models, models),
            (Limit::Instances, instances),
            (Limit::Queued, queued),
            (Limit::Requests, requests),
            (Limit::PromptBlocks, prompt_blocks),
            (Limit::WaitSeconds, wait_seconds),
        ];
        values.into_iter().try_for_each(|(limit, value)| config.set_limit(limit, value))
    }
}

#[cfg(test)]
impl Default for ConductorLimits {
    fn default() -> Self {
        Self {
            models: of(Limit::Models),
            instances: of(Limit::Instances),
            queued: of(Limit::Queued),
            requests: of(Limit::Requests),
            prompt_blocks: of(Limit::PromptBlocks),
            wait_seconds: of(Limit::WaitSeconds),
        }
    }
}
