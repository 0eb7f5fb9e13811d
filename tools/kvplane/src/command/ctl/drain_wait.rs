//! Waiting for a node that is drained: until the other nodes have fetched all its objects, of memory and of SSDs.

use std::time::{Duration, Instant};

use kvplane::ControlLink;
use kvplane::rpc::RefusalCode;
use kvplane::rpc::message::{ListTiers, Status, StatusReply, TierList};

use crate::command::Failure;

/// Time between two looks at the node.
const LOOK: Duration = Duration::from_millis(200);

/// Waits until a node that was just drained has no objects, `within` at most, and prints the outcome. Without a time
/// to wait, prints how many objects are left.
///
/// # Errors
/// When objects are left after a time to wait, or the control plane does not answer.
pub(super) fn wait(link: &ControlLink, node: u64, within: Duration) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let looked = link.call(Status).and_then(|status| Ok((status, link.call(ListTiers { node: Some(node) })?)));
        let (status, tiers) = match looked {
            Ok(looked) => looked,
            // A node may drain itself, and not see what it has left.
            Err(kvplane::Error::Call(error)) if error.refusal() == Some(RefusalCode::NotPermitted) => {
                println!("node {node} gives its slots away; this identity does not see what is left there");
                let unseen = "--wait needs an identity that may list SSDs: an admin's; the drain goes on";
                return if within.is_zero() { Ok(()) } else { Err(unseen.into()) };
            }
            Err(error) => return Err(error.into()),
        };
        let left = left(&status, &tiers, node, began.elapsed());
        if left == Some(0) {
            println!("node {node} is drained: it has no objects left");
            return Ok(());
        }
        if began.elapsed() < within {
            std::thread::sleep(LOOK);
            continue;
        }
        let left = left.map_or_else(|| "an unknown number of".to_owned(), |left| left.to_string());
        if within.is_zero() {
            println!("node {node} gives its slots away; {left} objects are left there: see `kvplane ctl tasks`");
            return Ok(());
        }
        let waited = within.as_secs();
        return Err(format!(
            "node {node} still has {left} objects after {waited} s: see `kvplane ctl tasks`; what does not go finds no \
             room at the other nodes, or is longer than one of their shards takes"
        )
        .into());
    }
}

/// Objects that a node has, in memory and on its SSDs; unknown until it has reported within the last `since`: what it
/// reported before the drain says nothing of it.
fn left(status: &StatusReply, tiers: &TierList, node: u64, since: Duration) -> Option<u64> {
    let is_new = |age_ns: u64| u128::from(age_ns) < since.as_nanos();
    let member = status.members.iter().find(|member| member.node == node)?;
    let in_memory = member.load.filter(|_| member.silent_ns.is_some_and(is_new))?.objects;
    let Some(tier) = tiers.nodes.iter().find(|tier| tier.node == node) else { return Some(in_memory) };
    is_new(tier.age_ns).then(|| in_memory + tier.shards.iter().map(|shard| shard.objects).sum::<u64>())
}

#[cfg(test)]
mod tests {
    use kvplane::rpc::message::{Load, MemberStatus, TierNode, TierShard};

    use super::*;

    #[test]
    fn objects_in_memory_and_on_ssds_count_once_the_node_has_reported_both() {
        let second = 1_000_000_000;
        let status = |silent_ns, objects| StatusReply {
            members: vec![MemberStatus {
                node: 7,
                silent_ns,
                load: Some(Load { objects, ..Load::default() }),
                ..MemberStatus::default()
            }],
            ..StatusReply::default()
        };
        let tier = |age_ns, objects: &[u64]| TierList {
            nodes: vec![TierNode {
                node: 7,
                incarnation: 1,
                age_ns,
                carried_out: 0,
                shards: objects.iter().map(|objects| TierShard { objects: *objects, ..TierShard::default() }).collect(),
            }],
        };
        let none = TierList { nodes: Vec::new() };
        let since = Duration::from_secs(1);
        assert_eq!(left(&status(Some(second / 2), 3), &none, 7, since), Some(3));
        assert_eq!(left(&status(Some(second / 2), 0), &tier(second / 2, &[4, 5]), 7, since), Some(9));
        assert_eq!(left(&status(Some(second / 2), 0), &tier(2 * second, &[0]), 7, since), None, "reported before");
        assert_eq!(left(&status(Some(2 * second), 0), &none, 7, since), None, "silent");
        assert_eq!(left(&status(None, 0), &none, 7, since), None);
        assert_eq!(left(&status(Some(0), 0), &none, 8, since), None, "no member");
    }
}
