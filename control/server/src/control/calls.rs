//! The calls of the control protocol, each as one input to the cluster or one query of it.

use kvplane_cluster::{ClientId, Input, Offer, Reply, SegmentOwner};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_rpc::conductor::{
    CacheTaken, DeregisterInstance, ExplainPlacement, ExplainRequest, InstanceRegistered, PlacementExplained,
    PrefixHolders, QueryPrefix, RegisterCapabilities, RegisterInstance, ReportCache, ReportLoad, RequestExplained,
    Reschedule, Schedule, ScheduleOnTerms, ScheduleReply, ScheduleWithGroups, UpdateRequest, WatchAssignments,
};
use kvplane_rpc::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, MemberAttached, ProposeChange, RegisterProcess,
    ReportProcess, UnregisterProcess, WatchWorld, WorldDescription, WorldList, WorldReply,
};
use kvplane_rpc::limits::PAGE_SEGMENTS;
use kvplane_rpc::message::{
    Alive, AnswerCopies, AnswerOrder, AttachDevices, CancelTask, CreateTask, DevicesKept, Drain, EmptyReply,
    GetIncarnation, GetLastMember, GetMoves, GetSegment, GetTicket, GetTicketKeys, Heartbeat, Hello, HotList, Join,
    JoinReply, LastIncarnation, LastMember, Leave, ListHot, ListSegments, ListShards, ListTasks, ListTiers, Moves,
    OfferMap, OrderTiers, RegisterSegment, RemoveTenant, RenewReply, RenewSegments, ReportEvents, ReportHot,
    ReportShard, ReportSilence, ReportTiers, Room, SHARDS_PER_REPORT, SegmentList, SegmentReply, SetTenant,
    SettleReport, ShardList, StatusReply, SyncTenantSsds, SyncTenants, TaskCreated, TaskList, TenantLeases, TenantList,
    TenantSsdLeases, TenantSsdList, TicketKeys, TicketReply, TierList, TierOrders, TiersOrdered, Undrain,
    UnregisterSegment, WatchOrders, Welcome,
};
use kvplane_rpc::p2p::{
    DescribeObject, FindObject, GetPeerKeys, HoldObject, JoinRanks, ListObjects, LocateObject, ObjectFound, ObjectHeld,
    ObjectList, ObjectMembers, ObjectPlaces, ObjectPublished, ObjectReleased, ObjectsRenewed, PublishObject,
    RanksJoined, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use kvplane_rpc::placement::{
    CopiesShown, FeedsShown, HoldInstance, InstanceHeld, LimitUse, Placement, ServiceShown, SetClass, SetPlacement,
    SetWeight,
};
use kvplane_rpc::{Caller, Event, ItemFrame, MapFrame, Refusal, RefusalCode, Role, Service};
use tokio::sync::{mpsc, watch};

use super::{Control, SOFTWARE, unexpected};
use crate::cluster::view::View;
use crate::nodes::shards::Shards;
use crate::tickets::{NO_KEYS, NO_TICKET};

/// Checks that the caller may act for the owner: a client acts for itself, a node for itself and for clients in its
/// process.
fn check_owner(caller: Caller, owner: SegmentOwner) -> Result<(), Refusal> {
    match (caller.role, owner) {
        (Role::Client, SegmentOwner::Node { node, .. }) => {
            let reason = format!("a certificate of role client may not offer memory of node {node}");
            Err(Refusal::new(RefusalCode::NotPermitted, reason))
        }
        _ => Ok(()),
    }
}

impl Service for Control {
    fn hello(&self, _: Caller, _: Hello) -> Result<Welcome, Refusal> {
        let hosted = self.cluster.lock()?;
        let config = hosted.cluster().config();
        Ok(Welcome {
            software: SOFTWARE.to_owned(),
            state_id: hosted.state_id(),
            epoch: hosted.epoch(),
            heartbeat_interval_ns: config.heartbeat_interval_ns,
            heartbeat_deadline_ns: config.heartbeat_deadline_ns,
        })
    }

    fn join(&self, caller: Caller, call: Join) -> Result<JoinReply, Refusal> {
        let Join { member, capacity_bytes, version } = call;
        let (node, incarnation, shards) = (member.node.0, member.incarnation.0, member.shards.len());
        match self.cluster.handle(Input::Join { member, capacity_bytes, version })? {
            Reply::Joined { epoch, heartbeat_interval_ns, heartbeat_deadline_ns } => {
                tracing::info!(node, incarnation, shards, from = %caller.address, "a node joins");
                Ok(JoinReply { epoch: epoch.0, heartbeat_interval_ns, heartbeat_deadline_ns })
            }
            reply => Err(unexpected(&reply)),
        }
    }

    fn offer_map(&self, caller: Caller, call: OfferMap) -> Result<EmptyReply, Refusal> {
        let OfferMap { join: Join { member, capacity_bytes, version }, state, map, devices, since } = call;
        let (node, epoch, members) = (member.node.0, map.epoch.0, map.members.len());
        let devices = (devices != 0).then_some((devices, Epoch(since)));
        let offer = Box::new(Offer { state, map, member, capacity_bytes, version, devices });
        match self.cluster.handle(Input::Offer { offer })? {
            Reply::Offered => {
                tracing::warn!(node, epoch, members, from = %caller.address, "a member offers the map that it follows");
                Ok(EmptyReply)
            }
            reply => Err(unexpected(&reply)),
        }
    }

    fn get_incarnation(&self, _: Caller, call: GetIncarnation) -> Result<LastIncarnation, Refusal> {
        Ok(LastIncarnation { incarnation: self.cluster.lock()?.cluster().last_incarnations(NodeId(call.node)).any.0 })
    }

    fn get_last_member(&self, _: Caller, call: GetLastMember) -> Result<LastMember, Refusal> {
        Ok(LastMember { incarnation: self.cluster.lock()?.cluster().last_incarnations(NodeId(call.node)).member.0 })
    }

    fn attach_devices(&self, _: Caller, call: AttachDevices) -> Result<DevicesKept, Refusal> {
        let AttachDevices { node, incarnation, devices } = call;
        let (node, incarnation) = (NodeId(node), Incarnation(incarnation));
        match self.cluster.handle(Input::AttachDevices { node, incarnation, devices })? {
            Reply::DevicesKept { since } => Ok(DevicesKept { since: since.0 }),
            reply => Err(unexpected(&reply)),
        }
    }

    fn heartbeat(&self, _: Caller, call: Heartbeat) -> Result<Alive, Refusal> {
        let (node, incarnation) = (NodeId(call.node), Incarnation(call.incarnation));
        match self.cluster.handle(Input::Heartbeat { node, incarnation, load: call.load })? {
            Reply::Alive { epoch, since } => Ok(Alive { epoch: epoch.0, since: since.0 }),
            reply => Err(unexpected(&reply)),
        }
    }

    fn settled(&self, _: Caller, call: SettleReport) -> Result<EmptyReply, Refusal> {
        let (node, incarnation) = (NodeId(call.node), Incarnation(call.incarnation));
        self.cluster.handle(Input::Settled { node, incarnation, epoch: Epoch(call.epoch) }).map(|_| EmptyReply)
    }

    fn get_moves(&self, _: Caller, call: GetMoves) -> Result<Moves, Refusal> {
        let node = NodeId(call.node);
        let Some(incarnation) = call.ends else { return Ok(self.cluster.lock()?.cluster().moves_of(node)) };
        match self.cluster.handle(Input::PrepareLeave { node, incarnation: Incarnation(incarnation) })? {
            Reply::Moves(moves) => Ok(moves),
            reply => Err(unexpected(&reply)),
        }
    }

    fn leave(&self, caller: Caller, call: Leave) -> Result<EmptyReply, Refusal> {
        let node = NodeId(call.node);
        let incarnation = match (call.incarnation, caller.role) {
            (Some(incarnation), _) => Incarnation(incarnation),
            (None, Role::Admin | Role::Control) => {
                let hosted = self.cluster.lock()?;
                let found = hosted.cluster().members().find(|view| view.member.node == node);
                let Some(found) = found else {
                    let reason = format!("node {node} is not known");
                    return Err(Refusal::new(RefusalCode::UnknownMember, reason));
                };
                found.member.incarnation
            }
            (None, Role::Node | Role::Client | Role::Scheduler) => {
                let reason = format!("node {node} must name the incarnation that leaves");
                return Err(Refusal::new(RefusalCode::BadRequest, reason));
            }
        };
        // A node that shuts down by itself returns, if it has devices; a node that an operator removes does not.
        let restarts = call.incarnation.is_some();
        self.cluster.handle(match restarts {
            true => Input::Restart { node, incarnation },
            false => Input::Leave { node, incarnation },
        })?;
        tracing::info!(node = node.0, incarnation = incarnation.0, restarts, "a node leaves");
        Ok(EmptyReply)
    }

    fn drain(&self, caller: Caller, call: Drain) -> Result<EmptyReply, Refusal> {
        check_names_incarnation(caller, call.node, call.incarnation)?;
        self.drain_now(NodeId(call.node), call.incarnation.map(Incarnation))
    }

    fn undrain(&self, caller: Caller, call: Undrain) -> Result<EmptyReply, Refusal> {
        check_names_incarnation(caller, call.node, call.incarnation)?;
        self.undrain_now(NodeId(call.node), call.incarnation.map(Incarnation))
    }

    fn register_segment(&self, caller: Caller, call: RegisterSegment) -> Result<EmptyReply, Refusal> {
        check_owner(caller, call.segment.owner)?;
        self.cluster.handle(Input::RegisterSegment { segment: call.segment }).map(|_| EmptyReply)
    }

    fn renew_segments(&self, _: Caller, call: RenewSegments) -> Result<RenewReply, Refusal> {
        let client = ClientId(call.client);
        match self.cluster.handle(Input::ClientHeartbeat { client })? {
            Reply::Renewed { segments } => Ok(RenewReply { segments: segments as u64 }),
            reply => Err(unexpected(&reply)),
        }
    }

    fn unregister_segment(&self, caller: Caller, call: UnregisterSegment) -> Result<EmptyReply, Refusal> {
        check_owner(caller, call.owner)?;
        self.cluster.handle(Input::UnregisterSegment { owner: call.owner, name: call.name }).map(|_| EmptyReply)
    }

    fn get_segment(&self, _: Caller, call: GetSegment) -> Result<SegmentReply, Refusal> {
        match self.cluster.lock()?.cluster().segment(&call.name) {
            Some(segment) => Ok(SegmentReply { segment: segment.clone() }),
            None => {
                let reason = format!("there is no segment {:?}", call.name);
                Err(Refusal::new(RefusalCode::NotFound, reason))
            }
        }
    }

    fn list_segments(&self, _: Caller, call: ListSegments) -> Result<SegmentList, Refusal> {
        let limit = (call.limit as usize).clamp(1, PAGE_SEGMENTS);
        match self.cluster.handle(Input::ListSegments { after: call.after, limit })? {
            Reply::Segments { segments, more } => Ok(SegmentList { segments, more }),
            reply => Err(unexpected(&reply)),
        }
    }

    fn status(&self, _: Caller) -> Result<StatusReply, Refusal> {
        let view = View::of(&self.cluster)?;
        Ok(StatusReply {
            software: SOFTWARE.to_owned(),
            cluster: view.cluster,
            uptime_ns: view.uptime_ns,
            epoch: view.epoch,
            replicas: view.replicas,
            segments: view.segments.len() as u64,
            // Members that left or were removed are not members any more.
            members: view.members.into_iter().filter(|member| member.state != "left").collect(),
        })
    }

    fn report_tiers(&self, _: Caller, call: ReportTiers) -> Result<TierOrders, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut hosted = self.cluster.lock()?;
        let shards = hosted.check_incarnation(call.node, call.incarnation)?;
        if call.shards.len() > SHARDS_PER_REPORT || call.shards.iter().any(|shard| usize::from(shard.shard) >= shards) {
            let reason = format!("node {} has {shards} shards, and its report names others or too many", call.node);
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        Ok(TierOrders { orders: hosted.nodes.tiers.report(call, now_ns) })
    }

    fn list_tiers(&self, _: Caller, call: ListTiers) -> Result<TierList, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut hosted = self.cluster.lock()?;
        hosted.forget_gone();
        Ok(TierList { nodes: hosted.nodes.tiers.list(call.node, now_ns) })
    }

    fn order_tiers(&self, _: Caller, call: OrderTiers) -> Result<TiersOrdered, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.forget_gone();
        let orders = hosted.nodes.tiers.order(call.node, call.action);
        if orders.is_empty() {
            let reason = match call.node {
                Some(node) => format!("node {node} is not known, or has no SSD: start it with --ssd"),
                None => "no node has an SSD: start nodes with --ssd".to_owned(),
            };
            return Err(Refusal::new(RefusalCode::NotFound, reason));
        }
        Ok(TiersOrdered { orders })
    }

    fn report_shard(&self, _: Caller, call: ReportShard) -> Result<EmptyReply, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut hosted = self.cluster.lock()?;
        let shards = hosted.check_incarnation(call.node, call.incarnation)?;
        if usize::from(call.shard.shard) >= shards {
            let reason = format!("node {} has {shards} shards, and reports shard {}", call.node, call.shard.shard);
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        hosted.nodes.shards.report(call, now_ns);
        Ok(EmptyReply)
    }

    fn report_hot(&self, _: Caller, call: ReportHot) -> Result<EmptyReply, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut hosted = self.cluster.lock()?;
        let shards = hosted.check_incarnation(call.node, call.incarnation)?;
        if usize::from(call.shard.shard) >= shards || !Shards::is_sound(&call.shard) {
            let reason = format!("node {} has {shards} shards, and its report names others or is too large", call.node);
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        hosted.nodes.shards.report_hot(call, now_ns);
        Ok(EmptyReply)
    }

    fn list_hot(&self, _: Caller, call: ListHot) -> Result<HotList, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.forget_gone();
        Ok(HotList { nodes: hosted.nodes.shards.list_hot(call.node) })
    }

    fn list_shards(&self, _: Caller, call: ListShards) -> Result<ShardList, Refusal> {
        let now_ns = self.cluster.now_ns();
        let mut hosted = self.cluster.lock()?;
        hosted.forget_gone();
        Ok(ShardList { nodes: hosted.nodes.shards.list(call.node, now_ns) })
    }

    fn get_room(&self, _: Caller) -> Result<Room, Refusal> {
        let hosted = self.cluster.lock()?;
        let live = hosted.cluster().members().filter(|view| view.state.is_live());
        let mut room = live.map(|view| {
            let member = view.member;
            hosted.nodes.shards.room_of(member.node.0, member.incarnation.0, member.shards.len())
        });
        Ok(Room { bytes: room.try_fold(0u64, |sum, bytes| Some(sum.saturating_add(bytes?))) })
    }

    fn set_tenant(&self, _: Caller, call: SetTenant) -> Result<EmptyReply, Refusal> {
        self.set_tenant_now(call)
    }

    fn remove_tenant(&self, _: Caller, call: RemoveTenant) -> Result<EmptyReply, Refusal> {
        self.remove_tenant_now(call)
    }

    fn list_tenants(&self, _: Caller) -> Result<TenantList, Refusal> {
        Ok(self.cluster.lock()?.tenants())
    }

    fn list_tenant_ssds(&self, _: Caller) -> Result<TenantSsdList, Refusal> {
        Ok(self.cluster.lock()?.tenant_ssds())
    }

    fn sync_tenant_ssds(&self, _: Caller, call: SyncTenantSsds) -> Result<TenantSsdLeases, Refusal> {
        let mut hosted = self.cluster.lock()?;
        let leases = hosted.sync_tenant_ssds(call)?;
        let freed = hosted.freed_tenants();
        drop(hosted);
        for name in freed {
            tracing::info!(tenant = name, "no SSD has records of this tenant any more, which was removed");
            self.cluster.handle(Input::TenantFreed { name })?;
        }
        Ok(leases)
    }

    fn sync_tenants(&self, _: Caller, call: SyncTenants) -> Result<TenantLeases, Refusal> {
        self.cluster.lock()?.sync_tenants(call)
    }

    fn get_ticket(&self, caller: Caller, call: GetTicket) -> Result<TicketReply, Refusal> {
        let mut hosted = self.cluster.lock()?;
        let epoch = hosted.epoch();
        hosted.tickets.as_mut().map_or(Ok(NO_TICKET), |tickets| tickets.issue(caller, &call, epoch))
    }

    fn get_ticket_keys(&self, _: Caller, call: GetTicketKeys) -> Result<TicketKeys, Refusal> {
        let mut hosted = self.cluster.lock()?;
        let epoch = hosted.epoch();
        hosted.tickets.as_mut().map_or(Ok(NO_KEYS), |tickets| tickets.keys_of_node(&call, epoch))
    }

    fn rotate_tickets(&self, _: Caller) -> Result<EmptyReply, Refusal> {
        match &mut self.cluster.lock()?.tickets {
            Some(tickets) => tickets.rotate_at_once().map(|()| EmptyReply),
            None => Err(Refusal::new(RefusalCode::NotFound, "this control plane issues no tickets")),
        }
    }

    fn watch_orders(&self, _: Caller, call: WatchOrders) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.check_incarnation(call.node, call.incarnation)?;
        hosted.nodes.follow.line(call.node, call.incarnation)
    }

    fn answer_order(&self, _: Caller, call: AnswerOrder) -> Result<EmptyReply, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.check_incarnation(call.node, call.incarnation)?;
        hosted.nodes.follow.answered(call);
        Ok(EmptyReply)
    }

    fn answer_copies(&self, _: Caller, call: AnswerCopies) -> Result<EmptyReply, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.check_incarnation(call.node, call.incarnation)?;
        hosted.nodes.follow.copied(call);
        Ok(EmptyReply)
    }

    fn report_silence(&self, _: Caller, call: ReportSilence) -> Result<EmptyReply, Refusal> {
        let (node, incarnation) = (NodeId(call.node), Incarnation(call.incarnation));
        self.cluster.handle(Input::Reported { node, incarnation }).map(|_| EmptyReply)
    }

    fn create_task(&self, _: Caller, call: CreateTask) -> Result<TaskCreated, Refusal> {
        self.tasks.create(call)
    }

    fn list_tasks(&self, _: Caller, call: ListTasks) -> Result<TaskList, Refusal> {
        Ok(self.tasks.list(&call))
    }

    fn cancel_task(&self, _: Caller, call: CancelTask) -> Result<EmptyReply, Refusal> {
        self.tasks.cancel(&call)
    }

    fn report_events(&self, _: Caller, call: ReportEvents) -> Result<EmptyReply, Refusal> {
        let mut hosted = self.cluster.lock()?;
        let events = &call.events;
        hosted.check_incarnation(events.node, events.incarnation)?;
        if !hosted.nodes.follow.knows(events.node, events.incarnation) {
            let reason = format!("node {} reports events without an order to do so", events.node);
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        hosted.nodes.follow.publish(events)?;
        Ok(EmptyReply)
    }

    fn watch_events(&self, _: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.cluster.watch_events()
    }

    fn register_instance(&self, _: Caller, call: RegisterInstance) -> Result<InstanceRegistered, Refusal> {
        self.conductor()?.register(call)
    }

    fn register_capabilities(&self, _: Caller, call: RegisterCapabilities) -> Result<InstanceRegistered, Refusal> {
        self.conductor()?.register(call)
    }

    fn deregister_instance(&self, _: Caller, call: DeregisterInstance) -> Result<EmptyReply, Refusal> {
        self.conductor()?.deregister(&call)
    }

    fn report_load(&self, _: Caller, call: ReportLoad) -> Result<EmptyReply, Refusal> {
        self.conductor()?.load(&call)
    }

    fn report_cache(&self, _: Caller, call: ReportCache) -> Result<CacheTaken, Refusal> {
        self.conductor()?.cache(call)
    }

    fn query_prefix(&self, _: Caller, call: QueryPrefix) -> Result<PrefixHolders, Refusal> {
        self.conductor()?.query(&call)
    }

    fn schedule(&self, _: Caller, call: Schedule) -> Result<ScheduleReply, Refusal> {
        self.conductor()?.schedule(&call)
    }

    fn schedule_on_terms(&self, _: Caller, call: ScheduleOnTerms) -> Result<ScheduleReply, Refusal> {
        self.conductor()?.schedule_on_terms(&call)
    }

    fn schedule_with_groups(&self, _: Caller, call: ScheduleWithGroups) -> Result<ScheduleReply, Refusal> {
        self.conductor()?.schedule_with_groups(&call)
    }

    fn update_request(&self, _: Caller, call: UpdateRequest) -> Result<EmptyReply, Refusal> {
        self.conductor()?.update(call)
    }

    fn reschedule(&self, _: Caller, call: Reschedule) -> Result<ScheduleReply, Refusal> {
        self.conductor()?.reschedule(&call)
    }

    fn explain_request(&self, _: Caller, call: ExplainRequest) -> Result<RequestExplained, Refusal> {
        self.conductor()?.explain(&call)
    }

    fn explain_placement(&self, _: Caller, call: ExplainPlacement) -> Result<PlacementExplained, Refusal> {
        self.conductor()?.explain_placement(&call.request)
    }

    fn hold_instance(&self, _: Caller, call: HoldInstance) -> Result<InstanceHeld, Refusal> {
        self.conductor()?.hold(&call)
    }

    fn set_placement(&self, _: Caller, call: SetPlacement) -> Result<EmptyReply, Refusal> {
        self.conductor()?.set_placement(&call)
    }

    fn show_placement(&self, _: Caller) -> Result<Placement, Refusal> {
        Ok(self.conductor()?.placement())
    }

    fn set_class(&self, _: Caller, call: SetClass) -> Result<EmptyReply, Refusal> {
        self.conductor()?.set_class(&call)
    }

    fn set_weight(&self, _: Caller, call: SetWeight) -> Result<EmptyReply, Refusal> {
        self.conductor()?.set_weight(&call)
    }

    fn show_service(&self, _: Caller) -> Result<ServiceShown, Refusal> {
        Ok(self.conductor()?.service())
    }

    fn show_copies(&self, _: Caller) -> Result<CopiesShown, Refusal> {
        Ok(self.conductor()?.copies_shown(self.cluster.lock()?.keeps_copies()))
    }

    fn show_feeds(&self, _: Caller) -> Result<FeedsShown, Refusal> {
        Ok(self.conductor()?.feeds_shown())
    }

    fn show_limits(&self, _: Caller) -> Result<LimitUse, Refusal> {
        Ok(self.conductor()?.limits())
    }

    fn watch_instances(&self, _: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.conductor()?.watch_instances()
    }

    fn watch_assignments(&self, _: Caller, call: WatchAssignments) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.conductor()?.watch_assignments(&call)
    }

    fn publish_object(&self, _: Caller, call: PublishObject) -> Result<ObjectPublished, Refusal> {
        self.p2p.publish(call)
    }

    fn find_object(&self, _: Caller, call: FindObject) -> Result<ObjectFound, Refusal> {
        self.p2p.find(&call)
    }

    fn hold_object(&self, _: Caller, call: HoldObject) -> Result<ObjectHeld, Refusal> {
        self.p2p.hold(call)
    }

    fn report_object(&self, _: Caller, call: ReportObject) -> Result<EmptyReply, Refusal> {
        self.p2p.report(&call)
    }

    fn renew_objects(&self, _: Caller, call: RenewObjects) -> Result<ObjectsRenewed, Refusal> {
        self.p2p.renew(call)
    }

    fn release_object(&self, _: Caller, call: ReleaseObject) -> Result<ObjectReleased, Refusal> {
        self.p2p.release(call)
    }

    fn list_objects(&self, _: Caller, call: ListObjects) -> Result<ObjectList, Refusal> {
        self.p2p.list(&call)
    }

    fn describe_object(&self, _: Caller, call: DescribeObject) -> Result<ObjectMembers, Refusal> {
        self.p2p.describe(&call)
    }

    fn locate_object(&self, _: Caller, call: LocateObject) -> Result<ObjectPlaces, Refusal> {
        self.p2p.locate(&call)
    }

    fn join_ranks(&self, _: Caller, call: JoinRanks) -> Result<RanksJoined, Refusal> {
        self.p2p.join_ranks(&call)
    }

    fn want_shards(&self, _: Caller, call: WantShards) -> Result<EmptyReply, Refusal> {
        self.p2p.want(&call)
    }

    fn get_peer_keys(&self, caller: Caller, call: GetPeerKeys) -> Result<TicketKeys, Refusal> {
        let mut hosted = self.cluster.lock()?;
        hosted.tickets.as_mut().map_or(Ok(NO_KEYS), |tickets| tickets.keys_of_peer(caller, &call))
    }

    fn watch_fetches(&self, _: Caller, call: WatchFetches) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.p2p.watch(call)
    }

    fn register_process(&self, _: Caller, call: RegisterProcess) -> Result<WorldReply, Refusal> {
        self.worlds.register(call)
    }

    fn unregister_process(&self, _: Caller, call: UnregisterProcess) -> Result<EmptyReply, Refusal> {
        self.worlds.unregister(&call)
    }

    fn report_process(&self, _: Caller, call: ReportProcess) -> Result<WorldReply, Refusal> {
        self.worlds.report(call)
    }

    fn attach_member(&self, _: Caller, call: AttachMember) -> Result<MemberAttached, Refusal> {
        self.worlds.attach(call)
    }

    fn detach_member(&self, _: Caller, call: DetachMember) -> Result<EmptyReply, Refusal> {
        self.worlds.detach(&call)
    }

    fn propose_change(&self, _: Caller, call: ProposeChange) -> Result<EmptyReply, Refusal> {
        self.worlds.propose(&call)
    }

    fn watch_world(&self, _: Caller, call: WatchWorld) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        self.worlds.watch(&call)
    }

    fn list_worlds(&self, _: Caller, call: ListWorlds) -> Result<WorldList, Refusal> {
        Ok(self.worlds.list(&call))
    }

    fn describe_world(&self, _: Caller, call: DescribeWorld) -> Result<WorldDescription, Refusal> {
        self.worlds.describe(&call)
    }

    fn maps(&self) -> watch::Receiver<MapFrame> {
        self.cluster.maps()
    }

    fn observe(&self, event: Event) {
        if let Event::Rejected(reason) = event {
            tracing::debug!(reason = reason.name(), "a connection was rejected");
        }
        self.counts.observe(event);
    }
}

/// Checks that a call of a role other than an operator's names one incarnation of the node.
fn check_names_incarnation(caller: Caller, node: u64, incarnation: Option<u64>) -> Result<(), Refusal> {
    if incarnation.is_some() || matches!(caller.role, Role::Admin | Role::Control) {
        return Ok(());
    }
    let reason = format!("node {node} must name its incarnation");
    Err(Refusal::new(RefusalCode::BadRequest, reason))
}
