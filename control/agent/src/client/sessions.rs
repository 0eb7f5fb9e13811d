//! Put sessions: objects that are written range by range, as an engine produces its layers.
//!
//! A put session reserves its memory at the start. Its ranges are written in any order and in parallel, and the object
//! becomes visible when the session is committed. Until then only range reads of incomplete objects
//! ([`super::ObjectRanges::get_as_they_come`]) see its ranges. The node aborts a session that is idle for longer than
//! its limit, such as that of a client that was killed; late writes of such a client are rejected.

use std::time::Duration;

use kvplane_client::{PeerIncarnation, Request, TaskResult};
use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Limits, Status};

use super::namespace::{Namespace, check_options};
use super::objects::Objects;
use super::outcome::Put;
use super::puts::WholePuts;
use crate::error::{ArgumentError, Error};

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

/// Put sessions of a client: [`Client::put_sessions`](super::Client::put_sessions).
pub struct PutSessions<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
    pub(super) puts: &'a mut WholePuts,
}

impl PutSessions<'_> {
    /// Opens a put session for an object of `bytes`, which the node aborts after `idle` without a write.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn open(
        &mut self,
        key: &[u8],
        bytes: u64,
        options: &PutOptions,
        idle: Duration,
    ) -> Result<BeginOutcome, Error> {
        let mut begun = self.batch_open(&[(key, bytes)], options, idle)?;
        begun.pop().unwrap_or(Ok(BeginOutcome::Exists))
    }

    /// Opens many put sessions; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: an invalid key or length, or an idle limit of more than ten minutes.
    pub fn batch_open(
        &mut self,
        items: &[(impl AsRef<[u8]>, u64)],
        options: &PutOptions,
        idle: Duration,
    ) -> Result<Vec<Result<BeginOutcome, Error>>, Error> {
        let idle_ms = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX);
        if !(1..=Limits::PUT_SESSION_IDLE_MOST_MS).contains(&idle_ms) {
            return Err(ArgumentError::SessionIdle { idle_ms }.into());
        }
        if items.is_empty() {
            return Ok(Vec::new());
        }
        check_options(options)?;
        let mut requests = Vec::with_capacity(items.len());
        let book = self.puts.new_book();
        for (key, bytes) in items {
            let (digest, number) = self.namespace.enter(book, key.as_ref(), *bytes, options)?;
            requests.push(Request::Begin(digest, *bytes, idle_ms, number));
        }
        let results = self.objects.put_new(&requests, book)?;
        let begun = results.into_iter().zip(items).zip(&requests).map(|((result, (_, bytes)), request)| {
            let Request::Begin(digest, ..) = *request else { return Ok(BeginOutcome::Exists) };
            match result.status {
                Status::Ok => {
                    let (incarnation, number) = (result.incarnation, result.version.0);
                    Ok(BeginOutcome::Session(PutSession { digest, incarnation, number, bytes: *bytes }))
                }
                Status::Exists => Ok(BeginOutcome::Exists),
                status => Err(self.objects.requester().problem(format!("session of {bytes} bytes"), status)),
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
        let results = self.objects.requester_mut().run(&requests)?;
        let outcomes = results.into_iter().zip(fills).map(|(result, fill)| match result.status {
            Status::Ok | Status::Exists => Ok(()),
            status => {
                let (bytes, offset) = (fill.from.local().bytes, fill.offset);
                Err(self
                    .objects
                    .requester()
                    .problem(format!("fill of {bytes} bytes at {offset} of {}", fill.session.bytes), status))
            }
        });
        Ok(outcomes.collect())
    }

    /// Commits sessions whose ranges are all written; one outcome for each. A session that is not complete (`Pending`)
    /// stays open: the missing ranges can be written and the session committed again ([`Self::commit`]).
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub fn batch_commit(&mut self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> =
            sessions.iter().map(|session| Request::Seal(session.digest, session.incarnation, session.number)).collect();
        let results = self.objects.requester_mut().run(&requests)?;
        let outcomes = results.into_iter().zip(sessions).map(|(result, session)| match result.status {
            Status::Ok => Ok(Put::Stored(result.version)),
            Status::Exists => Ok(Put::Exists),
            status => {
                Err(self.objects.requester().problem(format!("commit of a session of {} bytes", session.bytes), status))
            }
        });
        Ok(outcomes.collect())
    }

    /// Commits one session.
    ///
    /// # Errors
    /// When it is not complete, was aborted meanwhile, or its owner does not answer.
    pub fn commit(&mut self, session: &PutSession) -> Result<Put, Error> {
        let mut outcomes = self.batch_commit(&[session])?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Aborts sessions. Returns for each whether it was still open; false if its slot has another owner by now.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_abort(&mut self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        if sessions.is_empty() {
            return Ok(Vec::new());
        }
        let requests: Vec<Request> = sessions
            .iter()
            .map(|session| Request::Discard(session.digest, session.incarnation, session.number))
            .collect();
        let results = self.objects.requester_mut().run(&requests)?;
        let present = |result: TaskResult| match result.status {
            Status::Stale => Ok(false),
            _ => self.objects.requester().present(result, "abort of a session"),
        };
        results.into_iter().map(present).collect()
    }
}
