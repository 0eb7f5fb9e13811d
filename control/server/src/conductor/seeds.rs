//! Hash seeds of the engines, by model: queries by tokens compute hashes from them.

use std::collections::BTreeMap;

use kvplane_cluster::{Change, ConductorKey, ConductorRecord, Record, RecordKey, SeedRecord};
use kvplane_conductor::conductor::PoolKey;

/// Most models whose hash seeds are stored.
const SEEDS: usize = 256;
/// Seed of a model for which none is set.
const UNSET: &str = "0";

/// Hash seeds, with their changes that are not durable yet.
#[derive(Default)]
pub(super) struct Seeds {
    seeds: BTreeMap<PoolKey, String>,
    changes: Vec<Change>,
}

impl Seeds {
    /// Takes the seeds that were stored.
    pub(super) fn restored(seeds: impl IntoIterator<Item = (PoolKey, String)>) -> Self {
        Self { seeds: seeds.into_iter().collect(), changes: Vec::new() }
    }

    /// Returns the seed of a model.
    pub(super) fn of(&self, pool: &PoolKey) -> String {
        self.seeds.get(pool).cloned().unwrap_or_else(|| UNSET.to_owned())
    }

    /// Sets the seed of a model, within the limit of models.
    pub(super) fn set(&mut self, pool: PoolKey, seed: String) {
        if self.seeds.get(&pool) == Some(&seed) {
            return;
        }
        let is_full = self.seeds.len() >= SEEDS && !self.seeds.contains_key(&pool);
        if let Some((pool, seed)) = if is_full { self.seeds.pop_first() } else { None } {
            let key = ConductorKey::Seed(record(&pool, &seed).digest());
            self.changes.push(Change::Remove(RecordKey::Conductor(key)));
        }
        self.changes.push(Change::Put(Record::Conductor(ConductorRecord::Seed(record(&pool, &seed)))));
        self.seeds.insert(pool, seed);
    }

    /// Returns true if changes wait to be made durable.
    pub(super) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Takes the changes, to make them durable.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }
}

fn record(pool: &PoolKey, seed: &str) -> SeedRecord {
    let PoolKey { tenant, model, block_tokens } = pool.clone();
    SeedRecord { tenant, model, block_tokens, seed: seed.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(model: usize) -> PoolKey {
        PoolKey { tenant: String::new(), model: format!("{model:04}"), block_tokens: 16 }
    }

    #[test]
    fn a_seed_is_stored_once_and_the_first_gives_way_to_one_too_many() {
        let mut seeds = Seeds::restored((0..SEEDS).map(|model| (pool(model), model.to_string())));
        assert_eq!((seeds.of(&pool(3)), seeds.of(&pool(SEEDS))), ("3".to_owned(), UNSET.to_owned()));
        seeds.set(pool(3), "3".to_owned());
        assert!(!seeds.has_changes(), "it is known");
        seeds.set(pool(3), "4".to_owned());
        assert!(matches!(seeds.take_changes()[..], [Change::Put(_)]), "no other gives way");
        seeds.set(pool(SEEDS), "9".to_owned());
        assert!(matches!(seeds.take_changes()[..], [Change::Remove(_), Change::Put(_)]));
        assert_eq!((seeds.of(&pool(0)), seeds.of(&pool(SEEDS))), (UNSET.to_owned(), "9".to_owned()));
        assert!(!seeds.has_changes());
    }
}
