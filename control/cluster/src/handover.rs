//! Order of a handover at both of its ends: [`RunningEnd`] at the process that serves a node, [`SuccessorEnd`] at the
//! one that is to take over.
//!
//! Each end says what its process has to do next, from what has happened to it; a process has one handover at a time.
//! The messages, their descriptors, deadlines and the node itself belong to the host.
//!
//! Invariant: at most one of two processes may serve ([`RunningEnd::may_serve`], [`SuccessorEnd::may_serve`]),
//! whichever of them is killed or falls silent, and at whichever moment. The running process gives its right up before
//! it sends [`RunningStep::Go`], and takes it back only if that could not be sent; the successor has it from the
//! arrival of that message on, and no message before gives it.

/// Event of a handover at the running process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunningInput {
    /// A successor has introduced itself.
    Hello {
        /// True if its shape and its formats fit.
        fits: bool,
    },
    /// The successor has mapped the memory, and wants to take over.
    Ready,
    /// The shards have ended, and have left images of their memory as far as they could.
    Stopped,
    /// The node cannot stop now, and serves as before.
    CannotStop,
    /// The claim and the listeners were sent.
    Passed,
    /// The successor has the claim and the listeners.
    Taken,
    /// The last word was sent.
    Went,
    /// The successor serves.
    Serves,
    /// The successor has ended, hung up, been silent for too long, or said what it should not; or a message could not
    /// be sent to it.
    Lost,
    /// The process serves again.
    Resumed,
}

/// Next action of a running process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunningStep {
    /// Wait for what comes.
    Wait,
    /// Tell the successor why it is refused, and go on.
    Refuse,
    /// Offer the memory.
    Offer,
    /// Stop the shards.
    Stop,
    /// Send the claim and the listeners.
    Pass,
    /// Send the last word: this process does not serve any more.
    Go,
    /// Serve again, from the images that it wrote itself.
    Resume,
    /// End.
    End,
}

/// Progress of a running process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum RunningState {
    /// No successor is known.
    #[default]
    Serving,
    /// A successor prepares.
    Offered,
    /// The shards end.
    Stopping,
    /// The shards end, and there is no successor any more.
    StoppingAlone,
    /// The claim and the listeners are being sent.
    Passing,
    /// The successor has to confirm.
    Confirming,
    /// The last word is being sent.
    Going,
    /// The shards begin again.
    Resuming,
    /// The last word was sent.
    Over,
}

/// End of a handover at the process that serves the node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct RunningEnd {
    state: RunningState,
}

impl RunningEnd {
    /// Returns true if the process may serve the node's memory at its ports: its shards run, end, or begin again.
    #[must_use]
    pub const fn may_serve(&self) -> bool {
        matches!(
            self.state,
            RunningState::Serving
                | RunningState::Offered
                | RunningState::Stopping
                | RunningState::StoppingAlone
                | RunningState::Resuming
        )
    }

    /// Takes note of what has happened; returns what is to be done. What fits no state counts as the loss of the
    /// successor.
    pub fn handle(&mut self, input: RunningInput) -> RunningStep {
        use RunningState as State;
        let (state, step) = match (self.state, input) {
            (State::Serving, RunningInput::Hello { fits: true }) => (State::Offered, RunningStep::Offer),
            (state @ (State::Serving | State::Offered), RunningInput::Hello { .. }) => (state, RunningStep::Refuse),
            (State::Offered, RunningInput::Ready) => (State::Stopping, RunningStep::Stop),
            (State::Serving | State::Offered, _) => (State::Serving, RunningStep::Wait),
            (State::Stopping, RunningInput::Stopped) => (State::Passing, RunningStep::Pass),
            (State::Stopping | State::StoppingAlone, RunningInput::CannotStop) => (State::Serving, RunningStep::Refuse),
            (State::Stopping, _) => (State::StoppingAlone, RunningStep::Wait),
            (State::StoppingAlone, RunningInput::Stopped) => (State::Resuming, RunningStep::Resume),
            (State::StoppingAlone, _) => (State::StoppingAlone, RunningStep::Wait),
            (State::Passing, RunningInput::Passed) => (State::Confirming, RunningStep::Wait),
            (State::Confirming, RunningInput::Taken) => (State::Going, RunningStep::Go),
            (State::Going, RunningInput::Went) => (State::Over, RunningStep::Wait),
            (State::Passing | State::Confirming | State::Going, _) => (State::Resuming, RunningStep::Resume),
            (State::Resuming, RunningInput::Resumed) => (State::Serving, RunningStep::Wait),
            (State::Resuming, _) => (State::Resuming, RunningStep::Wait),
            (State::Over, _) => (State::Over, RunningStep::End),
        };
        self.state = state;
        step
    }
}

/// Event of a handover at the successor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SuccessorInput {
    /// The running process offers its memory.
    Offered,
    /// The memory is mapped, and this process could serve it.
    Mapped,
    /// The claim and the listeners of all shards have arrived.
    Passed,
    /// The last word has arrived.
    Go,
    /// The running process has refused, ended, hung up, been silent for too long, or said what it should not; or a
    /// message could not be sent to it; or this process could not serve.
    Lost,
}

/// Next action of a successor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SuccessorStep {
    /// Map the memory.
    Map,
    /// Tell the running process that this one is ready.
    Ask,
    /// Confirm that the claim and the listeners have arrived.
    Confirm,
    /// Serve the node.
    Serve,
    /// Go on.
    Wait,
    /// End, without having served.
    End,
}

/// Progress of a successor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum SuccessorState {
    /// It has introduced itself.
    #[default]
    Greeting,
    /// It maps the memory.
    Mapping,
    /// It has to get the claim and the listeners.
    Asking,
    /// It has to get the last word.
    Confirming,
    Serving,
    Ended,
}

/// End of a handover at the successor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct SuccessorEnd {
    state: SuccessorState,
}

impl SuccessorEnd {
    /// Returns true if the process may serve the node's memory at its ports.
    #[must_use]
    pub const fn may_serve(&self) -> bool {
        matches!(self.state, SuccessorState::Serving)
    }

    /// Takes note of what has happened; returns what is to be done. What fits no state counts as the loss of the
    /// running process.
    pub fn handle(&mut self, input: SuccessorInput) -> SuccessorStep {
        use SuccessorState as State;
        let (state, step) = match (self.state, input) {
            (State::Greeting, SuccessorInput::Offered) => (State::Mapping, SuccessorStep::Map),
            (State::Mapping, SuccessorInput::Mapped) => (State::Asking, SuccessorStep::Ask),
            (State::Asking, SuccessorInput::Passed) => (State::Confirming, SuccessorStep::Confirm),
            (State::Confirming, SuccessorInput::Go) => (State::Serving, SuccessorStep::Serve),
            // The running process ends now, whether this one has told it that it serves or not.
            (State::Serving, _) => (State::Serving, SuccessorStep::Wait),
            (State::Greeting | State::Mapping | State::Asking | State::Confirming | State::Ended, _) => {
                (State::Ended, SuccessorStep::End)
            }
        };
        self.state = state;
        step
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use super::*;

    /// Message of a handover in flight.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Letter {
        Hello,
        Offer,
        Ready,
        Refused,
        Passed,
        Taken,
        Go,
        Serves,
    }

    /// Two processes, and what is in flight between them.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Pair {
        /// `None` for a process that was killed, or has ended.
        running: Option<RunningEnd>,
        successor: Option<SuccessorEnd>,
        to_running: VecDeque<Letter>,
        to_successor: VecDeque<Letter>,
        /// The process is stopping its shards, or mapping memory.
        is_stopping: bool,
        is_mapping: bool,
        /// The process knows that the other one is gone.
        is_alone: (bool, bool),
    }

    impl Pair {
        fn new() -> Self {
            Self {
                running: Some(RunningEnd::default()),
                successor: Some(SuccessorEnd::default()),
                to_running: [Letter::Hello].into(),
                to_successor: VecDeque::new(),
                is_stopping: false,
                is_mapping: false,
                is_alone: (false, false),
            }
        }

        fn serving(&self) -> usize {
            let runs = self.running.is_some_and(|end| end.may_serve());
            usize::from(runs) + usize::from(self.successor.is_some_and(|end| end.may_serve()))
        }

        /// Gives the running process an input, and carries out what follows from it.
        fn run(&mut self, input: RunningInput) {
            let mut input = Some(input);
            while let (Some(end), Some(given)) = (&mut self.running, input.take()) {
                let sends = |letter, box_: &mut VecDeque<Letter>, is_there: bool| {
                    if is_there {
                        box_.push_back(letter);
                    }
                    is_there
                };
                let is_there = self.successor.is_some();
                let sent = |is_sent: bool, then| if is_sent { then } else { RunningInput::Lost };
                match end.handle(given) {
                    RunningStep::Wait => {}
                    RunningStep::Refuse => _ = sends(Letter::Refused, &mut self.to_successor, is_there),
                    RunningStep::Offer => _ = sends(Letter::Offer, &mut self.to_successor, is_there),
                    RunningStep::Stop => self.is_stopping = true,
                    RunningStep::Pass => {
                        input =
                            Some(sent(sends(Letter::Passed, &mut self.to_successor, is_there), RunningInput::Passed));
                    }
                    RunningStep::Go => {
                        input = Some(sent(sends(Letter::Go, &mut self.to_successor, is_there), RunningInput::Went));
                    }
                    RunningStep::Resume => input = Some(RunningInput::Resumed),
                    RunningStep::End => self.running = None,
                }
            }
        }

        fn succeed(&mut self, input: SuccessorInput) {
            let Some(end) = &mut self.successor else { return };
            let mut send = |letter| {
                if self.running.is_some() {
                    self.to_running.push_back(letter);
                }
            };
            match end.handle(input) {
                SuccessorStep::Map => self.is_mapping = true,
                SuccessorStep::Ask => send(Letter::Ready),
                SuccessorStep::Confirm => send(Letter::Taken),
                SuccessorStep::Serve => send(Letter::Serves),
                SuccessorStep::Wait => {}
                SuccessorStep::End => self.successor = None,
            }
        }

        /// Returns all states that can be next.
        fn next(&self) -> Vec<Self> {
            let mut all = Vec::new();
            let mut add = |act: &dyn Fn(&mut Self)| {
                let mut next = self.clone();
                act(&mut next);
                all.push(next);
            };
            if let (Some(_), Some(letter)) = (self.running, self.to_running.front()) {
                let input = match letter {
                    Letter::Hello => RunningInput::Hello { fits: true },
                    Letter::Ready => RunningInput::Ready,
                    Letter::Taken => RunningInput::Taken,
                    Letter::Serves => RunningInput::Serves,
                    other => panic!("{other:?} is sent by the running process"),
                };
                add(&|next| {
                    next.to_running.pop_front();
                    next.run(input);
                });
                if *letter == Letter::Hello {
                    add(&|next| {
                        next.to_running.pop_front();
                        next.run(RunningInput::Hello { fits: false });
                    });
                }
            }
            if let (Some(_), Some(letter)) = (self.successor, self.to_successor.front()) {
                let input = match letter {
                    Letter::Offer => SuccessorInput::Offered,
                    Letter::Passed => SuccessorInput::Passed,
                    Letter::Go => SuccessorInput::Go,
                    _ => SuccessorInput::Lost,
                };
                add(&|next| {
                    next.to_successor.pop_front();
                    next.succeed(input);
                });
            }
            if self.is_stopping {
                for input in [RunningInput::Stopped, RunningInput::CannotStop] {
                    add(&|next| {
                        next.is_stopping = false;
                        next.run(input);
                    });
                }
            }
            if self.is_mapping {
                for input in [SuccessorInput::Mapped, SuccessorInput::Lost] {
                    add(&|next| {
                        next.is_mapping = false;
                        next.succeed(input);
                    });
                }
            }
            // Either is killed, or takes the other for lost: rightly, or because it is slow.
            if self.running.is_some() {
                add(&|next| (next.running, next.is_stopping) = (None, false));
                if !self.is_alone.0 {
                    add(&|next| {
                        next.is_alone.0 = true;
                        next.run(RunningInput::Lost);
                    });
                }
            }
            if self.successor.is_some() {
                add(&|next| (next.successor, next.is_mapping) = (None, false));
                if !self.is_alone.1 {
                    add(&|next| {
                        next.is_alone.1 = true;
                        next.succeed(SuccessorInput::Lost);
                    });
                }
            }
            all
        }
    }

    /// All histories of a handover: never do two processes serve, and those without a fault end with the successor.
    #[test]
    fn one_process_serves_at_a_time_whatever_fails_and_whenever() {
        let (mut seen, mut left) = (BTreeSet::new(), vec![Pair::new()]);
        let (mut taken_over, mut resumed) = (false, false);
        while let Some(pair) = left.pop() {
            assert!(pair.serving() <= 1, "{pair:?}");
            let successor_serves = pair.successor.is_some_and(|end| end.may_serve());
            taken_over |= successor_serves && pair.running.is_none();
            resumed |= pair.successor.is_none() && pair.running.is_some_and(|end| end.may_serve());
            for next in pair.next() {
                if seen.insert(next.clone()) {
                    left.push(next);
                }
            }
        }
        assert!(taken_over && resumed && seen.len() > 100, "{} states", seen.len());
    }

    #[test]
    fn a_handover_without_a_fault_goes_through_its_steps() {
        let (mut running, mut successor) = (RunningEnd::default(), SuccessorEnd::default());
        assert_eq!(running.handle(RunningInput::Hello { fits: false }), RunningStep::Refuse);
        assert_eq!(running.handle(RunningInput::Hello { fits: true }), RunningStep::Offer);
        assert_eq!(running.handle(RunningInput::Hello { fits: true }), RunningStep::Refuse, "one at a time");
        assert_eq!(successor.handle(SuccessorInput::Offered), SuccessorStep::Map);
        assert_eq!(successor.handle(SuccessorInput::Mapped), SuccessorStep::Ask);
        assert_eq!(running.handle(RunningInput::Ready), RunningStep::Stop);
        assert_eq!(running.handle(RunningInput::Stopped), RunningStep::Pass);
        assert_eq!(running.handle(RunningInput::Passed), RunningStep::Wait);
        assert_eq!(successor.handle(SuccessorInput::Passed), SuccessorStep::Confirm);
        assert_eq!(running.handle(RunningInput::Taken), RunningStep::Go);
        assert!(!running.may_serve() && !successor.may_serve());
        assert_eq!(running.handle(RunningInput::Went), RunningStep::Wait);
        assert_eq!(successor.handle(SuccessorInput::Go), SuccessorStep::Serve);
        assert_eq!(running.handle(RunningInput::Serves), RunningStep::End);
        assert_eq!(successor.handle(SuccessorInput::Lost), SuccessorStep::Wait, "the former process has ended");
        assert!(!running.may_serve() && successor.may_serve());
    }

    #[test]
    fn a_node_that_cannot_stop_goes_on_and_one_whose_successor_ends_serves_again() {
        let mut running = RunningEnd::default();
        let ready = |running: &mut RunningEnd| {
            running.handle(RunningInput::Hello { fits: true });
            running.handle(RunningInput::Ready)
        };
        assert_eq!(ready(&mut running), RunningStep::Stop);
        assert_eq!(running.handle(RunningInput::CannotStop), RunningStep::Refuse);
        assert!(running.may_serve());
        assert_eq!(ready(&mut running), RunningStep::Stop);
        assert_eq!(running.handle(RunningInput::Lost), RunningStep::Wait, "it cannot stop halfway");
        assert_eq!(running.handle(RunningInput::Stopped), RunningStep::Resume);
        assert_eq!(running.handle(RunningInput::Resumed), RunningStep::Wait);
        assert!(running.may_serve());
    }
}
