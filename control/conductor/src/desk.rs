//! The desk: what schedulers and instances say to the Conductor, by name and by request.
//!
//! The scheduler's books know numbers. Here instances have names and incarnations, are believed while they report and
//! doubted when they do not; requests have ids of their own, so that one asked twice is booked once; what is booked
//! ends with a lease; and each model has books of its own, a *pool*, since only instances of one model can stand in for
//! another.
//!
//! One owner calls it, with the time: nanoseconds of a monotonic clock. Nobody else's clock counts; messages carry
//! spans only. What is to be told later to those who wait comes out of [`Desk::take_told`]. Everything is bounded by
//! [`DeskConfig`].

mod asked;
mod cache;
mod copies;
mod durable;
mod error;
mod hot;
mod instances;
mod look;
mod requests;
mod times;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::rng::mix64;

use crate::copies::{Copies, CopyConfig};
use crate::hot::HotTable;
use crate::index::{ContextId, ContextKey, HolderId, IndexError, PrefixIndex};
use crate::policy::{PolicyName, Slo};
use crate::scheduler::{Request, Scheduler, SchedulerConfig, Scratch};

pub use asked::{Answer, AssignedInstances, Mode, ScheduleRequest, Source, Step, Why};
pub use cache::{AWAY_DOUBTED_NS, AWAY_FORGOTTEN_NS, Ack, CacheBatch, CacheChange, CacheEvent, CacheRequest};
pub use copies::{CopyKey, CopyState, CopyWanted};
pub use durable::{Durable, DurableInstance};
pub use error::DeskError;
pub use hot::HotPrefix;
pub use instances::{InstanceSpec, Load, Part, Publisher, Registration};
pub use look::{Candidate, Holdings, InstanceRow, PlacementExplanation, PoolRow, PrefixHolding, Table};

use instances::Instance;
use requests::TrackedRequest;
use times::Due;

/// The most bytes of a request's id and of an instance's name.
pub const MAX_ID_BYTES: usize = 128;
/// The most blocks of a prompt: a million tokens in blocks of eight.
pub const MAX_PROMPT_BLOCKS: usize = 131_072;

/// The desk's limits.
#[derive(Clone, Debug)]
pub struct DeskConfig {
    /// Models and tenants that have instances.
    pub max_pools: usize,
    /// Instances of all pools.
    pub max_instances: usize,
    /// Requests that wait or are booked, of all pools.
    pub max_requests: usize,
    /// Blocks of the prompts of these, 8 bytes each.
    pub max_request_blocks: usize,
    /// How long a request may wait that does not say.
    pub wait_ns: u64,
    /// After how long without an update a booked request ends.
    pub lease_ns: u64,
    /// After how long one that was told late and that nobody has answered for ends.
    pub claim_ns: u64,
    /// Reports that an instance may miss before it is doubted, and before it is lost.
    pub missed: (u32, u32),
    /// What each pool's books are made of; tokens of a block, and bytes of a token, are the pool's.
    pub books: SchedulerConfig,
    /// How it decides; what is promised is said by [`SchedulerConfig::slo`].
    pub policy: PolicyName,
    /// The policy refuses requests that cannot be served as promised: see [`PolicyName::make`].
    pub refuses: bool,
    /// What copies of hot prefixes may take that the Conductor asks the shared store for.
    pub copies: CopyConfig,
}

impl Default for DeskConfig {
    fn default() -> Self {
        let books = SchedulerConfig::default();
        let index = crate::index::IndexConfig { max_blocks: 4 << 20, max_records: 4 << 20, ..books.index };
        Self {
            max_pools: 16,
            max_instances: 1_000,
            max_requests: 65_536,
            max_request_blocks: 8 << 20,
            wait_ns: 600_000_000_000,
            lease_ns: 120_000_000_000,
            claim_ns: 10_000_000_000,
            missed: (3, 10),
            books: SchedulerConfig { index, max_queue: 8_192, lease_ns: u64::MAX, ..books },
            policy: PolicyName::Ours,
            refuses: false,
            copies: CopyConfig::default(),
        }
    }
}

/// Whose instances, of which model, with which blocks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolKey {
    /// Whose.
    pub tenant: String,
    /// The model.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
}

/// One model's books.
struct Pool {
    key: PoolKey,
    token_bytes: u64,
    conductor: Scheduler,
    /// For contexts beyond those that there may be: their hashes are salted by name.
    overflow: ContextId,
    /// Who holds blocks of the shared store: its parts, by their numbers.
    store: BTreeMap<u64, HolderId>,
    /// Names by number.
    prefill: Vec<Arc<str>>,
    decode: Vec<Arc<str>>,
    /// Instances.
    instances: usize,
    /// Requests.
    requests: usize,
    /// Prompts of which more was cached than the index knew, one after the other.
    surprises: u32,
    hits: Hits,
    /// What is reused most, and what is fetched most from the shared store.
    hot: HotTable,
    fetched: HotTable,
}

/// What came of questions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Tokens of prompts that were placed.
    pub tokens: u64,
    /// Of these, reused by prediction.
    pub reused: u64,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests placed at once.
    pub placed: u64,
    /// Requests that had to wait.
    pub queued: u64,
    /// Requests placed after they had waited.
    pub placed_later: u64,
    /// Requests refused.
    pub refused: u64,
    /// Requests that were asked again.
    pub repeated: u64,
    /// Leases that ran out.
    pub expired: u64,
    /// Requests whose instance was lost.
    pub orphaned: u64,
    /// Batches of events taken.
    pub batches: u64,
    /// Batches that had been taken before.
    pub duplicates: u64,
    /// Gaps in events.
    pub gaps: u64,
    /// Reports that came late or twice.
    pub stale_reports: u64,
    /// Instances that claimed to have what they had not.
    pub disbelieved: u64,
}

/// Something for a client that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientNotice {
    /// Which client.
    pub client: u64,
    /// Its request's id.
    pub request: Arc<str>,
    /// What.
    pub answer: Answer,
}

/// The desk.
pub struct Desk {
    config: DeskConfig,
    pools: BTreeMap<u32, Pool>,
    instances: BTreeMap<Arc<str>, Instance>,
    requests: BTreeMap<u64, TrackedRequest>,
    /// By tenant, then by id.
    by_name: BTreeMap<String, BTreeMap<Arc<str>, u64>>,
    due: Due,
    told: VecDeque<ClientNotice>,
    /// Names of instances of which something changed that is to be remembered, and whether the placement did.
    changed: BTreeSet<Arc<str>>,
    placement_changed: bool,
    blocks: usize,
    next_pool: u32,
    next_request: u64,
    version: u64,
    scratch: Scratch,
    copies: Copies<CopyKey>,
    /// What was counted.
    pub counts: Counts,
}

impl Desk {
    /// A desk nobody has come to. Numbers of reservations begin at `first`: drawn by chance, one of an earlier
    /// incarnation of the process is unknown.
    #[must_use]
    pub fn new(config: DeskConfig, first: u64) -> Self {
        Self {
            copies: Copies::new(config.copies),
            config,
            pools: BTreeMap::new(),
            instances: BTreeMap::new(),
            requests: BTreeMap::new(),
            by_name: BTreeMap::new(),
            due: Due::default(),
            told: VecDeque::new(),
            changed: BTreeSet::new(),
            placement_changed: false,
            blocks: 0,
            next_pool: 0,
            next_request: first >> 2,
            version: 0,
            scratch: Scratch::default(),
            counts: Counts::default(),
        }
    }

    /// What is to be told, oldest first.
    pub fn take_told(&mut self) -> Option<ClientNotice> {
        self.told.pop_front()
    }

    /// How it decides now, whether it refuses, and what is promised.
    #[must_use]
    pub const fn placement(&self) -> (PolicyName, bool, Slo) {
        (self.config.policy, self.config.refuses, self.config.books.slo)
    }

    /// Decides otherwise from now on, for every model. What is booked stays so; those who wait are looked at again.
    pub fn set_placement(&mut self, policy: PolicyName, refuses: bool, slo: Slo, now_ns: u64) {
        (self.config.policy, self.config.refuses, self.config.books.slo) = (policy, refuses, slo);
        self.placement_changed = true;
        self.pools.values_mut().for_each(|pool| pool.conductor.set_policy(policy.make(refuses), slo));
        self.poll(now_ns);
    }

    /// Changes whenever an instance comes, goes, or is doubted or believed again.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    fn pool_of(&self, key: &PoolKey) -> Option<u32> {
        self.pools.iter().find(|(_, pool)| pool.key == *key).map(|(number, _)| *number)
    }

    /// The pool with that key, made if it is new.
    fn make_pool(&mut self, key: PoolKey, token_bytes: u64) -> Result<u32, DeskError> {
        if let Some(known) = self.pool_of(&key) {
            return Ok(known);
        }
        if self.pools.len() >= self.config.max_pools {
            return Err(DeskError::Limit { what: "models", most: self.config.max_pools });
        }
        let mut books = self.config.books.clone();
        books.block_tokens = key.block_tokens;
        if token_bytes > 0 {
            books.token_bytes = token_bytes;
        }
        let token_bytes = books.token_bytes;
        let policy = self.config.policy.make(self.config.refuses);
        let mut conductor = Scheduler::new(books, policy)?;
        let everything = ContextKey { salt: "\u{0}more contexts".to_owned(), ..ContextKey::default() };
        let overflow = conductor.context(&everything)?;
        let number = self.next_pool;
        self.next_pool += 1;
        let (prefill, decode) = (Vec::new(), Vec::new());
        let (store, hits) = (BTreeMap::new(), Hits::default());
        let pool = Pool {
            key,
            token_bytes,
            conductor,
            overflow,
            store,
            prefill,
            decode,
            instances: 0,
            requests: 0,
            surprises: 0,
            hits,
            hot: HotTable::default(),
            fetched: HotTable::default(),
        };
        self.pools.insert(number, pool);
        Ok(number)
    }

    /// Forgets a pool that nobody needs.
    fn drop_pool(&mut self, number: u32) {
        if self.pools.get(&number).is_some_and(|pool| pool.instances == 0 && pool.requests == 0) {
            self.pools.remove(&number);
        }
    }
}

impl Pool {
    /// The context named `key`, and hashes for it. Where there are as many contexts as there may be, all others share
    /// one, with hashes that depend on the name.
    fn context(&mut self, key: &ContextKey, hashes: Arc<[u64]>) -> Result<(ContextId, Arc<[u64]>), DeskError> {
        match self.conductor.context(key) {
            Ok(context) => Ok((context, hashes)),
            Err(crate::scheduler::SchedulerError::Index(IndexError::TooManyContexts { .. })) => {
                let salt = salt_of(key);
                Ok((self.overflow, hashes.iter().map(|hash| mix64(hash ^ salt)).collect()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn index(&mut self) -> &mut PrefixIndex {
        self.conductor.index()
    }

    fn prefill_name(&self, at: usize) -> Arc<str> {
        self.prefill.get(at).cloned().unwrap_or_else(|| "".into())
    }
}

/// A number for a context's name.
fn salt_of(key: &ContextKey) -> u64 {
    let name = format!("{}\u{0}{}\u{0}{}", key.lora, key.salt, key.block_tokens);
    Digest::of(key.tenant.as_bytes(), name.as_bytes()).0 as u64
}

/// A mark of a prompt: the same only for the same prompt.
fn fingerprint(tokens: u32, context: ContextId, hashes: &[u64]) -> u64 {
    let last = hashes.last().copied().unwrap_or(0);
    mix64(last ^ mix64(u64::from(tokens) << 32 | hashes.len() as u64)) ^ mix64(u64::from(context.number()))
}

fn request_of(id: u64, asked: &ScheduleRequest, context: ContextId, hashes: Arc<[u64]>, now_ns: u64) -> Request {
    let barred = crate::scheduler::ExcludedInstances::default();
    Request { id, arrival_ns: now_ns, tokens: asked.tokens, context, hashes, barred }
}
