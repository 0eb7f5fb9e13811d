//! Commands to a shard's thread, and their execution.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use kvplane_proto::SegmentId;
use kvplane_proto::ids::Incarnation;
use kvplane_proto::map::SlotOwners;
use kvplane_store::service::SegmentInfo;
use kvplane_sys::Region;
use kvplane_sys::device::DeviceMemory;

use super::error::ShardError;
use super::leaving::QuietWaiter;
use crate::host::ShardHost;

/// Command to a shard's thread.
pub(super) enum Command {
    Register { info: SegmentInfo, memory: SegmentMemory, answer: SyncSender<Result<SegmentId, ShardError>> },
    Unregister { segment: SegmentId, within: Duration, answer: SyncSender<Result<(), ShardError>> },
    ListenShm { listener: UnixListener },
    BeginIncarnation { incarnation: Incarnation },
    Follow { state: u64, owners: Arc<SlotOwners> },
    Ask(Box<dyn FnOnce(&mut ShardHost) + Send>),
}

/// Memory of a segment.
pub(super) enum SegmentMemory {
    Host(Arc<Region>),
    Device(Arc<DeviceMemory>),
}

fn register(host: &mut ShardHost, info: SegmentInfo, memory: SegmentMemory) -> Result<SegmentId, ShardError> {
    if let SegmentMemory::Device(memory) = &memory {
        host.segments().open_device(memory.device()).map_err(ShardError::Device)?;
    }
    let segment = host.service().segments_mut().register(info).map_err(ShardError::Register)?;
    match memory {
        SegmentMemory::Host(region) => host.segments().add(segment, region),
        SegmentMemory::Device(memory) => host.segments().add_device(segment, memory),
    }
    Ok(segment)
}

/// Executes a command.
pub(super) fn obey(host: &mut ShardHost, command: Command, leaving: &mut Vec<QuietWaiter>) {
    match command {
        Command::Register { info, memory, answer } => {
            let registered = register(host, info, memory);
            // The caller may have given up; the segment is then simply unused.
            let _ = answer.send(registered);
        }
        Command::Unregister { segment, within, answer } => {
            host.segments().unregister(segment);
            leaving.push(QuietWaiter::new(segment, within, answer));
        }
        Command::ListenShm { listener } => {
            // If the kernel lacks memory for a watch, it lacks memory for everything else too; peers then use TCP.
            let _ = host.listen_shm(listener);
        }
        Command::BeginIncarnation { incarnation } => host.service().begin_incarnation(incarnation),
        Command::Follow { state, owners } => host.follow_owners(state, &owners),
        Command::Ask(question) => question(host),
    }
}
