//! Control link: a thread that follows the cluster map and makes calls to the control plane; it is parked while nothing
//! changes.
//!
//! The data path never waits for it. Requests are routed by the last map, whose replacement is noticed by reading one
//! atomic counter; while the control plane is away, the last map stays in use.

mod error;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::ClusterMap;
use kvplane_proto::rng::Rng;
use kvplane_rpc::message::{Request, StreamingCall, Welcome};
use kvplane_rpc::{CallError, Client, Role};
use kvplane_sys::interrupt::{self, ReceiveError};
use kvplane_sys::random::random_u64;
use tokio::sync::{mpsc, oneshot};

use crate::data_tls::{self, DataTlsIdentity};
use crate::error::{Error, LibraryThread};
use crate::tickets::Holder;
use crate::which::{Control, Line};
pub use error::ControlLinkError;

/// Limit of calls that wait for the thread.
const CALLS: usize = 64;
/// Interval at which the runtime directory is searched for a control plane that went away.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Interval at which a waiting call checks whether its thread is stopping.
const STOPS: Duration = Duration::from_millis(20);
/// Deadline of a probe of the control plane, and the pause before the next probe.
const PROBE: Duration = Duration::from_secs(1);
/// Time without a reply after which the control plane is probed.
const OVERDUE: Duration = Duration::from_millis(500);
/// Deadline of the first map.
const FIRST_MAP: Duration = Duration::from_secs(15);

pub(crate) const fn software() -> &'static str {
    concat!("kvplane/", env!("CARGO_PKG_VERSION"))
}

struct LinkState {
    /// Number of maps received so far; 0 before the first.
    generation: AtomicU64,
    map: Mutex<Option<StateMap>>,
    holder: Holder,
    sealing: DataTlsIdentity,
    /// True while a probe of the control plane is in flight or in its pause.
    probing: AtomicBool,
}

/// Map and the cluster state that it belongs to: epochs of different states cannot be compared.
#[derive(Clone)]
pub(crate) struct StateMap {
    pub(crate) state: u64,
    pub(crate) map: Arc<ClusterMap>,
    /// The last maps of the same state, so far as they are known; `map` is the last of them.
    pub(crate) recent: Arc<[Arc<ClusterMap>]>,
}

type Job = Box<dyn FnOnce(Client) -> std::pin::Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Connection to the control plane. Clones share it; it closes with the last clone.
#[derive(Clone)]
pub struct ControlLink {
    shared: Arc<LinkState>,
    jobs: mpsc::Sender<Job>,
    welcome: Arc<Welcome>,
    /// Address of the control plane at the time of connecting.
    address: SocketAddr,
    /// Only tenant that the certificate was bound to at the time of connecting.
    bound_to: Option<Arc<str>>,
    _thread: Arc<Thread>,
}

struct Thread {
    stop: Option<oneshot::Sender<()>>,
    handle: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        // Dropping the stop sender ends the thread.
        drop(self.stop.take());
        if let Some(handle) = self.handle.take() {
            // Any error of the thread was reported to its callers already.
            let _ = handle.join();
        }
    }
}

/// Backoff between attempts to reach a control plane that is away.
const CONNECT_AGAIN: Duration = Duration::from_millis(50);

/// Retries `attempt` until it succeeds, fails for good, or `within` has passed since the call.
///
/// # Errors
/// The error of the last attempt, or the refusal before it if only time was short for an answer to the last one; also
/// when the process is interrupted meanwhile.
pub(crate) fn until_there<T>(
    within: Duration,
    is_passing: impl Fn(&Error) -> bool,
    mut attempt: impl FnMut() -> Result<T, Error>,
) -> Result<T, Error> {
    let until = Instant::now() + within;
    let mut refusal = None;
    loop {
        match attempt() {
            Err(error) if is_passing(&error) && Instant::now() + CONNECT_AGAIN < until => {
                refusal = Some(error).filter(|error| !error.is_control_away());
                if !interrupt::sleep(CONNECT_AGAIN) {
                    return Err(Error::interrupted());
                }
            }
            Err(error) if error.is_control_away() => return Err(refusal.unwrap_or(error)),
            outcome => return outcome,
        }
    }
}

impl ControlLink {
    /// Default wait for a control plane that restarts.
    pub const RESTART: Duration = Duration::from_secs(3);

    /// Connects to this control plane, in this role.
    ///
    /// # Errors
    /// When it is not found, is unreachable, or rejects this process.
    pub fn to(control: &Control, role: Role) -> Result<Self, Error> {
        Self::start(Line::to(control, role)?)
    }

    /// Like [`Self::to`], and waits up to `within` for a control plane that is away: it may restart.
    ///
    /// # Errors
    /// Errors of [`Self::to`]; also an interruption of the process during the wait.
    pub fn to_within(control: &Control, role: Role, within: Duration) -> Result<Self, Error> {
        until_there(within, Error::may_restart, || Self::to(control, role))
    }

    /// Connects, exchanges the hello, and waits for the first map.
    fn start(line: Line) -> Result<Self, Error> {
        let (address, bound_to) = (line.address(), line.tenant().map(Arc::from));
        let (generation, map, holder) = (AtomicU64::new(0), Mutex::new(None), Holder::default());
        let shared =
            Arc::new(LinkState { generation, map, holder, sealing: line.sealing(), probing: AtomicBool::new(false) });
        let (jobs, receiver) = mpsc::channel(CALLS);
        let (stop, stopped) = oneshot::channel();
        let (ready, wait) = sync_channel(1);
        let inner = Arc::clone(&shared);
        let handle = std::thread::Builder::new().name("kvplane-link".to_owned()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = ready.send(Err(Error::System(error)));
                    return;
                }
            };
            let tasks = tokio::task::LocalSet::new();
            tasks.block_on(&runtime, live(line, inner, receiver, stopped, ready));
        })?;
        let thread = Arc::new(Thread { stop: Some(stop), handle: Some(handle) });
        let welcome =
            wait.recv().map_err(|_| Error::ThreadEnded { thread: LibraryThread::ControlLink, starting: true })??;
        let link = Self { shared, jobs, welcome: Arc::new(welcome), address, bound_to, _thread: thread };
        link.first_map()?;
        Ok(link)
    }

    fn first_map(&self) -> Result<(), Error> {
        let start = Instant::now();
        while self.map_generation() == 0 {
            if start.elapsed() > FIRST_MAP {
                return Err(ControlLinkError::NoFirstMap { after: FIRST_MAP }.into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Returns a counter that changes with every new map. Never 0 once connected.
    #[must_use]
    pub fn map_generation(&self) -> u64 {
        self.shared.generation.load(Ordering::Acquire)
    }

    /// Returns the latest map.
    #[must_use]
    pub fn map(&self) -> Option<Arc<ClusterMap>> {
        self.state_map().map(|known| known.map)
    }

    pub(crate) fn state_map(&self) -> Option<StateMap> {
        self.shared.map.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the tenant that a name stands for. An empty name is the only tenant that the certificate is bound to or,
    /// if it is valid for all, the default tenant. In the protocol, the default tenant has an empty name.
    pub(crate) fn tenant_meant<'a>(&'a self, said: &'a str) -> &'a str {
        let meant = match (said, &self.bound_to) {
            ("", Some(only)) => only,
            _ => said,
        };
        if meant == "default" { "" } else { meant }
    }

    /// Returns the only tenant that the certificate is bound to, if it is bound to one; the default tenant has an empty
    /// name.
    #[must_use]
    pub fn own_tenant(&self) -> Option<&str> {
        self.bound_to.is_some().then(|| self.tenant_meant(""))
    }

    /// Returns the address of this host on the route to the control plane, where that is beyond loopback.
    #[must_use]
    pub fn own_address(&self) -> Option<IpAddr> {
        let far = Some(self.address).filter(|address| !address.ip().is_loopback())?;
        // Nothing is sent: connecting a UDP socket only looks up the route.
        let any: IpAddr = if far.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let towards =
            UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(far).and_then(|()| socket.local_addr()));
        towards.ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
    }

    /// Returns the holder of the link's ticket.
    pub(crate) fn holder(&self) -> &Holder {
        &self.shared.holder
    }

    /// Returns the identity for TLS on data connections.
    pub(crate) fn sealing(&self) -> &DataTlsIdentity {
        &self.shared.sealing
    }

    /// Returns the first message of the control plane.
    #[must_use]
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Opens a stream and passes each of its items to `each`, on the link's thread: it must not block. The stream ends
    /// when `each` returns false, and with the connection; `each` is then dropped, which is the only notification of
    /// the end.
    ///
    /// # Errors
    /// When too many calls wait, or the thread has ended.
    pub fn stream<R>(&self, request: R, each: impl FnMut(R::Item) -> bool + Send + 'static) -> Result<(), Error>
    where
        R: StreamingCall + Send + 'static,
        R::Item: Send + 'static,
    {
        let mut each = each;
        let job: Job = Box::new(move |client| Box::pin(async move { drain(&client, &request, &mut each).await }));
        Ok(self.jobs.try_send(job).map_err(|_| ControlLinkError::Calls { limit: CALLS })?)
    }

    /// Makes a call and waits for its reply. The call has a deadline.
    ///
    /// # Errors
    /// The call's error, or when the thread has ended.
    pub fn call<R>(&self, request: R) -> Result<R::Reply, Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        match interrupt::receive(&self.begin(request)?, None) {
            Ok(answer) => answer.map_err(Error::Call),
            Err(ReceiveError::Interrupted) => Err(Error::interrupted()),
            Err(ReceiveError::TimedOut | ReceiveError::Disconnected) => Err(ended()),
        }
    }

    /// Probes the control plane in the background, for callers that need a newer map: a control plane that lives has
    /// sent its newest map already, and one that was killed and restarted is found within about a second.
    pub(crate) fn probe(&self) {
        if self.shared.probing.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let job: Job = Box::new(move |client| {
            Box::pin(async move {
                // The result does not matter: a failed probe closes the connection, which the thread notices.
                let _ = client.probe(PROBE).await;
                tokio::time::sleep(PROBE).await;
                shared.probing.store(false, Ordering::Release);
            })
        });
        if self.jobs.try_send(job).is_err() {
            self.shared.probing.store(false, Ordering::Release);
        }
    }

    /// Makes a call without waiting for it. `then` is called with its outcome, on the link's thread: it must not block.
    ///
    /// # Errors
    /// When too many calls wait, or the thread has ended; `then` is not called.
    pub(crate) fn call_then<R>(
        &self,
        request: R,
        then: impl FnOnce(Result<R::Reply, CallError>) + Send + 'static,
    ) -> Result<(), Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        let job: Job = Box::new(move |client| Box::pin(async move { then(client.call(&request).await) }));
        Ok(self.jobs.try_send(job).map_err(|_| ControlLinkError::Calls { limit: CALLS })?)
    }

    /// Sends a call without waiting for its reply. Drops the call when too many wait already.
    pub(crate) fn tell<R>(&self, request: R)
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        let job: Job = Box::new(move |client| {
            Box::pin(async move {
                // A refusal changes nothing for the caller.
                let _ = client.call(&request).await;
            })
        });
        let _ = self.jobs.try_send(job);
    }

    /// Like [`Self::call`], with a time limit of `budget`; the call may take effect after that.
    ///
    /// # Errors
    /// Errors of [`Self::call`]; also a missed deadline when the call takes longer.
    pub fn call_within<R>(&self, request: R, budget: Duration) -> Result<R::Reply, Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        match interrupt::receive(&self.begin(request)?, Some(budget)) {
            Ok(answer) => answer.map_err(Error::Call),
            Err(ReceiveError::TimedOut) => {
                Err(Error::Call(CallError::Deadline { address: self.address, waited: budget }))
            }
            Err(ReceiveError::Interrupted) => Err(Error::interrupted()),
            Err(ReceiveError::Disconnected) => Err(ended()),
        }
    }

    /// Like [`Self::call`], and returns soon after `stop` is set: for threads that are joined.
    ///
    /// # Errors
    /// Errors of [`Self::call_within`].
    pub(crate) fn call_unless<R>(&self, stop: &AtomicBool, request: R) -> Result<R::Reply, Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        let (answer, begun) = (self.begin(request)?, Instant::now());
        loop {
            match interrupt::receive(&answer, Some(STOPS)) {
                Ok(answer) => return answer.map_err(Error::Call),
                Err(ReceiveError::TimedOut) if !stop.load(Ordering::Relaxed) => {
                    // Probe early: a control plane that was killed must not cost this thread the whole deadline of a
                    // call, every time.
                    if begun.elapsed() >= OVERDUE {
                        self.probe();
                    }
                }
                Err(ReceiveError::TimedOut) => {
                    return Err(Error::Call(CallError::Deadline { address: self.address, waited: begun.elapsed() }));
                }
                Err(ReceiveError::Interrupted) => return Err(Error::interrupted()),
                Err(ReceiveError::Disconnected) => return Err(ended()),
            }
        }
    }

    fn begin<R>(&self, request: R) -> Result<Receiver<Result<R::Reply, CallError>>, Error>
    where
        R: Request + Send + 'static,
        R::Reply: Send + 'static,
    {
        let (answer, wait) = sync_channel::<Result<R::Reply, CallError>>(1);
        let job: Job = Box::new(move |client| {
            Box::pin(async move {
                // The caller may have given up.
                let _ = answer.send(client.call(&request).await);
            })
        });
        self.jobs.try_send(job).map_err(|_| ControlLinkError::Calls { limit: CALLS })?;
        Ok(wait)
    }
}

fn ended() -> Error {
    Error::ThreadEnded { thread: LibraryThread::ControlLink, starting: false }
}

/// Passes each item of a stream to `each` until that returns false, the stream ends, or the connection is lost.
async fn drain<R: StreamingCall>(client: &Client, request: &R, each: &mut (dyn FnMut(R::Item) -> bool + Send)) {
    let Ok(mut items) = client.stream(request).await else { return };
    while let Ok(item) = items.next().await {
        if !each(item) {
            return;
        }
    }
}

pub(crate) fn reconnections() -> Result<Rng, Error> {
    Ok(Rng::new(random_u64()?, "reconnect"))
}

/// Sleeps until this time, or forever.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

async fn live(
    mut line: Line,
    shared: Arc<LinkState>,
    mut jobs: mpsc::Receiver<Job>,
    mut stopped: oneshot::Receiver<()>,
    ready: std::sync::mpsc::SyncSender<Result<Welcome, Error>>,
) {
    let (mut client, welcome) = match line.seek().await {
        Ok(connected) => connected,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let mut watch = client.watch_map();
    let _ = ready.send(Ok(welcome));
    let (mut known, mut of_state) = (None, None);
    let mut look = tokio::time::interval(LOOK_AGAIN);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut certificates = tokio::time::interval(data_tls::LOOK);
    certificates.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let seen = watch.state();
        let state = seen.state_id;
        // The keys of tickets are lost with the former state: shards that start now do not know them.
        if of_state.replace(state).is_some_and(|before| before != state) {
            shared.holder.renew_at_once();
        }
        // A control plane without a map may have lost its state: the last map stays in use until there is another.
        if let Some(map) = seen.map
            && known != Some((state, map.epoch))
            && (map.epoch != Epoch(0) || shared.generation.load(Ordering::Acquire) == 0)
        {
            known = Some((state, map.epoch));
            let latest = StateMap { state, map, recent: seen.recent };
            *shared.map.lock().unwrap_or_else(PoisonError::into_inner) = Some(latest);
            shared.generation.fetch_add(1, Ordering::Release);
        }
        tokio::select! {
            _ = watch.changed() => {}
            Some(job) = jobs.recv() => {
                tokio::task::spawn_local(job(client.clone()));
            }
            () = until(shared.holder.due()) => {
                let Some(call) = shared.holder.begin_renewal() else { continue };
                let (shared, client) = (Arc::clone(&shared), client.clone());
                tokio::task::spawn_local(async move { shared.holder.renew(client, call).await });
            }
            () = shared.holder.changed.notified() => {}
            _ = certificates.tick(), if shared.sealing.is_wanted() => shared.sealing.look(),
            _ = look.tick(), if seen.trouble.is_some() => {
                let Some(elsewhere) = line.moved() else { continue };
                let found = tokio::select! {
                    found = elsewhere.seek() => found,
                    _ = &mut stopped => break,
                };
                if let Ok((other, _)) = found {
                    // Calls in flight keep the old client until they end. Epochs of another state cannot be
                    // compared.
                    (client, line) = (other, elsewhere);
                    watch = client.watch_map();
                    known = None;
                }
            }
            _ = &mut stopped => break,
        }
    }
    client.close().await;
}

#[cfg(test)]
mod tests {
    use kvplane_rpc::{Refusal, RefusalCode};

    use super::*;

    fn refused() -> Error {
        Error::Call(CallError::Refused(Refusal::new(RefusalCode::AlreadyExists, "the rank is taken")))
    }

    fn unanswered() -> Error {
        let (address, waited) = (SocketAddr::from(([127, 0, 0, 1], 1)), Duration::ZERO);
        Error::Call(CallError::Deadline { address, waited })
    }

    /// Returns the error of attempts that fail with these, one after the other, the last one at the end of the time.
    fn error_of(errors: Vec<fn() -> Error>) -> Error {
        let (within, mut left) = (2 * CONNECT_AGAIN * errors.len() as u32, errors.into_iter());
        let start = Instant::now();
        until_there(
            within,
            |_| true,
            || {
                let error = left.next().expect("no attempt after the end")();
                if left.len() == 0 {
                    std::thread::sleep(within.saturating_sub(start.elapsed()));
                }
                Err::<(), _>(error)
            },
        )
        .expect_err("all attempts failed")
    }

    #[test]
    fn a_refusal_is_said_though_the_time_was_too_short_for_another_one() {
        let last = error_of(vec![refused, unanswered]);
        assert!(!last.is_control_away(), "{last}");
        assert!(error_of(vec![unanswered]).is_control_away());
    }
}
