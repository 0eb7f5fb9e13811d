//! Parts of objects: several ranges of several objects in one batch, one request for each owner.

use kvplane_proto::client::Request;
use kvplane_proto::{Status, Version};

use super::{Client, Slice};
use crate::error::Error;

/// A part of an object, and where it goes: as many bytes as the slice has.
#[derive(Clone, Copy, Debug)]
pub struct ObjectRange<'a> {
    /// The object.
    pub key: &'a [u8],
    /// Where in it.
    pub offset: u64,
    /// Where it goes.
    pub into: Slice,
}

impl Client {
    /// Brings parts of objects into registered memory; one outcome for each: the version that it is of, or `None` where
    /// there is no object. Ranges of one object may be of different versions if it is replaced meanwhile.
    ///
    /// A range carries a checksum over the network, but cannot be held against that of its object.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: two ranges go to overlapping memory, or one is empty. A range past its
    /// object's end is an error of its own.
    pub fn get_ranges(&mut self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<Option<Version>, Error>>, Error> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let request =
            |range: &ObjectRange<'_>| Ok(Request::GetRange(self.digest(range.key)?, range.offset, range.into.local));
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let results = self.run(&requests?)?;
        let outcome = |(result, range): (kvplane_proto::client::TaskResult, &ObjectRange<'_>)| match result.status {
            Status::Ok => Ok(Some(result.version)),
            Status::NotFound => Ok(None),
            status => {
                let what = format!("get of {} bytes at {} of an object", range.into.local.bytes, range.offset);
                Err(self.problem(what, status))
            }
        };
        Ok(results.into_iter().zip(ranges).map(outcome).collect())
    }

    /// Brings one object into several pieces of registered memory, in order; `None` when there is none. The pieces
    /// together are as long as the object.
    ///
    /// # Errors
    /// When the pieces are not as long as the object, overlap, or the owner cannot be asked.
    pub fn get_into_many(&mut self, key: &[u8], pieces: &[Slice]) -> Result<Option<Version>, Error> {
        // The object may be replaced between two of the pieces; that it is so each time is not to be expected.
        for _ in 0..4 {
            let Some(bytes) = self.size(key)? else { return Ok(None) };
            let wanted: u64 = pieces.iter().map(|piece| piece.local.bytes).sum();
            if wanted != bytes {
                let what = format!("get of {bytes} bytes into {} pieces of {wanted}", pieces.len());
                let status = if wanted < bytes { Status::BufferTooSmall } else { Status::OutOfRange };
                return Err(self.problem(what, status));
            }
            let mut offset = 0;
            let ranges: Vec<ObjectRange<'_>> = pieces
                .iter()
                .map(|piece| {
                    let range = ObjectRange { key, offset, into: *piece };
                    offset += piece.local.bytes;
                    range
                })
                .collect();
            let versions: Result<Vec<Option<Version>>, Error> = self.get_ranges(&ranges)?.into_iter().collect();
            match versions {
                Ok(versions) if versions.iter().all(|version| *version == versions[0]) => return Ok(versions[0]),
                Err(error) if error.status() != Some(Status::OutOfRange) => return Err(error),
                _ => {}
            }
        }
        Err(self.problem("get of an object that is replaced all the time".to_owned(), Status::Busy))
    }
}
