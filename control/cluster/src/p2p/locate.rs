//! Who has all of a buffer: for those who read some of its bytes, and do not become members.

use super::member::{Member, Place};
use super::swarm::Swarm;

/// As many are told as give a choice when some of them go.
const TOLD: usize = 32;

/// Where a buffer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLocation {
    /// The member's number.
    pub member: u64,
    /// Where it serves.
    pub segment: String,
    /// Where the buffer begins there.
    pub address: u64,
    /// 0 for the same host, 1 for the same rack, 2 for elsewhere.
    pub distance: u8,
}

impl Swarm {
    /// Those who have all of a buffer, nearest first; none where there is no such buffer.
    pub(super) fn locate(&self, buffer: usize, near: &Place, client: u64) -> Option<Vec<BufferLocation>> {
        let bytes = *self.spec.layout.sizes().get(buffer)?;
        let (first, count) = self.spec.layout.covering(buffer, 0, bytes)?;
        let whole = |member: &Member| {
            member.have.count() == member.have.shards() || (first..first + count).all(|one| member.have.contains(one))
        };
        let is = |ours: &str, theirs: &str| !ours.is_empty() && ours == theirs;
        let distance = |member: &Member| match &member.place {
            place if is(&near.host, &place.host) => 0,
            place if is(&near.rack, &place.rack) => 1,
            _ => 2,
        };
        // Numbers are drawn by chance and spread clients well enough.
        let turn = client.checked_rem(self.members.len() as u64).unwrap_or(0) as usize;
        let in_turn = self.members.iter().skip(turn).chain(self.members.iter().take(turn));
        let able = in_turn.filter(|(_, member)| member.is_source());
        let mut by_distance: Vec<(u8, u64, &Member)> =
            able.map(|(&number, member)| (distance(member), number, member)).collect();
        by_distance.sort_by_key(|&(distance, ..)| distance);
        let able = by_distance.into_iter().filter(|(.., member)| whole(member)).take(TOLD);
        let told = able.map(|(distance, number, member)| BufferLocation {
            member: number,
            segment: member.segment.to_string(),
            address: member.addresses[buffer],
            distance,
        });
        Some(told.collect())
    }
}
