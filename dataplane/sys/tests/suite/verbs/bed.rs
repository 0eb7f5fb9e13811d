//! Two ends of a reliable connection, on any devices, with the waits that tests need.

use kvplane_sys::verbs::{
    Access, CompletionChannel, CompletionQueue, Connection, Context, Device, Entry, GidEntry, MemoryRegion, Operation,
    Payload, PeerAccess, PortAttributes, ProtectionDomain, QueuePair, QueuePairOptions, Remote, Request, Route,
    SharedReceiveQueue, Status,
};
use kvplane_sys::{IoBuf, Region, RegionOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory of each end, in bytes.
pub(crate) const MEMORY_BYTES: usize = 1 << 20;
/// Time limit of any wait, on the slowest machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A completed request, as seen by a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) token: u64,
    pub(crate) status: Status,
    pub(crate) receive: bool,
    pub(crate) bytes: u32,
    pub(crate) immediate: Option<u32>,
    pub(crate) remote_write: bool,
}

/// One end of a connection.
pub(crate) struct End {
    pub(crate) queue_pair: QueuePair,
    pub(crate) shared: Option<SharedReceiveQueue>,
    pub(crate) queue: CompletionQueue,
    pub(crate) channel: CompletionChannel,
    pub(crate) memory: MemoryRegion,
    pub(crate) region: Arc<Region>,
    pub(crate) domain: ProtectionDomain,
    pub(crate) context: Arc<Context>,
    pub(crate) port: PortAttributes,
    pub(crate) gid: GidEntry,
    pub(crate) entries: Box<[Entry]>,
    /// Completions seen; each may have completed several requests.
    pub(crate) completions: usize,
}

/// Returns the options that most tests use.
pub(crate) fn options() -> QueuePairOptions {
    QueuePairOptions { signal_every: 16, ..QueuePairOptions::default() }
}

impl End {
    /// Creates an unconnected end.
    pub(crate) fn new(device: &Device, options: &QueuePairOptions, shared: bool) -> Self {
        let context = device.open().expect("opened");
        let port = context.active_port().expect("an active port");
        let gid = context.gids(port.port).expect("gids")[0];
        let domain = ProtectionDomain::new(&context).expect("domain");
        let region = Region::allocate(&RegionOptions::new("end", MEMORY_BYTES)).expect("memory");
        let memory = domain.register(&IoBuf::whole(Arc::clone(&region)), Access::REMOTE).expect("registered");
        let channel = CompletionChannel::new(&context).expect("channel");
        let queue = CompletionQueue::new(&context, 512, Some((&channel, 77))).expect("queue");
        let shared = shared.then(|| SharedReceiveQueue::new(&domain, 32, 1, 16).expect("shared queue"));
        let queue_pair = QueuePair::new(&domain, &queue, shared.as_ref(), options).expect("queue pair");
        let entries = Entry::many(16);
        let completions = 0;
        Self { queue_pair, shared, queue, channel, memory, region, domain, context, port, gid, entries, completions }
    }

    /// Returns the attributes of a connection to `peer`.
    pub(crate) fn connection(&self, peer: &Self) -> Connection {
        Connection {
            port: self.port.port,
            pkey_index: 0,
            access: PeerAccess { write: true, read: true },
            path_mtu: self.port.active_mtu.min(peer.port.active_mtu),
            route: Route {
                gid: Some(peer.gid.gid),
                gid_index: u8::try_from(self.gid.index).expect("a small index"),
                lid: peer.port.lid,
                hop_limit: 64,
                traffic_class: 0,
                service_level: 0,
            },
            peer_qp_num: peer.queue_pair.qp_num(),
            peer_packet_number: peer.queue_pair.qp_num() & 0xff_ffff,
            packet_number: self.queue_pair.qp_num() & 0xff_ffff,
            reads_served: 4,
            reads_started: 4,
            not_ready_timer: 12,
            timeout: 12,
            retries: 3,
            not_ready_retries: 7,
        }
    }

    /// Returns a location in this end's memory, for the other end.
    pub(crate) fn remote(&self, offset: usize) -> Remote {
        Remote { address: self.memory.address() + offset as u64, key: self.memory.remote_key() }
    }

    /// Pushes a signalled request on one range of our memory, without a flush.
    pub(crate) fn push(&mut self, token: u64, operation: Operation, offset: usize, bytes: usize) {
        let memory = self.memory.clone();
        let piece = memory.piece(offset, u32::try_from(bytes).expect("short")).expect("inside");
        let pieces = [piece];
        let request = Request { signalled: true, ..Request::new(token, operation, Payload::Pieces(&pieces)) };
        self.queue_pair.push(&request).expect("pushed");
    }

    /// Pushes a request like `push`, and posts it.
    pub(crate) fn post(&mut self, token: u64, operation: Operation, offset: usize, bytes: usize) {
        self.push(token, operation, offset, bytes);
        assert_eq!(self.queue_pair.flush(true).expect("posted"), 1);
    }

    /// Posts a receive.
    pub(crate) fn receive(&mut self, token: u64, offset: usize, bytes: usize) {
        let memory = self.memory.clone();
        let piece = memory.piece(offset, u32::try_from(bytes).expect("short")).expect("inside");
        match &mut self.shared {
            Some(shared) => {
                shared.push(token, &[piece]).expect("pushed");
                shared.flush().expect("posted");
            }
            None => {
                self.queue_pair.push_receive(token, &[piece]).expect("pushed");
                self.queue_pair.flush_receives().expect("posted");
            }
        }
    }

    /// Polls once.
    pub(crate) fn poll(&mut self) -> Vec<Over> {
        let Self { queue, entries, queue_pair, shared, completions, .. } = self;
        let mut out = Vec::new();
        for completion in queue.poll(entries).expect("polled") {
            *completions += 1;
            let mut over = |retired: kvplane_sys::verbs::RetiredRequest| {
                out.push(Over {
                    token: retired.token,
                    status: retired.status,
                    receive: retired.receive,
                    bytes: completion.bytes(),
                    immediate: completion.immediate(),
                    remote_write: completion.is_remote_write(),
                });
            };
            if completion.queue().is_some() {
                let id = queue_pair.id();
                assert!(completion.queue() != Some(id) || queue_pair.retire(&completion, &mut over));
                assert!(!queue_pair.retire(&completion, |_| panic!("retired twice")));
            } else {
                let shared = shared.as_mut().expect("a shared queue");
                over(shared.retire(&completion).expect("ours"));
                assert!(shared.retire(&completion).is_none(), "retired twice");
            }
        }
        out
    }

    /// Polls until `count` requests have completed.
    pub(crate) fn wait(&mut self, count: usize) -> Vec<Over> {
        let start = Instant::now();
        let mut out = Vec::new();
        while out.len() < count {
            assert!(start.elapsed() < DEADLINE, "waited for {count}, got {out:?}");
            let found = self.poll();
            if found.is_empty() {
                std::thread::yield_now();
            }
            out.extend(found);
        }
        assert_eq!(out.len(), count, "{out:?}");
        out
    }

    /// Polls until one request has completed, and returns it.
    pub(crate) fn wait_one(&mut self) -> Over {
        self.wait(1)[0]
    }
}

/// Creates two connected ends.
pub(crate) fn pair(first: &Device, second: &Device) -> (End, End) {
    let (mut a, mut b) = (End::new(first, &options(), false), End::new(second, &options(), false));
    connect(&mut a, &mut b);
    (a, b)
}

pub(crate) fn connect(a: &mut End, b: &mut End) {
    let (to_b, to_a) = (a.connection(b), b.connection(a));
    a.queue_pair.connect(&to_b).expect("connected");
    b.queue_pair.connect(&to_a).expect("connected");
}

/// Returns the byte that belongs at an offset.
pub(crate) fn byte(seed: u64, offset: usize) -> u8 {
    let mixed = (offset as u64 ^ seed.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub(crate) fn fill(region: &Region, seed: u64, offset: usize, bytes: usize) {
    let content: Vec<u8> = (offset..offset + bytes).map(|at| byte(seed, at)).collect();
    region.copy_in(offset, &content);
}

pub(crate) fn read(region: &Region, offset: usize, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    region.copy_out(offset, &mut content);
    content
}

/// Returns the bytes that `fill` wrote from `from` on.
pub(crate) fn pattern(seed: u64, from: usize, bytes: usize) -> Vec<u8> {
    (from..from + bytes).map(|at| byte(seed, at)).collect()
}
