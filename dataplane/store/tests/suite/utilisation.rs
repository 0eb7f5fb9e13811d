//! Measures the utilisation of a pool of mixed sizes while ten times its size is put. Deterministic; `-- --nocapture`
//! prints the figures.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::rng::Rng;
use kvplane_store::eviction::Eviction;
use kvplane_store::{Store, StoreConfig};

const POOL_BYTES: u64 = 1 << 30;
const CHURN: u64 = 10;
/// Required mean utilisation; for blocks, at any time.
const TARGET: f64 = 0.92;

/// Lengths of prompts in tokens, at these quantiles of a recorded trace of conversations, with linear interpolation.
const PROMPTS: [(f64, u64); 6] =
    [(0.0, 200), (0.5, 6_909), (0.9, 27_367), (0.99, 85_401), (0.999, 123_000), (1.0, 126_195)];

/// Returns the bytes of a prompt whose length is drawn from the trace.
fn prompt(rng: &mut Rng, bytes_per_token: u64) -> u64 {
    let at = rng.below(1 << 20) as f64 / f64::from(1 << 20);
    let next = PROMPTS.iter().position(|(share, _)| at < *share).unwrap_or(PROMPTS.len() - 1);
    let ((from, least), (to, most)) = (PROMPTS[next - 1], PROMPTS[next]);
    let tokens = least as f64 + (at - from) / (to - from) * (most - least) as f64;
    (tokens as u64).max(1) * bytes_per_token
}

/// Returns the bytes of a block of 512 tokens, or, for every 24th, of a prompt's rest, as in the trace.
fn block(rng: &mut Rng, bytes_per_token: u64) -> u64 {
    let full = rng.below(24) > 0;
    (if full { 512 } else { 1 + rng.below(511) }) * bytes_per_token
}

/// Returns the least and the mean share of the pool that holds objects' bytes, from the first eviction on.
fn churn(eviction: Eviction, mut size: impl FnMut(&mut Rng) -> u64) -> (f64, f64) {
    let config = StoreConfig { eviction, ..StoreConfig::for_pool(POOL_BYTES) };
    let mut store = Store::new(config, Version(1)).unwrap();
    let mut rng = Rng::new(7, "utilisation");
    let (mut taken, mut keys) = (0, 0u64);
    let (mut least, mut sum, mut samples) = (1f64, 0f64, 0u64);
    while taken < CHURN * POOL_BYTES {
        let bytes = size(&mut rng);
        taken += bytes;
        keys += 1;
        let (reservation, _) = store.reserve(Digest(keys.into()), bytes).expect("nothing is pinned");
        store.commit(reservation, 0).expect("nobody else puts it");
        // Some objects are read again, so that neighbours in the pool are not evicted together.
        for _ in 0..rng.below(2) {
            let again = keys - rng.below(keys.min(2_000));
            if let Ok((pin, _)) = store.get(Digest(again.into())) {
                store.unpin(pin).expect("a pin just given");
            }
        }
        if taken > POOL_BYTES + POOL_BYTES / 2 {
            let used = store.stats().payload_bytes as f64 / POOL_BYTES as f64;
            least = least.min(used);
            sum += used;
            samples += 1;
        }
    }
    store.check();
    (least, sum / samples as f64)
}

#[test]
fn a_pool_of_mixed_sizes_stays_full() {
    type Size = fn(&mut Rng) -> u64;
    let mixes: [(&str, Size); 5] =
        [
            ("blocks of 512 tokens and tails, 256 B a token", |rng| block(rng, 256)),
            ("blocks and tails, 2 KiB a token", |rng| block(rng, 2048)),
            ("whole prompts, 40 B a token", |rng| prompt(rng, 40)),
            ("whole prompts, 256 B a token", |rng| prompt(rng, 256)),
            ("one prompt to four blocks, 64 B a token", |rng| {
                if rng.below(5) == 0 { prompt(rng, 64) } else { block(rng, 64) }
            }),
        ];
    for (name, size) in mixes {
        for eviction in Eviction::ALL {
            let (least, mean) = churn(eviction, size);
            println!("{name}, {eviction}: mean {mean:.4}, least {least:.4}");
            assert!(mean >= TARGET, "{name}, {eviction}: {mean}");
            assert!(least >= TARGET || !name.starts_with("blocks"), "{name}, {eviction}: {least}");
        }
    }
}
