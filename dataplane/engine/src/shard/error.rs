//! Errors of starting a shard and of commands to it.

use std::time::Duration;

use super::limits::{ANSWER_DEADLINE, MAILBOX_ENTRIES};

/// Reason why a shard did not start, or did not execute a command.
#[derive(Debug)]
pub enum ShardError {
    /// The shard could not be set up; with the reason.
    Start(String),
    /// Backpressure: its mailbox is full.
    Busy,
    /// The shard did not answer in time.
    Timeout,
    /// Its thread has ended; with the reason.
    Ended(String),
    /// The shard refused the command; with the reason.
    Refused(String),
    /// Peers still use memory that was unregistered.
    Held {
        /// Processes on this host that are copying; 0 for one that is not visible from here.
        pids: Vec<i32>,
        /// Time that the caller waited for them.
        waited: Duration,
    },
}

impl core::fmt::Display for ShardError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Start(why) => write!(f, "a shard could not be started: {why}"),
            Self::Busy => write!(f, "the mailbox of the shard is full ({MAILBOX_ENTRIES} commands): retry"),
            Self::Timeout => write!(f, "the shard did not answer within {} s", ANSWER_DEADLINE.as_secs()),
            Self::Ended(why) => write!(f, "the shard has ended: {why}"),
            Self::Refused(why) => f.write_str(why),
            Self::Held { pids, waited } => held(f, pids, *waited),
        }
    }
}

fn held(f: &mut core::fmt::Formatter<'_>, pids: &[i32], waited: Duration) -> core::fmt::Result {
    let waited = waited.as_secs_f32();
    if pids.is_empty() {
        return write!(f, "peers still use the memory after {waited} s; keep it mapped until they release it: retry");
    }
    let seen: Vec<String> = pids.iter().filter(|&&pid| pid > 0).map(i32::to_string).collect();
    let unseen = if seen.len() < pids.len() { " and one that is not visible from here" } else { "" };
    let seen = seen.join(" ");
    write!(
        f,
        "process {seen}{unseen} of this host has been in the middle of a copy from or to the memory for {waited} s, so \
         it was probably stopped: continue it (kill -CONT {seen}) or end it, then unregister again; until then the \
         memory must stay mapped"
    )
}

impl std::error::Error for ShardError {}
