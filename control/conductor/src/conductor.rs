//! The Conductor: what schedulers and instances say to it, by name and by request.
//!
//! A pool's scheduler knows numbers. Here instances have names and incarnations, are believed while they report and
//! doubted when they do not; requests have ids of their own, so that one asked twice is booked once; what is booked
//! ends with a lease; and each model has a scheduler of its own, in a *pool*, since only instances of one model can
//! stand in for another.
//!
//! Each part has its state for itself; the Conductor joins them:
//!
//! * `pools`: each with a scheduler, an index, and counts of its hot prefixes;
//! * `instances`: names, incarnations, silence, and what each said of its cache (`cache_feed`);
//! * `requests`: ids, leases, and what clients that wait are to be told.
//!
//! One owner calls it, with the time: nanoseconds of a monotonic clock. Nobody else's clock counts; messages carry
//! spans only. What is to be told later to those who wait comes out of [`Conductor::take_told`]. Everything is bounded
//! by [`ConductorConfig`].

mod cache_feed;
mod calls;
mod config;
mod due;
mod durable;
mod error;
mod instance_calls;
mod instance_spec;
mod instances;
mod pools;
mod requests;
mod views;

use crate::copies::Copies;
use crate::policy::{PolicyName, Slo};

pub use cache_feed::{AWAY_DOUBTED_NS, AWAY_FORGOTTEN_NS, Ack, CacheBatch, CacheChange, CacheEvent, CacheRequest};
use calls::MOST_BARRED;
pub use calls::{Answer, AssignedInstances, ClientNotice, Mode, ScheduleRequest, Source, Step, Why};
pub use config::{ConductorConfig, MAX_ID_BYTES, MAX_PROMPT_BLOCKS};
pub use durable::{Durable, DurableInstance};
pub use error::ConductorError;
use error::bad;
pub use instance_spec::{InstanceSpec, Load, Part, Publisher, Registration};
pub use instances::InstanceRegistry;
use instances::ReportCounts;
use pools::Pools;
pub use pools::{Hits, PoolKey};
use requests::{PrefillReport, RequestCounts, RequestLedger};
pub use views::{
    Candidate, CopyKey, CopyState, CopyWanted, Holdings, HotPrefix, InstanceRow, PlacementExplanation, PoolRow,
    PrefixHolding, Table,
};

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests placed at once.
    pub placed: u64,
    /// Requests that had to wait.
    pub queued: u64,
    /// Requests placed after they had waited.
    pub placed_later: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests that were asked again.
    pub repeated: u64,
    /// Leases that ran out.
    pub expired: u64,
    /// Requests whose instance was lost.
    pub orphaned: u64,
    /// Batches of events taken.
    pub batches: u64,
    /// Batches that had been taken before.
    pub duplicates: u64,
    /// Gaps in events.
    pub gaps: u64,
    /// Reports that came late or twice.
    pub stale_reports: u64,
    /// Instances that claimed to have what they had not.
    pub disbelieved: u64,
}

/// The Conductor.
pub struct Conductor {
    config: ConductorConfig,
    pools: Pools,
    instances: InstanceRegistry,
    requests: RequestLedger,
    copies: Copies<CopyKey>,
    /// Whether the placement changed and is to be remembered.
    placement_changed: bool,
}

impl Conductor {
    /// A Conductor nobody has come to. Numbers of reservations begin at `first`: drawn by chance, one of an earlier
    /// incarnation of the process is unknown.
    #[must_use]
    pub fn new(config: ConductorConfig, first: u64) -> Self {
        Self {
            pools: Pools::default(),
            instances: InstanceRegistry::new(config.max_instances, config.missed),
            requests: RequestLedger::new(&config, first >> 2),
            copies: Copies::new(config.copies),
            placement_changed: false,
            config,
        }
    }

    /// The instances.
    #[must_use]
    pub const fn instances(&self) -> &InstanceRegistry {
        &self.instances
    }

    /// What was counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let RequestCounts { placed, queued, placed_later, refused, repeated, expired, orphaned } =
            self.requests.counts();
        let ReportCounts { batches, duplicates, gaps, stale_reports, disbelieved } = self.instances.counts();
        Counts {
            placed,
            queued,
            placed_later,
            refused,
            repeated,
            expired,
            orphaned,
            batches,
            duplicates,
            gaps,
            stale_reports,
            disbelieved,
        }
    }

    /// What is to be told, oldest first.
    pub fn take_told(&mut self) -> Option<ClientNotice> {
        self.requests.take_notice()
    }

    /// How it decides now, whether it refuses, and what is promised.
    #[must_use]
    pub const fn placement(&self) -> (PolicyName, bool, Slo) {
        (self.config.policy, self.config.refuses, self.config.scheduler.slo)
    }

    /// Decides otherwise from now on, for every model. What is booked stays so; those who wait are looked at again.
    pub fn set_placement(&mut self, policy: PolicyName, refuses: bool, slo: Slo, now_ns: u64) {
        (self.config.policy, self.config.refuses, self.config.scheduler.slo) = (policy, refuses, slo);
        self.placement_changed = true;
        self.pools.iter_mut().for_each(|(_, pool)| pool.scheduler.set_policy(policy.make(refuses), slo));
        self.poll(now_ns);
    }

    /// Decides where a request runs, and books it. A request that comes again with the same id gets the same answer.
    ///
    /// # Errors
    /// When it makes no sense, nobody serves the model, or the id is another request's.
    pub fn schedule(&mut self, asked: &ScheduleRequest, now_ns: u64) -> Result<Answer, ConductorError> {
        asked.check()?;
        let pool = self.pools.of_context(&asked.context)?;
        let excluded = self.instances.excluded(pool, &asked.barred);
        self.requests.schedule(asked, pool, excluded, now_ns, &mut self.pools)
    }

    /// How a request fares.
    ///
    /// # Errors
    /// When there is no such reservation, or its instance was lost.
    pub fn update(&mut self, reservation: u64, step: Step, now_ns: u64) -> Result<(), ConductorError> {
        if step == Step::Ended {
            let pool = self.requests.release(reservation, &mut self.pools)?;
            self.requests.poll(pool, now_ns, &mut self.pools);
            return Ok(());
        }
        if let Some(report) = self.requests.progress(reservation, step, now_ns, &mut self.pools)? {
            self.compare(&report)?;
        }
        if let Some(pool) = self.requests.renew(reservation, now_ns) {
            self.requests.poll(pool, now_ns, &mut self.pools);
        }
        Ok(())
    }

    /// What was cached beside what had been said: an instance that never has what it says is not believed.
    fn compare(&mut self, report: &PrefillReport) -> Result<(), ConductorError> {
        let PrefillReport { pool: number, assigned, reused_tokens } = report;
        let Some(pool) = self.pools.get_mut(*number) else { return Ok(()) };
        pool.note_reuse(assigned.reuse_tokens, *reused_tokens);
        let disbelieved = self.instances.note_reuse(assigned, pool.key.block_tokens, *reused_tokens);
        match disbelieved.and_then(|numbers| numbers.prefill) {
            Some(at) => self.pools.clear(*number, at),
            None => Ok(()),
        }
    }

    /// A request goes elsewhere, for those named have failed. It keeps its place among those who wait.
    ///
    /// # Errors
    /// When there is no such reservation.
    pub fn reschedule(&mut self, reservation: u64, failed: &[String], now_ns: u64) -> Result<Answer, ConductorError> {
        if failed.len() > MOST_BARRED {
            return Err(bad(format!("{} instances have failed; at most {MOST_BARRED}", failed.len())));
        }
        let pool = self.requests.pool_of(reservation)?;
        let failed = self.instances.excluded(pool, failed);
        self.requests.reschedule(reservation, &failed, now_ns, &mut self.pools)
    }

    /// What was assigned to a client's requests after they had waited, and may not have reached it.
    #[must_use]
    pub fn unclaimed(&self, client: u64) -> Vec<ClientNotice> {
        self.requests.unclaimed(client)
    }

    /// Lets those who wait go whose time has come.
    fn poll(&mut self, now_ns: u64) {
        let numbers: Vec<u32> = self.pools.iter().map(|(number, _)| number).collect();
        numbers.into_iter().for_each(|number| self.requests.poll(number, now_ns, &mut self.pools));
    }

    /// When [`Self::tick`] is to be called for the sake of requests, as far as can be said without looking at
    /// instances.
    #[must_use]
    pub fn soon_ns(&self, now_ns: u64) -> Option<u64> {
        self.requests.soon_ns(now_ns, &self.pools)
    }

    /// Time has passed: ends what is over, doubts who is silent, lets those go whose time has come. When to be called
    /// again, if anything waits for that.
    pub fn tick(&mut self, now_ns: u64) -> Option<u64> {
        self.requests.expire(now_ns, &mut self.pools);
        let instances_ns = self.look_at_instances(now_ns);
        self.poll(now_ns);
        [instances_ns, self.soon_ns(now_ns)].into_iter().flatten().min()
    }
}
