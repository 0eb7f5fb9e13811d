//! Conductor: serves schedulers and instances, by name and by request id.
//!
//! The scheduler of a pool identifies instances by numbers. This layer gives instances names and incarnations, and
//! excludes those that miss reports; it gives requests ids, so that a retried request is booked once; it ends each
//! booking with a lease; and it keeps one scheduler per model, in a *pool*, because only instances of one model can
//! replace each other.
//!
//! Each part keeps its own state; the Conductor combines them:
//!
//! * `pools`: scheduler, index, and counts of hot prefixes, per pool;
//! * `instances`: names, incarnations, missed reports, and the state of each cache feed (`cache_feed`);
//! * `requests`: ids, leases, and notices for waiting clients;
//! * `service`: classes of requests, and weights of flows.
//!
//! It has a single owner, which calls it with the time: nanoseconds of a monotonic clock. No clock of another process
//! matters; messages contain durations only. Notices for waiting clients are polled with [`Conductor::take_told`].
//! [`ConductorConfig`] bounds all state.

mod cache_feed;
mod calls;
mod config;
mod durable;
mod error;
mod instance_calls;
mod instance_spec;
mod instances;
mod limits;
mod pools;
mod prefixes;
mod requests;
mod views;

use crate::copies::Copies;
use crate::policy::{PlacementPolicy, Slo};
pub use crate::scheduler::{InstanceCapabilities, PipelineMembership};
use crate::scheduler::{RequestOutput, ServiceTerms};

pub use cache_feed::followed::FollowedFeed;
pub use cache_feed::snapshot::PoolSnapshot;
pub use cache_feed::{
    AWAY_FORGOTTEN_NS, AWAY_SUSPECT_NS, BlockChange, CacheBatch, CacheReport, CacheTaken, CacheWanted, FeedPosition,
    FeedProgress, StoredTokens,
};
use calls::MOST_BARRED;
pub use calls::{
    AssignedGroup, AssignedStage, Assignment, ClientNotice, FetchSource, GroupAssignment, MOST_ENDED, PlacementNotice,
    RequestStep, Schedule, ScheduleMode, ScheduleOnTerms, ScheduleRefusal, ScheduleReply, ScheduleWithGroups,
};
pub use config::{ConductorConfig, MAX_ID_BYTES, MAX_PROMPT_BLOCKS};
pub use durable::{Durable, DurableInstance};
pub use error::ConductorError;
use error::bad;
pub use instance_spec::{
    EventSource, InstanceLoad, InstancePart, InstanceRegistered, InstanceSpec, RegisterCapabilities, RegisterInstance,
    Registration,
};
pub use instances::{InstanceRegistry, TRUSTED_AFTER};
pub use limits::{Limit, LimitError, LimitUse};
pub use pools::{PoolKey, Pools};
pub use prefixes::{HoldersWithStore, PrefixHolder, PrefixHolders, QueryPrompt};
pub use requests::service::{ClassTerms, MAX_PRIORITY, MAX_SERVICE_NAME_BYTES, RequestTerms, ServiceLevels};
use requests::{PrefillReport, RequestLedger, RequestService};
pub use views::{
    CandidateStatus, CopyKey, CopyState, CopyWanted, DecodeStatus, HotPrefix, InstanceRow, InstanceStatus,
    InstanceTable, ModelStatus, PlacementExplained, PoolRow, RequestExplained, Table,
};

/// Counters of the Conductor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests placed at once.
    pub placed: u64,
    /// Requests that had to wait.
    pub queued: u64,
    /// Requests placed after they had waited.
    pub placed_later: u64,
    /// Rejected requests.
    pub refused: u64,
    /// Rejected requests of these for which the queue of their model was full.
    pub queue_full: u64,
    /// Rejected requests of these beyond the limit of requests, or of blocks in their prompts.
    pub requests_full: u64,
    /// Requests that were repeated with the same id.
    pub repeated: u64,
    /// Leases that expired.
    pub expired: u64,
    /// Requests that lost their instance.
    pub orphaned: u64,
    /// Accepted batches of events.
    pub batches: u64,
    /// Batches that had been accepted before.
    pub duplicates: u64,
    /// Gaps in the numbers of batches.
    pub gaps: u64,
    /// Load reports that arrived late or twice.
    pub stale_reports: u64,
    /// Stored blocks that are found by the hashes of their engines only, and not by tokens.
    pub by_hash_only: u64,
    /// Times that an instance's cache was cleared from the index, because the instance repeatedly lacked reported
    /// blocks.
    pub implausible: u64,
    /// Times that the blocks of a snapshot were confirmed by an instance's publisher, and counted from then on.
    pub confirmed: u64,
    /// Times that they were dropped, because the publisher did not confirm them.
    pub dropped: u64,
}

/// Scheduling front end of all models: pools, instances, requests and replicas.
pub struct Conductor {
    config: ConductorConfig,
    pools: Pools,
    instances: InstanceRegistry,
    requests: RequestLedger,
    service: ServiceLevels,
    copies: Copies<CopyKey>,
    /// True if the placement policy changed since it was last made durable.
    placement_changed: bool,
}

impl Conductor {
    /// Creates a Conductor without instances. Numbers of reservations begin at `first`: drawn at random, so that
    /// reservations of an earlier incarnation of the process are unknown.
    #[must_use]
    pub fn new(config: ConductorConfig, first: u64) -> Self {
        Self {
            pools: Pools::default(),
            instances: InstanceRegistry::new(config.max_instances, config.missed),
            requests: RequestLedger::new(&config, first >> 2),
            service: ServiceLevels::default(),
            copies: Copies::new(config.copies),
            placement_changed: false,
            config,
        }
    }

    /// Returns the pools, for the shared store's changes.
    pub const fn pools(&mut self) -> &mut Pools {
        &mut self.pools
    }

    /// Returns the classes of requests, and the weights of flows.
    pub const fn service(&mut self) -> &mut ServiceLevels {
        &mut self.service
    }

    /// Returns the instances.
    #[must_use]
    pub const fn instances(&self) -> &InstanceRegistry {
        &self.instances
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let (requests, reports) = (self.requests.counts(), self.instances.counts());
        Counts {
            placed: requests.placed,
            queued: requests.queued,
            placed_later: requests.placed_later,
            refused: requests.refused,
            queue_full: requests.queue_full,
            requests_full: requests.requests_full,
            repeated: requests.repeated,
            expired: requests.expired,
            orphaned: requests.orphaned,
            batches: reports.batches,
            duplicates: reports.duplicates,
            gaps: reports.gaps,
            stale_reports: reports.stale_reports,
            by_hash_only: reports.by_hash_only,
            implausible: reports.implausible,
            confirmed: reports.confirmed,
            dropped: reports.dropped,
        }
    }

    /// Takes the oldest notice for a waiting client.
    pub fn take_told(&mut self) -> Option<ClientNotice> {
        self.requests.take_notice()
    }

    /// Returns the placement policy, true if it rejects requests, and the objectives.
    #[must_use]
    pub const fn placement(&self) -> (PlacementPolicy, bool, Slo) {
        (self.config.policy, self.config.refuses, self.config.scheduler.slo)
    }

    /// Changes the placement policy and objectives, for every model. Bookings stay; waiting requests are examined
    /// again.
    pub fn set_placement(&mut self, policy: PlacementPolicy, refuses: bool, slo: Slo, now_ns: u64) {
        (self.config.policy, self.config.refuses, self.config.scheduler.slo) = (policy, refuses, slo);
        self.placement_changed = true;
        self.pools.iter_mut().for_each(|(_, pool)| pool.scheduler.set_policy(policy.make(refuses), slo));
        self.poll(now_ns);
    }

    /// Chooses the instances of a request, and books it. Idempotent: a repeated request with the same id gets the same
    /// answer.
    ///
    /// # Errors
    /// When it is malformed, no instance serves the model, or the id belongs to another request.
    pub fn schedule(&mut self, asked: &Schedule, now_ns: u64) -> Result<ScheduleReply, ConductorError> {
        self.schedule_on_terms(asked, &RequestTerms::default(), false, now_ns)
    }

    /// Ends reservations: those in `ended`, and those in `finished` after they had generated their output. Those that
    /// are gone already are ignored.
    ///
    /// # Errors
    /// When there are more than [`MOST_ENDED`].
    pub fn end_all(
        &mut self,
        ended: &[u64],
        finished: &[(u64, RequestOutput)],
        now_ns: u64,
    ) -> Result<(), ConductorError> {
        let count = ended.len() + finished.len();
        if count > MOST_ENDED {
            return Err(bad(format!("{count} reservations end with one call; at most {MOST_ENDED}")));
        }
        let ended = ended.iter().map(|reservation| (*reservation, None));
        let finished = finished.iter().map(|(reservation, output)| (*reservation, Some(*output)));
        for (reservation, output) in ended.chain(finished) {
            match self.requests.release(reservation, output, now_ns, &mut self.pools) {
                Ok(()) | Err(ConductorError::UnknownReservation { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Chooses the instances of a request with terms; with `groups`, a pipeline group if that is better, for a
    /// scheduler that can drive one.
    ///
    /// # Errors
    /// Those of [`Self::schedule`], and when the terms are out of range or their class is unknown.
    pub fn schedule_on_terms(
        &mut self,
        asked: &Schedule,
        terms: &RequestTerms,
        groups: bool,
        now_ns: u64,
    ) -> Result<ScheduleReply, ConductorError> {
        asked.check()?;
        if terms.ttft_ns.is_some() && !self.config.policy.heeds_promises() {
            let policy = self.config.policy.label();
            return Err(bad(format!("policy {policy} keeps no objective; only kvplane keeps one of a request")));
        }
        let terms = ServiceTerms { groups, ..self.service.resolve(&asked.context.tenant, terms)? };
        let pool = self.pools.of_context(&asked.context)?;
        let excluded = self.instances.excluded(pool, &asked.barred);
        self.requests.schedule(asked, pool, RequestService { excluded, terms }, now_ns, &mut self.pools)
    }

    /// Notes the progress of a request.
    ///
    /// # Errors
    /// When there is no such reservation, or its instance was lost.
    pub fn update(&mut self, reservation: u64, step: RequestStep, now_ns: u64) -> Result<(), ConductorError> {
        match step {
            RequestStep::Ended => return self.requests.release(reservation, None, now_ns, &mut self.pools),
            RequestStep::Finished(output) => {
                return self.requests.release(reservation, Some(output), now_ns, &mut self.pools);
            }
            RequestStep::PrefillStarted
            | RequestStep::PrefillDone { .. }
            | RequestStep::Decoding
            | RequestStep::Alive => {}
        }
        if let Some(report) = self.requests.progress(reservation, step, now_ns, &mut self.pools)? {
            compare(&report, &mut self.pools, &mut self.instances)?;
        }
        if let Some(pool) = self.requests.renew(reservation, now_ns) {
            self.requests.poll(pool, now_ns, &mut self.pools);
        }
        Ok(())
    }

    /// Places a request on other instances, because those in `failed` have failed. It keeps its place in the queue.
    ///
    /// # Errors
    /// When there is no such reservation.
    pub fn reschedule(
        &mut self,
        reservation: u64,
        failed: &[String],
        now_ns: u64,
    ) -> Result<ScheduleReply, ConductorError> {
        if failed.len() > MOST_BARRED {
            return Err(bad(format!("{} instances have failed; at most {MOST_BARRED}", failed.len())));
        }
        let pool = self.requests.pool_of(reservation)?;
        let failed = self.instances.excluded(pool, failed);
        self.requests.reschedule(reservation, &failed, now_ns, &mut self.pools)
    }

    /// Returns the assignments of a client's requests that had waited, and that may not have reached the client.
    #[must_use]
    pub fn unclaimed(&self, client: u64) -> Vec<ClientNotice> {
        self.requests.unclaimed(client)
    }

    /// Places the waiting requests that can start now.
    fn poll(&mut self, now_ns: u64) {
        let numbers: Vec<u32> = self.pools.iter().map(|(number, _)| number).collect();
        numbers.into_iter().for_each(|number| self.requests.poll(number, now_ns, &mut self.pools));
    }

    /// Returns the time of the next [`Self::tick`] for requests, without examining instances.
    #[must_use]
    pub fn soon_ns(&self, now_ns: u64) -> Option<u64> {
        self.requests.soon_ns(now_ns, &self.pools)
    }

    /// Advances time: expires leases, excludes silent instances, and places waiting requests. Returns the time of the
    /// next call, if one is needed.
    pub fn tick(&mut self, now_ns: u64) -> Option<u64> {
        self.requests.expire(now_ns, &mut self.pools);
        let instances_ns = self.look_at_instances(now_ns);
        self.poll(now_ns);
        [instances_ns, self.soon_ns(now_ns)].into_iter().flatten().min()
    }
}

/// Compares the reused tokens with the prediction: an instance that repeatedly lacks reported blocks is cleared
/// from the index.
fn compare(report: &PrefillReport, pools: &mut Pools, instances: &mut InstanceRegistry) -> Result<(), ConductorError> {
    let PrefillReport { pool: number, assigned, reused_tokens } = report;
    let Some(pool) = pools.get_mut(*number) else { return Ok(()) };
    pool.note_reuse(assigned.reuse_tokens, *reused_tokens);
    let implausible = instances.note_reuse(assigned, pool.key.block_tokens, *reused_tokens);
    match implausible.and_then(|numbers| numbers.prefill) {
        Some(at) => pools.clear(*number, at),
        None => Ok(()),
    }
}
