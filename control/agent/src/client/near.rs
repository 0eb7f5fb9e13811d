//! Preferred nodes: an object is stored on a node that the caller names, if that node has room.
//!
//! The owner of an object follows from its key, without a lookup. An object that is to be stored elsewhere becomes a
//! single stripe, under a digest that is drawn until it belongs to the preferred node, and a stripe head under the
//! object's own digest names it. A get reads the stripe head first: two more round trips, which for short objects cost
//! more than distance does. Therefore only objects of 1 MiB and more are placed.

use std::sync::Arc;

use kvplane_proto::map::{ClusterMap, Member, OwnerTable};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, NodeId};

use super::stripes::STRIPE_LEAST_BYTES;
use super::{Client, Put, Slice};
use crate::error::Error;

/// Length from which objects are placed; shorter objects stay with the owner of their key.
const NEAR_LEAST_BYTES: u64 = STRIPE_LEAST_BYTES;

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

/// Placement state of a client.
#[derive(Default)]
pub(super) struct Nearness {
    wanted: Near,
    /// Owners by the map that was used last.
    places: Option<Arc<Places>>,
}

/// Map and the owners that follow from it.
struct Places {
    generation: u64,
    map: Arc<ClusterMap>,
    table: OwnerTable,
}

impl Nearness {
    /// Returns true if objects go to the owners of their keys.
    pub(super) const fn is_empty(&self) -> bool {
        self.wanted.nodes.is_empty() && !self.wanted.together
    }
}

impl Places {
    fn node_of(&self, digest: Digest) -> Option<NodeId> {
        let owner = self.table.owner_of(digest)?;
        self.map.members.get(usize::from(owner.member)).map(|member| member.node)
    }

    /// Returns true if a node owns slots.
    fn owns(&self, node: NodeId) -> bool {
        self.map.members.iter().any(|member| member.node == node && member.weight > 0)
    }
}

impl Client {
    /// Sets the preferred nodes of objects that are put from now on by [`Self::put_from_with`],
    /// [`Self::batch_put_from_with`] and [`Self::put_with`]; they apply to objects of 1 MiB and more that are not
    /// striped.
    pub fn prefer(&mut self, near: Near) {
        self.near.wanted = near;
    }

    /// Returns the node of a segment: segments of nodes are named by the addresses of their shards.
    #[must_use]
    pub fn node_of_segment(&self, segment: &str) -> Option<NodeId> {
        let map = self.link.map()?;
        let at = |member: &&Member| member.shards.iter().any(|shard| shard.tcp.to_string() == segment);
        map.members.iter().find(at).map(|member| member.node)
    }

    /// Returns the map in use and its owners.
    fn places(&mut self) -> Result<Arc<Places>, Error> {
        self.follow_map();
        let generation = self.link.map_generation();
        if let Some(known) = self.near.places.as_ref().filter(|known| known.generation == generation) {
            return Ok(Arc::clone(known));
        }
        let map = self.link.map().ok_or_else(|| Error::Argument("there is no cluster map yet".to_owned()))?;
        let places = Arc::new(Places { generation, table: OwnerTable::compute(&map), map });
        self.near.places = Some(Arc::clone(&places));
        Ok(places)
    }

    /// Stores objects on preferred nodes. Objects whose owner is preferred already, and short or striped ones, are put
    /// the usual way.
    pub(super) fn batch_put_near(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let places = self.places()?;
        let node_of = |digest: Digest| places.node_of(digest);
        let near = &self.near.wanted;
        let mut nodes: Vec<NodeId> = near.nodes.iter().copied().filter(|node| places.owns(*node)).collect();
        if near.together {
            if let (true, Some((key, _))) = (nodes.is_empty(), items.first()) {
                nodes.extend(node_of(self.digest(key.as_ref())?));
            }
            nodes.truncate(1);
        }
        let mut placed: Vec<Option<Result<Put, Error>>> = Vec::with_capacity(items.len());
        for (key, slice) in items {
            let bytes = slice.local().bytes;
            let here = node_of(self.digest(key.as_ref())?).is_none_or(|node| nodes.contains(&node));
            if here || nodes.is_empty() || bytes < NEAR_LEAST_BYTES || self.is_striped(bytes) {
                placed.push(None);
                continue;
            }
            let mut put = Ok(None);
            for node in &nodes {
                put = self.put_stripe_at(key.as_ref(), *slice, options, &|digest| node_of(digest) == Some(*node));
                if !matches!(put, Ok(None)) {
                    break;
                }
            }
            placed.push(put.transpose());
        }
        let rest: Vec<(&[u8], Slice)> = items
            .iter()
            .zip(&placed)
            .filter(|(_, placed)| placed.is_none())
            .map(|((key, slice), _)| (key.as_ref(), *slice))
            .collect();
        let rest = if rest.is_empty() { Vec::new() } else { self.batch_put_anywhere(&rest, options)? };
        let mut rest = rest.into_iter();
        Ok(placed.into_iter().map(|placed| placed.or_else(|| rest.next()).unwrap_or(Ok(Put::Exists))).collect())
    }
}
