//! Header of the next segment: one segment is prepared ahead of the open one.

use crate::contents::{Contents, Heritage};
use crate::device::{Device, Owner};
use crate::format::{SEGMENT_HEADER_BYTES, SEGMENT_HEADER_OFFSETS, SegmentHeader};
use crate::memory::{Memory, Span, zero};
use crate::ops::Pieces;
use kvplane_proto::narrowing::length_u32;

/// Prepares the segment that was freed first, if none is ready or in preparation.
pub(super) fn prepare(device: &mut Device, contents: &mut Contents, memory: &mut dyn Memory) {
    let busy = contents.segments.has_ready() || contents.generations.is_preparing();
    if busy || !contents.is_open() || !device.is_writable() {
        return;
    }
    let Some(segment) = contents.segments.take_free() else { return };
    let generation = contents.sequences.take();
    let Heritage { oldest_live, previous, filled } = contents.generations.prepare(segment);
    contents.segments.renew(segment, generation, previous);
    let header = SegmentHeader { segment, generation, oldest_live, previous, filled };
    let bytes = header.encode(device.uuid());
    let (at, block) = (device.layout().header, device.config().block_bytes);
    zero(memory, at, block);
    for offset in SEGMENT_HEADER_OFFSETS {
        memory.write(&bytes, Span::staging(at + offset as u64, length_u32(SEGMENT_HEADER_BYTES)));
    }
    let pieces = Pieces::of(&[Span::staging(at, block)]);
    device.write(Owner::Prepare(segment), device.segment_at(segment), pieces);
}
