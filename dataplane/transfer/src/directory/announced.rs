//! Announcement of memory over RDMA to stock Mooncake engines: the descriptor, and the connections that they request.
//!
//! A stock engine uses one protocol for each segment: "rdma" or "tcp". Therefore an engine announces RDMA only on
//! request; stock engines without RDMA then have no path to it. Engines of this project do: the native protocol is
//! announced beside it, and the TCP port stays open.

use std::sync::Weak;

use kvplane_engine::{ForeignDevice, ForeignHalf, Gid, ShardHandle, StockKeys};
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

/// Returns the handler of stock engines' connection requests to the engine with this name.
pub(crate) fn connector(shard: Weak<ShardHandle>, own: String) -> Connector {
    Box::new(move |request| answer(&shard, &own, request).unwrap_or_else(|why| RdmaHandshake::refused(&why)))
}

fn answer(shard: &Weak<ShardHandle>, own: &str, request: &RdmaHandshake) -> Result<RdmaHandshake, String> {
    let shard = shard.upgrade().ok_or("the engine is ending")?;
    let path = &request.peer_path;
    let (segment, device) =
        split_nic_path(path).ok_or_else(|| format!("peer_nic_path is {path:?}, not segment@device"))?;
    if segment != own {
        return Err(format!("this is {own}, not {segment}"));
    }
    let from = &request.local_path;
    split_nic_path(from).ok_or_else(|| format!("local_nic_path is {from:?}, not segment@device"))?;
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
    let gid = Gid(request.local_gid.ok_or("local_gid is missing: it is a Mooncake before 0.3.11")?);
    let half = ForeignHalf { queue_pairs: request.queue_pairs.clone(), gid, lid: request.local_lid };
    if request.ready == Some(true) {
        let there = shard.has_stock(device, from, &half.queue_pairs).map_err(|error| error.to_string())?;
        return match there {
            true => Ok(reply(half)),
            false => Err("there is no connection with these queue pairs any more".to_owned()),
        };
    }
    shard.accept_stock(device, from, &half).map(reply).map_err(|error| error.to_string())
}
