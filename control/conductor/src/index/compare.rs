//! How far a row of hashes and a run of blocks go together.

use super::{PrefixIndex, Salt};

impl PrefixIndex {
    /// How many of `hashes`, the first of which is at `offset`, follow each other in `run`. Of rolling hashes the last
    /// one proves those before it.
    pub(super) fn matching(&self, run: u32, offset: u16, salt: Salt, hashes: &[u64]) -> u16 {
        let header = self.runs.get(run);
        let rest = usize::from(header.len - offset);
        if rest <= hashes.len() && salt.key(hashes[rest - 1]) == header.last {
            return rest as u16;
        }
        let keys = self.arena.keys(header.start + u32::from(offset), rest.min(hashes.len()));
        let agrees = |at: usize| keys[at] == salt.key(hashes[at]);
        // The last block that is known to agree, and the first that may not.
        let (mut same, mut other) = (0, keys.len());
        if rest > other && agrees(other - 1) {
            return other as u16;
        }
        // Most leave a run where the one before did.
        let branch = usize::from(header.branch).wrapping_sub(usize::from(offset));
        if (1..keys.len()).contains(&branch) {
            if agrees(branch - 1) {
                same = branch - 1;
                if !agrees(branch) {
                    return branch as u16;
                }
                same = same.max(branch);
            } else {
                other = branch - 1;
            }
        }
        while other - same > 1 {
            let middle = usize::midpoint(same, other);
            if agrees(middle) {
                same = middle;
            } else {
                other = middle;
            }
        }
        same as u16 + 1
    }

    /// The stretch of `run` around `offset` that `hashes` name one after the other, upwards or downwards, and how many
    /// hashes that is.
    pub(super) fn neighbours(&self, run: u32, offset: u16, salt: Salt, hashes: &[u64]) -> (u16, u16, usize) {
        let header = self.runs.get(run);
        let key = |at: u16| self.arena.key(header.start as usize + usize::from(at));
        let up = hashes[1..].iter().zip(offset + 1..header.len).take_while(|(hash, at)| key(*at) == salt.key(**hash));
        let up = up.count();
        if up > 0 {
            return (offset, offset + up as u16 + 1, up + 1);
        }
        let down = hashes[1..].iter().zip((0..offset).rev()).take_while(|(hash, at)| key(*at) == salt.key(**hash));
        let down = down.count();
        (offset - down as u16, offset + 1, down + 1)
    }
}
