//! Whose the objects are that memory does not have, for askers whose tickets are for one tenant.
//!
//! An index of an SSD knows digests, not names, and a former owner is not here: whose such an object is stands in its
//! tail only. A request of who may use one tenant's objects only, and that names such an object, is *claimed*: it waits
//! until the tails are read, or the objects are here, and is carried out then as if it had come then. What was learnt
//! is remembered for a while. Gets are claimed one by one, other requests as a whole, since they have one answer.
//!
//! Invariant: a peer is told of no object of another tenant, and of none whose tenant is not known. Not here: lists,
//! which read the names of all that they return ([`super::keys`]).

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::frame::Header;
use kvplane_proto::ids::Version;
use kvplane_proto::message::{DigestItem, GetItem, Item, Kind, Operation, RangeItem, VersionItem};
use kvplane_proto::{Digest, FrameFlags, RequestId, Status};

use super::Service;
use super::answers::items_of;
use super::context::RequestContext;
use super::tiered::Waiter;
use super::types::{CloseReason, PayloadTo, PeerKey};

/// Requests that wait at a time.
const CLAIMS_MOST: usize = 256;
/// Objects that they wait for.
const WANTED_MOST: usize = 1 << 14;
/// Objects of which it is remembered whose they are: more than can be waited for.
const KNOWN_MOST: usize = 1 << 16;
/// How long a request waits before it is answered that it is to come again.
const WAIT_NS: u64 = 5_000_000_000;
/// How often a request waits: what it names may have been replaced meanwhile.
const ROUNDS: u8 = 4;

const _: () = assert!(WANTED_MOST < KNOWN_MOST);

/// A request that waits.
#[derive(Debug)]
struct Claim {
    peer: PeerKey,
    header: Header,
    body: Vec<u8>,
    /// Objects of which it is not known yet whose they are.
    left: usize,
    round: u8,
    arrived_ns: u64,
    until_ns: u64,
}

/// Requests that wait, what they wait for, and what is known.
#[derive(Debug, Default)]
pub(super) struct Claims {
    next: u64,
    open: BTreeMap<u64, Claim>,
    /// Those of which everything is known.
    ready: VecDeque<u64>,
    /// Who waits for each object.
    waiting: BTreeMap<Digest, Vec<u64>>,
    /// Objects whose tails are to be read.
    pub(super) wanted: VecDeque<Digest>,
    /// The version that was looked at, and whose it is if its tail says so.
    known: BTreeMap<Digest, (Version, Option<u32>)>,
    by_age: VecDeque<Digest>,
}

/// What is known of an object's tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tenant {
    /// It is this one's, or that cannot be told.
    Known(Option<u32>),
    /// Its tail is on the SSD.
    Unread,
    /// There is none here.
    NotHere,
}

impl Claims {
    fn note(&mut self, digest: Digest, version: Version, tenant: Option<u32>) {
        if self.known.insert(digest, (version, tenant)).is_none() {
            self.by_age.push_back(digest);
        }
        if self.by_age.len() > KNOWN_MOST
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// Nothing is to be waited for any more of an object.
    fn settle(&mut self, digest: Digest) {
        for id in self.waiting.remove(&digest).unwrap_or_default() {
            if let Some(claim) = self.open.get_mut(&id) {
                claim.left -= 1;
                if claim.left == 0 {
                    self.ready.push_back(id);
                }
            }
        }
    }

    /// When the first of them has waited long enough: they all wait equally long.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.open.values().next().map(|claim| claim.until_ns)
    }
}

impl Service {
    /// Carries a request out, but for what has to wait until it is known whose it is.
    pub(super) fn claim_and_carry_out(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let claimed = context.tenant.is_some()
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
            );
        match claimed.then(|| self.claim(context, (header, body), 0, self.now_ns)) {
            None => self.carry_out(context, header, body),
            Some(Ok(Some((header, body)))) => self.carry_out(context, &header, &body),
            Some(Ok(None)) => Ok(PayloadTo::Discard),
            Some(Err(reason)) => Err(reason),
        }
    }

    /// Keeps what of a request has to wait. What of it is to be carried out now.
    fn claim(
        &mut self,
        context: &RequestContext,
        (header, body): (&Header, &[u8]),
        round: u8,
        arrived_ns: u64,
    ) -> Result<Option<(Header, Vec<u8>)>, CloseReason> {
        let Kind::Request(operation) = header.kind else { return Err(CloseReason::Malformed("a reply")) };
        let split = match operation {
            Operation::Exists | Operation::Size | Operation::Remove | Operation::RemoveCopy => {
                let mut split = if context.flags.has(FrameFlags::OF_VERSION) && operation == Operation::Remove {
                    self.split(context, items_of::<VersionItem>(header, body)?, round)
                } else {
                    self.split(context, items_of::<DigestItem>(header, body)?, round)
                };
                if !split.unread.is_empty() {
                    (split.later, split.now) = (body.to_vec(), Vec::new());
                    (split.laters, split.nows) = (header.items, 0);
                }
                split
            }
            Operation::Get => self.split(context, items_of::<GetItem>(header, body)?, round),
            Operation::GetRange => self.split(context, items_of::<RangeItem>(header, body)?, round),
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
            until_ns: self.now_ns.saturating_add(WAIT_NS),
        };
        if round == ROUNDS || !self.wait_for(claim, &split.unread) {
            self.turn_back(context.peer, &later, &split.unread);
        }
        Ok((split.nows > 0).then_some((now, split.now)))
    }

    fn split<T: Item + Copy + ObjectItem>(
        &self,
        context: &RequestContext,
        items: impl Iterator<Item = T>,
        round: u8,
    ) -> Split {
        let mut split = Split::default();
        for item in items {
            let unread = match self.tenant_of(item.digest()) {
                Tenant::Unread => true,
                // Looked for once: after that it is not there.
                Tenant::NotHere => round == 0 && !context.fetches && self.is_fetchable(item.digest()),
                Tenant::Known(_) => false,
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

    /// Keeps a request until it is known whose these are; false where too much waits.
    fn wait_for(&mut self, mut claim: Claim, unread: &[(Digest, Option<RequestId>)]) -> bool {
        let claims = &mut self.tenancy.claims;
        if claims.open.len() >= CLAIMS_MOST || claims.waiting.len() + unread.len() > WANTED_MOST {
            return false;
        }
        claims.next += 1;
        let id = claims.next;
        let mut wanted: Vec<Digest> = unread.iter().map(|(digest, _)| *digest).collect();
        wanted.sort_unstable();
        wanted.dedup();
        claim.left = wanted.len();
        claims.open.insert(id, claim);
        for digest in wanted {
            let waiting = self.tenancy.claims.waiting.entry(digest).or_default();
            waiting.push(id);
            if waiting.len() > 1 {
                continue;
            }
            if self.on_ssd(digest).is_some() {
                self.tenancy.claims.wanted.push_back(digest);
            } else if self.fetch_for(digest, Waiter::Claims).is_err() {
                self.tenancy.claims.settle(digest);
            }
        }
        true
    }

    /// Answers a request, or each of its gets, that it is to come again.
    fn turn_back(&mut self, peer: PeerKey, header: &Header, unread: &[(Digest, Option<RequestId>)]) {
        let Kind::Request(operation) = header.kind else { return };
        let gets: Vec<RequestId> = unread.iter().filter_map(|(_, request)| *request).collect();
        if gets.is_empty() {
            self.refuse(peer, operation, header.request, Status::Busy);
        }
        gets.into_iter().for_each(|request| self.refuse(peer, operation, request, Status::Busy));
    }

    /// Carries out the requests of which everything is known now.
    pub(super) fn carry_out_claimed(&mut self) {
        while let Some(id) = self.tenancy.claims.ready.pop_front() {
            let Some(claim) = self.tenancy.claims.open.remove(&id) else { continue };
            let Claim { peer, header, body, round, arrived_ns, .. } = claim;
            let Kind::Request(operation) = header.kind else { continue };
            let Some(session) = self.sessions.get_mut(peer) else { continue };
            let context = RequestContext::new(peer, session, &header);
            self.answers.outputs.arrived(arrived_ns);
            if self.sessions.may_change(&mut self.answers, peer, operation, &header) {
                let done = match self.claim(&context, (&header, &body), round + 1, arrived_ns) {
                    Ok(Some((header, body))) => self.carry_out(&context, &header, &body).err(),
                    Ok(None) => None,
                    Err(reason) => Some(reason),
                };
                if let Some(reason) = done {
                    self.sessions.close(&mut self.answers.outputs, peer, reason);
                }
            }
            self.answers.outputs.arrived(self.now_ns);
        }
    }

    /// Requests that have waited long enough are answered that they are to come again.
    pub(super) fn expire_claims(&mut self) {
        while let Some(entry) =
            self.tenancy.claims.open.first_entry().filter(|entry| entry.get().until_ns <= self.now_ns)
        {
            let Claim { peer, header, body, .. } = entry.remove();
            if self.sessions.get_mut(peer).is_none() {
                continue;
            }
            let gets: Vec<_> = match header.kind {
                Kind::Request(Operation::Get) => requests_of::<GetItem>(&header, &body),
                Kind::Request(Operation::GetRange) => requests_of::<RangeItem>(&header, &body),
                _ => Vec::new(),
            };
            self.turn_back(peer, &header, &gets);
        }
    }

    /// An object was looked at: whose this version is, if that is known; nothing where there is none.
    pub(super) fn claim_read(&mut self, digest: Digest, read: Option<(Version, Option<u32>)>) {
        if let Some((version, tenant)) = read {
            self.tenancy.claims.note(digest, version, tenant);
        }
        self.tenancy.claims.settle(digest);
    }

    /// Whose an object is, where that is known.
    pub(super) fn whose(&self, digest: Digest) -> Option<u32> {
        match self.tenant_of(digest) {
            Tenant::Known(tenant) => tenant,
            Tenant::Unread | Tenant::NotHere => None,
        }
    }

    fn tenant_of(&self, digest: Digest) -> Tenant {
        let object = self.store.as_ref().and_then(|store| store.peek(digest));
        // Without an SSD, what has no tail never had one, and was charged to whom its put said.
        if let Some(object) = object.filter(|object| object.has_tail || self.tiered.is_none()) {
            return Tenant::Known(Some(object.tenant));
        }
        let Some(record) = self.on_ssd(digest) else {
            return if object.is_some() { Tenant::Known(None) } else { Tenant::NotHere };
        };
        if object.is_some_and(|object| object.version != record.version) {
            return Tenant::Known(None);
        }
        match self.tenancy.claims.known.get(&digest) {
            // Only what the default tenant puts without a name has no tail.
            _ if record.key_bytes == 0 => Tenant::Known(Some(0)),
            Some((version, tenant)) if *version == record.version => Tenant::Known(*tenant),
            _ => Tenant::Unread,
        }
    }
}

fn requests_of<T: Item + ObjectItem>(header: &Header, body: &[u8]) -> Vec<(Digest, Option<RequestId>)> {
    let items = items_of::<T>(header, body).into_iter().flatten();
    items.map(|item| (Digest(0), item.request())).collect()
}

/// A request's items, by whether they wait.
#[derive(Default)]
struct Split {
    now: Vec<u8>,
    nows: u32,
    later: Vec<u8>,
    laters: u32,
    /// Those that wait, with the requests that they are by themselves.
    unread: Vec<(Digest, Option<RequestId>)>,
}

/// An item that names an object, and may be a request by itself.
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
