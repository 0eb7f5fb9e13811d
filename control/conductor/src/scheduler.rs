//! The books: which request is where, what each instance has booked, who waits.
//!
//! [`Conductor::schedule`] answers and changes nothing. [`Conductor::commit`] books the answer: work, decode room, the
//! source's NIC, and in the index the blocks that the instance will have; or it puts the request into the central
//! queue. [`Conductor::poll`] then says when one of those who wait should go and where. [`Conductor::update`] tells
//! how requests fare, which corrects the books and the cost model; [`Conductor::release`] ends one, whatever became of
//! it. Reservations that nobody releases end after a lease. A request retried with the same id gets the same answer.
//!
//! Everything is bounded by [`ConductorConfig`]; times are nanoseconds of one monotonic clock, given by the caller.

mod books;
mod instances;
mod queue;
mod views;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::cost::{DecodeModel, PrefillModel};
use crate::index::{ContextId, HolderId, IndexConfig, IndexError, PrefixIndex, PrefixMatches, Tier};
use crate::policy::{Ask, Choice, Placement, Policy, QueuedRequest, Slo};

use books::{DecodeBook, PrefillBook};
pub use instances::{ExcludedInstances, Foreign};
pub use queue::Next;

/// What a Conductor is made of.
#[derive(Clone, Debug)]
pub struct ConductorConfig {
    /// Limits of the prefix index.
    pub index: IndexConfig,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token.
    pub token_bytes: u64,
    /// Bytes a second of an instance's NICs.
    pub nic_bytes_s: u64,
    /// What is promised.
    pub slo: Slo,
    /// Requests that may wait in the central queue.
    pub max_queue: usize,
    /// Requests that may be booked.
    pub max_reservations: usize,
    /// After how long a request that nobody updates is released.
    pub lease_ns: u64,
    /// How long blocks of a finished prefill count as held though no event said so.
    pub promise_ns: u64,
    /// Where the cost model begins.
    pub model: PrefillModel,
    /// Time between tokens.
    pub decode_model: DecodeModel,
    /// Whether reports refit the cost model and factors of instances.
    pub learns: bool,
    /// Whether instances are taken to have for the next request what they fetch for one, as engines do whose cache it
    /// passes through.
    pub keeps_fetched: bool,
}

impl Default for ConductorConfig {
    /// LLaMA3-70B on nodes of eight A800 with 87 GB/s, as in the paper.
    fn default() -> Self {
        Self {
            index: IndexConfig::default(),
            block_tokens: 512,
            token_bytes: 327_680,
            nic_bytes_s: 87_000_000_000,
            slo: Slo::NONE,
            max_queue: 65_536,
            max_reservations: 1 << 20,
            lease_ns: 3_600_000_000_000,
            promise_ns: 2_000_000_000,
            model: PrefillModel::default(),
            decode_model: DecodeModel::default(),
            learns: true,
            keeps_fetched: true,
        }
    }
}

/// A request to be scheduled.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its number, unique among those that are not released.
    pub id: u64,
    /// When it came.
    pub arrival_ns: u64,
    /// Tokens of its prompt.
    pub tokens: u32,
    /// What its blocks can be shared among.
    pub context: ContextId,
    /// Rolling hashes of its blocks.
    pub hashes: Arc<[u64]>,
    /// Instances that it must not go to.
    pub barred: ExcludedInstances,
}

impl Request {
    const fn ask(&self) -> Ask {
        Ask { id: self.id, arrival_ns: self.arrival_ns, tokens: self.tokens }
    }
}

/// How a request fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Its prefill began.
    PrefillStarted,
    /// Its prefill ended.
    PrefillDone {
        /// Tokens that were cached.
        reused: u32,
        /// How long the prefill took.
        took_ns: u64,
    },
    /// It decodes.
    Decoding,
}

/// Room for a question's working, kept by the caller.
#[derive(Default)]
pub struct Scratch {
    found: PrefixMatches,
}

impl Scratch {
    /// What was found last.
    #[must_use]
    pub const fn found(&self) -> &PrefixMatches {
        &self.found
    }

    /// The same, for the next question.
    pub const fn found_mut(&mut self) -> &mut PrefixMatches {
        &mut self.found
    }
}

/// Why a call was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConductorError {
    /// No instance of that number.
    UnknownInstance {
        /// The number.
        instance: usize,
    },
    /// No request of that number is booked.
    UnknownRequest {
        /// The number.
        id: u64,
    },
    /// There are as many reservations as there may be.
    TooManyReservations {
        /// The limit.
        most: usize,
    },
    /// The central queue is full.
    QueueFull {
        /// The limit.
        most: usize,
    },
    /// What the index says.
    Index(IndexError),
}

impl fmt::Display for ConductorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownInstance { instance } => write!(f, "there is no instance {instance}; register it first"),
            Self::UnknownRequest { id } => write!(f, "request {id} is not booked; it was released or its lease ended"),
            Self::TooManyReservations { most } => write!(f, "{most} requests are booked; release some"),
            Self::QueueFull { most } => write!(f, "{most} requests wait already; try again later"),
            Self::Index(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConductorError {}

impl From<IndexError> for ConductorError {
    fn from(error: IndexError) -> Self {
        Self::Index(error)
    }
}

/// A booked request.
struct Reservation {
    request: Request,
    placement: Placement,
    prefilled: bool,
    decoding: bool,
    touched_ns: u64,
}

/// Blocks that an instance should have though no event said so yet.
struct Promise {
    until_ns: u64,
    context: ContextId,
    holder: HolderId,
    hashes: Arc<[u64]>,
}

/// The scheduler.
pub struct Conductor {
    config: ConductorConfig,
    policy: Box<dyn Policy>,
    index: PrefixIndex,
    routed: PrefixIndex,
    prefill: Vec<PrefillBook>,
    decode: Vec<DecodeBook>,
    model: PrefillModel,
    booked: BTreeMap<u64, Reservation>,
    queue: Vec<(QueuedRequest, Request)>,
    promises: VecDeque<Promise>,
    /// Prefill instances by their slots in the index.
    by_slot: Vec<u32>,
    /// The same in the index of what was routed.
    routed_by_slot: Vec<u32>,
    placed: u64,
    /// No lease ends before.
    leases_ns: u64,
}

impl Conductor {
    /// A Conductor without instances.
    ///
    /// # Errors
    /// When the index's limits cannot be.
    pub fn new(config: ConductorConfig, policy: Box<dyn Policy>) -> Result<Self, ConductorError> {
        Ok(Self {
            index: PrefixIndex::new(config.index)?,
            routed: PrefixIndex::new(config.index)?,
            prefill: Vec::new(),
            decode: Vec::new(),
            model: config.model.clone(),
            booked: BTreeMap::new(),
            queue: Vec::new(),
            promises: VecDeque::new(),
            by_slot: vec![u32::MAX; config.index.max_holders],
            routed_by_slot: vec![u32::MAX; config.index.max_holders],
            placed: 0,
            leases_ns: 0,
            config,
            policy,
        })
    }

    /// The policy in use.
    #[must_use]
    pub fn policy(&self) -> &dyn Policy {
        self.policy.as_ref()
    }

    /// Decides by another policy, and with other promises, from now on: what is booked stays booked, and those who wait
    /// are to be asked about again ([`Self::poll`]).
    pub fn set_policy(&mut self, policy: Box<dyn Policy>, slo: Slo) {
        (self.policy, self.config.slo) = (policy, slo);
    }

    /// The index, to make contexts and to ask.
    pub const fn index(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    /// The cost model as fitted by now.
    #[must_use]
    pub const fn model(&self) -> &PrefillModel {
        &self.model
    }

    /// Requests in the central queue.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// A context of both indexes.
    ///
    /// # Errors
    /// When there are too many.
    pub fn context(&mut self, key: &crate::index::ContextKey) -> Result<ContextId, ConductorError> {
        self.routed.context(key)?;
        Ok(self.index.context(key)?)
    }

    /// What should become of `request`. Changes nothing.
    #[must_use]
    pub fn schedule(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Choice {
        if let Some(known) = self.booked.get(&request.id) {
            return Choice::Place(known.placement);
        }
        let views = self.views(request, now_ns, scratch);
        self.policy.choose(&request.ask(), &self.view(&views, now_ns), false)
    }

    /// As [`Self::schedule`] where the request is to be bound at once, to an instance that may have others before it.
    #[must_use]
    pub fn schedule_now(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Choice {
        if let Some(known) = self.booked.get(&request.id) {
            return Choice::Place(known.placement);
        }
        let views = self.views(request, now_ns, scratch);
        self.policy.choose_now(&request.ask(), &self.view(&views, now_ns))
    }

    /// Books what [`Self::schedule`] said; a refusal books nothing.
    ///
    /// # Errors
    /// When a limit is reached, or the choice names what there is not.
    pub fn commit(&mut self, request: Request, choice: &Choice, now_ns: u64) -> Result<(), ConductorError> {
        if self.booked.contains_key(&request.id) {
            return Ok(());
        }
        match choice {
            Choice::Refuse { .. } => Ok(()),
            Choice::Place(placement) => self.book(request, *placement, now_ns),
            Choice::Wait => {
                let most = self.config.max_queue;
                if self.queue.iter().any(|(waiting, _)| waiting.ask.id == request.id) {
                    return Ok(());
                }
                if self.queue.len() >= most {
                    return Err(ConductorError::QueueFull { most });
                }
                let best_ns = self.best_ns(&request);
                self.queue.push((QueuedRequest { ask: request.ask(), best_ns }, request));
                Ok(())
            }
        }
    }

    /// How a booked request fares.
    ///
    /// # Errors
    /// When it is not booked.
    pub fn update(&mut self, id: u64, progress: Progress, now_ns: u64) -> Result<(), ConductorError> {
        let reservation = self.booked.get_mut(&id).ok_or(ConductorError::UnknownRequest { id })?;
        reservation.touched_ns = now_ns;
        let (placement, tokens) = (reservation.placement, reservation.request.tokens);
        let book = &mut self.prefill[placement.prefill];
        match progress {
            Progress::PrefillStarted => book.started(id, now_ns),
            Progress::PrefillDone { reused, took_ns } if !reservation.prefilled => {
                reservation.prefilled = true;
                book.done(id);
                if self.config.learns {
                    let factor = book.factor.0;
                    book.factor.report(self.model.predict_ns(tokens, reused), took_ns);
                    self.model.report(tokens, reused, took_ns, factor);
                }
                if book.alive {
                    self.promises.push_back(Promise {
                        until_ns: now_ns.saturating_add(self.config.promise_ns),
                        context: reservation.request.context,
                        holder: book.holder,
                        hashes: Arc::clone(&reservation.request.hashes),
                    });
                }
            }
            Progress::PrefillDone { .. } => {}
            Progress::Decoding => {
                if let Some(decode) = placement.decode
                    && !std::mem::replace(&mut reservation.decoding, true)
                {
                    self.decode[decode].begin(id, u64::from(tokens), now_ns);
                }
            }
        }
        Ok(())
    }

    /// A request ended, however. What it had booked is free.
    ///
    /// # Errors
    /// When it is not booked and does not wait.
    pub fn release(&mut self, id: u64) -> Result<(), ConductorError> {
        self.withdraw(id).map(|_| ())
    }

    /// As [`Self::release`], and gives the request back, to be scheduled again.
    ///
    /// # Errors
    /// When it is not booked and does not wait.
    pub fn withdraw(&mut self, id: u64) -> Result<Request, ConductorError> {
        if let Some(at) = self.queue.iter().position(|(waiting, _)| waiting.ask.id == id) {
            return Ok(self.queue.swap_remove(at).1);
        }
        let reservation = self.booked.remove(&id).ok_or(ConductorError::UnknownRequest { id })?;
        self.unbook_decode(&reservation);
        if !reservation.prefilled {
            let book = &mut self.prefill[reservation.placement.prefill];
            book.done(id);
            if book.alive {
                let (context, holder) = (reservation.request.context, book.holder);
                self.index.removed(context, holder, Tier::Promised, &reservation.request.hashes)?;
            }
        }
        Ok(reservation.request)
    }

    /// Whether the decode instance still takes a request whose prefill is done.
    #[must_use]
    pub fn takes_decode(&self, id: u64, now_ns: u64) -> bool {
        let Some(reservation) = self.booked.get(&id) else { return false };
        let Some(decode) = reservation.placement.decode else { return true };
        let view = self.decode[decode].view(now_ns, now_ns);
        let (model, slo) = (&self.config.decode_model, self.config.slo);
        self.policy.takes_decode(reservation.request.tokens, &view, model, slo)
    }
}
