//! Catalog of segments: name, owner, kind and address of each.
//!
//! A segment of a member lives as long as that incarnation of the member. A client that is not a member gives its
//! segments a time to live and renews all of them with one heartbeat. The catalog locates a segment's owner; the owner
//! describes the contents of the segment.
//!
//! Invariants: every entry is in its owner's set and vice versa; counts stay within [`Limits`].

use core::fmt;
use core::ops::Bound;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use bincode::{Decode, Encode};
use kvplane_proto::ids::{Incarnation, NodeId};

use crate::config::Limits;
use crate::rejection::Rejection;

/// Maximum length of a segment's name.
pub const MAX_SEGMENT_NAME_BYTES: usize = 255;

/// Id of a client that is not a member: a random number drawn when the client starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct ClientId(pub u64);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Owner of a segment: the process that serves it. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SegmentOwner {
    /// One incarnation of a member.
    Node { node: NodeId, incarnation: Incarnation },
    /// A client that is not a member.
    Client { client: ClientId },
}

impl fmt::Display for SegmentOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node { node, incarnation } => write!(f, "node {node} (incarnation {incarnation})"),
            Self::Client { client } => write!(f, "client {client}"),
        }
    }
}

/// Kind of memory that a segment consists of. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub enum SegmentKind {
    /// Main memory.
    Dram,
    /// Memory of an accelerator.
    Gpu,
    /// A file or a block device.
    Nvme,
}

/// An entry of the catalog: named, registered memory that peers may read and write.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Segment {
    /// Name, unique in the cluster.
    pub name: String,
    pub owner: SegmentOwner,
    pub kind: SegmentKind,
    /// Size of the segment.
    pub bytes: u64,
    /// Address at which its owner answers requests about it.
    pub address: SocketAddr,
    /// Time to live after the client's last heartbeat. 0 for a member's segment, which lives as long as the member.
    pub ttl_ns: u64,
}

/// No expiry, or one beyond the end of the clock.
const NEVER_NS: u64 = u64::MAX;

struct Entry {
    segment: Segment,
    /// [`NEVER_NS`] for members' segments.
    expires_ns: u64,
}

/// All registered segments, by name and by owner.
#[derive(Default)]
pub(crate) struct Catalog {
    entries: BTreeMap<String, Entry>,
    owners: BTreeMap<SegmentOwner, BTreeSet<String>>,
}

impl Catalog {
    /// Registers a segment, or replaces the owner's entry of that name. Returns true if the durable state changed.
    pub(crate) fn register(&mut self, segment: Segment, now_ns: u64, limits: &Limits) -> Result<bool, Rejection> {
        check(&segment, limits)?;
        let known = self.entries.get(&segment.name).map(|entry| &entry.segment);
        let changed = known != Some(&segment);
        match known {
            Some(known) if known.owner != segment.owner => {
                return Err(Rejection::SegmentNameTaken { name: segment.name, owner: known.owner });
            }
            Some(_) => {}
            None if self.entries.len() >= limits.segments => {
                return Err(Rejection::TooManySegments { limit: limits.segments });
            }
            None => {
                let held = self.owners.get(&segment.owner).map_or(0, BTreeSet::len);
                if held >= limits.segments_per_owner {
                    return Err(Rejection::TooManySegments { limit: limits.segments_per_owner });
                }
            }
        }
        self.insert(segment, now_ns);
        Ok(changed)
    }

    /// Inserts a segment that was checked before or was restored; its time to live starts at `from_ns`.
    pub(crate) fn insert(&mut self, segment: Segment, from_ns: u64) {
        let expires_ns = match segment.owner {
            SegmentOwner::Node { .. } => NEVER_NS,
            SegmentOwner::Client { .. } => from_ns.saturating_add(segment.ttl_ns),
        };
        self.owners.entry(segment.owner).or_default().insert(segment.name.clone());
        self.entries.insert(segment.name.clone(), Entry { segment, expires_ns });
    }

    /// Unregisters a segment. Returns false if no segment has that name.
    pub(crate) fn unregister(&mut self, owner: SegmentOwner, name: &str) -> Result<bool, Rejection> {
        match self.entries.get(name) {
            None => Ok(false),
            Some(entry) if entry.segment.owner != owner => {
                Err(Rejection::SegmentNameTaken { name: name.to_owned(), owner: entry.segment.owner })
            }
            Some(_) => {
                self.remove(name);
                Ok(true)
            }
        }
    }

    fn remove(&mut self, name: &str) {
        let entry = self.entries.remove(name).expect("only registered segments are removed");
        let names = self.owners.get_mut(&entry.segment.owner).expect("every entry is in its owner's set");
        names.remove(name);
        if names.is_empty() {
            self.owners.remove(&entry.segment.owner);
        }
    }

    /// Removes all segments of an owner; returns their names.
    pub(crate) fn remove_owner(&mut self, owner: SegmentOwner) -> Vec<String> {
        let names: Vec<String> = self.owners.remove(&owner).unwrap_or_default().into_iter().collect();
        for name in &names {
            self.entries.remove(name);
        }
        names
    }

    /// Restarts the time to live of a client's segments; returns their number. Never brings an expiry forward.
    pub(crate) fn renew(&mut self, client: ClientId, now_ns: u64) -> Option<usize> {
        let names = self.owners.get(&SegmentOwner::Client { client })?;
        for name in names {
            let entry = self.entries.get_mut(name).expect("every name of an owner has an entry");
            entry.expires_ns = entry.expires_ns.max(now_ns.saturating_add(entry.segment.ttl_ns));
        }
        Some(names.len())
    }

    /// Removes the expired segments; returns their names.
    pub(crate) fn expire(&mut self, now_ns: u64) -> Vec<String> {
        let due = self.entries.values().filter(|entry| entry.expires_ns <= now_ns && entry.expires_ns != NEVER_NS);
        let names: Vec<String> = due.map(|entry| entry.segment.name.clone()).collect();
        for name in &names {
            self.remove(name);
        }
        names
    }

    /// Postpones the expiry of every client's segments.
    pub(crate) fn postpone(&mut self, by_ns: u64) {
        for entry in self.entries.values_mut() {
            entry.expires_ns = entry.expires_ns.saturating_add(by_ns);
        }
    }

    /// Returns the first expiry.
    pub(crate) fn first_expiry_ns(&self) -> Option<u64> {
        self.entries.values().map(|entry| entry.expires_ns).filter(|&at| at != NEVER_NS).min()
    }

    /// Returns one page of segments with names after `after`, and true if more follow.
    pub(crate) fn page(&self, after: Option<&str>, limit: usize) -> (Vec<Segment>, bool) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut entries = self.entries.range::<str, _>((from, Bound::Unbounded));
        let page = entries.by_ref().take(limit).map(|(_, entry)| entry.segment.clone()).collect();
        (page, entries.next().is_some())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Segment> {
        self.entries.get(name).map(|entry| &entry.segment)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.entries.values().map(|entry| &entry.segment)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn check(segment: &Segment, limits: &Limits) -> Result<(), Rejection> {
    let bytes = segment.name.len();
    if bytes == 0 || bytes > MAX_SEGMENT_NAME_BYTES {
        return Err(Rejection::SegmentName { bytes });
    }
    let (least_ns, most_ns) = match segment.owner {
        SegmentOwner::Node { .. } => (0, 0),
        SegmentOwner::Client { .. } => (1, limits.segment_ttl_ns),
    };
    if segment.ttl_ns < least_ns || segment.ttl_ns > most_ns {
        return Err(Rejection::SegmentTtl { ttl_ns: segment.ttl_ns, least_ns, most_ns });
    }
    Ok(())
}
