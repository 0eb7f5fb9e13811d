//! Followed map: the cluster map that the shards of a node follow, and the settlement that the node reported by it.

use kvplane_proto::ids::Epoch;

/// Map that the shards follow in the node's present incarnation.
#[derive(Debug, Default)]
pub(super) struct FollowedMap {
    /// Number of the map at the control link; 0 before the first.
    generation: u64,
    /// Cluster state that the map belongs to.
    state: u64,
    /// Epoch of the map; 0 while the incarnation follows none.
    epoch: Epoch,
    /// Epoch of the map as of which the node last reported all migrations to it as complete.
    settled: Option<Epoch>,
}

impl FollowedMap {
    /// Returns true if the map of this number at the control link is the followed one.
    pub(super) const fn is_current(&self, generation: u64) -> bool {
        self.generation == generation
    }

    /// Returns true if a map is followed, and is one of this cluster state.
    pub(super) fn is_of(&self, state: u64) -> bool {
        self.epoch != Epoch(0) && self.state == state
    }

    /// Returns true if a map is followed, and is one of another cluster state: their epochs cannot be compared.
    pub(super) fn is_of_another(&self, state: u64) -> bool {
        self.epoch != Epoch(0) && self.state != state
    }

    /// Follows the map of this number at the control link.
    pub(super) fn follow(&mut self, generation: u64, state: u64, epoch: Epoch) {
        (self.generation, self.state, self.epoch) = (generation, state, epoch);
    }

    /// Returns the epoch of the map that is followed; 0 for none.
    pub(super) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Follows an earlier map than that at the control link, on the way there.
    pub(super) fn pass(&mut self, state: u64, epoch: Epoch) {
        (self.state, self.epoch) = (state, epoch);
    }

    /// Follows no map: another incarnation begins.
    pub(super) fn end(&mut self) {
        self.epoch = Epoch(0);
    }

    /// Returns the epoch for which a report of settlement is due: that of the map, unless it was reported.
    pub(super) fn unsettled(&self) -> Option<Epoch> {
        (self.settled < Some(self.epoch)).then_some(self.epoch)
    }

    /// Returns the epoch of the last report of settlement.
    pub(super) const fn settled(&self) -> Option<Epoch> {
        self.settled
    }

    /// Notes the epoch of a report of settlement; `None` if reports of former incarnations do not count any more.
    pub(super) fn set_settled(&mut self, epoch: Option<Epoch>) {
        self.settled = epoch;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_compared_within_a_cluster_state_only() {
        let mut map = FollowedMap::default();
        assert!(!map.is_of(0) && !map.is_of_another(7), "nothing is followed yet");
        map.follow(1, 7, Epoch(4));
        assert!(map.is_of(7) && !map.is_of(8) && map.is_of_another(8) && !map.is_of_another(7));
        assert!(map.is_current(1) && !map.is_current(2));
        map.end();
        assert!(!map.is_of(7) && !map.is_of_another(8));
        // The incarnation that begins waits for the next map.
        assert!(map.is_current(1));
    }

    #[test]
    fn a_settlement_is_reported_once_per_epoch() {
        let mut map = FollowedMap::default();
        assert_eq!(map.unsettled(), Some(Epoch(0)));
        map.set_settled(Some(Epoch(0)));
        assert_eq!(map.unsettled(), None);
        map.follow(1, 7, Epoch(4));
        assert_eq!(map.unsettled(), Some(Epoch(4)));
        map.set_settled(Some(Epoch(4)));
        assert_eq!((map.unsettled(), map.settled()), (None, Some(Epoch(4))));
    }
}
