//! Asynchronous calls that take several round trips: listings, removal by pattern, sessions, scatter-gather and striped
//! objects.
//!
//! These are the blocking client's own calls, run on the thread that drives it. While one of them waits for replies,
//! all other batches in flight progress, driven by that wait; new commands start when it has ended.

use std::time::Duration;

use kvplane_engine::Slice;
use kvplane_proto::Version;
use kvplane_proto::message::PutOptions;
use tokio::sync::oneshot;

use super::{AsyncClient, Command, ended};
use crate::client::{
    BeginOutcome, Client, Fill, GetSession, Got, ListCursor, ListPage, ObjectRange, PrefetchTo, Put, PutSession,
    RangeOutcome,
};
use crate::error::Error;

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

fn own(keys: &[impl AsRef<[u8]>]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.as_ref().to_vec()).collect()
}

type Pieces = Vec<(Vec<u8>, Vec<Slice>)>;

fn own_pieces(items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)]) -> Pieces {
    items.iter().map(|(key, pieces)| (key.as_ref().to_vec(), pieces.as_ref().to_vec())).collect()
}

impl AsyncClient {
    /// Runs any operation of the blocking client on the thread of this one, with the memory that is registered here.
    /// Batches in flight progress meanwhile; new commands of other callers start afterwards. A panic of `work` ends the
    /// thread, and with it this client and its clones.
    ///
    /// # Errors
    /// When too many commands wait, or the thread has ended.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, wait) = oneshot::channel();
        // The caller may have given up.
        self.send(Command::Work(Box::new(move |client| drop(answer.send(work(client))))))?;
        wait.await.map_err(|_| ended())
    }

    /// Returns the next page of all objects: see [`Client::list`].
    ///
    /// # Errors
    /// Errors of [`Client::list`].
    pub async fn list(&self, cursor: Option<ListCursor>) -> Result<ListPage, Error> {
        self.with(move |client| client.list(cursor)).await?
    }

    /// Removes the objects whose keys match a pattern: see [`Client::remove_matching`].
    ///
    /// # Errors
    /// Errors of [`Client::remove_matching`].
    pub async fn remove_matching(&self, pattern: &str) -> Result<u64, Error> {
        let pattern = pattern.to_owned();
        self.with(move |client| client.remove_matching(&pattern)).await?
    }

    /// Removes all objects: see [`Client::remove_all`].
    ///
    /// # Errors
    /// Errors of [`Client::remove_all`].
    pub async fn remove_all(&self, of_all: bool) -> Result<u64, Error> {
        self.with(move |client| client.remove_all(of_all)).await?
    }

    /// Stores a copy of these bytes: see [`Client::put_with`].
    ///
    /// # Errors
    /// Errors of [`Client::put_with`].
    pub async fn put_with(&self, key: &[u8], value: Vec<u8>, options: &PutOptions) -> Result<Put, Error> {
        let (key, options) = (key.to_vec(), *options);
        self.with(move |client| client.put_with(&key, &value, &options)).await?
    }

    /// Returns a copy of the object under a key: see [`Client::get`].
    ///
    /// # Errors
    /// Errors of [`Client::get`].
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let key = key.to_vec();
        self.with(move |client| client.get(&key)).await?
    }

    /// Returns for each key whether there is an object, and prefetches it: see [`Client::batch_exists_ahead`].
    ///
    /// # Errors
    /// Errors of [`Client::batch_exists_ahead`].
    pub async fn batch_exists_ahead(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let keys = own(keys);
        self.with(move |client| client.batch_exists_ahead(&keys)).await?
    }

    /// Prefetches objects into `tier`: see [`Client::prefetch`].
    ///
    /// # Errors
    /// Errors of [`Client::prefetch`].
    pub async fn prefetch(
        &self,
        keys: &[impl AsRef<[u8]>],
        tier: PrefetchTo,
        deadline: Duration,
    ) -> Result<Vec<bool>, Error> {
        let keys = own(keys);
        self.with(move |client| client.prefetch(&keys, tier, deadline)).await?
    }

    /// Stores many objects, each from several pieces of registered memory: see [`Client::batch_put_parts`].
    ///
    /// # Errors
    /// Errors of [`Client::batch_put_parts`].
    pub async fn batch_put_parts(
        &self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let (items, options) = (own_pieces(items), *options);
        self.with(move |client| client.batch_put_parts(&items, &options)).await?
    }

    /// Reads many objects, each into several pieces of registered memory: see [`Client::batch_get_into_parts`].
    ///
    /// # Errors
    /// Errors of [`Client::batch_get_into_parts`].
    pub async fn batch_get_into_parts(
        &self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let items = own_pieces(items);
        self.with(move |client| client.batch_get_into_parts(&items)).await?
    }

    /// Opens put sessions: see [`Client::put_sessions`].
    ///
    /// # Errors
    /// Errors of [`Client::put_sessions`].
    pub async fn put_sessions(
        &self,
        items: &[(impl AsRef<[u8]>, u64)],
        options: &PutOptions,
        idle: Duration,
    ) -> Result<Vec<Result<BeginOutcome, Error>>, Error> {
        let items: Vec<(Vec<u8>, u64)> = items.iter().map(|(key, bytes)| (key.as_ref().to_vec(), *bytes)).collect();
        let options = *options;
        self.with(move |client| client.put_sessions(&items, &options, idle)).await?
    }

    /// Writes ranges of sessions: see [`Client::fill`].
    ///
    /// # Errors
    /// Errors of [`Client::fill`].
    pub async fn fill(&self, fills: &[Fill<'_>]) -> Result<Vec<Result<(), Error>>, Error> {
        let fills: Vec<(PutSession, u64, Slice)> =
            fills.iter().map(|fill| (fill.session.twin(), fill.offset, fill.from)).collect();
        self.with(move |client| {
            let fills: Vec<Fill<'_>> =
                fills.iter().map(|(session, offset, from)| Fill { session, offset: *offset, from: *from }).collect();
            client.fill(&fills)
        })
        .await?
    }

    /// Commits sessions: see [`Client::commit_sessions`].
    ///
    /// # Errors
    /// Errors of [`Client::commit_sessions`].
    pub async fn commit_sessions(&self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.with(move |client| client.commit_sessions(&sessions.iter().collect::<Vec<_>>())).await?
    }

    /// Aborts sessions: see [`Client::abort_sessions`].
    ///
    /// # Errors
    /// Errors of [`Client::abort_sessions`].
    pub async fn abort_sessions(&self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.with(move |client| client.abort_sessions(&sessions.iter().collect::<Vec<_>>())).await?
    }

    /// Reads ranges, also of objects that are being written: see [`Client::get_ranges_as_they_come`].
    ///
    /// # Errors
    /// Errors of [`Client::get_ranges_as_they_come`].
    pub async fn get_ranges_as_they_come(
        &self,
        ranges: &[ObjectRange<'_>],
    ) -> Result<Vec<Result<RangeOutcome, Error>>, Error> {
        let ranges = OwnRange::all(ranges);
        self.with(move |client| client.get_ranges_as_they_come(&OwnRange::lent(&ranges))).await?
    }

    /// Opens a get session: see [`Client::get_session`].
    ///
    /// # Errors
    /// Errors of [`Client::get_session`].
    pub async fn get_session(&self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        let key = key.to_vec();
        self.with(move |client| client.get_session(&key)).await?
    }

    /// Reads ranges of a session's object: see [`Client::read_session`].
    ///
    /// # Errors
    /// Errors of [`Client::read_session`].
    pub async fn read_session(&self, session: &mut GetSession, ranges: &[ObjectRange<'_>]) -> Result<bool, Error> {
        let (mut read, ranges) = (*session, OwnRange::all(ranges));
        let (read, outcome) = self
            .with(move |client| {
                let outcome = client.read_session(&mut read, &OwnRange::lent(&ranges));
                (read, outcome)
            })
            .await?;
        *session = read;
        outcome
    }

    /// Runs the puts of a batch that are striped, each identified by its position.
    pub(super) async fn put_in_stripes(
        &self,
        items: Vec<(usize, Vec<u8>, Slice)>,
        options: &PutOptions,
        outcomes: &mut [Result<Put, Error>],
    ) -> Result<(), Error> {
        let options = *options;
        let put = move |client: &mut Client| -> Vec<(usize, Result<Put, Error>)> {
            items.into_iter().map(|(at, key, slice)| (at, client.put_from_with(&key, slice, &options))).collect()
        };
        for (at, outcome) in self.with(put).await? {
            outcomes[at] = outcome;
        }
        Ok(())
    }

    /// Runs the gets of a batch whose objects are striped, each identified by its position.
    pub(super) async fn get_from_stripes(
        &self,
        items: Vec<(usize, Vec<u8>, Slice)>,
        outcomes: &mut [Result<Option<Got>, Error>],
    ) -> Result<(), Error> {
        let get = move |client: &mut Client| -> Vec<(usize, Result<Option<Got>, Error>)> {
            items.into_iter().map(|(at, key, slice)| (at, client.get_into(&key, slice))).collect()
        };
        for (at, outcome) in self.with(get).await? {
            outcomes[at] = outcome;
        }
        Ok(())
    }

    /// Reads the ranges of a batch whose objects are striped, each identified by its position.
    pub(super) async fn ranges_from_stripes(
        &self,
        ranges: &[(usize, ObjectRange<'_>)],
        outcomes: &mut [Result<Option<Version>, Error>],
    ) -> Result<(), Error> {
        let places: Vec<usize> = ranges.iter().map(|(at, _)| *at).collect();
        let ranges = OwnRange::all(&ranges.iter().map(|(_, range)| *range).collect::<Vec<_>>());
        let got = self.with(move |client| client.get_ranges(&OwnRange::lent(&ranges))).await??;
        places.into_iter().zip(got).for_each(|(at, outcome)| outcomes[at] = outcome);
        Ok(())
    }
}
