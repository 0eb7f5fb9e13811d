//! Meshes with numbered frames, whose bytes follow from sender, receiver and number.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_mesh::{DownCause, Frame, HEAD_BYTES, Mesh, MeshConfig, MeshEvent, PayloadPart, Peer, SendOutcome};
use kvplane_proto::rng::mix64;
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_sys::{HugePages, Region, RegionOptions};

/// Limit of any wait, on the slowest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY_BYTES: usize = 1 << 20;

/// Lane between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Shm,
    Tcp,
    Rdma,
}

impl Way {
    pub(crate) const ALL: [Self; 3] = [Self::Shm, Self::Tcp, Self::Rdma];

    /// Returns settings of a process that has this lane only; RDMA devices are set by [`Fabric`].
    pub(crate) fn config(self, world: &str, rank: u8, incarnation: u64) -> MeshConfig {
        let mut config = MeshConfig::new(world, rank, incarnation);
        config.payload_bytes = 16 << 10;
        (config.shared_memory, config.tcp) = (self == Self::Shm, self != Self::Shm);
        config
    }
}

/// Software RDMA devices, one for each rank.
pub(crate) struct Fabric(Loopback);

impl Fabric {
    pub(crate) fn new(ranks: u8) -> Self {
        Self(Loopback::new(&vec![SoftPort::default(); usize::from(ranks)]))
    }

    pub(crate) fn config(&self, way: Way, world: &str, rank: u8, incarnation: u64) -> MeshConfig {
        let mut config = way.config(world, rank, incarnation);
        if way == Way::Rdma {
            config.rdma = vec![self.0.verbs().devices().expect("devices").swap_remove(usize::from(rank))];
        }
        config
    }

    pub(crate) fn check(&self) {
        assert_eq!(self.0.violations(), 0, "memory was deregistered under a request");
    }
}

fn word(head: &[u8; HEAD_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&head[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

fn head_of(from: u8, incarnation: u64, to: u8, number: u64, bytes: usize) -> [u8; HEAD_BYTES] {
    let words = [u64::from(from), incarnation, u64::from(to), number, bytes as u64, mix64(number), 0, !number];
    let mut head = [0; HEAD_BYTES];
    head.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    head
}

fn byte(from: u8, to: u8, number: u64, at: u64) -> u8 {
    mix64(u64::from(from) << 56 ^ u64::from(to) << 48 ^ number << 24 ^ (at / 8)).to_le_bytes()[(at % 8) as usize]
}

/// One process's mesh, and what it has seen.
pub(crate) struct End {
    pub(crate) mesh: Mesh,
    pub(crate) rank: u8,
    pub(crate) incarnation: u64,
    memory: Arc<Region>,
    /// Next number to and from each rank; both begin anew with a channel.
    sent: [u64; 64],
    pub(crate) received: [u64; 64],
    /// Frames received over all channels.
    pub(crate) frames: u64,
    pub(crate) ups: Vec<u8>,
    pub(crate) downs: Vec<(u8, DownCause)>,
}

impl End {
    pub(crate) fn new(config: MeshConfig) -> Self {
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("mesh-test", MEMORY_BYTES) };
        let (rank, incarnation) = (config.rank, config.incarnation);
        Self {
            mesh: Mesh::start(config).expect("a mesh"),
            rank,
            incarnation,
            memory: Region::allocate(&options).expect("memory"),
            sent: [0; 64],
            received: [0; 64],
            frames: 0,
            ups: Vec::new(),
            downs: Vec::new(),
        }
    }

    pub(crate) fn peer(&self) -> Peer {
        Peer { rank: self.rank, incarnation: self.incarnation, address: self.mesh.address().to_owned() }
    }

    /// Sends the next frame to a rank, with a payload of at most this many bytes in two parts.
    pub(crate) fn send(&mut self, to: u8, bytes: usize) -> SendOutcome {
        let bytes = bytes.min(self.mesh.payload_limit());
        let number = self.sent[usize::from(to)];
        let from = self.rank;
        self.memory.fill_with(0, bytes, &mut |start, part| {
            part.iter_mut().zip(start..).for_each(|(out, at)| *out = byte(from, to, number, at));
        });
        let cut = bytes / 3;
        let parts = [(0, cut), (cut, bytes - cut)];
        let parts = parts.map(|(offset, bytes)| PayloadPart { region: &self.memory, offset, bytes });
        let sent = self.mesh.send(to, &head_of(from, self.incarnation, to, number, bytes), &parts);
        // The frame was copied: what follows does not change it.
        self.memory.fill_with(0, bytes.min(100), &mut |_, part| part.fill(0xEE));
        self.sent[usize::from(to)] += u64::from(sent == SendOutcome::Sent);
        sent
    }

    /// Takes one event, and checks a frame; returns false if there was none.
    pub(crate) fn take(&mut self) -> bool {
        match self.mesh.poll() {
            None => return false,
            Some(MeshEvent::Frame(frame)) => self.check(&frame),
            Some(MeshEvent::Up(rank)) => {
                (self.sent[usize::from(rank)], self.received[usize::from(rank)]) = (0, 0);
                self.ups.push(rank);
            }
            Some(MeshEvent::Down { rank, cause }) => self.downs.push((rank, cause)),
        }
        true
    }

    fn check(&mut self, frame: &Frame) {
        let number = self.received[usize::from(frame.from)];
        let bytes = frame.payload.bytes();
        let expected = head_of(frame.from, frame.incarnation, self.rank, number, bytes);
        let numbers = (word(&frame.head, 0), word(&frame.head, 3));
        assert_eq!(frame.head, expected, "rank {}: frame {numbers:?} where {number} is next", self.rank);
        assert!((frame.payload.region().address() as usize + frame.payload.offset()).is_multiple_of(64));
        let (from, to) = (frame.from, self.rank);
        frame.payload.region().read_with(frame.payload.offset(), bytes, &mut |start, part| {
            for (found, at) in part.iter().zip(start..) {
                assert_eq!(*found, byte(from, to, number, at), "byte {at} of frame {number} from {from} to {to}");
            }
        });
        self.received[usize::from(frame.from)] += 1;
        self.frames += 1;
    }

    /// Takes events, and waits for them, until a condition holds.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let limit = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < limit, "rank {}: {what}: never happened; downs: {:?}", self.rank, self.downs);
            if !self.take() {
                self.mesh.wait(Instant::now() + Duration::from_millis(50));
            }
        }
    }
}

/// Runs several meshes of this thread until a condition holds.
pub(crate) fn until(ends: &mut [&mut End], what: &str, mut done: impl FnMut(&mut [&mut End]) -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !done(ends) {
        assert!(Instant::now() < limit, "{what}: never happened");
        ends.iter_mut().for_each(|end| _ = end.take());
    }
}

/// Lists the ends as each other's peers, and waits until all channels are open.
pub(crate) fn introduce(ends: &mut [&mut End]) {
    let peers: Vec<Peer> = ends.iter().map(|end| end.peer()).collect();
    let all = peers.iter().fold(0, |all, peer| all | 1 << peer.rank);
    ends.iter_mut().for_each(|end| end.mesh.set_peers(&peers));
    let open = |end: &&mut End| end.mesh.channels().open | 1 << end.rank == all;
    until(ends, "the channels open", |ends| ends.iter().all(open));
}
