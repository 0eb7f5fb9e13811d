//! Fallback placement while the Conductor is unreachable: a rule that a client can follow with the last table.
//!
//! Rendezvous hashing over the instances, by a block near the beginning of the prompt, so that prompts with a common
//! prefix meet; but no instance gets more than a quarter above the mean of this client's requests in flight, so that a
//! prefix that all prompts share does not overload one instance (consistent hashing with bounded loads).

use kvplane_proto::rng::mix64;

/// Index of the hashed block: beyond the first block of a system prompt, before the blocks that are unique to each
/// prompt.
const DECIDES: usize = 2;

/// Chooses the instance for a prompt: returns an index into `instances`, which are the number of each instance and this
/// client's requests in flight there. `None` if there are no instances.
#[must_use]
pub fn choose(instances: &[(u64, u32)], hashes: &[u64]) -> Option<usize> {
    let block = hashes.get(DECIDES.min(hashes.len().saturating_sub(1))).copied().unwrap_or(0);
    let under_way: u64 = instances.iter().map(|(_, requests)| u64::from(*requests)).sum();
    // Mean including this request, plus a quarter, rounded up.
    let most = ((under_way + 1) * 5).div_ceil(4 * (instances.len().max(1) as u64));
    let free = instances.iter().enumerate().filter(|(_, (_, requests))| u64::from(*requests) < most);
    free.max_by_key(|(_, (number, _))| mix64(block ^ mix64(*number))).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_with_a_common_prefix_meet_within_the_load_bound() {
        let mut instances: Vec<(u64, u32)> = (0..8).map(|number| (number * 77, 0)).collect();
        let first = choose(&instances, &[1, 2, 3, 4]).expect("some");
        assert_eq!(choose(&instances, &[1, 2, 3, 9, 9]), Some(first));
        let mut met = 0;
        for at in 0..800u32 {
            let chosen = choose(&instances, &[1, 2, 3, u64::from(at)]).expect("some");
            met += usize::from(chosen == first);
            instances[chosen].1 += 1;
        }
        // All prompts share a prefix: one instance gets a quarter more than the mean, and none gets more.
        assert!((100..=126).contains(&met), "{met}");
        assert!(instances.iter().all(|(_, requests)| *requests <= 126), "{instances:?}");
        assert_eq!(choose(&[], &[1]), None);
        assert_eq!(choose(&[(5, u32::MAX)], &[]), Some(0));
    }

    #[test]
    fn removal_of_an_instance_moves_only_its_prompts() {
        let instances: Vec<(u64, u32)> = (0..10).map(|number| (mix64(number), 0)).collect();
        let fewer = &instances[..9];
        for prompt in 0..1_000u64 {
            let hashes = [prompt, mix64(prompt), mix64(prompt + 1)];
            let (before, after) = (choose(&instances, &hashes), choose(fewer, &hashes));
            assert!(before == after || before == Some(9), "prompt {prompt}");
        }
    }
}
