//! Preferred nodes: an object is stored on a node that the caller names, if that node has room.
//!
//! The owner of an object follows from its key, without a lookup. An object that is to be stored elsewhere becomes a
//! single stripe, under a digest that is drawn until it belongs to the preferred node, and a stripe head under the
//! object's own digest names it. A get reads the stripe head first: two more round trips, which for short objects cost
//! more than distance does. Therefore only objects of 1 MiB and more are placed.

use kvplane_proto::{Digest, NodeId};

use crate::client::owners::Owners;

/// Preferred nodes of new objects, on a best-effort basis. Objects that cannot be placed are stored with the owner of
/// their key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Near {
    /// Preferred nodes: the owner of the key if it is among them, else the first that has room.
    pub nodes: Vec<NodeId>,
    /// Store all objects of a batch on one node: the first of `nodes` that owns slots, else the owner of the batch's
    /// first key.
    pub together: bool,
}

impl Near {
    /// Returns true if objects go to the owners of their keys.
    pub(super) const fn is_empty(&self) -> bool {
        self.nodes.is_empty() && !self.together
    }

    /// Returns the nodes that a batch is put on, in order of preference; `first` is the digest of its first key.
    pub(super) fn nodes(&self, first: Option<Digest>, owners: &Owners) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.nodes.iter().copied().filter(|node| owners.has_slots(*node)).collect();
        if self.together {
            if nodes.is_empty() {
                nodes.extend(first.and_then(|digest| owners.node_of(digest)));
            }
            nodes.truncate(1);
        }
        nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::owners::tests::map_of;

    #[test]
    fn preferred_nodes_own_slots_and_a_batch_together_has_one() {
        let owners = Owners::of(map_of(&[1, 1, 0]));
        let first = Digest::of(b"", b"first");
        let nodes = |nodes: &[u64], together: bool| {
            let nodes = nodes.iter().map(|node| NodeId(*node)).collect();
            Near { nodes, together }.nodes(Some(first), &owners)
        };
        assert_eq!(nodes(&[9, 3, 2, 1], false), [NodeId(2), NodeId(1)]);
        assert_eq!(nodes(&[9, 3, 2, 1], true), [NodeId(2)]);
        assert_eq!(nodes(&[9, 3], false), []);
        assert_eq!(nodes(&[9, 3], true), Vec::from_iter(owners.node_of(first)));
        assert!(Near::default().is_empty() && !Near { nodes: Vec::new(), together: true }.is_empty());
    }
}
