//! Asynchronous client: a thread drives a blocking client's machinery and completes batches.
//!
//! It works with any executor. Many batches are in flight at once; each future completes when nothing accesses its
//! memory any more. Dropping a future does not cancel its batch: its memory stays in use until the deadline at the
//! latest, which is why requests name registered memory that the client keeps alive.

mod calls;
mod groups;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_client::{PutBook, Request, TaskResult};
use kvplane_engine::{Buffer, Doorbell, Region, Slice};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{BatchId, Status};
use tokio::sync::oneshot;

use crate::client::{Client, ClientConfig, Got, Namespace, Put, Striping, check_key, check_options};
use crate::error::{Error, LibraryThread};
pub use groups::{AsyncKeys, AsyncObjectRanges, AsyncPutSessions, AsyncScatterGather};

/// Limit of commands that wait for the thread.
const COMMANDS: usize = 1024;

/// Longest park, which bounds how late a newer map, or the drop of the last handle, is noticed.
const PARK: Duration = Duration::from_millis(100);

type Answer = oneshot::Sender<Result<Vec<TaskResult>, Error>>;

enum Command {
    Run { requests: Vec<Request>, puts: PutBook, answer: Answer },
    Work(Box<dyn FnOnce(&mut Client) + Send>),
    Register { region: Arc<Region>, answer: SyncSender<Buffer> },
}

/// Client for futures. Clones share one thread, which ends with the last.
#[derive(Clone)]
pub struct AsyncClient {
    commands: SyncSender<Command>,
    doorbell: Doorbell,
    /// Commands sent and not yet received; checked by the thread before it parks.
    waiting: Arc<AtomicUsize>,
    namespace: Arc<Namespace>,
    striping: Striping,
    _thread: Arc<Thread>,
}

struct Thread {
    doorbell: Doorbell,
    handle: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.doorbell.ring();
        // Detached: the thread ends by itself when the last sender is dropped, which is after this.
        drop(self.handle.take());
    }
}

impl AsyncClient {
    /// Connects to the control plane, blocking, and starts the thread.
    ///
    /// # Errors
    /// When there is no control plane, or it rejects the client.
    pub fn connect(config: &ClientConfig) -> Result<Self, Error> {
        let link = Client::connect(config)?.link().clone();
        let (commands, receiver) = sync_channel(COMMANDS);
        let doorbell = Doorbell::new()?;
        let (config, bell) = (config.clone(), doorbell.clone());
        let waiting = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&waiting);
        let namespace = Arc::new(Namespace::new(link.tenant_meant(&config.tenant), config.keep_keys)?);
        let striping = Striping::new(config.stripe_bytes);
        let (ready, wait) = sync_channel(1);
        let handle = std::thread::Builder::new().name("kvplane-client".to_owned()).spawn(move || {
            let mut client = match Client::connect_with(&config, link) {
                Ok(client) => client,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let watched = client.requester().initiator().watch(bell);
            let failed = watched.is_err();
            let _ = ready.send(watched.map_err(Error::from));
            if !failed {
                drive(client, &receiver, &seen);
            }
        })?;
        wait.recv().map_err(|_| Error::ThreadEnded { thread: LibraryThread::Client, starting: true })??;
        let thread = Arc::new(Thread { doorbell: doorbell.clone(), handle: Some(handle) });
        Ok(Self { commands, doorbell, waiting, namespace, striping, _thread: thread })
    }

    /// Registers memory.
    ///
    /// # Errors
    /// When the thread is overwhelmed or has ended.
    pub fn register(&self, region: Arc<Region>) -> Result<Buffer, Error> {
        let (answer, wait) = sync_channel(1);
        self.send(Command::Register { region, answer })?;
        wait.recv().map_err(|_| ended())
    }

    /// Runs requests as one batch; returns their results in order.
    ///
    /// # Errors
    /// When a request is malformed, too many batches wait, or the thread has ended; never for the outcomes of the
    /// requests themselves.
    async fn run(&self, requests: Vec<Request>) -> Result<Vec<TaskResult>, Error> {
        self.run_puts(requests, PutBook::new()).await
    }

    async fn run_puts(&self, requests: Vec<Request>, puts: PutBook) -> Result<Vec<TaskResult>, Error> {
        let (answer, wait) = oneshot::channel();
        self.send(Command::Run { requests, puts, answer })?;
        wait.await.map_err(|_| ended())?
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.commands.try_send(command).map_err(|error| {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            match error {
                TrySendError::Full(_) => Error::Status {
                    what: format!("{COMMANDS} batches wait for the client's thread"),
                    status: Status::Busy,
                    cause: None,
                },
                TrySendError::Disconnected(_) => ended(),
            }
        })?;
        self.doorbell.ring();
        Ok(())
    }

    /// Stores registered memory under a key.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub async fn put_from(&self, key: &[u8], slice: Slice) -> Result<Put, Error> {
        self.put_from_with(key, slice, &PutOptions::default()).await
    }

    /// Like [`Self::put_from`], with options.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub async fn put_from_with(&self, key: &[u8], slice: Slice, options: &PutOptions) -> Result<Put, Error> {
        let mut outcomes = self.batch_put_from_with(&[(key, slice)], options).await?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Reads the object under a key into registered memory; `None` when there is none.
    ///
    /// # Errors
    /// When the memory is too small or the owner does not answer.
    pub async fn get_into(&self, key: &[u8], slice: Slice) -> Result<Option<Got>, Error> {
        let mut outcomes = self.batch_get_into(&[(key, slice)]).await?;
        outcomes.pop().unwrap_or(Ok(None))
    }

    /// Stores many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub async fn batch_put_from(&self, items: &[(impl AsRef<[u8]>, Slice)]) -> Result<Vec<Result<Put, Error>>, Error> {
        self.batch_put_from_with(items, &PutOptions::default()).await
    }

    /// Like [`Self::batch_put_from`], with options.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub async fn batch_put_from_with(
        &self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        check_options(options)?;
        let mut puts = PutBook::new();
        // Objects that are striped in any case are validated with the others, but not put yet: of a malformed batch
        // nothing is stored.
        let mut whole = Vec::with_capacity(items.len());
        let mut outcomes: Vec<Result<Put, Error>> = Vec::with_capacity(items.len());
        for (at, (key, slice)) in items.iter().enumerate() {
            check_key(key.as_ref())?;
            if !self.striping.is_striped(slice.local().bytes) {
                whole.push((at, self.namespace.put(&mut puts, key.as_ref(), slice.local(), options)?));
            }
            outcomes.push(Err(refused("put", Status::TooLarge)));
        }
        let requests: Vec<Request> = whole.iter().map(|(_, request)| *request).collect();
        let results = if requests.is_empty() { Vec::new() } else { self.run_puts(requests, puts).await? };
        for ((at, _), result) in whole.into_iter().zip(results) {
            outcomes[at] = match result.status {
                Status::Ok => Ok(Put::Stored(result.version)),
                Status::Exists => Ok(Put::Exists),
                status => Err(refused("put", status)),
            };
        }
        // Objects too long for a shard are striped too; puts that met the remains of an object replace them.
        let refused = (0..items.len()).filter(|at| matches!(outcomes[*at], Ok(Put::Exists))).collect::<Vec<usize>>();
        let keys: Vec<&[u8]> = refused.iter().map(|at| items[*at].0.as_ref()).collect();
        let there = if keys.is_empty() { Vec::new() } else { self.batch_exists(&keys).await.unwrap_or_default() };
        let over: Vec<usize> = refused.into_iter().zip(there).filter(|(_, there)| !there).map(|(at, _)| at).collect();
        let long = |put: &Result<Put, Error>| matches!(put, Err(error) if error.status() == Some(Status::TooLarge));
        let striped = items.iter().enumerate().filter(|(at, _)| long(&outcomes[*at]) || over.contains(at));
        let striped: Vec<_> = striped.map(|(at, (key, slice))| (at, key.as_ref().to_vec(), *slice)).collect();
        if !striped.is_empty() {
            self.put_in_stripes(striped, options, &mut outcomes).await?;
        }
        Ok(outcomes)
    }

    /// Reads many objects; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed.
    pub async fn batch_get_into(
        &self,
        items: &[(impl AsRef<[u8]>, Slice)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let requests: Result<Vec<Request>, Error> =
            items.iter().map(|(key, slice)| self.namespace.get(key.as_ref(), *slice)).collect();
        let results = self.run(requests?).await?;
        let outcome = |result: &TaskResult| match result.status {
            Status::Ok => Ok(Some(Got { bytes: result.bytes, version: result.version })),
            Status::NotFound => Ok(None),
            status => Err(refused("get", status)),
        };
        let mut outcomes: Vec<Result<Option<Got>, Error>> = results.iter().map(outcome).collect();
        let striped = items.iter().enumerate().filter(|(at, _)| results[*at].status == Status::Striped);
        let striped: Vec<_> = striped.map(|(at, (key, slice))| (at, key.as_ref().to_vec(), *slice)).collect();
        if !striped.is_empty() {
            self.get_from_stripes(striped, &mut outcomes).await?;
        }
        Ok(outcomes)
    }

    /// Returns for each key whether there is an object.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub async fn batch_exists(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let results = self.run(self.namespace.requests(keys, Request::Exists)?).await?;
        if results.iter().any(|result| result.status == Status::Striped) {
            let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.as_ref().to_vec()).collect();
            return self.with(move |client| client.batch_exists(&keys)).await?;
        }
        results
            .into_iter()
            .map(|result| match result.status {
                Status::Ok => Ok(true),
                Status::NotFound => Ok(false),
                status => Err(refused("exists", status)),
            })
            .collect()
    }

    /// Returns the lengths of the objects under these keys.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub async fn batch_size(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Option<u64>>, Error> {
        let size = |result: TaskResult| match result.status {
            Status::Ok => Ok(Some(result.bytes)),
            Status::NotFound => Ok(None),
            status => Err(refused("size", status)),
        };
        let results = self.run(self.namespace.requests(keys, Request::Size)?).await?;
        if results.iter().any(|result| result.status == Status::Striped) {
            let keys: Vec<Vec<u8>> = keys.iter().map(|key| key.as_ref().to_vec()).collect();
            return self.with(move |client| client.batch_size(&keys)).await?;
        }
        results.into_iter().map(size).collect()
    }

    /// Removes the objects under these keys. Returns for each whether there was one.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub async fn batch_remove(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        let mut results = self.run(self.namespace.requests(keys, Request::Remove)?).await?;
        let striped: Vec<usize> = (0..keys.len()).filter(|at| results[*at].status == Status::Striped).collect();
        if !striped.is_empty() {
            let names: Vec<Vec<u8>> = striped.iter().map(|at| keys[*at].as_ref().to_vec()).collect();
            let removed = self.with(move |client| client.batch_remove(&names)).await??;
            for (at, removed) in striped.into_iter().zip(removed) {
                results[at].status = if removed { Status::Ok } else { Status::NotFound };
            }
        }
        let removed = |result: TaskResult| match result.status {
            Status::Ok => Ok(true),
            Status::NotFound => Ok(false),
            status => Err(refused("remove", status)),
        };
        results.into_iter().map(removed).collect()
    }

    /// Removes the object under this key. Returns true if there was one.
    ///
    /// # Errors
    /// When its owner does not answer.
    pub async fn remove(&self, key: &[u8]) -> Result<bool, Error> {
        Ok(self.batch_remove(&[key]).await?.pop().unwrap_or(false))
    }
}

fn refused(what: &str, status: Status) -> Error {
    Error::Status { what: what.to_owned(), status, cause: None }
}

fn ended() -> Error {
    Error::ThreadEnded { thread: LibraryThread::Client, starting: false }
}

/// Body of the thread: receives commands, drives the initiator, and completes batches. Ends when all handles are
/// dropped and nothing is in flight.
fn drive(mut client: Client, commands: &Receiver<Command>, waiting: &AtomicUsize) {
    let mut open: BTreeMap<BatchId, Answer> = BTreeMap::new();
    let mut abandoned = false;
    loop {
        loop {
            match commands.try_recv() {
                Ok(command) => {
                    waiting.fetch_sub(1, Ordering::SeqCst);
                    obey(&mut client, &mut open, command);
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    abandoned = true;
                    break;
                }
            }
        }
        if abandoned && open.is_empty() {
            return;
        }
        client.requester().follow_map();
        if client.requester().initiator().round(PARK, || waiting.load(Ordering::SeqCst) > 0).is_err() {
            return;
        }
        while let Some(batch) = client.requester().initiator().poll_done() {
            finish(&mut client, &mut open, batch);
        }
    }
}

fn finish(client: &mut Client, open: &mut BTreeMap<BatchId, Answer>, batch: BatchId) {
    let results = client.requester().initiator().results(batch).to_vec();
    client.requester().initiator().release(batch);
    if let Some(answer) = open.remove(&batch) {
        let _ = answer.send(Ok(results));
    }
}

fn obey(client: &mut Client, open: &mut BTreeMap<BatchId, Answer>, command: Command) {
    match command {
        // The caller may have given up.
        Command::Register { region, answer } => drop(answer.send(client.register(region))),
        Command::Work(work) => {
            work(client);
            // The wait of `work` consumed the completions of other batches: those are finished here.
            let done: Vec<BatchId> =
                open.keys().copied().filter(|batch| client.requester().initiator().is_complete(*batch)).collect();
            done.into_iter().for_each(|batch| finish(client, open, batch));
        }
        Command::Run { requests, puts, answer } => match client.requester().submit(&requests, &puts) {
            Ok(batch) => drop(open.insert(batch, answer)),
            Err(error) => drop(answer.send(Err(error))),
        },
    }
}
