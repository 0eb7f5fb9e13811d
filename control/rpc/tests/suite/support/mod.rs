//! A recording control plane for tests of the endpoints: it knows one map, records its calls, and decides nothing.

#![allow(dead_code, unreachable_pub)] // Not every test file uses everything.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::ClusterMap;
use kvplane_proto::rng::Rng;
use kvplane_rpc::message::*;
use kvplane_rpc::{
    Authority, Caller, Client, ClientConfig, ClusterName, ConnectError, Event, ItemFrame, Limits, MapFrame, Refusal,
    RefusalCode, Role, ServeError, Server, ServerConfig, Service, ServiceState, item_frame,
};
use tokio::sync::{mpsc, watch};

/// A directory that is removed with the test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvplane-rpc-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn cluster() -> ClusterName {
    ClusterName::new("test").expect("a good name")
}

pub fn map(epoch: u64) -> ClusterMap {
    ClusterMap { epoch: Epoch(epoch), replicas: 1, members: vec![], former: None }
}

pub struct Recorder {
    pub maps: watch::Sender<MapFrame>,
    pub events: Mutex<Vec<Event>>,
    pub callers: Mutex<Vec<Caller>>,
    pub state_id: u64,
}

impl Recorder {
    pub fn new(state_id: u64, epoch: u64) -> Arc<Self> {
        let frame = MapFrame::new(&MapReply { map: map(epoch) }, state_id).expect("a small map");
        Arc::new(Self { maps: watch::channel(frame).0, events: Mutex::default(), callers: Mutex::default(), state_id })
    }

    /// True if the map of a lost state may follow.
    pub fn set_provisional(&self, is_provisional: bool) {
        self.maps.send_modify(|frame| *frame = frame.clone().provisional(is_provisional));
    }

    pub fn publish(&self, epoch: u64) {
        let frame = MapFrame::new(&MapReply { map: map(epoch) }, self.state_id).expect("a small map");
        self.maps.send_modify(|former| *former = frame.replacing(former));
    }

    pub fn saw(&self, event: Event) -> bool {
        self.events.lock().expect("no panic").contains(&event)
    }

    /// Waits until `event` was observed; the test's limit ends a wait in vain.
    pub async fn until(&self, event: Event) {
        while !self.saw(event) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Service for Recorder {
    fn hello(&self, caller: Caller, _: Hello) -> Result<Welcome, Refusal> {
        self.callers.lock().expect("no panic").push(caller);
        Ok(Welcome {
            software: "test".to_owned(),
            state_id: self.state_id,
            epoch: self.maps.borrow().epoch(),
            heartbeat_interval_ns: 1,
            heartbeat_deadline_ns: 2,
        })
    }
    fn join(&self, _: Caller, _: Join) -> Result<JoinReply, Refusal> {
        Ok(JoinReply { epoch: 1, heartbeat_interval_ns: 1, heartbeat_deadline_ns: 2 })
    }
    fn heartbeat(&self, _: Caller, _: Heartbeat) -> Result<Alive, Refusal> {
        Ok(Alive { epoch: 1, since: 1 })
    }
    fn settled(&self, _: Caller, _: SettleReport) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn get_moves(&self, _: Caller, _: GetMoves) -> Result<Moves, Refusal> {
        Ok(Moves { unsettled: 0, behind: false, draining: false })
    }
    fn leave(&self, _: Caller, _: Leave) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn offer_map(&self, _: Caller, _: OfferMap) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn get_last_member(&self, _: Caller, call: GetLastMember) -> Result<LastMember, Refusal> {
        Ok(LastMember { incarnation: call.node })
    }

    fn get_incarnation(&self, _: Caller, call: GetIncarnation) -> Result<LastIncarnation, Refusal> {
        Ok(LastIncarnation { incarnation: call.node })
    }
    fn attach_devices(&self, _: Caller, _: AttachDevices) -> Result<DevicesKept, Refusal> {
        Ok(DevicesKept { since: 1 })
    }
    fn drain(&self, _: Caller, _: Drain) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn undrain(&self, _: Caller, _: Undrain) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn register_segment(&self, _: Caller, _: RegisterSegment) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn renew_segments(&self, _: Caller, _: RenewSegments) -> Result<RenewReply, Refusal> {
        Ok(RenewReply { segments: 0 })
    }
    fn unregister_segment(&self, _: Caller, _: UnregisterSegment) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn get_segment(&self, _: Caller, call: GetSegment) -> Result<SegmentReply, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, format!("no segment {:?}", call.name)))
    }
    fn list_segments(&self, _: Caller, _: ListSegments) -> Result<SegmentList, Refusal> {
        Ok(SegmentList { segments: vec![], more: false })
    }
    fn status(&self, _: Caller) -> Result<StatusReply, Refusal> {
        Err(Refusal::new(RefusalCode::ShuttingDown, "a test"))
    }
    fn report_shard(&self, _: Caller, _: ReportShard) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn report_hot(&self, _: Caller, _: ReportHot) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }
    fn list_hot(&self, _: Caller, _: ListHot) -> Result<HotList, Refusal> {
        Ok(HotList { nodes: Vec::new() })
    }
    fn list_shards(&self, _: Caller, _: ListShards) -> Result<ShardList, Refusal> {
        Ok(ShardList { nodes: Vec::new() })
    }

    fn set_tenant(&self, _: Caller, _: SetTenant) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn remove_tenant(&self, _: Caller, _: RemoveTenant) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn list_tenants(&self, _: Caller) -> Result<TenantList, Refusal> {
        Ok(TenantList { strict: false, pool_bytes: 0, tenants: Vec::new() })
    }

    fn list_tenant_ssds(&self, _: Caller) -> Result<TenantSsdList, Refusal> {
        Ok(TenantSsdList { ssd_bytes: 0, tenants: Vec::new() })
    }

    fn sync_tenant_ssds(&self, _: Caller, _: SyncTenantSsds) -> Result<TenantSsdLeases, Refusal> {
        Ok(TenantSsdLeases { tenants: Vec::new() })
    }

    fn sync_tenants(&self, _: Caller, _: SyncTenants) -> Result<TenantLeases, Refusal> {
        Ok(TenantLeases { strict: false, tenants: Vec::new() })
    }

    fn get_ticket(&self, _: Caller, _: GetTicket) -> Result<TicketReply, Refusal> {
        Ok(TicketReply { wanted: false, ticket: Vec::new(), secret: Vec::new(), valid_ns: 0 })
    }

    fn get_ticket_keys(&self, caller: Caller, call: GetTicketKeys) -> Result<TicketKeys, Refusal> {
        let ticket = self.get_ticket(caller, GetTicket { holder: call.node, tenant: None })?;
        Ok(TicketKeys { seconds: 0, keys: Vec::new(), ticket })
    }

    fn rotate_tickets(&self, _: Caller) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn watch_orders(&self, _: Caller, call: WatchOrders) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let (send, receive) = mpsc::channel(4);
        for number in 0..3 {
            let order = Order::Find { digests: vec![u128::from(call.node)] };
            send.try_send(item_frame(&NodeOrder { number, order }).expect("a small item")).expect("there is room");
        }
        Ok(receive)
    }

    fn answer_order(&self, _: Caller, _: AnswerOrder) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn report_events(&self, _: Caller, _: ReportEvents) -> Result<EmptyReply, Refusal> {
        Ok(EmptyReply)
    }

    fn watch_events(&self, _: Caller) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        Err(Refusal::new(RefusalCode::NotFound, "no events here"))
    }

    fn report_tiers(&self, _: Caller, _: ReportTiers) -> Result<TierOrders, Refusal> {
        Ok(TierOrders { orders: vec![] })
    }
    fn list_tiers(&self, _: Caller, _: ListTiers) -> Result<TierList, Refusal> {
        Ok(TierList { nodes: vec![] })
    }
    fn order_tiers(&self, _: Caller, _: OrderTiers) -> Result<TiersOrdered, Refusal> {
        Ok(TiersOrdered { orders: vec![] })
    }
    fn maps(&self) -> watch::Receiver<MapFrame> {
        self.maps.subscribe()
    }
    fn observe(&self, event: Event) {
        self.events.lock().expect("no panic").push(event);
    }
}

/// Short waits, so that tests of dead peers end soon.
pub fn limits() -> Limits {
    Limits {
        call_deadline: Duration::from_secs(2),
        connect_deadline: Duration::from_secs(2),
        recheck_interval: Duration::from_millis(200),
        idle_timeout: Duration::from_millis(1500),
        keep_alive_interval: Duration::from_millis(300),
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(50),
        ..Limits::DEFAULT
    }
}

pub struct Rig {
    pub authority: Authority,
    pub service: Arc<Recorder>,
    pub server: Server,
}

impl Rig {
    pub async fn start() -> Self {
        Self::start_with(limits()).await
    }

    pub async fn start_with(limits: Limits) -> Self {
        let authority = Authority::generate(&cluster()).expect("an authority");
        let service = Recorder::new(1, 1);
        let server = serve(&authority, SocketAddr::from(([127, 0, 0, 1], 0)), &service, limits).await;
        Self { authority, service, server }
    }

    pub fn config(&self, role: Role) -> ClientConfig {
        ClientConfig {
            address: self.server.address(),
            cluster: cluster(),
            trust: self.authority.trust().clone(),
            identity: self.authority.issue(role).expect("an identity"),
            software: "test client".to_owned(),
            limits: limits(),
        }
    }

    pub async fn client(&self, role: Role) -> Client {
        connect(&self.config(role)).await.expect("a connection")
    }
}

pub async fn serve(authority: &Authority, listen: SocketAddr, service: &Arc<Recorder>, limits: Limits) -> Server {
    let config = ServerConfig {
        listen,
        cluster: authority.cluster().clone(),
        identity: authority.issue(Role::Control).expect("an identity"),
        trust: authority.trust().clone(),
        reset_secret: authority.reset_secret(),
        limits,
    };
    // A closed server frees its port only when its runtime runs.
    loop {
        match Server::start(&config, ServiceState::Serving(service.clone())) {
            Err(ServeError::Listen { source, .. }) if source.kind() == ErrorKind::AddrInUse => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            started => return started.expect("a server"),
        }
    }
}

pub async fn connect(config: &ClientConfig) -> Result<Client, ConnectError> {
    Ok(Client::connect(config, Rng::new(1, "test")).await?.0)
}

/// Runs a test on a runtime like the control plane's, with a limit on its time.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        tokio::time::timeout(Duration::from_secs(30), test).await.expect("the test hangs");
    });
}
