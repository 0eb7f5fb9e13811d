//! A side of the comparison: ours or a peer's.

use super::cells::Cell;
use super::meter::Usage;
use super::row::Figures;
use crate::Failure;

/// Something that moves blocks between two processes, or stands for what the machine can do at all.
pub(crate) trait Side {
    /// Gets ready with buffers of this size and returns its version. Uses no CPU between measurements.
    fn start(&mut self, buffer_bytes: u64) -> Result<String, Failure>;

    /// Measures a cell for about `seconds`; nothing where the cell is not for it. What does not depend on the batch
    /// may be measured once in a `round`.
    fn measure(&mut self, cell: Cell, seconds: f64, round: usize) -> Result<Option<(Figures, Usage)>, Failure>;

    /// How many buffers it keeps while others are measured.
    fn buffers(&self) -> u64 {
        0
    }

    /// Lets everything go.
    fn stop(&mut self);
}

/// A side with its name in the tables.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// How its two ends wait.
    pub(crate) pacing: &'static str,
    pub(crate) version: String,
    pub(crate) side: Box<dyn Side>,
}

impl Entry {
    pub(crate) fn new(name: &'static str, pacing: &'static str, side: impl Side + 'static) -> Self {
        Self { name, pacing, version: String::new(), side: Box::new(side) }
    }
}
