//! Upgrades of a running node: operators who ask for one, and the successor that this process starts for it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane::handover::{HandoverRequest, Operator, SuccessorLink, UpgradeReport};
use tokio::sync::mpsc::Receiver;

use crate::command::Failure;
use crate::command::process::stop::Stop;
use crate::command::size;

/// Longest time from the start of a successor until it is ready to take over.
const PREPARATION: Duration = Duration::from_secs(300);
/// Longest time in which a successor that has taken over must serve: it may wait for a control plane.
const SERVES: Duration = Duration::from_secs(90);

/// Flag with which a successor is started.
const TAKE_OVER: &str = "--take-over";

/// Upgrade in progress, of which there is one at a time.
#[derive(Default)]
pub(crate) struct Upgrades {
    pending: Option<PendingUpgrade>,
}

struct PendingUpgrade {
    operator: Operator,
    successor: Child,
    begun: Instant,
    /// Reason why this process refused its successor.
    refusal: Option<String>,
}

impl Upgrades {
    /// Waits for a signal, or for a successor that is ready to take over, and starts successors for operators. Returns
    /// the successor; `None` for a signal.
    pub(crate) fn wait(
        &mut self,
        requests: &mut Receiver<HandoverRequest>,
        stop: &mut Stop,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Option<SuccessorLink>, Failure> {
        loop {
            let request = stop.wait_or_receive(requests, || {
                self.look();
                watch()
            })?;
            match request {
                None => return Ok(None),
                Some(HandoverRequest::Take(link)) => return Ok(Some(link)),
                Some(HandoverRequest::Refused(why)) => {
                    eprintln!("kvplane: a new process was refused: {why}");
                    self.pending.iter_mut().for_each(|pending| pending.refusal = Some(why.clone()));
                }
                Some(HandoverRequest::Upgrade { program, operator }) => self.begin(program.as_deref(), operator),
            }
        }
    }

    /// Starts a successor for an operator.
    fn begin(&mut self, program: Option<&Path>, operator: Operator) {
        if self.pending.is_some() {
            return operator.refuse("another upgrade is in progress");
        }
        match start_successor(program) {
            Ok(successor) => {
                announce!("process {} was started to take over", successor.id());
                self.pending = Some(PendingUpgrade { operator, successor, begun: Instant::now(), refusal: None });
            }
            Err(why) => operator.refuse(&why.to_string()),
        }
    }

    /// Tells the operator if the successor has ended, or takes too long.
    fn look(&mut self) {
        let Some(mut pending) = self.pending.take() else { return };
        let why = match pending.successor.try_wait() {
            Ok(Some(status)) => {
                let refusal = pending.refusal.take();
                refusal
                    .unwrap_or_else(|| format!("the new process ended ({status}); the log of the node has its error"))
            }
            Ok(None) if pending.begun.elapsed() < PREPARATION => {
                self.pending = Some(pending);
                return;
            }
            Ok(None) => format!("the new process was not ready within {} s", PREPARATION.as_secs()),
            Err(error) => format!("the new process is lost: {error}"),
        };
        pending.end(&why);
    }

    /// Tells the operator why there is no upgrade, and ends the successor.
    pub(crate) fn refuse(&mut self, why: &str) {
        if let Some(pending) = self.pending.take() {
            pending.end(why);
        }
    }

    /// Waits until the successor, which has taken over, serves. This process ends then, or with an error.
    pub(crate) fn finish(mut self, link: &SuccessorLink) -> Result<(), Failure> {
        let pending = self.pending.take();
        match link.wait_until_serving(SERVES) {
            Ok(report) => {
                announce!("process {} has taken over: {}", report.pid, describe(&report));
                pending.iter().for_each(|pending| pending.operator.report(&report));
                Ok(())
            }
            Err(error) => {
                let why = format!(
                    "the new process took over and does not serve ({error}): if it has ended, start the node again, \
                     which serves what the images of its memory have"
                );
                pending.iter().for_each(|pending| pending.operator.refuse(&why));
                Err(why.into())
            }
        }
    }
}

impl PendingUpgrade {
    fn end(mut self, why: &str) {
        eprintln!("kvplane: no upgrade: {why}");
        self.operator.refuse(why);
        // Both calls are harmless if it has ended.
        let _ = self.successor.kill();
        let _ = self.successor.wait();
    }
}

/// Starts a program with the arguments of this process, to take over from it; without one, the program that this
/// process was started as.
fn start_successor(program: Option<&Path>) -> Result<Child, Failure> {
    let mut words = std::env::args_os();
    // Not `current_exe`, which resolves links: a link may name a new version since.
    let own = words.next().map(PathBuf::from).ok_or("this process was started without a name")?;
    let program = program.map_or(own, Path::to_owned);
    let mut command = Command::new(&program);
    command.args(words.filter(|word| word != TAKE_OVER)).arg(TAKE_OVER).stdin(Stdio::null());
    command.spawn().map_err(|error| format!("{} cannot be started: {error}", program.display()).into())
}

/// Describes an upgrade to an operator.
pub(crate) fn describe(report: &UpgradeReport) -> String {
    let UpgradeReport { objects, bytes, dropped, is_empty, pause_ns, .. } = report;
    let pause = format!("a pause of {:.0} ms", *pause_ns as f64 / 1e6);
    if *is_empty {
        return format!("{pause}; memory is empty in some shards, the log has the reason; {objects} objects kept");
    }
    let lost = if *dropped > 0 { format!(", {dropped} dropped") } else { String::new() };
    format!("{objects} objects kept ({}){lost}, {pause}", size::show(*bytes))
}
