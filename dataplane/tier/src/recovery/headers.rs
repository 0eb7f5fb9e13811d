//! Headers of all segments, read at the start: the generation of each segment, and the notes on the segments that were
//! filled before.

use kvplane_proto::narrowing::length_u32;
use std::collections::BTreeMap;

use crate::contents::{Contents, SegmentState, incarnation_of};
use crate::device::{Device, Owner};
use crate::format::{FilledNote, SEGMENT_HEADER_BYTES, SEGMENT_HEADER_OFFSETS, SegmentHeader};
use crate::memory::{Memory, Span};
use crate::ops::{Fault, Pieces, Priority};

/// Headers of all segments.
#[derive(Debug, Default)]
pub(super) struct Headers {
    next: u32,
    left: u32,
    damaged: Vec<u32>,
    /// Notes on filled segments in other headers, by generation.
    filled: BTreeMap<u64, FilledNote>,
}

impl Headers {
    /// Begins to read the headers.
    pub(super) fn begin(&mut self, device: &mut Device) {
        let segments = device.config().segments;
        let first = device.header_places().min(segments);
        (self.next, self.left) = (first, segments);
        (0..first).for_each(|segment| read(segment, segment, device));
    }

    /// Handles the header of a segment that was read; returns true if it was the last.
    pub(super) fn read_done(
        &mut self,
        segment: u32,
        place: u32,
        result: Result<(), Fault>,
        device: &mut Device,
        contents: &mut Contents,
        memory: &dyn Memory,
    ) -> bool {
        let copies = SEGMENT_HEADER_OFFSETS.map(|offset| {
            let mut bytes = [0; SEGMENT_HEADER_BYTES];
            let at = span_of(place, device).offset + offset as u64;
            memory.read(Span::staging(at, length_u32(SEGMENT_HEADER_BYTES)), &mut bytes);
            bytes
        });
        let decoded = copies.iter().find_map(|bytes| SegmentHeader::decode(bytes, device.uuid()).ok());
        let header = decoded.filter(|header| result.is_ok() && header.segment == segment);
        let is_blank = result.is_ok() && copies.iter().flatten().all(|byte| *byte == 0);
        if let Some(header) = header {
            contents.segments.found_header(segment, header.generation, header.previous);
            contents.generations.raise(header.oldest_live);
            self.filled.extend(header.filled.map(|filled| (filled.generation, filled)));
        } else if !is_blank {
            self.damaged.push(segment);
        }
        self.left -= 1;
        let upcoming = self.next;
        if upcoming < device.config().segments {
            self.next += 1;
            read(upcoming, place, device);
            return false;
        }
        self.left == 0
    }

    pub(super) fn is_damaged(&self, segment: u32) -> bool {
        self.damaged.contains(&segment)
    }

    /// Returns the segments whose headers are damaged.
    pub(super) fn damaged(&self) -> &[u32] {
        &self.damaged
    }

    /// Returns the note of another header on the segment of this generation.
    pub(super) fn filled(&self, generation: u64) -> Option<&FilledNote> {
        self.filled.get(&generation)
    }

    /// Evaluates the headers, once all are read: sequences start above them, and segments below the least live
    /// generation are free. Returns the segments to be recovered, the newest first, without those whose headers are
    /// damaged.
    pub(super) fn sort_out(&self, contents: &mut Contents) -> Vec<u32> {
        let newest = contents.segments.iter().map(|(_, segment)| segment.generation).max().unwrap_or(0);
        contents.sequences.begin_above(newest);
        contents.generations.headers_read();
        let mut dead: Vec<(u64, u32)> = Vec::new();
        let mut live: Vec<(u64, u32)> = Vec::new();
        for (number, segment) in contents.segments.iter() {
            let generation = segment.generation;
            if self.is_damaged(number) {
                continue;
            }
            let is_dead = generation == 0 || generation < contents.generations.oldest_live();
            if is_dead { dead.push((generation, number)) } else { live.push((generation, number)) }
        }
        dead.sort_unstable();
        live.sort_unstable_by(|a, b| b.cmp(a));
        for (_, segment) in dead {
            debug_assert_eq!(contents.segments[segment].state, SegmentState::Unknown);
            contents.segments.found_free(segment);
        }
        live.into_iter().map(|(_, segment)| segment).collect()
    }

    /// Returns the number of segments that were opened in the previous incarnation and are gone: a header is made when
    /// the segment before it is open, whose own header is durable by then and stays untouched until that segment is
    /// reclaimed. Earlier incarnations cannot be judged, as a start reuses segments that were empty; nor can any if a
    /// header is damaged.
    pub(super) fn missing_segments(&self, contents: &Contents) -> u32 {
        let all = || contents.segments.iter();
        if all().any(|(number, _)| self.is_damaged(number)) {
            return 0;
        }
        let lately = |generation: u64| incarnation_of(generation) + 1 == contents.sequences.incarnation();
        let named = all().filter(|(_, segment)| lately(segment.generation) && segment.previous != 0);
        let oldest_live = contents.generations.oldest_live();
        let named = named.map(|(_, segment)| segment.previous).filter(|previous| *previous >= oldest_live);
        length_u32(named.filter(|previous| !all().any(|(_, other)| other.generation == *previous)).count())
    }
}

/// Reads the header of `segment` into a block of the scan area.
fn read(segment: u32, place: u32, device: &mut Device) {
    let pieces = Pieces::of(&[span_of(place, device)]);
    device.read(Owner::HeaderRead { segment, place }, device.segment_at(segment), pieces, Priority::Get);
}

fn span_of(place: u32, device: &Device) -> Span {
    Span::staging(device.layout().scans + u64::from(place) * device.block(), device.config().block_bytes)
}
