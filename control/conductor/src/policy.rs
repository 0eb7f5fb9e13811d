//! Placement policies: choose the prefill instance, the decode instance, the fetches, the rejections and the queue
//! order.
//!
//! A policy gets a request and a [`View`] of the cluster and returns a [`Choice`]. It has no side effects; the
//! Conductor books the choice. So the same policy schedules a simulated cluster and a live one; policies of other
//! schedulers, for comparison, are in the simulator.

mod groups;
mod late_binding;
mod plain;
mod probability;

pub use groups::{GroupPlan, GroupView, OfferedLoad, StagePlan};
pub use late_binding::LateBinding;
pub use plain::{LoadBalance, RoundRobin, Spread};
pub use probability::{Probability, ProbabilityError};

use std::sync::Arc;

use bincode::{Decode, Encode};

use crate::cost::{DecodeModel, PrefillModel, transfer_ns};

/// Placement policy of a Conductor, with default parameters. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum PlacementPolicy {
    /// A random instance: [`Spread`].
    Random,
    /// Round robin over the instances: [`RoundRobin`].
    RoundRobin,
    /// The least loaded instance: [`LoadBalance`].
    LoadBalance,
    /// This project's policy: [`LateBinding`].
    Kvplane,
}

impl PlacementPolicy {
    /// All policies, in the order of display; this project's last.
    pub const ALL: [Self; 4] = [Self::Random, Self::RoundRobin, Self::LoadBalance, Self::Kvplane];

    /// Returns the name of the policy for the command line and for durable records.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::LoadBalance => "load-balance",
            Self::Kvplane => "kvplane",
        }
    }

    /// Returns the policy with this [`Self::label`].
    #[must_use]
    pub fn labelled(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.label() == label)
    }

    /// Returns true if the policy can reject requests that would miss their objectives; the others ignore objectives.
    #[must_use]
    pub const fn heeds_promises(self) -> bool {
        matches!(self, Self::Kvplane)
    }

    /// Creates the policy. With `refuses`, it rejects requests that would miss their objectives, if it can.
    #[must_use]
    pub fn make(self, refuses: bool) -> Box<dyn Policy> {
        match self {
            Self::Random => Box::new(Spread::default()),
            Self::RoundRobin => Box::new(RoundRobin),
            Self::LoadBalance => Box::new(LoadBalance),
            Self::Kvplane => Box::new(LateBinding { refuses, ..LateBinding::default() }),
        }
    }
}

/// Request to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Number of the request: seed of a policy that chooses at random.
    pub id: u64,
    /// Time of arrival.
    pub arrival_ns: u64,
    /// Length of the prompt in tokens.
    pub tokens: u32,
    /// Objective of this request for its first token; none for that of all ([`View::slo`]).
    pub ttft_ns: Option<u64>,
    /// True if it was admitted before, and lost its instance: no objective is a reason to reject it.
    pub admitted: bool,
    /// True if a pipeline group may prefill it.
    pub groups: bool,
}

/// Prefill instance, from the perspective of a policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillView {
    /// True if it accepts requests.
    pub alive: bool,
    /// Time until all booked prefills are done.
    pub wait_ns: u64,
    /// Number of requests booked there.
    pub requests: u32,
    /// Tokens booked there that are not cached.
    pub queued_tokens: u64,
    /// Tokens of the prompt that it has or will have computed when the booked prefills are done.
    pub held: u32,
    /// Tokens of the prompt that were ever routed there, evicted or not; 0 unless the policy uses them
    /// ([`Policy::looks_at_routes`]).
    pub routed: u32,
    /// Tokens of all prompts ever routed there; common prefixes count once.
    pub routed_size: u64,
    /// Time until the transfers booked on its NIC have been sent.
    pub egress_wait_ns: u64,
    /// Time that the blocks which are fetched from it alone would take, without handovers.
    pub fetch_wait_ns: u64,
    /// Ratio of its prefill durations to the model's.
    pub factor: f64,
    /// Its number among the decode instances, if it decodes too.
    pub decode: Option<usize>,
    /// Tokens that it holds and that other sessions are expected to use again.
    pub claimed: u64,
    /// True if it prefilled the last turn of the request's session.
    pub served_session: bool,
    /// Number of its model's layers if it begins a prefill when the first layer of the prefix has arrived; none if it
    /// waits for the whole prefix.
    pub layer_wise: Option<u32>,
}

/// Decode instance, from the perspective of a policy.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeView {
    /// True if it accepts requests.
    pub alive: bool,
    /// Tokens of KV cache, resident or expected.
    pub tokens: u64,
    /// Number of requests of these tokens.
    pub requests: u32,
    /// Capacity in tokens.
    pub capacity: u64,
    /// Tokens and requests in the batch, without expected ones.
    pub running: (u64, u32),
    /// Tokens and requests that will be resident at the end of this request's prefill, if all decodes last equally
    /// long: the predictor of the paper's arXiv version.
    pub later: (u64, u32),
    /// Tokens and requests that are predicted to be resident at the end of this request's prefill, by the lengths of
    /// outputs that are expected: queued requests ahead of it are among them.
    pub expected: (u64, u32),
    /// Ratio of its steps to the model's.
    pub factor: f64,
    /// Tokens of the prompt that it holds already, if it prefills too.
    pub held: u32,
}

impl DecodeView {
    /// Returns the duration of a step with this many resident tokens and requests, in nanoseconds.
    #[must_use]
    pub fn step_ns(&self, model: &DecodeModel, tokens: u64, requests: u32) -> u64 {
        (model.step_ns(tokens, requests as usize) as f64 * self.factor) as u64
    }
}

/// State of the cluster at one moment, for one request.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct View<'a> {
    /// Present time.
    pub now_ns: u64,
    pub prefill: &'a [PrefillView],
    pub decode: &'a [DecodeView],
    /// Model of prefill durations.
    pub model: &'a PrefillModel,
    /// Model of decode steps.
    pub decode_model: &'a DecodeModel,
    /// Objectives.
    pub slo: Slo,
    /// Limit of the time between tokens up to which a new request is admitted: less than the objective, and still less
    /// while requests are rejected because of it.
    pub tbt_limit_ns: u64,
    /// Bytes of KV cache per token.
    pub token_bytes: u64,
    /// Bandwidth of a NIC, in bytes per second.
    pub nic_bytes_s: u64,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Tokens of the prompt that all holders can provide together.
    pub pooled: u32,
    /// Work of the queued requests ahead of this one, divided by the number of instances.
    pub ahead_ns: u64,
    /// Number of requests placed so far.
    pub placed: u64,
    /// Decode instance with the shortest step if it gets this request, and that step, at the end of its prefill. A full
    /// instance only if all are full.
    pub fastest_decode: Option<(usize, u64)>,
    /// Time after which a request like this one is predicted to find a decode instance that is fast enough, if the
    /// fastest one is too slow now; 0 if none is predicted to be within some minutes.
    pub decode_after_ns: u64,
    /// Time until the busiest NIC of the accepting instances has sent its booked transfers.
    pub busiest_ns: u64,
    /// Result of the queue's admission test, for a request that arrives; [`Admission::NOW`] for a queued one.
    pub admission: Admission,
    /// The longest [`PrefillView::fetch_wait_ns`] of the accepting instances.
    pub busiest_fetch_ns: u64,
    /// Decode instance that holds the longest prefix of the prompt, if one holds any.
    pub holding_decode: Option<usize>,
    /// Number of tokens that the request is expected to generate; 0 if unknown.
    pub output_tokens: u32,
    /// True if KV cache is sent from the prefill instance to another decode instance.
    pub hands_over: bool,
    /// Tokens that the cache of an instance holds, as a mean.
    pub cache_tokens: u64,
    /// Pipeline groups of which every member accepts requests, if one may prefill the request and no other is queued.
    pub groups: &'a [GroupView],
    /// Requests that have arrived lately.
    pub offered: OfferedLoad,
    /// Number of queued requests.
    pub queued: usize,
}

/// Result of the admission test of the central queue for a request: whether the first tokens that were promised, and
/// its own, are in time with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Part of the objective that predictions leave free, because they may be wrong, in nanoseconds.
    pub margin_ns: u64,
    /// Time after which the queue can take the request, if no other arrives; 0: now.
    pub after_ns: u64,
}

impl Admission {
    /// The queue can take the request now, and the whole objective may be used.
    pub const NOW: Self = Self { margin_ns: 0, after_ns: 0 };
}

/// Objectives of a request; the largest value is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// Time to first token (TTFT).
    pub ttft_ns: u64,
    /// Time between tokens (TBT).
    pub tbt_ns: u64,
    /// Probability with which an admitted request is to have its first token in time; for the objectives of classes and
    /// of single requests, too.
    pub probability: Probability,
}

impl Slo {
    /// No objectives.
    pub const NONE: Self = Self { ttft_ns: u64::MAX, tbt_ns: u64::MAX, probability: Probability::DEFAULT };

    /// Returns true if there is an objective, for the first token or for further ones.
    #[must_use]
    pub const fn is_some(&self) -> bool {
        self.ttft_ns < u64::MAX || self.tbt_ns < u64::MAX
    }
}

/// Placement of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Placement {
    pub prefill: usize,
    pub decode: Option<usize>,
    /// Tokens to reuse, local or fetched.
    pub reuse: u32,
    /// Source of missing tokens.
    pub fetch: Fetch,
    /// Predicted wait until the prefill begins.
    pub wait_ns: u64,
    /// Predicted duration of the prefill.
    pub prefill_ns: u64,
    /// Pipeline group that prefills; its last stage is `prefill`. None if that instance prefills alone.
    pub group: Option<Arc<GroupPlan>>,
}

impl Placement {
    /// Returns the predicted time until the prefill is done.
    #[must_use]
    pub const fn takes_ns(&self) -> u64 {
        self.wait_ns.saturating_add(self.prefill_ns)
    }

    /// Returns the predicted time that instances spend on the prefill: all of them, of a pipeline group.
    #[must_use]
    pub fn work_ns(&self) -> u64 {
        self.group.as_ref().map_or(self.prefill_ns, |plan| plan.work_ns())
    }

    /// Returns true if an instance prefills, or is a stage of the group that does.
    #[must_use]
    pub fn involves(&self, instance: usize) -> bool {
        let is_stage = |plan: &Arc<GroupPlan>| plan.stages.iter().any(|stage| stage.instance == instance);
        self.prefill == instance || self.group.as_ref().is_some_and(is_stage)
    }
}

/// Fetch of blocks before a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// No fetch.
    Nothing,
    /// Fetch the blocks of this instance, and keep them.
    One(usize),
    /// Fetch missing blocks from all their holders, several at a time.
    Pool {
        /// True if the fetched blocks are kept, because the NICs of their holders are too busy.
        keep: bool,
    },
}

/// Reason for rejecting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The first token would miss its objective.
    Ttft,
    /// The tokens would miss their objective.
    Tbt,
    /// No instance could serve the request.
    NoInstance,
    /// The queue is full.
    QueueFull,
}

/// Decision of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Choice {
    /// Place the request.
    Place(Placement),
    /// Queue the request until an instance is about to be free.
    Wait,
    /// Let others go before this queued request until `until_ns`: an instance computes a prefix of its prompt, and
    /// would be done with it about as early, and with less work.
    AwaitPrefix { until_ns: u64 },
    /// Reject the request; a retry may succeed after `retry_after_ns`.
    Refuse { why: Refusal, retry_after_ns: u64 },
}

/// Order in which a policy serves its central queue: the shortest prefill first, unless others would miss their
/// deadlines by that; then the earliest deadline.
///
/// A deadline is the objective for the first token. Without an objective it is the time at which first come, first
/// served would have had the prefill done, and later by the longest prefill of those that are not deferred, or its own
/// if that is longer: the slowest requests need as much in any order. So a longer backlog makes deadlines later, and a
/// short request does not wait for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueRules {
    /// Fraction of all requests, those with the longest prefills, that go after the others: so that as few as possible
    /// bear what a backlog costs. None are with an objective for the first token.
    pub deferred: f64,
    /// Fraction of a flow's work that goes to its request that has waited longest. It bounds every wait.
    pub oldest_share: f64,
    /// Time after which a flow that has had queued requests throughout is saturated: it sends more than its share.
    pub saturated_ns: u64,
    /// Prefill time, for each default weight, by which a saturated flow may be ahead of the one that is furthest behind
    /// and still be served: up to that, the requests of saturated flows are in one order.
    pub lead_ns: u64,
}

impl Default for QueueRules {
    fn default() -> Self {
        Self { deferred: 0.01, oldest_share: 0.02, saturated_ns: 120_000_000_000, lead_ns: 200_000_000_000 }
    }
}

/// Placement policy.
pub trait Policy: Send {
    /// Returns the name in reports.
    fn name(&self) -> String;

    /// Decides about a request. `queued` is true if it comes from the central queue, which only policies use that
    /// return [`Choice::Wait`].
    fn choose(&self, ask: &Ask, view: &View<'_>, queued: bool) -> Choice;

    /// Decides about a request that must not wait in the central queue.
    fn choose_now(&self, ask: &Ask, view: &View<'_>) -> Choice {
        self.choose(ask, view, false)
    }

    /// Returns the order of its central queue.
    fn queue_rules(&self) -> QueueRules {
        QueueRules::default()
    }

    /// Returns true if the policy uses the tokens that were ever routed to instances, which costs another index lookup.
    fn looks_at_routes(&self) -> bool {
        false
    }

    /// Returns true if the policy uses the central queue. Requests that another policy queued are placed at once by a
    /// policy that does not.
    fn queues(&self) -> bool {
        false
    }

    /// Returns true if an instance with these bookings accepts a queued request.
    fn takes(&self, _instance: &PrefillView) -> bool {
        false
    }

    /// Returns true if the decode instance still accepts a request after its prefill, as the paper's local scheduler
    /// decides.
    fn takes_decode(&self, _tokens: u32, _instance: &DecodeView, _model: &DecodeModel, _slo: Slo) -> bool {
        true
    }
}

impl View<'_> {
    /// Returns the instances that accept requests, with their indices.
    pub fn alive(&self) -> impl Iterator<Item = (usize, &PrefillView)> {
        self.prefill.iter().enumerate().filter(|(_, instance)| instance.alive)
    }

    /// Predicts the duration of a prefill on an instance.
    #[must_use]
    pub fn prefill_ns(&self, instance: &PrefillView, tokens: u32, cached: u32) -> u64 {
        (self.model.predict_ns(tokens, cached.min(tokens)) as f64 * instance.factor) as u64
    }

    /// Returns the duration of a transfer of `tokens` of KV cache, without waiting.
    #[must_use]
    pub fn move_ns(&self, tokens: u32) -> u64 {
        transfer_ns(u64::from(tokens) * self.token_bytes, self.nic_bytes_s)
    }

    /// Returns the time for which the KV cache of a prompt is sent to a decode instance, after a prefill on instance
    /// `at` that is done in `takes_ns`: what the decode instance lacks, through the NIC of the prefill instance. An
    /// instance that does both needs nothing.
    #[must_use]
    pub fn handover_ns(&self, ask: &Ask, at: usize, takes_ns: u64, decode: usize) -> u64 {
        let prefill = &self.prefill[at];
        if !self.hands_over || prefill.decode == Some(decode) {
            return 0;
        }
        let busy_ns = prefill.egress_wait_ns.saturating_sub(takes_ns);
        let lacking = ask.tokens.saturating_sub(self.decode[decode].held);
        busy_ns.saturating_add(self.move_ns(lacking))
    }

    /// Returns the best decode instance for a request whose prefill on instance `at` is done in `takes_ns`, and the
    /// time that it adds: that of the handover, and of what its steps take longer than those of the fastest instance.
    /// The fastest one, the prefill instance itself and the one that holds most of the prompt are compared. `None`
    /// without decode instances.
    #[must_use]
    pub fn decode_for(&self, ask: &Ask, at: usize, takes_ns: u64) -> Option<(usize, u64)> {
        let (fastest, fastest_ns) = self.fastest_decode?;
        let tokens = u64::from(ask.tokens) + u64::from(self.output_tokens);
        let has_room = |decode: usize| {
            let view = &self.decode[decode];
            view.alive && view.expected.0.saturating_add(tokens) <= view.capacity
        };
        let others = [self.prefill[at].decode, self.holding_decode].into_iter().flatten();
        let others = others.filter(|decode| *decode != fastest && has_room(*decode));
        let cost = |decode: usize| {
            let view = &self.decode[decode];
            let (resident, requests) = (view.expected.0.saturating_add(tokens), view.expected.1 + 1);
            let longer_ns = view.step_ns(self.decode_model, resident, requests).saturating_sub(fastest_ns);
            let steps = u64::from(self.output_tokens.max(1));
            self.handover_ns(ask, at, takes_ns, decode).saturating_add(longer_ns.saturating_mul(steps))
        };
        let costs = std::iter::once(fastest).chain(others).map(|decode| (cost(decode), decode));
        costs.min_by_key(|(cost_ns, _)| *cost_ns).map(|(cost_ns, decode)| (decode, cost_ns))
    }

    /// Adds the best decode instance to a placement; returns it with what that costs beside the placement's own time:
    /// the handover, slower decode steps, and what the placement evicts of expected sessions. Nanoseconds.
    #[must_use]
    pub fn with_decode(&self, ask: &Ask, placement: Placement) -> (Placement, u64) {
        let decode = self.decode_for(ask, placement.prefill, placement.takes_ns());
        let costs_ns = decode.map_or(0, |(_, ns)| ns).saturating_add(self.claim_ns(ask, &placement));
        (Placement { decode: decode.map(|(decode, _)| decode), ..placement }, costs_ns)
    }

    /// Returns the time that computing again what a placement would evict is expected to take: the cache loses as many
    /// tokens as the prompt computes, and of these the part that sessions are expected to use. At most a hundredth of
    /// the placement's own time: what others may lose delays no request by more.
    #[must_use]
    pub fn claim_ns(&self, ask: &Ask, placement: &Placement) -> u64 {
        let instance = &self.prefill[placement.prefill];
        if instance.claimed == 0 {
            return 0;
        }
        let part = (instance.claimed as f64 / self.cache_tokens.max(1) as f64).min(1.0);
        let new_tokens = ask.tokens.saturating_sub(placement.reuse);
        let evicted_ns = self.prefill_ns(instance, new_tokens, 0) as f64 * part;
        (evicted_ns as u64).min(placement.takes_ns() / 100)
    }

    /// Returns the placement on instance `at` with its own cache.
    #[must_use]
    pub fn stay(&self, ask: &Ask, at: usize) -> Placement {
        let instance = &self.prefill[at];
        Placement {
            prefill: at,
            decode: self.fastest_decode.map(|(decode, _)| decode),
            reuse: instance.held,
            fetch: Fetch::Nothing,
            wait_ns: instance.wait_ns,
            prefill_ns: self.prefill_ns(instance, ask.tokens, instance.held),
            group: None,
        }
    }

    /// Returns the rejection for lack of an instance.
    #[must_use]
    pub const fn nobody() -> Choice {
        Choice::Refuse { why: Refusal::NoInstance, retry_after_ns: 1_000_000_000 }
    }
}
