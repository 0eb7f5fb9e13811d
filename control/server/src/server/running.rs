//! A control plane that is up: serving with its state, or taking turns with others.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_cluster::{Cluster, ClusterConfig, Record};
use kvplane_conductor::conductor::ConductorConfig;
use kvplane_rpc::{LocalCluster, Publication, Server, ServiceState};
use kvplane_sys::random::random_u64;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::{Id, JoinSet};

use super::{EndError, Role};
use crate::conductor::{DecodedRecords, Host, copies, store_blocks};
use crate::config::StartError;
use crate::control::Control;
use crate::credentials::{LOOK_AGAIN, Source};
use crate::events::publisher;
use crate::http;
use crate::http::access::Access;
use crate::http::metadata::MetadataLimits;
use crate::http::objects::ObjectsAccess;
use crate::nodes::port_probe;
use crate::p2p::P2p;
use crate::store::Store;
use crate::store::etcd::{Etcd, Place, Takeover};
use crate::tickets::{Keep, TicketConfig, Tickets};

/// Of a shutdown, the time that callers get to learn of it.
const GOODBYE: Duration = Duration::from_millis(500);

/// What is up once a control plane has started.
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

/// What a control plane does beside its calls. All of it lasts as long as it leads; a part that ends has a bug, and
/// who goes on without it says that all is well while nobody is served by that part. They end with this.
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

    /// Why the control plane cannot go on, once one of them has ended; never where there is none.
    async fn one_ended(&mut self) -> String {
        let Some(ended) = self.tasks.join_next_with_id().await else { return std::future::pending().await };
        let (id, how) = match ended {
            Ok((id, ())) => (id, "it returned".to_owned()),
            Err(error) => (error.id(), error.to_string()),
        };
        let name = self.names.get(&id).copied().unwrap_or("a part");
        format!("{name} ended, which it never should: {how}; this is a bug")
    }
}

/// What makes a control plane once its state is known.
pub(super) struct Rest {
    pub(super) cluster: ClusterConfig,
    pub(super) tickets: Option<TicketConfig>,
    pub(super) strict_tenants: bool,
    pub(super) objects: ObjectsAccess,
    pub(super) conductor: Option<ConductorConfig>,
}

/// Where the state is.
pub(super) enum State {
    /// It is ours alone, and this serves.
    Own(Arc<Control>),
    /// In etcd.
    Shared(Etcd),
}

/// The Conductor's host, where one is wanted, with what these records say; its hashes are salted by chance. For `grace`
/// no instance's silence counts.
fn host(config: Option<ConductorConfig>, records: &[Record], grace: Duration) -> Result<Option<Arc<Host>>, StartError> {
    let Some(mut config) = config else { return Ok(None) };
    config.scheduler.index.seed = random_u64().map_err(StartError::Randomness)?;
    let restored = DecodedRecords::of(records).map_err(StartError::Conductor)?;
    let host = Host::new(config, random_u64().map_err(StartError::Randomness)?, restored, grace)
        .map_err(StartError::Conductor)?;
    Ok(Some(Arc::new(host)))
}

impl Rest {
    /// The control plane with this state.
    pub(super) fn control(&self, store: Store, records: Vec<Record>, keep: Keep) -> Result<Arc<Control>, StartError> {
        let tickets = self.tickets.map(|tickets| Tickets::open(&self.cluster.cluster, &tickets, keep)).transpose()?;
        let grace = Duration::from_nanos(self.cluster.restart_grace_ns);
        let conductor = host(self.conductor.clone(), &records, grace)?;
        let cluster = Cluster::new(self.cluster.clone(), records, 0).map_err(StartError::Cluster)?;
        let control =
            Control::new(cluster, store, Instant::now()).map_err(|refusal| StartError::FirstChange(refusal.reason))?;
        let control = control.with_tenants(self.strict_tenants, self.objects.clone()).with_tickets(tickets);
        let control = control.map_err(|refusal| StartError::FirstChange(refusal.reason))?;
        let control = control.with_p2p(P2p::new(
            random_u64().map_err(StartError::Randomness)?,
            random_u64().map_err(StartError::Randomness)?,
        ));
        let control = Arc::new(control.with_conductor(conductor));
        if let Some(host) = &control.conductor {
            host.keep_in(&control);
        }
        Ok(control)
    }
}

/// Takes certificates that have been replaced, for as long as it is asked to. What makes no sense is left alone: the
/// former ones go on, and the next look may find files that are complete.
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
        tracing::info!("takes other certificates from now on");
    }
}

/// An address at which a process on this machine reaches a listener on `address`.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Runs until told to stop, the handle is gone, or the control plane fails.
pub(super) async fn live(
    mut running: ControlProcess,
    state: State,
    stopping: oneshot::Receiver<()>,
) -> Result<(), EndError> {
    let mark = running.mark.take();
    let ControlProcess { server, local, source, publication, .. } = &running;
    let served = async {
        let reason = match &state {
            State::Own(control) => running.lead(control).await,
            State::Shared(etcd) => running.take_turns(etcd).await,
        };
        Err(EndError::Failed(reason))
    };
    let result = tokio::select! {
        () = renew(server, source, mark, local, publication.as_ref()) => Ok(()),
        // Told, or the handle is gone: both mean to stop.
        _ = stopping => Ok(()),
        result = served => result,
    };
    // The lead is given away first, so that callers who are sent away find who takes it.
    drop(state);
    running.server.close(GOODBYE).await;
    result
}

impl ControlProcess {
    /// Serves with this control plane until it fails; returns why.
    async fn lead(&self, control: &Arc<Control>) -> String {
        let mut parts = Parts::default();
        if let Some((listener, _)) = &self.http {
            let pages = http::Pages::new(control.clone(), self.access.clone(), self.metadata);
            parts.spawn("HTTP", http::serve(listener.clone(), pages));
        }
        if let Some((listener, _)) = &self.events {
            let cluster = self.local.cluster.as_str().to_owned();
            parts.spawn("events of the store", publisher::serve(listener.clone(), control.clone(), cluster));
        }
        let p2p = control.p2p.clone();
        parts.spawn("the P2P store", async move { p2p.run().await });
        parts.spawn("tasks", crate::nodes::tasks::run(control.clone()));
        let cluster = self.local.cluster.as_str().to_owned();
        parts.spawn("the look at members' ports", port_probe::watch(control.clone(), cluster));
        if let Some(conductor) = control.conductor.clone() {
            parts.spawn("the Conductor's view of the store", store_blocks::follow(conductor.clone(), control.clone()));
            parts.spawn("copies of hot prefixes", copies::make(conductor.clone(), control.clone()));
            parts.spawn("the Conductor", conductor.run());
        }
        tokio::select! {
            reason = control.run() => reason,
            reason = parts.one_ended() => reason,
        }
    }

    /// Leads whenever it is its turn, and stands by else, until it cannot go on; returns why.
    async fn take_turns(&self, etcd: &Etcd) -> String {
        let mut places = etcd.places();
        loop {
            let led = match self.stand_by(&mut places).await {
                Ok(led) => led,
                Err(reason) => return reason,
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
                    tracing::info!(turn = led.turn, records = led.records.len(), "leads");
                    tokio::select! {
                        reason = self.lead(&control) => tracing::warn!(turn = led.turn, "leads no more: {reason}"),
                        () = over(&mut places, led.turn) => tracing::warn!(turn = led.turn, "leads no more"),
                    }
                }
                // The turn ended at once.
                Err(StartError::FirstChange(_)) => {}
                Err(error) => return error.to_string(),
            }
            turn.abandon();
            over(&mut places, led.turn).await;
        }
    }

    /// Stands by until it is to lead; an error when it never will.
    async fn stand_by(&self, places: &mut watch::Receiver<Place>) -> Result<Arc<Takeover>, String> {
        let mut tasks = JoinSet::new();
        if let Some((listener, _)) = &self.http {
            tasks.spawn(http::stand_by(listener.clone(), self.role.subscribe()));
        }
        loop {
            let words = match &*places.borrow_and_update() {
                Place::Leads(led) => return Ok(led.clone()),
                Place::Failed(reason) => return Err(reason.clone()),
                Place::Follows(address) => format!("this control plane stands by; the one at {address} leads"),
                Place::Asking(reason) => format!("this control plane stands by, and none is known to lead: {reason}"),
            };
            let role = Role::StandsBy(words.clone());
            if *self.role.borrow() != role {
                tracing::info!("{words}");
                self.server.stand(ServiceState::StandingBy(words));
                self.role.send_replace(role);
            }
            if places.changed().await.is_err() {
                return Err("the thread for etcd has ended".to_owned());
            }
        }
    }
}

/// Until a turn is over.
async fn over(places: &mut watch::Receiver<Place>, turn: u64) {
    while matches!(&*places.borrow_and_update(), Place::Leads(led) if led.turn == turn) {
        if places.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_that_ends_is_named() {
        let mut parts = Parts::default();
        parts.spawn("one that lasts", std::future::pending());
        parts.spawn("one with a bug", async { panic!("an attempt to add") });
        let reason = parts.one_ended().await;
        assert!(reason.starts_with("one with a bug ended") && reason.contains("an attempt to add"), "{reason}");
        parts.spawn("one that returns", async {});
        assert!(parts.one_ended().await.starts_with("one that returns ended"));
    }
}
