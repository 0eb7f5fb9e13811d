//! `kvplane ctl pins`: soft pins, retentions and priorities of objects in memory.

use std::time::Duration;

use clap::{Args, Subcommand};
use kvplane::{Client, Error, ObjectPriority, PutOptions};

use crate::command::Failure;
use crate::command::process::durations;

/// Parses the priority of an object.
pub(super) fn priority_of(text: &str) -> Result<ObjectPriority, Failure> {
    Ok(ObjectPriority::new(text.parse()?)?)
}

/// Pins and priorities of objects.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Pin objects softly: for this time they are evicted after others.
    Soft {
        /// Keys of the objects.
        #[arg(required = true)]
        keys: Vec<String>,
        /// Duration in milliseconds, from now.
        #[arg(long, value_name = "MS", default_value_t = PutOptions::SOFT_PIN_MS.into(),
            value_parser = durations::milliseconds())]
        ttl_ms: u64,
    },
    /// End soft pins of objects.
    Unpin {
        /// Keys of the objects.
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Keep objects in memory for this time: add them to a retention, or without keys renew it. They count as hard
    /// pins.
    Retain(Retain),
    /// Set the priority of objects: within a tenant, those of a lower one are evicted before.
    Priority {
        /// Priority, from -4 to 4; that of a put that names none is 0.
        #[arg(allow_negative_numbers = true, value_parser = priority_of)]
        priority: ObjectPriority,
        /// Keys of the objects.
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// End a retention before its time.
    Release {
        /// Number of the retention, chosen by who made it.
        retention: u64,
    },
}

/// Objects to retain.
#[derive(Args)]
pub(crate) struct Retain {
    /// Number of the retention, of the caller's choice; an object stays until the last of its retentions ends.
    #[arg(long, required_unless_present = "group")]
    retention: Option<u64>,
    /// Number of a group: its objects join the retention of the same number.
    #[arg(long, conflicts_with_all = ["retention", "keys"])]
    group: Option<u64>,
    /// Duration in milliseconds, from now. A retention that lasts longer is not shortened.
    #[arg(long, value_name = "MS", value_parser = durations::milliseconds())]
    ttl_ms: u64,
    /// Keys of the objects.
    keys: Vec<String>,
}

pub(super) fn run(client: &mut Client, action: &Action) -> Result<(), Failure> {
    match action {
        Action::Soft { keys, ttl_ms } => {
            let there = client.keys().pins().soft_pin(keys, Duration::from_millis(*ttl_ms))?;
            report(keys, there.into_iter().map(Ok), "pinned softly")
        }
        Action::Unpin { keys } => {
            let there = client.keys().pins().soft_unpin(keys)?;
            report(keys, there.into_iter().map(Ok), "without a soft pin")
        }
        Action::Retain(retain) => retain.run(client),
        Action::Priority { priority, keys } => {
            let there = client.keys().pins().set_priority(keys, *priority)?;
            report(keys, there.into_iter().map(Ok), &format!("of priority {priority}"))
        }
        Action::Release { retention } => {
            println!("{} objects released", client.keys().pins().release(*retention)?);
            Ok(())
        }
    }
}

impl Retain {
    fn run(&self, client: &mut Client) -> Result<(), Failure> {
        let ttl = Duration::from_millis(self.ttl_ms);
        let mut pins = client.keys().pins();
        let objects = match (self.retention, self.group) {
            (Some(retention), _) if !self.keys.is_empty() => {
                return report(&self.keys, pins.retain(retention, &self.keys, ttl)?, "retained");
            }
            (Some(retention), _) => pins.renew(retention, ttl)?,
            (None, Some(group)) => pins.retain_group(group, ttl)?,
            (None, None) => return Err("--retention or --group is required".into()),
        };
        println!("{objects} objects retained");
        Ok(())
    }
}

/// Prints the number of objects that are pinned, and fails if some are not.
fn report(keys: &[String], results: impl IntoIterator<Item = Result<bool, Error>>, state: &str) -> Result<(), Failure> {
    let why = |(key, result): (&String, Result<bool, Error>)| match result {
        Ok(true) => None,
        Ok(false) => Some(format!("{key:?} is not in memory")),
        Err(error) => Some(format!("{key:?}: {error}")),
    };
    let failed: Vec<String> = keys.iter().zip(results).filter_map(why).collect();
    println!("{} objects {state}", keys.len() - failed.len());
    match failed.first() {
        None => Ok(()),
        Some(first) => Err(format!("{} of {} objects are not {state}: {first}", failed.len(), keys.len()).into()),
    }
}
