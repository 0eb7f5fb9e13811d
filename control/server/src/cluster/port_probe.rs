//! Port probes of members whose heartbeats stop. The ports of a dead process refuse connections; those of a stopped
//! process, or of a host that is down, do not answer. Either way replica owners take over within little more than a
//! second, long before the deadline of heartbeats.
//!
//! A control plane that has just started also probes members that it has not heard from: otherwise it would not detect,
//! for the whole grace period of its start, members that died meanwhile.
//!
//! A member that clients report to be silent is probed at once, before its heartbeats are late: the ports may be silent
//! earlier than the heartbeats.
//!
//! A probe sends the greeting of a data connection, which the shards answer themselves: the kernel accepts connections
//! for a stopped process too. A missing heartbeat alone is never enough: a slow process answers on one shard's port in
//! time, or sends a heartbeat. A refusal, or no answer, counts only from ports that have answered this control plane in
//! the same incarnation before, as a firewall refuses or drops connections too.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvplane_cluster::{Cluster, Input};
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ShardId};
use kvplane_proto::map::Member;
use kvplane_proto::message::{Hello, Kind, Operation};
use kvplane_sys::random::random_u64;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::cluster::ClusterHost;

/// Interval of checks for silent members.
const LOOK: Duration = Duration::from_millis(50);
/// Most members probed at the same time.
const AT_ONCE: usize = 32;
/// Attempts to reach the ports of a new incarnation, before they count as unreachable.
const TRIES: u8 = 8;

/// Time without a probe of a member after which the finding of the next one is logged, also if it is the same, in
/// nanoseconds.
const BOUT_NS: u64 = 10_000_000_000;

/// One incarnation of a node.
pub(crate) type NodeIncarnation = (NodeId, Incarnation);

/// Incarnations of all members, and the ports of the members to probe.
type ProbeTargets = (BTreeSet<NodeIncarnation>, Vec<(NodeIncarnation, Vec<SocketAddr>)>);

/// Result of probing the ports of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PortProbe {
    /// All ports answer.
    Somebody,
    /// All ports refuse connections.
    Nobody,
    /// No port answers.
    Silence,
    /// Some ports answer and others do not.
    Parts,
}

/// Answer of a port to a greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Given,
    Refused,
    Nothing,
}

/// Latest findings of members that are or were silent, with the times of their probes: a member that clients go on to
/// report is probed many times a second, and only a new finding is worth a line of the log.
#[derive(Debug, Default)]
struct Findings {
    latest: BTreeMap<NodeIncarnation, (PortProbe, u64)>,
}

impl Findings {
    /// Notes what a probe found. Returns true if it is to be logged: it differs from the finding before, or the member
    /// has not been probed for some time.
    fn note(&mut self, of: NodeIncarnation, found: PortProbe, now_ns: u64) -> bool {
        let before = self.latest.insert(of, (found, now_ns));
        before.is_none_or(|(before, at_ns)| before != found || now_ns.saturating_sub(at_ns) >= BOUT_NS)
    }

    /// Forgets incarnations that are not members any more.
    fn retain(&mut self, members: &BTreeSet<NodeIncarnation>) {
        self.latest.retain(|of, _| members.contains(of));
    }
}

/// Probes members for as long as it is polled.
pub(crate) async fn watch(host: Arc<ClusterHost>, cluster: String) {
    // True by incarnation if its ports were reached when it was new, and the failed attempts at the others.
    let (mut reached, mut tries): (BTreeMap<NodeIncarnation, bool>, BTreeMap<NodeIncarnation, u8>) =
        (BTreeMap::new(), BTreeMap::new());
    let mut asked: BTreeSet<NodeIncarnation> = BTreeSet::new();
    // Members whose last probe found no answer, as long as they are probed.
    let mut unanswered: BTreeSet<NodeIncarnation> = BTreeSet::new();
    let mut findings = Findings::default();
    let mut open = JoinSet::new();
    // With the missed heartbeat before it, a probe takes the silence after which the member is dead.
    let within = host.lock().map_or(LOOK, |hosted| {
        let config = hosted.cluster().config();
        let late_ns = config.heartbeat_interval_ns + config.heartbeat_interval_ns / 10;
        Duration::from_nanos(config.unanswered_after_ns.saturating_sub(late_ns))
    });
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = look.tick() => {
                let find = |cluster: &Cluster| find_probe_targets(cluster, host.now_ns(), &reached, AT_ONCE);
                let found = host.lock().map(|hosted| find(hosted.cluster()));
                let Ok((incarnations, probe_targets)) = found else { continue };
                reached.retain(|incarnation, _| incarnations.contains(incarnation));
                tries.retain(|incarnation, _| incarnations.contains(incarnation));
                findings.retain(&incarnations);
                unanswered.retain(|incarnation| probe_targets.iter().any(|(of, _)| of == incarnation));
                // No port has answered since: the evidence may count by now, before the next probe ends.
                unanswered.iter().for_each(|incarnation| tell(&host, *incarnation, PortProbe::Silence));
                for (incarnation, ports) in probe_targets {
                    if asked.len() < AT_ONCE && asked.insert(incarnation) {
                        let cluster = cluster.clone();
                        open.spawn(async move {
                            (incarnation, probe_ports(&cluster, incarnation, &ports, within).await)
                        });
                    }
                }
            }
            Some(Ok((incarnation, found))) = open.join_next() => {
                asked.remove(&incarnation);
                match reached.entry(incarnation) {
                    Entry::Occupied(_) => {
                        if found == PortProbe::Silence {
                            unanswered.insert(incarnation);
                        } else {
                            unanswered.remove(&incarnation);
                        }
                        if findings.note(incarnation, found, host.now_ns()) {
                            let (node, of) = incarnation;
                            tracing::warn!(node = node.0, incarnation = of.0, ?found, "probed a silent member");
                        }
                        tell(&host, incarnation, found);
                    }
                    Entry::Vacant(first) if found == PortProbe::Somebody => {
                        first.insert(true);
                        // The cluster needs no reports of its silence from now on. A rejection means that the member
                        // has gone already.
                        let _ = host.handle(Input::Answered { node: incarnation.0, incarnation: incarnation.1 });
                    }
                    Entry::Vacant(first) => {
                        let tried = tries.entry(incarnation).or_insert(0);
                        *tried += 1;
                        if *tried == TRIES {
                            first.insert(false);
                        }
                    }
                }
            }
        }
    }
}

/// Returns the incarnations of the map's members, and the ports of at most `most` members to probe now: members that
/// have not been heard since the start; if slots have replicas, members that are not in `known`; and members that were
/// reached before and are silent, or are so for a client.
fn find_probe_targets(
    cluster: &Cluster,
    now_ns: u64,
    known: &BTreeMap<NodeIncarnation, bool>,
    most: usize,
) -> ProbeTargets {
    let of = |member: &Member| (member.node, member.incarnation);
    let members = &cluster.map().members;
    let incarnations = members.iter().map(of).collect();
    let mut silent: Vec<&Member> = cluster.silent(now_ns).collect();
    let has_heartbeats = |member: &&Member| !cluster.silent(now_ns).any(|other| other.node == member.node);
    silent.extend(cluster.reported_silent(now_ns).filter(has_heartbeats));
    let silent = silent.into_iter().filter(|member| known.get(&of(member)) == Some(&true));
    let several = cluster.map().replicas > 1;
    let new = members.iter().filter(|member| several && !known.contains_key(&of(member)));
    let ports = |member: &Member| member.shards.iter().map(|shard| shard.tcp).collect();
    let all = silent.chain(new).chain(cluster.unheard(now_ns));
    (incarnations, all.take(most).map(|member| (of(member), ports(member))).collect())
}

/// Reports the result of probing a silent member to the cluster.
fn tell(host: &ClusterHost, of: NodeIncarnation, found: PortProbe) {
    let (node, incarnation) = of;
    let input = match found {
        PortProbe::Nobody => Input::Refused { node, incarnation },
        PortProbe::Silence => Input::Unanswered { node, incarnation },
        PortProbe::Somebody | PortProbe::Parts => Input::Answered { node, incarnation },
    };
    // A rejection means that it is not a member any more.
    let _ = host.handle(input);
}

/// Greets all ports of a member at the same time, and waits for their answers for so long.
async fn probe_ports(cluster: &str, incarnation: NodeIncarnation, ports: &[SocketAddr], within: Duration) -> PortProbe {
    let mut open = JoinSet::new();
    for (shard, port) in (0..).zip(ports) {
        let (port, frame) = (*port, greeting(cluster, incarnation, ShardId(shard)));
        open.spawn(async move { timeout(within, ask(port, frame)).await.unwrap_or(Answer::Nothing) });
    }
    let mut answers = Vec::with_capacity(ports.len());
    while let Some(answer) = open.join_next().await {
        // A lost task is no evidence against the member.
        answers.push(answer.unwrap_or(Answer::Given));
    }
    let count = |wanted: Answer| answers.iter().filter(|answer| **answer == wanted).count();
    match (count(Answer::Given), count(Answer::Refused), ports.len()) {
        (_, _, 0) => PortProbe::Parts,
        (given, _, all) if given == all => PortProbe::Somebody,
        (_, refused, all) if refused == all => PortProbe::Nobody,
        (0, ..) => PortProbe::Silence,
        _ => PortProbe::Parts,
    }
}

/// Encodes the first frame of a data connection to a shard.
fn greeting(cluster: &str, whose: NodeIncarnation, shard: ShardId) -> Vec<u8> {
    let (node, incarnation) = whose;
    // Numbers that no client's connection has. Without randomness 0 will do, as nothing follows the greeting.
    let (client, connection) = (random_u64().unwrap_or(0), random_u64().unwrap_or(0));
    let cluster = cluster.to_owned();
    let (version_min, version_max, lane, fetches) = (VERSION, VERSION, 0, false);
    let hello =
        Hello { version_min, version_max, client, connection, node, incarnation, shard, lane, fetches, cluster };
    let body = hello.encode();
    let header = Header::request(Kind::Request(Operation::Hello), RequestId::default()).with_body(&body, 1);
    [&header.encode()[..], &body].concat()
}

/// Returns the answer of the process behind a port to a greeting. A closed connection counts as an answer.
async fn ask(port: SocketAddr, frame: Vec<u8>) -> Answer {
    let mut stream = match TcpStream::connect(port).await {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Answer::Refused,
        Err(_) => return Answer::Nothing,
    };
    if stream.write_all(&frame).await.is_ok() {
        let _ = stream.read(&mut [0; 1]).await;
    }
    Answer::Given
}

#[cfg(test)]
mod tests {
    use kvplane_cluster::{ClusterConfig, Load};
    use kvplane_proto::map::ShardAddress;

    use super::*;

    const WITHIN: Duration = Duration::from_millis(450);

    #[tokio::test(flavor = "current_thread")]
    async fn refusing_answering_and_silent_ports_are_distinguished() {
        let here = || tokio::net::TcpListener::bind("127.0.0.1:0");
        let (one, other) = (here().await.unwrap(), here().await.unwrap());
        let ports = [one.local_addr().unwrap(), other.local_addr().unwrap()];
        let incarnation = (NodeId(7), Incarnation(5));
        // The kernel accepts connections of a process that does not run.
        assert_eq!(probe_ports("c", incarnation, &ports, WITHIN).await, PortProbe::Silence);
        // Any answer counts, and so does a close: a process that closes is running.
        let serve = |listener: tokio::net::TcpListener, says: bool| {
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let mut first = [0; 64];
                    stream.read_exact(&mut first).await.unwrap();
                    let header = Header::decode(&first).unwrap();
                    let mut body = vec![0; header.body_bytes as usize];
                    stream.read_exact(&mut body).await.unwrap();
                    let hello = Hello::decode(&body).unwrap();
                    assert_eq!((hello.node, hello.incarnation, &*hello.cluster), (incarnation.0, incarnation.1, "c"));
                    if says {
                        stream.write_all(&[1]).await.unwrap();
                        let _ = stream.read(&mut [0; 1]).await;
                    }
                }
            })
        };
        let first = serve(one, true);
        assert_eq!(probe_ports("c", incarnation, &ports, WITHIN).await, PortProbe::Parts);
        let second = serve(other, false);
        assert_eq!(probe_ports("c", incarnation, &ports, WITHIN).await, PortProbe::Somebody);
        second.abort();
        let _ = second.await;
        assert_eq!(probe_ports("c", incarnation, &ports, WITHIN).await, PortProbe::Parts);
        first.abort();
        let _ = first.await;
        assert_eq!(probe_ports("c", incarnation, &ports, WITHIN).await, PortProbe::Nobody);
        assert_eq!(probe_ports("c", incarnation, &[], WITHIN).await, PortProbe::Parts);
    }

    #[test]
    fn a_finding_is_logged_when_it_is_new_and_not_with_every_probe() {
        let (one, other) = ((NodeId(7), Incarnation(5)), (NodeId(8), Incarnation(5)));
        let mut findings = Findings::default();
        let logged = |findings: &mut Findings, of, found, after_ms: u64| findings.note(of, found, after_ms * 1_000_000);
        let lines = |findings: &mut Findings, found, at: core::ops::Range<u64>| {
            at.step_by(50).filter(|at| logged(findings, one, found, *at)).count()
        };
        assert_eq!(lines(&mut findings, PortProbe::Somebody, 0..60_000), 1, "20 probes a second for a minute");
        assert!(logged(&mut findings, other, PortProbe::Somebody, 60_000), "each member for itself");
        assert_eq!(lines(&mut findings, PortProbe::Silence, 60_000..61_000), 1);
        assert_eq!(lines(&mut findings, PortProbe::Nobody, 61_000..62_000), 1);
        assert!(!logged(&mut findings, one, PortProbe::Nobody, 63_000));
        assert!(logged(&mut findings, one, PortProbe::Nobody, 73_000), "it was silent for another time");
        findings.retain(&BTreeSet::from([other]));
        assert!(logged(&mut findings, one, PortProbe::Nobody, 73_050), "it was forgotten");
        assert!(!logged(&mut findings, other, PortProbe::Somebody, 60_050));
    }

    #[test]
    fn new_members_are_probed_and_later_those_that_are_silent() {
        let config = ClusterConfig { replicas: 2, ..ClusterConfig::new("c") };
        let interval_ns = config.heartbeat_interval_ns;
        let mut cluster = Cluster::new(config, [], 0).expect("the defaults are valid");
        let mut join = |node, now_ns| {
            let (node, incarnation, port) = (NodeId(node), Incarnation(1), SocketAddr::from(([127, 0, 0, 1], 7001)));
            let member = Member {
                node,
                incarnation,
                weight: 1,
                failure_domain: String::new(),
                host: String::new(),
                shards: vec![ShardAddress { tcp: port, shm: None }],
            };
            let join = Input::Join { member, capacity_bytes: 1, version: String::new() };
            let beat = Input::Heartbeat { node, incarnation, load: Load::default() };
            for input in [join, beat] {
                while cluster.poll_output().is_some() {}
                cluster.handle(input, now_ns).expect("a good member");
            }
            ((node, incarnation), vec![port])
        };
        let (one, other) = (join(7, 1), join(8, 2));
        let both = BTreeSet::from([one.0, other.0]);
        let none = BTreeMap::new();
        assert_eq!(find_probe_targets(&cluster, 3, &none, 8), (both.clone(), vec![one.clone(), other.clone()]));
        assert_eq!(find_probe_targets(&cluster, 3, &none, 1), (both.clone(), vec![one.clone()]), "one at a time");
        let known = BTreeMap::from([(one.0, true), (other.0, false)]);
        assert_eq!(
            find_probe_targets(&cluster, 3, &known, 8),
            (both.clone(), vec![]),
            "they were probed, and are heard"
        );
        let late_ns = 2 + 2 * interval_ns;
        assert_eq!(find_probe_targets(&cluster, late_ns, &known, 8), (both, vec![one]), "the other was never reached");
    }
}
