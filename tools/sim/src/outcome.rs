//! Results of a simulation.

use kvplane_conductor::scheduler::OutputErrors;

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStatus {
    /// Served.
    Served,
    /// Rejected at arrival.
    Refused,
    /// Rejected after its prefill, which was wasted.
    RefusedLate,
    /// Ended in the queue after the maximum wait.
    Waited,
    /// Never served: no instance is left.
    Lost,
}

/// Result of one request.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RequestOutcome {
    pub status: RequestStatus,
    /// Time to first token; of a request whose wait ended, the wait.
    pub ttft_ns: u64,
    /// Mean of the longest tenth of the times between its tokens; 0 without decoding.
    pub tbt_ns: u64,
    /// Number of prompt tokens that were cached or fetched.
    pub reused_tokens: u32,
    /// Length of the prompt in tokens.
    pub tokens: u32,
    /// Duration of its prefills.
    pub prefill_ns: u64,
    /// Duration of its transfer, including the wait for the NIC; 0 without one.
    pub transfer_ns: u64,
    /// Time to first token as predicted at its placement.
    pub predicted_ns: u64,
    /// Number of instances that prefilled it: more than 1 for a pipeline group.
    pub stages: u32,
}

/// Number of instances that hold the most used blocks, at one time.
#[derive(Clone, Debug)]
pub struct ReplicaSample {
    /// Time of the sample.
    pub at_ns: u64,
    /// Number of instances that hold the block of rank 1, 10, 100, 1000 and 10000.
    pub ranks: [u32; 5],
}

/// Results of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Results by request, in the order of the trace.
    pub requests: Vec<RequestOutcome>,
    /// Work booked on prefill instances, in seconds, every ten seconds: the mean over instances.
    pub prefill_load: Vec<f64>,
    /// Ratio of the maximum to the mean of the work that an instance computed.
    pub imbalance: f64,
    /// Ratio of the maximum to the mean of the bytes that an instance sent.
    pub egress_imbalance: f64,
    /// Time until all bookings of prefill instances are done, at the end of the simulation: the sum, in nanoseconds.
    pub left_booked_ns: u64,
    /// Number of proactive replicas of hot prefixes.
    pub copied: u64,
    /// Errors of the outputs that the scheduler expected, every ten seconds.
    pub outputs: Vec<OutputErrors>,
    /// Relative error of the decode steps that it predicted, every ten seconds.
    pub decode_errors: Vec<f64>,
    /// Samples of replicas over time, if requested.
    pub replicas: Vec<ReplicaSample>,
}

impl Outcome {
    fn ttfts(&self) -> Vec<f64> {
        let waits = |status| matches!(status, RequestStatus::Served | RequestStatus::Waited);
        let waited = self.requests.iter().filter(|request| waits(request.status));
        let mut ttfts: Vec<f64> = waited.map(|request| request.ttft_ns as f64 / 1e9).collect();
        ttfts.sort_by(f64::total_cmp);
        ttfts
    }

    /// Returns the mean time to first token of the served requests, in seconds. A request whose wait ended counts with
    /// its wait: its first token would have come later still.
    #[must_use]
    pub fn mean_ttft_s(&self) -> f64 {
        mean(&self.ttfts())
    }

    /// Returns quantiles of the times of [`Self::mean_ttft_s`], in seconds, for each of `shares`.
    #[must_use]
    pub fn ttft_quantiles_s(&self, shares: &[f64]) -> Vec<f64> {
        let ttfts = self.ttfts();
        let last = ttfts.len().saturating_sub(1);
        let at = |share: &f64| ttfts.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0);
        shares.iter().map(at).collect()
    }

    /// Returns the hit rate: the fraction of prompt tokens that were not computed.
    #[must_use]
    pub fn hit(&self) -> f64 {
        let sum = |field: fn(&RequestOutcome) -> u32| {
            self.requests.iter().map(|served| u64::from(field(served))).sum::<u64>()
        };
        sum(|served| served.reused_tokens) as f64 / sum(|served| served.tokens).max(1) as f64
    }

    /// Returns the mean prefill time per request, in seconds.
    #[must_use]
    pub fn prefill_s(&self) -> f64 {
        self.requests.iter().map(|served| served.prefill_ns as f64 / 1e9).sum::<f64>()
            / self.requests.len().max(1) as f64
    }

    /// Returns the goodput as a fraction of all requests: served with the first token within `ttft_ns` and the others
    /// within `tbt_ns`.
    #[must_use]
    pub fn goodput(&self, ttft_ns: u64, tbt_ns: u64) -> f64 {
        let good = |served: &&RequestOutcome| {
            served.status == RequestStatus::Served && served.ttft_ns <= ttft_ns && served.tbt_ns <= tbt_ns
        };
        self.requests.iter().filter(good).count() as f64 / self.requests.len().max(1) as f64
    }

    /// Returns the outcome of the requests, by their place in the trace, that `is_in` names.
    #[must_use]
    pub fn of(&self, is_in: impl Fn(usize) -> bool) -> Self {
        let requests = self.requests.iter().enumerate().filter(|(at, _)| is_in(*at)).map(|(_, served)| *served);
        Self { requests: requests.collect(), ..Self::default() }
    }

    /// Returns the fraction of the admitted requests, those not rejected at arrival, that were served with the first
    /// token within `ttft_ns`; 1 if none was admitted.
    #[must_use]
    pub fn kept(&self, ttft_ns: u64) -> f64 {
        let admitted = self.requests.iter().filter(|served| served.status != RequestStatus::Refused);
        let in_time = |served: &&RequestOutcome| served.status == RequestStatus::Served && served.ttft_ns <= ttft_ns;
        let (kept, all) =
            admitted.fold((0_usize, 0_usize), |(kept, all), served| (kept + usize::from(in_time(&served)), all + 1));
        if all == 0 { 1.0 } else { kept as f64 / all as f64 }
    }

    /// Returns the mean error of expected outputs relative to the generated ones, and the mean part of the outputs
    /// within the 90th percentile that was expected; 0 where nothing was expected.
    #[must_use]
    pub fn output_errors(&self) -> OutputErrors {
        let all = |of: fn(&OutputErrors) -> f64| mean(&self.outputs.iter().map(of).collect::<Vec<_>>());
        OutputErrors { relative: all(|errors| errors.relative), within_high: all(|errors| errors.within_high) }
    }

    /// Returns the mean relative error of predicted decode steps.
    #[must_use]
    pub fn decode_error(&self) -> f64 {
        mean(&self.decode_errors)
    }

    /// Returns the number of served requests whose tokens came later than `tbt_ns` after each other.
    #[must_use]
    pub fn tbt_missed(&self, tbt_ns: u64) -> usize {
        let missed = |served: &&RequestOutcome| served.status == RequestStatus::Served && served.tbt_ns > tbt_ns;
        self.requests.iter().filter(missed).count()
    }

    /// Returns the number of requests with this outcome.
    #[must_use]
    pub fn count(&self, status: RequestStatus) -> usize {
        self.requests.iter().filter(|served| served.status == status).count()
    }

    /// Returns the mean duration of transfers, in seconds.
    #[must_use]
    pub fn transfer_s(&self) -> f64 {
        let transfers = self.requests.iter().filter(|served| served.transfer_ns > 0);
        mean(&transfers.map(|served| served.transfer_ns as f64 / 1e9).collect::<Vec<_>>())
    }

    /// Returns the mean time between tokens of the served requests, over the longest tenth of each, in milliseconds.
    #[must_use]
    pub fn mean_tbt_ms(&self) -> f64 {
        let served = self.requests.iter().filter(|served| served.status == RequestStatus::Served);
        mean(&served.map(|served| served.tbt_ns as f64 / 1e6).collect::<Vec<_>>())
    }

    /// Returns the oscillation of the work booked on prefill instances: its standard deviation relative to `scale_s`.
    #[must_use]
    pub fn oscillation(&self, scale_s: f64) -> f64 {
        let mean = mean(&self.prefill_load);
        let squares: f64 = self.prefill_load.iter().map(|load| (load - mean).powi(2)).sum();
        (squares / self.prefill_load.len().max(1) as f64).sqrt() / scale_s
    }
}

fn mean(values: &[f64]) -> f64 {
    // The sum of no floating-point numbers is -0.
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}
