//! Upgrades of a running node: operators who ask for one, and the successor that this process starts for it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane::NodeId;
use kvplane::handover::{HandoverError, HandoverRequest, Operator, SuccessorLink, UpgradeReport};
use tokio::sync::mpsc::Receiver;

use crate::command::Failure;
use crate::command::node::{finish_moves, not_taken};
use crate::command::process::stop::Stop;
use crate::command::size;

/// Longest time from the start of a successor until it is ready to take over.
const PREPARATION: Duration = Duration::from_secs(300);
/// Time after which the operator gets an error if a successor that has taken over does not serve yet: it waits for a
/// control plane.
const SERVES: Duration = Duration::from_secs(90);
/// Interval at which a process that has handed over looks for signals.
const LOOK: Duration = Duration::from_millis(500);
/// Longest time until a successor that is stopped has ended.
const STOPS: Duration = Duration::from_secs(20);

/// Flag with which a successor is started.
const TAKE_OVER: &str = "--take-over";

/// Upgrade in progress, of which there is one at a time.
pub(crate) struct Upgrades {
    pending: Option<PendingUpgrade>,
    /// Number of the node, if the arguments of this process do not have it.
    drawn: Option<NodeId>,
}

/// Event that a waiting node has to act on.
pub(crate) enum Turn {
    /// A signal stops the process.
    Stop,
    /// A successor is ready to take over.
    Take(SuccessorLink),
    /// The node is to be drained, because no successor can take over.
    Drain(DrainOrder),
}

/// Order to drain a node in place of an upgrade.
pub(crate) struct DrainOrder {
    operator: Operator,
    within: Duration,
    /// Reason why memory cannot be handed over.
    why: String,
}

struct PendingUpgrade {
    operator: Operator,
    or_drain: Option<Duration>,
    successor: Child,
    begun: Instant,
    /// Reason why this process refused its successor.
    refusal: Option<String>,
}

impl Upgrades {
    /// Returns the upgrades of a node that has drawn this number, if it has.
    pub(crate) const fn of(drawn: Option<NodeId>) -> Self {
        Self { pending: None, drawn }
    }

    /// Waits for a signal, or for a successor that is ready to take over, and starts successors for operators.
    pub(crate) fn wait(
        &mut self,
        requests: &mut Receiver<HandoverRequest>,
        stop: &mut Stop,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Turn, Failure> {
        loop {
            let request = stop.wait_or_receive(requests, || {
                self.look();
                watch()
            })?;
            match request {
                None => return Ok(Turn::Stop),
                Some(HandoverRequest::Take(link)) => {
                    let why = "the operator has hung up";
                    match self.pending.take_if(|pending| pending.operator.has_hung_up()) {
                        None => return Ok(Turn::Take(link)),
                        Some(pending) => {
                            link.refuse(why);
                            pending.end(why);
                        }
                    }
                }
                Some(HandoverRequest::Refused { why, is_lasting, pid }) => {
                    eprintln!("kvplane: a new process was refused: {why}");
                    // Other processes that want to take over do not concern this upgrade.
                    let refused = self.pending.as_mut().filter(|pending| pending.successor.id() == pid);
                    let drains = refused.is_some_and(|pending| {
                        pending.refusal = Some(why.clone());
                        is_lasting && pending.or_drain.is_some() && !pending.operator.has_hung_up()
                    });
                    if let Some(drain) = self.pending.take_if(|_| drains) {
                        return Ok(Turn::Drain(drain.into_drain(why)));
                    }
                }
                Some(HandoverRequest::Upgrade { program, or_drain, operator }) => {
                    self.begin(program.as_deref(), or_drain, operator);
                }
            }
        }
    }

    /// Starts a successor for an operator.
    fn begin(&mut self, program: Option<&Path>, or_drain: Option<Duration>, operator: Operator) {
        if operator.has_hung_up() {
            // It has reported a failure: it did not wait while this process did not run.
            return eprintln!("kvplane: no upgrade: the operator has hung up");
        }
        if self.pending.is_some() {
            return operator.refuse("another upgrade is in progress");
        }
        match start_successor(program, self.drawn) {
            Ok(successor) => {
                announce!("process {} was started to take over", successor.id());
                let begun = Instant::now();
                self.pending = Some(PendingUpgrade { operator, or_drain, successor, begun, refusal: None });
            }
            Err(why) => operator.refuse(&why.to_string()),
        }
    }

    /// Tells the operator if the successor has ended, or takes too long; ends the successor of one that is gone.
    fn look(&mut self) {
        let Some(mut pending) = self.pending.take() else { return };
        let why = match pending.successor.try_wait() {
            Ok(Some(status)) => {
                let refusal = pending.refusal.take();
                refusal
                    .unwrap_or_else(|| format!("the new process ended ({status}); the log of the node has its error"))
            }
            Ok(None) if pending.operator.has_hung_up() => "the operator has hung up".to_owned(),
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

    /// Waits until the successor, which has taken over, serves: as long as it lives, because it has the memory, and a
    /// service manager ends all processes of the node with this one. This process ends then, or with an error. A signal
    /// stops the successor. With `is_kept`, the memory outlives both.
    pub(crate) fn finish(mut self, link: &SuccessorLink, is_kept: bool, stop: &mut Stop) -> Result<(), Failure> {
        let (pending, begun) = (self.pending.take(), Instant::now());
        let tell = |why: &str| {
            eprintln!("kvplane: {why}");
            pending.iter().for_each(|pending| pending.operator.refuse(why));
        };
        let (mut is_late, mut stopped): (bool, Option<Instant>) = (false, None);
        let error = loop {
            match link.wait_until_serving(LOOK) {
                Ok(report) => {
                    announce!("process {} has taken over: {}", report.pid, describe(&report));
                    pending.iter().for_each(|pending| pending.operator.report(&report));
                    return Ok(());
                }
                Err(HandoverError::Silent) if stopped.is_none_or(|stopped| stopped.elapsed() < STOPS) => {}
                Err(error) => break error,
            }
            if !is_late && begun.elapsed() >= SERVES {
                is_late = true;
                tell(
                    "the new process took over and cannot join yet: it goes on trying, and the node does not answer \
                     meanwhile; see that the control plane runs, and do not stop the node: its memory ends with it \
                     unless it has --keep-memory",
                );
            }
            if stopped.is_none() && stop.comes_within(Duration::ZERO) {
                stopped = Some(Instant::now());
                // It may have ended.
                let _ = link.stop();
            }
        };
        let next = match is_kept {
            true => "which serves what the images of its memory have",
            false => "which is empty: its memory has ended with that process",
        };
        if stopped.is_some() {
            tell("the node was stopped before the new process served");
            return Ok(());
        }
        let why = format!(
            "the new process took over and does not serve ({error}): if it has ended, start the node again, {next}"
        );
        pending.iter().for_each(|pending| pending.operator.refuse(&why));
        Err(why.into())
    }
}

impl PendingUpgrade {
    fn end(mut self, why: &str) {
        eprintln!("kvplane: no upgrade: {why}");
        self.operator.refuse(why);
        self.end_successor();
    }

    /// Ends the successor, for a drain of the node.
    fn into_drain(mut self, why: String) -> DrainOrder {
        self.end_successor();
        DrainOrder { operator: self.operator, within: self.or_drain.unwrap_or_default(), why }
    }

    fn end_successor(&mut self) {
        // Both calls are harmless if it has ended.
        let _ = self.successor.kill();
        let _ = self.successor.wait();
    }
}

impl DrainOrder {
    /// Drains the node. Returns an error, by which its process ends and its supervisor starts the next one, if other
    /// nodes have all objects; otherwise the node goes on with its slots.
    pub(crate) fn carry_out(self, node: &kvplane::Node) -> Result<(), Failure> {
        let Self { operator, within, why } = self;
        announce!("draining for at most {} s, for an upgrade without a handover", within.as_secs());
        let begun = Instant::now();
        let failed = match node.drain(within) {
            Ok(left) if left.is_drained() => {
                finish_moves(node);
                operator.drained(&why);
                return Err("drained: other nodes hold all objects, and the next process of this node can start".into());
            }
            Ok(left) => not_taken(left, begun.elapsed()),
            Err(error) => format!("the drain failed: {error}"),
        };
        // Without an answer, an operator has to cancel it.
        let kept = match node.cancel_drain() {
            Ok(()) => "the node goes on".to_owned(),
            Err(error) => format!("the drain is not cancelled (kvplane ctl drain --cancel): {error}"),
        };
        let text = format!("{why}; {failed}: {kept}");
        eprintln!("kvplane: no upgrade: {text}");
        operator.refuse(&text);
        Ok(())
    }
}

/// Starts a program with the arguments of this process, to take over from it; without one, the program that this
/// process was started as. A number that the node has drawn is added.
fn start_successor(program: Option<&Path>, drawn: Option<NodeId>) -> Result<Child, Failure> {
    let mut words = std::env::args_os();
    // Not `current_exe`, which resolves links: a link may name a new version since.
    let own = words.next().map(PathBuf::from).ok_or("this process was started without a name")?;
    let program = program.map_or(own, Path::to_owned);
    let mut command = Command::new(&program);
    command.args(words.filter(|word| word != TAKE_OVER)).arg(TAKE_OVER).stdin(Stdio::null());
    if let Some(node) = drawn {
        command.args(["--node-id", &node.0.to_string()]);
    }
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
