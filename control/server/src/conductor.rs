//! Conductor of the control plane: its calls, its host, and the event feeds that are followed for it.
//!
//! Calls come from QUIC and HTTP and are answered at once. No queue is needed here, since each connection has a limit
//! of calls and the Conductor limits everything else. A client whose request is queued gets its placement over its
//! stream of assignments. A stream that is not read is closed; placements that it missed are sent when the client
//! subscribes again, or in reply to a retry with the request's id.
//!
//! | component | owns |
//! |---|---|
//! | [`ConductorService`] | nothing: answers calls with the components below |
//! | [`Feeds`] | the tasks that follow events of engines and masters, and their counters |
//! | [`ConductorHost`] | the Conductor, hash seeds, streams of assignments and tables; time and durable changes |
//! | [`StoreBlocks`](store_blocks::StoreBlocks) | blocks of this cluster's store, by its events |
//! | [`SnapshotFiles`] | files with snapshots of the index, and their counters |
//!
//! Feeds, host and blocks have one lock each. That of the feeds is taken before the host's, the host's before the
//! cluster's, and that of the blocks alone.

pub(crate) mod copies;
mod durable;
mod feeds;
mod host;
mod master;
mod metrics;
mod placement;
mod seeds;
mod snapshots;
pub(crate) mod status;
pub(crate) mod store_blocks;
mod streams;
mod subscriber;

use std::sync::Arc;

use kvplane_conductor::conductor::{Conductor, FeedProgress, InstanceRow, InstanceSpec, PoolKey, QueryPrompt, Table};
use kvplane_conductor::index::Tiers;
use kvplane_rpc::conductor::{
    BlockTier, CacheTaken, DeregisterInstance, ExplainRequest, InstanceRegistered, InstanceStatus, InstanceTable,
    PlacementExplained, PrefixHolder, PrefixHolders, PromptContext, QueryPrefix, RegisterInstance, ReportCache,
    ReportLoad, RequestExplained, Reschedule, Schedule, ScheduleOnTerms, ScheduleReply, ScheduleWithGroups,
    UpdateRequest, WatchAssignments,
};
use kvplane_rpc::message::EmptyReply;
use kvplane_rpc::placement::{
    CopiesShown, FeedShown, FeedsShown, HoldInstance, InstanceHeld, LimitUse, Placement, ServiceShown, SetClass,
    SetPlacement, SetWeight,
};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::cluster::ClusterHost;

pub use durable::ConductorRestoreError;
pub(crate) use durable::{DecodedRecords, RestoredConductor};
use feeds::{Feeds, check_source};
pub(crate) use host::ConductorHost;
pub(crate) use master::MasterSpec;
pub use snapshots::SnapshotConfig;
pub(crate) use snapshots::SnapshotFiles;

/// The calls of the Conductor.
pub(crate) struct ConductorService {
    pub(crate) host: Arc<ConductorHost>,
    pub(crate) feeds: Feeds,
    /// Snapshots of the index, if they are kept.
    snapshots: Option<SnapshotFiles>,
}

impl ConductorService {
    /// Serves a restored Conductor; its changes become part of the cluster's durable state.
    pub(crate) fn new(
        restored: RestoredConductor,
        cluster: Arc<ClusterHost>,
        snapshots: Option<SnapshotFiles>,
    ) -> Self {
        let RestoredConductor { conductor, masters, seeds } = restored;
        let host = Arc::new(ConductorHost::new(conductor, seeds, cluster));
        let feeds = Feeds::new(Arc::clone(&host), masters);
        Self { host, feeds, snapshots }
    }

    /// Follows the feeds that were registered before this process started, and drives the Conductor's time, for as long
    /// as it is polled; then ends all feeds.
    pub(crate) async fn run(self: Arc<Self>) {
        let _ending = EndingFeeds(&self.feeds);
        self.feeds.follow_restored();
        self.host.run().await;
    }

    fn check_tenant(&self, instance: &str, tenant: &str) -> Result<(), Refusal> {
        self.host.look(|conductor, _| match conductor.instances().tenant_of(instance) {
            Some(known) if known != tenant => {
                let reason = format!("instance {instance:?} belongs to another tenant than {tenant:?}");
                Err(Refusal::new(RefusalCode::NotPermitted, reason))
            }
            _ => Ok(()),
        })
    }

    pub(crate) fn register(&self, spec: impl Into<InstanceSpec>) -> Result<InstanceRegistered, Refusal> {
        self.register_seeded(spec.into(), None)
    }

    /// Registers an instance. With `has_vllm_hashes` its hashes can be computed from tokens; `seed` becomes the hash
    /// seed of its model.
    pub(crate) fn register_as(
        &self,
        call: RegisterInstance,
        has_vllm_hashes: bool,
        seed: Option<String>,
    ) -> Result<InstanceRegistered, Refusal> {
        self.register_seeded(InstanceSpec { has_vllm_hashes, ..call.into() }, seed)
    }

    fn register_seeded(&self, spec: InstanceSpec, seed: Option<String>) -> Result<InstanceRegistered, Refusal> {
        let call = &spec.call;
        self.check_tenant(&call.instance, &call.tenant)?;
        if let Some(source) = &call.events {
            check_source(source)?;
        }
        let origin = durable::followed(call);
        let registered = self.host.register(spec, seed)?;
        if let Some(origin) = origin {
            self.feeds.follow_instance(origin, !registered.again);
        }
        Ok(registered.answer)
    }

    pub(crate) fn deregister(&self, call: &DeregisterInstance) -> Result<EmptyReply, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        let gone =
            self.host.change(|conductor, now_ns| conductor.deregister(&call.instance, call.incarnation, now_ns))?;
        if gone {
            self.feeds.forget_instance(&call.instance);
        }
        Ok(EmptyReply)
    }

    pub(crate) fn load(&self, call: &ReportLoad) -> Result<EmptyReply, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        self.host
            .with(|conductor, now_ns| conductor.report(&call.instance, call.incarnation, call.load, now_ns))
            .map(|()| EmptyReply)
    }

    pub(crate) fn cache(&self, call: ReportCache) -> Result<CacheTaken, Refusal> {
        self.check_tenant(&call.instance, &call.tenant)?;
        let ReportCache { instance, incarnation, batch, .. } = call;
        let reports_already = self.host.look(|conductor, _| conductor.instances().reports_cache(&instance));
        let take = |conductor: &mut Conductor, now_ns| conductor.cache(&instance, incarnation, batch, now_ns);
        // The first batch changes the stored record of an instance.
        if reports_already { self.host.with(take) } else { self.host.change(take) }
    }

    pub(crate) fn query(&self, call: &QueryPrefix) -> Result<PrefixHolders, Refusal> {
        let QueryPrefix { context, hashes, most, tier } = call;
        let tiers = Tiers::up_to((*tier).into());
        self.host.with(|conductor, _| conductor.query(context, QueryPrompt::Hashes(hashes), *most as usize, tiers))
    }

    /// Returns the holders of a prompt's prefixes, in any tier, where the blocks of the shared store count as memory of
    /// every instance that prefills.
    pub(crate) fn query_with_store(
        &self,
        context: &PromptContext,
        prompt: QueryPrompt<'_>,
        most: usize,
    ) -> Result<Vec<PrefixHolder>, Refusal> {
        let tiers = Tiers::up_to(BlockTier::Ssd.into());
        self.host.with(|conductor, _| Ok(conductor.query_with_store(context, prompt, most, tiers)?.holders))
    }

    /// Returns true while the index may lack blocks of a model's instances, or of stores: answers are lower bounds
    /// then.
    pub(crate) fn is_incomplete(&self, pool: &PoolKey) -> bool {
        self.host.look(|conductor, _| conductor.incomplete(pool)) || self.feeds.is_degraded()
    }

    pub(crate) fn schedule(&self, call: &Schedule) -> Result<ScheduleReply, Refusal> {
        self.host.with(|conductor, now_ns| conductor.schedule(call, now_ns))
    }

    pub(crate) fn schedule_on_terms(&self, call: &ScheduleOnTerms) -> Result<ScheduleReply, Refusal> {
        self.end_and_schedule(call, false)
    }

    pub(crate) fn schedule_with_groups(&self, call: &ScheduleWithGroups) -> Result<ScheduleReply, Refusal> {
        self.end_and_schedule(&call.on_terms, true)
    }

    fn end_and_schedule(&self, call: &ScheduleOnTerms, groups: bool) -> Result<ScheduleReply, Refusal> {
        self.host.with(|conductor, now_ns| {
            // Reservations have ended even if the request is refused.
            conductor.end_all(&call.ended, &call.finished, now_ns)?;
            conductor.schedule_on_terms(&call.schedule, &call.terms, groups, now_ns)
        })
    }

    pub(crate) fn update(&self, call: UpdateRequest) -> Result<EmptyReply, Refusal> {
        self.host.with(|conductor, now_ns| conductor.update(call.reservation, call.step, now_ns)).map(|()| EmptyReply)
    }

    pub(crate) fn reschedule(&self, call: &Reschedule) -> Result<ScheduleReply, Refusal> {
        self.host.with(|conductor, now_ns| conductor.reschedule(call.reservation, &call.failed, now_ns))
    }

    pub(crate) fn explain(&self, call: &ExplainRequest) -> Result<RequestExplained, Refusal> {
        self.host.with(|conductor, now_ns| conductor.explain(&call.request, now_ns))
    }

    pub(crate) fn explain_placement(&self, request: &str) -> Result<PlacementExplained, Refusal> {
        self.host.with(|conductor, now_ns| PlacementExplained::of(conductor, request, now_ns))
    }

    pub(crate) fn watch_instances(&self) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.host.watch_instances()
    }

    pub(crate) fn watch_assignments(&self, call: &WatchAssignments) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.host.watch_assignments(call.client)
    }

    pub(crate) fn hold(&self, call: &HoldInstance) -> Result<InstanceHeld, Refusal> {
        let requests = self.host.change(|conductor, now_ns| conductor.hold(&call.instance, call.held, now_ns))?;
        tracing::info!(
            instance = call.instance,
            held = call.held,
            requests,
            "an operator held or released an instance"
        );
        Ok(InstanceHeld { requests })
    }

    pub(crate) fn set_placement(&self, call: &SetPlacement) -> Result<EmptyReply, Refusal> {
        let slo = placement::slo_in(call)?;
        self.host.change(|conductor, now_ns| {
            placement::set(conductor, call.policy, slo, now_ns);
            Ok(())
        })?;
        tracing::info!(policy = ?call.policy, call.ttft_ns, call.tbt_ns, "an operator changed the placement policy");
        Ok(EmptyReply)
    }

    pub(crate) fn set_class(&self, call: &SetClass) -> Result<EmptyReply, Refusal> {
        self.host.change(|conductor, _| conductor.service().set_class(&call.class, call.terms))?;
        tracing::info!(call.class, terms = ?call.terms, "an operator changed a class of requests");
        Ok(EmptyReply)
    }

    pub(crate) fn set_weight(&self, call: &SetWeight) -> Result<EmptyReply, Refusal> {
        self.host.change(|conductor, _| conductor.service().set_weight(&call.tenant, &call.flow, call.weight))?;
        tracing::info!(call.tenant, call.flow, weight = ?call.weight, "an operator changed the weight of a flow");
        Ok(EmptyReply)
    }

    pub(crate) fn service(&self) -> ServiceShown {
        self.host.look(|conductor, _| placement::service(conductor))
    }

    pub(crate) fn placement(&self) -> Placement {
        self.host.look(placement::shown)
    }

    /// Returns figures of the replicas of hot prefixes; `possible` tells whether the cluster keeps replicas.
    pub(crate) fn copies_shown(&self, possible: bool) -> CopiesShown {
        copies::shown(&self.host.look(|conductor, _| conductor.copies()), possible)
    }

    /// Returns the Conductor's limits, each with its use.
    pub(crate) fn limits(&self) -> LimitUse {
        self.host.look(|conductor, _| LimitUse::of(conductor))
    }

    /// Returns the table of instances and models.
    pub(crate) fn table(&self) -> InstanceTable {
        self.host.look(|conductor, now_ns| InstanceTable::from(conductor.table(now_ns)))
    }

    /// Returns the table of instances and models for operators.
    pub(crate) fn rows(&self) -> Table {
        self.host.look(|conductor, now_ns| conductor.table(now_ns))
    }

    /// Returns the progress of the cache feeds of all instances that report their caches.
    pub(crate) fn feeds_shown(&self) -> FeedsShown {
        let shown = |row: InstanceRow| {
            let FeedProgress { next, newest, unconfirmed } = row.progress?;
            let InstanceStatus { instance, degraded, .. } = row.status;
            Some(FeedShown { instance, next, newest, unconfirmed, degraded })
        };
        FeedsShown { feeds: self.rows().instances.into_iter().filter_map(shown).collect() }
    }

    /// Returns the Conductor's part of the status page.
    pub(crate) fn status(&self) -> Value {
        self.host.look(status::as_json)
    }

    /// Records all counters and gauges, in the recorder of this thread.
    pub(crate) fn record_metrics(&self) {
        let snapshots = self.snapshots.as_ref().map(SnapshotFiles::counts);
        self.host.look(|conductor, now_ns| metrics::record(conductor, now_ns, self.feeds.counts(), snapshots));
    }
}

/// Ends all feeds when the Conductor's part of a control plane stops.
struct EndingFeeds<'a>(&'a Feeds);

impl Drop for EndingFeeds<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
