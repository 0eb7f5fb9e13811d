//! Put and get sessions: objects that are written and read range by range, as an engine produces and needs its layers.
//!
//! A put session reserves its memory at the start. Its ranges are written in any order and in parallel, and the object
//! becomes visible when the session is committed. Until then only range reads of incomplete objects
//! ([`Client::get_ranges_as_they_come`]) see its ranges. The node aborts a session that is idle for longer than its
//! limit, such as that of a client that was killed; late writes of such a client are rejected.

use std::time::Duration;

use kvplane_client::{PeerIncarnation, Request, TaskResult};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Limits, Status, Version};

use super::{Client, ObjectRange, Put, Slice};
use crate::error::Error;

/// Object that is being written range by range, to be committed or aborted. The node aborts it after the session's idle
/// limit if the client does neither.
#[derive(Debug)]
#[must_use = "a session is committed or aborted"]
pub struct PutSession {
    digest: Digest,
    incarnation: PeerIncarnation,
    number: u64,
    bytes: u64,
}

impl PutSession {
    /// Returns a second handle of the same session, for a call that outlives its caller's borrow.
    pub(crate) const fn twin(&self) -> Self {
        Self { digest: self.digest, incarnation: self.incarnation, number: self.number, bytes: self.bytes }
    }

    /// Returns the length of the object.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Outcome of opening a put session.
#[derive(Debug)]
pub enum BeginOutcome {
    /// Session whose ranges can be written.
    Session(PutSession),
    /// An object under this key exists already; it is left unchanged.
    Exists,
}

/// Range of a session's object, and the memory that it is written from.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// Session.
    pub session: &'a PutSession,
    /// Offset in the object.
    pub offset: u64,
    /// Source of the bytes.
    pub from: Slice,
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

impl Client {
    /// Opens a put session for an object of `bytes`, which the node aborts after `idle` without a write.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_session(
        &mut self,
        key: &[u8],
        bytes: u64,
        options: &PutOptions,
        idle: Duration,
    ) -> Result<BeginOutcome, Error> {
        let mut begun = self.put_sessions(&[(key, bytes)], options, idle)?;
        begun.pop().unwrap_or(Ok(BeginOutcome::Exists))
    }

    /// Opens many put sessions; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: an invalid key or length, or an idle limit of more than ten minutes.
    pub fn put_sessions(
        &mut self,
        items: &[(impl AsRef<[u8]>, u64)],
        options: &PutOptions,
        idle: Duration,
    ) -> Result<Vec<Result<BeginOutcome, Error>>, Error> {
        let idle_ms = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
        if !(1..=Limits::PUT_SESSION_IDLE_MOST_MS).contains(&idle_ms) {
            let most = Limits::PUT_SESSION_IDLE_MOST_MS;
            return Err(Error::Argument(format!("the idle limit of a session is 1 to {most} ms, not {idle_ms}")));
        }
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let mut requests = Vec::with_capacity(items.len());
        self.puts.clear();
        for (key, bytes) in items {
            let (digest, number) = self.enter_put(key.as_ref(), *bytes, options)?;
            requests.push(Request::Begin(digest, *bytes, idle_ms, number));
        }
        let results = self.run_new_puts(&requests)?;
        let begun = results.into_iter().zip(items).zip(&requests).map(|((result, (_, bytes)), request)| {
            let Request::Begin(digest, ..) = *request else { return Ok(BeginOutcome::Exists) };
            match result.status {
                Status::Ok => {
                    let (incarnation, number) = (result.incarnation, result.version.0);
                    Ok(BeginOutcome::Session(PutSession { digest, incarnation, number, bytes: *bytes }))
                }
                Status::Exists => Ok(BeginOutcome::Exists),
                status => Err(self.problem(format!("session of {bytes} bytes"), status)),
            }
        });
        Ok(begun.collect())
    }

    /// Writes ranges of sessions; one outcome for each. Writing a range again is idempotent: it is left unchanged.
    ///
    /// # Errors
    /// When the batch as a whole is malformed. A range past its object's end, one that overlaps a written range, and
    /// one of a session that was aborted meanwhile fail on their own.
    pub fn fill(&mut self, fills: &[Fill<'_>]) -> Result<Vec<Result<(), Error>>, Error> {
        if fills.is_empty() {
            return Ok(Vec::new());
        }
        let request = |fill: &Fill<'_>| {
            let PutSession { digest, incarnation, number, .. } = *fill.session;
            Request::Fill(digest, incarnation, number, fill.offset, fill.from.local())
        };
        let requests: Vec<Request> = fills.iter().map(request).collect();
        let results = self.run(&requests)?;
        let outcomes = results.into_iter().zip(fills).map(|(result, fill)| match result.status {
            Status::Ok | Status::Exists => Ok(()),
            status => {
                let (bytes, offset) = (fill.from.local().bytes, fill.offset);
                Err(self.problem(format!("fill of {bytes} bytes at {offset} of {}", fill.session.bytes), status))
            }
        });
        Ok(outcomes.collect())
    }

    /// Commits sessions whose ranges are all written; one outcome for each. A session that is not complete (`Pending`)
    /// stays open: the missing ranges can be written and the session committed again ([`Self::commit_session`]).
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn commit_sessions(&mut self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> =
            sessions.iter().map(|session| Request::Seal(session.digest, session.incarnation, session.number)).collect();
        let results = self.run(&requests)?;
        let outcomes = results.into_iter().zip(sessions).map(|(result, session)| match result.status {
            Status::Ok => Ok(Put::Stored(result.version)),
            Status::Exists => Ok(Put::Exists),
            status => Err(self.problem(format!("commit of a session of {} bytes", session.bytes), status)),
        });
        Ok(outcomes.collect())
    }

    /// Commits one session.
    ///
    /// # Errors
    /// When it is not complete, was aborted meanwhile, or its owner does not answer.
    pub fn commit_session(&mut self, session: &PutSession) -> Result<Put, Error> {
        let mut outcomes = self.commit_sessions(&[session])?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Aborts sessions. Returns for each whether it was still open; false if its slot has another owner by now.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn abort_sessions(&mut self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> = sessions
            .iter()
            .map(|session| Request::Discard(session.digest, session.incarnation, session.number))
            .collect();
        let results = self.run(&requests)?;
        let present = |result: TaskResult| match result.status {
            Status::Stale => Ok(false),
            _ => self.present(result, "abort of a session"),
        };
        results.into_iter().map(present).collect()
    }

    /// Like [`Self::get_ranges`], and also reads objects that are still being written: those of their ranges that are
    /// complete.
    ///
    /// # Errors
    /// Errors of [`Self::get_ranges`].
    pub fn get_ranges_as_they_come(
        &mut self,
        ranges: &[ObjectRange<'_>],
    ) -> Result<Vec<Result<RangeOutcome, Error>>, Error> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let request =
            |range: &ObjectRange<'_>| Ok(Request::PeekRange(self.digest(range.key)?, range.offset, range.into.local()));
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let results = self.run(&requests?)?;
        let outcomes = results.into_iter().zip(ranges).map(|(result, range)| match (result.status, result.version) {
            (Status::Ok, Version(0)) => Ok(RangeOutcome::Written),
            (Status::Ok, version) => Ok(RangeOutcome::Whole(version)),
            (Status::Pending, _) => Ok(RangeOutcome::Pending),
            (Status::NotFound, _) => Ok(RangeOutcome::Missing),
            (Status::Striped, _) => {
                let found = self.get_striped_range(self.digest(range.key)?, range.offset, range.into.local())?;
                Ok(found.map_or(RangeOutcome::Missing, RangeOutcome::Whole))
            }
            (status, _) => {
                let what = format!("get of {} bytes at {} of an object", range.into.local().bytes, range.offset);
                Err(self.problem(what, status))
            }
        });
        Ok(outcomes.collect())
    }

    /// Opens a get session, which reads an object range by range; `None` when there is none. It pins nothing on the
    /// node: a range may turn out to be of another version, which is an error, or of an object that is gone.
    ///
    /// # Errors
    /// When the owner does not answer.
    pub fn get_session(&mut self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        Ok(self.size(key)?.map(|bytes| GetSession { bytes, version: None }))
    }

    /// Reads ranges of a session's object, under its key. Returns true if the object exists. All ranges of a session
    /// are of one version.
    ///
    /// # Errors
    /// `Stale` when the object was replaced since the session's first range, or by one of another length before that;
    /// otherwise the same as [`Self::get_ranges`].
    pub fn read_session(&mut self, session: &mut GetSession, ranges: &[ObjectRange<'_>]) -> Result<bool, Error> {
        let mut is_replaced = false;
        for (outcome, range) in self.get_ranges(ranges)?.into_iter().zip(ranges) {
            let Some(version) = outcome? else { return Ok(false) };
            // The reply that gave the length did not give a version: the length is checked again, now that the
            // version is known.
            if session.version.is_none() {
                let Some(bytes) = self.size(range.key)? else { return Ok(false) };
                is_replaced = bytes != session.bytes;
            }
            if is_replaced || *session.version.get_or_insert(version) != version {
                return Err(self.problem("get of a range of an object that was replaced".to_owned(), Status::Stale));
            }
        }
        Ok(true)
    }
}
