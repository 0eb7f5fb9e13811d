//! Fetching client of a shard: the service's requests to former owners of its slots, and to their replica owners.
//! Objects are read straight into the pool, and replicas are sent from there.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvplane_client::{Client, Config, Local, PeerId, PutBook, Request, Sources, SubmitOptions, TaskResult};
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::map::SlotOwners;
use kvplane_proto::message::{ObjectName, PageQuery};
use kvplane_proto::{BatchId, Status};
use kvplane_store::service::{Fetch, FetchDone, FetchLimits, Service, Want, copy_of};
use kvplane_sys::Region;

use super::client_side::ClientSide;
use super::reactor::connections::Connections;
use super::reports::Reports;
use super::service_side::ServiceSide;
use super::service_side::memory::PoolView;

/// Deadline of fetches that a request waits for.
const WAITED_NS: u64 = 500_000_000;
/// Deadline of background fetches.
const BACKGROUND_NS: u64 = 5_000_000_000;
/// Bytes per step of a checksum.
const PART_BYTES: usize = 64 << 10;

/// Settings for reaching former owners of a shard's slots.
#[derive(Clone, Debug)]
pub struct FetchConfig {
    /// Random id that is unique among clients.
    pub client: u64,
    /// Name of the cluster.
    pub cluster: String,
    /// Boot id of this host: a former owner on the same host is reached over shared memory.
    pub host: String,
    /// Limits of background fetches.
    pub limits: FetchLimits,
}

impl FetchConfig {
    /// Creates the client that fetches.
    fn client(&self) -> Client {
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

/// Client of a shard, and the fetches that it has in flight for the service.
pub(crate) struct Fetcher {
    side: ClientSide,
    /// Client's index of the pool among its buffers.
    buffer: u32,
    sources: Sources,
    open: BTreeMap<BatchId, (u64, Want)>,
}

impl Fetcher {
    /// Creates a client for this service, which fetches into the service's pool from now on.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor, or refuses to watch it.
    pub(crate) fn new(
        config: &FetchConfig,
        connections: &mut Connections,
        service: &mut Service,
        pool: &Arc<Region>,
        verify_shared: bool,
    ) -> io::Result<Self> {
        service.control().set_fetch_limits(config.limits);
        let mut side = ClientSide::new(config.client(), connections, None, verify_shared)?;
        let buffer = side.add_buffer(connections, Arc::clone(pool));
        Ok(Self { side, buffer, sources: Sources::new(config.host.clone()), open: BTreeMap::new() })
    }

    /// Returns the client's side, with its lanes.
    pub(crate) const fn side(&mut self) -> &mut ClientSide {
        &mut self.side
    }

    /// Returns the client's side for reading.
    pub(crate) const fn side_ref(&self) -> &ClientSide {
        &self.side
    }

    /// Updates the former owners to fetch from, after the service has followed this map.
    pub(crate) fn follow(&mut self, service: &Service, owners: &SlotOwners, now_ns: u64) {
        let source_of = |slot| service.inspect().source_of(slot);
        let keepers = |slot| service.inspect().replica_peers(slot);
        let former = service.inspect().unreported();
        self.sources.follow(self.side.client(), owners, source_of, keepers, former, now_ns);
    }

    /// Handles the answers of former owners, and submits the service's next fetches. Returns true if there were any.
    pub(crate) fn drive(&mut self, serving: &mut ServiceSide, reports: &mut Reports, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(batch) = reports.take_done() {
            progress = true;
            self.finish(serving, batch, now_ns);
            serving.write_tails();
        }
        while let Some(fetch) = serving.service().poll_fetch(now_ns) {
            progress = true;
            serving.write_tails();
            self.submit(serving, fetch, now_ns);
        }
        progress
    }

    fn submit(&mut self, serving: &mut ServiceSide, fetch: Fetch, now_ns: u64) {
        let Fetch { token, source, want } = fetch;
        let waited = matches!(
            want,
            Want::Sizes(_) | Want::Describe(_) | Want::DescribeCopy(_) | Want::DropCopies(_) | Want::Repair(..)
        );
        let within_ns = if waited { WAITED_NS } else { BACKGROUND_NS };
        let Some(pool) = serving.pool() else { return };
        let mut book = PutBook::new();
        // Nothing is sent to a source that the map does not name: another process could have its address.
        let Some(peer) = self.sources.peer(&source) else {
            serving.service().fetched(token, FetchDone::Failed(Status::Unreachable), now_ns);
            return;
        };
        let requests = self.requests(&want, peer, pool, &mut book);
        let options = SubmitOptions::until(now_ns.saturating_add(within_ns));
        match self.side.client().submit_puts(&requests, &book, &options, now_ns) {
            Ok(batch) => drop(self.open.insert(batch, (token, want))),
            Err(_) => serving.service().fetched(token, FetchDone::Failed(Status::Unreachable), now_ns),
        }
    }

    /// Ends a fetch that was answered or has failed.
    fn finish(&mut self, serving: &mut ServiceSide, batch: BatchId, now_ns: u64) {
        let Some((token, want)) = self.open.remove(&batch) else { return };
        let client = self.side.client();
        let results = client.batches().results(batch).to_vec();
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
            (Want::Drop(_) | Want::EndExports(..), None) => FetchDone::Dropped,
            (Want::Describe(_) | Want::DescribeCopy(_) | Want::List(..), None) => {
                page.map_or(FetchDone::Failed(first), FetchDone::Page)
            }
            (Want::Object(_, extent) | Want::Repair(_, extent), None) if first == Status::Ok => {
                let bytes = results[0].bytes;
                let checksum = serving.pool().map_or(0, |pool| checksum_of(pool, extent.offset, bytes));
                FetchDone::Object(bytes, checksum)
            }
            (Want::Object(..) | Want::Repair(..), None) => FetchDone::Failed(first),
        };
        serving.service().fetched(token, done, now_ns);
    }

    /// Returns the requests of a fetch to this peer.
    fn requests(&self, want: &Want, peer: PeerId, pool: &Region, book: &mut PutBook) -> Vec<Request> {
        let one = PageQuery { names: true, one: true, ..Default::default() };
        match want {
            Want::Sizes(digests) => digests.iter().map(|digest| Request::Size(*digest)).collect(),
            Want::Drop(digests) => digests.iter().map(|digest| Request::RemoveHead(*digest)).collect(),
            Want::EndExports(slots, epoch) => {
                slots.iter().map(|slot| Request::EndExport(*slot, *epoch, peer)).collect()
            }
            Want::Describe(digest) => vec![Request::List(*digest, one)],
            Want::DescribeCopy(digest) => vec![Request::ListCopy(*digest, peer)],
            Want::List(digest, from) => vec![Request::List(*digest, *from)],
            Want::Object(digest, extent) => {
                let local = Local { buffer: self.buffer, offset: extent.offset, bytes: extent.bytes };
                // A stripe head is fetched too.
                vec![Request::GetHead(*digest, local)]
            }
            Want::Repair(digest, extent) => {
                let local = Local { buffer: self.buffer, offset: extent.offset, bytes: extent.bytes };
                vec![Request::GetCopy(*digest, local, peer)]
            }
            Want::Copy { digest, extent, tail_at, is_head, priority, replicas, checksum, .. } => {
                let local = Local { buffer: self.buffer, offset: extent.offset, bytes: extent.bytes };
                let pool = PoolView(pool);
                let (item, tenant, key) =
                    copy_of(*digest, extent.bytes, *is_head, *tail_at, *priority, *replicas, &pool);
                let number = book.push(item, &ObjectName { tenant: &tenant, key: &key });
                // Damaged bytes are not replicated.
                book.state_checksum(number, *checksum);
                vec![Request::PutCopy(*digest, local, number, peer)]
            }
            Want::DropCopies(digests) => digests.iter().map(|digest| Request::DropCopy(*digest, peer)).collect(),
        }
    }
}

/// Replicas are gone only if their owner has confirmed each.
fn drops_done(results: &[TaskResult]) -> FetchDone {
    FetchDone::CopiesDropped(
        results.iter().map(|result| matches!(result.status, Status::Ok | Status::NotFound)).collect(),
    )
}

/// Returns the checksum of a range of the pool.
pub(super) fn checksum_of(pool: &Arc<Region>, offset: u64, bytes: u64) -> u64 {
    let (mut checksum, mut at, end) = (PayloadChecksum::new(), offset as usize, (offset + bytes) as usize);
    while at < end {
        let part = PART_BYTES.min(end - at);
        pool.read_with(at, part, &mut |_, bytes| checksum.update(bytes));
        at += part;
    }
    checksum.finish()
}
