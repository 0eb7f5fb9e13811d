//! Waiting for a drain: until a node serves no slots, and other nodes have fetched all its objects, in memory and on
//! its SSDs.

use std::time::{Duration, Instant};

use kvplane::rpc::RefusalCode;
use kvplane::rpc::message::{GetMoves, ListTiers, MemberStatus, Moves, Status, StatusReply, TierList};
use kvplane::{ClusterMap, ControlLink, Error};

use crate::command::Failure;

/// Interval between two polls of the node.
const LOOK: Duration = Duration::from_millis(200);
/// Number of heartbeat intervals after which a node without a heartbeat is reported as silent.
const SILENT_BEATS: u64 = 3;

/// Replies of the control plane about a draining node, at one moment.
struct DrainNews {
    status: StatusReply,
    tiers: TierList,
    /// Migrations of the node; none from a control plane that refuses this identity.
    moves: Option<Moves>,
}

impl DrainNews {
    fn ask(link: &ControlLink, node: u64) -> Result<Self, Error> {
        let moves = match link.call(GetMoves { node, ends: None }) {
            Ok(moves) => Some(moves),
            Err(error) if is_not_permitted(&error) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { moves, status: link.call(Status)?, tiers: link.call(ListTiers { node: Some(node) })? })
    }

    fn member(&self, node: u64) -> Option<&MemberStatus> {
        self.status.members.iter().find(|member| member.node == node)
    }

    /// Returns true if the newest map gives the node no slots, and the node follows the last map that moved any: it
    /// acknowledges no more puts.
    fn has_no_slots(&self, node: u64, map: Option<&ClusterMap>) -> bool {
        let map = map.filter(|map| map.epoch.0 >= self.status.epoch);
        let member = map.and_then(|map| map.members.iter().find(|member| member.node.0 == node));
        member.is_some_and(|member| member.weight == 0) && self.moves.is_none_or(|moves| !moves.behind)
    }

    /// Returns the number of objects of the node, in memory and on its SSDs, if it has reported both within the last
    /// `since`.
    fn objects(&self, node: u64, since: Duration) -> Option<u64> {
        let is_new = |age_ns: u64| u128::from(age_ns) < since.as_nanos();
        let member = self.member(node)?;
        let in_memory = member.load.filter(|_| member.silent_ns.is_some_and(is_new))?.objects;
        let Some(tier) = self.tiers.nodes.iter().find(|tier| tier.node == node) else { return Some(in_memory) };
        is_new(tier.age_ns).then(|| in_memory + tier.shards.iter().map(|shard| shard.objects).sum::<u64>())
    }

    /// Returns the reason why the node will not be drained, if there is one.
    fn end(&self, node: u64) -> Option<String> {
        let why = match self.member(node).map_or("left", |member| member.state.as_str()) {
            "left" => "has left the cluster: its process has ended, and its log says whether it was drained",
            "dead" => "is dead: its slots have other owners, which cannot fetch its objects from it",
            "active" => {
                "is not draining any more: the drain was cancelled, the node has restarted, or the control plane has \
                 lost its state"
            }
            _ => return None,
        };
        Some(format!("node {node} {why}"))
    }

    /// Returns the reason for which objects are left after a wait.
    fn hindrance(&self, node: u64, heartbeat_ns: u64) -> String {
        let silent_ns = self.member(node).and_then(|member| member.silent_ns);
        if let Some(silent_ns) = silent_ns.filter(|silent_ns| *silent_ns > SILENT_BEATS * heartbeat_ns) {
            return format!(
                "it has not sent a heartbeat for {} s: its process does not run, or does not reach the control plane",
                silent_ns / 1_000_000_000
            );
        }
        "they find no free memory at the other nodes, or exceed the object limit of their shards, or migrate still"
            .to_owned()
    }
}

fn is_not_permitted(error: &Error) -> bool {
    matches!(error, Error::Call(call) if call.refusal() == Some(RefusalCode::NotPermitted))
}

/// Waits at most `within` until a draining node serves no slots and has no objects, also while the control plane
/// restarts, and prints the outcome. With a zero `within`, prints the number of objects that are left.
///
/// # Errors
/// Fails if objects are left after the wait, if the node cannot be drained any more, or if the control plane does not
/// answer until the end of the wait.
pub(super) fn wait(link: &ControlLink, node: u64, within: Duration) -> Result<(), Failure> {
    let began = Instant::now();
    // Time since which the node is known to serve no slots.
    let mut empty_since: Option<Instant> = None;
    let mut silence_told = false;
    loop {
        let asked = Instant::now();
        let news = match DrainNews::ask(link, node) {
            Ok(news) => news,
            // The certificate of the node itself may drain it, but not list its SSDs.
            Err(error) if is_not_permitted(&error) => {
                println!("node {node} is draining; this identity may not list the objects that are left");
                let unseen = "--wait needs an identity that may list SSDs: an admin's; the drain continues";
                return if within.is_zero() { Ok(()) } else { Err(unseen.into()) };
            }
            Err(error) if error.may_restart() && began.elapsed() < within => {
                if !silence_told {
                    eprintln!("kvplane: {error}; trying again");
                    silence_told = true;
                }
                empty_since = None;
                std::thread::sleep(LOOK);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(why) = news.end(node) {
            return Err(why.into());
        }
        if news.has_no_slots(node, link.map().as_deref()) {
            empty_since.get_or_insert(asked);
        } else {
            empty_since = None;
        }
        // Reports from before that time do not count: objects were put afterwards.
        if empty_since.and_then(|since| news.objects(node, since.elapsed())) == Some(0) {
            println!("node {node} is drained: it has no objects left");
            return Ok(());
        }
        if began.elapsed() < within {
            std::thread::sleep(LOOK);
            continue;
        }
        let objects = news.objects(node, Duration::MAX);
        let left = match (objects, empty_since) {
            (Some(0), None) => "slots, though no objects".to_owned(),
            (Some(left), _) => format!("{left} objects"),
            (None, _) => "an unknown number of objects".to_owned(),
        };
        if within.is_zero() {
            println!("node {node} is draining; {left} are left: see `kvplane ctl tasks`");
            return Ok(());
        }
        let waited = within.as_secs();
        let why = news.hindrance(node, link.welcome().heartbeat_interval_ns);
        return Err(format!("node {node} still has {left} after {waited} s: see `kvplane ctl tasks`; {why}").into());
    }
}

#[cfg(test)]
mod tests {
    use kvplane::rpc::message::{Load, TierNode, TierShard};
    use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
    use kvplane_proto::map::Member;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn news(state: &str, silent_ns: Option<u64>, objects: u64) -> DrainNews {
        let load = Some(Load { objects, ..Load::default() });
        let member = MemberStatus { node: 7, state: state.to_owned(), silent_ns, load, ..MemberStatus::default() };
        let status = StatusReply { epoch: 5, members: vec![member], ..StatusReply::default() };
        let moves = Some(Moves { unsettled: 1, behind: false, draining: true });
        DrainNews { status, tiers: TierList { nodes: Vec::new() }, moves }
    }

    #[test]
    fn objects_in_memory_and_on_ssds_count_once_the_node_has_reported_both() {
        let tier = |age_ns, objects: &[u64]| TierList {
            nodes: vec![TierNode {
                node: 7,
                incarnation: 1,
                age_ns,
                carried_out: 0,
                shards: objects.iter().map(|objects| TierShard { objects: *objects, ..TierShard::default() }).collect(),
            }],
        };
        let with = |silent_ns, objects, tiers| DrainNews { tiers, ..news("draining", silent_ns, objects) };
        let since = Duration::from_secs(1);
        let recent = Some(SECOND / 2);
        assert_eq!(news("draining", recent, 3).objects(7, since), Some(3));
        assert_eq!(with(recent, 0, tier(SECOND / 2, &[4, 5])).objects(7, since), Some(9));
        assert_eq!(with(recent, 0, tier(2 * SECOND, &[0])).objects(7, since), None, "reported before");
        assert_eq!(news("draining", Some(2 * SECOND), 0).objects(7, since), None, "silent");
        assert_eq!(news("draining", None, 0).objects(7, since), None);
        assert_eq!(news("draining", Some(0), 0).objects(8, since), None, "no member");
    }

    #[test]
    fn a_node_without_objects_is_not_drained_while_it_serves_slots() {
        let map = |epoch, weight| {
            let member = Member {
                node: NodeId(7),
                incarnation: Incarnation(1),
                weight,
                failure_domain: String::new(),
                host: String::new(),
                shards: Vec::new(),
            };
            ClusterMap { epoch: Epoch(epoch), replicas: 1, members: vec![member], former: None }
        };
        let empty = news("draining", Some(0), 0);
        assert!(!empty.has_no_slots(7, None), "no map is known yet");
        assert!(!empty.has_no_slots(7, Some(&map(5, 3))));
        assert!(!empty.has_no_slots(7, Some(&map(4, 0))), "an older map");
        assert!(empty.has_no_slots(7, Some(&map(5, 0))));
        let behind = DrainNews { moves: Some(Moves { unsettled: 0, behind: true, draining: true }), ..empty };
        assert!(!behind.has_no_slots(7, Some(&map(5, 0))), "it does not follow that map yet, and takes puts");
    }

    #[test]
    fn a_drain_that_cannot_complete_says_why() {
        assert_eq!(news("draining", Some(0), 3).end(7), None);
        assert_eq!(news("suspect", Some(0), 3).end(7), None);
        for (state, why) in [("dead", "is dead"), ("left", "has left"), ("active", "is not draining any more")] {
            assert!(news(state, Some(0), 3).end(7).expect("over").contains(why));
        }
        assert!(news("draining", Some(0), 3).end(8).expect("over").contains("has left"), "no member");
        assert!(news("draining", Some(9 * SECOND), 3).hindrance(7, SECOND).contains("for 9 s"));
        assert!(news("draining", Some(SECOND), 3).hindrance(7, SECOND).contains("no free memory"));
    }
}
