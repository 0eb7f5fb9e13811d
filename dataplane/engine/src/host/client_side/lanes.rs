//! Connection of each lane of the client.

use kvplane_client::LaneId;

use crate::host::reactor::links::Link;

/// Connections by the indexes of their lanes.
#[derive(Default)]
pub(crate) struct LaneLinks(Vec<Option<(LaneId, Link)>>);

impl LaneLinks {
    /// Returns the connection of a lane, unless it belongs to another generation of the lane.
    #[inline]
    pub(crate) fn get(&self, lane: LaneId) -> Option<Link> {
        let (held, link) = (*self.0.get(lane.index as usize)?)?;
        (held == lane).then_some(link)
    }

    /// Sets the connection of a lane.
    pub(crate) fn set(&mut self, lane: LaneId, link: Link) {
        let index = lane.index as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some((lane, link));
    }

    /// Removes the connection of a lane.
    pub(crate) fn end(&mut self, lane: LaneId) {
        if let Some(entry) = self.0.get_mut(lane.index as usize) {
            entry.take_if(|(held, _)| *held == lane);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvplane_transport::ConnectionId;

    use super::*;

    #[test]
    fn a_former_incarnation_of_a_lane_has_no_connection_and_ends_none() {
        let [old, new] = [1, 2].map(|generation| LaneId { index: 2, generation });
        let link = Link::Tcp(ConnectionId { index: 4, generation: 1 });
        let mut links = LaneLinks::default();
        links.set(new, link);
        assert_eq!((links.get(old), links.get(new)), (None, Some(link)));
        links.end(old);
        assert_eq!(links.get(new), Some(link));
        links.end(new);
        assert_eq!(links.get(new), None);
    }
}
