//! Flags of failure detection.

use clap::Args;
use kvplane_cluster::ClusterConfig;

use crate::command::Failure;

const MS: u64 = 1_000_000;

/// Deadlines of failure detection: how long a member may be silent.
#[derive(Args, Clone, Debug)]
pub(crate) struct FailureDeadlines {
    /// Interval of heartbeats of the members, in milliseconds. Where slots have replica owners, a member that has
    /// missed one heartbeat, by a tenth of the interval, is dead if its data ports refuse connections (with SSDs after
    /// one and a half intervals).
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    heartbeat_ms: u64,
    /// Silence after which a member is dead whose data ports do not answer, in milliseconds, at least one and a half
    /// heartbeats: frozen processes, cut links. A member that answers, however slowly, is not dead. Applies where slots
    /// have replica owners.
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(75..=600_000))]
    unanswered_ms: u64,
    /// Silence after which no new objects are placed on a member, in milliseconds, at least two heartbeats.
    #[arg(long, value_name = "MS", default_value_t = 3000,
        value_parser = clap::value_parser!(u64).range(100..=600_000))]
    suspect_ms: u64,
    /// Silence after which a member is dead in any case, in milliseconds, longer than --suspect-ms and at least three
    /// heartbeats.
    #[arg(long, value_name = "MS", default_value_t = 6000,
        value_parser = clap::value_parser!(u64).range(150..=3_600_000))]
    dead_ms: u64,
}

impl Default for FailureDeadlines {
    fn default() -> Self {
        Self { heartbeat_ms: 500, unanswered_ms: 1000, suspect_ms: 3000, dead_ms: 6000 }
    }
}

impl FailureDeadlines {
    /// Sets the deadlines of a cluster.
    pub(crate) fn set(&self, config: &mut ClusterConfig) -> Result<(), Failure> {
        let (heartbeat, unanswered, suspect, dead) =
            (self.heartbeat_ms, self.unanswered_ms, self.suspect_ms, self.dead_ms);
        let fits = unanswered * 2 >= heartbeat * 3
            && unanswered <= dead
            && suspect >= 2 * heartbeat
            && dead > suspect
            && dead >= 3 * heartbeat;
        if !fits {
            return Err(format!(
                "the deadlines of failure detection contradict each other: with --heartbeat-ms {heartbeat}, \
                 --unanswered-ms {unanswered} has to be at least {} and at most --dead-ms, --suspect-ms {suspect} at \
                 least {}, and --dead-ms {dead} more than --suspect-ms and at least {}",
                (heartbeat * 3).div_ceil(2),
                2 * heartbeat,
                3 * heartbeat
            )
            .into());
        }
        config.heartbeat_interval_ns = heartbeat * MS;
        config.unanswered_after_ns = unanswered * MS;
        config.suspect_after_ns = suspect * MS;
        config.heartbeat_deadline_ns = dead * MS;
        config.restart_grace_ns = config.restart_grace_ns.max(heartbeat * MS);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        deadlines: FailureDeadlines,
    }

    fn config(flags: &[&str]) -> Result<ClusterConfig, String> {
        let flags = Flags::try_parse_from([&["test"], flags].concat()).map_err(|error| error.to_string())?;
        let mut config = ClusterConfig::new("test");
        flags.deadlines.set(&mut config).map_err(|error| error.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn the_defaults_are_those_of_a_cluster() {
        let default = ClusterConfig::new("test");
        assert_eq!(config(&[]), Ok(default.clone()));
        let mut set = default.clone();
        FailureDeadlines::default().set(&mut set).expect("they fit");
        assert_eq!(set, default);
    }

    #[test]
    fn flags_set_the_deadlines() {
        let changed =
            config(&["--heartbeat-ms", "100", "--unanswered-ms", "400", "--suspect-ms", "900"]).expect("good");
        let wanted = ClusterConfig {
            heartbeat_interval_ns: 100 * MS,
            unanswered_after_ns: 400 * MS,
            suspect_after_ns: 900 * MS,
            ..ClusterConfig::new("test")
        };
        assert_eq!(changed, wanted);
        let slow =
            ["--heartbeat-ms", "20000", "--unanswered-ms", "30000", "--suspect-ms", "40000", "--dead-ms", "60000"];
        assert!(config(&slow).is_ok());
    }

    #[test]
    fn contradictions_are_refused_with_their_numbers() {
        for flags in [
            ["--unanswered-ms", "749"],
            ["--unanswered-ms", "6001"],
            ["--suspect-ms", "999"],
            ["--dead-ms", "3000"],
            ["--heartbeat-ms", "667"],
        ] {
            let error = config(&flags).expect_err(&flags.join(" "));
            assert!(error.contains(flags[0]) && error.contains("contradict"), "{error}");
        }
        assert!(config(&["--heartbeat-ms", "10"]).is_err());
    }
}
