//! Messages about objects: what becomes of those of a node's shards, and where single ones are.
//!
//! A node watches for orders over a stream of its own, so that it can be asked within a round trip and nobody has to
//! reach it. It reports events only while it is ordered to. Events of a shard are numbered without gaps; where some are
//! missing, the report says so and a snapshot follows: every object there is, as if it had just been stored, in one or
//! more reports, and after it the events from a number that was the next before the snapshot began.

/// Events in one report at most.
pub const EVENTS_PER_REPORT: usize = 1024;
/// Objects that are asked after in one order at most.
pub const OBJECTS_PER_ORDER: usize = 512;

/// A node asks for its orders, for as long as it is connected: the reply is a stream of [`NodeOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WatchOrders {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
}

/// Something that a node is to do.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct NodeOrder {
    /// Its number, for the answer.
    pub number: u64,
    /// What.
    pub order: Order,
}

/// What a node may be told to do. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Order {
    /// Say where these objects are, by their digests; at most [`OBJECTS_PER_ORDER`].
    Find {
        /// The objects.
        digests: Vec<u128>,
    },
    /// Report events from now on, or stop. No answer.
    Follow {
        /// How many each shard keeps until they are reported; 0 stops.
        kept: u32,
        /// When this differs from the last order's, a snapshot is wanted.
        snapshot: u64,
    },
    /// Have these objects copied to the second owners of their slots, and say how far that is
    /// ([`AnswerCopies`](crate::message::AnswerCopies)); at most [`OBJECTS_PER_ORDER`].
    Copy {
        /// The objects.
        digests: Vec<u128>,
    },
}

/// What came of an order.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AnswerOrder {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// The order's number.
    pub number: u64,
    /// One for each object that was asked after.
    pub found: Vec<KeyFound>,
}

/// Where an object is on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct KeyFound {
    /// Where the shard listens that has it; empty where none has.
    pub address: String,
    /// In memory: offset in the shard's pool, and size.
    pub memory: Option<(u64, u64)>,
    /// On the shard's SSD: size.
    pub ssd: Option<u64>,
}

/// Says what became of objects of a shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ReportEvents {
    /// What.
    pub events: NodeEvents,
}

/// Somebody asks for all events: the reply is a stream of [`Events`], which begins with a snapshot of every shard.
/// Watchers that do not keep up lose their stream, and begin anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WatchEvents;

/// What became of objects of a shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Events {
    /// What.
    pub events: NodeEvents,
}

/// What became of objects of a shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct NodeEvents {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// Which shard.
    pub shard: u16,
    /// What kind of report this is.
    pub part: EventReport,
    /// The number of the first event; in a snapshot, that from which on events follow it.
    pub first: u64,
    /// How many are missing before it.
    pub lost: u64,
    /// What became of objects.
    pub events: Vec<ObjectEvent>,
    /// The names of those of them that have one and are still there.
    pub names: Vec<EventName>,
}

/// The name of an object.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EventName {
    /// Which of the report's events it is of.
    pub at: u32,
    /// The tenant's name; empty for the default tenant.
    pub tenant: Vec<u8>,
    /// The key.
    pub key: Vec<u8>,
}

/// What kind of report. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum EventReport {
    /// Events as they came.
    Live,
    /// The first part of a snapshot: what was known of the shard is void.
    SnapshotBegins,
    /// A further part.
    SnapshotGoesOn,
    /// The member is gone, and all that its shards had.
    Gone,
}

/// What became of an object. Tags of the enums are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ObjectEvent {
    /// What.
    pub change: ObjectChange,
    /// Where.
    pub medium: ObjectMedium,
    /// The object's digest; 0 where all are meant.
    pub digest: u128,
    /// Its size, where it is there.
    pub bytes: u64,
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum ObjectChange {
    /// It is there.
    Stored,
    /// It is there no more.
    Removed,
    /// None is there.
    Cleared,
}

/// Where an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum ObjectMedium {
    /// In memory.
    Memory,
    /// On an SSD.
    Ssd,
}
