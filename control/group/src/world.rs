//! The processes of one job and their groups.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::rng::mix64;

use crate::config::WorldConfig;
use crate::counters::Counters;
use crate::group::{Group, GroupId, GroupSpec, GroupSummary, View};
use crate::message::{Input, Output, Reply, Report, Status};
use crate::rank::{GroupRank, RankSet, WorldRank};
use crate::record::GroupRecord;
use crate::rejection::Rejection;
use crate::roster::{Process, ProcessId, ProcessState, ProcessSummary, Roster};

/// State machine of a world. Its driver calls [`Self::handle`] with every event, and with [`Input::Tick`] no later than
/// [`Self::poll_timeout`]; after each call it carries out the outputs in order.
///
/// A driver that was late, because its process was stopped, excuses the silence of that time: reports may be waiting
/// unread.
#[derive(Debug)]
pub struct World {
    name: String,
    config: WorldConfig,
    processes: Roster,
    groups: BTreeMap<GroupId, Group>,
    /// Durable changes that the driver has not taken, and ranks whose status it has not sent.
    changes: VecDeque<Output>,
    announced: RankSet<WorldRank>,
    /// Seed and number of the next group's id.
    next: (u64, u64),
    /// Counters of processes, of rejections, and of groups that were forgotten.
    counters: Counters,
    now_ns: u64,
}

impl World {
    /// Starts a world from its durable records: none, if it is new. `term` grows with every start of the control plane,
    /// and `seed` is random.
    #[must_use]
    pub fn start(
        name: &str,
        config: WorldConfig,
        records: Vec<GroupRecord>,
        term: u32,
        seed: u64,
        now_ns: u64,
    ) -> Self {
        let mut processes = Roster::new(term);
        let mut groups = BTreeMap::new();
        for record in records {
            let active = record.spec.order.iter().zip(&record.view.incarnations).zip(&record.addresses);
            for ((rank, incarnation), address) in active {
                let (Some(incarnation), Some(address)) = (*incarnation, address.clone()) else { continue };
                let id = ProcessId { rank: *rank, incarnation };
                processes.expect(Process { id, address }, now_ns.saturating_add(config.grace_ns));
            }
            groups.insert(record.group, Group::restore(record, now_ns));
        }
        let (name, next) = (name.to_owned(), (seed, u64::from(term)));
        let (changes, announced, counters) = (VecDeque::new(), RankSet::EMPTY, Counters::default());
        Self { name, config, processes, groups, changes, announced, next, counters, now_ns }
    }

    /// Applies an input that occurred at `now_ns`. If the clock goes back, time stands still.
    ///
    /// # Errors
    /// When the input is rejected; only time has advanced then.
    ///
    /// # Panics
    /// When the outputs of the previous call were not taken: the driver broke the order of persisting and publishing.
    pub fn handle(&mut self, input: Input, now_ns: u64) -> Result<Reply, Rejection> {
        let outputs = self.changes.len() + self.announced.len();
        assert!(outputs == 0, "{outputs} outputs were not taken before the next input");
        let gap_ns = now_ns.saturating_sub(self.now_ns);
        if gap_ns > 2 * self.config.interval_ns {
            self.processes.excuse(gap_ns);
        }
        self.now_ns = self.now_ns.max(now_ns);
        let reply = self.apply(input);
        self.counters.rejections += u64::from(reply.is_err());
        self.end_dead();
        self.step_groups();
        reply
    }

    fn apply(&mut self, input: Input) -> Result<Reply, Rejection> {
        match input {
            Input::Register { process } => self.register(process),
            Input::Unregister { process } => match self.processes.check(process) {
                Ok(()) => {
                    self.end(process);
                    Ok(Reply::Done)
                }
                Err(Rejection::Ended { .. }) => Ok(Reply::Done),
                Err(rejection) => Err(rejection),
            },
            Input::Report { report } => self.report(&report),
            Input::Attach { process, spec } => self.attach(process, &spec),
            Input::Detach { process, group } => {
                self.processes.check(process)?;
                let now_ns = self.now_ns;
                if self.group_mut(group)?.detach(process, now_ns) {
                    self.announce(group);
                }
                Ok(Reply::Done)
            }
            Input::Propose { id, group, change } => {
                self.member(id.process, group)?;
                let (config, now_ns) = (self.config, self.now_ns);
                self.group_mut(group)?.propose(id, change, &config, now_ns)?;
                Ok(Reply::Done)
            }
            Input::Tick => Ok(Reply::Done),
        }
    }

    fn register(&mut self, process: Process) -> Result<Reply, Rejection> {
        if self.processes.register(process, self.now_ns)? {
            self.announce_roster();
        }
        Ok(Reply::Done)
    }

    fn report(&mut self, report: &Report) -> Result<Reply, Rejection> {
        if self.processes.report(report, self.now_ns)? {
            self.announce_roster();
        }
        for member in &report.groups {
            let Ok(rank) = self.member(report.process, member.group) else { continue };
            if self.group_mut(member.group)?.report(rank, *member) {
                self.announce(member.group);
            }
        }
        Ok(Reply::Done)
    }

    fn attach(&mut self, process: ProcessId, spec: &GroupSpec) -> Result<Reply, Rejection> {
        self.processes.check(process)?;
        let rank = spec.check(process)?;
        let mut contradiction = None;
        let found = self.groups.values().find(|group| match group.matches(spec) {
            Ok(is_same) => is_same,
            Err(other) => {
                contradiction = contradiction.take().or(Some(other));
                false
            }
        });
        let found = found.map(Group::id);
        let id = match (found, contradiction) {
            (Some(id), _) => id,
            (None, Some(contradiction)) => return Err(contradiction),
            (None, None) if spec.is_joining => return Err(Rejection::NoGroupToJoin),
            (None, None) => self.found(spec)?,
        };
        let group = self.group_mut(id)?;
        let before = group.order().len();
        let has_changed = group.attach(process.incarnation, rank, spec);
        // Members of a group that is in no view yet find the same one after a restart.
        if found.is_none() || group.order().len() > before {
            self.persist(id);
        }
        if has_changed {
            self.announce(id);
        }
        Ok(Reply::Attached { group: id, rank })
    }

    fn found(&mut self, spec: &GroupSpec) -> Result<GroupId, Rejection> {
        if self.groups.len() >= self.config.groups {
            return Err(Rejection::TooManyGroups { limit: self.config.groups });
        }
        let id = loop {
            let (seed, number) = self.next;
            self.next.1 = number.wrapping_add(1 << 32);
            let id = GroupId(mix64(seed ^ mix64(number)));
            if !self.groups.contains_key(&id) {
                break id;
            }
        };
        self.groups.insert(id, Group::new(id, spec.clone(), self.now_ns));
        Ok(id)
    }

    fn group_mut(&mut self, group: GroupId) -> Result<&mut Group, Rejection> {
        self.groups.get_mut(&group).ok_or(Rejection::UnknownGroup { group })
    }

    /// Returns the rank of a live process in a group.
    fn member(&self, process: ProcessId, group: GroupId) -> Result<GroupRank, Rejection> {
        self.processes.check(process)?;
        let found = self.groups.get(&group).ok_or(Rejection::UnknownGroup { group })?;
        found.rank_of(process).ok_or(Rejection::NotMember { rank: process.rank, group })
    }

    /// Ends the processes that are dead by now.
    fn end_dead(&mut self) {
        for process in self.processes.dead(&self.config, self.now_ns, &mut self.counters.deaths) {
            self.end(process);
        }
    }

    fn end(&mut self, process: ProcessId) {
        self.processes.end(process);
        for group in self.groups.values_mut() {
            group.detach(process, self.now_ns);
        }
        self.announce_roster();
    }

    /// Lets all groups change their views as far as they can, and forgets those that nobody is attached to.
    fn step_groups(&mut self) {
        let (mut viewed, mut changed, mut forgotten) = (Vec::new(), Vec::new(), Vec::new());
        for (id, group) in &mut self.groups {
            let step = group.step(&self.processes, &self.config, self.now_ns);
            if step.has_new_view {
                viewed.push(*id);
            }
            if step.has_new_status {
                changed.push(*id);
            }
            if group.is_forgotten(&self.config, self.now_ns) {
                forgotten.push(*id);
            }
        }
        viewed.into_iter().for_each(|id| self.persist(id));
        changed.into_iter().for_each(|id| self.announce(id));
        for id in forgotten {
            if let Some(group) = self.groups.remove(&id) {
                self.counters += group.counters();
            }
            self.changes.push_back(Output::Forget(id));
        }
    }

    /// Makes a group durable as it is now.
    fn persist(&mut self, group: GroupId) {
        let address = |rank| self.processes.address(rank).unwrap_or_default().to_owned();
        let record = self.groups.get(&group).map(|group| group.record(&self.name, address));
        self.changes.extend(record.map(Output::Persist));
    }

    /// Sends the members of a group their status.
    fn announce(&mut self, group: GroupId) {
        let members = self.groups.get(&group).map_or(RankSet::EMPTY, |group| group.order().iter().copied().collect());
        self.announced = self.announced.union(members.intersection(self.processes.live()));
    }

    fn announce_roster(&mut self) {
        self.announced = self.processes.live();
    }

    /// Returns the next output that the driver must carry out; `None` once the previous call is complete. Durable
    /// changes come first: a status may have the view of the same call.
    pub fn poll_output(&mut self) -> Option<Output> {
        if let Some(change) = self.changes.pop_front() {
            return Some(change);
        }
        let rank = self.announced.last()?;
        self.announced.remove(rank);
        Some(Output::Changed(rank))
    }

    /// Returns the latest time of the next call; `None` if nothing is registered and no group exists.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let processes = self.processes.due_ns(&self.config, self.now_ns);
        let groups = self.groups.values().filter_map(|group| group.due_ns(&self.config)).min();
        let due_ns = processes.into_iter().chain(groups).min()?;
        Some(due_ns.min(self.now_ns.saturating_add(self.config.interval_ns)))
    }

    /// Returns what a process knows of its world and groups.
    ///
    /// # Errors
    /// When the process is not registered.
    pub fn status(&self, process: ProcessId) -> Result<Status, Rejection> {
        self.processes.check(process)?;
        let member = |group: &Group| {
            let rank = group.rank_of(process)?;
            Some(group.status(rank, process, &self.processes))
        };
        let groups = self.groups.values().filter_map(member).collect();
        Ok(Status { roster: self.processes.roster(), peers: self.processes.peers().collect(), groups })
    }

    /// Returns true if the world has neither a live process nor a group: it may be forgotten.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.processes.live().is_empty()
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters;
        self.groups.values().for_each(|group| counters += group.counters());
        counters
    }

    /// Returns the live processes as operators see them, by rank.
    pub fn process_summaries(&self) -> impl Iterator<Item = ProcessSummary> {
        self.processes.summaries(self.now_ns)
    }

    /// Returns the groups as operators see them, by id.
    pub fn group_summaries(&self) -> impl Iterator<Item = GroupSummary> {
        self.groups.values().map(|group| group.summary(self.now_ns))
    }

    /// Returns the live process of a rank.
    #[must_use]
    pub fn process(&self, rank: WorldRank) -> Option<ProcessId> {
        self.processes.incarnation(rank).map(|incarnation| ProcessId { rank, incarnation })
    }

    /// Returns the state of a rank's process.
    #[must_use]
    pub fn process_state(&self, rank: WorldRank) -> ProcessState {
        self.processes.state(rank)
    }

    /// Returns the groups with their newest views, by id.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, &View)> {
        self.groups.iter().map(|(id, group)| (*id, group.view()))
    }
}
