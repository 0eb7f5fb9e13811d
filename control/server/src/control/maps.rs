//! Publication of maps to watchers, and the members that have not received everything yet that a map moved to them.

use kvplane_cluster::Cluster;
use kvplane_proto::ids::NodeId;
use kvplane_proto::map::ClusterMap;
use kvplane_rpc::message::MapReply;
use kvplane_rpc::{MapFrame, Refusal, RefusalCode};

use super::{Control, Core};

impl Control {
    /// Publishes a map of the cluster. While members may offer the map of a lost state, clients wait for the next one.
    pub(super) fn publish(&self, core: &Core, map: ClusterMap) -> Result<(), Refusal> {
        tracing::info!(epoch = map.epoch.0, members = map.members.len(), "published a map");
        self.maps.send_replace(frame(map, &core.cluster, core.store.state_id())?);
        Ok(())
    }

    /// Publishes the empty map to clients too: no member offered a state, so none was lost.
    pub(super) fn begin_empty(&self) {
        tracing::info!("no member offered a state: this is a new cluster");
        self.maps.send_modify(|frame| *frame = frame.clone().provisional(false));
    }

    /// Returns the number of owners other than `but` that have not received everything yet that moved to them, and
    /// whether `but` has not.
    pub(crate) fn unsettled(&self, but: NodeId) -> Result<(usize, bool), Refusal> {
        let cluster = &self.core()?.cluster;
        Ok((cluster.unsettled().filter(|node| *node != but).count(), cluster.is_behind(but)))
    }
}

/// Encodes a map of this cluster, whose state has this identity.
pub(super) fn frame(map: ClusterMap, cluster: &Cluster, state: u64) -> Result<MapFrame, Refusal> {
    match MapFrame::new(&MapReply { map }, state) {
        Ok(frame) => Ok(frame.provisional(cluster.awaits_offers())),
        Err(error) => Err(Refusal::new(RefusalCode::TooLarge, error.to_string())),
    }
}
