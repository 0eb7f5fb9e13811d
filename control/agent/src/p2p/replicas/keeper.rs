//! Keeper: keeps the replicas of this process registered in the control plane's catalog, and routes its orders to them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane_rpc::p2p::FetchOrder;
use kvplane_transfer::TransferEngine;

use crate::error::Error;
use crate::p2p::catalog::Catalog;
use crate::p2p::guard::Guard;
use crate::p2p::replica::Replica;

/// Interval of the renewals: several times within a lease.
const RENEW: Duration = Duration::from_secs(1);
/// Limit of orders that arrived before the member number that they are for.
const EARLY: usize = 4096;

/// Replicas by member number.
#[derive(Default)]
struct Table {
    replicas: BTreeMap<u64, Arc<Replica>>,
    early: Vec<FetchOrder>,
    stop: bool,
}

/// State that the stream of orders shares with the keeper. It has no link to the control plane: the link's thread owns
/// the stream.
#[derive(Default)]
struct State {
    table: Mutex<Table>,
    wake: Condvar,
    /// True while the stream is open.
    follows: AtomicBool,
}

/// Keeper of a store's replicas.
pub(in crate::p2p) struct Keeper {
    catalog: Arc<Catalog>,
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
                replica.fetch.order(order.into());
            }
            // The reply to the announcement is in flight. Orders over the limit are repeated by the control plane.
            None if table.early.len() < EARLY => table.early.push(order),
            None => {}
        }
    }

    /// Notes the member number of an announced replica, and gives it the orders that came before the number.
    fn insert(&self, replica: &Arc<Replica>, member: u64) {
        let mut table = self.table();
        table.replicas.remove(&replica.member());
        replica.set_member(member);
        table.replicas.insert(member, Arc::clone(replica));
        let early = std::mem::take(&mut table.early);
        let (ours, others) = early.into_iter().partition(|order: &FetchOrder| order.member == member);
        table.early = others;
        drop(table);
        ours.into_iter().for_each(|order| replica.fetch.order(order.into()));
    }

    fn remove(&self, member: u64) {
        let mut table = self.table();
        table.replicas.remove(&member);
        table.early.retain(|order| order.member != member);
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
    /// Creates the keeper of a process without replicas, and opens the stream of orders.
    ///
    /// # Errors
    /// When the link to the control plane has ended.
    pub(super) fn start(catalog: Arc<Catalog>) -> Result<Self, Error> {
        let keeper = Self { catalog, state: Arc::default() };
        keeper.follow()?;
        Ok(keeper)
    }

    /// Opens the stream of orders if it is not open.
    fn follow(&self) -> Result<(), Error> {
        if self.state.follows.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let stream = Stream(Arc::clone(&self.state));
        self.catalog.watch(move |order| stream.0.order(order))
    }

    /// Announces a replica to the control plane.
    ///
    /// # Errors
    /// When the catalog does not know the object, or the control plane does not answer.
    pub(super) fn hold(&self, replica: &Arc<Replica>) -> Result<(), Error> {
        let member = self.catalog.hold(replica)?;
        self.state.insert(replica, member);
        Ok(())
    }

    /// Announces a replica again that the control plane no longer knows by this member number, after publishing its
    /// object again. Several threads may notice that; the first one announces.
    ///
    /// # Errors
    /// When the control plane refuses the object, or does not answer.
    pub(in crate::p2p) fn hold_again(&self, replica: &Arc<Replica>, member: u64) -> Result<(), Error> {
        let _turn = replica.announcing();
        if replica.member() != member || replica.is_leaving() {
            return Ok(());
        }
        self.catalog.publish(&replica.name, Some(replica.version), &replica.spec)?;
        self.hold(replica)?;
        // Ranks that follow this one find it again.
        self.catalog.join_ranks(replica, 0).map(drop)
    }

    /// Withdraws a replica's request for missing shards. The catalog has no call for that: the replica is announced
    /// again, and the former member released. Peers that fetch from the former member get an order for another one,
    /// which may be the same memory.
    ///
    /// # Errors
    /// When the replica cannot be announced again; the former member still has the request then.
    pub(in crate::p2p) fn hold_without_wants(&self, replica: &Arc<Replica>) -> Result<(), Error> {
        let _turn = replica.announcing();
        let member = replica.member();
        replica.fetch.withdraw();
        self.hold(replica)?;
        // If this is lost, the member is removed when a peer fails to fetch from it.
        let _ = self.catalog.release(member, false);
        Ok(())
    }

    /// Routes no more orders to a member.
    pub(super) fn forget(&self, member: u64) {
        self.state.remove(member);
    }

    /// Ends [`Self::run`].
    pub(super) fn stop(&self) {
        self.state.table().stop = true;
        self.state.wake.notify_all();
    }

    /// Renews the replicas, and the engine's tickets, until the keeper is stopped; renews no replicas while none is
    /// held.
    pub(super) fn run(&self, engine: &TransferEngine, mut guard: Guard) {
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
            if let Err(error) = guard.refresh(&self.catalog, engine, !held.is_empty())
                && !error.is_unanswered()
            {
                tracing::warn!("cannot renew the ticket for peers: {error}");
            }
            if !held.is_empty() {
                self.renew(&held);
            }
        }
    }

    /// Renews all replicas, and announces those again that the control plane forgot. A failure is retried in the next
    /// round. The member numbers are those from before the call: newer ones are not in its reply.
    fn renew(&self, held: &[(u64, Arc<Replica>)]) {
        let _ = self.follow();
        let known = match self.catalog.renew() {
            Ok(known) => known,
            Err(error) => {
                if !error.is_unanswered() {
                    tracing::warn!("cannot renew the replicas: {error}");
                }
                return;
            }
        };
        for (member, replica) in held.iter().filter(|(member, _)| !known.contains(member)) {
            if let Err(error) = self.hold_again(replica, *member) {
                tracing::warn!(name = replica.name, "cannot announce a replica again: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_cluster::p2p::{Layout, ObjectSpec, ShardSet};

    fn replica(name: &str) -> Arc<Replica> {
        let layout = Layout::new(vec![16], 8).unwrap();
        let spec = Arc::new(ObjectSpec { layout, hashes: vec![0; 2], about: Vec::new() });
        Arc::new(Replica::partial(name, 1, spec, &[], ShardSet::empty(2), ShardSet::full(2)))
    }

    fn order(member: u64, shard: u32) -> FetchOrder {
        FetchOrder { member, shard, source: 9, segment: "s".into(), address: 0 }
    }

    #[test]
    fn orders_reach_their_member_also_if_they_are_early() {
        let (state, one, other) = (State::default(), replica("one"), replica("other"));
        state.order(order(5, 1));
        state.order(order(6, 0));
        state.insert(&one, 5);
        assert_eq!(one.fetch.next_order(), Some(order(5, 1).into()));
        state.order(order(5, 0));
        assert_eq!(one.fetch.next_order(), Some(order(5, 0).into()));
        // Early orders for a member that is gone are dropped, and a replica has one number at a time.
        state.remove(6);
        state.insert(&other, 6);
        state.insert(&other, 7);
        let counts = || {
            let table = state.table();
            (table.replicas.len(), table.early.len())
        };
        assert_eq!((other.member(), counts()), (7, (2, 0)));
        state.order(order(6, 1));
        assert_eq!(counts(), (2, 1));
    }
}
