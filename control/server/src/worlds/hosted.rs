//! One hosted world: the state machine, the revisions of its processes' statuses, and their streams.

use std::collections::BTreeMap;

use kvplane_cluster::{Change, Record, RecordKey, WorldGroup, WorldGroupKey, WorldKey, WorldRecord};
use kvplane_group::{GroupId, GroupRecord, MAX_RANKS, Output, ProcessId, World, WorldConfig, WorldRank};
use kvplane_rpc::groups::{StatusRevision, WorldFigures, WorldName, WorldStatus};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::mpsc;

/// Most statuses queued for a process.
const STATUSES: usize = 8;

/// Stream of a process's statuses.
struct Watcher {
    process: ProcessId,
    items: mpsc::Sender<ItemFrame>,
}

/// A world with the streams of its processes.
pub(super) struct HostedWorld {
    pub(super) world: World,
    /// Time of its next call.
    pub(super) due_ns: Option<u64>,
    /// Number of this start.
    start: u32,
    /// Number of the last change, and of the last change of the status of each rank's process.
    changes: u64,
    changed: [u64; MAX_RANKS],
    watchers: BTreeMap<WorldRank, Watcher>,
}

impl HostedWorld {
    /// Starts a world from its records. `start` is the number of this start.
    pub(super) fn new(
        name: &WorldName,
        config: WorldConfig,
        records: Vec<GroupRecord>,
        start: u32,
        seed: u64,
        now_ns: u64,
    ) -> Self {
        let world = World::start(&name.world, config, records, start, seed, now_ns);
        let due_ns = world.poll_timeout();
        Self { world, due_ns, start, changes: 1, changed: [1; MAX_RANKS], watchers: BTreeMap::new() }
    }

    /// Takes the outputs of the last call: durable changes, after a `first` one, and the ranks with a new status.
    pub(super) fn take_outputs(
        &mut self,
        name: &WorldName,
        first: Option<Change>,
    ) -> Result<(Vec<Change>, Vec<WorldRank>), Refusal> {
        let (mut changes, mut changed) = (Vec::from_iter(first), Vec::new());
        let key =
            |group: GroupId| WorldGroupKey { tenant: name.tenant.clone(), world: name.world.clone(), group: group.0 };
        while let Some(output) = self.world.poll_output() {
            match output {
                Output::Persist(record) => {
                    let (tenant, world, group) = (&name.tenant, &name.world, &record.spec.name);
                    let (epoch, participants) = (record.view.epoch, record.view.participants().len());
                    tracing::info!(tenant, world, group, epoch, participants, "a group has a new view");
                    // A record of a world always has an encoding.
                    let contents =
                        record.to_bytes().map_err(|error| Refusal::new(RefusalCode::Storage, error.to_string()))?;
                    let group = WorldGroup { key: key(record.group), contents };
                    changes.push(Change::Put(Record::World(WorldRecord::Group(group))));
                }
                Output::Forget(group) => {
                    changes.push(Change::Remove(RecordKey::World(WorldKey::Group(key(group)))));
                }
                Output::Changed(rank) => changed.push(rank),
            }
        }
        Ok((changes, changed))
    }

    /// Sends the processes of these ranks their new statuses, and ends the streams of processes that have ended.
    /// Returns the number of statuses that were sent.
    pub(super) fn send(&mut self, changed: Vec<WorldRank>) -> u64 {
        if changed.is_empty() {
            return 0;
        }
        self.changes += 1;
        for rank in &changed {
            self.changed[usize::from(rank.0)] = self.changes;
        }
        let world = &self.world;
        self.watchers.retain(|rank, watcher| world.process(*rank) == Some(watcher.process));
        changed.into_iter().map(|rank| u64::from(self.send_to(rank))).sum()
    }

    /// Sends a process its status, if it watches and reads.
    fn send_to(&mut self, rank: WorldRank) -> bool {
        let Some(watcher) = self.watchers.get(&rank) else { return false };
        // The reply to the next report has a status that does not fit the queue, or a message.
        if watcher.items.capacity() == 0 {
            return false;
        }
        let frame = self.status(watcher.process).ok().and_then(|status| item_frame(&status).ok());
        let sent = frame.map(|frame| watcher.items.try_send(frame));
        if let Some(Err(mpsc::error::TrySendError::Closed(_))) = sent {
            self.watchers.remove(&rank);
        }
        matches!(sent, Some(Ok(())))
    }

    /// Opens the stream of a process in place of a former one. Returns the number of statuses that were sent, too.
    pub(super) fn watch(
        &mut self,
        process: ProcessId,
        known: StatusRevision,
    ) -> Result<(mpsc::Receiver<ItemFrame>, u64), Refusal> {
        // Fails unless the process is registered.
        let newest = self.status(process)?.revision;
        let (items, receiver) = mpsc::channel(STATUSES);
        self.watchers.insert(process.rank, Watcher { process, items });
        let sent = newest != known && self.send_to(process.rank);
        Ok((receiver, u64::from(sent)))
    }

    /// Returns the revision of the newest status of a rank's process.
    pub(super) fn revision(&self, rank: WorldRank) -> StatusRevision {
        let number = self.changed.get(usize::from(rank.0)).copied().unwrap_or(self.changes);
        StatusRevision { start: self.start, number }
    }

    /// Returns the status of a process.
    pub(super) fn status(&self, process: ProcessId) -> Result<WorldStatus, Refusal> {
        let status = self.world.status(process)?;
        Ok(WorldStatus { revision: self.revision(process.rank), status })
    }

    /// Returns the world as operators see it.
    pub(super) fn figures(&self, name: &WorldName) -> WorldFigures {
        let counters = self.world.counters();
        let (mut groups, mut changing) = (0, 0);
        for group in self.world.group_summaries() {
            groups += 1;
            changing += u32::from(group.changing_ns.is_some());
        }
        WorldFigures {
            name: name.clone(),
            processes: self.world.process_summaries().map(|_| 1).sum(),
            groups,
            changing,
            view_changes: counters.view_changes,
            exclusions: counters.exclusions.total(),
        }
    }
}
