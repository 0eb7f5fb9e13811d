//! Groups of asynchronous operations: keys, ranges, put sessions and scatter-gather.
//!
//! Except for plain range reads, these are the blocking client's own calls, run on the thread that drives it.

use std::time::Duration;

use kvplane_client::{Request, TaskResult};
use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Status, Version};

use super::{AsyncClient, refused};
use crate::client::{
    BeginOutcome, Fill, GetSession, Got, ListCursor, ListPage, ObjectRange, Put, PutSession, RangeOutcome,
};
use crate::error::Error;

impl AsyncClient {
    /// Returns the keys of the client's tenant: see [`Client::keys`](crate::Client::keys).
    #[must_use]
    pub const fn keys(&self) -> AsyncKeys<'_> {
        AsyncKeys { client: self }
    }

    /// Returns the reads of parts of objects: see [`Client::ranges`](crate::Client::ranges).
    #[must_use]
    pub const fn ranges(&self) -> AsyncObjectRanges<'_> {
        AsyncObjectRanges { client: self }
    }

    /// Returns the put sessions: see [`Client::put_sessions`](crate::Client::put_sessions).
    #[must_use]
    pub const fn put_sessions(&self) -> AsyncPutSessions<'_> {
        AsyncPutSessions { client: self }
    }

    /// Returns the puts and gets of objects in several pieces of registered memory: see
    /// [`Client::scatter_gather`](crate::Client::scatter_gather).
    #[must_use]
    pub const fn scatter_gather(&self) -> AsyncScatterGather<'_> {
        AsyncScatterGather { client: self }
    }
}

/// [`Keys`](crate::Keys) for futures.
#[derive(Clone, Copy)]
pub struct AsyncKeys<'a> {
    client: &'a AsyncClient,
}

impl AsyncKeys<'_> {
    /// Returns the next page of all objects: see [`Keys::list`](crate::Keys::list).
    ///
    /// # Errors
    /// Errors of `Keys::list`.
    pub async fn list(self, cursor: Option<ListCursor>) -> Result<ListPage, Error> {
        self.client.with(move |client| client.keys().list(cursor)).await?
    }

    /// Removes the objects whose keys match a pattern: see [`Keys::remove_matching`](crate::Keys::remove_matching).
    ///
    /// # Errors
    /// Errors of `Keys::remove_matching`.
    pub async fn remove_matching(self, pattern: &str) -> Result<u64, Error> {
        let pattern = pattern.to_owned();
        self.client.with(move |client| client.keys().remove_matching(&pattern)).await?
    }

    /// Removes all objects: see [`Keys::remove_all`](crate::Keys::remove_all).
    ///
    /// # Errors
    /// Errors of `Keys::remove_all`.
    pub async fn remove_all(self, of_all: bool) -> Result<u64, Error> {
        self.client.with(move |client| client.keys().remove_all(of_all)).await?
    }
}

/// [`ObjectRanges`](crate::ObjectRanges) for futures.
#[derive(Clone, Copy)]
pub struct AsyncObjectRanges<'a> {
    client: &'a AsyncClient,
}

impl AsyncObjectRanges<'_> {
    /// Reads ranges of objects into registered memory: see [`ObjectRanges::get`](crate::ObjectRanges::get).
    ///
    /// # Errors
    /// Errors of `ObjectRanges::get`.
    pub async fn get(self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<Option<Version>, Error>>, Error> {
        let request = |range: &ObjectRange<'_>| {
            Ok(Request::GetRange(self.client.namespace.digest(range.key)?, range.offset, range.into.local()))
        };
        let requests: Result<Vec<Request>, Error> = ranges.iter().map(request).collect();
        let outcome = |result: &TaskResult| match result.status {
            Status::Ok => Ok(Some(result.version)),
            Status::NotFound => Ok(None),
            status => Err(refused("get of a range", status)),
        };
        let results = self.client.run(requests?).await?;
        let mut outcomes: Vec<Result<Option<Version>, Error>> = results.iter().map(outcome).collect();
        let striped = ranges.iter().enumerate().filter(|(at, _)| results[*at].status == Status::Striped);
        let striped: Vec<(usize, ObjectRange<'_>)> = striped.map(|(at, range)| (at, *range)).collect();
        if !striped.is_empty() {
            self.get_from_stripes(&striped, &mut outcomes).await?;
        }
        Ok(outcomes)
    }

    /// Reads ranges, also of objects that are being written: see
    /// [`ObjectRanges::get_as_they_come`](crate::ObjectRanges::get_as_they_come).
    ///
    /// # Errors
    /// Errors of `ObjectRanges::get_as_they_come`.
    pub async fn get_as_they_come(self, ranges: &[ObjectRange<'_>]) -> Result<Vec<Result<RangeOutcome, Error>>, Error> {
        let ranges = OwnRange::all(ranges);
        self.client.with(move |client| client.ranges().get_as_they_come(&OwnRange::lent(&ranges))).await?
    }

    /// Opens a get session: see [`ObjectRanges::open_session`](crate::ObjectRanges::open_session).
    ///
    /// # Errors
    /// Errors of `ObjectRanges::open_session`.
    pub async fn open_session(self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        let key = key.to_vec();
        self.client.with(move |client| client.ranges().open_session(&key)).await?
    }

    /// Reads ranges of a session's object: see [`ObjectRanges::read_session`](crate::ObjectRanges::read_session).
    ///
    /// # Errors
    /// Errors of `ObjectRanges::read_session`.
    pub async fn read_session(self, session: &mut GetSession, ranges: &[ObjectRange<'_>]) -> Result<bool, Error> {
        let (mut read, ranges) = (*session, OwnRange::all(ranges));
        let (read, outcome) = self
            .client
            .with(move |client| {
                let outcome = client.ranges().read_session(&mut read, &OwnRange::lent(&ranges));
                (read, outcome)
            })
            .await?;
        *session = read;
        outcome
    }

    /// Reads the ranges of a batch whose objects are striped, each identified by its position.
    async fn get_from_stripes(
        self,
        ranges: &[(usize, ObjectRange<'_>)],
        outcomes: &mut [Result<Option<Version>, Error>],
    ) -> Result<(), Error> {
        let places: Vec<usize> = ranges.iter().map(|(at, _)| *at).collect();
        let ranges = OwnRange::all(&ranges.iter().map(|(_, range)| *range).collect::<Vec<_>>());
        let got = self.client.with(move |client| client.ranges().get(&OwnRange::lent(&ranges))).await??;
        places.into_iter().zip(got).for_each(|(at, outcome)| outcomes[at] = outcome);
        Ok(())
    }
}

/// [`PutSessions`](crate::PutSessions) for futures.
#[derive(Clone, Copy)]
pub struct AsyncPutSessions<'a> {
    client: &'a AsyncClient,
}

impl AsyncPutSessions<'_> {
    /// Opens put sessions: see [`PutSessions::batch_open`](crate::PutSessions::batch_open).
    ///
    /// # Errors
    /// Errors of `PutSessions::batch_open`.
    pub async fn batch_open(
        self,
        items: &[(impl AsRef<[u8]>, u64)],
        options: &PutOptions,
        idle: Duration,
    ) -> Result<Vec<Result<BeginOutcome, Error>>, Error> {
        let items: Vec<(Vec<u8>, u64)> = items.iter().map(|(key, bytes)| (key.as_ref().to_vec(), *bytes)).collect();
        let options = *options;
        self.client.with(move |client| client.put_sessions().batch_open(&items, &options, idle)).await?
    }

    /// Writes ranges of sessions: see [`PutSessions::fill`](crate::PutSessions::fill).
    ///
    /// # Errors
    /// Errors of `PutSessions::fill`.
    pub async fn fill(self, fills: &[Fill<'_>]) -> Result<Vec<Result<(), Error>>, Error> {
        let fills: Vec<(PutSession, u64, Slice)> =
            fills.iter().map(|fill| (fill.session.twin(), fill.offset, fill.from)).collect();
        self.client
            .with(move |client| {
                let fills: Vec<Fill<'_>> = fills
                    .iter()
                    .map(|(session, offset, from)| Fill { session, offset: *offset, from: *from })
                    .collect();
                client.put_sessions().fill(&fills)
            })
            .await?
    }

    /// Commits sessions: see [`PutSessions::batch_commit`](crate::PutSessions::batch_commit).
    ///
    /// # Errors
    /// Errors of `PutSessions::batch_commit`.
    pub async fn batch_commit(self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.client.with(move |client| client.put_sessions().batch_commit(&sessions.iter().collect::<Vec<_>>())).await?
    }

    /// Aborts sessions: see [`PutSessions::batch_abort`](crate::PutSessions::batch_abort).
    ///
    /// # Errors
    /// Errors of `PutSessions::batch_abort`.
    pub async fn batch_abort(self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.client.with(move |client| client.put_sessions().batch_abort(&sessions.iter().collect::<Vec<_>>())).await?
    }
}

/// [`ScatterGather`](crate::ScatterGather) for futures.
#[derive(Clone, Copy)]
pub struct AsyncScatterGather<'a> {
    client: &'a AsyncClient,
}

impl AsyncScatterGather<'_> {
    /// Stores many objects, each from several pieces of registered memory: see
    /// [`ScatterGather::batch_put_from`](crate::ScatterGather::batch_put_from).
    ///
    /// # Errors
    /// Errors of `ScatterGather::batch_put_from`.
    pub async fn batch_put_from(
        self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let (items, options) = (own_pieces(items), *options);
        self.client.with(move |client| client.scatter_gather().batch_put_from(&items, &options)).await?
    }

    /// Reads many objects, each into several pieces of registered memory: see
    /// [`ScatterGather::batch_get_into`](crate::ScatterGather::batch_get_into).
    ///
    /// # Errors
    /// Errors of `ScatterGather::batch_get_into`.
    pub async fn batch_get_into(
        self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let items = own_pieces(items);
        self.client.with(move |client| client.scatter_gather().batch_get_into(&items)).await?
    }
}

/// Range of an object that the caller's future owns.
struct OwnRange {
    key: Vec<u8>,
    offset: u64,
    into: Slice,
}

impl OwnRange {
    fn all(ranges: &[ObjectRange<'_>]) -> Vec<Self> {
        let own = |range: &ObjectRange<'_>| Self { key: range.key.to_vec(), offset: range.offset, into: range.into };
        ranges.iter().map(own).collect()
    }

    fn lent(ranges: &[Self]) -> Vec<ObjectRange<'_>> {
        ranges.iter().map(|range| ObjectRange { key: &range.key, offset: range.offset, into: range.into }).collect()
    }
}

type Pieces = Vec<(Vec<u8>, Vec<Slice>)>;

fn own_pieces(items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)]) -> Pieces {
    items.iter().map(|(key, pieces)| (key.as_ref().to_vec(), pieces.as_ref().to_vec())).collect()
}
