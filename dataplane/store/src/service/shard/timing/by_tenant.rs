//! Latency of gets and puts by tenant. A shard that has only the default tenant records nothing here.
//!
//! As in the histograms by operation, a request that is answered in the round of its arrival has no measurable latency
//! of its own: it waits for the next reading of the clock among requests of its class, and shares it.

use std::collections::HashMap;

use kvplane_proto::histogram::Histogram;
use kvplane_proto::message::Operation;

/// Most tenants of a shard that are counted separately; further ones are counted together.
pub const TENANTS_TIMED: usize = 256;

const CLASSES: usize = 2;

/// Class of a tenant's operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TenantOperation {
    /// `Get`, `GetRange` or `Lookup`.
    Get,
    /// `Put`, `Commit` or `Seal`.
    Put,
}

impl TenantOperation {
    const ALL: [Self; CLASSES] = [Self::Get, Self::Put];

    pub(super) const fn of(operation: Operation) -> Option<Self> {
        match operation {
            Operation::Get | Operation::GetRange | Operation::Lookup => Some(Self::Get),
            Operation::Put | Operation::Commit | Operation::Seal => Some(Self::Put),
            _ => None,
        }
    }
}

/// Tenant of the object that a request was about; of a request about several, of one that existed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum TimedTenant {
    /// Tenant with this number; 0 is the default tenant.
    Tenant(u32),
    /// Unknown: the object came from an SSD, and its tail was not read yet.
    Unknown,
    /// Any tenant beyond [`TENANTS_TIMED`].
    Others,
}

/// Latency of requests of one class for objects of one tenant that were answered with `Ok`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TenantTimes {
    /// Tenant of the objects.
    pub whose: TimedTenant,
    /// Name of the tenant, if a put named it.
    pub name: Option<String>,
    /// Class of the requests.
    pub operation: TenantOperation,
    /// True for those that waited for the SSD.
    pub ssd: bool,
    /// Latency histogram.
    pub times: Histogram,
}

#[derive(Debug)]
struct OfTenant {
    whose: TimedTenant,
    /// Requests that were answered in the round of their arrival and are not in a histogram yet.
    fast: [u32; CLASSES],
    times: [[Histogram; 2]; CLASSES],
}

/// Recorder of latencies by tenant.
#[derive(Debug, Default)]
pub(in crate::service) struct ByTenant {
    places: HashMap<TimedTenant, usize>,
    tenants: Vec<OfTenant>,
    names: HashMap<u32, String>,
    /// Tenants with requests that wait for a reading of the clock.
    waiting: Vec<usize>,
    /// Latency by the last reading, of each class.
    last_ns: [u64; CLASSES],
}

impl ByTenant {
    fn place(&mut self, whose: TimedTenant) -> usize {
        if let Some(&at) = self.places.get(&whose) {
            return at;
        }
        let whose = if self.tenants.len() < TENANTS_TIMED { whose } else { TimedTenant::Others };
        let next = self.tenants.len();
        let at = *self.places.entry(whose).or_insert(next);
        if at == next {
            self.tenants.push(OfTenant { whose, fast: [0; CLASSES], times: Default::default() });
        }
        at
    }

    /// Records the name of a tenant.
    pub(in crate::service) fn named(&mut self, number: u32, name: &[u8]) {
        if self.names.len() < TENANTS_TIMED && !self.names.contains_key(&number) {
            self.names.insert(number, String::from_utf8_lossy(name).into_owned());
        }
    }

    /// Records a request that was answered in the round in which it was received.
    pub(super) fn at_once(&mut self, whose: TimedTenant, operation: TenantOperation) {
        let at = self.place(whose);
        let tenant = &mut self.tenants[at];
        if tenant.fast == [0; CLASSES] {
            self.waiting.push(at);
        }
        tenant.fast[operation as usize] += 1;
    }

    /// Records a request that was answered after `took_ns`.
    pub(super) fn after(&mut self, whose: TimedTenant, operation: TenantOperation, ssd: bool, took_ns: u64) {
        let at = self.place(whose);
        self.tenants[at].times[operation as usize][usize::from(ssd)].add(took_ns);
    }

    /// Records a reading of the clock at the end of a round in which requests of these classes were answered.
    pub(super) fn settle(&mut self, answered: [bool; CLASSES], took_ns: u64) {
        let Self { tenants, waiting, last_ns, .. } = self;
        for class in (0..CLASSES).filter(|&class| answered[class]) {
            last_ns[class] = took_ns;
            for &at in waiting.iter() {
                let tenant = &mut tenants[at];
                tenant.times[class][0].add_many(took_ns, core::mem::take(&mut tenant.fast[class]).into());
            }
        }
        waiting.retain(|&at| tenants[at].fast != [0; CLASSES]);
    }

    /// Returns the statistics so far.
    pub(super) fn snapshot(&self) -> Vec<TenantTimes> {
        let mut all = Vec::new();
        for tenant in &self.tenants {
            let name = match tenant.whose {
                TimedTenant::Tenant(number) => self.names.get(&number).cloned(),
                TimedTenant::Unknown | TimedTenant::Others => None,
            };
            for (operation, ssd) in TenantOperation::ALL.into_iter().flat_map(|one| [(one, false), (one, true)]) {
                let class = operation as usize;
                let mut times = tenant.times[class][usize::from(ssd)].clone();
                if !ssd && tenant.fast[class] > 0 {
                    times.add_many(self.last_ns[class], tenant.fast[class].into());
                }
                if times.count() > 0 {
                    all.push(TenantTimes { whose: tenant.whose, name: name.clone(), operation, ssd, times });
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(by_tenant: &ByTenant) -> Vec<(TimedTenant, TenantOperation, bool, u64, u64)> {
        let of = |one: TenantTimes| (one.whose, one.operation, one.ssd, one.times.count(), one.times.sum_ns());
        by_tenant.snapshot().into_iter().map(of).collect()
    }

    #[test]
    fn every_request_is_counted_once_for_its_tenant() {
        let (mut all, get, put) = (ByTenant::default(), TenantOperation::Get, TenantOperation::Put);
        let (one, two) = (TimedTenant::Tenant(1), TimedTenant::Tenant(2));
        (0..3).for_each(|_| all.at_once(one, get));
        all.at_once(two, put);
        all.settle([true, false], 100);
        assert_eq!(counts(&all), [(one, get, false, 3, 300), (two, put, false, 1, 0)]);
        all.at_once(two, put);
        all.settle([false, true], 50);
        all.after(one, get, true, 7000);
        all.settle([true, true], 9);
        let expected = [(one, get, false, 3, 300), (one, get, true, 1, 7000), (two, put, false, 2, 100)];
        assert_eq!(counts(&all), expected);
        assert!(all.waiting.is_empty());
        all.named(2, b"acme");
        assert_eq!(all.snapshot().last().and_then(|one| one.name.clone()).as_deref(), Some("acme"));
    }

    #[test]
    fn the_number_of_tenants_is_bounded() {
        let mut all = ByTenant::default();
        for number in 0..1000 {
            all.at_once(TimedTenant::Tenant(number), TenantOperation::Get);
            all.named(number, b"name");
        }
        all.settle([true, true], 1);
        assert_eq!((all.tenants.len(), all.names.len()), (TENANTS_TIMED + 1, TENANTS_TIMED));
        let last = counts(&all).pop();
        assert_eq!(last, Some((TimedTenant::Others, TenantOperation::Get, false, 744, 744)));
    }
}
