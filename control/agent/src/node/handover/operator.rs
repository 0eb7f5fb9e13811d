//! Side of an operator: the request for an upgrade, and its outcome.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvplane_proto::ids::NodeId;
use serde_json::{Value, json};

use super::message::{check_user, expect, number, receive, send, text};
use super::{HandoverError, REPLY, socket_path, sockets_of};
use crate::error::Error;
use crate::link::software;
use crate::node::Node;

/// Outcome of an upgrade.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpgradeReport {
    /// Software of the former process.
    pub from: String,
    /// Software of its successor.
    pub to: String,
    /// Number of the successor's process.
    pub pid: u32,
    /// Objects of the former process that the successor serves.
    pub objects: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Objects that were dropped, because others have their slots, or they were damaged, or have no place.
    pub dropped: u64,
    /// True if nothing was kept; the log of the successor has the reason.
    pub is_empty: bool,
    /// Time from the end of service of the former process to its begin by the successor, in nanoseconds.
    pub pause_ns: u64,
}

impl UpgradeReport {
    /// Describes a node that took over; `is_empty` if the objects of the former process did not count.
    pub(super) fn of_node(node: &Node, pause_ns: u64, is_empty: bool) -> Result<Self, Error> {
        let (from, to) = (String::new(), software().to_owned());
        let (pid, objects, bytes) = (std::process::id(), 0, 0);
        let mut report = Self { from, to, pid, objects, bytes, dropped: 0, is_empty, pause_ns };
        for kept in node.snapshots()?.iter().filter_map(|shard| shard.kept) {
            report.objects += kept.objects;
            report.bytes += kept.bytes;
            report.dropped += kept.dropped + kept.left_out + kept.damaged;
            report.is_empty |= kept.discard.is_some();
        }
        Ok(report)
    }

    pub(super) fn message(&self) -> Value {
        json!({
            "kind": "serving",
            "from": self.from,
            "to": self.to,
            "pid": self.pid,
            "objects": self.objects,
            "bytes": self.bytes,
            "dropped": self.dropped,
            "is_empty": self.is_empty,
            "pause_ns": self.pause_ns,
        })
    }

    /// Reads the message of a successor, between processes of this software.
    pub(super) fn of(message: &Value, from: String, to: String) -> Result<Self, HandoverError> {
        expect(message, "serving")?;
        let flag = message.get("is_empty").and_then(Value::as_bool);
        Ok(Self {
            from,
            to,
            pid: u32::try_from(number(message, "pid")?).map_err(|_| HandoverError::Malformed { what: "pid" })?,
            objects: number(message, "objects")?,
            bytes: number(message, "bytes")?,
            dropped: number(message, "dropped")?,
            is_empty: flag.ok_or(HandoverError::Malformed { what: "is_empty" })?,
            pause_ns: number(message, "pause_ns")?,
        })
    }
}

/// Order of an operator to upgrade a node of this host.
#[derive(Clone, Copy, Debug)]
pub struct UpgradeOrder<'a> {
    /// Number of the node.
    pub node: NodeId,
    /// Program of the successor; `None` for the one that the process was started as, which may have been replaced
    /// since.
    pub program: Option<&'a Path>,
    /// Time for a drain, in whole seconds, where another attempt would be refused, too; `None` for no drain.
    pub or_drain: Option<Duration>,
    /// Time to wait for the outcome.
    pub within: Duration,
}

/// Outcome of an order that was not refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UpgradeOutcome {
    /// A successor serves the node.
    Upgraded(UpgradeReport),
    /// Other nodes have its objects, for this reason, and its process ends: its supervisor is to start the next one.
    Drained {
        /// Reason why memory could not be handed over.
        why: String,
    },
}

/// Has the process of a node on this host start a successor, which takes over, and waits for the outcome.
///
/// # Errors
/// When no process of the node runs here, when it refuses, or when the successor does not serve, or the node is not
/// drained, within its time: the text says what is to be done.
pub fn upgrade(
    cluster: &str,
    runtime_directory: Option<&Path>,
    order: UpgradeOrder<'_>,
) -> Result<UpgradeOutcome, Error> {
    let UpgradeOrder { node, program, or_drain, within } = order;
    let path = socket_path(&sockets_of(runtime_directory)?, cluster, node);
    let stream = UnixStream::connect(&path).map_err(|_| HandoverError::NotRunning { node, path })?;
    check_user(&stream)?;
    let program = program.map(|path| path.display().to_string());
    let or_drain_s = or_drain.map(|time| time.as_secs());
    send(&stream, &json!({ "kind": "upgrade", "program": program, "or_drain_s": or_drain_s }), &[], REPLY)?;
    let after = within.saturating_add(or_drain.unwrap_or_default());
    let (message, _) = receive(&stream, 0, after).map_err(|error| match error {
        HandoverError::Silent => HandoverError::NoOutcome { after },
        error => error,
    })?;
    if expect(&message, "drained").is_ok() {
        return Ok(UpgradeOutcome::Drained { why: text(&message, "why")?.to_owned() });
    }
    let software = |name| text(&message, name).map(str::to_owned);
    Ok(UpgradeOutcome::Upgraded(UpgradeReport::of(&message, software("from")?, software("to")?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_survives_its_message() {
        let report = UpgradeReport {
            from: "kvplane/0.1.0".to_owned(),
            to: "kvplane/0.2.0".to_owned(),
            pid: 77,
            objects: 3,
            bytes: 4096,
            dropped: 1,
            is_empty: false,
            pause_ns: 150_000_000,
        };
        let message = report.message();
        let again = UpgradeReport::of(&message, report.from.clone(), report.to.clone()).expect("a report");
        assert_eq!(again, report);
        for name in ["kind", "pid", "objects", "bytes", "dropped", "is_empty", "pause_ns"] {
            let mut lacking = message.clone();
            lacking.as_object_mut().expect("an object").remove(name);
            assert!(UpgradeReport::of(&lacking, String::new(), String::new()).is_err(), "{name}");
        }
    }
}
