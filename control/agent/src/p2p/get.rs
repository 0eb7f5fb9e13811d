//! Fetches of objects: threads of the call carry out orders, and the caller's own thread reports the outcomes.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvplane_cluster::p2p::{HALVES, Interval, ShardSet};
use kvplane_engine::Region;
use kvplane_proto::Status;
use kvplane_rpc::p2p::{FetchFailure, ReportObject};
use kvplane_sys::interrupt;

use super::fetch::{Sources, work};
use super::ranks::{Ranks, Seat, follow};
use super::replica::{Fetch, Replica};
use super::{Flag, Object, P2pStore, StoreState, is_away, is_forgotten};
use crate::error::Error;

/// Number of fetch threads: the orders in flight that the control plane gives to a member, plus some that hang.
const WORKERS: usize = 20;
/// Interval of the checks for progress.
const LOOK: Duration = Duration::from_millis(500);
/// Time within which the reports of ranks are batched.
const TOGETHER: Duration = Duration::from_millis(200);
/// Time without progress after which the control plane is queried for peers that hold the missing shards.
const IDLE: Duration = Duration::from_secs(3);
/// Consecutive queries without such a peer after which a get without a deadline fails: 12 s with the first.
const HOPELESS: u32 = 3;
/// Deadline of a call whose caller gave none.
pub(super) const USUAL: Duration = Duration::from_secs(3600);
/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);

/// Progress of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Shard that has just arrived.
    pub shard: u32,
    /// Number of shards present.
    pub have: u32,
    /// Number of requested shards that are missing.
    pub missing: u32,
}

/// Options of a get.
#[derive(Default)]
pub struct GetOptions<'a> {
    /// Shards to fetch, as runs of first shard and count; `None` fetches all.
    pub shards: Option<Vec<Interval>>,
    /// Verify the content of the memory first: shards that match already are not fetched again.
    pub resume: bool,
    /// Rank of this process among several that all fetch the whole object at about the same time; ranks fetch from each
    /// other by a schedule, and whatever the schedule does not deliver the usual way.
    pub ranks: Option<Ranks>,
    /// Deadline of the call. Until then the call waits for shards that no peer holds: their peer may be restarting.
    /// Without one, the call takes at most an hour, and waits 12 s for such a shard. A shard whose origin has wrong
    /// bytes is not waited for.
    pub deadline: Option<Duration>,
    /// Callback for each shard that has arrived and was verified, called by threads of the call.
    pub each: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl std::fmt::Debug for GetOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GetOptions({:?}, resume {}, {:?})", self.shards, self.resume, self.deadline)
    }
}

/// Consecutive queries that found shards without a peer, and the reason as reported then.
#[derive(Default)]
struct Doubt {
    times: u32,
    why: String,
}

impl P2pStore {
    /// Fetches an object into memory, one region for each buffer, and serves the arrived shards to peers from then on,
    /// until [`Self::delete_replica`]. Returns the number of bytes that were fetched.
    ///
    /// Shards of the object may be held here already, from a former call into the same memory: then only missing shards
    /// are fetched to it. A single `delete_replica` covers all of them.
    ///
    /// # Errors
    /// When the regions do not match the buffers in length, the memory overlaps other registered memory, no peer holds
    /// a shard, or the deadline has passed. The memory is then unregistered; arrived shards stay in it, for another
    /// attempt with [`GetOptions::resume`]. Where shards were held before, these and the arrived ones stay held, unless
    /// the control plane does not answer.
    pub fn get_replica(
        &self,
        object: &Object,
        regions: &[Arc<Region>],
        options: &GetOptions<'_>,
    ) -> Result<u64, Error> {
        let until = Instant::now() + options.deadline.unwrap_or(USUAL);
        check_fit(object, regions)?;
        if let Some(held) = self.shared.held(object, regions, options)? {
            return self.shared.widen(&held, options, until);
        }
        let replica = prepare(object, regions, options)?;
        // Set before other threads see the replica.
        replica.fetched.store(true, Ordering::Release);
        let replica = self.shared.announce(replica)?;
        let _fetched = Flag::raise(&replica.fetched);
        let seated = self.shared.take_seat(&replica);
        let result = seated.and_then(|()| self.shared.fetch_all(&replica, options, until));
        if result.is_err() {
            self.shared.replicas().remove(&(replica.name.clone(), replica.version));
            self.shared.retire(&replica, Duration::ZERO)?;
        }
        result
    }
}

/// Returns the requested shards of an object of so many shards.
pub(super) fn wanted(shards: u32, options: &GetOptions<'_>) -> Result<ShardSet, Error> {
    let all = vec![(0, shards)];
    ShardSet::of(shards, options.shards.as_ref().unwrap_or(&all)).map_err(|(first, count)| {
        Error::Argument(format!("{count} shards from {first} on are not within the object's {shards}"))
    })
}

/// Checks that the memory matches the object's buffers in length, and is writable.
fn check_fit(object: &Object, regions: &[Arc<Region>]) -> Result<(), Error> {
    let layout = &object.spec.layout;
    let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
    if sizes != layout.sizes() {
        let differs = sizes.iter().zip(layout.sizes()).position(|(ours, theirs)| ours != theirs);
        let what = match differs {
            Some(at) => format!("buffer {at} has {} bytes, but {} are given", layout.sizes()[at], sizes[at]),
            None => format!("it has {} buffers, but {} are given", layout.sizes().len(), sizes.len()),
        };
        return Err(Error::Argument(format!("object {:?} does not fit: {what}", object.name)));
    }
    if let Some(region) = regions.iter().find(|region| !region.writable()) {
        return Err(Error::Argument(format!("the memory at {:#x} cannot be written", region.address())));
    }
    Ok(())
}

/// Prepares a replica; with `resume`, verifies which requested shards are present.
fn prepare(object: &Object, regions: &[Arc<Region>], options: &GetOptions<'_>) -> Result<Replica, Error> {
    let (layout, shards) = (&object.spec.layout, object.spec.layout.shards());
    let want = wanted(shards, options)?;
    let spec = &object.spec;
    let (mut have, mut missing) = (ShardSet::empty(shards), want.clone());
    if options.resume {
        let found = super::replica::hashes(layout, regions);
        for shard in want.iter().filter(|&shard| found[shard as usize] == spec.hashes[shard as usize]) {
            have.insert(shard);
            missing.remove(shard);
        }
    }
    let seat = match &options.ranks {
        Some(_) if options.shards.is_some() => {
            return Err(Error::Argument("ranks fetch all of an object: name no shards, or no rank".to_owned()));
        }
        Some(ranks) => Some((ranks.follow(&missing, options.deadline.unwrap_or(USUAL))?, Seat::new(ranks, &have)?)),
        None => None,
    };
    let mut replica = Replica::partial(&object.name, object.version, Arc::clone(spec), regions, have, missing);
    if let Some((follow, seat)) = seat {
        replica.fetch().follow = Some(follow);
        replica.seat = Some(seat);
    }
    Ok(replica)
}

impl StoreState {
    pub(super) fn fetch_all(
        &self,
        replica: &Arc<Replica>,
        options: &GetOptions<'_>,
        until: Instant,
    ) -> Result<u64, Error> {
        let sources = Sources::default();
        let (have, missing) = {
            let fetch = replica.fetch();
            (fetch.have.count(), fetch.want.count())
        };
        // Counted here: several shards arrive concurrently, and each reports a count of its own.
        let arrived = AtomicU32::new(0);
        let each = |shard| {
            let Some(each) = options.each else { return };
            let arrived = arrived.fetch_add(1, Ordering::Relaxed) + 1;
            each(Progress { shard, have: have + arrived, missing: missing.saturating_sub(arrived) });
        };
        let result = std::thread::scope(|scope| {
            let workers = WORKERS.min(replica.spec.layout.shards() as usize);
            let mut started = 0;
            for _ in 0..workers {
                let builder = std::thread::Builder::new().name("kvp-p2p-fetch".to_owned());
                let body = || work(self, replica, &sources, &each);
                started += usize::from(builder.spawn_scoped(scope, body).is_ok());
            }
            for half in (0..HALVES).filter(|_| replica.seat.is_some()) {
                let builder = std::thread::Builder::new().name("kvp-p2p-follow".to_owned());
                let sources = &sources;
                if builder.spawn_scoped(scope, move || follow(self, replica, sources, half)).is_err() {
                    started = 0;
                }
            }
            let result = if started == 0 && workers > 0 {
                Err(Error::Argument("no thread could be started for the fetch".to_owned()))
            } else {
                self.report_all(replica, until, options.deadline.is_some())
            };
            let mut fetch = replica.fetch();
            fetch.stop = true;
            fetch.active.values().flat_map(|active| &active.batches).for_each(|batch| batch.cancel());
            drop(fetch);
            replica.ordered.notify_all();
            replica.followed.notify_all();
            result
        });
        sources.close(self);
        result?;
        Ok(replica.fetch().fetched_bytes)
    }

    /// Reports until all shards are present. With `patient`, waits for peers until the deadline.
    fn report_all(&self, replica: &Arc<Replica>, until: Instant, patient: bool) -> Result<(), Error> {
        let (mut progress, mut reported) = (Instant::now(), Instant::now());
        let mut doubt = Doubt::default();
        loop {
            let (got, failed, missing) = news(replica, until, reported);
            if Instant::now() >= until && missing > 0 {
                let why = if doubt.why.is_empty() {
                    "deadline exceeded"
                } else {
                    &format!("deadline exceeded; {}", doubt.why)
                };
                return Err(self.given_up(replica, missing, why, Status::DeadlineExceeded));
            }
            if missing > 0 && interrupt::ended() {
                return Err(Error::interrupted());
            }
            if got.is_empty() && failed.is_empty() {
                if missing == 0 {
                    return Ok(());
                }
                if progress.elapsed() > IDLE {
                    self.check_hope(replica, missing, &mut doubt, patient)?;
                    progress = Instant::now();
                }
                continue;
            }
            if !got.is_empty() {
                (progress, doubt) = (Instant::now(), Doubt::default());
            }
            self.report(replica, got, failed)?;
            reported = Instant::now();
        }
    }

    fn report(&self, replica: &Arc<Replica>, got: Vec<u32>, failed: Vec<FetchFailure>) -> Result<(), Error> {
        let runs = |got: &[u32]| got.iter().map(|&shard| (shard, 1)).collect();
        let member = replica.member();
        let call = ReportObject { client: self.client, member, got: runs(&got), failed };
        let failed = call.failed.clone();
        match self.link.call(call) {
            Ok(_) => Ok(()),
            Err(error) if is_away(&error) => {
                // The outcomes are kept and reported again, because it is unknown whether they were received.
                let mut fetch = replica.fetch();
                fetch.got.extend(got);
                fetch.failed.extend(failed);
                drop(fetch);
                interrupt::sleep(AWAY);
                Ok(())
            }
            // The new announcement covers all shards that are present.
            Err(error) if is_forgotten(&error) => match self.keeper.hold_again(self, replica, member) {
                Err(error) if !is_away(&error) && !is_forgotten(&error) => Err(error),
                _ => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// Queries for peers that hold the missing shards. Fails when there are none and the call does not wait for any.
    fn check_hope(&self, replica: &Replica, missing: u32, doubt: &mut Doubt, patient: bool) -> Result<(), Error> {
        let times = std::mem::take(doubt).times;
        let call = kvplane_rpc::p2p::DescribeObject {
            tenant: self.config.tenant.clone(),
            name: replica.name.clone(),
            version: Some(replica.version),
        };
        // While the control plane does not answer, or has forgotten the object, there is hope.
        let Ok(found) = self.link.call(call) else { return Ok(()) };
        if found.lost == 0 {
            return Ok(());
        }
        // An origin with wrong bytes does not return with right ones; other peers may still hold the shard.
        let is_wrong = found.members.iter().any(|member| !member.excluded.is_empty() && (member.origin || !patient));
        let excluded = found.members.iter().filter(|member| !member.excluded.is_empty());
        let wrong: Vec<String> =
            excluded.map(|member| format!("{} is excluded: {}", member.segment, member.excluded)).collect();
        let why = format!("{} shards are held by no peer; {}", found.lost, wrong.join("; "));
        let why = why.trim_end_matches("; ").to_owned();
        if !is_wrong && (patient || times < HOPELESS) {
            *doubt = Doubt { times: times + 1, why };
            return Ok(());
        }
        let advice = if is_wrong { "" } else { "; no deadline was given: with one, the call waits until then" };
        Err(self.given_up(replica, missing, &format!("{why}{advice}"), Status::NotFound))
    }

    fn given_up(&self, replica: &Replica, missing: u32, why: &str, status: Status) -> Error {
        let (shards, name) = (replica.spec.layout.shards(), &replica.name);
        let what =
            format!("object {name:?} version {}: {missing} of {shards} shards are missing: {why}", replica.version);
        Error::Status { what, status, cause: replica.fetch().trouble.clone() }
    }
}

/// Waits a limited time for outcomes to report, and returns them with the number of missing shards. No peer depends on
/// the reports of ranks: they are batched while everything arrives by the schedule.
fn news(replica: &Replica, until: Instant, reported: Instant) -> (Vec<u32>, Vec<FetchFailure>, u32) {
    let look = if replica.seat.is_some() { TOGETHER } else { LOOK };
    let look = interrupt::step(look.min(until.saturating_duration_since(Instant::now())));
    let fetch = replica.fetch();
    let is_quiet = |fetch: &mut Fetch| {
        let follows = fetch.follow.as_ref().is_some_and(|follow| follow.elsewhere().next().is_none());
        let is_early = follows && reported.elapsed() < TOGETHER;
        (fetch.got.is_empty() || is_early) && fetch.failed.is_empty() && !fetch.want.is_empty()
    };
    let (mut fetch, _) = replica.news.wait_timeout_while(fetch, look, is_quiet).unwrap_or_else(PoisonError::into_inner);
    let (got, failed) = (std::mem::take(&mut fetch.got), std::mem::take(&mut fetch.failed));
    (got, failed, fetch.want.count())
}
