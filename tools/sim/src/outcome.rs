//! What a simulation found.

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was served.
    Served,
    /// It was refused at arrival.
    Refused,
    /// It was refused after its prefill, which was wasted.
    RefusedLate,
    /// It was never served: the cluster is gone.
    Lost,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct RequestOutcome {
    /// What became of it.
    pub fate: Fate,
    /// Until its first token.
    pub ttft_ns: u64,
    /// The mean of the longest tenth of the times between its tokens; 0 where decoding was left out.
    pub tbt_ns: u64,
    /// Tokens of the prompt that were cached or fetched.
    pub reused_tokens: u32,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// What its prefills took.
    pub prefill_ns: u64,
    /// What its transfer took, waiting for the NIC included; 0 without one.
    pub transfer_ns: u64,
}

/// How many instances hold the blocks asked for most.
#[derive(Clone, Debug)]
pub struct ReplicaSample {
    /// When.
    pub at_ns: u64,
    /// Instances that hold the block of rank 1, 10, 100, 1000 and 10000.
    pub ranks: [u32; 5],
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Each request, in the order of the trace.
    pub requests: Vec<RequestOutcome>,
    /// Work booked on prefill instances, in seconds, every ten seconds: the mean over instances.
    pub prefill_load: Vec<f64>,
    /// The most that one instance computed against the mean.
    pub imbalance: f64,
    /// The most that one instance sent to others against the mean.
    pub egress_imbalance: f64,
    /// Copies of hot prefixes that were made without a request.
    pub copied: u64,
    /// Replicas over time, if asked for.
    pub replicas: Vec<ReplicaSample>,
}

impl Outcome {
    fn ttfts(&self) -> Vec<f64> {
        let served = self.requests.iter().filter(|request| request.fate == Fate::Served);
        let mut ttfts: Vec<f64> = served.map(|request| request.ttft_ns as f64 / 1e9).collect();
        ttfts.sort_by(f64::total_cmp);
        ttfts
    }

    /// Mean seconds to the first token of those served.
    #[must_use]
    pub fn mean_ttft_s(&self) -> f64 {
        mean(&self.ttfts())
    }

    /// Seconds to the first token below which a `share` of those served stayed, for each of `shares`.
    #[must_use]
    pub fn ttft_quantiles_s(&self, shares: &[f64]) -> Vec<f64> {
        let ttfts = self.ttfts();
        let last = ttfts.len().saturating_sub(1);
        let at = |share: &f64| ttfts.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0);
        shares.iter().map(at).collect()
    }

    /// The part of prompt tokens that was not computed.
    #[must_use]
    pub fn hit(&self) -> f64 {
        let sum = |field: fn(&RequestOutcome) -> u32| {
            self.requests.iter().map(|served| u64::from(field(served))).sum::<u64>()
        };
        sum(|served| served.reused_tokens) as f64 / sum(|served| served.tokens).max(1) as f64
    }

    /// Mean seconds of prefill a request.
    #[must_use]
    pub fn prefill_s(&self) -> f64 {
        self.requests.iter().map(|served| served.prefill_ns as f64 / 1e9).sum::<f64>()
            / self.requests.len().max(1) as f64
    }

    /// The part of all requests that were served with their first token within `ttft_ns` and the others within
    /// `tbt_ns`.
    #[must_use]
    pub fn goodput(&self, ttft_ns: u64, tbt_ns: u64) -> f64 {
        let good = |served: &&RequestOutcome| {
            served.fate == Fate::Served && served.ttft_ns <= ttft_ns && served.tbt_ns <= tbt_ns
        };
        self.requests.iter().filter(good).count() as f64 / self.requests.len().max(1) as f64
    }

    /// How many requests ended so.
    #[must_use]
    pub fn count(&self, fate: Fate) -> usize {
        self.requests.iter().filter(|served| served.fate == fate).count()
    }

    /// Mean seconds of the transfers there were.
    #[must_use]
    pub fn transfer_s(&self) -> f64 {
        let transfers = self.requests.iter().filter(|served| served.transfer_ns > 0);
        mean(&transfers.map(|served| served.transfer_ns as f64 / 1e9).collect::<Vec<_>>())
    }

    /// Mean milliseconds between tokens of those served.
    #[must_use]
    pub fn mean_tbt_ms(&self) -> f64 {
        let served = self.requests.iter().filter(|served| served.fate == Fate::Served);
        mean(&served.map(|served| served.tbt_ns as f64 / 1e6).collect::<Vec<_>>())
    }

    /// How much the work booked on prefill instances swings: its standard deviation against `scale_s`.
    #[must_use]
    pub fn oscillation(&self, scale_s: f64) -> f64 {
        let mean = mean(&self.prefill_load);
        let squares: f64 = self.prefill_load.iter().map(|load| (load - mean).powi(2)).sum();
        (squares / self.prefill_load.len().max(1) as f64).sqrt() / scale_s
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
