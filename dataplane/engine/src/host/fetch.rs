//! What a shard's service asks of former owners of its slots, and of the second owners, by a client of its own: objects
//! come straight into the pool, and copies leave from there.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_client::{Client, Config, Local, PutBook, Request, Sources, SubmitOptions, TaskResult};
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::message::{ObjectName, PageQuery};
use kvplane_proto::{BatchId, Status};
use kvplane_store::service::{Fetch, FetchDone, FetchLimits, Want, copy_of};
use kvplane_sys::Region;

use super::{Host, PoolView};

/// Somebody waits for these answers.
const ASK_NS: u64 = 500_000_000;
/// Nobody waits for these.
const BACKGROUND_NS: u64 = 5_000_000_000;
/// Bytes that are summed up at a time.
const PART_BYTES: usize = 64 << 10;

/// How a shard asks former owners of its slots.
#[derive(Clone, Debug)]
pub struct FetchConfig {
    /// A random number that no other asker has.
    pub client: u64,
    /// The cluster's name.
    pub cluster: String,
    /// Boot id of this host: a former owner on it is asked over shared memory.
    pub host: String,
    /// How much is fetched in the background.
    pub limits: FetchLimits,
}

impl FetchConfig {
    /// The client that asks.
    pub(super) fn client(&self) -> Client {
        Client::new(Config {
            cluster: self.cluster.clone(),
            client: self.client,
            host: self.host.clone(),
            fetches: true,
            cma: false,
            lanes: 1,
            ..Config::default()
        })
    }
}

/// Questions under way.
pub(super) struct FetchWork {
    /// The client's name for the pool.
    buffer: u32,
    host: String,
    sources: Sources,
    open: BTreeMap<BatchId, (u64, Want)>,
}

impl FetchWork {
    pub(super) fn new(buffer: u32, host: String) -> Self {
        Self { buffer, host, sources: Sources::default(), open: BTreeMap::new() }
    }

    /// The requests of a question.
    fn requests(&self, want: &Want, pool: &Region, book: &mut PutBook) -> Vec<Request> {
        let one = PageQuery { names: true, one: true, ..Default::default() };
        match want {
            Want::Sizes(digests) => digests.iter().map(|digest| Request::Size(*digest)).collect(),
            Want::Drop(digests) => digests.iter().map(|digest| Request::RemoveHead(*digest)).collect(),
            Want::Describe(digest) => vec![Request::List(*digest, one)],
            Want::List(digest, from) => vec![Request::List(*digest, *from)],
            Want::Object(digest, place) => {
                let local = Local { buffer: self.buffer, offset: place.offset, bytes: place.bytes };
                // Also what names the stripes of another object.
                vec![Request::GetHead(*digest, local)]
            }
            Want::Copy { digest, place, tail_at, is_head, .. } => {
                let local = Local { buffer: self.buffer, offset: place.offset, bytes: place.bytes };
                let (item, tenant, key) = copy_of(*digest, place.bytes, *is_head, *tail_at, &PoolView(pool));
                let number = book.push(item, &ObjectName { tenant: &tenant, key: &key });
                vec![Request::PutCopy(*digest, local, number)]
            }
            Want::DropCopies(digests) => digests.iter().map(|digest| Request::DropCopy(*digest)).collect(),
        }
    }
}

impl Host {
    /// Lets the service ask former owners, if that is wanted.
    pub(super) fn begin_fetches(&mut self, config: Option<&FetchConfig>) {
        let (Some(config), Some(pool), Some(service)) = (config, self.regions.pool.clone(), &mut self.service) else {
            return;
        };
        service.control().set_fetch_limits(config.limits);
        self.fetch_work = Some(FetchWork::new(self.add_buffer(pool), config.host.clone()));
    }

    /// Serves the slots that a map of this state of the control plane gives to this shard, and fetches what was in
    /// those that came.
    pub fn follow_owners(&mut self, state: u64, owners: &SlotOwners) {
        let now_ns = self.rounds.now_ns();
        let Some(service) = &mut self.service else { return };
        service.follow(state, owners);
        let (Some(work), Some(client)) = (&mut self.fetch_work, &mut self.client) else { return };
        let seconds = |slot| service.inspect().second_of(slot);
        work.sources.follow(client, owners, &work.host, (|slot| service.inspect().source_of(slot), seconds), now_ns);
    }

    /// Takes what former owners have answered, and asks what is next. Whether there was anything.
    pub(super) fn drive_fetches(&mut self, now_ns: u64) -> bool {
        if self.fetch_work.is_none() {
            return false;
        }
        let mut progress = false;
        while let Some(batch) = self.notices.take_done() {
            progress = true;
            self.fetched(batch, now_ns);
            self.write_tails();
        }
        while let Some(Fetch { token, source, want }) =
            self.service.as_mut().and_then(|service| service.poll_fetch(now_ns))
        {
            progress = true;
            self.write_tails();
            self.ask_former(token, source, want, now_ns);
        }
        progress
    }

    fn ask_former(&mut self, token: u64, source: ShardKey, want: Want, now_ns: u64) {
        let (Some(work), Some(client), Some(service)) = (&mut self.fetch_work, &mut self.client, &mut self.service)
        else {
            return;
        };
        let waited = matches!(want, Want::Sizes(_) | Want::Describe(_) | Want::DropCopies(_));
        let within_ns = if waited { ASK_NS } else { BACKGROUND_NS };
        let Some(pool) = &self.regions.pool else { return };
        let mut book = PutBook::new();
        let requests = work.requests(&want, pool, &mut book);
        // A source that the map does not name is not asked: it could be another of that address.
        let known = work.sources.contains(&source);
        let options = SubmitOptions::until(now_ns.saturating_add(within_ns));
        let submitted = known.then(|| client.submit_puts(&requests, &book, &options, now_ns));
        match submitted {
            Some(Ok(batch)) => drop(work.open.insert(batch, (token, want))),
            Some(Err(_)) | None => service.fetched(token, FetchDone::Failed(Status::Unreachable), now_ns),
        }
    }

    /// A question is answered, or was in vain.
    fn fetched(&mut self, batch: BatchId, now_ns: u64) {
        let (Some(work), Some(client)) = (&mut self.fetch_work, &mut self.client) else { return };
        let Some((token, want)) = work.open.remove(&batch) else { return };
        let results = client.results(batch).to_vec();
        let page = client.take_description(batch);
        client.release(batch);
        let first = results.first().map_or(Status::Unreachable, |result| result.status);
        let failed =
            |status: &Status| !matches!(status, Status::Ok | Status::NotFound | Status::Stale | Status::Striped);
        let broken = results.iter().map(|result| result.status).find(failed);
        let done = match (want, broken) {
            (Want::Copy { .. }, _) if first == Status::Ok => FetchDone::Copied,
            (Want::Copy { .. }, _) => FetchDone::Failed(first),
            (Want::DropCopies(_), _) => drops_done(&results),
            (_, Some(status)) => FetchDone::Failed(status),
            (Want::Sizes(_), None) => {
                FetchDone::Sizes(results.iter().map(|result| (result.status, result.bytes)).collect())
            }
            (Want::Drop(_), None) => FetchDone::Dropped,
            (Want::Describe(_) | Want::List(..), None) => page.map_or(FetchDone::Failed(first), FetchDone::Page),
            (Want::Object(_, place), None) if first == Status::Ok => {
                let bytes = results[0].bytes;
                let checksum = self.regions.pool.as_ref().map_or(0, |pool| checksum_of(pool, place.offset, bytes));
                FetchDone::Object(bytes, checksum)
            }
            (Want::Object(..), None) => FetchDone::Failed(first),
        };
        if let Some(service) = &mut self.service {
            service.fetched(token, done, now_ns);
        }
    }
}

/// Copies are gone only where their owner said so of each.
fn drops_done(results: &[TaskResult]) -> FetchDone {
    FetchDone::CopiesDropped(
        results.iter().map(|result| matches!(result.status, Status::Ok | Status::NotFound)).collect(),
    )
}

fn checksum_of(pool: &Arc<Region>, offset: u64, bytes: u64) -> u64 {
    let (mut checksum, mut at, end) = (PayloadChecksum::new(), offset as usize, (offset + bytes) as usize);
    while at < end {
        let part = PART_BYTES.min(end - at);
        pool.read_with(at, part, &mut |_, bytes| checksum.update(bytes));
        at += part;
    }
    checksum.finish()
}
