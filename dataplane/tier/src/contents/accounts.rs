//! Accounts of tenants on the device: the bytes of each, its limit, and the order in which its records go.
//!
//! Every entry of the index has the number of its tenant's account. A tenant with a limit has a *queue* of its records
//! too, oldest first, so that what is above the limit is found at once: eight bytes a record, in a list for each
//! segment. A list is dropped with its segment. Records that were removed, replaced or rewritten are skipped when their
//! turn comes. A queue is built by a walk through the index when a tenant gets its first limit, and again when it has
//! run out: records that were pinned, or moved in the index during the walk, are not in it.
//!
//! Not here: the index, and removal of records from it.

use std::collections::BTreeMap;

use kvplane_proto::narrowing::length_u16;

use crate::types::{TenantLimit, TierUse};

/// Most accounts; further tenants share the account of unknown ones.
const ACCOUNTS_MOST: usize = 4096;
/// Part of a limit by which evictions run ahead of what has to go.
const AHEAD_PART: u64 = 64;
/// Account of records whose tenant is unknown. It has no limit.
pub(crate) const UNKNOWN: u16 = 0;

/// Place of a record that is in a queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct QueuedRecord {
    /// Offset of the record in its segment, in units.
    pub(crate) unit: u32,
    /// Point of its digest in the index, by which it is found again.
    pub(crate) point: u32,
}

/// Records of one tenant in one segment.
#[derive(Debug, Default)]
struct QueuedSegment {
    segment: u32,
    records: Vec<QueuedRecord>,
    /// Records before this one were taken.
    next: usize,
    /// True if the rest is in the order of the log.
    is_sorted: bool,
}

/// Records of one tenant, oldest first.
#[derive(Debug, Default)]
struct Queue {
    /// Lists by the generations of their segments.
    segments: BTreeMap<u64, QueuedSegment>,
    state: QueueState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum QueueState {
    /// The walk through the index has not ended.
    #[default]
    Building,
    Built,
    /// A walk found nothing that could be evicted, and nothing has changed since.
    Exhausted,
}

/// Account of one tenant.
#[derive(Debug, Default)]
struct Account {
    number: u32,
    used_bytes: u64,
    records: u64,
    limit_bytes: Option<u64>,
    /// Bytes of [`Self::limit_bytes`] that reclaim keeps for the tenant while others write.
    share_bytes: u64,
    queue: Option<Queue>,
    evicted_bytes: u64,
    refused: u64,
}

/// Next record to be evicted for its tenant's limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Oldest {
    /// The oldest of the queue, which may be gone by now.
    Record {
        /// Segment of the record, and the generation that the segment had.
        segment: u32,
        generation: u64,
        record: QueuedRecord,
    },
    /// The queue is being built.
    Building,
    /// There is none.
    None,
}

/// Accounts of all tenants.
#[derive(Debug)]
pub(crate) struct Accounts {
    all: Vec<Account>,
    numbers: BTreeMap<u32, u16>,
    /// Accounts with limits.
    limited: Vec<u16>,
    /// Position of the walk that builds queues; `None` while none is to be built.
    walk: Option<usize>,
}

impl Accounts {
    pub(crate) fn new() -> Self {
        Self { all: vec![Account::default()], numbers: BTreeMap::new(), limited: Vec::new(), walk: None }
    }

    /// Returns the account of a tenant, existing or new.
    pub(crate) fn of(&mut self, number: u32) -> u16 {
        if let Some(at) = self.numbers.get(&number) {
            return *at;
        }
        let free = (1..self.all.len()).find(|at| self.all[*at].records == 0 && self.all[*at].limit_bytes.is_none());
        let at = match free {
            Some(at) if self.all.len() >= ACCOUNTS_MOST / 4 => at,
            _ if self.all.len() < ACCOUNTS_MOST => {
                self.all.push(Account::default());
                self.all.len() - 1
            }
            Some(at) => at,
            None => return UNKNOWN,
        };
        let account = Account { number, ..Account::default() };
        let former = core::mem::replace(&mut self.all[at], account);
        self.numbers.retain(|of, place| *of != former.number || usize::from(*place) != at);
        let at = length_u16(at);
        self.numbers.insert(number, at);
        at
    }

    /// Returns the number of an account's tenant.
    pub(crate) fn number(&self, account: u16) -> Option<u32> {
        (account != UNKNOWN).then(|| self.all[usize::from(account)].number)
    }

    /// Charges a record of `bytes` to an account; `queued`: its place, if it may be evicted.
    pub(crate) fn charge(&mut self, account: u16, bytes: u64, queued: (u64, u32, QueuedRecord)) {
        let at = &mut self.all[usize::from(account)];
        (at.used_bytes, at.records) = (at.used_bytes + bytes, at.records + 1);
        if let Some(queue) = &mut at.queue {
            let (generation, segment, record) = queued;
            queue.push(generation, segment, record);
            queue.changed();
        }
    }

    /// Discharges a record of `bytes` from an account.
    pub(crate) fn discharge(&mut self, account: u16, bytes: u64) {
        let at = &mut self.all[usize::from(account)];
        (at.used_bytes, at.records) = (at.used_bytes - bytes, at.records - 1);
    }

    /// Sets the limits of tenants; those that are not listed have none. Reclaim keeps `capacity_bytes` for all of them
    /// together: shares are scaled down to it.
    pub(crate) fn set_limits(&mut self, limits: &[TenantLimit], capacity_bytes: u64) {
        let all: u64 = limits.iter().map(|limit| limit.bytes).fold(0, u64::saturating_add);
        let mut limited = Vec::with_capacity(limits.len());
        for limit in limits {
            let account = self.of(limit.number);
            if account == UNKNOWN || limited.contains(&account) {
                continue;
            }
            limited.push(account);
            let at = &mut self.all[usize::from(account)];
            let is_news = at.limit_bytes.replace(limit.bytes) != Some(limit.bytes);
            at.share_bytes = match all > capacity_bytes {
                true => scaled(capacity_bytes, limit.bytes, all),
                false => limit.bytes,
            };
            match &mut at.queue {
                Some(queue) if is_news => queue.changed(),
                Some(_) => {}
                None => {
                    at.queue = Some(Queue::default());
                    self.walk = Some(0);
                }
            }
        }
        for account in core::mem::replace(&mut self.limited, limited) {
            if !self.limited.contains(&account) {
                let at = &mut self.all[usize::from(account)];
                (at.limit_bytes, at.share_bytes, at.queue) = (None, 0, None);
            }
        }
    }

    /// Returns the accounts with limits.
    pub(crate) fn limited(&self) -> &[u16] {
        &self.limited
    }

    /// Returns the limit of an account, if `bytes` more exceed it.
    pub(crate) fn over_limit(&self, account: u16, bytes: u64) -> Option<u64> {
        let at = &self.all[usize::from(account)];
        at.limit_bytes.filter(|limit| at.used_bytes.saturating_add(bytes) > *limit)
    }

    /// Returns true if another record of this many bytes may go although an account that grows by `more` is within its
    /// limit: evictions run ahead by a part of the limit.
    pub(crate) fn may_run_ahead(&self, account: u16, more: u64, record_bytes: u64) -> bool {
        let at = &self.all[usize::from(account)];
        let after = at.used_bytes.saturating_add(more).saturating_sub(record_bytes);
        at.limit_bytes.is_some_and(|limit| after.saturating_add(limit / AHEAD_PART) >= limit)
    }

    /// Returns true if reclaim keeps the records of an account: they are within its share.
    pub(crate) fn is_within_share(&self, account: u16) -> bool {
        let at = &self.all[usize::from(account)];
        at.limit_bytes.is_some() && at.used_bytes <= at.share_bytes
    }

    /// Counts the eviction of a record because of the limit.
    pub(crate) fn count_eviction(&mut self, account: u16, bytes: u64) {
        self.all[usize::from(account)].evicted_bytes += bytes;
    }

    /// Counts a put that was refused because of the limit.
    pub(crate) fn count_refusal(&mut self, account: u16) {
        self.all[usize::from(account)].refused += 1;
    }

    /// Returns the oldest record of an account's queue. A queue that has run out is built anew, once: a walk may find
    /// what the queue has not.
    pub(crate) fn oldest(&mut self, account: u16) -> Oldest {
        let Some(queue) = &mut self.all[usize::from(account)].queue else { return Oldest::None };
        match queue.state {
            QueueState::Building => Oldest::Building,
            QueueState::Exhausted => Oldest::None,
            QueueState::Built => match queue.oldest() {
                Some((segment, generation, record)) => Oldest::Record { segment, generation, record },
                None => {
                    queue.state = QueueState::Building;
                    self.walk = Some(0);
                    Oldest::Building
                }
            },
        }
    }

    /// Takes the oldest record off an account's queue.
    pub(crate) fn take_oldest(&mut self, account: u16) {
        if let Some(queue) = &mut self.all[usize::from(account)].queue {
            queue.take();
        }
    }

    /// Notes that a record of an account can be evicted that could not before.
    pub(crate) fn note_unpinned(&mut self, account: u16) {
        if let Some(queue) = &mut self.all[usize::from(account)].queue {
            queue.changed();
        }
    }

    /// Forgets the records of segments up to this generation: reclaim has freed them.
    pub(crate) fn forget_up_to(&mut self, generation: u64) {
        for account in &self.limited {
            if let Some(queue) = &mut self.all[usize::from(*account)].queue {
                queue.segments = queue.segments.split_off(&(generation + 1));
            }
        }
    }

    /// Returns the position of the walk that builds queues.
    pub(crate) const fn walk(&self) -> Option<usize> {
        self.walk
    }

    /// Adds a record that the walk found, if its account's queue is being built.
    pub(crate) fn found(&mut self, account: u16, queued: (u64, u32, QueuedRecord)) {
        if let Some(queue) = &mut self.all[usize::from(account)].queue
            && queue.state == QueueState::Building
        {
            let (generation, segment, record) = queued;
            queue.push(generation, segment, record);
        }
    }

    /// Sets the position of the walk; `None` if it has ended.
    pub(crate) fn walked(&mut self, to: Option<usize>) {
        self.walk = to;
        if to.is_some() {
            return;
        }
        for account in &self.limited {
            if let Some(queue) = &mut self.all[usize::from(*account)].queue {
                queue.built();
            }
        }
    }

    /// Returns the use of each tenant that has records, or a limit.
    pub(crate) fn uses(&self) -> Vec<TierUse> {
        let shown =
            self.all.iter().skip(1).filter(|one| one.records > 0 || one.limit_bytes.is_some() || one.refused > 0);
        let of = |one: &Account| TierUse {
            number: one.number,
            used_bytes: one.used_bytes,
            limit_bytes: one.limit_bytes,
            evicted_bytes: one.evicted_bytes,
            refused: one.refused,
        };
        shown.map(of).collect()
    }

    /// Returns bytes and records of each account.
    pub(super) fn totals(&self) -> Vec<(u64, u64)> {
        self.all.iter().map(|one| (one.used_bytes, one.records)).collect()
    }
}

impl Queue {
    fn push(&mut self, generation: u64, segment: u32, record: QueuedRecord) {
        let list = self.segments.entry(generation).or_insert_with(|| QueuedSegment {
            segment,
            is_sorted: true,
            ..QueuedSegment::default()
        });
        list.is_sorted &= list.records.last().is_none_or(|last| last.unit < record.unit);
        list.records.push(record);
    }

    /// Notes that there may be something to evict.
    fn changed(&mut self) {
        if self.state == QueueState::Exhausted {
            self.state = QueueState::Built;
        }
    }

    /// Ends the walk that built the queue.
    fn built(&mut self) {
        if self.state == QueueState::Building {
            self.state = if self.segments.is_empty() { QueueState::Exhausted } else { QueueState::Built };
        }
    }

    fn oldest(&mut self) -> Option<(u32, u64, QueuedRecord)> {
        loop {
            let mut first = self.segments.first_entry()?;
            let generation = *first.key();
            let list = first.get_mut();
            if !list.is_sorted {
                list.records.drain(..list.next);
                list.next = 0;
                list.records.sort_unstable();
                list.records.dedup();
                list.is_sorted = true;
            }
            if let Some(record) = list.records.get(list.next) {
                return Some((list.segment, generation, *record));
            }
            first.remove();
        }
    }

    fn take(&mut self) {
        if let Some(mut first) = self.segments.first_entry() {
            first.get_mut().next += 1;
        }
    }
}

fn scaled(whole: u64, part: u64, of: u64) -> u64 {
    let share = u128::from(whole) * u128::from(part) / u128::from(of.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}
