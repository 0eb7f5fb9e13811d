//! What inputs do to members and to their segments.
//!
//! **Two incarnations of one id.** A greater incarnation is a restart, unless the former incarnation is still heard of
//! from another place: then two nodes were given one id, and the newcomer is refused for as long as the other one sends
//! heartbeats. A restart that comes from another place (a new port, a reboot) is therefore refused at most
//! `suspect_after_ns` and tries again. From the same host and ports it is taken at once: the former incarnation cannot
//! hold them any more. So it is after a restart of the control plane, which has not heard of the former incarnation
//! yet; should that one still speak, it is told that it is stale.

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{MAX_MAP_SHARDS, Member};

use crate::catalog::{ClientId, Segment, SegmentOwner};
use crate::cluster::{Cluster, Evidence, Row};
use crate::message::{Change, Load, MAX_VERSION_BYTES, Reply};
use crate::record::{Record, RecordKey};
use crate::rejection::Rejection;
use crate::state::{MemberEvent, MemberState};

impl Cluster {
    pub(crate) fn join(&mut self, member: Member, capacity_bytes: u64, version: String) -> Result<Reply, Rejection> {
        member.validate().map_err(Rejection::Member)?;
        if version.len() > MAX_VERSION_BYTES {
            return Err(Rejection::Version { bytes: version.len() });
        }
        let node = member.node;
        self.refuse_while_adopting(node)?;
        if let Some(row) = self.rows.get_mut(&node) {
            if member.incarnation <= row.member.incarnation {
                let unsaid = row.capacity_bytes == 0 && row.version.is_empty();
                if unsaid && row.member == member {
                    // It is known from an adopted map, which says neither, and has not heard yet that it has joined.
                    (row.capacity_bytes, row.version) = (capacity_bytes, version);
                    self.remember(node);
                    return self.join_again(node, member.incarnation, true);
                }
                let same = row.member == member && row.capacity_bytes == capacity_bytes && row.version == version;
                return self.join_again(node, member.incarnation, same);
            }
            self.refuse_second_live(&member)?;
        }
        self.refuse_over_limit(&member)?;
        self.accept(member, capacity_bytes, version);
        Ok(self.joined())
    }

    /// A join by an incarnation that is known, or by one before it.
    fn join_again(&mut self, node: NodeId, given: Incarnation, same: bool) -> Result<Reply, Rejection> {
        let row = &self.rows[&node];
        let known = row.member.incarnation;
        if given < known {
            self.counters.stale += 1;
            return Err(Rejection::StaleIncarnation { node, given, known });
        }
        if !row.state.is_live() {
            self.counters.stale += 1;
            return Err(Rejection::Ended { node, incarnation: known, state: row.state });
        }
        if !same {
            return Err(Rejection::IncarnationReused { node, incarnation: known });
        }
        self.hear(node);
        Ok(self.joined())
    }

    fn joined(&self) -> Reply {
        Reply::Joined {
            epoch: self.newest_epoch(),
            heartbeat_interval_ns: self.config.heartbeat_interval_ns,
            heartbeat_deadline_ns: self.config.heartbeat_deadline_ns,
        }
    }

    fn refuse_second_live(&self, newcomer: &Member) -> Result<(), Rejection> {
        let row = &self.rows[&newcomer.node];
        let silent_at_ns = row.heard_ns.saturating_add(self.config.suspect_after_ns);
        if !row.state.is_live() || !row.heard || self.now_ns >= silent_at_ns || same_place(&row.member, newcomer) {
            return Ok(());
        }
        Err(Rejection::NodeIdInUse {
            node: newcomer.node,
            host: row.member.host.clone(),
            address: row.member.shards.first().map(|shard| shard.tcp),
            retry_after_ns: silent_at_ns - self.now_ns,
        })
    }

    fn refuse_over_limit(&self, newcomer: &Member) -> Result<(), Rejection> {
        let limit = self.config.limits.members;
        let others = || self.rows.values().filter(|row| row.state.is_live() && row.member.node != newcomer.node);
        if others().count() >= limit {
            return Err(Rejection::TooManyMembers { limit });
        }
        let wanted = others().map(|row| row.member.shards.len()).sum::<usize>() + newcomer.shards.len();
        if wanted > MAX_MAP_SHARDS {
            return Err(Rejection::TooManyShards { wanted });
        }
        Ok(())
    }

    /// Begins a new incarnation. What the former one served is gone with it.
    fn accept(&mut self, member: Member, capacity_bytes: u64, version: String) {
        let node = member.node;
        let (heard_ns, heard) = (self.now_ns, true);
        let former = self.rows.get(&node);
        let state = former.map_or(MemberState::Joining, |row| row.state);
        let shared = former.is_some_and(|row| row.shared);
        // An incarnation in place of another in the map may not have reported yet that it reports.
        let settled = former.filter(|row| row.state.in_map()).and_then(|row| row.settled).map(|_| Epoch(0));
        let before = former.map(|row| row.member.incarnation);
        let ended = Epoch(0);
        let (load, seen) = (None, Evidence::default());
        // An incarnation that ended in order has given its slots away. One that died has them on its devices.
        let newcomer = former.is_none_or(|row| match row.state {
            MemberState::Joining => row.newcomer,
            MemberState::Left => true,
            MemberState::Dead => !self.devices.contains_key(&node),
            MemberState::Active | MemberState::Suspect | MemberState::Draining => false,
        });
        let row = Row {
            member,
            state,
            capacity_bytes,
            version,
            load,
            heard_ns,
            heard,
            joined_ns: heard_ns,
            ended,
            shared,
            settled,
            newcomer,
            seen,
        };
        self.begin_with_devices(node, row.member.incarnation);
        self.rows.insert(node, row);
        if let Some(incarnation) = before {
            self.drop_segments(SegmentOwner::Node { node, incarnation });
        }
        self.step(node, MemberEvent::Join);
        self.share_follows(node);
        // In place of a former incarnation in the map: its addresses are new even if its slots are not.
        self.map_changed |= self.rows[&node].state.in_map();
        self.counters.joins += 1;
        self.remember(node);
        self.arm_member(node);
        self.expel_dead();
    }

    pub(crate) fn heartbeat(&mut self, node: NodeId, incarnation: Incarnation, load: Load) -> Result<Reply, Rejection> {
        self.expect_incarnation(node, incarnation)?;
        let joining = self.rows[&node].state == MemberState::Joining;
        if joining {
            self.refuse_while_adopting(node)?;
        }
        if !self.step(node, MemberEvent::Heartbeat) {
            self.counters.stale += 1;
            return Err(Rejection::Ended { node, incarnation: incarnation, state: self.rows[&node].state });
        }
        self.counters.heartbeats += 1;
        self.rows.get_mut(&node).expect("the node was just found").load = Some(load);
        self.hear(node);
        if joining {
            self.remember(node);
        }
        self.believe_reports();
        Ok(Reply::Alive { epoch: self.newest_epoch(), since: self.newest_since() })
    }

    pub(crate) fn leave(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_incarnation(node, incarnation)?;
        if self.end(node, MemberEvent::Leave) {
            self.counters.leaves += 1;
        }
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    /// An incarnation ends whose devices are to serve the next one. It keeps the slots that it was to give away and has
    /// not: a drain ends with the incarnation.
    pub(crate) fn restart(&mut self, node: NodeId, incarnation: Incarnation) -> Result<Reply, Rejection> {
        self.expect_incarnation(node, incarnation)?;
        let has_devices = self.devices.get(&node).is_some_and(|devices| devices.incarnation == incarnation);
        let row = self.rows.get_mut(&node).expect("a node whose incarnation was found is known");
        let owns = row.shared && row.state.in_map();
        if !(has_devices && owns) {
            return self.leave(node, incarnation);
        }
        // Silence counts anew, and that its ports refuse connections means nothing. Whoever comes next is taken at
        // once.
        (row.heard, row.heard_ns, row.seen.restarts) = (false, self.now_ns, true);
        if self.step(node, MemberEvent::Undrain) {
            self.remember(node);
        }
        self.counters.restarts += 1;
        self.arm_member(node);
        Ok(Reply::Left { epoch: self.newest_epoch() })
    }

    pub(crate) fn drain(&mut self, node: NodeId, given: Option<Incarnation>) -> Result<Reply, Rejection> {
        let incarnation = self.given_or_present(node, given);
        self.expect_incarnation(node, incarnation)?;
        let stays = |row: &Row| row.state.is_live() && row.state != MemberState::Draining && !row.seen.restarts;
        let takes = |row: &Row| stays(row) && row.member.weight > 0;
        if self.rows[&node].state.is_live() && !self.rows.values().any(|row| row.member.node != node && takes(row)) {
            return Err(Rejection::LastOwner { node });
        }
        if self.step(node, MemberEvent::Drain) {
            self.counters.drains += 1;
            self.remember(node);
            self.arm_member(node);
        }
        let state = self.rows[&node].state;
        if !state.is_live() {
            self.counters.stale += 1;
            return Err(Rejection::Ended { node, incarnation, state });
        }
        Ok(Reply::Draining { epoch: self.newest_epoch() })
    }

    pub(crate) fn undrain(&mut self, node: NodeId, given: Option<Incarnation>) -> Result<Reply, Rejection> {
        let incarnation = self.given_or_present(node, given);
        self.expect_live(node, incarnation)?;
        if self.step(node, MemberEvent::Undrain) {
            self.remember(node);
            self.arm_member(node);
        }
        Ok(Reply::Undrained { epoch: self.newest_epoch() })
    }

    fn given_or_present(&self, node: NodeId, given: Option<Incarnation>) -> Incarnation {
        let known = self.rows.get(&node).map(|row| row.member.incarnation);
        given.or(known).unwrap_or(Incarnation(0))
    }

    /// Refuses whoever is not the latest known incarnation of a node.
    fn expect_incarnation(&mut self, node: NodeId, given: Incarnation) -> Result<(), Rejection> {
        let Some(row) = self.rows.get(&node).filter(|row| given <= row.member.incarnation) else {
            return Err(Rejection::Unknown { node, incarnation: given });
        };
        let known = row.member.incarnation;
        if given < known {
            self.counters.stale += 1;
            return Err(Rejection::StaleIncarnation { node, given, known });
        }
        Ok(())
    }

    /// The same, and whoever's incarnation is over.
    pub(crate) fn expect_live(&mut self, node: NodeId, incarnation: Incarnation) -> Result<(), Rejection> {
        self.expect_incarnation(node, incarnation)?;
        let state = self.rows[&node].state;
        if !state.is_live() {
            self.counters.stale += 1;
            return Err(Rejection::Ended { node, incarnation: incarnation, state });
        }
        Ok(())
    }

    /// Takes a sign of life.
    fn hear(&mut self, node: NodeId) {
        let row = self.rows.get_mut(&node).expect("a node that is heard is known");
        (row.heard_ns, row.heard) = (self.now_ns, true);
        (row.seen.dead, row.seen.restarts) = (false, false);
        self.arm_member(node);
        // Dead members, and changes of shares, may have waited for this one.
        self.expel_dead();
        self.share_heard();
    }

    /// Ends an incarnation; `false` if it was over already.
    pub(crate) fn end(&mut self, node: NodeId, event: MemberEvent) -> bool {
        if !self.step(node, event) {
            return false;
        }
        let ended = self.newest_epoch();
        let row = self.rows.get_mut(&node).expect("a node that ends is known");
        // What it had is gone with it.
        (row.ended, row.load) = (ended, None);
        let incarnation = row.member.incarnation;
        self.remember(node);
        self.drop_segments(SegmentOwner::Node { node, incarnation });
        self.forget_longest_ended();
        true
    }

    fn remember(&mut self, node: NodeId) {
        self.changes.push(Change::Put(self.rows[&node].record()));
    }

    /// Keeps the number of remembered ended incarnations within its limit.
    pub(crate) fn forget_longest_ended(&mut self) {
        let ended = self.rows.iter().filter(|(_, row)| !row.state.is_live());
        let mut ended: Vec<(Epoch, NodeId)> = ended.map(|(&node, row)| (row.ended, node)).collect();
        let excess = ended.len().saturating_sub(self.config.limits.ended_incarnations);
        if excess > 0 {
            ended.sort_unstable();
        }
        for &(_, node) in &ended[..excess] {
            self.rows.remove(&node);
            self.forget_devices(node);
            self.changes.push(Change::Remove(RecordKey::Member(node)));
        }
    }

    fn drop_segments(&mut self, owner: SegmentOwner) {
        for name in self.catalog.remove_owner(owner) {
            self.changes.push(Change::Remove(RecordKey::Segment(name)));
        }
    }

    pub(crate) fn client_heartbeat(&mut self, client: ClientId) -> Result<Reply, Rejection> {
        let segments = self.catalog.renew(client, self.now_ns).ok_or(Rejection::UnknownClient { client })?;
        Ok(Reply::Renewed { segments })
    }

    pub(crate) fn register_segment(&mut self, segment: Segment) -> Result<Reply, Rejection> {
        match segment.owner {
            SegmentOwner::Node { node, incarnation } => {
                self.expect_live(node, incarnation)?;
            }
            SegmentOwner::Client { .. } => {}
        }
        let timed = matches!(segment.owner, SegmentOwner::Client { .. });
        let expires_ns = self.now_ns.checked_add(segment.ttl_ns).filter(|_| timed);
        let record = segment.clone();
        if self.catalog.register(segment, self.now_ns, &self.config.limits)? {
            self.changes.push(Change::Put(Record::Segment(record)));
        }
        self.arm(expires_ns);
        Ok(Reply::Registered)
    }

    pub(crate) fn unregister_segment(&mut self, owner: SegmentOwner, name: String) -> Result<Reply, Rejection> {
        if self.catalog.unregister(owner, &name)? {
            self.changes.push(Change::Remove(RecordKey::Segment(name)));
        }
        Ok(Reply::Unregistered)
    }
}

/// Whether both listen on the same ports of the same host. A member without shards listens nowhere, so nothing is
/// known.
fn same_place(one: &Member, other: &Member) -> bool {
    one.host == other.host
        && !one.shards.is_empty()
        && one.shards.len() == other.shards.len()
        && one.shards.iter().zip(&other.shards).all(|(one, other)| one.tcp == other.tcp)
}
