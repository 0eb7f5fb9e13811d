//! Memory of segments by their ids.

use std::sync::Arc;

use kvplane_proto::SegmentId;
use kvplane_sys::Region;

/// Memory of registered segments, by their indexes.
#[derive(Default)]
pub(crate) struct SegmentRegions(Vec<Option<(u32, Arc<Region>)>>);

impl SegmentRegions {
    /// Returns the memory of a segment; `None` for a stale id.
    pub(crate) fn get(&self, segment: SegmentId) -> Option<&Arc<Region>> {
        let (generation, region) = self.0.get(segment.index as usize)?.as_ref()?;
        (*generation == segment.generation).then_some(region)
    }

    /// Sets the memory of a segment.
    pub(crate) fn set(&mut self, segment: SegmentId, region: Arc<Region>) {
        let index = segment.index as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some((segment.generation, region));
    }

    /// Removes and returns the memory of a segment; `None` for a stale id, whose index may belong to a successor.
    pub(crate) fn take(&mut self, segment: SegmentId) -> Option<Arc<Region>> {
        let entry = self.0.get_mut(segment.index as usize)?;
        entry.take_if(|(generation, _)| *generation == segment.generation).map(|(_, region)| region)
    }

    /// Returns the memory of all segments.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Arc<Region>> {
        self.0.iter().flatten().map(|(_, region)| region)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_sys::RegionOptions;

    use super::*;

    #[test]
    fn a_segment_of_a_former_generation_has_no_memory() {
        let region = Region::allocate(&RegionOptions::new("segment", 4096)).expect("memory");
        let mut segments = SegmentRegions::default();
        let [old, new] = [1, 2].map(|generation| SegmentId { index: 3, generation });
        segments.set(new, Arc::clone(&region));
        assert!(segments.get(new).is_some() && segments.get(old).is_none());
        assert!(segments.take(old).is_none() && segments.get(new).is_some());
        assert!(segments.take(new).is_some() && segments.regions().count() == 0);
    }
}
