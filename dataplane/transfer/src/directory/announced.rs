//! Announcement of memory over RDMA to stock Mooncake engines: the descriptor, and the connections that they request.
//!
//! A stock engine uses one protocol for each segment: "rdma" or "tcp". Therefore an engine announces RDMA only on
//! request; stock engines without RDMA then have no path to it. Engines of this project do: the native protocol is
//! announced beside it, and the TCP port stays open.

use std::fmt;
use std::sync::Weak;

use kvplane_engine::{ForeignDevice, ForeignHalf, Gid, ShardError, ShardHandle, StockKeys};
use kvplane_mooncake::{
    Buffer, Connector, Descriptor, Matrix, RdmaDevice, RdmaHandshake, RdmaKey, RdmaSegment, split_nic_path,
};
use kvplane_proto::SegmentId;

/// Buffer as published.
pub(crate) struct BufferRecord {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Segment id in the native protocol.
    pub(crate) segment: SegmentId,
    /// Location of the memory.
    pub(crate) location: String,
}

/// Devices, and the keys of the buffers on them, as announced to stock engines over RDMA.
pub(crate) struct ToldKeys {
    pub(crate) devices: Vec<ForeignDevice>,
    /// Keys of each buffer.
    pub(crate) keys: Vec<StockKeys>,
}

/// Turns a descriptor into that of a segment over RDMA.
pub(crate) fn describe(descriptor: &mut Descriptor, told: &[BufferRecord], said: &ToldKeys, matrix: Option<&Matrix>) {
    let names = || said.devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
    let uniform = || {
        let locations = told.iter().map(|one| one.location.as_str());
        Matrix::uniform(if told.is_empty() { vec!["cpu:0"] } else { locations.collect() }, &names())
    };
    let matrix = matrix.cloned().unwrap_or_else(uniform);
    // In the order in which a stock engine numbers them.
    let position = |name: &String| said.devices.iter().position(|device| device.name == *name);
    let order: Vec<usize> = matrix.devices().iter().filter_map(position).collect();
    let device = |index: &usize| {
        let ForeignDevice { name, address } = &said.devices[*index];
        // A device whose link is down has no address; connections to it are refused, and the peer takes another.
        let (gid, lid) = address.unwrap_or((Gid::default(), 0));
        RdmaDevice { name: name.clone(), lid, gid: gid.0 }
    };
    let keys = |keys: &Vec<Option<(u32, u32)>>| {
        // A key of 0 permits nothing, but a list that is too short crashes a stock engine.
        let key = |index: &usize| keys.get(*index).copied().flatten().unwrap_or((0, 0));
        order.iter().map(key).map(|(local, remote)| RdmaKey { local, remote }).collect()
    };
    let segment =
        RdmaSegment { devices: order.iter().map(device).collect(), keys: said.keys.iter().map(keys).collect() };
    // For stock engines over RDMA, the name of a buffer is its location.
    descriptor.buffers = told.iter().map(|one| Buffer::new(&one.location, one.address, one.bytes)).collect();
    descriptor.set_rdma(&segment, &matrix);
}

/// Reason why a stock engine's connection request is refused.
#[derive(Debug)]
enum RequestError {
    /// The engine no longer accepts connections.
    Ending,
    /// A field of the request does not name a device.
    NotPath { field: &'static str, path: String },
    /// The request is for another engine.
    OtherSegment { own: String, segment: String },
    /// The request lacks the address that the connection needs.
    NoGid,
    /// The request confirms a connection that does not exist.
    NoConnection,
    /// The shard refused the connection, or did not answer.
    Shard(ShardError),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ending => f.write_str("the engine is ending"),
            Self::NotPath { field, path } => write!(f, "{field} is {path:?}, not segment@device"),
            Self::OtherSegment { own, segment } => write!(f, "this is {own}, not {segment}"),
            Self::NoGid => f.write_str("local_gid is missing: it is a Mooncake before 0.3.11"),
            Self::NoConnection => f.write_str("there is no connection with these queue pairs any more"),
            Self::Shard(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for RequestError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Shard(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ShardError> for RequestError {
    fn from(error: ShardError) -> Self {
        Self::Shard(error)
    }
}

/// Returns the handler of stock engines' connection requests to the engine with this name.
pub(crate) fn connector(shard: Weak<ShardHandle>, own: String) -> Connector {
    Box::new(move |request| {
        answer(&shard, &own, request).unwrap_or_else(|why| RdmaHandshake::refused(&why.to_string()))
    })
}

fn answer(shard: &Weak<ShardHandle>, own: &str, request: &RdmaHandshake) -> Result<RdmaHandshake, RequestError> {
    let shard = shard.upgrade().ok_or(RequestError::Ending)?;
    let path = &request.peer_path;
    let not_path = |field, path: &str| RequestError::NotPath { field, path: path.to_owned() };
    let (segment, device) = split_nic_path(path).ok_or_else(|| not_path("peer_nic_path", path))?;
    if segment != own {
        return Err(RequestError::OtherSegment { own: own.to_owned(), segment: segment.to_owned() });
    }
    let from = &request.local_path;
    split_nic_path(from).ok_or_else(|| not_path("local_nic_path", from))?;
    let reply = |half: ForeignHalf| RdmaHandshake {
        local_path: path.clone(),
        local_lid: half.lid,
        local_gid: Some(half.gid.0),
        peer_path: from.clone(),
        queue_pairs: half.queue_pairs,
        // Peers that know the third handshake message get it announced; this side does not wait for it.
        ready: request.ready.map(|_| false),
        refusal: String::new(),
    };
    let gid = Gid(request.local_gid.ok_or(RequestError::NoGid)?);
    let half = ForeignHalf { queue_pairs: request.queue_pairs.clone(), gid, lid: request.local_lid };
    if request.ready == Some(true) {
        let there = shard.has_stock(device, from, &half.queue_pairs)?;
        return match there {
            true => Ok(reply(half)),
            false => Err(RequestError::NoConnection),
        };
    }
    Ok(reply(shard.accept_stock(device, from, &half)?))
}
