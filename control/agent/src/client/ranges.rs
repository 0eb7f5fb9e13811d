//! Range reads: several ranges of several objects in one batch, one request for each owner.

use kvplane_client::Request;
use kvplane_proto::{Status, Version};

use super::{Client, Slice};
use crate::error::Error;

/// Range of an object and its destination; the slice gives the length.
#[derive(Clone, Copy, Debug)]
pub struct ObjectRange<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Offset in the object.
    pub offset: u64,
    /// Destination.
    pub into: Slice,
}

impl Client {
    /// Reads ranges of objects into registered memory; one outcome for each: the version of the object, or `None` where
    /// there is no object. Ranges of one object may be of different versions if it is replaced meanwhile.
    ///
    /// A range carries its own checksum over the network, but cannot be verified against the checksum of its object.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: two ranges have overlapping destinations, or one is empty. A range past
    /// the end of its object fails on its own.
    pub fn get_ranges(&mut self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<Option<Version>, Error>>, Error> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let request =
            |range: &ObjectRange<'_>| Ok(Request::GetRange(self.digest(range.key)?, range.offset, range.into.local()));
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let results = self.run(&requests?)?;
        let outcome = |(result, range): (kvplane_client::TaskResult, &ObjectRange<'_>)| match result.status {
            Status::Striped => self.get_striped_range(self.digest(range.key)?, range.offset, range.into.local()),
            Status::Ok => Ok(Some(result.version)),
            Status::NotFound => Ok(None),
            status => {
                let what = format!("get of {} bytes at {} of an object", range.into.local().bytes, range.offset);
                Err(self.problem(what, status))
            }
        };
        Ok(results.into_iter().zip(ranges).map(outcome).collect())
    }
}
