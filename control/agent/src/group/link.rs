//! Link of a process of a world to the control plane: registers it, reports its state, and follows its status.
//!
//! A thread of its own reports every [`GroupLink::INTERVAL`], and at once when a status was followed or a
//! [`ReportSignal`] is raised; one report is in flight at a time. The status arrives over a stream, and with the reply
//! to a report that does not know it. While the control plane is away, the thread retries; one that has restarted
//! without this process gets it registered again, and its members attached that were in no view. It makes no decisions:
//! what a status means for the members of a group is the host's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_group::{Change, GroupId, GroupRank, GroupSpec, Process, ProcessId, ProposalId, Report, Status};
use kvplane_rpc::groups::{
    AttachMember, DetachMember, MemberAttached, ProposeChange, RegisterProcess, ReportProcess, StatusRevision,
    UnregisterProcess, WatchWorld, WorldName, WorldReply, WorldStatus,
};
use kvplane_rpc::message::Request;
use kvplane_rpc::{CallError, RefusalCode};

use super::error::GroupLinkError;
use super::mailbox::{Mail, Mailbox, ReportSignal};
use crate::error::Error;
use crate::link::{ControlLink, until_there};

/// Time without a reply after which the control plane is probed.
const OVERDUE: Duration = Duration::from_millis(500);
/// Refusals to attach a member that pass: the process is registered again, or its end is found; changes are possible
/// later.
const PASSING: [RefusalCode; 3] = [RefusalCode::UnknownClient, RefusalCode::IncarnationEnded, RefusalCode::Storage];
/// Longest wait of a dropped link for its farewell.
const GOODBYE: Duration = Duration::from_millis(500);

/// Host of the members of a process, as its link sees it. The link's thread calls it: no call may block for long.
pub trait MemberHost: Send {
    /// Returns the state of the process.
    fn report(&self) -> Report;
    /// Follows a status, which is newer than the one before. It may lack a group of this process's members, which was
    /// in no view when the control plane restarted: the link attaches the member again.
    fn follow(&mut self, status: &Status);
    /// The link has ended by itself, for this reason: the process is not part of its world any more.
    fn end(&mut self, reason: &GroupLinkError);
}

/// Identity of a process, and its world.
#[derive(Clone, Debug)]
pub struct GroupLinkConfig {
    /// Tenant that the world belongs to; empty for the tenant of the certificate or, if it is valid for all, the
    /// default tenant.
    pub tenant: String,
    /// Name of the world.
    pub world: String,
    /// Rank, incarnation (a random number) and address of this process.
    pub process: Process,
}

/// Link of a process to its world. Dropping it ends the process in the world, and waits up to half a second for that.
pub struct GroupLink {
    link: ControlLink,
    world: WorldName,
    process: ProcessId,
    mailbox: Arc<Mailbox>,
    /// Reason for which the link has ended.
    end: Arc<Mutex<Option<GroupLinkError>>>,
    next_proposal: AtomicU64,
    memberships: Arc<Memberships>,
    thread: Option<JoinHandle<()>>,
}

/// The groups that the process is attached to.
#[derive(Default)]
struct Memberships(Mutex<BTreeMap<GroupId, GroupSpec>>);

impl Memberships {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<GroupId, GroupSpec>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for GroupLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GroupLink({:?}, {:?})", self.world, self.process)
    }
}

impl GroupLink {
    /// Interval of the reports.
    pub const INTERVAL: Duration = Duration::from_millis(100);

    /// Registers a process and begins to report its state, which `host` returns; `signal` makes it report at once.
    /// The first status is followed before this returns. Waits up to `deadline` for a control plane that is away, and
    /// for the end of a former process of the same rank.
    ///
    /// # Errors
    /// When the control plane refuses the process, or does not answer within the deadline.
    pub fn begin(
        link: ControlLink,
        config: &GroupLinkConfig,
        mut host: Box<dyn MemberHost>,
        signal: &ReportSignal,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let tenant = link.tenant_meant(&config.tenant).to_owned();
        let world = WorldName { tenant, world: config.world.clone() };
        let (process, mailbox) = (config.process.id, Arc::clone(&signal.0));
        let register = RegisterProcess { world: world.clone(), process: config.process.clone() };
        let may_pass = |error: &Error| is_passing(error) || refusal(error) == Some(RefusalCode::AlreadyExists);
        let by = Instant::now() + deadline;
        let reply = until_there(deadline, may_pass, || link.call_within(register.clone(), left(by)))?;
        let mut known = StatusRevision::default();
        if let Some(WorldStatus { revision, status }) = reply.status {
            known = revision;
            host.follow(&status);
        }
        let (end, memberships) = (Arc::new(Mutex::new(None)), Arc::<Memberships>::default());
        let mut reporter = Reporter {
            link: link.clone(),
            register,
            host,
            mailbox: Arc::clone(&mailbox),
            known,
            memberships: Arc::clone(&memberships),
            missing: Vec::new(),
            is_registered: true,
            overdue: None,
            wants_report: true,
            next: Instant::now(),
            watches: false,
            end: Arc::clone(&end),
        };
        let thread = std::thread::Builder::new().name("kvplane-group".to_owned()).spawn(move || reporter.run())?;
        let (next_proposal, thread) = (AtomicU64::new(1), Some(thread));
        Ok(Self { link, world, process, mailbox, end, next_proposal, memberships, thread })
    }

    /// Returns the process of this link.
    #[must_use]
    pub const fn process(&self) -> ProcessId {
        self.process
    }

    /// Makes the process a member of a group, which begins with its first member. The member takes part once it is in
    /// the view of a status.
    ///
    /// # Errors
    /// When the description is refused, the process has ended, or the control plane does not answer within `deadline`.
    pub fn attach(&self, spec: &GroupSpec, deadline: Duration) -> Result<(GroupId, GroupRank), Error> {
        let call = AttachMember { world: self.world.clone(), process: self.process, spec: spec.clone() };
        let MemberAttached { group, rank } = self.call(&call, deadline)?;
        self.memberships.lock().insert(group, call.spec);
        Ok((group, rank))
    }

    /// Ends a membership. Idempotent.
    ///
    /// # Errors
    /// When there is no such group, the process has ended, or the control plane does not answer within `deadline`.
    pub fn detach(&self, group: GroupId, deadline: Duration) -> Result<(), Error> {
        self.memberships.lock().remove(&group);
        let call = DetachMember { world: self.world.clone(), process: self.process, group };
        self.call(&call, deadline).map(drop)
    }

    /// Proposes to change the view of a group. Returns the id under which the status has the outcome later.
    ///
    /// # Errors
    /// When the change is malformed, too many proposals wait, the process is no member or has ended, or the control
    /// plane does not answer within `deadline`.
    pub fn propose(&self, group: GroupId, change: Change, deadline: Duration) -> Result<ProposalId, Error> {
        let id = ProposalId { process: self.process, number: self.next_proposal.fetch_add(1, Ordering::Relaxed) };
        let call = ProposeChange { world: self.world.clone(), id, group, change };
        self.call(&call, deadline).map(|_| id)
    }

    /// Ends the process in its world, in order: its groups exclude it at once.
    ///
    /// # Errors
    /// When the control plane does not answer within `deadline`; it then finds the process silent.
    pub fn close(mut self, deadline: Duration) -> Result<(), Error> {
        self.leave(deadline)
    }

    fn leave(&mut self, deadline: Duration) -> Result<(), Error> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.mailbox.put(|mail| mail.stop = true);
        if thread.thread().id() != std::thread::current().id() {
            // It does not block, so it ends soon; a panic in the host was reported by its thread.
            let _ = thread.join();
        }
        if self.end().is_some() {
            return Ok(());
        }
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(GroupLinkError::Closed);
        let call = UnregisterProcess { world: self.world.clone(), process: self.process };
        match self.retry(&call, deadline, is_passing) {
            // A control plane that does not know the process has nothing to end.
            Err(error) if refusal(&error) == Some(RefusalCode::UnknownClient) => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    fn end(&self) -> Option<GroupLinkError> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a call, while the process is part of its world. A control plane that does not know the process gets it
    /// registered by the thread meanwhile.
    fn call<R>(&self, call: &R, deadline: Duration) -> Result<R::Reply, Error>
    where
        R: Request + Clone + Send + 'static,
        R::Reply: Send + 'static,
    {
        let may_pass = |error: &Error| {
            self.end().is_none() && (is_passing(error) || refusal(error) == Some(RefusalCode::UnknownClient))
        };
        if let Some(end) = self.end() {
            return Err(end.into());
        }
        let outcome = self.retry(call, deadline, may_pass);
        match (outcome, self.end()) {
            (Err(_), Some(end)) => Err(end.into()),
            (outcome, _) => outcome,
        }
    }

    fn retry<R>(&self, call: &R, deadline: Duration, may_pass: impl Fn(&Error) -> bool) -> Result<R::Reply, Error>
    where
        R: Request + Clone + Send + 'static,
        R::Reply: Send + 'static,
    {
        let by = Instant::now() + deadline;
        until_there(deadline, may_pass, || self.link.call_within(call.clone(), left(by)))
    }
}

impl Drop for GroupLink {
    fn drop(&mut self) {
        // Without an answer, the control plane finds the process silent.
        let _ = self.leave(GOODBYE);
    }
}

/// Returns the time that is left until `by`.
fn left(by: Instant) -> Duration {
    by.saturating_duration_since(Instant::now())
}

/// Returns true if a control plane is away, or cannot make changes at present.
fn is_passing(error: &Error) -> bool {
    error.is_control_away() || refusal(error) == Some(RefusalCode::Storage)
}

fn refusal(error: &Error) -> Option<RefusalCode> {
    match error {
        Error::Call(error) => error.refusal(),
        _ => None,
    }
}

/// State of the thread.
struct Reporter {
    link: ControlLink,
    /// Call that registers the process.
    register: RegisterProcess,
    host: Box<dyn MemberHost>,
    mailbox: Arc<Mailbox>,
    /// Revision of the status that was followed last.
    known: StatusRevision,
    memberships: Arc<Memberships>,
    /// Groups that the newest status lacks, and whose members are to be attached again.
    missing: Vec<GroupId>,
    /// False if the control plane does not know the process any more.
    is_registered: bool,
    /// Time at which the control plane is probed, if the call in flight is not answered by then; none without a call.
    overdue: Option<Instant>,
    /// The state has changed since the last report.
    wants_report: bool,
    /// Time of the next call.
    next: Instant,
    /// True while the stream of statuses is open.
    watches: bool,
    end: Arc<Mutex<Option<GroupLinkError>>>,
}

/// Notifies the thread when the stream of statuses ends.
struct StreamEnd(Arc<Mailbox>);

impl Drop for StreamEnd {
    fn drop(&mut self) {
        self.0.put(|mail| mail.is_stream_over = true);
    }
}

impl Reporter {
    fn run(&mut self) {
        loop {
            let due = match self.overdue {
                Some(overdue) => overdue,
                None if self.wants_report && self.is_registered => Instant::now(),
                None => self.next,
            };
            let mail = self.mailbox.take_by(due);
            if mail.stop {
                return;
            }
            if let Err(reason) = self.apply(mail) {
                *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.clone());
                tracing::warn!(rank = self.register.process.id.rank.0, "the link to the world has ended: {reason}");
                self.host.end(&reason);
                return;
            }
            self.step();
        }
    }

    /// Follows what has arrived. Fails when the process is not part of its world any more.
    fn apply(&mut self, mail: Mail) -> Result<(), GroupLinkError> {
        let Mail { report, status, reply, attached, is_stream_over, stop: _ } = mail;
        self.wants_report |= report;
        self.watches &= !is_stream_over;
        status.iter().for_each(|status| self.follow(status));
        if let Some(attached) = attached {
            return self.note_attached(attached);
        }
        let Some(reply) = reply else { return Ok(()) };
        self.overdue = None;
        match reply {
            Ok(WorldReply { status }) => {
                if !self.is_registered {
                    // The revisions of a control plane that lost its state begin again.
                    (self.is_registered, self.known) = (true, StatusRevision::default());
                }
                status.iter().for_each(|status| self.follow(status));
                Ok(())
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Notes that the member of the last missing group is attached again, or cannot be.
    fn note_attached(&mut self, attached: Result<MemberAttached, CallError>) -> Result<(), GroupLinkError> {
        self.overdue = None;
        let found = match attached {
            Ok(MemberAttached { group, .. }) => Ok(group),
            // Registered again, or at the next interval, it finds out again.
            Err(error) if error.refusal().is_none_or(|code| PASSING.contains(&code)) => return self.failed(&error),
            Err(error) => Err(error),
        };
        let Some(group) = self.missing.pop() else { return Ok(()) };
        self.wants_report = true;
        let why = match found {
            Ok(found) if found == group => return Ok(()),
            Ok(other) => {
                // Nobody takes part in it from here.
                let (world, process) = (self.register.world.clone(), self.register.process.id);
                let _ = self.link.call_then(DetachMember { world, process, group: other }, drop);
                "its control plane has lost its state".to_owned()
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(rank = self.register.process.id.rank.0, "the views of group {} have ended: {why}", group.0);
        self.memberships.lock().remove(&group);
        Ok(())
    }

    fn failed(&mut self, error: &CallError) -> Result<(), GroupLinkError> {
        let process = self.register.process.id;
        match error.refusal() {
            Some(RefusalCode::IncarnationEnded) => return Err(GroupLinkError::Ended { process }),
            Some(RefusalCode::AlreadyExists) => return Err(GroupLinkError::RankTaken { rank: process.rank }),
            Some(RefusalCode::UnknownClient) => (self.is_registered, self.next) = (false, Instant::now()),
            // The next report makes it good.
            _ => {
                tracing::debug!(rank = process.rank.0, "a report failed: {error}");
                (self.wants_report, self.next) = (false, Instant::now() + GroupLink::INTERVAL);
            }
        }
        Ok(())
    }

    fn follow(&mut self, newest: &WorldStatus) {
        if newest.revision > self.known {
            self.known = newest.revision;
            self.host.follow(&newest.status);
            let is_known = |group: &GroupId| newest.status.groups.iter().any(|status| status.group == *group);
            let memberships = self.memberships.lock();
            self.missing = memberships.keys().copied().filter(|group| !is_known(group)).collect();
            // The report names the roster that it is about.
            self.wants_report = true;
        }
    }

    /// Makes the call that is due, and opens the stream.
    fn step(&mut self) {
        let now = Instant::now();
        if let Some(overdue) = &mut self.overdue {
            if now >= *overdue {
                self.link.probe();
                *overdue = now + OVERDUE;
            }
            return;
        }
        if now < self.next && !(self.wants_report && self.is_registered) {
            return;
        }
        let mailbox = Arc::clone(&self.mailbox);
        let world = self.register.world.clone();
        let missing = self.missing_member();
        let then = move |reply| mailbox.put(|mail| mail.reply = Some(reply));
        let begun = if let Some(spec) = missing {
            let mailbox = Arc::clone(&self.mailbox);
            let then = move |reply| mailbox.put(|mail| mail.attached = Some(reply));
            self.link.call_then(AttachMember { world, process: self.register.process.id, spec }, then)
        } else if self.is_registered {
            self.open_stream(&world);
            self.link.call_then(ReportProcess { world, known: self.known, report: self.host.report() }, then)
        } else {
            self.link.call_then(self.register.clone(), then)
        };
        // Too many calls of the process wait: the next interval is another chance.
        self.overdue = begun.is_ok().then_some(now + OVERDUE);
        (self.wants_report, self.next) = (false, now + GroupLink::INTERVAL);
    }

    /// Returns the member that is to be attached again now.
    fn missing_member(&mut self) -> Option<GroupSpec> {
        while self.is_registered {
            let memberships = self.memberships.lock();
            if let Some(spec) = memberships.get(self.missing.last()?) {
                return Some(spec.clone());
            }
            // It was detached meanwhile.
            drop(memberships);
            self.missing.pop();
        }
        None
    }

    fn open_stream(&mut self, world: &WorldName) {
        if self.watches {
            return;
        }
        let watch = WatchWorld { world: world.clone(), process: self.register.process.id, known: self.known };
        let end = StreamEnd(Arc::clone(&self.mailbox));
        let each = move |status: WorldStatus| {
            end.0.put(|mail| {
                let is_newer = |known: &WorldStatus| known.revision < status.revision;
                if mail.status.as_ref().is_none_or(is_newer) {
                    mail.status = Some(status);
                }
            });
            true
        };
        // Where the stream does not begin, `each` is dropped, and the thread is notified of its end.
        self.watches = true;
        let _ = self.link.stream(watch, each);
    }
}
