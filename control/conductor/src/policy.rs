//! Policies side by side: who prefills, who decodes, what is fetched, who is refused, and in what order those wait.
//!
//! A policy sees a request and a [`View`] of the cluster and answers with a [`Choice`]. It changes nothing; the
//! Conductor books what was chosen. So the same policy decides for a simulated cluster and for a live one.

mod ours;
mod paper;
mod plain;
mod rivals;

pub use ours::Ours;
pub use paper::Algorithm1;
pub use plain::{LoadBalance, RoundRobin, Spread};
pub use rivals::{DynamoLike, SglangLike};

use crate::cost::{DecodeModel, PrefillModel, transfer_ns};

/// A policy by its name, with its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyName {
    /// [`Spread`].
    Random,
    /// [`RoundRobin`].
    RoundRobin,
    /// [`LoadBalance`].
    LoadBalance,
    /// [`SglangLike`].
    SglangLike,
    /// [`DynamoLike`].
    DynamoLike,
    /// [`Algorithm1`] without transfers.
    Local,
    /// [`Algorithm1`].
    Algorithm1,
    /// [`Ours`].
    Ours,
}

impl PolicyName {
    /// All of them, in the order in which they are shown; ours last.
    pub const ALL: [Self; 8] = [
        Self::Random,
        Self::RoundRobin,
        Self::LoadBalance,
        Self::SglangLike,
        Self::DynamoLike,
        Self::Local,
        Self::Algorithm1,
        Self::Ours,
    ];

    /// Its name, by which it is remembered: that of the command line.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round-robin",
            Self::LoadBalance => "load-balance",
            Self::SglangLike => "sglang-like",
            Self::DynamoLike => "dynamo-like",
            Self::Local => "local",
            Self::Algorithm1 => "algorithm-1",
            Self::Ours => "kvplane",
        }
    }

    /// The policy with this [`Self::label`].
    #[must_use]
    pub fn labelled(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.label() == label)
    }

    /// Whether it is one that refuses whom it cannot serve as promised; promises mean nothing to the others.
    #[must_use]
    pub const fn heeds_promises(self) -> bool {
        matches!(self, Self::Local | Self::Algorithm1 | Self::Ours)
    }

    /// The policy. With `refuses`, whom it cannot serve as promised it refuses, if it is one that can: Algorithm 1 on
    /// its line 18, and ours.
    #[must_use]
    pub fn make(self, refuses: bool) -> Box<dyn Policy> {
        match self {
            Self::Random => Box::new(Spread::default()),
            Self::RoundRobin => Box::new(RoundRobin),
            Self::LoadBalance => Box::new(LoadBalance),
            Self::SglangLike => Box::new(SglangLike::default()),
            Self::DynamoLike => Box::new(DynamoLike),
            Self::Local => Box::new(Algorithm1 { transfers: false, refuses, ..Algorithm1::default() }),
            Self::Algorithm1 => Box::new(Algorithm1 { refuses, ..Algorithm1::default() }),
            Self::Ours => Box::new(Ours { refuses, ..Ours::default() }),
        }
    }
}

/// What is to be served.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The request's number: what a policy that draws lots draws from.
    pub id: u64,
    /// When it came.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
}

/// A prefill instance as a policy sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillView {
    /// Whether it takes work.
    pub alive: bool,
    /// Until all that is booked there is done.
    pub wait_ns: u64,
    /// Requests booked there.
    pub requests: u32,
    /// Tokens booked there that are not cached.
    pub queued_tokens: u64,
    /// Tokens of the prompt that it has or will have computed when the booked work is done.
    pub held: u32,
    /// Tokens of the prompt that were ever routed there, evicted or not; 0 where the policy does not look at that
    /// ([`Policy::looks_at_routes`]).
    pub routed: u32,
    /// Tokens of all prompts ever routed there; what several begin with counts once.
    pub routed_size: u64,
    /// Until what is booked on its NIC for others has left.
    pub egress_wait_ns: u64,
    /// How its prefills compare with the model.
    pub factor: f64,
}

/// A decode instance as a policy sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeView {
    /// Whether it takes work.
    pub alive: bool,
    /// Tokens of KV cache resident or on their way.
    pub tokens: u64,
    /// Requests that these belong to.
    pub requests: u32,
    /// Tokens there is room for.
    pub capacity: u64,
    /// Tokens and requests now in the batch, without those on their way.
    pub running: (u64, u32),
    /// What will be resident when this request's prefill would end, if decodes take as long as they did.
    pub later: (u64, u32),
}

/// The cluster at one moment, for one request.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// Now.
    pub now_ns: u64,
    /// Prefill instances.
    pub prefill: &'a [PrefillView],
    /// Decode instances.
    pub decode: &'a [DecodeView],
    /// Time of prefills.
    pub model: &'a PrefillModel,
    /// Time of decodes.
    pub decode_model: &'a DecodeModel,
    /// What is promised.
    pub slo: Slo,
    /// Bytes of KV cache of a token.
    pub token_bytes: u64,
    /// Bytes a second of a NIC.
    pub nic_bytes_s: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens of the prompt that all together have stored.
    pub pooled: u32,
    /// Work of those in the central queue that would go before this request, divided among the instances.
    pub ahead_ns: u64,
    /// Requests placed so far.
    pub placed: u64,
    /// The decode instance on which tokens come fastest with this request too, and that time. One without room only
    /// where all are.
    pub fastest_decode: Option<(usize, u64)>,
    /// Until the busiest NIC of those that take work is free of what is booked there for others.
    pub busiest_ns: u64,
}

/// What is promised to a request; the largest value is no promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// Time to the first token.
    pub ttft_ns: u64,
    /// Time between tokens.
    pub tbt_ns: u64,
}

impl Slo {
    /// No promise.
    pub const NONE: Self = Self { ttft_ns: u64::MAX, tbt_ns: u64::MAX };
}

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The prefill instance.
    pub prefill: usize,
    /// The decode instance.
    pub decode: Option<usize>,
    /// Tokens to reuse, local or fetched.
    pub reuse: u32,
    /// From whom the tokens that it lacks are fetched.
    pub fetch: Fetch,
    /// Predicted: until the prefill begins.
    pub wait_ns: u64,
    /// Predicted: the prefill.
    pub prefill_ns: u64,
}

impl Placement {
    /// Predicted: until the prefill is done.
    #[must_use]
    pub const fn takes_ns(&self) -> u64 {
        self.wait_ns.saturating_add(self.prefill_ns)
    }
}

/// What an instance gets from others before a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// Nothing.
    Nothing,
    /// What this one has, to be kept.
    One(usize),
    /// What it lacks from whoever has it, several at a time.
    Pool {
        /// Whether the copies are kept, because those who have them are too busy for how often they are asked.
        keep: bool,
    },
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The first token would come too late.
    Ttft,
    /// Tokens would come too slowly.
    Tbt,
    /// Nobody could serve it.
    NoInstance,
    /// Too many wait already.
    QueueFull,
}

/// What a policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// There.
    Place(Placement),
    /// Later, when an instance is about to be free.
    Wait,
    /// Not at all; worth trying again after so long.
    Refuse {
        /// Why.
        why: Refusal,
        /// After how long.
        retry_after_ns: u64,
    },
}

/// A request that waits in the central queue.
#[derive(Clone, Copy, Debug)]
pub struct QueuedRequest {
    /// The request.
    pub ask: Ask,
    /// Its prefill with the most that anybody had cached when it came.
    pub best_ns: u64,
}

/// Who decides.
pub trait Policy: Send {
    /// Its name in reports.
    fn name(&self) -> String;

    /// Where a request goes. `queued` is whether it comes from the central queue, which only policies have that answer
    /// [`Choice::Wait`].
    fn choose(&self, ask: &Ask, view: &View<'_>, queued: bool) -> Choice;

    /// Where a request goes that must not wait in the central queue.
    fn choose_now(&self, ask: &Ask, view: &View<'_>) -> Choice {
        self.choose(ask, view, false)
    }

    /// Which of those who wait is served next: lower is sooner. In nanoseconds, by convention.
    fn rank(&self, waiting: &QueuedRequest, _now_ns: u64, _slo: Slo) -> i64 {
        waiting.ask.arrival_ns as i64
    }

    /// Whether it looks at what was ever routed where, which costs another look into an index.
    fn looks_at_routes(&self) -> bool {
        false
    }

    /// Whether it ever has requests wait in the central queue. Those of another policy that wait there it places at
    /// once.
    fn queues(&self) -> bool {
        false
    }

    /// Whether an instance with so much booked takes one of those who wait.
    fn takes(&self, _instance: &PrefillView) -> bool {
        false
    }

    /// After the prefill: whether the decode instance still takes the request, as the paper's local scheduler decides.
    fn takes_decode(&self, _tokens: u32, _instance: &DecodeView, _model: &DecodeModel, _slo: Slo) -> bool {
        true
    }
}

impl View<'_> {
    /// Instances that take work, with their places.
    pub fn alive(&self) -> impl Iterator<Item = (usize, &PrefillView)> {
        self.prefill.iter().enumerate().filter(|(_, instance)| instance.alive)
    }

    /// Time of a prefill on an instance.
    #[must_use]
    pub fn prefill_ns(&self, instance: &PrefillView, tokens: u32, cached: u32) -> u64 {
        (self.model.predict_ns(tokens, cached.min(tokens)) as f64 * instance.factor) as u64
    }

    /// Time to move `tokens` of KV cache, without waiting.
    #[must_use]
    pub fn move_ns(&self, tokens: u32) -> u64 {
        transfer_ns(u64::from(tokens) * self.token_bytes, self.nic_bytes_s)
    }

    /// A placement on `at` with what it has itself.
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
        }
    }

    /// Refused because there is nobody.
    #[must_use]
    pub const fn nobody() -> Choice {
        Choice::Refuse { why: Refusal::NoInstance, retry_after_ns: 1_000_000_000 }
    }
}
