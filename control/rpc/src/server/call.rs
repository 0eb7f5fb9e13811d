//! One call on the server: reads the request, checks rights, calls the service, replies; or streams items for as long
//! as the caller watches.
//!
//! A frame that is not a message closes the caller's connection. Every other error is a refusal, after which the
//! connection stays usable. Reading and writing have deadlines; a stream that misses one is reset.

use std::sync::Arc;

use quinn::{Connection, ReadToEndError, RecvStream, SendStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::codec::{CodecError, HEADER_BYTES, Header, Message, decode, encode};
use crate::error::{CloseCode, Refusal, RefusalCode};
use crate::identity::role::Role;
use crate::limits::{LARGE_REQUEST_BYTES, SMALL_BODY_BYTES};
use crate::message::conductor::{
    DeregisterInstance, ExplainPlacement, ExplainRequest, QueryPrefix, RegisterCapabilities, RegisterInstance,
    ReportCache, ReportLoad, Reschedule, Schedule, ScheduleOnTerms, ScheduleWithGroups, UpdateRequest,
    WatchAssignments, WatchInstances,
};
use crate::message::groups::{
    AttachMember, DescribeWorld, DetachMember, ListWorlds, ProposeChange, RegisterProcess, ReportProcess,
    UnregisterProcess, WatchWorld,
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
    RenewSegments, ReportEvents, ReportHot, ReportShard, ReportSilence, ReportTiers, RotateTickets, SetTenant,
    SettleReport, Status, SyncTenantSsds, SyncTenants, Undrain, UnregisterSegment, WatchEvents, WatchMap, WatchOrders,
    is_large,
};
use crate::rights::{CallMessage, is_bound};
use crate::server::Host;
use crate::service::{Caller, Event, ItemFrame, Service};

/// One call in progress.
pub(crate) struct Call {
    pub(crate) host: Arc<Host>,
    pub(crate) service: Arc<dyn Service>,
    pub(crate) connection: Connection,
    pub(crate) caller: Caller,
    /// Identity of the cluster state that the caller got in its [`Welcome`](crate::message::Welcome).
    pub(crate) state: u64,
}

impl Call {
    pub(crate) async fn run(self, mut send: SendStream, mut receive: RecvStream) {
        let deadline = self.host.limits.call_deadline;
        let read = receive.read_to_end(HEADER_BYTES + LARGE_REQUEST_BYTES);
        let frame = match timeout(deadline, read).await {
            Ok(Ok(frame)) => frame,
            Ok(Err(ReadToEndError::TooLong)) => {
                return self.bad_frame(&format!("a request is above {} bytes", HEADER_BYTES + LARGE_REQUEST_BYTES));
            }
            // The caller gave up, or is too slow. Dropping the stream would end it like an empty reply.
            Ok(Err(_)) | Err(_) => {
                let _ = send.reset(CloseCode::Deadline.wire());
                return;
            }
        };
        let header = Header::decode(&frame);
        let is_large = header.as_ref().is_ok_and(|header| is_large(header.kind));
        if frame.len() > HEADER_BYTES + SMALL_BODY_BYTES && !is_large {
            return self.bad_frame(&format!("a request is above {} bytes", HEADER_BYTES + SMALL_BODY_BYTES));
        }
        let kind = match header {
            Ok(header) => header.kind,
            Err(error) => return self.bad_frame(&error.to_string()),
        };
        match kind {
            WatchMap::KIND => return self.watch(&frame, send).await,
            WatchOrders::KIND => {
                let items = self.items(&frame, |c| self.service.watch_orders(self.caller, c));
                return self.stream(items, send).await;
            }
            WatchEvents::KIND => {
                let items = self.items(&frame, |_: WatchEvents| self.service.watch_events(self.caller));
                return self.stream(items, send).await;
            }
            WatchInstances::KIND => {
                let items = self.items(&frame, |_: WatchInstances| self.service.watch_instances(self.caller));
                return self.stream(items, send).await;
            }
            WatchAssignments::KIND => {
                let items = self.items(&frame, |c| self.service.watch_assignments(self.caller, c));
                return self.stream(items, send).await;
            }
            WatchFetches::KIND => {
                let items = self.items(&frame, |c| self.service.watch_fetches(self.caller, c));
                return self.stream(items, send).await;
            }
            WatchWorld::KIND => {
                let items = self.items(&frame, |c| self.service.watch_world(self.caller, c));
                return self.stream(items, send).await;
            }
            _ => {}
        }
        let reply = match self.dispatch(kind, &frame) {
            Ok(reply) => reply,
            Err(error) => return self.bad_frame(&error.to_string()),
        };
        if self.write(&mut send, &reply).await {
            // An error means that the caller has gone.
            let _ = send.finish();
        }
    }

    /// Writes within the deadline; returns false, and resets the stream, if the caller has gone or does not read.
    async fn write(&self, send: &mut SendStream, frame: &[u8]) -> bool {
        let written = timeout(self.host.limits.call_deadline, send.write_all(frame)).await;
        let written = matches!(written, Ok(Ok(())));
        if !written {
            let _ = send.reset(CloseCode::Deadline.wire());
        }
        written
    }

    fn bad_frame(&self, reason: &str) {
        self.service.observe(Event::BadFrame);
        self.connection.close(CloseCode::BadFrame.wire(), reason.as_bytes());
    }

    /// Sends the map, and later ones, until the caller or the server closes: to a node each of them, to others the
    /// newest.
    async fn watch(&self, frame: &[u8], mut send: SendStream) {
        let call: WatchMap = match decode(frame) {
            Ok(call) => call,
            Err(error) => return self.bad_frame(&error.to_string()),
        };
        self.service.observe(Event::Called { method: WatchMap::METHOD, ok: true });
        let mut maps = self.service.maps();
        let mut known = call.known_epoch;
        loop {
            let map = maps.borrow_and_update().clone();
            if map.state != self.state {
                return self.began_anew();
            }
            // A client would conclude that its objects are lost.
            let waits = map.is_provisional && self.caller.role == Role::Client;
            if !waits {
                for frame in map.after(known, self.caller.role == Role::Node) {
                    if !self.write(&mut send, frame).await {
                        return;
                    }
                }
                known = Some(map.epoch);
            }
            tokio::select! {
                changed = maps.changed() => if changed.is_err() { return },
                // The caller has closed the stream.
                _ = send.stopped() => return,
            }
        }
    }

    /// Returns the items that a watcher subscribes to, or the refusal.
    fn items<C: CallMessage>(
        &self,
        frame: &[u8],
        watch: impl FnOnce(C) -> Result<mpsc::Receiver<ItemFrame>, Refusal>,
    ) -> Result<Result<mpsc::Receiver<ItemFrame>, Refusal>, CodecError> {
        let call = decode(frame)?;
        let items = self.permit(&call).and_then(|()| watch(call));
        self.service.observe(Event::Called { method: C::METHOD, ok: items.is_ok() });
        Ok(items)
    }

    /// Checks that the caller may make this call, by its role and by the scope of its certificate.
    fn permit<C: CallMessage>(&self, call: &C) -> Result<(), Refusal> {
        let role = self.caller.role;
        let refused = |reason| Err(Refusal::new(RefusalCode::NotPermitted, reason));
        if !C::CALLERS.contains(&role) {
            return refused(format!("a certificate of role {role} may not call {}", C::METHOD));
        }
        match call.speaks_for() {
            Some(scope) if is_bound(role, &scope) && !self.host.speaks_for(&self.connection, role, &scope) => {
                refused(format!("this certificate of role {role} may not speak for {scope}, as {} does", C::METHOD))
            }
            _ => Ok(()),
        }
    }

    /// Sends items until either side closes.
    async fn stream(
        &self,
        items: Result<Result<mpsc::Receiver<ItemFrame>, Refusal>, CodecError>,
        mut send: SendStream,
    ) {
        let mut items = match items {
            Ok(Ok(items)) => items,
            Ok(Err(refusal)) => {
                if let Ok(frame) = encode(&refusal)
                    && self.write(&mut send, &frame).await
                {
                    // An error means that the caller has gone.
                    let _ = send.finish();
                }
                return;
            }
            Err(error) => return self.bad_frame(&error.to_string()),
        };
        loop {
            tokio::select! {
                item = items.recv() => match item {
                    Some(frame) => if !self.write(&mut send, &frame).await { return },
                    None => {
                        let _ = send.finish();
                        return;
                    }
                },
                // The caller has closed the stream.
                _ = send.stopped() => return,
            }
        }
    }

    fn dispatch(&self, kind: u16, frame: &[u8]) -> Result<Vec<u8>, CodecError> {
        let (service, caller) = (&*self.service, self.caller);
        match kind {
            Hello::KIND => self.answer(frame, |c| service.hello(caller, c)),
            GetMap::KIND => self.get_map(frame),
            RegisterSegment::KIND => self.answer(frame, |c| service.register_segment(caller, c)),
            RenewSegments::KIND => self.answer(frame, |c| service.renew_segments(caller, c)),
            UnregisterSegment::KIND => self.answer(frame, |c| service.unregister_segment(caller, c)),
            GetSegment::KIND => self.answer(frame, |c| service.get_segment(caller, c)),
            ListSegments::KIND => self.answer(frame, |c| service.list_segments(caller, c)),
            Status::KIND => self.answer(frame, |_: Status| service.status(caller)),
            ReportTiers::KIND => self.answer(frame, |c| service.report_tiers(caller, c)),
            ListTiers::KIND => self.answer(frame, |c| service.list_tiers(caller, c)),
            ReportShard::KIND => self.answer(frame, |c| service.report_shard(caller, c)),
            ReportHot::KIND => self.answer(frame, |c| service.report_hot(caller, c)),
            ListHot::KIND => self.answer(frame, |c| service.list_hot(caller, c)),
            ListShards::KIND => self.answer(frame, |c| service.list_shards(caller, c)),
            GetRoom::KIND => self.answer(frame, |_: GetRoom| service.get_room(caller)),
            ReportSilence::KIND => self.answer(frame, |c| service.report_silence(caller, c)),
            AnswerOrder::KIND => self.answer(frame, |c| service.answer_order(caller, c)),
            AnswerCopies::KIND => self.answer(frame, |c| service.answer_copies(caller, c)),
            CreateTask::KIND => self.answer(frame, |c| service.create_task(caller, c)),
            ListTasks::KIND => self.answer(frame, |c| service.list_tasks(caller, c)),
            CancelTask::KIND => self.answer(frame, |c| service.cancel_task(caller, c)),
            ReportEvents::KIND => self.answer(frame, |c| service.report_events(caller, c)),
            OrderTiers::KIND => self.answer(frame, |c| service.order_tiers(caller, c)),
            SetTenant::KIND => self.answer(frame, |c| service.set_tenant(caller, c)),
            RemoveTenant::KIND => self.answer(frame, |c| service.remove_tenant(caller, c)),
            ListTenants::KIND => self.answer(frame, |_: ListTenants| service.list_tenants(caller)),
            SyncTenants::KIND => self.answer(frame, |c| service.sync_tenants(caller, c)),
            ListTenantSsds::KIND => self.answer(frame, |_: ListTenantSsds| service.list_tenant_ssds(caller)),
            SyncTenantSsds::KIND => self.answer(frame, |c| service.sync_tenant_ssds(caller, c)),
            GetTicket::KIND => self.answer(frame, |c| service.get_ticket(caller, c)),
            GetTicketKeys::KIND => self.answer(frame, |c| service.get_ticket_keys(caller, c)),
            RotateTickets::KIND => self.answer(frame, |_: RotateTickets| service.rotate_tickets(caller)),
            RegisterInstance::KIND => self.answer(frame, |c| service.register_instance(caller, c)),
            RegisterCapabilities::KIND => self.answer(frame, |c| service.register_capabilities(caller, c)),
            DeregisterInstance::KIND => self.answer(frame, |c| service.deregister_instance(caller, c)),
            ReportLoad::KIND => self.answer(frame, |c| service.report_load(caller, c)),
            ReportCache::KIND => self.answer(frame, |c| service.report_cache(caller, c)),
            QueryPrefix::KIND => self.answer(frame, |c| service.query_prefix(caller, c)),
            Schedule::KIND => self.answer(frame, |c| service.schedule(caller, c)),
            UpdateRequest::KIND => self.answer(frame, |c| service.update_request(caller, c)),
            Reschedule::KIND => self.answer(frame, |c| service.reschedule(caller, c)),
            ExplainRequest::KIND => self.answer(frame, |c| service.explain_request(caller, c)),
            HoldInstance::KIND => self.answer(frame, |c| service.hold_instance(caller, c)),
            SetPlacement::KIND => self.answer(frame, |c| service.set_placement(caller, c)),
            ShowCopies::KIND => self.answer(frame, |_: ShowCopies| service.show_copies(caller)),
            ScheduleOnTerms::KIND => self.answer(frame, |c| service.schedule_on_terms(caller, c)),
            ScheduleWithGroups::KIND => self.answer(frame, |c| service.schedule_with_groups(caller, c)),
            ExplainPlacement::KIND => self.answer(frame, |c| service.explain_placement(caller, c)),
            SetClass::KIND => self.answer(frame, |c| service.set_class(caller, c)),
            SetWeight::KIND => self.answer(frame, |c| service.set_weight(caller, c)),
            ShowService::KIND => self.answer(frame, |_: ShowService| service.show_service(caller)),
            ShowFeeds::KIND => self.answer(frame, |_: ShowFeeds| service.show_feeds(caller)),
            ShowPlacement::KIND => self.answer(frame, |_: ShowPlacement| service.show_placement(caller)),
            ShowLimits::KIND => self.answer(frame, |_: ShowLimits| service.show_limits(caller)),
            PublishObject::KIND => self.answer(frame, |c| service.publish_object(caller, c)),
            FindObject::KIND => self.answer(frame, |c| service.find_object(caller, c)),
            HoldObject::KIND => self.answer(frame, |c| service.hold_object(caller, c)),
            ReportObject::KIND => self.answer(frame, |c| service.report_object(caller, c)),
            RenewObjects::KIND => self.answer(frame, |c| service.renew_objects(caller, c)),
            ReleaseObject::KIND => self.answer(frame, |c| service.release_object(caller, c)),
            ListObjects::KIND => self.answer(frame, |c| service.list_objects(caller, c)),
            DescribeObject::KIND => self.answer(frame, |c| service.describe_object(caller, c)),
            LocateObject::KIND => self.answer(frame, |c| service.locate_object(caller, c)),
            JoinRanks::KIND => self.answer(frame, |c| service.join_ranks(caller, c)),
            WantShards::KIND => self.answer(frame, |c| service.want_shards(caller, c)),
            GetPeerKeys::KIND => self.answer(frame, |c| service.get_peer_keys(caller, c)),
            kind => {
                let of_group = || self.dispatch_group(kind, frame);
                self.dispatch_member(kind, frame).or_else(of_group).unwrap_or(Err(CodecError::Kind(kind)))
            }
        }
    }

    /// Dispatches calls about process groups.
    fn dispatch_group(&self, kind: u16, frame: &[u8]) -> Option<Result<Vec<u8>, CodecError>> {
        let (service, caller) = (&*self.service, self.caller);
        match kind {
            RegisterProcess::KIND => Some(self.answer(frame, |c| service.register_process(caller, c))),
            UnregisterProcess::KIND => Some(self.answer(frame, |c| service.unregister_process(caller, c))),
            ReportProcess::KIND => Some(self.answer(frame, |c| service.report_process(caller, c))),
            AttachMember::KIND => Some(self.answer(frame, |c| service.attach_member(caller, c))),
            DetachMember::KIND => Some(self.answer(frame, |c| service.detach_member(caller, c))),
            ProposeChange::KIND => Some(self.answer(frame, |c| service.propose_change(caller, c))),
            ListWorlds::KIND => Some(self.answer(frame, |c| service.list_worlds(caller, c))),
            DescribeWorld::KIND => Some(self.answer(frame, |c| service.describe_world(caller, c))),
            _ => None,
        }
    }

    /// Dispatches calls about members: their incarnations and the slots that they own.
    fn dispatch_member(&self, kind: u16, frame: &[u8]) -> Option<Result<Vec<u8>, CodecError>> {
        let (service, caller) = (&*self.service, self.caller);
        match kind {
            Join::KIND => Some(self.answer(frame, |c| service.join(caller, c))),
            Heartbeat::KIND => Some(self.answer(frame, |c| service.heartbeat(caller, c))),
            SettleReport::KIND => Some(self.answer(frame, |c| service.settled(caller, c))),
            GetMoves::KIND => Some(self.answer(frame, |c| service.get_moves(caller, c))),
            Leave::KIND => Some(self.answer(frame, |c| service.leave(caller, c))),
            Drain::KIND => Some(self.answer(frame, |c| service.drain(caller, c))),
            Undrain::KIND => Some(self.answer(frame, |c| service.undrain(caller, c))),
            OfferMap::KIND => Some(self.answer(frame, |c| service.offer_map(caller, c))),
            GetIncarnation::KIND => Some(self.answer(frame, |c| service.get_incarnation(caller, c))),
            GetLastMember::KIND => Some(self.answer(frame, |c| service.get_last_member(caller, c))),
            AttachDevices::KIND => Some(self.answer(frame, |c| service.attach_devices(caller, c))),
            _ => None,
        }
    }

    /// Handles a datagram: a report without a reply. A refused report is only counted.
    pub(crate) fn datagram(&self, frame: &[u8]) {
        let (service, caller) = (&*self.service, self.caller);
        if let Err(error) = self.answer(frame, |c: ReportLoad| service.report_load(caller, c)) {
            self.bad_frame(&error.to_string());
        }
    }

    /// Decodes a request, checks the caller's rights, calls the service, and encodes the reply or the refusal.
    fn answer<C: CallMessage, R: Message>(
        &self,
        frame: &[u8],
        serve: impl FnOnce(C) -> Result<R, Refusal>,
    ) -> Result<Vec<u8>, CodecError> {
        let call = decode(frame)?;
        let result = self.permit(&call).and_then(|()| serve(call));
        let reply =
            result.and_then(|reply| encode(&reply).map_err(|e| Refusal::new(RefusalCode::TooLarge, e.to_string())));
        self.service.observe(Event::Called { method: C::METHOD, ok: reply.is_ok() });
        reply.or_else(|refusal| encode(&refusal))
    }

    fn get_map(&self, frame: &[u8]) -> Result<Vec<u8>, CodecError> {
        decode::<GetMap>(frame)?;
        self.service.observe(Event::Called { method: GetMap::METHOD, ok: true });
        let map = self.service.maps().borrow().clone();
        if map.state != self.state {
            self.began_anew();
        }
        Ok(map.frame.to_vec())
    }

    /// Closes the connection: its caller got the identity of another cluster state, whose epochs cannot be compared
    /// with those of the present one.
    fn began_anew(&self) {
        self.connection.close(CloseCode::StandingBy.wire(), b"the control plane has another cluster state now");
    }
}
