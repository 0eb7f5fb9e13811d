//! Ranks that fetch by a schedule: reading a parent's board takes a latency, and requesting shards another one.

use kvplane_cluster::p2p::{
    FetchFailure, Follow, HALVES, PeerLocation, RankJoin, RankParent, Schedule, ShardSet, half_of,
};

use super::{Event, Fluid, Link, SECOND};

/// Timeout of a rank whose parent is the origin.
const PATIENCE_NS: u64 = SECOND / 2;
/// Interval at which a rank requests the location of a parent.
const ASK_NS: u64 = 20_000_000;

pub(super) struct RankPlan {
    follow: Follow,
    schedule: Schedule,
    join: RankJoin,
    parents: [Option<RankParent>; HALVES],
}

impl Fluid {
    /// Adds a rank now.
    pub(crate) fn join_rank(&mut self, link: Link, rank: u32, ranks: u32) -> u64 {
        let member = self.join_wanting(link, false, PeerLocation::default(), 0, Vec::new());
        let schedule = Schedule::new(ranks).expect("ranks");
        let lacks = ShardSet::full(self.spec.layout.shards());
        let follow = Follow::new(schedule, rank, &lacks, PATIENCE_NS, self.now_ns);
        let join = RankJoin { job: "j".to_owned(), rank, ranks, board: 1 };
        self.by_rank.insert(rank, member);
        self.ranked.insert(member, RankPlan { follow, schedule, join, parents: [None, None] });
        for half in 0..HALVES {
            self.at(self.latency_ns, Event::Follow(member, half));
        }
        self.at(PATIENCE_NS, Event::Patience(member));
        member
    }

    fn is_up(&self, member: u64) -> bool {
        self.peers.get(&member).is_some_and(|peer| peer.alive && !peer.frozen)
    }

    pub(super) fn follow(&mut self, member: u64, half: usize) {
        if !self.is_up(member) {
            return;
        }
        let client = self.client_of(member);
        let Some(ranked) = self.ranked.get_mut(&member) else { return };
        if ranked.parents[half].is_none() && ranked.follow.follows(half) {
            let known = self.objects.join_ranks(client, member, &ranked.join, half);
            ranked.parents[half] = known.expect("a rank");
            if ranked.parents[half].is_none() {
                return self.at(ASK_NS, Event::Follow(member, half));
            }
        }
        let Some(parent) = ranked.parents[half].clone() else { return };
        let source = &self.peers[&parent.member];
        if !source.alive {
            ranked.follow.leave(half);
            return self.want(member, &[]);
        }
        ranked.follow.learn(half, source.have.as_words());
        self.dispatch(member, half);
    }

    fn dispatch(&mut self, member: u64, half: usize) {
        let now_ns = self.now_ns;
        let Some(ranked) = self.ranked.get_mut(&member) else { return };
        let Some(parent) = ranked.parents[half].as_ref().map(|parent| parent.member) else { return };
        let next: Vec<u32> = std::iter::from_fn(|| ranked.follow.next(half, now_ns)).collect();
        for shard in next {
            self.grants += 1;
            self.at(self.latency_ns, Event::Told(member, shard, parent, self.grants));
        }
    }

    /// Handles the arrival of a shard: its member continues, and its children learn of the shard.
    pub(super) fn rank_arrived(&mut self, member: u64, shard: u32) {
        let (now_ns, half) = (self.now_ns, half_of(shard));
        let Some(ranked) = self.ranked.get_mut(&member) else { return };
        ranked.follow.arrived(shard, now_ns);
        let children = ranked.schedule.children(half, ranked.join.rank);
        let children: Vec<u64> = children.iter().filter_map(|rank| self.by_rank.get(rank).copied()).collect();
        self.dispatch(member, half);
        for child in children {
            self.at(self.latency_ns, Event::Follow(child, half));
        }
    }

    /// Handles a failed fetch; returns true if the shard was being fetched by the schedule.
    pub(super) fn rank_failed(&mut self, member: u64, shard: u32, source: u64) -> bool {
        let corrupt = self.corrupt == Some(source);
        let Some(ranked) = self.ranked.get_mut(&member) else { return false };
        let ours = ranked.follow.failed(shard);
        if ours {
            self.want(member, &[FetchFailure { shard, source, corrupt }]);
        }
        ours
    }

    fn want(&mut self, member: u64, failed: &[FetchFailure]) {
        let Some(ranked) = self.ranked.get(&member) else { return };
        let want: Vec<(u32, u32)> = ranked.follow.elsewhere().map(|shard| (shard, 1)).collect();
        if !want.is_empty() {
            let client = self.client_of(member);
            self.objects.want(self.now_ns, client, member, &want, failed).expect("a member");
        }
    }

    pub(super) fn wait_on(&mut self, member: u64) {
        let now_ns = self.now_ns;
        if !self.is_up(member) {
            return;
        }
        let Some(ranked) = self.ranked.get_mut(&member) else { return };
        let before = ranked.follow.elsewhere().count();
        ranked.follow.tick(now_ns);
        let more = ranked.follow.elsewhere().count() > before;
        let due_ns = (0..HALVES).filter_map(|half| ranked.follow.due_ns(half)).min();
        if more {
            self.want(member, &[]);
        }
        if let Some(due_ns) = due_ns {
            // An arrival moves the deadline in either direction: the interval is short enough for both.
            self.at(due_ns.saturating_sub(now_ns).clamp(1, ASK_NS), Event::Patience(member));
        }
    }
}
