//! Fetching an object: threads of the call carry out orders, and the caller's own reports what came of them.

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

/// Orders that are carried out at a time: as many as the control plane gives, and those that hang.
const WORKERS: usize = 20;
/// How often it is looked for progress.
const LOOK: Duration = Duration::from_millis(500);
/// What ranks report in this time goes together.
const TOGETHER: Duration = Duration::from_millis(200);
/// Without progress for this long, it is asked whether there is any hope.
const IDLE: Duration = Duration::from_secs(3);
/// How often there must be none before it is believed, where no deadline says how long to wait: 12 s with the first.
const HOPELESS: u32 = 3;
/// How long a call takes at most whose caller gave no deadline.
pub(super) const USUAL: Duration = Duration::from_secs(3600);
/// How long the control plane is left alone after it could not be asked.
const AWAY: Duration = Duration::from_millis(200);

/// How far a get is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The shard that has just arrived.
    pub shard: u32,
    /// Shards of the object that are there.
    pub have: u32,
    /// Shards that are wanted and missing.
    pub missing: u32,
}

/// How an object is fetched.
#[derive(Default)]
pub struct GetOptions<'a> {
    /// Which shards are wanted, as the first of a run and how many; without, all.
    pub shards: Option<Vec<Interval>>,
    /// Whether what is in the memory is looked at first: shards that are right already are not fetched again.
    pub resume: bool,
    /// Which one of several processes this is that all fetch all of the object at about the same time; they fetch it
    /// from each other by a schedule then, and what that does not bring as always.
    pub ranks: Option<Ranks>,
    /// How long it may take. Until then a shard is waited for that no source has: who had it may be starting again.
    /// Without one it is an hour, and 12 s for such a shard. A shard that whoever brought the object has wrong is not
    /// waited for.
    pub deadline: Option<Duration>,
    /// Called for each shard that has arrived and is right, by threads of the call.
    pub each: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl std::fmt::Debug for GetOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GetOptions({:?}, resume {}, {:?})", self.shards, self.resume, self.deadline)
    }
}

/// How often in a row there was nobody to fetch from, and what is missing then.
#[derive(Default)]
struct Doubt {
    times: u32,
    why: String,
}

impl P2pStore {
    /// Fetches an object into memory, one region for each buffer, and serves what has arrived to others from then on,
    /// until [`Self::delete_replica`]. The bytes that were fetched are the answer.
    ///
    /// Some shards of the object may be held here already, by a former call into the same memory: the others that are
    /// wanted are fetched to it. One `delete_replica` is for all of them.
    ///
    /// # Errors
    /// When the regions are not as long as the buffers, the memory overlaps other memory that is registered, no source
    /// is left for a shard, or time is up; the memory is given back then, and what has arrived stays in it, for another
    /// attempt with [`GetOptions::resume`]. Where some of the object was held before, that and what has arrived stays
    /// held, unless the control plane cannot be asked.
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
        // Before anybody else sees it.
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

/// What is asked for of an object of so many shards.
pub(super) fn wanted(shards: u32, options: &GetOptions<'_>) -> Result<ShardSet, Error> {
    let all = vec![(0, shards)];
    ShardSet::of(shards, options.shards.as_ref().unwrap_or(&all)).map_err(|(first, count)| {
        Error::Argument(format!("{count} shards from {first} on are not within the object's {shards}"))
    })
}

/// Whether the memory is as long as the object's buffers, and can be written.
fn check_fit(object: &Object, regions: &[Arc<Region>]) -> Result<(), Error> {
    let layout = &object.spec.layout;
    let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
    if sizes != layout.sizes() {
        let differs = sizes.iter().zip(layout.sizes()).position(|(ours, theirs)| ours != theirs);
        let what = match differs {
            Some(at) => format!("buffer {at} has {} bytes, and {} are given", layout.sizes()[at], sizes[at]),
            None => format!("it has {} buffers, and {} are given", layout.sizes().len(), sizes.len()),
        };
        return Err(Error::Argument(format!("object {:?} does not fit: {what}", object.name)));
    }
    if let Some(region) = regions.iter().find(|region| !region.writable()) {
        return Err(Error::Argument(format!("the memory at {:#x} cannot be written", region.address())));
    }
    Ok(())
}

/// Looks at what is there of what is asked for.
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
        // Counted here: several arrive at a time, and each is one more than the one before.
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
                Err(Error::Argument("no thread could be started to fetch with".to_owned()))
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

    /// Reports until everything is there. Who is `patient` waits for sources until time is up.
    fn report_all(&self, replica: &Arc<Replica>, until: Instant, patient: bool) -> Result<(), Error> {
        let (mut progress, mut reported) = (Instant::now(), Instant::now());
        let mut doubt = Doubt::default();
        loop {
            let (got, failed, missing) = news(replica, until, reported);
            if Instant::now() >= until && missing > 0 {
                let why = if doubt.why.is_empty() { "time is up" } else { &format!("time is up; {}", doubt.why) };
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
                // What is there is not lost; whether they heard it is seen when it is said again.
                let mut fetch = replica.fetch();
                fetch.got.extend(got);
                fetch.failed.extend(failed);
                drop(fetch);
                interrupt::sleep(AWAY);
                Ok(())
            }
            // All that is there is announced with it.
            Err(error) if is_forgotten(&error) => match self.keeper.hold_again(self, replica, member) {
                Err(error) if !is_away(&error) && !is_forgotten(&error) => Err(error),
                _ => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// Asks whether there is somebody to fetch from: an error when there is not, and none is waited for.
    fn check_hope(&self, replica: &Replica, missing: u32, doubt: &mut Doubt, patient: bool) -> Result<(), Error> {
        let times = std::mem::take(doubt).times;
        let call = kvplane_rpc::p2p::DescribeObject {
            tenant: self.config.tenant.clone(),
            name: replica.name.clone(),
            version: Some(replica.version),
        };
        // While the control plane is away, or has forgotten, there is hope.
        let Ok(found) = self.link.call(call) else { return Ok(()) };
        if found.lost == 0 {
            return Ok(());
        }
        // Who brought an object with wrong bytes does not come back with right ones; another's may be elsewhere.
        let is_wrong = found.members.iter().any(|member| !member.excluded.is_empty() && (member.origin || !patient));
        let excluded = found.members.iter().filter(|member| !member.excluded.is_empty());
        let wrong: Vec<String> =
            excluded.map(|member| format!("{} is excluded: {}", member.segment, member.excluded)).collect();
        let why = format!("{} shards are nowhere to be had; {}", found.lost, wrong.join("; "));
        let why = why.trim_end_matches("; ").to_owned();
        if !is_wrong && (patient || times < HOPELESS) {
            *doubt = Doubt { times: times + 1, why };
            return Ok(());
        }
        let advice = if is_wrong { "" } else { "; no deadline was given: with one, sources are waited for until then" };
        Err(self.given_up(replica, missing, &format!("{why}{advice}"), Status::NotFound))
    }

    fn given_up(&self, replica: &Replica, missing: u32, why: &str, status: Status) -> Error {
        let (shards, name) = (replica.spec.layout.shards(), &replica.name);
        let what =
            format!("object {name:?} version {}: {missing} of {shards} shards are missing: {why}", replica.version);
        Error::Status { what, status, cause: replica.fetch().trouble.clone() }
    }
}

/// Waits for something to report, for a while. And how many shards are missing. Nobody waits for what ranks report:
/// that of some time goes together, as long as all comes by the schedule.
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
