//! Preferred places: an object goes to a node that its caller names, if that node has room.
//!
//! Where an object is follows from its key, so that nobody has to be asked. One that is to be elsewhere is stored
//! as one stripe, under a digest that is drawn until it belongs to the wanted node, and a head under the object's
//! own digest says so. Whoever reads it asks for the head first: two round trips more, which for short objects cost
//! more than distance does. So only objects of 1 MiB and more are placed.

use std::sync::Arc;

use kvplane_proto::map::{ClusterMap, Member, OwnerTable};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, NodeId};

use super::stripes::STRIPE_LEAST_BYTES;
use super::{Client, Put, Slice};
use crate::error::Error;

/// Shorter objects go where their keys belong.
const NEAR_LEAST_BYTES: u64 = STRIPE_LEAST_BYTES;

/// Where objects that are put are to be, as far as that can be had. What is put otherwise is where its key says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Near {
    /// On one of these nodes, whichever has the object's key or is named first.
    pub nodes: Vec<NodeId>,
    /// All objects of a batch on one node: the first of `nodes` that is there, or that of the batch's first key.
    pub together: bool,
}

/// What a client knows of that.
#[derive(Default)]
pub(super) struct Nearness {
    wanted: Near,
    /// Of the map that was used last.
    places: Option<Arc<Places>>,
}

/// A map, and who owns what by it.
struct Places {
    generation: u64,
    map: Arc<ClusterMap>,
    table: OwnerTable,
}

impl Nearness {
    /// Whether objects go where their keys say.
    pub(super) const fn is_empty(&self) -> bool {
        self.wanted.nodes.is_empty() && !self.wanted.together
    }
}

impl Places {
    fn node_of(&self, digest: Digest) -> Option<NodeId> {
        let owner = self.table.owner_of(digest)?;
        self.map.members.get(usize::from(owner.member)).map(|member| member.node)
    }

    /// Whether a node has slots.
    fn owns(&self, node: NodeId) -> bool {
        self.map.members.iter().any(|member| member.node == node && member.weight > 0)
    }
}

impl Client {
    /// Where what is put from now on is to be: by [`Self::put_from_with`], [`Self::batch_put_from_with`] and
    /// [`Self::put_with`], objects of 1 MiB and more that are not cut into stripes.
    pub fn prefer(&mut self, near: Near) {
        self.near.wanted = near;
    }

    /// The node of a segment: segments of nodes are called by the addresses of their shards.
    #[must_use]
    pub fn node_of_segment(&self, segment: &str) -> Option<NodeId> {
        let map = self.link.map()?;
        let at = |member: &&Member| member.shards.iter().any(|shard| shard.tcp.to_string() == segment);
        map.members.iter().find(at).map(|member| member.node)
    }

    /// The map in use, and who owns what by it.
    fn places(&mut self) -> Result<Arc<Places>, Error> {
        self.follow_map();
        let generation = self.link.map_generation();
        if let Some(known) = self.near.places.as_ref().filter(|known| known.generation == generation) {
            return Ok(Arc::clone(known));
        }
        let map = self.link.map().ok_or_else(|| Error::Argument("the control plane gave no map".to_owned()))?;
        let places = Arc::new(Places { generation, table: OwnerTable::compute(&map), map });
        self.near.places = Some(Arc::clone(&places));
        Ok(places)
    }

    /// Stores objects near: those that have the right place by their keys, are short or long, as ever.
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
