//! What takes several trips, for futures: lists, removal by pattern, sessions, objects in pieces and in stripes.
//!
//! These are the blocking client's own calls, run on the thread that drives it. While one of them waits for its
//! answers, all that is under way goes on, as the waiting drives it; what others ask for is begun when it has ended.

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

/// A range of an object that its caller's future keeps.
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
    /// Runs anything that a blocking client can do on the thread of this one, with the memory that is registered here.
    /// Transfers of others go on meanwhile; what they ask for is begun afterwards. A panic of `work` ends the thread,
    /// and with it this client and its clones.
    ///
    /// # Errors
    /// When too many commands wait, or the thread has ended.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Client) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, wait) = oneshot::channel();
        // Whoever asked may have given up.
        self.send(Command::Work(Box::new(move |client| drop(answer.send(work(client))))))?;
        wait.await.map_err(|_| ended())
    }

    /// The next page of all objects: see [`Client::list`].
    ///
    /// # Errors
    /// As there.
    pub async fn list(&self, cursor: Option<ListCursor>) -> Result<ListPage, Error> {
        self.with(move |client| client.list(cursor)).await?
    }

    /// Removes the objects whose keys have a match of a pattern: see [`Client::remove_matching`].
    ///
    /// # Errors
    /// As there.
    pub async fn remove_matching(&self, pattern: &str) -> Result<u64, Error> {
        let pattern = pattern.to_owned();
        self.with(move |client| client.remove_matching(&pattern)).await?
    }

    /// Removes all objects: see [`Client::remove_all`].
    ///
    /// # Errors
    /// As there.
    pub async fn remove_all(&self, of_all: bool) -> Result<u64, Error> {
        self.with(move |client| client.remove_all(of_all)).await?
    }

    /// Stores a copy of these bytes: see [`Client::put_with`].
    ///
    /// # Errors
    /// As there.
    pub async fn put_with(&self, key: &[u8], value: Vec<u8>, options: &PutOptions) -> Result<Put, Error> {
        let (key, options) = (key.to_vec(), *options);
        self.with(move |client| client.put_with(&key, &value, &options)).await?
    }

    /// The bytes under a key: see [`Client::get`].
    ///
    /// # Errors
    /// As there.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        let key = key.to_vec();
        self.with(move |client| client.get(&key)).await?
    }

    /// Which of these keys have an object, which is wanted in memory next: see [`Client::batch_exists_ahead`].
    ///
    /// # Errors
    /// As there.
    pub async fn batch_exists_ahead(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let keys = own(keys);
        self.with(move |client| client.batch_exists_ahead(&keys)).await?
    }

    /// Has nodes bring objects to `tier`: see [`Client::prefetch`].
    ///
    /// # Errors
    /// As there.
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
    /// As there.
    pub async fn batch_put_parts(
        &self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let (items, options) = (own_pieces(items), *options);
        self.with(move |client| client.batch_put_parts(&items, &options)).await?
    }

    /// Brings many objects, each into several pieces of registered memory: see [`Client::batch_get_into_parts`].
    ///
    /// # Errors
    /// As there.
    pub async fn batch_get_into_parts(
        &self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let items = own_pieces(items);
        self.with(move |client| client.batch_get_into_parts(&items)).await?
    }

    /// Begins to write objects in ranges: see [`Client::put_sessions`].
    ///
    /// # Errors
    /// As there.
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
    /// As there.
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

    /// Makes objects of sessions: see [`Client::commit_sessions`].
    ///
    /// # Errors
    /// As there.
    pub async fn commit_sessions(&self, sessions: &[&PutSession]) -> Result<Vec<Result<Put, Error>>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.with(move |client| client.commit_sessions(&sessions.iter().collect::<Vec<_>>())).await?
    }

    /// Gives sessions up: see [`Client::abort_sessions`].
    ///
    /// # Errors
    /// As there.
    pub async fn abort_sessions(&self, sessions: &[&PutSession]) -> Result<Vec<bool>, Error> {
        let sessions: Vec<PutSession> = sessions.iter().map(|session| session.twin()).collect();
        self.with(move |client| client.abort_sessions(&sessions.iter().collect::<Vec<_>>())).await?
    }

    /// Brings ranges also of objects that are being written: see [`Client::get_ranges_as_they_come`].
    ///
    /// # Errors
    /// As there.
    pub async fn get_ranges_as_they_come(
        &self,
        ranges: &[ObjectRange<'_>],
    ) -> Result<Vec<Result<RangeOutcome, Error>>, Error> {
        let ranges = OwnRange::all(ranges);
        self.with(move |client| client.get_ranges_as_they_come(&OwnRange::lent(&ranges))).await?
    }

    /// Begins to read an object range by range: see [`Client::get_session`].
    ///
    /// # Errors
    /// As there.
    pub async fn get_session(&self, key: &[u8]) -> Result<Option<GetSession>, Error> {
        let key = key.to_vec();
        self.with(move |client| client.get_session(&key)).await?
    }

    /// Reads ranges of a session's object: see [`Client::read_session`].
    ///
    /// # Errors
    /// As there.
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

    /// The puts of a batch that go in stripes, each by its position.
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

    /// The gets of a batch whose objects are in stripes, each by its position.
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

    /// The ranges of a batch whose objects are in stripes, each by its position.
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
