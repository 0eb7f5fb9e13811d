//! Announcement of memory over RDMA to stock Mooncake engines: the descriptor, and the connections that they request.
//!
//! A stock engine uses one protocol for each segment: "rdma" or "tcp". Therefore an engine announces RDMA only on
//! request; stock engines without RDMA then have no path to it. Engines of this project do: the native protocol is
//! announced beside it, and the TCP port stays open.

use std::sync::{Arc, Weak};

use kvplane_engine::{ForeignDevice, ForeignHalf, Gid, ShardHandle};
use kvplane_mooncake::{
    Buffer, Connector, Descriptor, Matrix, RdmaDevice, RdmaHandshake, RdmaKey, RdmaSegment, split_nic_path,
};

use crate::TransferEngine;
use crate::directory::{BufferRecord, ToldKeys};
use crate::error::Error;

impl TransferEngine {
    /// Announces this engine's memory over RDMA from now on, to stock Mooncake engines, which use one protocol for each
    /// segment. `matrix` assigns devices to memory in Mooncake's form: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`; `None`
    /// assigns all devices to all memory.
    ///
    /// As with TCP, anyone who reaches the handshake port and the device can access the memory: there is no
    /// authentication.
    ///
    /// # Errors
    /// When stock engines are not served, no device is usable, or the matrix is malformed or names a device that does
    /// not exist.
    pub fn announce_rdma(&self, matrix: Option<&str>) -> Result<(), Error> {
        if !self.config.stock_peers {
            return Err(Error::Argument("stock engines are not served here (stock_peers)".to_owned()));
        }
        self.config.rdma.usable().map_err(|why| Error::Argument(format!("RDMA cannot be used: {why}")))?;
        let matrix = matrix.filter(|text| !text.trim().is_empty()).map(Matrix::decode).transpose();
        let matrix = matrix.map_err(|error| Error::Argument(error.to_string()))?;
        let devices = self.shard.stock_devices()?;
        if let Some(matrix) = &matrix {
            let there: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
            if let Some(gone) = matrix.devices().iter().find(|name| !there.contains(&name.as_str())) {
                return Err(Error::Argument(format!(
                    "the matrix names {gone}, but the devices in use are {}",
                    there.join(", ")
                )));
            }
        }
        self.directory.announce_rdma(matrix, connector(Arc::downgrade(&self.shard), self.name().to_owned()));
        self.publish()
    }

    /// Returns the devices and keys to announce, if RDMA is announced to stock engines.
    ///
    /// # Errors
    /// When the serving thread does not answer.
    pub(crate) fn told_keys(&self, told: &[BufferRecord]) -> Result<Option<ToldKeys>, Error> {
        if !self.directory.announces_rdma() {
            return Ok(None);
        }
        let segments = told.iter().map(|one| one.segment).collect();
        Ok(Some(ToldKeys { devices: self.shard.stock_devices()?, keys: self.shard.stock_keys(segments)? }))
    }
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

/// Returns the handler of stock engines' connection requests.
fn connector(shard: Weak<ShardHandle>, own: String) -> Connector {
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
