//! A process of the simulated world: a member and its memory, its caller, and what it knows of the control plane.

use std::collections::{BTreeMap, VecDeque};

use kvplane_collective::*;
use kvplane_group::*;
use kvplane_proto::rng::Rng;

use super::workload::Workload;
use super::{CONFIG, MS};
use crate::host::{Frame, Host};

/// Numbers whose epochs a member remembers.
const REMEMBERED: usize = 256;
/// Messages of a caller that wait, at most.
const MESSAGES: usize = 8;
/// Bytes of the messages of each tag.
const MESSAGE_BYTES: [usize; 5] = [0, 8, 64, 200, 700];

/// The operation that a caller waits for.
#[derive(Clone, Debug)]
struct Call {
    work: WorkId,
    number: u64,
    operation: Operation,
    timeout_ns: u64,
    /// Since when the deadline counts: the submission, or the last view that lost a participant.
    since_ns: u64,
}

/// A message that a process has sent, or memory for one.
#[derive(Clone, Copy, Debug)]
struct Message {
    tag: i32,
    is_sent: bool,
    deadline_ns: u64,
}

/// An operation that ended with a result.
#[derive(Clone, Debug)]
pub(crate) struct CallEnd {
    pub(crate) number: u64,
    pub(crate) rank: GroupRank,
    pub(crate) operation: Operation,
    pub(crate) completion: Completion,
    pub(crate) target: Vec<u8>,
}

/// Habits of the callers of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habits {
    /// One of so many calls is late; 0: none.
    pub(crate) late: u64,
    /// Most time between two calls.
    pub(crate) pause_ns: u64,
    pub(crate) has_messages: bool,
    /// Least and most deadline of an operation.
    pub(crate) timeout_ns: (u64, u64),
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) id: ProcessId,
    pub(crate) is_joiner: bool,
    pub(crate) is_stopped: bool,
    pub(crate) roster: u64,
    pub(crate) order: Vec<WorldRank>,
    pub(crate) host: Option<Host>,
    /// Frames for each peer that the member has given, and that have not left.
    pub(crate) outbox: BTreeMap<WorldRank, VecDeque<Frame>>,
    /// Epochs of the results since this membership began.
    pub(crate) results: BTreeMap<u64, u64>,
    pub(crate) reported: Option<(MemberReport, RankSet<GroupRank>)>,
    /// Results that the simulation has not checked.
    pub(crate) finished: Vec<CallEnd>,
    rng: Rng,
    call: Option<Call>,
    next_call_ns: u64,
    /// Time from which on it takes part again.
    ready_ns: Option<u64>,
    messages: BTreeMap<WorkId, Message>,
    sent: u64,
    /// Number of the last message that arrived, by sender, its incarnation and tag.
    arrived: BTreeMap<(GroupRank, u64, i32), u64>,
    pub(crate) mismatches: u64,
}

impl Process {
    pub(crate) fn new(id: ProcessId, is_joiner: bool, seed: u64) -> Self {
        Self {
            id,
            is_joiner,
            is_stopped: false,
            roster: 0,
            order: Vec::new(),
            host: None,
            outbox: BTreeMap::new(),
            results: BTreeMap::new(),
            reported: None,
            finished: Vec::new(),
            rng: Rng::new(seed ^ (id.incarnation << 8), "process"),
            call: None,
            next_call_ns: 0,
            ready_ns: None,
            messages: BTreeMap::new(),
            sent: 0,
            arrived: BTreeMap::new(),
            mismatches: 0,
        }
    }

    pub(crate) fn member(&self) -> Option<&Member> {
        self.host.as_ref().map(|host| &host.member)
    }

    pub(crate) fn view(&self) -> View {
        self.member().map(|member| member.view().clone()).unwrap_or_default()
    }

    pub(crate) fn participates(&self) -> bool {
        self.member().is_some_and(Member::participates)
    }

    pub(crate) fn rank_of(&self, peer: WorldRank) -> Option<GroupRank> {
        self.order.iter().position(|rank| *rank == peer).map(|at| GroupRank(at as u8))
    }

    /// Ranks of the group as ranks of the world.
    pub(crate) fn in_world(&self, ranks: RankSet<GroupRank>) -> RankSet<WorldRank> {
        ranks.iter().filter_map(|rank| self.order.get(usize::from(rank.0)).copied()).collect()
    }

    /// Applies a status.
    pub(crate) fn follow(&mut self, status: &Status, now_ns: u64) {
        self.roster = self.roster.max(status.roster);
        let Some(group) = status.groups.first() else { return };
        if self.order.len() < group.order.len() {
            self.order.clone_from(&group.order);
        }
        if self.host.is_none() {
            let member = Member::new(group.group, group.rank, self.id.incarnation, !self.is_joiner, CONFIG);
            self.host = Some(Host::new(member));
            if self.is_joiner {
                self.ready_ns = Some(now_ns + self.rng.below(80) * MS);
            }
        }
        let Some(host) = &mut self.host else { return };
        let (before, had) = (host.member.view().clone(), host.member.participates());
        host.member.follow(group, now_ns);
        host.drain();
        let (view, has) = (host.member.view(), host.member.participates());
        assert!(view.epoch >= before.epoch, "a view went back");
        if view.epoch > before.epoch {
            if has && !had {
                self.results.clear();
                self.next_call_ns = now_ns;
            }
            if had && !has {
                self.ready_ns = Some(now_ns + self.rng.below(80) * MS);
            }
            let has_lost = !before.participants().without(view.participants()).is_empty();
            if let Some(call) = self.call.as_mut().filter(|_| has_lost) {
                call.since_ns = now_ns;
            }
        }
    }

    /// Lets the caller call, and the member's time pass.
    pub(crate) fn advance(&mut self, now_ns: u64, workload: &Workload, habits: Habits) {
        let Some(host) = &mut self.host else { return };
        if self.ready_ns.is_some_and(|ready_ns| now_ns >= ready_ns) {
            self.ready_ns = None;
            host.member.set_ready();
        }
        host.advance(now_ns);
        let mut turns = 0;
        while host.member.poll_timeout().is_some_and(|due_ns| due_ns <= now_ns) {
            host.member.handle_timeout(now_ns);
            host.advance(now_ns);
            turns += 1;
            assert!(turns < 100, "the next time is due already: {host:?}");
        }
        self.take_ended(now_ns, habits);
        if self.call.is_none() && now_ns >= self.next_call_ns {
            self.begin_call(now_ns, workload, habits);
        }
        if habits.has_messages && self.messages.len() < MESSAGES && self.rng.below(40) == 0 {
            self.begin_message(now_ns, habits);
        }
    }

    fn begin_call(&mut self, now_ns: u64, workload: &Workload, habits: Habits) {
        let Some(host) = &mut self.host else { return };
        let member = &host.member;
        let is_founder = member.view().epoch == 0 && !self.is_joiner;
        if !member.participates() && !is_founder {
            return;
        }
        let places = (member.view().size() as u8).max(workload.roots()).max(member.rank().0 + 1);
        let number = member.next_number();
        let operation = workload.operation(number, member.rank(), places);
        let source = workload.source(number, member.rank(), &operation);
        let (least, most) = habits.timeout_ns;
        let timeout_ns = least + self.rng.below(most - least + 1);
        let work = host.submit(&operation, source, timeout_ns).expect("a good operation");
        host.advance(now_ns);
        self.call = Some(Call { work, number, operation, timeout_ns, since_ns: now_ns });
    }

    fn begin_message(&mut self, now_ns: u64, habits: Habits) {
        let Some(host) = &mut self.host else { return };
        // A control plane that has restarted may not know a joiner's rank yet.
        let members = host.member.view().incarnations.len() as u64;
        let peer = GroupRank(self.rng.below(members.max(1)) as u8);
        if peer == host.member.rank() || members == 0 {
            return;
        }
        let tag = self.rng.below(MESSAGE_BYTES.len() as u64) as i32;
        let bytes = MESSAGE_BYTES[tag as usize];
        let deadline_ns = now_ns + (100 + self.rng.below(1_500)) * MS;
        let is_sent = self.rng.below(2) == 0;
        let work = if is_sent {
            self.sent += 1;
            let payload = payload(self.id.incarnation, self.sent, bytes);
            host.send(peer, tag, payload, deadline_ns)
        } else {
            let from = (self.rng.below(3) > 0).then_some(peer);
            host.receive(from, tag, bytes, deadline_ns)
        };
        self.messages.insert(work, Message { tag, is_sent, deadline_ns });
        self.take_ended(now_ns, habits);
    }

    fn take_ended(&mut self, now_ns: u64, habits: Habits) {
        let Some(host) = &mut self.host else { return };
        while let Some((work, outcome, target)) = host.ended.pop_front() {
            if let Some(message) = self.messages.remove(&work) {
                if let (Ok(completion), false) = (&outcome, message.is_sent) {
                    let from = completion.peer.expect("a message has a peer");
                    if let Some((incarnation, number)) = parse(&target) {
                        let last = self.arrived.entry((from, incarnation, message.tag)).or_insert(0);
                        assert!(*last < number, "message {number} after {last}");
                        *last = number;
                        assert_eq!(target, payload(incarnation, number, target.len()), "bytes of a message");
                    }
                }
                continue;
            }
            let call = self.call.take_if(|call| call.work == work).expect("the caller's operation");
            let rank = host.member.rank();
            match outcome {
                Ok(completion) => {
                    self.results.insert(call.number, completion.epoch);
                    if self.results.len() > REMEMBERED {
                        self.results.pop_first();
                    }
                    let Call { number, operation, .. } = call;
                    self.finished.push(CallEnd { number, rank, operation, completion, target });
                }
                Err(Failure::Mismatch { .. }) => self.mismatches += 1,
                Err(Failure::RootGone { root }) => assert_eq!(call.operation.root(), Some(root)),
                Err(
                    Failure::Deadline { .. }
                    | Failure::OthersDeadline { .. }
                    | Failure::EndedElsewhere
                    | Failure::NotActive
                    | Failure::Excluded { .. },
                ) => {}
                Err(other) => panic!("{other}"),
            }
            let pause_ns = match habits.late {
                late if late > 0 && self.rng.below(late) == 0 => self.rng.below(2_000) * MS,
                _ => self.rng.below(habits.pause_ns),
            };
            self.next_call_ns = now_ns + pause_ns;
        }
    }

    /// Checks that nothing waits longer than it may, and that nothing grows.
    pub(crate) fn check_limits(&self, now_ns: u64) {
        let Some(host) = &self.host else { return };
        if let Some(call) = &self.call {
            let until_ns = call.since_ns + call.timeout_ns + CONFIG.verdict_ns;
            assert!(now_ns <= until_ns + 5 * MS, "{:?} waits beyond its deadline: {:?}", call, host.member);
        }
        for message in self.messages.values() {
            assert!(now_ns <= message.deadline_ns + 5 * MS, "{message:?} waits beyond its deadline");
        }
        assert!(host.works() <= self.messages.len() + 3, "memory of {} works", host.works());
        assert!(host.kept() <= 1_000, "{} payloads are kept", host.kept());
    }
}

/// Payload of a message: who sent it, its number, and a pattern.
fn payload(incarnation: u64, number: u64, bytes: usize) -> Vec<u8> {
    let word = (incarnation << 32) | number;
    word.to_le_bytes().into_iter().chain((8..bytes).map(|at| (number as usize * 7 + at) as u8)).take(bytes).collect()
}

fn parse(payload: &[u8]) -> Option<(u64, u64)> {
    let word = u64::from_le_bytes(*payload.first_chunk()?);
    Some((word >> 32, word & 0xFFFF_FFFF))
}
