//! Sides of the comparison: kvplane's or a peer's.

use super::cells::Cell;
use super::meter::Usage;
use super::row::Figures;
use crate::Failure;

/// Program that moves blocks between two processes, or a limit of the machine.
pub(crate) trait Side {
    /// Prepares buffers of this size and returns the version. Uses no CPU between measurements.
    fn start(&mut self, buffer_bytes: u64) -> Result<String, Failure>;

    /// Measures a cell for about `seconds`; `None` if the side does not support it. Figures that do not depend on the
    /// batch may be measured once in a `round`.
    fn measure(&mut self, cell: Cell, seconds: f64, round: usize) -> Result<Option<(Figures, Usage)>, Failure>;

    /// Returns the number of buffers that it keeps while others are measured.
    fn buffers(&self) -> u64 {
        0
    }

    /// Releases all resources.
    fn stop(&mut self);
}

/// Side with its name in the tables.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// Waiting strategy of its two ends.
    pub(crate) pacing: &'static str,
    pub(crate) version: String,
    pub(crate) side: Box<dyn Side>,
}

impl Entry {
    pub(crate) fn new(name: &'static str, pacing: &'static str, side: impl Side + 'static) -> Self {
        Self { name, pacing, version: String::new(), side: Box::new(side) }
    }
}
