//! Host of process groups: one pure [`World`] for each job, called on the control plane's thread.
//!
//! Views before statuses: what a call has changed is durable before a process gets a status that has it. A process gets
//! its status over its stream as soon as it changes, and in the reply to a report if it has an older one; a status that
//! a slow process does not read is left out of its stream, as the reply makes up for it. A control plane that starts
//! restores the groups, and expects the processes of their views to report; other processes register again.
//!
//! While no change can be made durable, calls are refused and the time of all worlds stands still, so that nobody is
//! declared dead.

mod hosted;
mod metrics;
mod restore;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvplane_cluster::{Change, MAX_TENANT_NAME_BYTES, MAX_WORLD_NAME_BYTES, Record, WorldRecord};
use kvplane_group::{Counters, Input, ProcessId, Reply, WorldConfig};
use kvplane_rpc::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, MemberAttached, ProposeChange, RegisterProcess,
    ReportProcess, StatusRevision, UnregisterProcess, WatchWorld, WorldDescription, WorldList, WorldName, WorldReply,
};
use kvplane_rpc::message::EmptyReply;
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode};
use tokio::sync::{Notify, mpsc};

use crate::cluster::ClusterHost;
use crate::server::clock::HostClock;
use hosted::HostedWorld;
pub(crate) use restore::StoredWorlds;
pub use restore::WorldRestoreError;

/// Worlds in a page of a listing: with the longest names they fit a message.
const PAGE_WORLDS: usize = 256;
/// Interval of checks whether changes are possible again.
const LOOK_AGAIN_NS: u64 = 100_000_000;

/// Limits of process groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldsConfig {
    /// Most worlds.
    pub worlds: usize,
    /// Times and limits of each world.
    pub world: WorldConfig,
}

impl Default for WorldsConfig {
    fn default() -> Self {
        Self { worlds: 256, world: WorldConfig::default() }
    }
}

/// The worlds, and what changes together with them.
struct Core {
    worlds: BTreeMap<WorldName, HostedWorld>,
    /// Number of worlds that were started in this cluster state, restarts included. Durable.
    starts: u32,
    /// Counters of worlds that were forgotten.
    past: Counters,
    /// Time of the last call of a process that is or becomes alive.
    heard_ns: u64,
    /// Reports that were applied.
    reports: u64,
    /// Statuses that were sent.
    statuses: u64,
    /// Time until which the driver sleeps; none if it waits for a call.
    armed_ns: Option<u64>,
}

/// Host of process groups.
pub(crate) struct Worlds {
    config: WorldsConfig,
    /// Makes records durable.
    cluster: Arc<ClusterHost>,
    /// Seed of the ids of groups.
    seed: u64,
    core: Mutex<Core>,
    rearm: Notify,
    clock: HostClock,
}

impl Worlds {
    /// Creates the host, with the worlds that are stored.
    ///
    /// # Errors
    /// When the number of their starts cannot be made durable.
    pub(crate) fn new(
        config: WorldsConfig,
        stored: StoredWorlds,
        cluster: Arc<ClusterHost>,
        seed: u64,
    ) -> Result<Self, Refusal> {
        let (worlds, starts) = stored.start(&config.world, seed);
        if !worlds.is_empty() {
            cluster.keep(&[starts_change(starts)])?;
        }
        let past = Counters::default();
        let core = Core { worlds, starts, past, heard_ns: 0, reports: 0, statuses: 0, armed_ns: None };
        Ok(Self { config, cluster, seed, core: Mutex::new(core), rearm: Notify::new(), clock: HostClock::start() })
    }

    fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // The driver panics here too, and ends the control plane.
        self.core.lock().expect("an earlier call panicked; the state of worlds in memory is not trusted")
    }

    /// Lets a world process an input, makes durable what follows, and sends the statuses that have it.
    fn call(&self, core: &mut Core, name: &WorldName, input: Input) -> Result<Reply, Refusal> {
        // Time stands still for the world meanwhile.
        self.cluster.check_durable()?;
        let hosted = core.worlds.get_mut(name).ok_or_else(|| unknown(name))?;
        let reply = hosted.world.handle(input, self.now_ns());
        self.carry_out(core, name, None)?;
        Ok(reply?)
    }

    /// Carries out the outputs of a world's last call, after a further change; forgets the world if it is empty.
    fn carry_out(&self, core: &mut Core, name: &WorldName, first: Option<Change>) -> Result<(), Refusal> {
        let Some(hosted) = core.worlds.get_mut(name) else { return Ok(()) };
        let (changes, changed) = hosted.take_outputs(name, first)?;
        if !changes.is_empty() {
            self.cluster.keep(&changes)?;
        }
        core.statuses += hosted.send(changed);
        hosted.due_ns = hosted.world.poll_timeout();
        if hosted.world.is_empty() {
            core.past += hosted.world.counters();
            core.worlds.remove(name);
            tracing::info!(tenant = name.tenant, world = name.world, "forgot a world without processes and groups");
        }
        if core.due_ns().is_some_and(|due_ns| core.armed_ns.is_none_or(|armed_ns| due_ns < armed_ns)) {
            self.rearm.notify_one();
        }
        Ok(())
    }

    /// Advances the time of all worlds, for as long as it is polled.
    pub(crate) async fn run(&self) {
        loop {
            let due_ns = self.tick();
            tokio::select! {
                () = self.clock.sleep_until(due_ns) => {}
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Lets the worlds that are due advance. Returns the time of the next call.
    fn tick(&self) -> Option<u64> {
        let now_ns = self.now_ns();
        let is_durable = self.cluster.check_durable().is_ok();
        let mut core = self.core();
        let is_due = |hosted: &HostedWorld| hosted.due_ns.is_some_and(|due_ns| due_ns <= now_ns);
        let due: Vec<WorldName> = match is_durable {
            true => core.worlds.iter().filter(|(_, hosted)| is_due(hosted)).map(|(name, _)| name.clone()).collect(),
            false => Vec::new(),
        };
        for name in due {
            if let Some(hosted) = core.worlds.get_mut(&name) {
                // A tick is never rejected.
                let _ = hosted.world.handle(Input::Tick, self.now_ns());
            }
            if self.carry_out(&mut core, &name, None).is_err() {
                // The control plane stops.
                break;
            }
        }
        core.armed_ns = match is_durable {
            true => core.due_ns(),
            false => Some(now_ns + LOOK_AGAIN_NS),
        };
        core.armed_ns
    }

    /// Waits until no process has called for this long.
    pub(crate) async fn idle_for(&self, limit: Duration) {
        loop {
            let until = self.clock.instant(self.core().heard_ns) + limit;
            if Instant::now() >= until {
                return;
            }
            tokio::time::sleep_until(until.into()).await;
        }
    }

    pub(crate) fn register(&self, call: RegisterProcess) -> Result<WorldReply, Refusal> {
        let RegisterProcess { world: name, process } = call;
        check_name(&name)?;
        self.cluster.check_durable()?;
        let (now_ns, id) = (self.now_ns(), process.id);
        let mut core = self.core();
        let (count, start) = (core.worlds.len(), core.starts.saturating_add(1));
        let mut first = None;
        let hosted = match core.worlds.entry(name.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if count >= self.config.worlds => {
                let reason = format!("{count} worlds have processes or groups, which is the limit (--worlds)");
                return Err(Refusal::new(RefusalCode::LimitReached, reason));
            }
            Entry::Vacant(place) => {
                first = Some(starts_change(start));
                place.insert(HostedWorld::new(&name, self.config.world, Vec::new(), start, self.seed, now_ns))
            }
        };
        let reply = hosted.world.handle(Input::Register { process }, now_ns);
        if first.is_some() {
            match &reply {
                Ok(_) => {
                    core.starts = start;
                    tracing::info!(tenant = name.tenant, world = name.world, "a world begins");
                }
                // Nothing of the world has left this process.
                Err(_) => drop(core.worlds.remove(&name)),
            }
        }
        self.carry_out(&mut core, &name, first.filter(|_| reply.is_ok()))?;
        reply?;
        core.heard_ns = now_ns;
        let known = StatusRevision::default();
        tracing::debug!(tenant = name.tenant, world = name.world, rank = id.rank.0, "a process registers");
        core.reply(&name, id, known)
    }

    pub(crate) fn unregister(&self, call: &UnregisterProcess) -> Result<EmptyReply, Refusal> {
        let mut core = self.core();
        if !core.worlds.contains_key(&call.world) {
            // Its last process has ended, and the world is forgotten.
            return Ok(EmptyReply);
        }
        self.call(&mut core, &call.world, Input::Unregister { process: call.process })?;
        Ok(EmptyReply)
    }

    pub(crate) fn report(&self, call: ReportProcess) -> Result<WorldReply, Refusal> {
        let ReportProcess { world: name, known, report } = call;
        let process = report.process;
        let mut core = self.core();
        self.call(&mut core, &name, Input::Report { report })?;
        core.heard_ns = self.now_ns();
        core.reports += 1;
        core.reply(&name, process, known)
    }

    pub(crate) fn attach(&self, call: AttachMember) -> Result<MemberAttached, Refusal> {
        let AttachMember { world: name, process, spec } = call;
        match self.call(&mut self.core(), &name, Input::Attach { process, spec })? {
            Reply::Attached { group, rank } => Ok(MemberAttached { group, rank }),
            Reply::Done => {
                let reason = "a bug: a process was attached without a rank";
                Err(Refusal::new(RefusalCode::ShuttingDown, reason))
            }
        }
    }

    pub(crate) fn detach(&self, call: &DetachMember) -> Result<EmptyReply, Refusal> {
        self.call(&mut self.core(), &call.world, Input::Detach { process: call.process, group: call.group })?;
        Ok(EmptyReply)
    }

    pub(crate) fn propose(&self, call: &ProposeChange) -> Result<EmptyReply, Refusal> {
        let ProposeChange { world, id, group, change } = call;
        self.call(&mut self.core(), world, Input::Propose { id: *id, group: *group, change: *change })?;
        Ok(EmptyReply)
    }

    pub(crate) fn watch(&self, call: &WatchWorld) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let mut core = self.core();
        let hosted = core.worlds.get_mut(&call.world).ok_or_else(|| unknown(&call.world))?;
        let (receiver, sent) = hosted.watch(call.process, call.known)?;
        core.statuses += sent;
        Ok(receiver)
    }

    pub(crate) fn list(&self, call: &ListWorlds) -> WorldList {
        let core = self.core();
        let is_later = |name: &WorldName| call.after.as_ref().is_none_or(|after| name > after);
        let mut later = core.worlds.iter().filter(|(name, _)| is_later(name));
        let worlds = later.by_ref().take(PAGE_WORLDS).map(|(name, hosted)| hosted.figures(name)).collect();
        WorldList { worlds, more: later.next().is_some() }
    }

    pub(crate) fn describe(&self, call: &DescribeWorld) -> Result<WorldDescription, Refusal> {
        let core = self.core();
        let Some(hosted) = core.worlds.get(&call.world) else {
            let WorldName { tenant, world } = &call.world;
            let reason = format!("there is no world {world:?} of tenant {tenant:?}");
            return Err(Refusal::new(RefusalCode::NotFound, reason));
        };
        Ok(WorldDescription {
            processes: hosted.world.process_summaries().collect(),
            groups: hosted.world.group_summaries().collect(),
        })
    }
}

impl Core {
    /// Returns the time at which a world has to be called next.
    fn due_ns(&self) -> Option<u64> {
        self.worlds.values().filter_map(|hosted| hosted.due_ns).min()
    }

    /// Returns the status of a process, unless it has the newest.
    fn reply(&mut self, name: &WorldName, process: ProcessId, known: StatusRevision) -> Result<WorldReply, Refusal> {
        let hosted = self.worlds.get(name).ok_or_else(|| unknown(name))?;
        let status = match hosted.revision(process.rank) {
            newest if newest == known => None,
            _ => Some(hosted.status(process)?),
        };
        self.statuses += u64::from(status.is_some());
        Ok(WorldReply { status })
    }
}

/// Returns the refusal of a call in a world without processes.
fn unknown(name: &WorldName) -> Refusal {
    let WorldName { tenant, world } = name;
    let reason = format!("world {world:?} of tenant {tenant:?} has no process: register");
    Refusal::new(RefusalCode::UnknownClient, reason)
}

fn starts_change(starts: u32) -> Change {
    Change::Put(Record::World(WorldRecord::Starts(starts)))
}

fn check_name(name: &WorldName) -> Result<(), Refusal> {
    let WorldName { tenant, world } = name;
    let is_good = tenant.len() <= MAX_TENANT_NAME_BYTES && (1..=MAX_WORLD_NAME_BYTES).contains(&world.len());
    if is_good && !tenant.chars().chain(world.chars()).any(char::is_control) {
        return Ok(());
    }
    let reason = format!(
        "the name of a world has 1 to {MAX_WORLD_NAME_BYTES} bytes, that of a tenant at most {MAX_TENANT_NAME_BYTES}, \
         and neither has control characters: {} and {} bytes",
        world.len(),
        tenant.len()
    );
    Err(Refusal::new(RefusalCode::BadRequest, reason))
}

#[cfg(test)]
mod tests;
