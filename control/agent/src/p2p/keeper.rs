//! Keeps what is held here known to the control plane, and brings its orders to the replicas they are for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane_rpc::p2p::{FetchOrder, FetchOrders, HoldObject, PublishObject, RenewObjects, WatchFetches};

use super::replica::{self, Replica};
use super::{StoreState, is_away};
use crate::error::Error;

/// How often the control plane hears of us: several times within a lease.
const RENEW: Duration = Duration::from_secs(1);
/// Orders that came before the number of the member they are for.
const EARLY: usize = 4096;

#[derive(Default)]
struct Table {
    replicas: BTreeMap<u64, Arc<Replica>>,
    early: Vec<FetchOrder>,
    stop: bool,
}

#[derive(Default)]
struct State {
    table: Mutex<Table>,
    wake: Condvar,
    follows: AtomicBool,
}

/// The keeper.
#[derive(Default)]
pub(super) struct Keeper {
    state: Arc<State>,
}

impl State {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change is whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: FetchOrder) {
        let mut table = self.table();
        match table.replicas.get(&order.member).map(Arc::clone) {
            Some(replica) => {
                drop(table);
                replica.order(order);
            }
            // The answer to the announcement is on its way. What is too much is told again when it is late.
            None if table.early.len() < EARLY => table.early.push(order),
            None => {}
        }
    }
}

/// Says that the stream has ended, when it is dropped with it.
struct Stream(Arc<State>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.follows.store(false, Ordering::Release);
        self.0.wake.notify_all();
    }
}

impl Keeper {
    /// Begins the stream of orders where it is not there.
    pub(super) fn follow(&self, shared: &StoreState) -> Result<(), Error> {
        if self.state.follows.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let stream = Stream(Arc::clone(&self.state));
        shared.link.stream(WatchFetches { client: shared.client }, move |FetchOrders { orders }| {
            orders.into_iter().for_each(|order| stream.0.order(order));
            true
        })
    }

    /// Announces a replica.
    pub(super) fn hold(&self, shared: &StoreState, replica: &Arc<Replica>) -> Result<(), Error> {
        let config = &shared.config;
        let (have, want) = replica.announced();
        let held = shared.link.call(HoldObject {
            client: shared.client,
            tenant: config.tenant.clone(),
            name: replica.name.clone(),
            version: replica.version,
            digest: replica.digest,
            segment: shared.engine.name().to_owned(),
            addresses: replica.regions.iter().map(|region| region.address()).collect(),
            origin: replica.origin,
            have,
            want,
            host: config.host.clone(),
            rack: config.rack.clone(),
            upload_bytes_per_second: config.upload_bytes_per_second,
            download_bytes_per_second: config.download_bytes_per_second,
        })?;
        let mut table = self.state.table();
        table.replicas.remove(&replica.member());
        replica.set_member(held.member);
        table.replicas.insert(held.member, Arc::clone(replica));
        let early = std::mem::take(&mut table.early);
        let (ours, others) = early.into_iter().partition(|order: &FetchOrder| order.member == held.member);
        table.early = others;
        drop(table);
        ours.into_iter().for_each(|order| replica.order(order));
        Ok(())
    }

    /// Announces a replica that the control plane does not know by this number any more, and its object before. Several
    /// threads may find that out: the first does it.
    pub(super) fn hold_again(&self, shared: &StoreState, replica: &Arc<Replica>, member: u64) -> Result<(), Error> {
        let _turn = replica.again.lock().unwrap_or_else(PoisonError::into_inner);
        if replica.member() != member || replica.leaving.load(Ordering::Acquire) {
            return Ok(());
        }
        shared.link.call(PublishObject {
            tenant: shared.config.tenant.clone(),
            name: replica.name.clone(),
            version: Some(replica.version),
            spec: replica::told(&replica.spec),
        })?;
        self.hold(shared, replica)?;
        // Those who are to follow it find it again.
        shared.join_ranks(replica, 0).map(drop)
    }

    pub(super) fn forget(&self, member: u64) {
        let mut table = self.state.table();
        table.replicas.remove(&member);
        table.early.retain(|order| order.member != member);
    }

    pub(super) fn stop(&self) {
        self.state.table().stop = true;
        self.state.wake.notify_all();
    }

    /// Lives until it is stopped; silent while nothing is held.
    pub(super) fn run(&self, shared: &StoreState) {
        loop {
            let table = self.state.table();
            if table.stop {
                return;
            }
            let (table, _) = self.state.wake.wait_timeout(table, RENEW).unwrap_or_else(PoisonError::into_inner);
            if table.stop {
                return;
            }
            let held: Vec<(u64, Arc<Replica>)> =
                table.replicas.iter().map(|(&member, replica)| (member, Arc::clone(replica))).collect();
            drop(table);
            if let Err(error) = shared.guard.refresh(shared, !held.is_empty())
                && !is_away(&error)
            {
                tracing::warn!("no newer ticket for peers: {error}");
            }
            if !held.is_empty() {
                self.renew(shared, &held);
            }
        }
    }

    /// A failure is tried again at the next turn. Numbers are those from before the call: one that was given since is
    /// not in its answer.
    fn renew(&self, shared: &StoreState, held: &[(u64, Arc<Replica>)]) {
        let _ = self.follow(shared);
        let renewed = match shared.link.call(RenewObjects { client: shared.client }) {
            Ok(renewed) => renewed,
            Err(error) => {
                if !is_away(&error) {
                    tracing::warn!("replicas could not be renewed: {error}");
                }
                return;
            }
        };
        for (member, replica) in held.iter().filter(|(member, _)| !renewed.members.contains(member)) {
            if let Err(error) = self.hold_again(shared, replica, *member) {
                tracing::warn!(name = replica.name, "a replica could not be announced again: {error}");
            }
        }
    }
}
