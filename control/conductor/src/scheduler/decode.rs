//! Decodes: bookings of an instance, expected lengths of outputs, and admission by decode load.

mod book;
mod gate;
mod outputs;

pub(super) use book::{DecodeBook, DecodeJob};
pub(super) use gate::DecodeGate;
pub use outputs::OutputErrors;
pub(super) use outputs::{ExpectedOutput, OutputLengths};
