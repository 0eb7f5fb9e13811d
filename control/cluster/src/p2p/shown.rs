//! What operators see of a swarm.

use super::member::{Member, MemberReport};
use super::shards::ShardSet;
use super::swarm::Swarm;

impl Swarm {
    /// Shards that no source has.
    pub(super) fn lost(&self) -> u32 {
        let mut held = ShardSet::empty(self.spec.layout.shards());
        for member in self.members.values().filter(|member| member.is_source()) {
            held.insert_all(&member.have);
            // Mostly that is the first.
            if held.count() == held.shards() {
                break;
            }
        }
        held.shards() - held.count()
    }

    /// Whether there are sources, who together have all of it.
    pub(super) fn is_whole(&self) -> bool {
        self.lost() == 0 && self.members.values().any(Member::is_source)
    }

    pub(super) fn rows(&self) -> Vec<MemberReport> {
        let row = |(&number, member): (&u64, &Member)| MemberReport {
            member: number,
            segment: member.segment.to_string(),
            origin: member.origin,
            have: member.have.count(),
            need: member.need.count() + member.coming.values().filter(|coming| !coming.stuck).count() as u32,
            excluded: member.corrupt.clone().unwrap_or_default(),
        };
        self.members.iter().map(row).collect()
    }
}
