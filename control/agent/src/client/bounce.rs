//! Bounce buffer: registered memory of a client that grows with the longest value that passed through it.

use kvplane_engine::{Buffer, RegionOptions, Slice};
use kvplane_proto::Status;

use super::requester::Requester;
use crate::Region;
use crate::error::Error;

/// Bounce buffer, allocated at its first use.
pub(super) struct BounceBuffer {
    name: &'static str,
    least_bytes: usize,
    buffer: Option<Buffer>,
}

impl BounceBuffer {
    /// Creates a buffer whose memory has this name and at least `least_bytes` once it is allocated.
    pub(super) const fn new(name: &'static str, least_bytes: usize) -> Self {
        Self { name, least_bytes, buffer: None }
    }

    /// Returns the buffer, grown to at least `bytes`: a buffer that is too short is unregistered first.
    pub(super) fn at_least(&mut self, bytes: usize, requester: &mut Requester) -> Result<Buffer, Error> {
        match self.buffer.take() {
            Some(buffer) if buffer.region().bytes() >= bytes => return Ok(self.buffer.insert(buffer).clone()),
            Some(short) => requester.unregister(short),
            None => {}
        }
        let options = RegionOptions::new(self.name, bytes.max(self.least_bytes).next_power_of_two());
        let buffer = requester.register(Region::allocate(&options)?);
        Ok(self.buffer.insert(buffer).clone())
    }

    /// Copies a value into the buffer, to be put from there. Rejects a value of 0 bytes.
    pub(super) fn copy_in(&mut self, value: &[u8], requester: &mut Requester) -> Result<Slice, Error> {
        if value.is_empty() {
            return Err(Error::Status { what: "put of 0 bytes".to_owned(), status: Status::Empty, cause: None });
        }
        let buffer = self.at_least(value.len(), requester)?;
        buffer.region().copy_in(0, value);
        Ok(buffer.slice(0, value.len()))
    }
}
