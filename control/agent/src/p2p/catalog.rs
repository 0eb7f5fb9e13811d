//! Catalog: the calls of this process to the control plane's P2P catalog, which knows the process by a random number
//! and by the segment that peers open.

use std::sync::Arc;

use kvplane_cluster::p2p::{Layout, ObjectSpec};
use kvplane_rpc::message::TicketKeys;
use kvplane_rpc::p2p::{
    DescribeObject, FetchFailure, FetchOrder, FetchOrders, FindObject, GetPeerKeys, Hold, HoldObject, JoinRanks,
    ListObjects, LocateObject, ObjectMembers, ObjectPlace, ObjectSummary, PeerLocation, PublishObject, RankJoin,
    RankParent, ReleaseObject, RenewObjects, ReportObject, WantShards, WatchFetches,
};
use kvplane_rpc::{CallError, RefusalCode};

use super::config::P2pConfig;
use super::error::P2pError;
use super::replica::{Ranks, Replica};
use crate::error::Error;
use crate::link::ControlLink;

/// Objects per page of a listing.
const PAGE: u32 = 1024;

/// Object as recorded in the catalog.
#[derive(Clone, Debug)]
pub struct Object {
    /// Name.
    pub name: String,
    /// Version.
    pub version: u64,
    /// Buffers, and their division into shards.
    pub layout: Layout,
    /// Description for the users of the object.
    pub about: Vec<u8>,
    pub(super) spec: Arc<ObjectSpec>,
}

/// Catalog of the control plane, as this process uses it.
pub(super) struct Catalog {
    link: ControlLink,
    /// Random number that this process drew.
    client: u64,
    /// Tenant of all objects.
    tenant: String,
    /// Name of the segment by which peers open this process's memory.
    segment: String,
    place: PeerLocation,
    upload_bytes_per_second: u64,
    download_bytes_per_second: u64,
}

impl Catalog {
    /// Creates the catalog of a process with this number, whose engine serves its memory as this segment.
    pub(super) fn new(link: ControlLink, client: u64, config: &P2pConfig, segment: &str) -> Self {
        Self {
            link,
            client,
            tenant: config.tenant.clone(),
            segment: segment.to_owned(),
            place: PeerLocation { host: config.host.clone(), rack: config.rack.clone() },
            upload_bytes_per_second: config.upload_bytes_per_second,
            download_bytes_per_second: config.download_bytes_per_second,
        }
    }

    /// Returns the random number that this process drew.
    pub(super) const fn client(&self) -> u64 {
        self.client
    }

    /// Returns the version of the object under this name; of the newest if none is given.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub(super) fn find(&self, name: &str, version: Option<u64>) -> Result<Object, Error> {
        let call = FindObject { tenant: self.tenant.clone(), name: name.to_owned(), version };
        let found = self.link.call(call)?;
        let layout = Layout::new(found.spec.sizes, found.spec.shard_bytes).map_err(P2pError::Object)?;
        let spec = ObjectSpec { layout: layout.clone(), hashes: found.spec.hashes, about: found.spec.about.clone() };
        spec.check().map_err(P2pError::Object)?;
        let (name, about) = (name.to_owned(), found.spec.about);
        Ok(Object { name, version: found.version, layout, about, spec: Arc::new(spec) })
    }

    /// Returns the objects whose names begin with this prefix, by name and version.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub(super) fn list(&self, prefix: &str) -> Result<Vec<ObjectSummary>, Error> {
        let mut objects: Vec<ObjectSummary> = Vec::new();
        loop {
            let after = objects.last().map(|last| (last.name.clone(), last.version));
            let (tenant, prefix) = (self.tenant.clone(), prefix.to_owned());
            let page = self.link.call(ListObjects { tenant, prefix, after, limit: PAGE })?;
            let more = page.more && !page.objects.is_empty();
            objects.extend(page.objects);
            if !more {
                return Ok(objects);
            }
        }
    }

    /// Returns the members that hold an object.
    ///
    /// # Errors
    /// When no peer holds the object, or the control plane does not answer.
    pub(super) fn describe(&self, name: &str, version: Option<u64>) -> Result<ObjectMembers, Error> {
        self.link.call(DescribeObject { tenant: self.tenant.clone(), name: name.to_owned(), version })
    }

    /// Returns members that hold all of a buffer, nearest first.
    ///
    /// # Errors
    /// When the catalog does not know the object, or the control plane does not answer.
    pub(super) fn locate(&self, object: &Object, buffer: usize) -> Result<Vec<ObjectPlace>, Error> {
        let found = self.link.call(LocateObject {
            client: self.client,
            tenant: self.tenant.clone(),
            name: object.name.clone(),
            version: object.version,
            buffer: u32::try_from(buffer).unwrap_or(u32::MAX),
            near: self.place.clone(),
        })?;
        Ok(found.places)
    }

    /// Publishes an object's description; returns its version.
    ///
    /// # Errors
    /// When the version belongs to another object, or the control plane does not answer.
    pub(super) fn publish(&self, name: &str, version: Option<u64>, spec: &ObjectSpec) -> Result<u64, Error> {
        let (tenant, name) = (self.tenant.clone(), name.to_owned());
        let spec = kvplane_rpc::p2p::ObjectSpec {
            sizes: spec.layout.sizes().to_vec(),
            shard_bytes: spec.layout.shard_bytes(),
            hashes: spec.hashes.clone(),
            about: spec.about.clone(),
        };
        Ok(self.link.call(PublishObject { tenant, name, version, spec })?.version)
    }

    /// Announces a replica of this process; returns its member number.
    ///
    /// # Errors
    /// When the catalog does not know the object, or the control plane does not answer.
    pub(super) fn hold(&self, replica: &Replica) -> Result<u64, Error> {
        let (have, want) = replica.fetch.announced();
        let held = self.link.call(HoldObject {
            tenant: self.tenant.clone(),
            name: replica.name.clone(),
            version: replica.version,
            digest: replica.digest,
            hold: Hold {
                client: self.client,
                segment: self.segment.clone(),
                addresses: replica.regions.iter().map(|region| region.address()).collect(),
                origin: replica.origin,
                have,
                want,
                place: self.place.clone(),
                upload_bytes_per_second: self.upload_bytes_per_second,
                download_bytes_per_second: self.download_bytes_per_second,
            },
        })?;
        Ok(held.member)
    }

    /// Releases a member; `wait` keeps it while peers read from it. Returns the number of these peers.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub(super) fn release(&self, member: u64, wait: bool) -> Result<u64, Error> {
        Ok(self.link.call(ReleaseObject { client: self.client, member, wait })?.readers)
    }

    /// Renews all members of this process; returns those that the catalog knows.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub(super) fn renew(&self) -> Result<Vec<u64>, Error> {
        Ok(self.link.call(RenewObjects { client: self.client })?.members)
    }

    /// Reports the shards that a member has got, and its failures.
    ///
    /// # Errors
    /// When the catalog does not know the member, or the control plane does not answer.
    pub(super) fn report(&self, member: u64, got: &[u32], failed: Vec<FetchFailure>) -> Result<(), Error> {
        let got = got.iter().map(|&shard| (shard, 1)).collect();
        self.link.call(ReportObject { client: self.client, member, got, failed }).map(drop)
    }

    /// Requests shards for a member from the peers that the catalog chooses, and reports failures of its schedule.
    ///
    /// # Errors
    /// When the catalog does not know the member, or the control plane does not answer.
    pub(super) fn want(&self, member: u64, want: Vec<(u32, u32)>, failed: Vec<FetchFailure>) -> Result<(), Error> {
        self.link.call(WantShards { client: self.client, member, want, failed }).map(drop)
    }

    /// Registers the rank of a replica. Returns the parent of a half, if it is known.
    ///
    /// # Errors
    /// When the parent's object differs, the catalog does not know the member, or the control plane does not answer.
    pub(super) fn join_ranks(&self, replica: &Replica, half: usize) -> Result<Option<RankParent>, Error> {
        let Some(seat) = replica.fetch.seat() else { return Ok(None) };
        let Ranks { job, rank, ranks, .. } = seat.ranks().clone();
        let (client, member, join) =
            (self.client, replica.member(), RankJoin { job, rank, ranks, board: seat.board() });
        let joined = self.link.call(JoinRanks { client, member, join, half: half as u8 })?;
        let our_buffers = replica.regions.len();
        if let Some(parent) = joined.parent.as_ref().filter(|parent| parent.addresses.len() != our_buffers) {
            let (segment, buffers) = (parent.segment.to_string(), parent.addresses.len());
            return Err(P2pError::ParentBuffers { segment, buffers, our_buffers }.into());
        }
        Ok(joined.parent)
    }

    /// Opens the stream of orders to this process's members; `each` is called with each order, by the link's thread.
    ///
    /// # Errors
    /// When the link has ended.
    pub(super) fn watch(&self, each: impl Fn(FetchOrder) + Send + 'static) -> Result<(), Error> {
        self.link.stream(WatchFetches { client: self.client }, move |FetchOrders { orders }| {
            orders.into_iter().for_each(&each);
            true
        })
    }

    /// Returns the keys of the tenant's tickets, and a ticket for this process.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub(super) fn peer_keys(&self) -> Result<TicketKeys, Error> {
        self.link.call(GetPeerKeys { client: self.client, tenant: self.tenant.clone() })
    }
}

/// Returns true if the control plane no longer knows the member.
pub(super) fn is_forgotten(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::UnknownClient as u16)
}

/// Returns true if no peer has held the object for longer than the catalog remembers it.
pub(super) fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Call(CallError::Refused(refusal)) if refusal.code == RefusalCode::NotFound as u16)
}
