//! Members of a swarm, by number and by host.

use std::collections::{BTreeMap, BTreeSet};

use super::locate::ObjectPlace;
use super::member::{Member, ObjectMember, PeerLocation};
use super::object::Layout;
use super::shards::ShardSet;

/// Maximum number of returned locations: enough to choose from when some members leave.
const TOLD: usize = 32;

/// All members of a swarm.
#[derive(Debug)]
pub(super) struct Roster {
    members: BTreeMap<u64, Member>,
    /// Members by host, if the host is known.
    hosts: BTreeMap<String, BTreeSet<u64>>,
    /// Least and greatest number of members so far.
    first: u64,
    last: u64,
}

impl Default for Roster {
    /// Creates an empty roster.
    fn default() -> Self {
        Self { members: BTreeMap::new(), hosts: BTreeMap::new(), first: u64::MAX, last: 0 }
    }
}

impl Roster {
    pub(super) fn get(&self, number: u64) -> Option<&Member> {
        self.members.get(&number)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Member> {
        self.members.get_mut(&number)
    }

    /// Returns the members, by number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Member)> {
        self.members.iter().map(|(number, member)| (*number, member))
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(super) fn insert(&mut self, number: u64, member: Member) {
        if !member.place.host.is_empty() {
            self.hosts.entry(member.place.host.clone()).or_default().insert(number);
        }
        self.members.insert(number, member);
        (self.first, self.last) = (self.first.min(number), self.last.max(number));
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Member> {
        let member = self.members.remove(&number)?;
        if let Some(on_host) = self.hosts.get_mut(&member.place.host) {
            on_host.remove(&number);
            if on_host.is_empty() {
                self.hosts.remove(&member.place.host);
            }
        }
        Some(member)
    }

    /// Returns the members whose lease has expired.
    pub(super) fn expired(&self, now_ns: u64) -> Vec<u64> {
        self.iter().filter(|(_, member)| member.lease_ns <= now_ns).map(|(number, _)| number).collect()
    }

    /// Maps a random number to the range of members' numbers; the result need not be a member.
    pub(super) fn number_at(&self, chance: u64) -> u64 {
        self.first + chance % (self.last + 1 - self.first).max(1)
    }

    /// Returns true if there are other members on a member's host.
    pub(super) fn shares_host(&self, member: &Member) -> bool {
        self.hosts.get(&member.place.host).is_some_and(|on_host| on_host.len() > 1)
    }

    /// Returns true if another member of the same host has a shard or is fetching it.
    pub(super) fn comes_to_host(&self, to: &Member, shard: u32) -> bool {
        let on_host = self.hosts.get(&to.place.host).into_iter().flatten();
        on_host.filter_map(|number| self.members.get(number)).any(|other| {
            !std::ptr::eq(other, to)
                && other.is_source()
                && (other.have.contains(shard) || other.coming.get(&shard).is_some_and(|coming| !coming.late))
        })
    }

    /// Returns the number of shards, out of `shards`, that no source has.
    pub(super) fn lost(&self, shards: u32) -> u32 {
        let mut held = ShardSet::empty(shards);
        for member in self.members.values().filter(|member| member.is_source()) {
            held.insert_all(&member.have);
            // The first member mostly has all.
            if held.count() == held.shards() {
                break;
            }
        }
        held.shards() - held.count()
    }

    /// Returns true if there are sources that together have all of this many shards.
    pub(super) fn is_whole(&self, shards: u32) -> bool {
        self.lost(shards) == 0 && self.members.values().any(Member::is_source)
    }

    /// Returns the state of the members, for operators.
    pub(super) fn rows(&self) -> Vec<ObjectMember> {
        let row = |(&number, member): (&u64, &Member)| ObjectMember {
            member: number,
            segment: member.segment.to_string(),
            origin: member.origin,
            have: member.have.count(),
            need: member.need.count() + member.coming.values().filter(|coming| !coming.stuck).count() as u32,
            excluded: member.corrupt.clone().unwrap_or_default(),
        };
        self.members.iter().map(row).collect()
    }

    /// Returns the members that have all of a buffer, nearest first; `None` if there is no such buffer.
    pub(super) fn locate(
        &self,
        layout: &Layout,
        buffer: usize,
        near: &PeerLocation,
        client: u64,
    ) -> Option<Vec<ObjectPlace>> {
        let bytes = *layout.sizes().get(buffer)?;
        let (first, count) = layout.covering(buffer, 0, bytes)?;
        let whole = |member: &Member| {
            member.have.count() == member.have.shards() || (first..first + count).all(|one| member.have.contains(one))
        };
        let is = |ours: &str, theirs: &str| !ours.is_empty() && ours == theirs;
        let distance = |member: &Member| match &member.place {
            place if is(&near.host, &place.host) => 0,
            place if is(&near.rack, &place.rack) => 1,
            _ => 2,
        };
        // Clients' numbers are random and spread the load well enough.
        let turn = client.checked_rem(self.members.len() as u64).unwrap_or(0) as usize;
        let in_turn = self.members.iter().skip(turn).chain(self.members.iter().take(turn));
        let able = in_turn.filter(|(_, member)| member.is_source());
        let mut by_distance: Vec<(u8, u64, &Member)> =
            able.map(|(&number, member)| (distance(member), number, member)).collect();
        by_distance.sort_by_key(|&(distance, ..)| distance);
        let able = by_distance.into_iter().filter(|(.., member)| whole(member)).take(TOLD);
        let told = able.map(|(distance, number, member)| ObjectPlace {
            member: number,
            segment: member.segment.to_string(),
            address: member.addresses[buffer],
            distance,
        });
        Some(told.collect())
    }
}
