//! Access rights of calls: one table of the roles that may make each call, for calls and streams alike.
//!
//! A right belongs to a role, which the caller's certificate proves. Some calls act for a node or a tenant besides,
//! such as a node's report or a client's request for a tenant's ticket. Then the scope of the caller's certificate must
//! include the node or tenant that the call names. The control plane and operators may act for all.

use crate::codec::Message;
use crate::identity::role::{Role, Scope};
use crate::message::conductor::{
    DeregisterInstance, ExplainPlacement, ExplainRequest, QueryPrefix, RegisterCapabilities, RegisterInstance,
    ReportCache, ReportLoad, Reschedule, Schedule, ScheduleOnTerms, ScheduleWithGroups, UpdateRequest,
    WatchAssignments, WatchInstances,
};
use crate::message::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, ProposeChange, RegisterProcess, ReportProcess,
    UnregisterProcess, WatchWorld, WorldName,
};
use crate::message::p2p::{
    DescribeObject, FindObject, GetPeerKeys, HoldObject, JoinRanks, ListObjects, LocateObject, PublishObject,
    ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use crate::message::placement::{
    HoldInstance, SetClass, SetPlacement, SetWeight, ShowCopies, ShowFeeds, ShowLimits, ShowPlacement, ShowService,
};
use crate::message::{
    AnswerCopies, AnswerOrder, AttachDevices, CancelTask, CreateTask, Drain, GetIncarnation, GetLastMember, GetMap,
    GetMoves, GetRoom, GetSegment, GetTicket, GetTicketKeys, Heartbeat, Hello, Join, Leave, ListHot, ListSegments,
    ListShards, ListTasks, ListTenantSsds, ListTenants, ListTiers, OfferMap, OrderTiers, RegisterSegment, RemoveTenant,
    RenewSegments, ReportEvents, ReportHot, ReportShard, ReportSilence, ReportTiers, RotateTickets, SegmentOwner,
    SetTenant, SettleReport, Status, SyncTenantSsds, SyncTenants, Undrain, UnregisterSegment, WatchEvents, WatchMap,
    WatchOrders,
};

/// Every role.
const ANY: &[Role] = &Role::ALL;
/// Members of the cluster.
const MEMBERS: &[Role] = &[Role::Control, Role::Node];
/// Roles that may offer memory, and whose processes may form groups.
const HOLDERS: &[Role] = &[Role::Control, Role::Node, Role::Client];
/// Roles that may request objects from shards.
const ASKERS: &[Role] = &[Role::Control, Role::Client, Role::Admin];
/// Roles that may have objects replicated.
const COPIERS: &[Role] = &[Role::Control, Role::Client, Role::Scheduler, Role::Admin];
/// Roles that may operate the cluster.
const OPERATORS: &[Role] = &[Role::Control, Role::Admin];
/// Roles that may end a membership.
const ENDERS: &[Role] = &[Role::Control, Role::Node, Role::Admin];
/// Roles that may read load.
const OBSERVERS: &[Role] = &[Role::Control, Role::Scheduler, Role::Admin];
/// Roles that may subscribe to events of objects.
const FOLLOWERS: &[Role] = &[Role::Control, Role::Client, Role::Scheduler, Role::Admin];

/// Roles that may read the P2P store's catalog.
const LOOKERS: &[Role] = &[Role::Control, Role::Node, Role::Client, Role::Admin];
/// Roles that may use the Conductor: request placements and watch instances.
const ROUTERS: &[Role] = &[Role::Control, Role::Scheduler, Role::Admin];

/// First message of a call, with the roles that may make it.
pub trait CallMessage: Message {
    /// Name of the call in metrics and refusals.
    const METHOD: &'static str;
    /// The roles that may call it.
    const CALLERS: &'static [Role];

    /// Returns the node or tenant that the call acts for, if any.
    fn speaks_for(&self) -> Option<Scope> {
        None
    }
}

macro_rules! rights {
    ($($name:ident = $method:literal $callers:ident $(|$call:ident| $scope:expr)?;)+) => {
        $(impl CallMessage for $name {
            const METHOD: &'static str = $method;
            const CALLERS: &'static [Role] = $callers;
            $(fn speaks_for(&self) -> Option<Scope> {
                let $call = self;
                $scope
            })?
        })+

        /// Name of every call, and the roles that may make it.
        pub const RIGHTS: &[(&str, &[Role])] = &[$(($method, $callers)),+];
    };
}

rights! {
    Hello = "hello" ANY;
    Join = "join" MEMBERS |call| Some(Scope::Node(call.member.node.0));
    OfferMap = "offer_map" MEMBERS |call| Some(Scope::Node(call.join.member.node.0));
    GetIncarnation = "get_incarnation" MEMBERS |call| Some(Scope::Node(call.node));
    GetLastMember = "get_last_member" MEMBERS |call| Some(Scope::Node(call.node));
    AttachDevices = "attach_devices" MEMBERS |call| Some(Scope::Node(call.node));
    Heartbeat = "heartbeat" MEMBERS |call| Some(Scope::Node(call.node));
    SettleReport = "settled" MEMBERS |call| Some(Scope::Node(call.node));
    GetMoves = "get_moves" ENDERS |call| Some(Scope::Node(call.node));
    Leave = "leave" ENDERS |call| Some(Scope::Node(call.node));
    Drain = "drain" ENDERS |call| Some(Scope::Node(call.node));
    Undrain = "undrain" ENDERS |call| Some(Scope::Node(call.node));
    GetMap = "get_map" ANY;
    WatchMap = "watch_map" ANY;
    RegisterSegment = "register_segment" HOLDERS |call| node_of(call.segment.owner);
    RenewSegments = "renew_segments" HOLDERS;
    UnregisterSegment = "unregister_segment" HOLDERS |call| node_of(call.owner);
    GetSegment = "get_segment" ANY;
    ListSegments = "list_segments" ANY;
    Status = "status" OBSERVERS;
    ReportTiers = "report_tiers" MEMBERS |call| Some(Scope::Node(call.node));
    ListTiers = "list_tiers" OPERATORS;
    OrderTiers = "order_tiers" OPERATORS;
    ReportShard = "report_shard" MEMBERS |call| Some(Scope::Node(call.node));
    ListShards = "list_shards" OBSERVERS;
    ReportHot = "report_hot" MEMBERS |call| Some(Scope::Node(call.node));
    ListHot = "list_hot" OBSERVERS;
    GetRoom = "get_room" ASKERS;
    ReportSilence = "report_silence" ASKERS;
    WatchOrders = "watch_orders" MEMBERS |call| Some(Scope::Node(call.node));
    AnswerOrder = "answer_order" MEMBERS |call| Some(Scope::Node(call.node));
    AnswerCopies = "answer_copies" MEMBERS |call| Some(Scope::Node(call.node));
    CreateTask = "create_task" COPIERS |call| Some(Scope::Tenant(call.tenant.clone()));
    ListTasks = "list_tasks" COPIERS |call| Some(all_or(call.tenant.as_ref()));
    CancelTask = "cancel_task" COPIERS |call| Some(all_or(call.tenant.as_ref()));
    ReportEvents = "report_events" MEMBERS |call| Some(Scope::Node(call.events.node));
    WatchEvents = "watch_events" FOLLOWERS;
    SetTenant = "set_tenant" OPERATORS;
    RemoveTenant = "remove_tenant" OPERATORS;
    ListTenants = "list_tenants" OPERATORS;
    SyncTenants = "sync_tenants" MEMBERS |call| Some(Scope::Node(call.node));
    ListTenantSsds = "list_tenant_ssds" OPERATORS;
    SyncTenantSsds = "sync_tenant_ssds" MEMBERS |call| Some(Scope::Node(call.node));
    GetTicket = "get_ticket" ASKERS |call| Some(tenant_of(call));
    GetTicketKeys = "get_ticket_keys" MEMBERS |call| Some(Scope::Node(call.node));
    RotateTickets = "rotate_tickets" OPERATORS;
    RegisterInstance = "register_instance" ANY |call| Some(Scope::Tenant(call.tenant.clone()));
    RegisterCapabilities = "register_capabilities" ANY |call| Some(Scope::Tenant(call.register.tenant.clone()));
    DeregisterInstance = "deregister_instance" ANY |call| Some(Scope::Tenant(call.tenant.clone()));
    ReportLoad = "report_load" ANY |call| Some(Scope::Tenant(call.tenant.clone()));
    ReportCache = "report_cache" ANY |call| Some(Scope::Tenant(call.tenant.clone()));
    QueryPrefix = "query_prefix" ROUTERS;
    Schedule = "schedule" ROUTERS;
    ScheduleOnTerms = "schedule_on_terms" ROUTERS;
    ScheduleWithGroups = "schedule_with_groups" ROUTERS;
    UpdateRequest = "update_request" ROUTERS;
    Reschedule = "reschedule" ROUTERS;
    WatchInstances = "watch_instances" ROUTERS;
    WatchAssignments = "watch_assignments" ROUTERS;
    ExplainRequest = "explain_request" ROUTERS;
    ExplainPlacement = "explain_placement" ROUTERS;
    HoldInstance = "hold_instance" OPERATORS;
    SetPlacement = "set_placement" OPERATORS;
    ShowCopies = "show_copies" ROUTERS;
    ShowPlacement = "show_placement" ROUTERS;
    SetClass = "set_class" OPERATORS;
    SetWeight = "set_weight" OPERATORS;
    ShowService = "show_service" ROUTERS;
    ShowFeeds = "show_feeds" ROUTERS;
    ShowLimits = "show_limits" ROUTERS;
    PublishObject = "publish_object" HOLDERS |call| Some(Scope::Tenant(call.tenant.clone()));
    FindObject = "find_object" LOOKERS |call| Some(Scope::Tenant(call.tenant.clone()));
    HoldObject = "hold_object" HOLDERS |call| Some(Scope::Tenant(call.tenant.clone()));
    ReportObject = "report_object" HOLDERS;
    RenewObjects = "renew_objects" HOLDERS;
    ReleaseObject = "release_object" HOLDERS;
    ListObjects = "list_objects" LOOKERS |call| Some(Scope::Tenant(call.tenant.clone()));
    DescribeObject = "describe_object" LOOKERS |call| Some(Scope::Tenant(call.tenant.clone()));
    WatchFetches = "watch_fetches" HOLDERS;
    LocateObject = "locate_object" HOLDERS |call| Some(Scope::Tenant(call.tenant.clone()));
    JoinRanks = "join_ranks" HOLDERS;
    WantShards = "want_shards" HOLDERS;
    GetPeerKeys = "get_peer_keys" HOLDERS |call| Some(Scope::Tenant(call.tenant.clone()));
    RegisterProcess = "register_process" HOLDERS |call| Some(of_world(&call.world));
    UnregisterProcess = "unregister_process" HOLDERS |call| Some(of_world(&call.world));
    ReportProcess = "report_process" HOLDERS |call| Some(of_world(&call.world));
    AttachMember = "attach_member" HOLDERS |call| Some(of_world(&call.world));
    DetachMember = "detach_member" HOLDERS |call| Some(of_world(&call.world));
    ProposeChange = "propose_change" HOLDERS |call| Some(of_world(&call.world));
    WatchWorld = "watch_world" HOLDERS |call| Some(of_world(&call.world));
    ListWorlds = "list_worlds" OBSERVERS;
    DescribeWorld = "describe_world" OBSERVERS;
}

/// A ticket for all tenants needs a certificate for all tenants.
fn tenant_of(call: &GetTicket) -> Scope {
    all_or(call.tenant.as_ref())
}

/// A world's processes are those of its tenant.
fn of_world(world: &WorldName) -> Scope {
    Scope::Tenant(world.tenant.clone())
}

/// A call that names no tenant is for all of them.
fn all_or(tenant: Option<&String>) -> Scope {
    tenant.cloned().map_or(Scope::Any, Scope::Tenant)
}

/// A node's memory is offered by that node; a client's is identified by a secret random number.
const fn node_of(owner: SegmentOwner) -> Option<Scope> {
    match owner {
        SegmentOwner::Node { node, .. } => Some(Scope::Node(node.0)),
        SegmentOwner::Client { .. } => None,
    }
}

/// Returns true if certificates of `role` are bound to a scope of this kind.
pub(crate) const fn is_bound(role: Role, scope: &Scope) -> bool {
    matches!((role, scope), (Role::Node, Scope::Node(_)) | (Role::Client, Scope::Tenant(_) | Scope::Any))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control, node, client, scheduler, admin; "c" comes first for the control plane.
    const EXPECTED: &[&str] = &[
        "hello cncsa",
        "join cn",
        "offer_map cn",
        "get_incarnation cn",
        "get_last_member cn",
        "attach_devices cn",
        "heartbeat cn",
        "settled cn",
        "get_moves cna",
        "leave cna",
        "drain cna",
        "undrain cna",
        "get_map cncsa",
        "watch_map cncsa",
        "register_segment cnc",
        "renew_segments cnc",
        "unregister_segment cnc",
        "get_segment cncsa",
        "list_segments cncsa",
        "status csa",
        "report_tiers cn",
        "list_tiers ca",
        "order_tiers ca",
        "report_shard cn",
        "list_shards csa",
        "report_hot cn",
        "list_hot csa",
        "get_room cca",
        "report_silence cca",
        "watch_orders cn",
        "answer_order cn",
        "answer_copies cn",
        "create_task ccsa",
        "list_tasks ccsa",
        "cancel_task ccsa",
        "report_events cn",
        "watch_events ccsa",
        "set_tenant ca",
        "remove_tenant ca",
        "list_tenants ca",
        "sync_tenants cn",
        "list_tenant_ssds ca",
        "sync_tenant_ssds cn",
        "get_ticket cca",
        "get_ticket_keys cn",
        "rotate_tickets ca",
        "register_instance cncsa",
        "register_capabilities cncsa",
        "deregister_instance cncsa",
        "report_load cncsa",
        "report_cache cncsa",
        "query_prefix csa",
        "schedule csa",
        "schedule_on_terms csa",
        "schedule_with_groups csa",
        "update_request csa",
        "reschedule csa",
        "watch_instances csa",
        "watch_assignments csa",
        "explain_request csa",
        "explain_placement csa",
        "hold_instance ca",
        "set_placement ca",
        "show_copies csa",
        "show_placement csa",
        "set_class ca",
        "set_weight ca",
        "show_service csa",
        "show_feeds csa",
        "show_limits csa",
        "publish_object cnc",
        "find_object cnca",
        "hold_object cnc",
        "report_object cnc",
        "renew_objects cnc",
        "release_object cnc",
        "list_objects cnca",
        "describe_object cnca",
        "watch_fetches cnc",
        "locate_object cnc",
        "join_ranks cnc",
        "want_shards cnc",
        "get_peer_keys cnc",
        "register_process cnc",
        "unregister_process cnc",
        "report_process cnc",
        "attach_member cnc",
        "detach_member cnc",
        "propose_change cnc",
        "watch_world cnc",
        "list_worlds csa",
        "describe_world csa",
    ];

    /// Rights are decided in the table above and nowhere else; this list shows every change.
    #[test]
    fn rights_are_these() {
        let letter = |role: &Role| role.name().chars().next().expect("a name");
        let shown: Vec<String> = RIGHTS
            .iter()
            .map(|(method, roles)| format!("{method} {}", roles.iter().map(letter).collect::<String>()))
            .collect();
        assert_eq!(shown, EXPECTED);
    }
}
