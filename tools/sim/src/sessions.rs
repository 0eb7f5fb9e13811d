//! Sessions of a trace: a request whose prompt continues an earlier one is the next turn of its session.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::Work;

/// Number of blocks that a prompt shares with an earlier one before it continues that: the head that all prompts share
/// is shorter.
const LEAST_BLOCKS: usize = 2;

/// Names the session of each request of `trace`, which is in the order of arrival: that of the request whose full
/// blocks its prompt begins with, or a new one. Returns the number of requests that continue a session.
///
/// A client knows its conversations; a trace tells them only by these prompts.
pub fn name_sessions(trace: &mut [Work]) -> usize {
    // Sessions by the last full block of their last turn: ids are chained, so a block names all before it.
    let mut by_block: BTreeMap<u64, Arc<str>> = BTreeMap::new();
    let mut continued = 0;
    for (id, work) in trace.iter_mut().enumerate() {
        // The last block is in general not full.
        let full = &work.blocks[..work.blocks.len().saturating_sub(1)];
        let deepest = full.iter().enumerate().rev().take_while(|(at, _)| at + 1 >= LEAST_BLOCKS);
        let known = deepest.map(|(_, block)| *block).find_map(|block| by_block.remove(&block));
        continued += usize::from(known.is_some());
        let session = known.unwrap_or_else(|| Arc::from(format!("session-{id}")));
        if full.len() >= LEAST_BLOCKS {
            by_block.insert(full[full.len() - 1], Arc::clone(&session));
        }
        work.terms.session = Some(session);
    }
    continued
}

#[cfg(test)]
mod tests {
    use kvplane_conductor::scheduler::ServiceTerms;

    use super::*;

    #[test]
    fn a_prompt_that_continues_another_is_its_next_turn() {
        let prompts: [&[u64]; 5] = [&[0, 1, 2], &[0, 5, 6], &[0, 1, 3, 4], &[0, 1, 3, 7, 8], &[0, 9]];
        let work = |blocks: &&[u64]| Work {
            arrival_ns: 0,
            input_tokens: blocks.len() as u32 * 512,
            output_tokens: 1,
            blocks: Arc::from(*blocks),
            terms: ServiceTerms::default(),
        };
        let mut trace: Vec<Work> = prompts.iter().map(work).collect();
        assert_eq!(name_sessions(&mut trace), 2);
        let names: Vec<&str> = trace.iter().filter_map(|work| work.terms.session.as_deref()).collect();
        assert_eq!(names, ["session-0", "session-1", "session-0", "session-0", "session-4"]);
    }
}
