//! Checker of segment ranges: once a write is done, no bytes of earlier, ended writes of its client are found in its
//! place.
//!
//! Each client has cells of its own in each shard's segment. The writer of a cell follows from its bytes. A cell is
//! checked when its newest write is done and all others to it had ended before that one began: then it has exactly that
//! one's bytes, from then on. Between writes that were open together, no order is promised, nor between the abandoned
//! writes of a killed process and those of its successor, which does not know that it has to fence them.

use kvplane_proto::Digest;

use super::{CheckResult, Rule, broken};
use crate::world::pattern;

/// Seed of the bytes of segments, together with the number of the write.
pub(crate) const OF_SEGMENTS: Digest = Digest(0x5e60);
/// Cells of each client in a segment.
pub(crate) const CELLS: usize = 4;

struct Write {
    incarnation: usize,
    first: usize,
    cells: usize,
    begun: u64,
    over: Option<u64>,
    done: bool,
}

/// All writes to segments.
pub(crate) struct Segments {
    writes: Vec<Write>,
    cell_bytes: usize,
    tick: u64,
}

impl Segments {
    pub(crate) const fn new(object_bytes: u64) -> Self {
        Self { writes: Vec::new(), cell_bytes: object_bytes as usize / CELLS, tick: 0 }
    }

    pub(crate) const fn cell_bytes(&self) -> usize {
        self.cell_bytes
    }

    /// Records that a client starts to write these cells; returns the write's number.
    pub(crate) fn begin(&mut self, incarnation: usize, first: usize, cells: usize) -> usize {
        self.tick += 1;
        self.writes.push(Write { incarnation, first, cells, begun: self.tick, over: None, done: false });
        self.writes.len() - 1
    }

    /// Records the end of a write; returns the incarnation and the cells that it was for.
    pub(crate) fn end(&mut self, write: usize, done: bool) -> (usize, core::ops::Range<usize>) {
        self.tick += 1;
        let entry = &mut self.writes[write];
        (entry.over, entry.done) = (Some(self.tick), done);
        (entry.incarnation, entry.first..entry.first + entry.cells)
    }

    /// Records that the process that wrote to these cells has died: its abandoned writes may arrive at any time.
    pub(crate) fn orphan(&mut self, cells: core::ops::Range<usize>) {
        self.writes
            .iter_mut()
            .filter(|write| !write.done && cells.contains(&write.first))
            .for_each(|write| write.over = None);
    }

    /// Checks that the bytes of a cell may be there.
    pub(crate) fn check(&self, incarnation: usize, cell: usize, segment: &[u8]) -> CheckResult {
        let covers = |write: &Write| {
            write.incarnation == incarnation && (write.first..write.first + write.cells).contains(&cell)
        };
        let mut all = self.writes.iter().enumerate().filter(|(_, write)| covers(write)).rev();
        let Some((number, newest)) = all.next().filter(|(_, newest)| newest.done) else { return Ok(()) };
        if !all.all(|(_, older)| older.over.is_some_and(|over| over < newest.begun)) {
            return Ok(());
        }
        let mut wanted = vec![0; newest.cells * self.cell_bytes];
        pattern::fill(OF_SEGMENTS, number, &mut wanted);
        let from = (cell - newest.first) * self.cell_bytes;
        let found = &segment[cell * self.cell_bytes..(cell + 1) * self.cell_bytes];
        if found == &wanted[from..from + self.cell_bytes] {
            return Ok(());
        }
        let what = format!(
            "incarnation {incarnation}, cell {cell}: not the bytes of write {number}, the newest, which is done"
        );
        Err(broken(Rule::Bytes, what))
    }
}
