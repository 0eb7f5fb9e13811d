//! Times of a prefill by a pipeline group, and of one that overlaps with the fetch of its prefix layer by layer.
//!
//! A pipeline group prefills one prompt: each stage computes some of the layers for every chunk of the prompt, and
//! passes the chunk on, with the KV cache of all layers so far. So different chunks are on different stages at one
//! time, and the last stage has the whole KV cache at the end (chunked pipeline parallelism, FAST'25, section 3.3).
//! For equal chunks, stages and no transfers the duration is `T(n, p) (k + X - 1) / (k X)`.

/// Number of layers of a model that registers none: that of LLaMA3-70B, whose prefills the cost model starts from.
pub const DEFAULT_LAYERS: u32 = 80;
/// Bytes of activations for each token that a stage passes on, unless an instance registers others: 8,192 numbers of
/// two bytes, as of LLaMA3-70B.
pub const DEFAULT_ACTIVATION_BYTES: u32 = 16_384;
/// Maximum number of chunks of a prompt; a longer one is not prefilled by a group.
pub const MAX_CHUNKS: u32 = 4_096;

/// Fetch of a prefix: time until it can begin, and its duration, in nanoseconds. The default is no fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixLoad {
    /// Time until the NICs are free.
    pub queued_ns: u64,
    /// Duration of the transfer.
    pub moves_ns: u64,
}

impl PrefixLoad {
    /// Returns the time until all bytes have arrived.
    #[must_use]
    pub const fn arrived_ns(self) -> u64 {
        self.queued_ns.saturating_add(self.moves_ns)
    }

    /// Returns the time until a prefill can begin: when the first of `layers` has arrived, or all of them without
    /// layer-wise overlap.
    #[must_use]
    pub fn ready_ns(self, layers: Option<u32>) -> u64 {
        self.queued_ns.saturating_add(self.moves_ns / u64::from(layers.unwrap_or(1).max(1)))
    }
}

/// Span of time, in nanoseconds from the present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Span {
    pub begins_ns: u64,
    pub ends_ns: u64,
}

impl Span {
    /// Returns its length.
    #[must_use]
    pub const fn length_ns(self) -> u64 {
        self.ends_ns.saturating_sub(self.begins_ns)
    }
}

/// Returns the span of a prefill of `computes_ns` on an instance that is free at `free_ns`. With `layers`, it overlaps
/// with the fetch of its prefix: each layer is computed when it has arrived, so only the first layer's load delays the
/// beginning, and the last layer is computed after its load.
#[must_use]
pub fn prefill_span(free_ns: u64, load: PrefixLoad, computes_ns: u64, layers: Option<u32>) -> Span {
    let begins_ns = free_ns.max(load.ready_ns(layers));
    let computed_ns = begins_ns.saturating_add(computes_ns);
    let last_ns = match layers {
        Some(layers) if load.moves_ns > 0 => load.arrived_ns().saturating_add(computes_ns / u64::from(layers.max(1))),
        _ => 0,
    };
    Span { begins_ns, ends_ns: computed_ns.max(last_ns) }
}

/// Chunk of a prompt: its tokens, and the duration of its prefill by one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Chunk {
    pub tokens: u32,
    pub computes_ns: u64,
}

/// Returns the chunks of a prompt of `tokens` of which the first `cached` are cached; `until_ns` predicts the duration
/// of the prefill of its first tokens. The durations of the chunks add up to that of the whole prompt. Empty if there
/// are more than [`MAX_CHUNKS`].
#[must_use]
pub fn chunks(tokens: u32, cached: u32, chunk_tokens: u32, until_ns: impl Fn(u32) -> u64) -> Vec<Chunk> {
    let uncached = tokens.saturating_sub(cached);
    let count = uncached.div_ceil(chunk_tokens.max(1));
    if count > MAX_CHUNKS {
        return Vec::new();
    }
    let (mut at, mut done_ns) = (cached, 0);
    let chunk = |_| {
        let end = at.saturating_add(chunk_tokens).min(tokens);
        let end_ns = until_ns(end).max(done_ns);
        let chunk = Chunk { tokens: end - at, computes_ns: end_ns - done_ns };
        (at, done_ns) = (end, end_ns);
        chunk
    };
    (0..count).map(chunk).collect()
}

/// Stage of a pipeline group, for one prompt.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// Time until its instance is free, in nanoseconds.
    pub free_ns: u64,
    /// Fetch of its part of the prefix.
    pub load: PrefixLoad,
    /// Layers that it computes.
    pub layers: u32,
    /// Ratio of its durations to those of the model.
    pub factor: f64,
    /// True if the fetch of its prefix overlaps with the prefill.
    pub layer_wise: bool,
    /// Duration of the transfer of a token to the next stage, in nanoseconds.
    pub token_sends_ns: f64,
}

impl Stage {
    /// Returns the time in which it computes a chunk, of all layers of the group.
    #[must_use]
    pub fn computes_ns(&self, chunk: Chunk, layers: u32) -> u64 {
        (chunk.computes_ns as f64 * self.factor * f64::from(self.layers) / f64::from(layers.max(1))) as u64
    }

    /// Returns the duration of the transfer of a chunk to the next stage.
    #[must_use]
    pub fn sends_ns(&self, chunk: Chunk) -> u64 {
        (f64::from(chunk.tokens) * self.token_sends_ns) as u64
    }
}

/// Returns the spans in which the stages work on a prompt with these chunks. A span begins when the stage's instance
/// and the first layer of its prefix are there, and includes waiting for chunks of the stage before (bubbles). A stage
/// passes on one chunk at a time, beside its computation.
#[must_use]
pub fn pipeline(stages: &[Stage], chunks: &[Chunk]) -> Vec<Span> {
    let layers: u32 = stages.iter().map(|stage| stage.layers).sum();
    let overlap = |stage: &Stage| stage.layer_wise.then_some(stage.layers);
    let begins = |stage: &Stage| stage.free_ns.max(stage.load.ready_ns(overlap(stage)));
    let mut spans: Vec<Span> =
        stages.iter().map(|stage| Span { begins_ns: begins(stage), ends_ns: begins(stage) }).collect();
    let mut sent = vec![0u64; stages.len()];
    for (number, chunk) in chunks.iter().enumerate() {
        let mut arrived_ns = 0;
        for (at, stage) in stages.iter().enumerate() {
            let computes_ns = stage.computes_ns(*chunk, layers);
            let load = if number == 0 { stage.load } else { PrefixLoad::default() };
            let free_ns = spans[at].ends_ns.max(arrived_ns);
            spans[at].ends_ns = prefill_span(free_ns, load, computes_ns, overlap(stage)).ends_ns;
            sent[at] = sent[at].max(spans[at].ends_ns).saturating_add(stage.sends_ns(*chunk));
            arrived_ns = sent[at];
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::PrefillModel;

    const SECOND: u64 = 1_000_000_000;

    fn stage(layers: u32) -> Stage {
        let load = PrefixLoad::default();
        Stage { free_ns: 0, load, layers, factor: 1.0, layer_wise: false, token_sends_ns: 0.0 }
    }

    #[test]
    fn equal_chunks_take_the_time_of_the_formula() {
        for (count, stages) in [(1, 2), (4, 2), (8, 4), (128, 8)] {
            let chunks = vec![Chunk { tokens: 1_000, computes_ns: SECOND }; count];
            let spans = pipeline(&vec![stage(10); stages], &chunks);
            let formula = SECOND * count as u64 * (count + stages - 1) as u64 / (count * stages) as u64;
            assert!(spans[stages - 1].ends_ns.abs_diff(formula) < 1_000, "{count} chunks, {stages} stages");
        }
    }

    #[test]
    fn chunks_add_up_to_the_prefill_of_the_whole_prompt() {
        let model = PrefillModel::default();
        for (tokens, cached, chunk_tokens) in [(131_072, 0, 4_096), (100_001, 40_000, 1_024), (500, 0, 1_024)] {
            let all = chunks(tokens, cached, chunk_tokens, |end| model.predict_ns(end, cached));
            assert_eq!(all.len(), (tokens - cached).div_ceil(chunk_tokens) as usize);
            assert_eq!(all.iter().map(|chunk| chunk.tokens).sum::<u32>(), tokens - cached);
            let sum_ns: u64 = all.iter().map(|chunk| chunk.computes_ns).sum();
            assert_eq!(sum_ns, model.predict_ns(tokens, cached));
        }
        assert!(chunks(u32::MAX, 0, 1_000, |_| 1).is_empty(), "too many");
        assert!(chunks(100, 100, 1_000, |_| 1).is_empty());
    }

    #[test]
    fn a_prefix_overlaps_with_the_prefill_layer_by_layer() {
        let load = |queued_ns, moves_ns| PrefixLoad { queued_ns, moves_ns };
        let span = |load, layers| prefill_span(10, load, 1_000, layers);
        assert_eq!(span(load(0, 0), Some(10)), Span { begins_ns: 10, ends_ns: 1_010 });
        assert_eq!(span(load(5, 100), None), Span { begins_ns: 105, ends_ns: 1_105 });
        // The prefill is longer: only the first layer's load is exposed.
        assert_eq!(span(load(5, 100), Some(10)), Span { begins_ns: 15, ends_ns: 1_015 });
        // The fetch is longer: only the last layer is computed after it.
        assert_eq!(span(load(5, 5_000), Some(10)), Span { begins_ns: 505, ends_ns: 5_105 });
    }

    #[test]
    fn waits_transfers_and_slow_stages_are_part_of_the_spans() {
        let chunks = [Chunk { tokens: 100, computes_ns: 2_000 }; 3];
        let of = |stages: &[Stage]| pipeline(stages, &chunks).into_iter().map(|span| span.ends_ns).collect::<Vec<_>>();
        assert_eq!(of(&[stage(5), stage(5)]), [3_000, 4_000]);
        // A transfer of 500 each is hidden behind the computation, but for the last one.
        let sends = Stage { token_sends_ns: 5.0, ..stage(5) };
        assert_eq!(of(&[sends, stage(5)]), [3_000, 4_500]);
        // Transfers that are longer than the computation determine the end.
        let sends = Stage { token_sends_ns: 20.0, ..stage(5) };
        assert_eq!(of(&[sends, stage(5)]), [3_000, 8_000]);
        assert_eq!(of(&[stage(5), Stage { free_ns: 2_500, ..stage(5) }]), [3_000, 5_500]);
        assert_eq!(of(&[stage(5), Stage { factor: 2.0, ..stage(5) }]), [3_000, 7_000]);
        let load = PrefixLoad { queued_ns: 0, moves_ns: 4_000 };
        assert_eq!(of(&[Stage { load, ..stage(5) }, stage(5)]), [7_000, 8_000]);
        assert_eq!(of(&[Stage { load, layer_wise: true, ..stage(5) }, stage(5)]), [6_200, 7_200]);
    }
}
