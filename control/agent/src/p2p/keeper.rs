//! Keeper: keeps the replicas of this process registered in the control plane's catalog, and routes its orders to them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane_rpc::p2p::{FetchOrder, FetchOrders, HoldObject, PublishObject, RenewObjects, WatchFetches};

use super::replica::{self, Replica};
use super::{StoreState, is_away};
use crate::error::Error;

/// Interval of the renewals: several times within a lease.
const RENEW: Duration = Duration::from_secs(1);
/// Limit of orders that arrived before the member number that they are for.
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

/// Keeper of a store's replicas.
#[derive(Default)]
pub(super) struct Keeper {
    state: Arc<State>,
}

impl State {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change under the lock is complete.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: FetchOrder) {
        let mut table = self.table();
        match table.replicas.get(&order.member).map(Arc::clone) {
            Some(replica) => {
                drop(table);
                replica.order(order);
            }
            // The reply to the announcement is in flight. Orders over the limit are repeated by the control plane.
            None if table.early.len() < EARLY => table.early.push(order),
            None => {}
        }
    }
}

/// Marks the stream as ended when it is dropped with it.
struct Stream(Arc<State>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.follows.store(false, Ordering::Release);
        self.0.wake.notify_all();
    }
}

impl Keeper {
    /// Opens the stream of orders if it is not open.
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

    /// Announces a replica to the control plane.
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

    /// Announces a replica again that the control plane no longer knows by this member number, after publishing its
    /// object again. Several threads may notice that; the first one announces.
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
        // Ranks that follow this one find it again.
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

    /// Renews the replicas until the keeper is stopped; sends nothing while none is held.
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
                tracing::warn!("cannot renew the ticket for peers: {error}");
            }
            if !held.is_empty() {
                self.renew(shared, &held);
            }
        }
    }

    /// Renews all replicas, and announces those again that the control plane forgot. A failure is retried in the next
    /// round. The member numbers are those from before the call: newer ones are not in its reply.
    fn renew(&self, shared: &StoreState, held: &[(u64, Arc<Replica>)]) {
        let _ = self.follow(shared);
        let renewed = match shared.link.call(RenewObjects { client: shared.client }) {
            Ok(renewed) => renewed,
            Err(error) => {
                if !is_away(&error) {
                    tracing::warn!("cannot renew the replicas: {error}");
                }
                return;
            }
        };
        for (member, replica) in held.iter().filter(|(member, _)| !renewed.members.contains(member)) {
            if let Err(error) = self.hold_again(shared, replica, *member) {
                tracing::warn!(name = replica.name, "cannot announce a replica again: {error}");
            }
        }
    }
}
