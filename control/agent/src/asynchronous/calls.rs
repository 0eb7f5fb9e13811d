//! Asynchronous calls that take several round trips: copied values, prefetches and striped objects.
//!
//! These are the blocking client's own calls, run on the thread that drives it. While one of them waits for replies,
//! all other batches in flight progress, driven by that wait; new commands start when it has ended.

use std::time::Duration;

use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;
use tokio::sync::oneshot;

use super::{AsyncClient, Command, ended};
use crate::client::{Client, Got, PrefetchTo, Put};
use crate::error::Error;

fn own(keys: &[impl AsRef<[u8]>]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.as_ref().to_vec()).collect()
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
}
