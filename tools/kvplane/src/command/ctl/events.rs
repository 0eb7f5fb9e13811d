//! `kvplane ctl events`: prints events of objects as they happen.

use std::io::Write;
use std::sync::mpsc::sync_channel;

use clap::Args;
use kvplane::ControlLink;
use kvplane::rpc::message::{EventReport, NodeEvents, ObjectChange, ObjectMedium, WatchEvents};
use serde_json::json;

use crate::command::Failure;

/// Most reports that wait to be printed.
const REPORTS: usize = 256;

/// Print events of objects.
#[derive(Args)]
pub(crate) struct Follow {
    /// Print as JSON, one event a line.
    #[arg(long)]
    json: bool,
    /// Leave out the objects that exist already.
    #[arg(long)]
    live: bool,
    /// Number of events after which the command ends. Default: no limit.
    #[arg(long, value_name = "EVENTS")]
    count: Option<u64>,
}

impl Follow {
    pub(crate) fn run(&self, link: &ControlLink) -> Result<(), Failure> {
        let (sender, reports) = sync_channel(REPORTS);
        link.stream(WatchEvents, move |item| sender.try_send(item.events).is_ok())?;
        let mut left = self.count.unwrap_or(u64::MAX);
        for report in reports {
            if report.lost > 0 {
                eprintln!("node {} shard {}: {} events were lost here", report.node, report.shard, report.lost);
            }
            let is_snapshot = matches!(report.part, EventReport::SnapshotBegins | EventReport::SnapshotGoesOn);
            if !self.live || !is_snapshot {
                left = self.print(&report, is_snapshot, left)?;
            }
            if left == 0 {
                return Ok(());
            }
        }
        Err("the control plane ended the stream: it has ended, refused the stream, or this terminal did not keep up"
            .into())
    }

    /// Prints at most `left` events; returns how many more may be printed.
    fn print(&self, report: &NodeEvents, is_snapshot: bool, mut left: u64) -> Result<u64, Failure> {
        let mut out = std::io::stdout().lock();
        for (at, event) in report.events.iter().enumerate() {
            if left == 0 {
                break;
            }
            left -= 1;
            let change = match event.change {
                ObjectChange::Stored => "stored",
                ObjectChange::Removed => "removed",
                ObjectChange::Cleared => "cleared",
            };
            let medium = match event.medium {
                ObjectMedium::Memory => "memory",
                ObjectMedium::Ssd => "ssd",
            };
            let name = report.names.iter().find(|name| name.at as usize == at);
            let number = (!is_snapshot && report.part == EventReport::Live).then(|| report.first + at as u64);
            let line = if self.json {
                json!({
                    "node": report.node,
                    "shard": report.shard,
                    "number": number,
                    "snapshot": is_snapshot,
                    "change": change,
                    "medium": medium,
                    "digest": format!("{:032x}", event.digest.0),
                    "tenant": name.map(|name| shown(&name.tenant)),
                    "key": name.map(|name| shown(&name.key)),
                    "bytes": event.bytes,
                })
                .to_string()
            } else {
                let number = number.map_or_else(|| "-".to_owned(), |number| number.to_string());
                format!(
                    "node {} shard {} {number:>10} {change:<7} {medium:<6} {:032x} {:>10}  {}",
                    report.node,
                    report.shard,
                    event.digest.0,
                    event.bytes,
                    name.map_or_else(String::new, |name| shown(&name.key))
                )
            };
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        Ok(left)
    }
}

/// Formats bytes as text, or with escapes if they are not UTF-8 or contain control characters.
fn shown(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    }
}
