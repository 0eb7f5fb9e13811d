//! Placement of objects: the owners of keys, and the nodes that new objects prefer.

use std::net::SocketAddr;

use kvplane_proto::NodeId;
use kvplane_proto::map::Member;

use super::namespace::Namespace;
use super::puts::{Near, Puts};
use super::requester::Requester;
use crate::error::Error;

/// Placement of a client's objects: [`Client::placement`](super::Client::placement).
pub struct Placement<'a> {
    pub(super) requester: &'a mut Requester,
    pub(super) namespace: &'a Namespace,
    pub(super) puts: &'a mut Puts,
}

impl Placement<'_> {
    /// Sets the preferred nodes of objects that the client puts from now on; they apply to objects of 1 MiB and more
    /// that are not striped. Put sessions, batches that are started and puts that count their replicas are not placed.
    pub fn prefer(&mut self, near: Near) {
        self.puts.prefer(near);
    }

    /// Returns the node of a segment: segments of nodes are named by the addresses of their shards.
    #[must_use]
    pub fn node_of_segment(&self, segment: &str) -> Option<NodeId> {
        let map = self.requester.map().ok()?;
        let at = |member: &&Member| member.shards.iter().any(|shard| shard.tcp.to_string() == segment);
        map.members.iter().find(at).map(|member| member.node)
    }

    /// Returns the shards that own these keys by the map in use, whether or not there are objects; `None` where a key
    /// has no owner.
    ///
    /// # Errors
    /// When a key is empty or too long, or there is no map.
    pub fn owners(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Option<SocketAddr>>, Error> {
        self.requester.follow_map();
        let owners = self.requester.owners()?;
        keys.iter().map(|key| Ok(owners.shard_of(self.namespace.digest(key.as_ref())?))).collect()
    }
}
