//! Swarm of one object: its members, the copies of each shard, and the fetches in flight.
//!
//! Every change puts members on a list of those to be looked at. Looking at a member grants fetches to it and fills its
//! free places with fetches of others, until neither is possible. A fetch that takes much longer than usual is late: it
//! no longer counts, so that other members get the shard from another source. Later it is stuck: its receiver may fetch
//! the shard from another source, and aborts the first fetch before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bincode::{Decode, Encode};
use kvplane_proto::rng::Rng;

use super::choose::{Choice, Chooser};
use super::counts::ShardCounts;
use super::member::{FetchFailure, Hold, Member, MovingAverage, Rate, ShardFetch};
use super::object::{ObjectError, ObjectSpec};
use super::pace::Pace;
use super::ranks::{Jobs, RankJoin, RankParent};
use super::roster::Roster;
use super::shards::{Interval, ShardSet};

/// Multiple of the typical duration after which a fetch is late.
const LATE: u64 = 4;
/// Range of the interval between searches for late fetches, and the addition to it for each member.
const LOOK_NS: std::ops::RangeInclusive<u64> = 5_000_000..=250_000_000;
const LOOK_AT_ONE_NS: u64 = 100_000;
/// Time for which a receiver avoids a source that it could not reach; doubles with each failure, up to `BAN_DOUBLINGS`
/// times.
const BAN_NS: u64 = 100_000_000;
const BAN_DOUBLINGS: u32 = 6;

/// Order to fetch one shard. A fetch of the shard from another member that is in flight is aborted first.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchOrder {
    /// Number of the receiving member.
    pub member: u64,
    /// Index of the shard.
    pub shard: u32,
    /// Number of the member to fetch from.
    pub source: u64,
    /// Segment in which the source serves.
    pub segment: Arc<str>,
    /// Address of the shard in that segment.
    pub address: u64,
}

/// Order for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Grant {
    /// Client whose process fetches.
    pub client: u64,
    pub order: FetchOrder,
}

/// The swarm of one object.
#[derive(Debug)]
pub(super) struct Swarm {
    spec: ObjectSpec,
    digest: u128,
    roster: Roster,
    counts: ShardCounts,
    jobs: Jobs,
    /// Sources with a free place, and receivers with one.
    free: BTreeSet<u64>,
    receivers: BTreeSet<u64>,
    pace: Pace,
    rng: Rng,
    /// Members that changed, and must be looked at.
    dirty: VecDeque<u64>,
    grants: VecDeque<Grant>,
    /// Number of granted fetches in flight.
    outstanding: usize,
    /// Time of the next look.
    due_ns: u64,
    /// Time since which there have been no members.
    empty_since_ns: u64,
}

impl Swarm {
    pub(super) fn new(spec: ObjectSpec, seed: u64, now_ns: u64) -> Self {
        let (digest, shards) = (spec.digest(), spec.layout.shards());
        Self {
            spec,
            digest,
            roster: Roster::default(),
            counts: ShardCounts::new(shards),
            jobs: Jobs::default(),
            free: BTreeSet::new(),
            receivers: BTreeSet::new(),
            pace: Pace::default(),
            rng: Rng::new(seed, "swarm"),
            dirty: VecDeque::new(),
            grants: VecDeque::new(),
            outstanding: 0,
            due_ns: u64::MAX,
            empty_since_ns: now_ns,
        }
    }

    /// Returns the description of the object.
    pub(super) const fn spec(&self) -> &ObjectSpec {
        &self.spec
    }

    /// Returns the digest of the object.
    pub(super) const fn digest(&self) -> u128 {
        self.digest
    }

    pub(super) const fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Returns the time of the next look.
    pub(super) const fn due_ns(&self) -> u64 {
        self.due_ns
    }

    /// Returns the time since which there have been no members.
    pub(super) const fn empty_since_ns(&self) -> u64 {
        self.empty_since_ns
    }

    /// Notes that the object was published again: without members, it is remembered for another lease.
    pub(super) const fn touch(&mut self, now_ns: u64) {
        self.empty_since_ns = now_ns;
    }

    pub(super) fn join(&mut self, number: u64, hold: Hold, now_ns: u64, lease_ns: u64) -> Result<(), ObjectError> {
        let shards = self.spec.layout.shards();
        let run = |(first, count)| {
            ObjectError::Malformed(format!("{count} shards from {first} on are not within the object's {shards}"))
        };
        let have = ShardSet::of(shards, &hold.have).map_err(run)?;
        let mut need = ShardSet::of(shards, &hold.want).map_err(run)?;
        for shard in have.iter() {
            need.remove(shard);
        }
        let (buffers, addresses) = (self.spec.layout.sizes().len(), hold.addresses.len());
        if buffers != addresses {
            return Err(ObjectError::Malformed(format!("{addresses} addresses for the object's {buffers} buffers")));
        }
        let member = Member {
            client: hold.client,
            segment: hold.segment.into(),
            addresses: hold.addresses,
            origin: hold.origin,
            place: hold.place,
            have: ShardSet::empty(shards),
            need,
            coming: BTreeMap::new(),
            retried: BTreeMap::new(),
            serving: BTreeSet::new(),
            serving_late: 0,
            up: Rate::of(hold.upload_bytes_per_second),
            down: Rate::of(hold.download_bytes_per_second),
            fetched: MovingAverage::default(),
            served: MovingAverage::default(),
            bans: BTreeMap::new(),
            leaving: false,
            suspect: false,
            corrupt: None,
            rank: None,
            lease_ns,
        };
        self.roster.insert(number, member);
        have.iter().for_each(|shard| self.acquire(number, shard));
        self.dirty.push_back(number);
        self.pump(now_ns);
        Ok(())
    }

    /// Adds or removes a copy of a shard. If it was the last one, origins send the shard again.
    fn count(&mut self, shard: u32, more: bool) {
        if self.counts.change(shard, more) {
            let origins = self.roster.iter().filter(|(_, member)| member.origin && member.is_source());
            self.dirty.extend(origins.map(|(number, _)| number));
        }
    }

    /// Notes that a member has a shard.
    fn acquire(&mut self, number: u64, shard: u32) {
        let counted = self.end(number, shard);
        let Some(member) = self.roster.get_mut(number) else { return };
        member.need.remove(shard);
        if !member.have.insert(shard) {
            return;
        }
        if member.counts() && !counted {
            self.count(shard, true);
        }
        self.dirty.push_back(number);
    }

    /// Ends a fetch; returns true if it counted as a copy.
    fn end(&mut self, number: u64, shard: u32) -> bool {
        let Some(coming) = self.roster.get_mut(number).and_then(|member| member.coming.remove(&shard)) else {
            return false;
        };
        self.outstanding -= 1;
        if let Some(source) = self.roster.get_mut(coming.from)
            && source.serving.remove(&(number, shard))
        {
            source.serving_late -= u32::from(coming.late);
            self.dirty.push_back(coming.from);
        }
        self.dirty.push_back(number);
        !coming.late && self.roster.get(number).is_some_and(Member::counts)
    }

    /// Ends a fetch without success.
    fn give_up(&mut self, number: u64, shard: u32) {
        if self.end(number, shard) {
            self.count(shard, false);
        }
        if let Some(member) = self.roster.get_mut(number)
            && !member.have.contains(shard)
        {
            member.need.insert(shard);
        }
    }

    /// Processes a member's report of received shards and failed fetches.
    pub(super) fn report(&mut self, number: u64, got: &[Interval], failed: &[FetchFailure], now_ns: u64) {
        let shards = self.spec.layout.shards();
        self.heard(number);
        let known = |&&(first, count): &&Interval| first.checked_add(count).is_some_and(|end| end <= shards);
        for shard in got.iter().filter(known).flat_map(|&(first, count)| first..first + count) {
            self.learn(number, shard, now_ns);
            self.acquire(number, shard);
        }
        for failure in failed {
            let Some(member) = self.roster.get_mut(number) else { return };
            // A failure of a fetch that was aborted in the meantime is ignored.
            if member.coming.get(&failure.shard).is_none_or(|coming| coming.from != failure.source) {
                continue;
            }
            let (until_ns, times) = member.bans.entry(failure.source).or_insert((0, 0));
            *until_ns = now_ns + (BAN_NS << (*times).min(BAN_DOUBLINGS));
            *times += 1;
            self.give_up(number, failure.shard);
            self.blame(number, *failure);
        }
        self.pump(now_ns);
    }

    fn blame(&mut self, by: u64, failure: FetchFailure) {
        let who = self.roster.get(by).map(|member| member.segment.to_string()).unwrap_or_default();
        if failure.corrupt {
            let why = format!("shard {} does not match its hash, as {who} reported", failure.shard);
            self.retire(failure.source, |source| source.corrupt = Some(why));
        } else {
            self.retire(failure.source, |source| source.suspect = true);
        }
    }

    /// Applies a change to a member, and updates the counts if its shards count as copies no more, or again.
    fn retire(&mut self, number: u64, change: impl FnOnce(&mut Member)) {
        let Some(member) = self.roster.get_mut(number) else { return };
        let counted = member.counts();
        change(member);
        let counts = member.counts();
        if counts == counted {
            return;
        }
        let on_time = member.coming.iter().filter(|(_, coming)| !coming.late).map(|(&shard, _)| shard);
        let changed: Vec<u32> = member.have.iter().chain(on_time).collect();
        changed.into_iter().for_each(|shard| self.count(shard, counts));
    }

    /// Notes a message of a member: its doubt ends.
    fn heard(&mut self, number: u64) {
        if self.roster.get(number).is_some_and(|member| member.suspect) {
            self.retire(number, |member| member.suspect = false);
            self.dirty.push_back(number);
        }
    }

    /// Learns the speed of both sides from the duration of a fetch.
    fn learn(&mut self, number: u64, shard: u32, now_ns: u64) {
        let Some(member) = self.roster.get_mut(number) else { return };
        let Some(&coming) = member.coming.get(&shard) else { return };
        let took_ns = now_ns.saturating_sub(coming.since_ns);
        member.fetched.learn(took_ns);
        member.bans.remove(&coming.from);
        if let Some(source) = self.roster.get_mut(coming.from) {
            source.served.learn(took_ns);
        }
        self.pace.learn(took_ns, coming.along);
    }

    /// Renews the lease of a member.
    pub(super) fn renew(&mut self, number: u64, now_ns: u64, lease_ns: u64) {
        let Some(member) = self.roster.get_mut(number) else { return };
        member.lease_ns = lease_ns;
        self.heard(number);
        self.pump(now_ns);
    }

    /// Lets a member leave: no further fetch from it or by it begins. Returns the number of fetches from it that
    /// remain.
    pub(super) fn leave(&mut self, number: u64) -> usize {
        self.retire(number, |member| member.leaving = true);
        self.roster.get(number).map_or(0, |member| member.serving.len()) + self.jobs.followers(&self.roster, number)
    }

    /// Removes a member; returns its client, and the number of its addresses.
    pub(super) fn drop_member(&mut self, number: u64, now_ns: u64) -> Option<(u64, usize)> {
        self.leave(number);
        self.leave_ranks(number);
        let coming: Vec<u32> = self.roster.get(number)?.coming.keys().copied().collect();
        for shard in coming {
            self.end(number, shard);
        }
        let member = self.roster.remove(number)?;
        for (receiver, shard) in member.serving {
            self.give_up(receiver, shard);
        }
        self.free.remove(&number);
        self.receivers.remove(&number);
        if self.roster.is_empty() {
            self.empty_since_ns = now_ns;
        }
        self.pump(now_ns);
        Some((member.client, member.addresses.len()))
    }

    /// Searches for fetches that take too long.
    pub(super) fn look(&mut self, now_ns: u64) {
        self.due_ns = u64::MAX;
        let late_ns = LATE * self.pace.usual_ns();
        let (mut late, mut stuck) = (Vec::new(), Vec::new());
        for (number, member) in self.roster.iter() {
            let own_ns = member.fetched.ns().map_or(LATE * late_ns, |own_ns| late_ns.max(LATE * own_ns));
            for (&shard, coming) in &member.coming {
                let age_ns = now_ns.saturating_sub(coming.since_ns);
                if !coming.late && age_ns > late_ns {
                    late.push((number, shard, coming.from));
                }
                let times = member.retried.get(&shard).copied().unwrap_or(0).min(BAN_DOUBLINGS);
                if !coming.stuck && age_ns > own_ns << times {
                    stuck.push((number, shard, coming.from));
                }
            }
            let is_banned = !member.bans.is_empty() && !member.need.is_empty();
            if is_banned || member.up.is_set() || member.down.is_set() {
                self.dirty.push_back(number);
            }
        }
        for (number, shard, from) in late {
            let Some(member) = self.roster.get_mut(number) else { continue };
            if let Some(coming) = member.coming.get_mut(&shard) {
                coming.late = true;
            }
            if member.counts() {
                self.count(shard, false);
            }
            if let Some(source) = self.roster.get_mut(from) {
                source.serving_late += 1;
                self.dirty.push_back(from);
            }
            self.dirty.push_back(number);
        }
        let mut silent = BTreeMap::new();
        for (number, shard, from) in stuck {
            let Some(member) = self.roster.get_mut(number) else { continue };
            member.need.insert(shard);
            *member.retried.entry(shard).or_default() += 1;
            if let Some(coming) = member.coming.get_mut(&shard) {
                coming.stuck = true;
            }
            *silent.entry(from).or_insert(0u32) += 1;
            self.dirty.push_back(number);
        }
        // A single stuck fetch may be the fault of its receiver.
        for (source, _) in silent.into_iter().filter(|&(_, fetches)| fetches > 1) {
            self.retire(source, |source| source.suspect = true);
        }
        self.pump(now_ns);
    }

    /// Looks at a member that changed.
    fn look_at(&mut self, number: u64, now_ns: u64) {
        self.dirty.push_back(number);
        self.pump(now_ns);
    }

    /// Makes grants until none is possible.
    fn pump(&mut self, now_ns: u64) {
        while let Some(number) = self.dirty.pop_front() {
            self.sort(number, now_ns);
            while self.receivers.contains(&number) {
                let chance = self.rng.next_u64();
                let Some(choice) = self.chooser(now_ns, chance).source_for(number, &self.free) else { break };
                self.grant(choice, now_ns);
            }
            while self.free.contains(&number) {
                let chance = self.rng.next_u64();
                let Some(choice) = self.chooser(now_ns, chance).receiver_for(number, &self.receivers) else { break };
                self.grant(choice, now_ns);
            }
        }
        if self.outstanding == 0 && !self.roster.iter().any(|(_, member)| !member.need.is_empty()) {
            self.due_ns = u64::MAX;
        } else if self.due_ns == u64::MAX {
            let usual_ns = self.pace.usual_ns().clamp(*LOOK_NS.start(), *LOOK_NS.end());
            self.due_ns = now_ns + usual_ns + LOOK_AT_ONE_NS * self.roster.len() as u64;
        }
    }

    const fn chooser(&self, now_ns: u64, chance: u64) -> Chooser<'_> {
        Chooser { roster: &self.roster, counts: &self.counts, pace: &self.pace, now_ns, chance }
    }

    /// Updates the sets of free sources and of receivers with room for a member.
    fn sort(&mut self, number: u64, now_ns: u64) {
        let (member, chooser) = (self.roster.get(number), self.chooser(now_ns, 0));
        let free = member.is_some_and(|member| chooser.may_serve(member));
        let receives = member.is_some_and(|member| chooser.may_fetch(member));
        for (set, is_in) in [(&mut self.free, free), (&mut self.receivers, receives)] {
            if is_in {
                set.insert(number);
            } else {
                set.remove(&number);
            }
        }
    }

    fn grant(&mut self, choice: Choice, now_ns: u64) {
        let Choice { receiver, source, shard } = choice;
        // The receiver aborts the previous fetch of the shard; so does the swarm.
        self.give_up(receiver, shard);
        let Some(place) = self.spec.layout.place(shard) else { return };
        let Some(from) = self.roster.get_mut(source) else { return };
        from.serving.insert((receiver, shard));
        from.up.spend(now_ns, place.bytes);
        let (segment, address) = (Arc::clone(&from.segment), from.addresses[place.buffer] + place.offset);
        let Some(to) = self.roster.get_mut(receiver) else { return };
        to.need.remove(shard);
        to.down.spend(now_ns, place.bytes);
        let along = to.fetching() + 1;
        self.outstanding += 1;
        to.coming.insert(shard, ShardFetch { from: source, since_ns: now_ns, along, late: false, stuck: false });
        let (client, counts) = (to.client, to.counts());
        if counts {
            self.count(shard, true);
        }
        self.sort(receiver, now_ns);
        self.sort(source, now_ns);
        let order = FetchOrder { member: receiver, shard, source, segment, address };
        self.grants.push_back(Grant { client, order });
    }

    pub(super) fn poll_grant(&mut self) -> Option<Grant> {
        self.grants.pop_front()
    }

    /// Returns the grants of a member that are not reported yet.
    pub(super) fn told(&self, number: u64) -> Vec<Grant> {
        let Some(member) = self.roster.get(number) else { return Vec::new() };
        let told = |(&shard, coming): (&u32, &ShardFetch)| {
            let (from, place) = (self.roster.get(coming.from)?, self.spec.layout.place(shard)?);
            let order = FetchOrder {
                member: number,
                shard,
                source: coming.from,
                segment: Arc::clone(&from.segment),
                address: from.addresses[place.buffer] + place.offset,
            };
            Some(Grant { client: member.client, order })
        };
        member.coming.iter().filter_map(told).collect()
    }

    /// Makes a member a rank; returns the parent of a half, or `None` if that has not joined yet: the rank must ask
    /// again.
    pub(super) fn join_ranks(
        &mut self,
        number: u64,
        join: &RankJoin,
        half: usize,
    ) -> Result<Option<RankParent>, ObjectError> {
        let schedule = self.jobs.schedule_of(join, half)?;
        let Some(member) = self.roster.get(number) else {
            return Err(ObjectError::UnknownMember { member: number });
        };
        if member.rank.as_ref() != Some(join) {
            self.leave_ranks(number);
            self.jobs.enter(number, join, schedule);
            if let Some(member) = self.roster.get_mut(number) {
                member.rank = Some(join.clone());
            }
        }
        Ok(self.jobs.parent(&self.roster, number, &join.job, schedule.parent(half, join.rank), half))
    }

    /// Removes a member as a rank.
    fn leave_ranks(&mut self, number: u64) {
        if let Some(rank) = self.roster.get_mut(number).and_then(|member| member.rank.take()) {
            self.jobs.leave(number, &rank);
        }
    }

    /// Requests shards for a member from any source; shards that are granted already stay as they are. `failed` are the
    /// failures of the sources that it followed.
    pub(super) fn want(
        &mut self,
        number: u64,
        want: &[Interval],
        failed: &[FetchFailure],
        now_ns: u64,
    ) -> Result<(), ObjectError> {
        let shards = self.spec.layout.shards();
        let want = ShardSet::of(shards, want).map_err(|(first, count)| {
            ObjectError::Malformed(format!("{count} shards from {first} on are not within the object's {shards}"))
        })?;
        let Some(member) = self.roster.get_mut(number) else {
            return Err(ObjectError::UnknownMember { member: number });
        };
        for shard in want.iter() {
            if !member.have.contains(shard) && !member.coming.contains_key(&shard) {
                member.need.insert(shard);
            }
        }
        for failure in failed.iter().filter(|failure| failure.shard < shards) {
            if self.jobs.followed(&self.roster, number, *failure) {
                self.blame(number, *failure);
            }
        }
        self.look_at(number, now_ns);
        Ok(())
    }
}
