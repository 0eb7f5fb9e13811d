//! Range reads: several ranges of several objects in one batch, one request for each owner; and get sessions, whose
//! ranges are all of one version.

use kvplane_client::{Request, TaskResult};
use kvplane_engine::Slice;
use kvplane_proto::{Status, Version};

use super::namespace::Namespace;
use super::objects::Objects;
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

/// Outcome of a range read that includes incomplete objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeOutcome {
    /// Range of a committed object.
    Whole(Version),
    /// Range of an object that is still being written, and may be aborted yet.
    Written,
    /// The object is being written, and the range is not complete: retry.
    Pending,
    /// The object does not exist and is not being written.
    Missing,
}

/// Object that is read range by range, all of one version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetSession {
    bytes: u64,
    version: Option<Version>,
}

impl GetSession {
    /// Returns the length of the object.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Reads of parts of objects: [`Client::ranges`](super::Client::ranges).
pub struct ObjectRanges<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
}

impl ObjectRanges<'_> {
    /// Reads ranges of objects into registered memory; one outcome for each: the version of the object, or `None` where
    /// there is no object. Ranges of one object may be of different versions if it is replaced meanwhile.
    ///
    /// A range carries its own checksum over the network, but cannot be verified against the checksum of its object.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: two ranges have overlapping destinations, or one is empty. A range past
    /// the end of its object fails on its own.
    pub fn get(&mut self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<Option<Version>, Error>>, Error> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let request = |range: &ObjectRange<'_>| {
            Ok(Request::GetRange(self.namespace.digest(range.key)?, range.offset, range.into.local()))
        };
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let results = self.objects.requester_mut().run(&requests?)?;
        let outcome = |(result, range): (TaskResult, &ObjectRange<'_>)| match result.status {
            Status::Striped => {
                self.objects.get_striped_range(self.namespace.digest(range.key)?, range.offset, range.into.local())
            }
            Status::Ok => Ok(Some(result.version)),
            Status::NotFound => Ok(None),
            status => {
                let what = format!("get of {} bytes at {} of an object", range.into.local().bytes, range.offset);
                Err(self.objects.requester().problem(what, status))
            }
        };
        Ok(results.into_iter().zip(ranges).map(outcome).collect())
    }

    /// Like [`Self::get`], and also reads objects that are still being written: those of their ranges that are
    /// complete.
    ///
    /// # Errors
    /// Errors of [`Self::get`].
    pub fn get_as_they_come(&mut self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<RangeOutcome, Error>>, Error> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let request = |range: &ObjectRange<'_>| {
            Ok(Request::PeekRange(self.namespace.digest(range.key)?, range.offset, range.into.local()))
        };
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let results = self.objects.requester_mut().run(&requests?)?;
        let outcomes = results.into_iter().zip(ranges).map(|(result, range)| match (result.status, result.version) {
            (Status::Ok, Version(0)) => Ok(RangeOutcome::Written),
            (Status::Ok, version) => Ok(RangeOutcome::Whole(version)),
            (Status::Pending, _) => Ok(RangeOutcome::Pending),
            (Status::NotFound, _) => Ok(RangeOutcome::Missing),
            (Status::Striped, _) => {
                let found = self.objects.get_striped_range(
                    self.namespace.digest(range.key)?,
                    range.offset,
                    range.into.local(),
                )?;
                Ok(found.map_or(RangeOutcome::Missing, RangeOutcome::Whole))
            }
            (status, _) => {
                let what = format!("get of {} bytes at {} of an object", range.into.local().bytes, range.offset);
                Err(self.objects.requester().problem(what, status))
            }
        });
        Ok(outcomes.collect())
    }

    /// Opens a get session, which reads an object range by range; `None` when there is none. It pins nothing on the
    /// node: a range may turn out to be of another version, which is an error, or of an object that is gone.
    ///
    /// # Errors
    /// When the owner does not answer.
    pub fn open_session(&mut self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        Ok(self.objects.size(self.namespace.digest(key)?)?.map(|bytes| GetSession { bytes, version: None }))
    }

    /// Reads ranges of a session's object, under its key. Returns true if the object exists. All ranges of a session
    /// are of one version.
    ///
    /// # Errors
    /// `Stale` when the object was replaced since the session's first range, or by one of another length before that;
    /// otherwise the same as [`Self::get`].
    pub fn read_session(&mut self, session: &mut GetSession, ranges: &[ObjectRange<'_>]) -> Result<bool, Error> {
        let mut is_replaced = false;
        for (outcome, range) in self.get(ranges)?.into_iter().zip(ranges) {
            let Some(version) = outcome? else { return Ok(false) };
            // The reply that gave the length did not give a version: the length is checked again, now that the
            // version is known.
            if session.version.is_none() {
                let Some(bytes) = self.objects.size(self.namespace.digest(range.key)?)? else { return Ok(false) };
                is_replaced = bytes != session.bytes;
            }
            if is_replaced || *session.version.get_or_insert(version) != version {
                let what = "get of a range of an object that was replaced".to_owned();
                return Err(self.objects.requester().problem(what, Status::Stale));
            }
        }
        Ok(true)
    }
}
