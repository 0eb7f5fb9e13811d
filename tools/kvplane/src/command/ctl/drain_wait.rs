//! Waiting for a drain: until other nodes have fetched all objects of a node, in memory and on its SSDs.

use std::time::{Duration, Instant};

use kvplane::ControlLink;
use kvplane::rpc::RefusalCode;
use kvplane::rpc::message::{ListTiers, Status, StatusReply, TierList};

use crate::command::Failure;

/// Interval between two polls of the node.
const LOOK: Duration = Duration::from_millis(200);

/// Waits at most `within` until a draining node has no objects, and prints the outcome. With a zero `within`, prints
/// the number of objects that are left.
///
/// # Errors
/// Fails if objects are left after the wait, or if the control plane does not answer.
pub(super) fn wait(link: &ControlLink, node: u64, within: Duration) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let looked = link.call(Status).and_then(|status| Ok((status, link.call(ListTiers { node: Some(node) })?)));
        let (status, tiers) = match looked {
            Ok(looked) => looked,
            // The certificate of the node itself may drain it, but not list its SSDs.
            Err(kvplane::Error::Call(error)) if error.refusal() == Some(RefusalCode::NotPermitted) => {
                println!("node {node} is draining; this identity may not list the objects that are left");
                let unseen = "--wait needs an identity that may list SSDs: an admin's; the drain continues";
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
            println!("node {node} is draining; {left} objects are left: see `kvplane ctl tasks`");
            return Ok(());
        }
        let waited = within.as_secs();
        return Err(format!(
            "node {node} still has {left} objects after {waited} s: see `kvplane ctl tasks`; they find no free memory \
             at the other nodes, or exceed the object limit of their shards"
        )
        .into());
    }
}

/// Returns the number of objects of a node, in memory and on its SSDs; `None` until the node has reported within the
/// last `since`: reports from before the drain do not count.
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
