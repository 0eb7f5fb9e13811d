//! Flags of the limits of process groups.

use clap::Args;
use clap::builder::RangedU64ValueParser;
use kvplane_server::{WorldConfig, WorldsConfig};

use crate::command::Failure;

const MS: u64 = 1_000_000;

/// Limits of process groups.
#[derive(Args, Clone)]
pub(super) struct GroupLimits {
    /// Most worlds (jobs) with process groups.
    #[arg(long, value_name = "COUNT", default_value_t = WorldsConfig::default().worlds as u64,
        value_parser = clap::value_parser!(u64).range(1..=16_384))]
    worlds: u64,
    /// Most process groups of a world.
    #[arg(long, value_name = "COUNT", default_value_t = WorldConfig::default().groups as u64,
        value_parser = clap::value_parser!(u64).range(1..=1024))]
    world_groups: u64,
    /// Silence after which a process of a world is dead if a peer finds that its address refuses connections, in
    /// milliseconds. Processes report every 100 ms.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().refused_ns / MS, value_parser = silence())]
    group_refused_ms: u64,
    /// Silence after which a process of a world is dead if a collective waited for it until its deadline, in
    /// milliseconds.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().overdue_ns / MS, value_parser = silence())]
    group_overdue_ms: u64,
    /// Silence after which a process of a world is dead in any case, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().silence_ns / MS, value_parser = silence())]
    group_silence_ms: u64,
    /// Time for which a broken connection between two live members may be restored before one of them is excluded, in
    /// milliseconds.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().reconnect_ns / MS, value_parser = time())]
    group_reconnect_ms: u64,
    /// Time within which the members of a view stop their operation when the view changes, in milliseconds: those that
    /// do not are excluded.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().fence_ns / MS, value_parser = time())]
    group_fence_ms: u64,
    /// Time for which a proposal to activate members waits until they are ready, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = WorldConfig::default().proposal_ns / MS, value_parser = time())]
    group_proposal_ms: u64,
    /// Time after which a process group without a live process is forgotten, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = WorldConfig::default().forget_ns / MS / 1000,
        value_parser = clap::value_parser!(u64).range(1..=86_400))]
    group_forget: u64,
}

/// Parses a silence: two reports may be lost.
fn silence() -> RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(200..=3_600_000)
}

fn time() -> RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=3_600_000)
}

impl GroupLimits {
    /// Returns the settings of the control plane.
    pub(super) fn config(&self) -> Result<WorldsConfig, Failure> {
        let (refused, overdue, silence) = (self.group_refused_ms, self.group_overdue_ms, self.group_silence_ms);
        if refused > overdue || overdue > silence {
            return Err(format!(
                "the less evidence, the longer the silence: --group-refused-ms {refused}, --group-overdue-ms \
                 {overdue} and --group-silence-ms {silence} are not in this order"
            )
            .into());
        }
        // The ranges are checked, and `usize` has 64 bits on supported machines.
        let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let world = WorldConfig {
            refused_ns: refused * MS,
            overdue_ns: overdue * MS,
            silence_ns: silence * MS,
            reconnect_ns: self.group_reconnect_ms * MS,
            fence_ns: self.group_fence_ms * MS,
            proposal_ns: self.group_proposal_ms * MS,
            forget_ns: self.group_forget * 1000 * MS,
            groups: count(self.world_groups),
            ..WorldConfig::default()
        };
        Ok(WorldsConfig { worlds: count(self.worlds), world })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        limits: GroupLimits,
    }

    fn config(flags: &[&str]) -> Result<WorldsConfig, String> {
        let flags = Flags::try_parse_from([&["test"], flags].concat()).map_err(|error| error.to_string())?;
        flags.limits.config().map_err(|error| error.to_string())
    }

    #[test]
    fn flags_set_the_limits() {
        assert_eq!(config(&[]), Ok(WorldsConfig::default()));
        let changed = config(&["--worlds", "3", "--world-groups", "4", "--group-silence-ms", "9000"]).expect("good");
        let world = WorldConfig { groups: 4, silence_ns: 9_000_000_000, ..WorldConfig::default() };
        assert_eq!(changed, WorldsConfig { worlds: 3, world });
        assert!(config(&["--group-refused-ms", "800"]).is_err_and(|error| error.contains("--group-overdue-ms 750")));
        assert!(config(&["--group-refused-ms", "100"]).is_err_and(|error| error.contains("200..=3600000")));
        assert!(config(&["--world-groups", "1025"]).is_err());
    }
}
