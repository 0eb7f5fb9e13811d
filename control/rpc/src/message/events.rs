//! Messages about objects: events of a node's shards, and lookups of single objects.
//!
//! A node watches for orders over a stream that it opened itself, so that an order reaches it in half a round trip and
//! no process connects to the node. It reports events only after an order to do so. Events of a shard are numbered
//! without gaps. After a loss, the report counts the missing events and a snapshot follows: every present object, as if
//! it had just been stored, in one or more reports, and after it the events from the number that was next before the
//! snapshot began.

use kvplane_proto::events::ObjectEvent;

/// Most events in one report.
pub const EVENTS_PER_REPORT: usize = 1024;
/// Most objects in one order.
pub const OBJECTS_PER_ORDER: usize = 512;

/// Subscribes a node to its orders, for as long as it is connected: the reply is a stream of [`NodeOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WatchOrders {
    pub node: u64,
    pub incarnation: u64,
}

/// An order of the control plane to a node.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct NodeOrder {
    /// Number of the order; the node's answer repeats it.
    pub number: u64,
    pub order: Order,
}

/// Contents of an order. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Order {
    /// Report the locations of these objects, named by their digests; at most [`OBJECTS_PER_ORDER`].
    Find { digests: Vec<u128> },
    /// Report events from now on, or stop. The node sends no answer.
    Follow {
        /// Most events that each shard buffers until they are reported; 0 stops the reports.
        kept: u32,
        /// A value other than the last order's requests a snapshot.
        snapshot: u64,
    },
    /// Replicate these objects to the replica owners of their slots, and report the progress
    /// ([`AnswerCopies`](crate::message::AnswerCopies)); at most [`OBJECTS_PER_ORDER`].
    Copy { digests: Vec<u128> },
}

/// The answer to [`Order::Find`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct AnswerOrder {
    pub node: u64,
    pub incarnation: u64,
    pub number: u64,
    /// Locations, one for each object of the order.
    pub found: Vec<KeyFound>,
}

/// Location of an object on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct KeyFound {
    /// Address of the shard that holds the object; empty if none does.
    pub address: String,
    /// Offset in the shard's pool and size in bytes, if the object is in memory.
    pub memory: Option<(u64, u64)>,
    /// Size in bytes, if the object is on the shard's SSD.
    pub ssd: Option<u64>,
}

/// Reports events of a shard's objects.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportEvents {
    pub events: NodeEvents,
}

/// Subscribes to all events: the reply is a stream of [`Events`], which begins with a snapshot of every shard. A
/// subscriber that does not keep up loses its stream and has to subscribe again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WatchEvents;

/// An item of a subscriber's stream.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Events {
    pub events: NodeEvents,
}

/// Events of a shard's objects.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct NodeEvents {
    pub node: u64,
    pub incarnation: u64,
    pub shard: u16,
    /// Kind of the report.
    pub part: EventReport,
    /// Number of the first event; in a snapshot, the number from which on events follow it.
    pub first: u64,
    /// Events that are missing before the first one.
    pub lost: u64,
    /// The events, in order.
    pub events: Vec<ObjectEvent>,
    /// Names of those of the events' objects that have one and are still present.
    pub names: Vec<EventName>,
}

/// Name of an object.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct EventName {
    /// Index of the object's event in the report.
    pub at: u32,
    /// The tenant's name; empty for the default tenant.
    pub tenant: Vec<u8>,
    pub key: Vec<u8>,
}

/// Kind of a report. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum EventReport {
    /// Events in the order of their numbers.
    Live,
    /// The first part of a snapshot: it replaces everything known of the shard.
    SnapshotBegins,
    /// A further part of a snapshot.
    SnapshotGoesOn,
    /// The member has gone, and with it all objects of its shards.
    Gone,
}
