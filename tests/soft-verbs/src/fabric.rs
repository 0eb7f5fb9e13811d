//! State of a fabric: its devices, and the objects created on them, by number.

use crate::SoftPort;
use crate::buffers::{BufferMapping, BufferRules};
use crate::work::{Receive, Send};
use kvplane_sys::doorbell::event_fd;
use kvplane_sys::verbs::QueueState;
use kvplane_sys::verbs::provider::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_char;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Limit of queued events; further ones are dropped.
const MAX_EVENTS: usize = 1024;

/// Devices of one fabric and the objects created on them.
pub(crate) struct Fabric {
    /// Never changed, because C code holds their addresses.
    devices: Vec<SoftDevice>,
    state: Mutex<State>,
    null: bool,
}

/// A device as seen by C, with its fabric.
#[repr(C)]
pub(crate) struct SoftDevice {
    raw: ibv_device,
    pub(crate) fabric: Weak<Fabric>,
    pub(crate) index: usize,
}

// SAFETY: devices are not written after their creation.
unsafe impl std::marker::Send for SoftDevice {}
// SAFETY: as above.
unsafe impl Sync for SoftDevice {}

impl Fabric {
    pub(crate) fn new(prefix: &str, ports: &[SoftPort], null: bool) -> Arc<Self> {
        Arc::new_cyclic(|fabric| Self {
            devices: (0..ports.len()).map(|index| SoftDevice::new(prefix, index, fabric)).collect(),
            state: Mutex::new(State::new(ports)),
            null,
        })
    }

    pub(crate) fn is_null(&self) -> bool {
        self.null
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        self.devices.iter().map(|device| NonNull::from(device).cast())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SoftDevice {
    fn new(prefix: &str, index: usize, fabric: &Weak<Fabric>) -> Self {
        let mut name = [0; 64];
        for (place, byte) in name.iter_mut().zip(format!("{prefix}{index}").bytes()) {
            *place = byte as c_char;
        }
        let raw = ibv_device {
            ops: [std::ptr::null_mut(); 2],
            node_type: 1,
            transport_type: 0,
            name,
            dev_name: name,
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        Self { raw, fabric: fabric.clone(), index }
    }
}

/// Mutable state of a fabric.
pub(crate) struct State {
    pub(crate) ports: Vec<Port>,
    pub(crate) contexts: BTreeMap<u32, ContextState>,
    /// Device of each domain.
    pub(crate) domains: BTreeMap<u32, usize>,
    pub(crate) memories: BTreeMap<u32, Memory>,
    pub(crate) channels: BTreeMap<u32, Channel>,
    pub(crate) completions: BTreeMap<u32, Completions>,
    pub(crate) shared: BTreeMap<u32, FabricState>,
    pub(crate) queue_pairs: BTreeMap<u32, QueuePair>,
    /// Queue pairs with waiting requests.
    pub(crate) waiting: BTreeSet<u32>,
    pub(crate) violations: u64,
    last_number: u32,
}

pub(crate) struct Port {
    pub(crate) claims: SoftPort,
    pub(crate) up: bool,
    pub(crate) paused: bool,
    pub(crate) removed: bool,
    pub(crate) buffers: BufferRules,
}

pub(crate) struct ContextState {
    pub(crate) device: usize,
    pub(crate) bell: OwnedFd,
    /// Queued events: type and element.
    pub(crate) events: VecDeque<(u32, usize)>,
}

pub(crate) struct Memory {
    pub(crate) domain: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) access: u32,
    /// Buffer of a device behind it, and the offset of its first byte there; `None` for memory of the host.
    pub(crate) buffer: Option<(BufferMapping, u64)>,
}

impl Memory {
    /// Returns where this process accesses the byte at a registered address.
    pub(crate) fn place(&self, address: u64) -> u64 {
        self.buffer.as_ref().map_or(address, |(mapped, offset)| mapped.place(offset + (address - self.address)))
    }
}

pub(crate) struct Channel {
    pub(crate) bell: OwnedFd,
    /// Queued events: addresses of completion queues.
    pub(crate) events: VecDeque<usize>,
}

pub(crate) struct Completions {
    pub(crate) context: u32,
    pub(crate) capacity: usize,
    pub(crate) ready: VecDeque<ibv_wc>,
    pub(crate) overflowed: bool,
    /// Set if armed; true if for solicited completions only.
    pub(crate) armed: Option<bool>,
    pub(crate) channel: Option<u32>,
    /// Address of the queue as seen by C.
    pub(crate) place: usize,
}

pub(crate) struct FabricState {
    pub(crate) depth: usize,
    pub(crate) receives: VecDeque<Receive>,
}

pub(crate) struct QueuePair {
    pub(crate) device: usize,
    pub(crate) context: u32,
    pub(crate) domain: u32,
    pub(crate) completions: u32,
    pub(crate) shared: Option<u32>,
    pub(crate) depth: (usize, usize),
    pub(crate) state: QueueState,
    pub(crate) access: u32,
    pub(crate) peer: u32,
    pub(crate) peer_device: Option<usize>,
    /// Must be equal at both ends, or no request gets through.
    pub(crate) path_mtu: u32,
    pub(crate) retries: NotReadyRetries,
    pub(crate) sends: VecDeque<Send>,
    pub(crate) receives: VecDeque<Receive>,
    /// Address of the queue pair as seen by C.
    pub(crate) place: usize,
}

/// Limit of retries of a request whose receiver is not ready, and the retries left for the current one.
#[derive(Clone, Copy, Default)]
pub(crate) struct NotReadyRetries {
    pub(crate) limit: u8,
    pub(crate) left: u8,
}

impl State {
    fn new(ports: &[SoftPort]) -> Self {
        let port = |claims: &SoftPort| Port {
            claims: *claims,
            up: true,
            paused: false,
            removed: false,
            buffers: BufferRules::default(),
        };
        Self {
            ports: ports.iter().map(port).collect(),
            contexts: BTreeMap::new(),
            domains: BTreeMap::new(),
            memories: BTreeMap::new(),
            channels: BTreeMap::new(),
            completions: BTreeMap::new(),
            shared: BTreeMap::new(),
            queue_pairs: BTreeMap::new(),
            waiting: BTreeSet::new(),
            violations: 0,
            last_number: 0x10,
        }
    }

    /// Returns the number of a new object.
    pub(crate) fn number(&mut self) -> u32 {
        self.last_number += 1;
        self.last_number
    }

    pub(crate) fn set_port(&mut self, device: usize, up: bool) {
        let Some(port) = self.ports.get_mut(device) else { return };
        if port.removed || port.up == up {
            return;
        }
        port.up = up;
        self.announce(device, if up { EVENT_PORT_ACTIVE } else { EVENT_PORT_ERR }, 1);
        if !up {
            self.fail_all(device);
        }
        self.progress();
    }

    pub(crate) fn pause(&mut self, device: usize, paused: bool) {
        if let Some(port) = self.ports.get_mut(device) {
            port.paused = paused;
        }
        self.progress();
    }

    pub(crate) fn remove(&mut self, device: usize) {
        let Some(port) = self.ports.get_mut(device) else { return };
        (port.up, port.removed) = (false, true);
        self.announce(device, EVENT_DEVICE_FATAL, 0);
        self.fail_all(device);
        self.progress();
    }

    pub(crate) fn registered(&self, device: usize) -> usize {
        self.memories.values().filter(|memory| self.domains.get(&memory.domain) == Some(&device)).count()
    }

    fn fail_all(&mut self, device: usize) {
        let connected = |queue: &QueuePair| {
            matches!(queue.state, QueueState::ReadyToReceive | QueueState::ReadyToSend) && queue.device == device
        };
        let failing: Vec<u32> =
            self.queue_pairs.iter().filter(|(_, queue)| connected(queue)).map(|(number, _)| *number).collect();
        for number in failing {
            self.fail(number);
        }
    }

    /// Sends an event to every context of a device.
    fn announce(&mut self, device: usize, kind: u32, element: usize) {
        for context in self.contexts.values_mut().filter(|context| context.device == device) {
            context.push(kind, element);
        }
    }

    /// Sends an event to a context.
    pub(crate) fn tell(&mut self, context: u32, kind: u32, element: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.push(kind, element);
        }
    }

    /// Adds a completion, and signals the channel if the queue is armed.
    pub(crate) fn complete(&mut self, queue: u32, entry: ibv_wc, solicited: bool) {
        let Some(completions) = self.completions.get_mut(&queue) else { return };
        if completions.ready.len() >= completions.capacity {
            if !completions.overflowed {
                completions.overflowed = true;
                let (context, place) = (completions.context, completions.place);
                self.tell(context, EVENT_CQ_ERR, place);
            }
            return;
        }
        let wanted = completions.armed.is_some_and(|only_solicited| !only_solicited || solicited || entry.status != 0);
        completions.ready.push_back(entry);
        if !wanted {
            return;
        }
        completions.armed = None;
        let place = completions.place;
        if let Some(channel) = completions.channel.and_then(|channel| self.channels.get_mut(&channel)) {
            channel.events.push_back(place);
            ring(&channel.bell);
        }
    }
}

impl ContextState {
    fn push(&mut self, kind: u32, element: usize) {
        if self.events.len() < MAX_EVENTS {
            self.events.push_back((kind, element));
            ring(&self.bell);
        }
    }
}

/// Creates an eventfd that is readable while events are queued.
pub(crate) fn bell() -> io::Result<OwnedFd> {
    event_fd()
}

/// Makes an eventfd readable.
fn ring(bell: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: writes from eight bytes of this function. The eventfd has no other user and its count is bounded, so the
    // write does not block.
    unsafe { libc::write(bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Makes an eventfd unreadable, because no event is left.
pub(crate) fn hush(bell: &OwnedFd) {
    let mut count = [0u8; 8];
    // SAFETY: reads into eight bytes of this function; the descriptor is nonblocking.
    unsafe { libc::read(bell.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}
