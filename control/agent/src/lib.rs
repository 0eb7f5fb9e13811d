//! Public crate of kvplane: storage nodes, clients of the store and the transfer engine.
//!
//! * [`Client`]: blocking puts and gets on the calling thread; [`AsyncClient`] is the same API for futures.
//! * [`TransferEngine`]: registers memory as segments; reads and writes the segments of other processes.
//! * [`P2pStore`]: shares large objects between peers.
//! * [`GroupLink`]: connects a process of a job to the control plane, which keeps the job's process groups and their
//!   views ([`group_membership`]).
//! * [`Scheduler`]: requests the placement of inference requests from the Conductor.
//! * [`Node`]: a storage node: pinned shards, membership, heartbeats.
//!
//! ```no_run
//! use kvplane::{Client, ClientConfig, Region, RegionOptions};
//!
//! // Discovers the `kvplane dev` cluster of this user.
//! let mut client = Client::connect(&ClientConfig::local("dev"))?;
//! client.put(b"key", b"value")?;
//! assert_eq!(client.get(b"key")?.as_deref(), Some(&b"value"[..]));
//!
//! // Zero-copy: registered memory is sent from and received into directly.
//! let memory = client.register(Region::allocate(&RegionOptions::new("blocks", 1 << 20))?);
//! client.put_from(b"block", memory.slice(0, 65_536))?;
//! client.get_into(b"block", memory.slice(65_536, 65_536))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod asynchronous;
mod client;
mod data_tls;
mod error;
pub mod group;
mod link;
mod node;
mod p2p;
mod scheduler;
pub mod setup;
mod tickets;
mod which;

pub use asynchronous::{AsyncClient, AsyncKeys, AsyncObjectRanges, AsyncPutSessions, AsyncScatterGather};
pub use client::{
    BatchOutcome, BeginOutcome, Client, ClientConfig, Fill, GetSession, Got, KeyInfo, Keys, ListCursor, ListPage, Near,
    ObjectRange, ObjectRanges, Open, OpenBatches, Pins, Placement, PrefetchTo, Put, PutSession, PutSessions,
    RangeOutcome, Replicas, ScatterGather,
};
pub use data_tls::DataTlsError;
pub use error::{ArgumentError, Error, LibraryThread};
pub use group::{GroupLink, GroupLinkConfig, GroupLinkError, GroupProcess, MemberHost, ProcessGroup, ReportSignal};
pub use kvplane_http::MetricsServer;
pub use kvplane_objects::{PlaceError, StorePlace};
pub use kvplane_transfer::Error as TransferError;
pub use kvplane_transfer::error as transfer_error;
pub use kvplane_transfer::{
    Batch, BatchCompletion, BatchStatus, BufferInfo, DeviceRegistration, DevicesError, Directory, Environment,
    Explanation, FileInfo, MemoryRails, Metrics, Notice, NoticeTargets, ObstacleKind, Opcode, OwnAddress,
    ParseBytesError, PathChange, RailSnapshot, Range, Ranges, RankedRail, RdmaConfig, RdmaUse, RegisterOptions,
    RegistrationObstacle, RegistrationPath, ScatterRequest, Segment, SegmentHandle, SegmentInfo, Segments, Session,
    SlowTransfer, SubmitOptions, TaskState, TaskStatus, Transfer, TransferEngine, TransferEngineConfig,
    TransferRequest, TransportChoice, Use, parse_bytes,
};
pub use link::{ControlLink, ControlLinkError};
pub use node::handover;
pub use node::{DevicePool, ParseDevicePoolError};
pub use node::{FarMemory, FarPool, ParseFarPoolError};
pub use node::{Node, NodeConfig, NodeConfigError};
pub use node::{ParseSsdError, SharedTierConfig, SsdConfig};
pub use p2p::{
    GetOptions, ManifestError, NamedPart, Object, OffsetsError, P2pConfig, P2pError, P2pStore, PartSource, Progress,
    PublishOptions, Ranks, ReadBytes, ReadOptions, ReshardNames, Resharding, ReshardingError, WideningError,
    packed_bytes, placement_from_json,
};
pub use scheduler::{Decision, Scheduler};
pub use tickets::TicketIssueError;
pub use which::{Control, Remote};

pub use kvplane_client::sched::{Health, Priority};
pub use kvplane_client::{Intent, NodeCounts, RailCounts, TaskResult, Transport};
pub use kvplane_cluster::MovesLeft;
pub use kvplane_cluster::p2p::{Interval, Layout, ShardPlace};
pub use kvplane_cluster::reshard;
pub use kvplane_conductor::engine::hashes::{MAX_TOKENS as MAX_HASHED_TOKENS, vllm as vllm_block_hashes};
pub use kvplane_conductor::engine::tokens::TokenPrompt;
pub use kvplane_engine::{
    Buffer, DeviceBuffer, Eviction, FarPart, HugePages, IoChoice, Pacing, PageKind, PoolReadCounters, PutAck, Region,
    RegionError, RegionOptions, ShardSnapshot, Slice, TierPolicy, UploadPolicy, WritePolicy, ZeroCopy,
    ZeroCopyCounters, ZeroCopyOptions, cpu, discover_machine, scheduler_affinity,
};
pub use kvplane_group as group_membership;
pub use kvplane_proto::digest::KeysOf;
pub use kvplane_proto::histogram::Histogram;
pub use kvplane_proto::map::ClusterMap;
pub use kvplane_proto::message::{ObjectPriority, PriorityOutOfRange, PutOptions};
pub use kvplane_proto::{Digest, NodeId, Status, Version};
pub use kvplane_rpc as rpc;
pub use kvplane_sys::advice::give_back_free_memory;
pub use kvplane_sys::private_files::private_directory;
pub use kvplane_sys::{IoBuf, device};
pub use kvplane_sys::{interrupt, lost_pages, memory_map, verbs};
pub use kvplane_tls::DataTls;
