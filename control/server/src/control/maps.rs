//! Maps on their way to watchers, and members that do not have all yet that a map moved to them.

use kvplane_cluster::Cluster;
use kvplane_proto::ids::NodeId;
use kvplane_proto::map::ClusterMap;
use kvplane_rpc::message::MapReply;
use kvplane_rpc::{MapFrame, Refusal, RefusalCode};

use super::{Control, Core};

impl Control {
    /// Publishes a map of the cluster. Clients wait for the next one while members may offer that of a lost state.
    pub(super) fn publish(&self, core: &Core, map: ClusterMap) -> Result<(), Refusal> {
        tracing::info!(epoch = map.epoch.0, members = map.members.len(), "publishes a map");
        self.maps.send_replace(frame(map, &core.cluster, core.store.state_id())?);
        Ok(())
    }

    /// No state was lost: clients get the map that has no nodes.
    pub(super) fn begin_empty(&self) {
        tracing::info!("no member offered a state: this is a new cluster");
        self.maps.send_modify(|frame| *frame = frame.clone().provisional(false));
    }

    /// Owners but this one that do not have all yet that moved to them, and whether this one has not.
    pub(crate) fn unsettled(&self, but: NodeId) -> Result<(usize, bool), Refusal> {
        let cluster = &self.core()?.cluster;
        Ok((cluster.unsettled().filter(|node| *node != but).count(), cluster.is_behind(but)))
    }
}

/// A map of this cluster, whose state has this identity.
pub(super) fn frame(map: ClusterMap, cluster: &Cluster, state: u64) -> Result<MapFrame, Refusal> {
    match MapFrame::new(&MapReply { map }, state) {
        Ok(frame) => Ok(frame.provisional(cluster.awaits_offers())),
        Err(error) => Err(Refusal::new(RefusalCode::TooLarge, error.to_string())),
    }
}
