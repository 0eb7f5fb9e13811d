//! The transfer engine: memory registered here is read and written by peers, and theirs by us.
//!
//! [`TransferEngine`] serves: a shard thread of its own, parked when idle, answers peers. [`Session`] asks: on the
//! calling thread. A segment is named by the address of its engine (`127.0.0.1:15000`): peer to peer, without a
//! control plane. Peers on the same host map each other's shareable memory and copy by themselves.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvplane_engine::{
    HostConfig, Initiator, Listen, Pacing, Region, Shard, ShardConfig, ShardHandle, ShardSnapshot, cpu,
};
use kvplane_proto::client::{Config, PeerAddress, PeerId, PeerKind, Request, SegmentTarget, TaskResult};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};
use kvplane_proto::{BatchId, SegmentId, Status, Version};
use kvplane_rpc::RuntimeDirectory;
use kvplane_store::service::{Identity, SegmentInfo};

use crate::client::{Buffer, Slice};
use crate::error::Error;
use crate::link::seed;

/// Settings of a transfer engine.
#[derive(Clone, Debug)]
pub struct TransferEngineConfig {
    /// Group of engines that belong together; others are refused.
    pub cluster: String,
    /// Where peers reach it. Only loopback: data connections carry no credentials yet.
    pub listen: SocketAddr,
    /// Whether shared memory is offered and used.
    pub shared_memory: bool,
    /// Whether TCP is used.
    pub tcp: bool,
    /// TCP connections to each peer.
    pub lanes: u16,
    /// Whether payloads over TCP carry a checksum that their receiver checks.
    pub checksum: bool,
    /// Ranges are cut into slices of this many bytes.
    pub slice_bytes: u64,
    /// How to wait.
    pub pacing: Pacing,
    /// Where the Unix socket goes; `None` takes the user's runtime directory.
    pub runtime_directory: Option<PathBuf>,
    /// Core to pin the serving thread to.
    pub core: Option<usize>,
}

impl Default for TransferEngineConfig {
    fn default() -> Self {
        Self {
            cluster: "p2p".to_owned(),
            listen: ([127, 0, 0, 1], 0).into(),
            shared_memory: true,
            tcp: true,
            lanes: 2,
            checksum: true,
            slice_bytes: 256 << 10,
            pacing: Pacing::default(),
            runtime_directory: None,
            core: None,
        }
    }
}

/// Serves registered memory to peers.
pub struct TransferEngine {
    config: TransferEngineConfig,
    shard: ShardHandle,
    directory: PathBuf,
}

/// Memory that peers may use, until it is unregistered.
#[derive(Clone, Debug)]
pub struct Registration {
    segment: SegmentId,
}

impl TransferEngine {
    /// Starts serving.
    ///
    /// # Errors
    /// When the port is taken or the kernel refuses: says which and what to do.
    pub fn start(config: TransferEngineConfig) -> Result<Self, Error> {
        if !config.listen.ip().is_loopback() {
            return Err(Error::Argument(format!(
                "a data port on {} would be open without authentication: use a loopback address until tickets are \
                 there",
                config.listen
            )));
        }
        if !config.shared_memory && !config.tcp {
            return Err(Error::Argument("neither shared memory nor TCP is allowed: no way to any peer".to_owned()));
        }
        let directory = directory_of(&config)?;
        let unique = seed()?;
        let shard = Shard::start(ShardConfig {
            identity: Identity {
                cluster: config.cluster.clone(),
                node: NodeId(unique.max(1)),
                incarnation: Incarnation(1),
                shard: ShardId(0),
                segment_name: String::new(),
            },
            core: config.core,
            pacing: config.pacing,
            listen: Listen { tcp: config.listen, shm: None, mooncake: None },
            pool: None,
            store: None,
            first_version: Version(1),
            host: HostConfig::default(),
        });
        // The socket is named by the port, which only the bound listener knows.
        let shard = shard?;
        if config.shared_memory {
            shard.listen_shm(socket_path(&directory, shard.address()))?;
        }
        Ok(Self { config, shard, directory })
    }

    /// The name by which peers open its segment.
    #[must_use]
    pub fn segment_name(&self) -> String {
        self.shard.address().to_string()
    }

    /// Lets peers read, and write if it is writable, this memory.
    ///
    /// # Errors
    /// When it overlaps registered memory or is one region too many.
    pub fn register(&self, region: &Arc<Region>) -> Result<Registration, Error> {
        let info = SegmentInfo {
            address: region.address(),
            bytes: region.bytes() as u64,
            writable: region.writable(),
            shareable: self.config.shared_memory && region.fd().is_some(),
            remote_accessible: true,
        };
        Ok(Registration { segment: self.shard.register(info, Arc::clone(region))? })
    }

    /// Takes memory from peers; returns when nothing uses it any more.
    ///
    /// # Errors
    /// When the serving thread does not answer.
    #[allow(clippy::needless_pass_by_value, reason = "the registration is of no use afterwards")]
    pub fn unregister(&self, registration: Registration) -> Result<(), Error> {
        Ok(self.shard.unregister(registration.segment)?)
    }

    /// A way to ask peers, for one thread.
    ///
    /// # Errors
    /// When the kernel gives no ring.
    pub fn session(&self) -> Result<Session, Error> {
        self.session_with(self.config.pacing)
    }

    /// The same, waiting for answers in another way than the serving thread waits for requests.
    ///
    /// # Errors
    /// When the kernel gives no ring.
    pub fn session_with(&self, pacing: Pacing) -> Result<Session, Error> {
        let config = TransferEngineConfig { pacing, ..self.config.clone() };
        Session::new(&config, self.directory.clone())
    }

    /// What the serving thread tells about itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, Error> {
        Ok(self.shard.snapshot()?)
    }
}

fn directory_of(config: &TransferEngineConfig) -> Result<PathBuf, Error> {
    let directory = match &config.runtime_directory {
        Some(path) => RuntimeDirectory::at(path),
        None => RuntimeDirectory::of_user()?,
    };
    kvplane_rpc::files::private_directory(directory.path()).map_err(|error| Error::Argument(error.to_string()))?;
    Ok(directory.path().to_owned())
}

fn socket_path(directory: &std::path::Path, address: SocketAddr) -> PathBuf {
    directory.join(format!("segment-{}.shm", address.port()))
}

/// An opened segment.
#[derive(Clone, Debug)]
pub struct Segment {
    peer: PeerId,
    /// Its regions, in order of registration.
    pub regions: Vec<RegionDescriptor>,
}

/// One transfer: between a part of registered memory and a range of a segment's region.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The caller's memory.
    pub local: Slice,
    /// Which region of the segment.
    pub region: usize,
    /// Where in it.
    pub offset: u64,
    /// Into the segment, or out of it.
    pub write: bool,
}

/// Asks peers, from one thread.
pub struct Session {
    initiator: Initiator,
    directory: PathBuf,
    shared_memory: bool,
}

impl Session {
    fn new(config: &TransferEngineConfig, directory: PathBuf) -> Result<Self, Error> {
        let client = Config {
            cluster: config.cluster.clone(),
            client: seed()?,
            host: cpu::boot_id().unwrap_or_default(),
            lanes: config.lanes,
            shared: config.shared_memory,
            cma: config.shared_memory,
            stream: config.tcp,
            slice_bytes: config.slice_bytes,
            checksum_segments: config.checksum,
            ..Config::default()
        };
        let initiator = Initiator::new(client, &HostConfig::default(), config.pacing)?;
        Ok(Self { initiator, directory, shared_memory: config.shared_memory })
    }

    /// Registers memory to transfer from and into.
    pub fn register(&mut self, region: Arc<Region>) -> Buffer {
        let index = self.initiator.add_buffer(Arc::clone(&region));
        Buffer::new(region, index)
    }

    /// Opens the segment of the engine at this address.
    ///
    /// # Errors
    /// When the name is no address, or nobody answers there.
    pub fn open_segment(&mut self, name: &str, deadline: Duration) -> Result<Segment, Error> {
        let tcp: SocketAddr = name.parse().map_err(|_| {
            Error::Argument(format!("{name:?} is no segment: the name of one is its engine's address, IP:PORT"))
        })?;
        let socket = socket_path(&self.directory, tcp);
        let shm =
            (self.shared_memory && tcp.ip().is_loopback() && socket.exists()).then(|| socket.display().to_string());
        let peer = self.initiator.open_peer(PeerAddress {
            kind: PeerKind::Native,
            node: NodeId(0),
            incarnation: Incarnation(0),
            shard: ShardId(0),
            tcp,
            shm,
        });
        let batch = self.initiator.submit(&[Request::OpenSegment(peer)], deadline)?;
        self.initiator.wait(batch)?;
        let status = self.initiator.results(batch)[0].status;
        let description = self.initiator.take_description(batch).unwrap_or_default();
        self.initiator.release(batch);
        if status != Status::Ok {
            let cause = self.initiator.last_problem().map(str::to_owned);
            return Err(Error::Status { what: format!("open segment {name}"), status, cause });
        }
        let descriptor = SegmentDescriptor::decode(&description)
            .map_err(|error| Error::Argument(format!("the segment {name} described itself wrongly: {error}")))?;
        Ok(Segment { peer, regions: descriptor.regions })
    }

    /// Starts transfers as one batch; validated as a whole before any has an effect.
    ///
    /// # Errors
    /// When one is malformed or names a region that the segment does not have.
    pub fn submit(&mut self, segment: &Segment, transfers: &[Transfer], deadline: Duration) -> Result<BatchId, Error> {
        let requests: Result<Vec<Request>, Error> = transfers.iter().map(|one| request(segment, one)).collect();
        Ok(self.initiator.submit(&requests?, deadline)?)
    }

    /// Waits for a batch to complete and returns its results in order. Nothing touches its memory afterwards.
    ///
    /// # Errors
    /// When the kernel fails us; never for the transfers' own outcomes.
    pub fn wait(&mut self, batch: BatchId) -> Result<Vec<TaskResult>, Error> {
        self.initiator.wait(batch)?;
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        Ok(results)
    }

    /// Runs transfers as one batch; an error when any failed.
    ///
    /// # Errors
    /// When one is malformed or fails: names it and says why.
    pub fn run(&mut self, segment: &Segment, transfers: &[Transfer], deadline: Duration) -> Result<(), Error> {
        let batch = self.submit(segment, transfers, deadline)?;
        self.initiator.wait(batch)?;
        let failed = self.initiator.results(batch).iter().enumerate().find(|(_, r)| r.status != Status::Ok);
        let failed = failed.map(|(index, result)| (index, result.status));
        self.initiator.release(batch);
        match failed {
            None => Ok(()),
            Some((index, status)) => {
                let cause = self.initiator.last_problem().map(str::to_owned);
                Err(Error::Status { what: format!("transfer {index} of {}", transfers.len()), status, cause })
            }
        }
    }
}

fn request(segment: &Segment, transfer: &Transfer) -> Result<Request, Error> {
    let region = segment.regions.get(transfer.region).ok_or_else(|| {
        Error::Argument(format!("region {} of a segment of {}", transfer.region, segment.regions.len()))
    })?;
    let target = SegmentTarget {
        peer: segment.peer,
        segment: region.segment,
        offset: transfer.offset,
        shareable: region.shareable,
    };
    Ok(match transfer.write {
        true => Request::Write(target, transfer.local.local),
        false => Request::Read(target, transfer.local.local),
    })
}
