//! Emulated network between real processes: delay, loss, reordering, duplicates, damage, limited bandwidth, resets and
//! half-open connections, per port and direction.

pub(crate) mod emulator;
pub(crate) mod switch;
mod tcp;

pub(crate) use emulator::Emulation;
pub(crate) use switch::{Direction, Impairment};
