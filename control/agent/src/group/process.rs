//! One run of the process of a rank in a world: its connections, its memberships, and the threads that move them on.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvplane_group::{GroupId, GroupSpec, Process, ProcessId, Report, Status, WorldRank};
use kvplane_mesh::{Mesh, MeshConfig};
use kvplane_sys::interrupt;
use kvplane_sys::random::random_u64;
use kvplane_sys::verbs::{Device, Verbs, VerbsError};
use kvplane_tls::DataTls;

use super::error::{GroupError, GroupLinkError};
use super::host::{GroupCounters, GroupHost};
use super::link::{GroupLink, GroupLinkConfig, MemberHost};
use super::mailbox::ReportSignal;
use super::membership::Membership;
use super::process_group::ProcessGroup;
use super::work::WorkOutcome;
use crate::link::ControlLink;
use crate::which::Control;

/// Rounds without progress after which a waiting thread lets others run.
const SPINS: u32 = 16;
/// Rounds, also those with progress, after which a waiting thread looks at the time.
const LOOK_ROUNDS: u32 = 64;
/// Longest sleep between two rounds of a thread that waits for a work.
const NAP: Duration = Duration::from_millis(1);
/// Sleep between two rounds without progress of the process's own thread, while works are in flight, and while none
/// is. It does not hold the lock meanwhile: a caller's work begins at once.
const OWN_NAP: Duration = Duration::from_micros(50);
const IDLE: Duration = Duration::from_millis(2);
/// Longest stay of a process that leaves, for members that have not completed what it has.
const LEAVES: Duration = Duration::from_secs(5);
/// Interval at which a call that waits for the control plane checks that it still has to.
const LOOK: Duration = Duration::from_millis(50);

/// Settings of a process of a world.
#[derive(Debug)]
pub struct GroupProcessConfig {
    /// The control plane.
    pub control: Control,
    /// Tenant that the world belongs to; empty for that of the certificate, or the default tenant.
    pub tenant: String,
    /// Name of the world.
    pub world: String,
    /// Rank of the process in the world, below 64.
    pub rank: u8,
    /// Address to listen on for processes of other hosts.
    pub listen: IpAddr,
    /// Address that they connect to, where it differs.
    pub announce: Option<IpAddr>,
    /// TLS between the processes, by the certificates of their connections to the control plane; `None` requires it
    /// beyond loopback, and does without on loopback.
    pub data_tls: Option<DataTls>,
    /// Allow an address beyond loopback without TLS: a process that reaches it can take part as any rank.
    pub open_to_network: bool,
    /// Use shared memory with processes of this host.
    pub shared_memory: bool,
    /// RDMA devices for processes of other hosts, the best one first.
    pub rdma: Vec<Device>,
    /// Deadline of calls to the control plane.
    pub deadline: Duration,
}

impl GroupProcessConfig {
    /// Returns settings for a process of a world, with other processes of this host.
    #[must_use]
    pub fn new(control: Control, world: impl Into<String>, rank: u8) -> Self {
        Self {
            control,
            tenant: String::new(),
            world: world.into(),
            rank,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            announce: None,
            data_tls: None,
            open_to_network: false,
            shared_memory: true,
            rdma: Vec::new(),
            deadline: Duration::from_secs(10),
        }
    }

    fn mesh(&mut self, id: ProcessId, link: &ControlLink) -> Result<MeshConfig, GroupError> {
        let secured = if self.listen.is_loopback() || self.open_to_network { DataTls::Off } else { DataTls::Require };
        Ok(MeshConfig {
            listen: self.listen,
            announce: self.announce,
            open_to_network: self.open_to_network,
            shared_memory: self.shared_memory,
            rdma: std::mem::take(&mut self.rdma),
            tls: link.keychain_among_peers(self.data_tls.unwrap_or(secured))?,
            ..MeshConfig::new(self.world.clone(), id.rank.0, id.incarnation)
        })
    }
}

/// Opens RDMA devices by name, in their order.
///
/// # Errors
/// When there is no library for devices, or no device of a name.
pub fn open_devices(names: &[String]) -> Result<Vec<Device>, VerbsError> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let verbs = Verbs::open()?;
    names.iter().map(|name| verbs.device(name)).collect()
}

/// State of a process that its memberships and threads share.
pub(super) struct SharedProcess {
    pub(super) id: ProcessId,
    host: Mutex<GroupHost>,
    /// Threads that wait for a work, and move all of them on.
    waiters: AtomicUsize,
    is_closing: AtomicBool,
    /// Newest state of the groups.
    status: Mutex<Status>,
    has_status: Condvar,
    signal: ReportSignal,
    link: Mutex<Option<Arc<GroupLink>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SharedProcess {
    pub(super) fn host(&self) -> MutexGuard<'_, GroupHost> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn link(&self) -> Result<Arc<GroupLink>, GroupError> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(GroupError::Ended)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Has the state of the process reported at once.
    pub(super) fn report(&self) {
        self.signal.raise();
    }

    fn wake_thread(&self) {
        if let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.thread().unpark();
        }
    }

    /// Makes one round. Returns true if something has moved.
    pub(super) fn round(&self) -> bool {
        let round = self.host().round();
        if round.has_news {
            self.signal.raise();
        }
        round.has_moved
    }

    /// Moves all works on until the given one has ended, or until a time.
    pub(super) fn move_on(&self, work: &WorkOutcome, until: Instant) {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let (mut spins, mut rounds) = (0, 0u32);
        while !work.has_ended() && !self.is_closing() {
            rounds = rounds.wrapping_add(1);
            if rounds.is_multiple_of(LOOK_ROUNDS) && (Instant::now() >= until || interrupt::ended()) {
                break;
            }
            if self.round() {
                spins = 0;
                continue;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            if now >= until || interrupt::ended() {
                break;
            }
            self.host().wait(until.min(now + NAP));
        }
        if self.waiters.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.wake_thread();
        }
    }

    /// Stays in a group, or in all, until no other member needs this process, for [`LEAVES`] at most.
    pub(super) fn leave(&self, group: Option<GroupId>) {
        self.host().leave(group);
        let until = Instant::now() + LEAVES;
        while !self.host().may_leave(group) && !self.is_closing() {
            let now = Instant::now();
            if now >= until || interrupt::ended() {
                return;
            }
            if !self.round() {
                self.host().wait(until.min(now + NAP));
            }
        }
    }

    /// Makes rounds while no caller waits.
    fn run(&self) {
        while !self.is_closing() {
            if self.waiters.load(Ordering::Relaxed) > 0 {
                thread::park_timeout(IDLE);
            } else if !self.round() {
                let is_busy = self.host().is_busy();
                thread::park_timeout(if is_busy { OWN_NAP } else { IDLE });
            }
        }
    }

    /// Waits until the newest status fulfils a condition.
    pub(super) fn await_status<T>(
        &self,
        call: &'static str,
        deadline: Duration,
        mut found: impl FnMut(&Status) -> Option<T>,
    ) -> Result<T, GroupError> {
        let until = Instant::now() + deadline;
        loop {
            let status = self.status();
            if let Some(found) = found(&status) {
                return Ok(found);
            }
            if self.is_closing() {
                return Err(GroupError::Ended);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GroupError::Late { call, after: deadline });
            }
            drop(self.has_status.wait_timeout(status, left.min(LOOK)));
            // Its predicate may make calls of its own, so no lock is held.
            if interrupt::ended() {
                return Err(GroupError::Interrupted { call });
            }
        }
    }

    fn end(&self) {
        // A caller that finds the process closing finds its work ended.
        self.host().close();
        self.is_closing.store(true, Ordering::Release);
        self.has_status.notify_all();
        self.wake_thread();
    }
}

/// The process, as its link to the control plane sees it.
struct LinkedProcess(Arc<SharedProcess>);

impl MemberHost for LinkedProcess {
    fn report(&self) -> Report {
        self.0.host().report()
    }

    fn follow(&mut self, status: &Status) {
        {
            // Callers that find the outcome of an operation find the status with it, and the other way round.
            let mut host = self.0.host();
            host.follow(status);
            self.0.status().clone_from(status);
        }
        self.0.has_status.notify_all();
        // Connections and operations go on.
        if self.0.round() {
            self.0.wake_thread();
        }
    }

    fn end(&mut self, _: &GroupLinkError) {
        self.0.end();
    }
}

/// One run of the process of a rank in a world. Leaves the world when it is dropped.
pub struct GroupProcess {
    shared: Arc<SharedProcess>,
    deadline: Duration,
}

impl GroupProcess {
    /// Joins a world.
    ///
    /// # Errors
    /// When the connections cannot be set up, the control plane does not answer, or another live process has the rank.
    pub fn join(mut config: GroupProcessConfig) -> Result<Self, GroupError> {
        let id = ProcessId { rank: WorldRank(config.rank), incarnation: random_u64().map_err(GroupError::Random)? };
        let link = ControlLink::to(&config.control, config.control.role_among(&super::ROLES)?)?;
        let mesh = Mesh::start(config.mesh(id, &link)?)?;
        let address = mesh.address().to_owned();
        let signal = ReportSignal::new();
        let shared = Arc::new(SharedProcess {
            id,
            host: Mutex::new(GroupHost::new(id, mesh)),
            waiters: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
            status: Mutex::new(Status { roster: 0, peers: Vec::new(), groups: Vec::new() }),
            has_status: Condvar::new(),
            signal: signal.clone(),
            link: Mutex::new(None),
            thread: Mutex::new(None),
        });
        let link_config =
            GroupLinkConfig { tenant: config.tenant, world: config.world, process: Process { id, address } };
        let linked = Box::new(LinkedProcess(Arc::clone(&shared)));
        let link = GroupLink::begin(link, &link_config, linked, &signal, config.deadline)?;
        *shared.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(link));
        let process = Self { shared: Arc::clone(&shared), deadline: config.deadline };
        let thread = thread::Builder::new().name("kvplane-frames".into()).spawn(move || shared.run());
        let thread = thread.map_err(GroupError::Thread)?;
        *process.shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(process)
    }

    /// Returns the rank and the incarnation.
    #[must_use]
    pub fn id(&self) -> ProcessId {
        self.shared.id
    }

    /// Becomes a member of a group. A founding member takes part once all founding members have attached; a joiner
    /// after [`ProcessGroup::join`] and the proposal of a member.
    ///
    /// # Errors
    /// When the control plane does not answer, or the group is another one under this name.
    pub fn attach(&self, spec: GroupSpec) -> Result<ProcessGroup, GroupError> {
        let (group, rank) = self.shared.link()?.attach(&spec, self.deadline)?;
        let membership = Membership::new(group, rank, self.shared.id.incarnation, &spec);
        self.shared.host().attach(group, membership);
        // The newest status may have come before the member was attached.
        let status = self.shared.status().clone();
        self.shared.host().follow(&status);
        self.shared.report();
        Ok(ProcessGroup::new(Arc::clone(&self.shared), group, rank, spec, self.deadline))
    }

    /// Returns the processes of the world that are alive.
    #[must_use]
    pub fn peers(&self) -> Vec<Process> {
        self.shared.status().peers.clone()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> GroupCounters {
        self.shared.host().counters()
    }

    /// Leaves the world. Operations in flight end with an error.
    ///
    /// # Errors
    /// When the control plane does not answer: it finds the process silent later.
    pub fn close(&self) -> Result<(), GroupError> {
        self.shared.leave(None);
        let link = self.shared.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.shared.end();
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            thread.thread().unpark();
            // A panic there was printed by it.
            drop(thread.join());
        }
        match link.and_then(Arc::into_inner) {
            Some(link) => Ok(link.close(self.deadline)?),
            None => Ok(()),
        }
    }
}

impl Drop for GroupProcess {
    fn drop(&mut self) {
        // Without an answer, the control plane finds the process silent.
        drop(self.close());
    }
}
