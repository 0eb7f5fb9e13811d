//! Sessions: objects that are written and read range by range, as an engine's layers come and go.
//!
//! A put session has its room from the start. Its ranges come in any order and in parallel, and the object is there for
//! everybody when the session is committed. Until then only who asks for ranges *as they come* is given what is there.
//! A session that is left alone for longer than it said is given up by its node, as one whose client was killed is;
//! what such a client writes later reaches nobody.

use std::time::Duration;

use kvplane_client::{PeerIncarnation, Request, TaskResult};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Limits, Status, Version};

use super::{Client, ObjectRange, Put, Slice};
use crate::error::Error;

/// An object that is being written in ranges. To be committed or aborted; if it is neither, its node gives it up after
/// a while.
#[derive(Debug)]
#[must_use = "a session is committed or aborted"]
pub struct PutSession {
    digest: Digest,
    incarnation: PeerIncarnation,
    draft: u64,
    bytes: u64,
}

impl PutSession {
    /// The same session, for a call that outlives its caller's borrow.
    pub(crate) const fn twin(&self) -> Self {
        Self { digest: self.digest, incarnation: self.incarnation, draft: self.draft, bytes: self.bytes }
    }

    /// Length of the object.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What came of beginning a put session.
#[derive(Debug)]
pub enum BeginOutcome {
    /// Its ranges can be written.
    Session(PutSession),
    /// There is an object under this key already; it is left as it is.
    Exists,
}

/// A range of a session's object, and the memory that it is written from.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The session.
    pub session: &'a PutSession,
    /// Where in the object.
    pub offset: u64,
    /// From where.
    pub from: Slice,
}

/// What is there of a range that was asked for as it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeOutcome {
    /// The range, of an object that is complete.
    Whole(Version),
    /// The range, of an object that is still being written, and may be given up yet.
    Written,
    /// The object is being written, and not all of the range is there: ask again.
    Pending,
    /// There is no such object, nor does anybody write one.
    Missing,
}

/// An object that is read range by range, all of one version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GetSession {
    bytes: u64,
    version: Option<Version>,
}

impl GetSession {
    /// Length of the object.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Client {
    /// Begins to write an object of `bytes` in ranges, with pauses of at most `idle`.
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

    /// Begins many; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: a key or length that cannot be, or pauses of more than ten minutes.
    pub fn put_sessions(
        &mut self,
        items: &[(impl AsRef<[u8]>, u64)],
        options: &PutOptions,
        idle: Duration,
    ) -> Result<Vec<Result<BeginOutcome, Error>>, Error> {
        let idle_ms = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
        if !(1..=Limits::DRAFT_IDLE_MOST_MS).contains(&idle_ms) {
            let most = Limits::DRAFT_IDLE_MOST_MS;
            return Err(Error::Argument(format!("a session may pause for 1 to {most} ms, not {idle_ms}")));
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
                    let (incarnation, draft) = (result.incarnation, result.version.0);
                    Ok(BeginOutcome::Session(PutSession { digest, incarnation, draft, bytes: *bytes }))
                }
                Status::Exists => Ok(BeginOutcome::Exists),
                status => Err(self.problem(format!("session of {bytes} bytes"), status)),
            }
        });
        Ok(begun.collect())
    }

    /// Writes ranges of sessions; one outcome for each. A range that was written before is left as it is.
    ///
    /// # Errors
    /// When the batch as a whole is malformed. A range past its object's end, one that overlaps what was written, and
    /// one of a session that was given up meanwhile are errors of their own.
    pub fn fill(&mut self, fills: &[Fill<'_>]) -> Result<Vec<Result<(), Error>>, Error> {
        if fills.is_empty() {
            return Ok(Vec::new());
        }
        let request = |fill: &Fill<'_>| {
            let PutSession { digest, incarnation, draft, .. } = *fill.session;
            Request::Fill(digest, incarnation, draft, fill.offset, fill.from.local())
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

    /// Makes sessions objects: all of their ranges are written. One outcome for each. A session that is not complete
    /// (`Pending`) goes on: what is missing can be written, and it be committed again ([`Self::commit_session`]).
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn commit_sessions(&mut self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> =
            sessions.iter().map(|session| Request::Seal(session.digest, session.incarnation, session.draft)).collect();
        let results = self.run(&requests)?;
        let outcomes = results.into_iter().zip(sessions).map(|(result, session)| match result.status {
            Status::Ok => Ok(Put::Stored(result.version)),
            Status::Exists => Ok(Put::Exists),
            status => Err(self.problem(format!("commit of a session of {} bytes", session.bytes), status)),
        });
        Ok(outcomes.collect())
    }

    /// Makes one session an object.
    ///
    /// # Errors
    /// When it is not complete, was given up meanwhile, or its owner cannot be asked.
    pub fn commit_session(&mut self, session: &PutSession) -> Result<Put, Error> {
        let mut outcomes = self.commit_sessions(&[session])?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Gives sessions up; whether each was still there. Of an owner that is another by now, none is.
    ///
    /// # Errors
    /// When an owner cannot be asked.
    pub fn abort_sessions(&mut self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> = sessions
            .iter()
            .map(|session| Request::Discard(session.digest, session.incarnation, session.draft))
            .collect();
        let results = self.run(&requests)?;
        let present = |result: TaskResult| match result.status {
            Status::Stale => Ok(false),
            _ => self.present(result, "abort of a session"),
        };
        results.into_iter().map(present).collect()
    }

    /// As [`Self::get_ranges`], also of objects that are still being written: of those, what is there already.
    ///
    /// # Errors
    /// As there.
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

    /// Begins to read an object range by range; `None` when there is none. It holds nothing on the node: a range may
    /// turn out to be of another version, which is an error, or of an object that is gone.
    ///
    /// # Errors
    /// When the owner cannot be asked.
    pub fn get_session(&mut self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        Ok(self.size(key)?.map(|bytes| GetSession { bytes, version: None }))
    }

    /// Reads ranges of a session's object, under its key; whether it was there. All ranges of a session are of one
    /// version.
    ///
    /// # Errors
    /// `Stale` when the object was replaced since the session's first range, or by one of another length before that;
    /// else as [`Self::get_ranges`].
    pub fn read_session(&mut self, session: &mut GetSession, ranges: &[ObjectRange<'_>]) -> Result<bool, Error> {
        let mut is_replaced = false;
        for (outcome, range) in self.get_ranges(ranges)?.into_iter().zip(ranges) {
            let Some(version) = outcome? else { return Ok(false) };
            // What said how long the object is did not say of which version that is: it is asked again.
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
