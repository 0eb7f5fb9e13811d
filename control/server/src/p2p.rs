//! Host of the P2P store's catalog: calls it on the control plane's thread, and advances its time.
//!
//! The catalog is in memory only. A control plane that starts knows no objects; their holders notice that within a
//! lease, and announce them again. Fetch orders go to a process over its stream; a process that does not read loses its
//! stream, and gets all outstanding orders again over the next one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvplane_cluster::p2p::{Grant, Layout, ObjectError, ObjectName, ObjectSpec as Spec, Objects, ObjectsConfig};
use kvplane_rpc::message::EmptyReply;
use kvplane_rpc::p2p::{
    DescribeObject, FetchOrders, FindObject, HoldObject, JoinRanks, ListObjects, LocateObject, ObjectFound, ObjectHeld,
    ObjectList, ObjectMembers, ObjectPlaces, ObjectPublished, ObjectReleased, ObjectSpec, ObjectsRenewed,
    PublishObject, RanksJoined, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use kvplane_rpc::{ItemFrame, Refusal, RefusalCode, item_frame};
use tokio::sync::{Notify, mpsc};

use crate::server::clock::HostClock;

/// Most processes with a stream of fetch orders.
const WATCHERS: usize = 8192;
/// Most frames of orders queued for a process.
const ORDERS: usize = 1024;
/// Orders in one frame: with the longest names they fit a message.
const ORDERS_PER_FRAME: usize = 4096;
/// Objects in a page: with the longest names they fit a message.
const PAGE_OBJECTS: usize = 1024;

struct Core {
    objects: Objects,
    watchers: BTreeMap<u64, mpsc::Sender<ItemFrame>>,
}

/// Host of the catalog.
pub(crate) struct P2p {
    core: Mutex<Core>,
    rearm: Notify,
    clock: HostClock,
}

impl P2p {
    /// Creates a host without objects. Both numbers are drawn at random.
    pub(crate) fn new(seed: u64, first: u64) -> Self {
        let objects = Objects::new(ObjectsConfig { seed, ..ObjectsConfig::default() }, first, 0);
        let core = Mutex::new(Core { objects, watchers: BTreeMap::new() });
        Self { core, rearm: Notify::new(), clock: HostClock::start() }
    }

    fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        // The catalog is consistent between calls; only the call that panicked is lost.
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the catalog, and sends the orders that follow.
    fn with<T>(&self, call: impl FnOnce(&mut Objects, u64) -> Result<T, ObjectError>) -> Result<T, Refusal> {
        let mut core = self.core();
        let due_ns = core.objects.due_ns();
        let result = call(&mut core.objects, self.now_ns());
        core.tell();
        if core.objects.due_ns().is_some_and(|now_due| due_ns.is_none_or(|due_ns| now_due < due_ns)) {
            self.rearm.notify_one();
        }
        result.map_err(|error| refusal(&error))
    }

    /// Advances the catalog's time, for as long as it is polled.
    pub(crate) async fn run(&self) {
        loop {
            let due_ns = {
                let mut core = self.core();
                core.objects.tick(self.now_ns());
                core.tell();
                core.objects.due_ns()
            };
            tokio::select! {
                () = self.clock.sleep_until(due_ns) => {}
                () = self.rearm.notified() => {}
            }
        }
    }

    pub(crate) fn publish(&self, call: PublishObject) -> Result<ObjectPublished, Refusal> {
        let PublishObject { tenant, name, version, spec } = call;
        let layout = Layout::new(spec.sizes, spec.shard_bytes).map_err(|error| refusal(&error))?;
        let spec = Spec { layout, hashes: spec.hashes, about: spec.about };
        let version =
            self.with(|objects, now_ns| objects.publish(now_ns, ObjectName::new(&tenant, &name), version, spec))?;
        Ok(ObjectPublished { version })
    }

    pub(crate) fn find(&self, call: &FindObject) -> Result<ObjectFound, Refusal> {
        self.with(|objects, _| {
            let (version, spec) = objects.find(ObjectName::new(&call.tenant, &call.name), call.version)?;
            let (sizes, shard_bytes) = (spec.layout.sizes().to_vec(), spec.layout.shard_bytes());
            let spec = ObjectSpec { sizes, shard_bytes, hashes: spec.hashes.clone(), about: spec.about.clone() };
            Ok(ObjectFound { version, spec })
        })
    }

    pub(crate) fn hold(&self, call: HoldObject) -> Result<ObjectHeld, Refusal> {
        let HoldObject { tenant, name, version, digest, hold } = call;
        self.with(|objects, now_ns| {
            let member = objects.hold(now_ns, ObjectName::new(&tenant, &name), version, digest, hold)?;
            Ok(ObjectHeld { member, lease_ns: objects.lease_ns() })
        })
    }

    pub(crate) fn report(&self, call: &ReportObject) -> Result<EmptyReply, Refusal> {
        self.with(|objects, now_ns| objects.report(now_ns, call.client, call.member, &call.got, &call.failed))?;
        Ok(EmptyReply)
    }

    pub(crate) fn want(&self, call: &WantShards) -> Result<EmptyReply, Refusal> {
        self.with(|objects, now_ns| objects.want(now_ns, call.client, call.member, &call.want, &call.failed))?;
        Ok(EmptyReply)
    }

    pub(crate) fn join_ranks(&self, call: &JoinRanks) -> Result<RanksJoined, Refusal> {
        let half = usize::from(call.half);
        let parent = self.with(|objects, _| objects.join_ranks(call.client, call.member, &call.join, half))?;
        Ok(RanksJoined { parent })
    }

    pub(crate) fn renew(&self, call: RenewObjects) -> Result<ObjectsRenewed, Refusal> {
        self.with(|objects, now_ns| Ok(ObjectsRenewed { members: objects.renew(now_ns, call.client) }))
    }

    pub(crate) fn release(&self, call: ReleaseObject) -> Result<ObjectReleased, Refusal> {
        self.with(|objects, now_ns| {
            let readers = objects.release(now_ns, call.client, call.member, call.wait)?;
            Ok(ObjectReleased { readers: readers as u64 })
        })
    }

    pub(crate) fn list(&self, call: &ListObjects) -> Result<ObjectList, Refusal> {
        let most = (call.limit as usize).clamp(1, PAGE_OBJECTS);
        let after = call.after.as_ref().map(|(name, version)| (name.as_str(), *version));
        self.with(|objects, _| {
            let mut rows = objects.list(&call.tenant, &call.prefix, after, most + 1);
            let more = rows.len() > most;
            rows.truncate(most);
            Ok(ObjectList { objects: rows, more })
        })
    }

    pub(crate) fn describe(&self, call: &DescribeObject) -> Result<ObjectMembers, Refusal> {
        self.with(|objects, _| {
            let (members, lost) = objects.describe(ObjectName::new(&call.tenant, &call.name), call.version)?;
            Ok(ObjectMembers { members, lost })
        })
    }

    pub(crate) fn locate(&self, call: &LocateObject) -> Result<ObjectPlaces, Refusal> {
        let name = ObjectName::new(&call.tenant, &call.name);
        self.with(|objects, _| {
            let places = objects.locate(name, call.version, call.buffer as usize, &call.near, call.client)?;
            Ok(ObjectPlaces { places })
        })
    }

    pub(crate) fn watch(&self, call: WatchFetches) -> Result<mpsc::Receiver<ItemFrame>, Refusal> {
        let mut core = self.core();
        core.watchers.retain(|_, watcher| !watcher.is_closed());
        if core.watchers.len() >= WATCHERS && !core.watchers.contains_key(&call.client) {
            let reason = format!("{WATCHERS} processes fetch objects already, which is the limit");
            return Err(Refusal::new(RefusalCode::LimitReached, reason));
        }
        let (items, receiver) = mpsc::channel(ORDERS);
        let told = core.objects.told(call.client);
        core.watchers.insert(call.client, items);
        core.send(call.client, &told);
        Ok(receiver)
    }
}

impl Core {
    /// Sends new fetch orders, to each process in as few frames as possible.
    fn tell(&mut self) {
        let mut by_client: BTreeMap<u64, Vec<Grant>> = BTreeMap::new();
        for grant in self.objects.poll_grants() {
            by_client.entry(grant.client).or_default().push(grant);
        }
        for (client, grants) in by_client {
            self.send(client, &grants);
        }
    }

    /// A process without a stream gets its orders when it opens one; a process that does not read loses its stream.
    fn send(&mut self, client: u64, grants: &[Grant]) {
        for some in grants.chunks(ORDERS_PER_FRAME) {
            let Some(watcher) = self.watchers.get(&client) else { return };
            let orders = FetchOrders { orders: some.iter().map(|grant| grant.order.clone()).collect() };
            if !item_frame(&orders).is_ok_and(|frame| watcher.try_send(frame).is_ok()) {
                self.watchers.remove(&client);
            }
        }
    }
}

fn refusal(error: &ObjectError) -> Refusal {
    let code = match error {
        ObjectError::Malformed(_) => RefusalCode::BadRequest,
        ObjectError::NotFound { .. } => RefusalCode::NotFound,
        ObjectError::Differs { .. } => RefusalCode::AlreadyExists,
        ObjectError::UnknownMember { .. } => RefusalCode::UnknownClient,
        ObjectError::Limit { .. } => RefusalCode::LimitReached,
    };
    Refusal::new(code, error.to_string())
}
