//! Migration of slots: the client by which each shard fetches from the former owners of its slots, and the outcome.
//!
//! Here objects arrive in the client's memory and are copied to the pool when they are complete; real hosts receive
//! them directly in the pool. The thread of a shard is not busy while its client copies out of shared memory.

use std::collections::BTreeMap;

use kvplane_client::{Client, Config, Local, PeerId, PutBook, Request, Sources, SubmitOptions, TaskResult};
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::BatchId;
use kvplane_proto::map::SlotOwners;
use kvplane_proto::message::{Item, KeyItem, KeyPage, ListReply, ObjectName, PageQuery};
use kvplane_proto::{Digest, Status};
use kvplane_store::service::{Fetch, FetchDone, FetchLimits, MemoryExtent, Want, copy_of};

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::check::memory::{Loan, Memory};
use crate::world::check::{Rule, broken};
use crate::world::client::ClientHost;
use crate::world::faults::Party;
use crate::world::scenario::{MS, Mischief, Scenario};

/// Name of fetches in the ledger of a pool, where connections have their numbers.
pub(super) const FETCHES: u32 = u32::MAX - 1;
/// Number of objects that one shard fetches at a time.
const SLOTS_OF_MEMORY: usize = 8;
/// Number of objects where replicas are pushed to replica owners too.
const SLOTS_WITH_COPIES: usize = 48;
/// Time limits of requests: those that a client waits for, as with real hosts, and others.
const ASK_NS: u64 = 500 * MS;
const BACKGROUND_NS: u64 = 1000 * MS;

/// State of a client that fetches for a shard.
#[derive(Default)]
pub(crate) struct Fetcher {
    pub(crate) incarnation: usize,
    sources: Sources,
    open: BTreeMap<BatchId, (u64, Want, Option<u64>)>,
    /// Versions that it has pushed to replica owners, or tried to.
    pub(crate) pushed: BTreeMap<Digest, Vec<u64>>,
}

impl Fetcher {
    pub(crate) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns objects whose pushes to replica owners are in flight.
    pub(crate) fn copying(&self) -> impl Iterator<Item = Digest> + '_ {
        let copied = |want: &Want| if let Want::Copy { digest, .. } = want { Some(*digest) } else { None };
        self.open.values().filter_map(move |(_, want, _)| copied(want))
    }
}

impl World {
    /// Returns true for a user's client, false for a shard's.
    pub(crate) const fn is_user(&self, client: usize) -> bool {
        client < self.scenario.clients
    }

    /// Returns the location of a client on the network.
    pub(crate) fn party_of(&self, client: usize) -> Party {
        match &self.clients[client].fetcher {
            Some(fetcher) => Party::Node(self.incarnations[fetcher.incarnation].node),
            None => Party::Client(client),
        }
    }

    /// Creates the client that will fetch for the next incarnation of a shard.
    pub(crate) fn add_fetcher(&mut self, host: String) -> usize {
        let index = self.clients.len();
        let sources = Sources::new(host.clone());
        let config = Config {
            cluster: "world".to_owned(),
            client: (index as u64) << 32 | 1,
            host,
            lanes: 1,
            shared: self.scenario.shared_memory,
            cma: false,
            lane_window_bytes: self.scenario.lane_window_bytes,
            gather_range_bytes: 0,
            fetches: true,
            ..Config::default()
        };
        let fetcher = Fetcher { incarnation: self.incarnations.len(), sources, ..Fetcher::default() };
        let slots = if self.scenario.replicas > 1 { SLOTS_WITH_COPIES } else { SLOTS_OF_MEMORY };
        let memory = Memory::new(slots, self.scenario.object_bytes);
        self.clients.push(ClientHost::for_shard(Client::new(config), memory, fetcher));
        index
    }

    /// Returns the limits of background fetches.
    pub(crate) fn fetch_limits(scenario: &Scenario) -> FetchLimits {
        // Some shards fetch nothing in the background, some slowly, some at once.
        let kind = if scenario.keeps { 3 } else { scenario.seed as usize % 4 };
        let bytes_per_s = [0, 20 * scenario.object_bytes, 1 << 40, 1 << 40][kind];
        // In scenarios with requested replication, a few gets of one object in a second make it hot by themselves.
        let hot_bytes_per_s = if scenario.wishes { 4 * (scenario.object_bytes + (8 << 10)) } else { 0 };
        let objects = 1 + scenario.seed as usize % 5;
        FetchLimits { bytes_per_s, objects, bytes: 4 * scenario.object_bytes, hot_bytes_per_s }
    }

    /// Tells the shard the sources that it may fetch from now.
    pub(crate) fn set_sources(&mut self, incarnation: usize, owners: &SlotOwners) {
        let index = self.incarnations[incarnation].fetcher;
        let now_ns = self.now_ns;
        let service = &self.incarnations[incarnation].service;
        let host = &mut self.clients[index];
        let Some(fetcher) = &mut host.fetcher else { return };
        let source_of = |slot| service.inspect().source_of(slot);
        let keepers_of = |slot| service.inspect().replica_peers(slot);
        let former = service.inspect().unreported();
        fetcher.sources.follow(&mut host.client, owners, source_of, keepers_of, former, now_ns);
        self.drain_client(index);
    }

    /// Sends the shard's requests to former owners; returns true if there were any.
    pub(crate) fn drive_fetches(&mut self, incarnation: usize) -> bool {
        let mut any = false;
        while self.violation.is_none()
            && self.incarnations[incarnation].alive
            && let Some(fetch) = self.incarnations[incarnation].service.poll_fetch(self.now_ns)
        {
            any = true;
            self.write_tails(incarnation);
            self.fetch(incarnation, fetch);
        }
        any
    }

    fn fetch(&mut self, incarnation: usize, Fetch { token, source, want }: Fetch) {
        let (index, now_ns) = (self.incarnations[incarnation].fetcher, self.now_ns);
        let peer = self.clients[index].fetcher.as_ref().and_then(|fetcher| fetcher.sources.peer(&source));
        if matches!(want, Want::DescribeCopy(_)) && self.scenario.has(Mischief::ForgetRepairs) {
            self.incarnations[incarnation].service.fetched(token, FetchDone::Failed(Status::NotFound), now_ns);
            return;
        }
        self.note_report(incarnation, source, &want);
        let peer = peer.filter(|_| !self.loses_report(&want));
        let room = peer.and_then(|peer| self.requests_of(index, incarnation, &want, peer));
        let waited = matches!(
            want,
            Want::Sizes(_) | Want::Describe(_) | Want::DescribeCopy(_) | Want::DropCopies(_) | Want::Repair(..)
        );
        let within_ns = if waited { ASK_NS } else { BACKGROUND_NS };
        let Some((requests, book, offset)) = room else {
            self.incarnations[incarnation].service.fetched(token, FetchDone::Failed(Status::Unreachable), now_ns);
            return;
        };
        self.detail(token, || format!("incarnation {incarnation} requests {want:?} from {source:?}"));
        let options = SubmitOptions::until(now_ns + within_ns);
        match self.clients[index].client.submit_puts(&requests, &book, &options, now_ns) {
            Ok(batch) => {
                if let Some(fetcher) = &mut self.clients[index].fetcher {
                    fetcher.open.insert(batch, (token, want, offset));
                }
                self.drain_client(index);
            }
            Err(error) => self.violate(broken(Rule::Protocol, format!("a valid request was refused: {error}"))),
        }
    }

    fn requests_of(
        &mut self,
        index: usize,
        incarnation: usize,
        want: &Want,
        peer: PeerId,
    ) -> Option<(Vec<Request>, PutBook, Option<u64>)> {
        let mut book = PutBook::new();
        let one = PageQuery { names: true, one: true, ..PageQuery::default() };
        let requests = match want {
            Want::Sizes(digests) => digests.iter().map(|digest| Request::Size(*digest)).collect(),
            Want::Drop(digests) => digests.iter().map(|digest| Request::RemoveHead(*digest)).collect(),
            Want::EndExports(slots, epoch) => {
                slots.iter().map(|slot| Request::EndExport(*slot, *epoch, peer)).collect()
            }
            Want::Describe(digest) => vec![Request::List(*digest, one)],
            Want::DescribeCopy(digest) => vec![Request::ListCopy(*digest, peer)],
            Want::List(digest, from) => vec![Request::List(*digest, *from)],
            Want::Object(digest, extent) | Want::Repair(digest, extent) => {
                let lent = self.clients[index].memory.lend(Loan::Get(extent.bytes), *digest);
                let offset = match lent {
                    Ok(offset) => offset?,
                    Err(violation) => {
                        self.violate(violation);
                        return None;
                    }
                };
                let local = Local { buffer: 0, offset, bytes: extent.bytes };
                if matches!(want, Want::Repair(..)) {
                    // Good bytes take the place of damaged ones, which readers may still have.
                    return Some((vec![Request::GetCopy(*digest, local, peer)], book, Some(offset)));
                }
                let lent = self.incarnations[incarnation].ledger.lend(FETCHES, Use::Write, extent.offset, extent.bytes);
                self.require(lent);
                return Some((vec![Request::Get(*digest, local)], book, Some(offset)));
            }
            Want::DropCopies(digests) => digests.iter().map(|digest| Request::DropCopy(*digest, peer)).collect(),
            Want::Copy { digest, extent, tail_at, is_head, priority, replicas, version, checksum } => {
                let (item, tenant, key) = copy_of(
                    *digest,
                    extent.bytes,
                    *is_head,
                    *tail_at,
                    *priority,
                    *replicas,
                    &self.incarnations[incarnation].pool,
                );
                let number = book.push(item, &ObjectName { tenant: &tenant, key: &key });
                if !self.scenario.has(Mischief::SpoilCopies) {
                    book.state_checksum(number, *checksum);
                }
                let offset = self.lend_copy(index, incarnation, *digest, *extent)?;
                if let Some(fetcher) = &mut self.clients[index].fetcher {
                    fetcher.pushed.entry(*digest).or_default().push(version.0);
                }
                let local = Local { buffer: 0, offset, bytes: extent.bytes };
                return Some((vec![Request::PutCopy(*digest, local, number, peer)], book, Some(offset)));
            }
        };
        Some((requests, book, None))
    }

    /// Handles the outcome of a shard's request.
    pub(crate) fn fetch_done(&mut self, index: usize, batch: BatchId) {
        let host = &mut self.clients[index];
        let Some(fetcher) = &mut host.fetcher else { return };
        let incarnation = fetcher.incarnation;
        let Some((token, want, offset)) = fetcher.open.remove(&batch) else {
            self.violate(broken(
                Rule::Batch,
                format!("{batch:?} of incarnation {incarnation} completed, which is not open"),
            ));
            return;
        };
        let results: Vec<TaskResult> = host.client.batches().results(batch).to_vec();
        let page = host.client.take_description(batch);
        host.client.release(batch);
        let first = results.first().map_or(Status::Unreachable, |result| result.status);
        self.detail(first as u64, || format!("incarnation {incarnation} completes {want:?}: {results:?}"));
        let failed = |status: &Status| !matches!(status, Status::Ok | Status::NotFound | Status::Stale);
        let broken = results.iter().map(|result| result.status).find(failed);
        let is_lost = self.loses_answer(&want);
        let done = match (&want, broken) {
            (Want::EndExports(..), _) if is_lost => FetchDone::Failed(Status::Unreachable),
            (Want::Copy { .. }, None) if first == Status::Ok => FetchDone::Copied,
            (Want::Copy { .. }, _) => FetchDone::Failed(first),
            (Want::DropCopies(_), _) => crate::world::cluster::copies::drops_done(&results),
            (_, Some(status)) => FetchDone::Failed(status),
            (Want::Sizes(_), None) => {
                FetchDone::Sizes(results.iter().map(|result| (result.status, result.bytes)).collect())
            }
            (Want::Drop(_) | Want::EndExports(..), None) => FetchDone::Dropped,
            (Want::List(_, from), None) if from.changes && self.scenario.has(Mischief::HideChanges) => {
                page.map_or(FetchDone::Failed(first), |page| FetchDone::Page(without_changes(&page)))
            }
            (Want::Describe(_) | Want::DescribeCopy(_) | Want::List(..), None) => {
                page.map_or(FetchDone::Failed(first), FetchDone::Page)
            }
            (Want::Object(..) | Want::Repair(..), None) if first != Status::Ok => FetchDone::Failed(first),
            (Want::Repair(_, extent), None) => self.bytes_came(incarnation, index, *extent, results[0].bytes, offset),
            (Want::Object(_, extent), None) => {
                let bytes = results[0].bytes;
                let came = bytes.min(extent.bytes);
                let lent = self.incarnations[incarnation].ledger.check(FETCHES, Use::Write, extent.offset, came);
                self.require(lent);
                self.bytes_came(incarnation, index, *extent, bytes, offset)
            }
        };
        if let Want::Object(digest, extent) = &want {
            let taken = self.clients[index].memory.take_back(offset.unwrap_or(0));
            self.require(taken);
            self.incarnations[incarnation].ledger.end(FETCHES, Use::Write, extent.offset);
            let origin = results.first().map_or(0, |result| result.version.0);
            self.incarnations[incarnation].service.fetched(token, done, self.now_ns);
            self.observe_import(incarnation, *digest, *extent, origin);
        } else {
            if matches!(want, Want::Repair(..)) {
                let taken = self.clients[index].memory.take_back(offset.unwrap_or(0));
                self.require(taken);
            }
            if let (Want::Copy { extent, .. }, Some(offset)) = (&want, offset) {
                self.copy_sent(index, incarnation, *extent, offset);
            }
            self.incarnations[incarnation].service.fetched(token, done, self.now_ns);
        }
        self.drain_service(incarnation, None);
    }

    /// Copies bytes from the client's memory to their place in the pool.
    fn bytes_came(
        &mut self,
        incarnation: usize,
        index: usize,
        extent: MemoryExtent,
        bytes: u64,
        offset: Option<u64>,
    ) -> FetchDone {
        let from = self.clients[index].memory.peek(offset.unwrap_or(0), bytes.min(extent.bytes)).to_vec();
        self.incarnations[incarnation].pool.copy_in(extent.offset, &from);
        FetchDone::Object(bytes, payload_checksum(&from))
    }

    /// Checks an imported object: it is the one that its former owner had, and no put or remove happened here since the
    /// slot came.
    fn observe_import(&mut self, incarnation: usize, digest: Digest, extent: MemoryExtent, origin: u64) {
        let view = self.incarnations[incarnation].service.store().peek(digest);
        let Some(view) = view
            .filter(|view| view.extent.offset == extent.offset && self.incarnations[incarnation].is_new(view.version))
        else {
            return;
        };
        let version = view.version;
        self.statistics.imports += 1;
        self.detail(version.0, || format!("incarnation {incarnation} imports version {origin} as {version}"));
        let grown = self.incarnations[incarnation].see_version(version);
        self.require(grown);
        let bytes = self.incarnations[incarnation].bytes(extent.offset, view.extent.bytes);
        let lineage = self.lineage(incarnation);
        let taken = self.shadow.imported(version.0, origin, digest, lineage, &bytes);
        self.require(taken);
        let key = self.shadow.key(digest);
        if let Some(key) = key.filter(|key| self.incarnations[incarnation].changed.contains(key)) {
            let what = format!(
                "incarnation {incarnation} imported key {key} although it was put or removed there since its slot came"
            );
            self.violate(broken(Rule::Removed, what));
        }
    }

    /// Records that a shard put or removed an object.
    pub(crate) fn observe_change(&mut self, incarnation: usize, digest: Digest) {
        if let Some(key) = self.shadow.key(digest) {
            self.incarnations[incarnation].changed.insert(key);
        }
    }
}

/// [`Mischief::HideChanges`]: a page that states since when changes are known, and omits all of them.
fn without_changes(page: &[u8]) -> Vec<u8> {
    let Some(page) = KeyPage::decode(page) else { return Vec::new() };
    let headers: Vec<KeyItem> = page.keys().map(|key| key.item).filter(|item| item.digest.0 << 14 == 0).collect();
    let mut out = Vec::new();
    ListReply { items: headers.len() as u64, ..page.reply() }.encode(&mut out);
    headers.iter().for_each(|item| item.encode(&mut out));
    out
}
