//! The main loop of a control plane: serves with its own state, or takes turns with others as leader and standby.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvplane_cluster::{Cluster, ClusterConfig, Record};
use kvplane_conductor::conductor::ConductorConfig;
use kvplane_rpc::{LocalCluster, Publication, Server, ServiceState};
use kvplane_sys::random::random_u64;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::{Id, JoinSet};

use super::{EndError, Role};
use crate::cluster::{ClusterHost, port_probe};
use crate::conductor::store_blocks::{self, StoreBlocks};
use crate::conductor::{ConductorService, DecodedRecords, RestoredConductor, SnapshotFiles, copies};
use crate::config::StartError;
use crate::control::Control;
use crate::credentials::{LOOK_AGAIN, Source};
use crate::events::publisher;
use crate::http;
use crate::http::access::Access;
use crate::http::metadata::MetadataLimits;
use crate::http::objects::ObjectsAccess;
use crate::p2p::P2p;
use crate::store::Store;
use crate::store::etcd::{Etcd, Leadership, Takeover};
use crate::tickets::{Keep, TicketConfig, Tickets};
use crate::worlds::{StoredWorlds, Worlds, WorldsConfig};

/// Time within a shutdown for close frames to reach the callers.
const GOODBYE: Duration = Duration::from_millis(500);

/// Resources of a started control plane.
pub(super) struct ControlProcess {
    pub(super) server: Server,
    pub(super) http: Option<(Arc<TcpListener>, SocketAddr)>,
    pub(super) events: Option<(Arc<TcpListener>, SocketAddr)>,
    pub(super) access: Access,
    pub(super) metadata: Option<MetadataLimits>,
    pub(super) local: LocalCluster,
    pub(super) source: Source,
    pub(super) mark: Option<(Vec<u8>, Vec<u8>)>,
    pub(super) publication: Option<Publication>,
    pub(super) rest: Rest,
    pub(super) role: watch::Sender<Role>,
}

/// Background tasks of a leader. Each lasts as long as the leadership; one that ends has a bug, and continuing without
/// it would report a healthy service that lacks one part. Dropping this aborts them all.
#[derive(Default)]
struct Parts {
    tasks: JoinSet<()>,
    names: BTreeMap<Id, &'static str>,
}

impl Parts {
    fn spawn(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        let id = self.tasks.spawn(part).id();
        self.names.insert(id, name);
    }

    /// Waits until one of them ends, and returns the reason for which the control plane cannot continue; pends while
    /// there is none.
    async fn one_ended(&mut self) -> String {
        let Some(ended) = self.tasks.join_next_with_id().await else { return std::future::pending().await };
        let (id, how) = match ended {
            Ok((id, ())) => (id, "it returned".to_owned()),
            Err(error) => (error.id(), error.to_string()),
        };
        let name = self.names.get(&id).copied().unwrap_or("a part");
        format!("{name} ended unexpectedly: {how}; this is a bug")
    }
}

/// Settings from which a control plane is built once its state is known.
pub(super) struct Rest {
    pub(super) cluster: ClusterConfig,
    pub(super) tickets: Option<TicketConfig>,
    pub(super) strict_tenants: bool,
    pub(super) objects: ObjectsAccess,
    pub(super) conductor: Option<ConductorConfig>,
    /// Snapshots of the Conductor's index, if they are kept.
    pub(super) snapshots: Option<SnapshotFiles>,
    pub(super) worlds: WorldsConfig,
    /// Time without a call of a process of a world after which the control plane ends; none if it does not.
    pub(super) stop_when_idle: Option<Duration>,
}

/// Place of the state.
pub(super) enum State {
    /// The state belongs to this process alone, and `Control` serves it.
    Own(Arc<Control>),
    /// The state is in etcd.
    Shared(Etcd),
}

/// Restores the Conductor from these records, if one is configured; its hashes are salted at random. For `grace` no
/// instance is suspect for its silence.
fn restore_conductor(
    config: Option<ConductorConfig>,
    records: &[Record],
    grace: Duration,
) -> Result<Option<RestoredConductor>, StartError> {
    let Some(mut config) = config else { return Ok(None) };
    config.scheduler.index.seed = random_u64().map_err(StartError::Randomness)?;
    let decoded = DecodedRecords::of(records).map_err(StartError::Conductor)?;
    let first = random_u64().map_err(StartError::Randomness)?;
    decoded.restore(config, first, grace).map(Some).map_err(StartError::Conductor)
}

impl Rest {
    /// Builds the control plane with this state.
    pub(super) fn control(&self, store: Store, records: Vec<Record>, keep: Keep) -> Result<Arc<Control>, StartError> {
        let tickets = self.tickets.map(|tickets| Tickets::open(&self.cluster.cluster, &tickets, keep)).transpose()?;
        let grace = Duration::from_nanos(self.cluster.restart_grace_ns);
        let mut conductor = restore_conductor(self.conductor.clone(), &records, grace)?;
        if let Some((restored, files)) = conductor.as_mut().zip(self.snapshots.as_ref()) {
            files.adopt_all(store.state_id(), &mut restored.conductor);
        }
        let stored = StoredWorlds::of(&records).map_err(StartError::Worlds)?;
        let cluster = Cluster::new(self.cluster.clone(), records, 0).map_err(StartError::Cluster)?;
        let cluster = ClusterHost::new(cluster, store, tickets, self.strict_tenants);
        let cluster = Arc::new(cluster.map_err(|refusal| StartError::FirstChange(refusal.reason))?);
        let p2p =
            P2p::new(random_u64().map_err(StartError::Randomness)?, random_u64().map_err(StartError::Randomness)?);
        let conductor = conductor
            .map(|restored| Arc::new(ConductorService::new(restored, Arc::clone(&cluster), self.snapshots.clone())));
        let seed = random_u64().map_err(StartError::Randomness)?;
        let worlds = Worlds::new(self.worlds, stored, Arc::clone(&cluster), seed);
        let worlds = worlds.map_err(|refusal| StartError::FirstChange(refusal.reason))?;
        Ok(Arc::new(Control::new(cluster, conductor, p2p, worlds)))
    }
}

/// Reloads replaced certificates, for as long as it is polled. Invalid files are skipped: the former certificates stay
/// in use, and the next check may find complete files.
async fn renew(
    server: &Server,
    source: &Source,
    mut mark: Option<(Vec<u8>, Vec<u8>)>,
    local: &LocalCluster,
    publication: Option<&Publication>,
) {
    let mut look = tokio::time::interval(LOOK_AGAIN);
    loop {
        look.tick().await;
        let seen = source.mark();
        if seen.is_none() || seen == mark {
            continue;
        }
        let Ok(found) = source.read(&local.cluster) else { continue };
        if server.renew(&found.identity, &found.trust).is_err() {
            continue;
        }
        let local = LocalCluster::new(local.cluster.clone(), local.control, found.trust, found.local);
        if publication.is_some_and(|publication| publication.replace(&local).is_err()) {
            continue;
        }
        mark = seen;
        tracing::info!("reloaded the certificates");
    }
}

/// Returns an address at which a process on this machine reaches a listener on `address`.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Runs until it is stopped, the handle is dropped, or the control plane fails.
pub(super) async fn live(
    mut running: ControlProcess,
    state: State,
    stopping: oneshot::Receiver<()>,
) -> Result<(), EndError> {
    let mark = running.mark.take();
    let ControlProcess { server, local, source, publication, .. } = &running;
    let served = async {
        Err(match &state {
            State::Own(control) => EndError::Failed(running.lead(control).await),
            State::Shared(etcd) => running.take_turns(etcd).await,
        })
    };
    let idle = async {
        match (running.rest.stop_when_idle, &state) {
            (Some(limit), State::Own(control)) => control.worlds.idle_for(limit).await,
            _ => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        () = renew(server, source, mark, local, publication.as_ref()) => Ok(()),
        // A stop request, or a dropped handle: both mean to stop.
        _ = stopping => Ok(()),
        () = idle => {
            tracing::info!("no process of a world has reported for the time of --stop-when-idle");
            Ok(())
        }
        result = served => result,
    };
    // Leadership is given up first, so that rejected callers find the next leader.
    drop(state);
    running.server.close(GOODBYE).await;
    result
}

impl ControlProcess {
    /// Serves with this control plane until it fails; returns the reason.
    async fn lead(&self, control: &Arc<Control>) -> String {
        let mut parts = Parts::default();
        if let Some((listener, _)) = &self.http {
            let pages =
                http::Pages::new(control.clone(), self.access.clone(), self.metadata, self.rest.objects.clone());
            parts.spawn("HTTP", http::serve(listener.clone(), pages));
        }
        if let Some((listener, _)) = &self.events {
            let cluster = self.local.cluster.as_str().to_owned();
            parts.spawn("events of the store", publisher::serve(listener.clone(), control.cluster.clone(), cluster));
        }
        let p2p = control.p2p.clone();
        parts.spawn("the P2P store", async move { p2p.run().await });
        let worlds = control.worlds.clone();
        parts.spawn("process groups", async move { worlds.run().await });
        let tasks = control.tasks.clone();
        parts.spawn("tasks", async move { tasks.run().await });
        let cluster = self.local.cluster.as_str().to_owned();
        parts.spawn("the port probe of members", port_probe::watch(control.cluster.clone(), cluster));
        if let Some(conductor) = control.conductor.clone() {
            let (host, cluster, blocks) = (&conductor.host, &control.cluster, Arc::new(StoreBlocks::default()));
            let follow = store_blocks::follow(host.clone(), blocks.clone(), cluster.clone());
            parts.spawn("the Conductor's view of the store", follow);
            let make = copies::make(host.clone(), blocks, cluster.clone(), control.tasks.clone());
            parts.spawn("the replication of hot prefixes", make);
            if let Some(files) = self.rest.snapshots.clone() {
                parts.spawn("snapshots of the index", files.keep(host.clone(), cluster.clone()));
            }
            parts.spawn("the Conductor", conductor.run());
        }
        tokio::select! {
            reason = control.cluster.run() => reason,
            reason = parts.one_ended() => reason,
        }
    }

    /// Leads after each takeover and is a standby otherwise, until it cannot continue; returns the reason.
    async fn take_turns(&self, etcd: &Etcd) -> EndError {
        let mut leadership = etcd.leadership_watch();
        loop {
            let led = match self.stand_by(&mut leadership).await {
                Ok(led) => led,
                Err(error) => return error,
            };
            let turn = etcd.turn(&led);
            let store = Store::in_etcd(turn.clone(), led.state_id);
            let (turn_kept, keys, time_s) = (turn.clone(), led.tickets.clone(), led.ticket_time_s);
            let keep = Keep::Etcd { turn: turn_kept, keys, time_s };
            match self.rest.control(store, led.records.clone(), keep) {
                Ok(control) => {
                    control.set_address(reachable(self.server.address()));
                    self.server.stand(ServiceState::Serving(control.clone()));
                    self.role.send_replace(Role::Leads);
                    tracing::info!(turn = led.turn, records = led.records.len(), "became the leader");
                    tokio::select! {
                        reason = self.lead(&control) => tracing::warn!(turn = led.turn, "lost leadership: {reason}"),
                        () = over(&mut leadership, led.turn) => tracing::warn!(turn = led.turn, "lost leadership"),
                    }
                }
                // The turn ended at once.
                Err(StartError::FirstChange(_)) => {}
                Err(error) => return EndError::Failed(error.to_string()),
            }
            turn.abandon();
            over(&mut leadership, led.turn).await;
        }
    }

    /// Stays a standby until its takeover; returns an error if none can come.
    async fn stand_by(&self, leadership: &mut watch::Receiver<Leadership>) -> Result<Arc<Takeover>, EndError> {
        let mut tasks = JoinSet::new();
        if let Some((listener, _)) = &self.http {
            tasks.spawn(http::stand_by(listener.clone(), self.role.subscribe()));
        }
        loop {
            let words = match &*leadership.borrow_and_update() {
                Leadership::Leads(led) => return Ok(led.clone()),
                Leadership::Failed(reason) => return Err(EndError::Failed(reason.clone())),
                Leadership::Follows(address) => format!("this control plane is a standby; the leader is at {address}"),
                Leadership::Asking(reason) => {
                    format!("this control plane is a standby, and no leader is known: {reason}")
                }
            };
            let role = Role::StandsBy(words.clone());
            if *self.role.borrow() != role {
                tracing::info!("{words}");
                self.server.stand(ServiceState::StandingBy(words));
                self.role.send_replace(role);
            }
            if leadership.changed().await.is_err() {
                return Err(EndError::Failed("the etcd thread has ended".to_owned()));
            }
        }
    }
}

/// Waits until a turn has ended.
async fn over(leadership: &mut watch::Receiver<Leadership>, turn: u64) {
    while matches!(&*leadership.borrow_and_update(), Leadership::Leads(led) if led.turn == turn) {
        if leadership.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_background_task_that_ends_is_named() {
        let mut parts = Parts::default();
        parts.spawn("one that lasts", std::future::pending());
        parts.spawn("one with a bug", async { panic!("an attempt to add") });
        let reason = parts.one_ended().await;
        assert!(reason.starts_with("one with a bug ended") && reason.contains("an attempt to add"), "{reason}");
        parts.spawn("one that returns", async {});
        assert!(parts.one_ended().await.starts_with("one that returns ended"));
    }
}
