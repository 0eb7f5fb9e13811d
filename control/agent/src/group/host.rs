//! Host of a process's memberships: frames of the mesh to members and back, under one lock.
//!
//! A caller that waits for a work moves it on: its thread takes the lock, receives, combines and sends, so that a short
//! operation needs no other thread. The process's own thread does the same while no caller waits.

use std::collections::BTreeMap;
use std::time::Instant;

use kvplane_collective::{HEAD_BYTES, Head};
use kvplane_engine::IoBuf;
use kvplane_group::{GroupId, ProcessId, Rank, RankSet, Report, Status, WorldRank};
use kvplane_mesh::{Mesh, MeshEvent, PayloadPart, Peer, SendOutcome};

use super::membership::Membership;
use super::memory::WorkBuffers;

/// Frames that are received or sent before the other is done again.
const TURN: usize = 32;

/// A frame for which its peer had no room. Its payload is a copy: the caller may have its memory again.
struct HeldFrame {
    head: Head,
    payload: Option<IoBuf>,
}

/// Result of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Round {
    /// A frame was received or sent, or a work has ended.
    pub(super) has_moved: bool,
    /// The control plane has to know something.
    pub(super) has_news: bool,
}

/// Counters of a process's collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GroupCounters {
    /// Frames that were sent.
    pub frames_sent: u64,
    /// Their payloads' bytes.
    pub bytes_sent: u64,
    /// Frames that were received.
    pub frames_received: u64,
    /// Times that a peer had no room for a frame.
    pub stalls: u64,
    /// Frames of groups that this process is no member of, and frames that are damaged.
    pub refused: u64,
}

impl GroupCounters {
    fn count_sent(&mut self, payload: Option<&IoBuf>) {
        self.frames_sent += 1;
        self.bytes_sent += payload.map_or(0, |payload| payload.bytes() as u64);
    }
}

/// The memberships of a process.
pub(super) struct GroupHost {
    process: ProcessId,
    mesh: Mesh,
    buffers: WorkBuffers,
    groups: BTreeMap<GroupId, Membership>,
    roster: u64,
    held: BTreeMap<WorldRank, HeldFrame>,
    /// Processes with an open channel, as of the last event.
    open: RankSet<WorldRank>,
    /// Incarnations of the other processes.
    peers: BTreeMap<WorldRank, u64>,
    counters: GroupCounters,
    started: Instant,
    /// The control plane has to know something.
    has_news: bool,
}

impl GroupHost {
    pub(super) fn new(process: ProcessId, mesh: Mesh) -> Self {
        Self {
            process,
            mesh,
            buffers: WorkBuffers::default(),
            groups: BTreeMap::new(),
            roster: 0,
            held: BTreeMap::new(),
            open: RankSet::EMPTY,
            peers: BTreeMap::new(),
            counters: GroupCounters::default(),
            started: Instant::now(),
            has_news: true,
        }
    }

    /// Time of this host's members.
    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(super) const fn counters(&self) -> GroupCounters {
        self.counters
    }

    pub(super) fn membership(&mut self, group: GroupId) -> Option<&mut Membership> {
        self.groups.get_mut(&group)
    }

    pub(super) fn attach(&mut self, group: GroupId, membership: Membership) {
        self.groups.insert(group, membership);
        self.has_news = true;
    }

    pub(super) fn detach(&mut self, group: GroupId) {
        if let Some(mut membership) = self.groups.remove(&group) {
            membership.close(&mut self.buffers);
            self.has_news = true;
        }
    }

    /// Ends all operations.
    pub(super) fn close(&mut self) {
        let groups: Vec<_> = self.groups.keys().copied().collect();
        groups.into_iter().for_each(|group| self.detach(group));
    }

    /// True while operations or messages have not ended.
    pub(super) fn is_busy(&self) -> bool {
        self.groups.values().any(Membership::is_busy)
    }

    /// Begins to leave a group in order, or all groups.
    pub(super) fn leave(&mut self, group: Option<GroupId>) {
        for (id, membership) in &mut self.groups {
            if group.is_none_or(|group| group == *id) {
                membership.member.leave();
            }
        }
    }

    /// True once no other member needs this process in the group, or in any.
    pub(super) fn may_leave(&self, group: Option<GroupId>) -> bool {
        let is_meant = |id: &GroupId| group.is_none_or(|group| group == *id);
        let has_sent = !self.held.values().any(|held| is_meant(&held.head.group));
        let mut groups = self.groups.iter().filter(|(id, _)| is_meant(id));
        has_sent && groups.all(|(_, membership)| membership.member.may_leave())
    }

    /// Says that a member is ready to be activated.
    pub(super) fn set_ready(&mut self, group: GroupId) {
        if let Some(membership) = self.groups.get_mut(&group) {
            membership.member.set_ready();
            self.has_news = true;
        }
    }

    /// Returns what the control plane has to know.
    pub(super) fn report(&mut self) -> Report {
        self.has_news = false;
        let channels = self.mesh.channels();
        let overdue = self
            .groups
            .values()
            .map(|membership| membership.processes_of(membership.member.overdue()))
            .fold(RankSet::EMPTY, RankSet::union);
        Report {
            process: self.process,
            roster: self.roster,
            linked: RankSet::from_bits(channels.open),
            refused: RankSet::from_bits(channels.refused),
            overdue,
            groups: self.groups.values().map(|membership| membership.member.report()).collect(),
        }
    }

    /// Follows the state of the world.
    pub(super) fn follow(&mut self, status: &Status) {
        let now_ns = self.now_ns();
        if status.roster != self.roster {
            self.roster = status.roster;
            // What its former process has not taken is lost, although its connection may not have been.
            for rank in self.peers.keys().copied().collect::<Vec<_>>() {
                let now = status.peers.iter().find(|peer| peer.id.rank == rank);
                if now.map(|peer| peer.id.incarnation) != self.peers.get(&rank).copied() {
                    self.lose(rank);
                }
            }
            self.peers = status.peers.iter().map(|peer| (peer.id.rank, peer.id.incarnation)).collect();
            self.peers.remove(&self.process.rank);
            let others = status.peers.iter().filter(|peer| peer.id.rank != self.process.rank);
            let peers: Vec<_> = others
                .map(|peer| Peer {
                    rank: peer.id.rank.index(),
                    incarnation: peer.id.incarnation,
                    address: peer.address.clone(),
                })
                .collect();
            self.mesh.set_peers(&peers);
            self.note_channels();
        }
        for group in &status.groups {
            let Some(membership) = self.groups.get_mut(&group.group) else { continue };
            let before = membership.member.report();
            membership.follow(group, now_ns);
            self.has_news |= membership.member.report() != before;
        }
    }

    /// Receives, moves operations on, and sends.
    pub(super) fn round(&mut self) -> Round {
        let mut has_moved = self.receive();
        let now_ns = self.now_ns();
        for membership in self.groups.values_mut() {
            let overdue = membership.member.overdue();
            has_moved |= membership.advance(&mut self.buffers, now_ns);
            self.has_news |= membership.member.overdue() != overdue;
        }
        has_moved |= self.send(now_ns);
        Round { has_moved, has_news: self.has_news }
    }

    /// Sleeps until a frame may have arrived, or until a time.
    pub(super) fn wait(&mut self, until: Instant) {
        self.mesh.wait(until);
    }

    fn receive(&mut self) -> bool {
        let now_ns = self.now_ns();
        let mut has_received = false;
        for _ in 0..TURN {
            let Some(event) = self.mesh.poll() else { break };
            has_received = true;
            match event {
                MeshEvent::Frame(frame) => {
                    self.counters.frames_received += 1;
                    let is_taken = Head::decode(&frame.head).is_ok_and(|head| {
                        let Some(membership) = self.groups.get_mut(&head.group) else { return false };
                        let Some(from) = membership.rank_of(WorldRank(frame.from)) else { return false };
                        membership.handle(from, &head, &frame.payload, &mut self.buffers, now_ns);
                        true
                    });
                    if !is_taken {
                        self.counters.refused += 1;
                    }
                    self.mesh.release();
                }
                MeshEvent::Up(rank) => {
                    self.note_channels();
                    for membership in self.groups.values_mut() {
                        let linked = membership.ranks_of(RankSet::single(WorldRank(rank)));
                        membership.member.link(linked);
                    }
                }
                MeshEvent::Down { rank, .. } => {
                    self.note_channels();
                    self.lose(WorldRank(rank));
                }
            }
        }
        has_received
    }

    /// Notes which channels are open, after one of them has changed.
    fn note_channels(&mut self) {
        self.open = RankSet::from_bits(self.mesh.channels().open);
        self.has_news = true;
    }

    /// The connection to a process was lost.
    fn lose(&mut self, rank: WorldRank) {
        if let Some(held) = self.held.remove(&rank) {
            self.drop_held(held);
        }
        for membership in self.groups.values_mut() {
            let lost = membership.ranks_of(RankSet::single(rank));
            if !lost.is_empty() {
                membership.member.lose(lost);
            }
        }
    }

    fn drop_held(&mut self, held: HeldFrame) {
        if let Some(payload) = held.payload {
            self.buffers.give_back(std::sync::Arc::clone(payload.region()));
        }
    }

    fn send(&mut self, now_ns: u64) -> bool {
        let mut has_sent = self.send_held();
        let limit = self.mesh.payload_limit() as u64;
        for membership in self.groups.values_mut() {
            let mut room = membership.ranks_of(self.open.without(self.held.keys().copied().collect()));
            for _ in 0..TURN {
                let Some(outgoing) = membership.member.next_frame(room, limit) else { break };
                has_sent = true;
                let Some(to) = membership.world_rank(outgoing.to) else { continue };
                let payload = membership.payload(&outgoing);
                if payload.is_none() && outgoing.payload.is_some() {
                    // There was no memory for it.
                    membership.member.lose(RankSet::single(outgoing.to));
                    continue;
                }
                match send_frame(&mut self.mesh, to, &outgoing.head, payload.as_ref()) {
                    SendOutcome::Sent => self.counters.count_sent(payload.as_ref()),
                    SendOutcome::Full => {
                        self.counters.stalls += 1;
                        room.remove(outgoing.to);
                        // Without memory for it the frame is lost, and so is what it belongs to.
                        match payload.map(|payload| self.buffers.copy_of(&payload)).transpose() {
                            Ok(payload) => {
                                self.held.insert(to, HeldFrame { head: outgoing.head, payload });
                            }
                            Err(_) => membership.member.lose(RankSet::single(outgoing.to)),
                        }
                    }
                    // An event of the mesh follows.
                    SendOutcome::Down => room.remove(outgoing.to),
                }
            }
            // Frames that were the last of their work end it.
            has_sent |= membership.advance(&mut self.buffers, now_ns);
        }
        has_sent
    }

    /// Sends the frames for which there was no room. Those of a former view are dropped.
    fn send_held(&mut self) -> bool {
        let mut has_sent = false;
        let ranks: Vec<_> = self.held.keys().copied().collect();
        for to in ranks {
            let Some(held) = self.held.get(&to) else { continue };
            let may_send =
                self.groups.get(&held.head.group).is_some_and(|membership| membership.member.may_send(&held.head));
            let sent = if may_send {
                send_frame(&mut self.mesh, to, &held.head, held.payload.as_ref())
            } else {
                SendOutcome::Down
            };
            if sent == SendOutcome::Full {
                continue;
            }
            if let Some(held) = self.held.remove(&to) {
                if sent == SendOutcome::Sent {
                    has_sent = true;
                    self.counters.count_sent(held.payload.as_ref());
                }
                self.drop_held(held);
            }
        }
        has_sent
    }
}

fn send_frame(mesh: &mut Mesh, to: WorldRank, head: &Head, payload: Option<&IoBuf>) -> SendOutcome {
    let part = payload.map(|payload| PayloadPart {
        region: payload.region(),
        offset: payload.offset(),
        bytes: payload.bytes(),
    });
    mesh.send(to.index(), &head.encode(), part.as_slice())
}

const _: () = assert!(HEAD_BYTES == kvplane_mesh::HEAD_BYTES, "heads of collectives fill those of the mesh");
