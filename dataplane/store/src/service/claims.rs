//! Claims: requests that wait until the tenants of their objects are known, from peers whose tickets are for one
//! tenant.
//!
//! An SSD's index has digests, not names, and objects at a former owner are not here: the tenant of such an object is
//! only in its tail. A request that names such an object, from a peer that may use one tenant's objects only, is
//! *claimed*: it waits until the tails are read, or the objects were fetched, and is carried out then as if it had just
//! been received. Gets are claimed one by one, other requests as a whole, since they have one reply.
//!
//! Invariant: a peer learns of no object of another tenant, and of none whose tenant is not known. Lists are not
//! claimed: they read the names of all objects that they return ([`super::lists`]).

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::frame::Header;
use kvplane_proto::message::{DigestItem, GetItem, Item, Kind, Operation, RangeItem, VersionItem};
use kvplane_proto::{Digest, FrameFlags, RequestId, Status};

use super::migration::Waiter;
use super::objects::Objects;
use super::shard::Shard;
use super::shard::answers::items_of;
use super::shard::context::RequestContext;
use super::tiering::{ObjectTenant, TENANTS_KNOWN_MOST};
use super::types::{CloseReason, PeerKey};

/// Most claims in flight.
const CLAIMS_MOST: usize = 256;
/// Most objects that claims wait for.
const WANTED_MOST: usize = 1 << 14;
/// Longest wait of a claim before it is answered as busy.
const WAIT_NS: u64 = 5_000_000_000;
/// Most times that a request waits: its objects may have been replaced meanwhile.
const ROUNDS: u8 = 4;

const _: () = assert!(WANTED_MOST < TENANTS_KNOWN_MOST);

/// Request that waits.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) peer: PeerKey,
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    /// Objects whose tenants are not known yet.
    left: usize,
    pub(super) round: u8,
    pub(super) arrived_ns: u64,
    until_ns: u64,
}

/// Waiting requests, and the objects that they wait for.
#[derive(Debug, Default)]
pub(super) struct Claims {
    next: u64,
    open: BTreeMap<u64, Claim>,
    /// Claims all of whose tenants are known.
    ready: VecDeque<u64>,
    /// Claims that wait for each object.
    waiting: BTreeMap<Digest, Vec<u64>>,
}

impl Claims {
    /// Returns true if a request may have to wait.
    pub(super) fn concern(context: &RequestContext, header: &Header) -> bool {
        context.tenant.is_some()
            && matches!(
                header.kind,
                Kind::Request(
                    Operation::Exists
                        | Operation::Size
                        | Operation::Remove
                        | Operation::RemoveCopy
                        | Operation::Get
                        | Operation::GetRange
                )
            )
    }

    /// Keeps the part of a request that has to wait, and returns the part that is to be carried out now.
    pub(super) fn take(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        request: ClaimedRequest<'_>,
    ) -> Result<Option<(Header, Vec<u8>)>, CloseReason> {
        let ClaimedRequest { header, body, round, arrived_ns } = request;
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let split = match operation {
            Operation::Exists | Operation::Size | Operation::Remove | Operation::RemoveCopy => {
                let mut split = if context.flags.has(FrameFlags::OF_VERSION) && operation == Operation::Remove {
                    Split::of(objects, context, items_of::<VersionItem>(header, body)?, round)
                } else {
                    Split::of(objects, context, items_of::<DigestItem>(header, body)?, round)
                };
                if !split.unread.is_empty() {
                    (split.later, split.now) = (body.to_vec(), Vec::new());
                    (split.laters, split.nows) = (header.items, 0);
                }
                split
            }
            Operation::Get => Split::of(objects, context, items_of::<GetItem>(header, body)?, round),
            Operation::GetRange => Split::of(objects, context, items_of::<RangeItem>(header, body)?, round),
            _ => return Ok(Some((*header, body.to_vec()))),
        };
        let now = Header { items: split.nows, ..*header };
        if split.unread.is_empty() {
            return Ok(Some((now, split.now)));
        }
        let later = Header { items: split.laters, ..*header };
        let claim = Claim {
            peer: context.peer,
            header: later,
            body: split.later,
            left: 0,
            round,
            arrived_ns,
            until_ns: objects.local.shard.now_ns.saturating_add(WAIT_NS),
        };
        if round == ROUNDS || !self.wait_for(objects, claim, &split.unread) {
            turn_back(&mut objects.local.shard, context.peer, &later, &split.unread);
        }
        Ok((split.nows > 0).then_some((now, split.now)))
    }

    /// Keeps a request until the tenants of these objects are known; false if too many claims wait.
    fn wait_for(&mut self, objects: &mut Objects, mut claim: Claim, unread: &[(Digest, Option<RequestId>)]) -> bool {
        if self.open.len() >= CLAIMS_MOST || self.waiting.len() + unread.len() > WANTED_MOST {
            return false;
        }
        self.next += 1;
        let id = self.next;
        let mut wanted: Vec<Digest> = unread.iter().map(|(digest, _)| *digest).collect();
        wanted.sort_unstable();
        wanted.dedup();
        claim.left = wanted.len();
        self.open.insert(id, claim);
        for digest in wanted {
            let waiting = self.waiting.entry(digest).or_default();
            waiting.push(id);
            if waiting.len() > 1 {
                continue;
            }
            if objects.local.on_ssd(digest).is_some() {
                objects.local.want_tenant(digest);
            } else if objects.migration.fetch(&mut objects.local, digest, Waiter::Tenant).is_err() {
                self.settle(digest);
            }
        }
        true
    }

    /// Settles an object: no claim waits for it any more.
    pub(super) fn settle(&mut self, digest: Digest) {
        for id in self.waiting.remove(&digest).unwrap_or_default() {
            if let Some(claim) = self.open.get_mut(&id) {
                claim.left -= 1;
                if claim.left == 0 {
                    self.ready.push_back(id);
                }
            }
        }
    }

    /// Returns the next claim all of whose tenants are known.
    pub(super) fn take_ready(&mut self) -> Option<Claim> {
        loop {
            let id = self.ready.pop_front()?;
            if let Some(claim) = self.open.remove(&id) {
                return Some(claim);
            }
        }
    }

    /// Answers claims that have timed out as busy.
    pub(super) fn expire(&mut self, shard: &mut Shard) {
        while let Some(entry) = self.open.first_entry().filter(|entry| entry.get().until_ns <= shard.now_ns) {
            let Claim { peer, header, body, .. } = entry.remove();
            if shard.sessions.get(peer).is_none() {
                continue;
            }
            let gets: Vec<_> = match header.kind {
                Kind::Request(Operation::Get) => requests_of::<GetItem>(&header, &body),
                Kind::Request(Operation::GetRange) => requests_of::<RangeItem>(&header, &body),
                _ => Vec::new(),
            };
            turn_back(shard, peer, &header, &gets);
        }
    }

    /// Returns the first deadline of a claim: the timeout is the same for all.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.open.values().next().map(|claim| claim.until_ns)
    }
}

/// Request with its arrival time and the number of times that it has waited.
#[derive(Clone, Copy)]
pub(super) struct ClaimedRequest<'a> {
    pub(super) header: &'a Header,
    pub(super) body: &'a [u8],
    pub(super) round: u8,
    pub(super) arrived_ns: u64,
}

/// Answers a request, or each of its gets, as busy: the peer is to retry.
fn turn_back(shard: &mut Shard, peer: PeerKey, header: &Header, unread: &[(Digest, Option<RequestId>)]) {
    let Kind::Request(operation) = header.kind else { return };
    let gets: Vec<RequestId> = unread.iter().filter_map(|(_, request)| *request).collect();
    if gets.is_empty() {
        shard.refuse(peer, operation, header.request, Status::Busy);
    }
    gets.into_iter().for_each(|request| shard.refuse(peer, operation, request, Status::Busy));
}

fn requests_of<T: Item + ObjectItem>(header: &Header, body: &[u8]) -> Vec<(Digest, Option<RequestId>)> {
    let items = items_of::<T>(header, body).into_iter().flatten();
    items.map(|item| (Digest(0), item.request())).collect()
}

/// Items of a request, split by whether they have to wait.
#[derive(Default)]
struct Split {
    now: Vec<u8>,
    nows: u32,
    later: Vec<u8>,
    laters: u32,
    /// Items that wait, with their request numbers if each is a request of its own.
    unread: Vec<(Digest, Option<RequestId>)>,
}

impl Split {
    /// Splits the items of a request that has waited `round` times.
    fn of<T: Item + Copy + ObjectItem>(
        objects: &Objects,
        context: &RequestContext,
        items: impl Iterator<Item = T>,
        round: u8,
    ) -> Self {
        let Objects { local, migration, .. } = objects;
        let mut split = Self::default();
        for item in items {
            let unread = match local.tenant_of(item.digest()) {
                ObjectTenant::Unread => true,
                // Fetched once only: after that the object does not exist.
                ObjectTenant::NotHere => {
                    round == 0 && !context.fetches && migration.is_fetchable(&local.shard, item.digest())
                }
                ObjectTenant::Known(_) => false,
            };
            if unread {
                split.unread.push((item.digest(), item.request()));
                split.laters += 1;
                item.encode(&mut split.later);
            } else {
                split.nows += 1;
                item.encode(&mut split.now);
            }
        }
        split
    }
}

/// Item that names an object, and may be a request of its own.
trait ObjectItem {
    fn digest(&self) -> Digest;

    fn request(&self) -> Option<RequestId> {
        None
    }
}

impl ObjectItem for DigestItem {
    fn digest(&self) -> Digest {
        self.digest
    }
}

impl ObjectItem for VersionItem {
    fn digest(&self) -> Digest {
        self.digest
    }
}

impl ObjectItem for GetItem {
    fn digest(&self) -> Digest {
        self.digest
    }

    fn request(&self) -> Option<RequestId> {
        Some(self.request)
    }
}

impl ObjectItem for RangeItem {
    fn digest(&self) -> Digest {
        self.digest
    }

    fn request(&self) -> Option<RequestId> {
        Some(self.request)
    }
}
