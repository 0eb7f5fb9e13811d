//! Load of the benchmark: prompts of a trace as hashes, and the workers that store parts of them.

use std::fs;

use kvplane_proto::rng::{Rng, mix64};

/// Parameters of a load.
pub(crate) struct Shape {
    /// Number of blocks into which each block of the trace, of 512 tokens, is split.
    pub split: usize,
    /// Number of workers.
    pub workers: usize,
}

/// Event of a worker that stores the first blocks of a prompt.
pub(crate) struct Store {
    pub worker: u32,
    pub prompt: usize,
    pub blocks: usize,
}

/// Load that is replayed to each index.
pub(crate) struct Load {
    /// Rolling hashes of each prompt.
    pub prompts: Vec<Vec<u64>>,
    /// Hashes of each block's content alone.
    pub contents: Vec<Vec<u64>>,
    pub stores: Vec<Store>,
    pub blocks: usize,
}

/// Reads the ids of blocks of each request.
pub(crate) fn read(path: &str) -> Result<Vec<Vec<u64>>, Box<dyn std::error::Error>> {
    let mut prompts = Vec::new();
    for line in fs::read_to_string(path)?.lines() {
        let request: serde_json::Value = serde_json::from_str(line)?;
        let ids = request["hash_ids"].as_array().ok_or("a request without hash_ids")?;
        prompts.push(ids.iter().filter_map(serde_json::Value::as_u64).collect());
    }
    Ok(prompts)
}

impl Load {
    pub(crate) fn new(shape: &Shape, ids: &[Vec<u64>]) -> Self {
        let content = |id: u64, part: usize| mix64(id << 8 | part as u64);
        let contents: Vec<Vec<u64>> = ids
            .iter()
            .map(|ids| ids.iter().flat_map(|id| (0..shape.split).map(|part| content(*id, part))).collect())
            .collect();
        let roll = |contents: &Vec<u64>| {
            let mut before = 0;
            let next = |content: &u64| {
                before = mix64(before ^ content);
                before
            };
            contents.iter().map(next).collect()
        };
        let prompts: Vec<Vec<u64>> = contents.iter().map(roll).collect();
        let mut rng = Rng::new(1, "stores");
        let mut stores = Vec::new();
        for (prompt, hashes) in prompts.iter().enumerate() {
            let worker = rng.below(shape.workers as u64) as u32;
            stores.push(Store { worker, prompt, blocks: hashes.len() });
            // The first half of a prompt comes to another worker too, as a replica.
            if rng.chance(0.25) {
                let worker = rng.below(shape.workers as u64) as u32;
                stores.push(Store { worker, prompt, blocks: hashes.len().div_ceil(2) });
            }
        }
        let blocks = prompts.iter().map(Vec::len).sum();
        Self { prompts, contents, stores, blocks }
    }
}
