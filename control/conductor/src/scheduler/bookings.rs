//! Bookings of all instances: prefills and transfers here, decodes in their own books.
//!
//! Numbers of instances are reused once their instance is gone, so the tables are as long as the maximum number of
//! instances at one time.

use std::collections::VecDeque;

use super::decode::DecodeBook;
use super::error::SchedulerError;
use super::queue::plan::PlannedInstance;
use crate::cost::Factor;
use crate::policy::{Fetch, Placement, Policy, PrefillView};

/// Booked prefill, or stage of one.
pub(super) struct PrefillJob {
    id: u64,
    predicted_ns: u64,
    /// Tokens to compute; of a stage, in proportion to its layers.
    uncached: u32,
    /// Duration of a transfer to the next stage, with which its NIC may be busy.
    sends_ns: u64,
    /// Time at which it began.
    begun_ns: Option<u64>,
}

/// Bookings of a prefill instance.
pub(super) struct PrefillBook {
    pub alive: bool,
    /// True if it accepts new requests.
    pub takes: bool,
    /// Requests in the order of booking.
    pub jobs: VecDeque<PrefillJob>,
    /// Time until which its NIC sends what is booked on it; and until which it would send the fetches alone.
    pub egress_until_ns: u64,
    pub fetches_until_ns: u64,
    /// Number of its model's layers if it begins a prefill when the first layer of the prefix has arrived.
    pub layer_wise: Option<u32>,
    pub factor: Factor,
    /// Its number among the decode instances, if it decodes too.
    pub decode: Option<usize>,
    /// Sum of all predicted durations: wider than these, so that no sum overflows.
    sum_ns: u128,
    pub uncached: u64,
    /// Reported work beyond the bookings, in nanoseconds.
    pub foreign_ns: u64,
}

impl PrefillBook {
    pub(super) fn new() -> Self {
        Self {
            alive: true,
            takes: true,
            jobs: VecDeque::new(),
            egress_until_ns: 0,
            fetches_until_ns: 0,
            layer_wise: None,
            factor: Factor::default(),
            decode: None,
            sum_ns: 0,
            uncached: 0,
            foreign_ns: 0,
        }
    }

    pub(super) fn add(&mut self, id: u64, predicted_ns: u64, uncached: u32, sends_ns: u64) {
        self.jobs.push_back(PrefillJob { id, predicted_ns, uncached, sends_ns, begun_ns: None });
        self.sum_ns += u128::from(predicted_ns);
        self.uncached += u64::from(uncached);
    }

    pub(super) fn started(&mut self, id: u64, now_ns: u64) {
        if let Some(job) = self.jobs.iter_mut().find(|job| job.id == id) {
            job.begun_ns = Some(now_ns);
        }
    }

    pub(super) fn done(&mut self, id: u64) {
        if let Some(at) = self.jobs.iter().position(|job| job.id == id)
            && let Some(job) = self.jobs.remove(at)
        {
            self.sum_ns -= u128::from(job.predicted_ns);
            self.uncached -= u64::from(job.uncached);
        }
    }

    /// Returns the time until all bookings are done. An instance works on one request at a time, the first that began.
    pub(super) fn wait_ns(&self, now_ns: u64) -> u64 {
        let worked = self.jobs.iter().find_map(|job| {
            let since_ns = job.begun_ns?;
            Some(now_ns.saturating_sub(since_ns).min(job.predicted_ns))
        });
        let left_ns = self.sum_ns - u128::from(worked.unwrap_or(0));
        u64::try_from(left_ns).unwrap_or(u64::MAX).saturating_add(self.foreign_ns)
    }

    /// Returns the time until its NIC is free: its booked transfers have been sent, and a chunk that a stage passes on.
    pub(super) fn egress_wait_ns(&self, now_ns: u64) -> u64 {
        let chunks_ns = self.jobs.iter().fold(0, |sum_ns: u64, job| sum_ns.saturating_add(job.sends_ns));
        self.egress_until_ns.saturating_sub(now_ns).saturating_add(chunks_ns)
    }
}

/// Bookings of all instances.
#[derive(Default)]
pub(super) struct Bookings {
    prefill: Vec<PrefillBook>,
    decode: Vec<DecodeBook>,
}

impl Bookings {
    /// Adds a prefill instance; returns its number, which may be that of an instance that is gone: the bookings there
    /// are gone with it.
    pub(super) fn add_prefill(&mut self) -> usize {
        let book = PrefillBook::new();
        match self.prefill.iter().position(|book| !book.alive) {
            Some(at) => {
                self.prefill[at] = book;
                at
            }
            None => {
                self.prefill.push(book);
                self.prefill.len() - 1
            }
        }
    }

    /// Adds a decode instance, which has this number among the prefill instances if it prefills too; returns its
    /// number.
    pub(super) fn add_decode(&mut self, capacity: u64, prefill: Option<usize>) -> usize {
        let book = DecodeBook::new(capacity, prefill);
        let at = match self.decode.iter().position(|book| !book.alive) {
            Some(at) => {
                self.decode[at] = book;
                at
            }
            None => {
                self.decode.push(book);
                self.decode.len() - 1
            }
        };
        if let Some(book) = prefill.and_then(|at| self.prefill.get_mut(at)) {
            book.decode = Some(at);
        }
        at
    }

    /// Returns the bookings of prefill instances by number, including those that are gone.
    pub(super) fn prefills(&self) -> &[PrefillBook] {
        &self.prefill
    }

    /// Returns the bookings of decode instances by number, including those that are gone.
    pub(super) fn decodes(&self) -> &[DecodeBook] {
        &self.decode
    }

    /// Returns the bookings of a prefill instance that is not gone.
    pub(super) fn prefill(&mut self, instance: usize) -> Result<&mut PrefillBook, SchedulerError> {
        let book = self.prefill.get_mut(instance).filter(|book| book.alive);
        book.ok_or(SchedulerError::UnknownInstance { instance })
    }

    /// Returns the bookings of a decode instance that is not gone.
    pub(super) fn decode(&mut self, instance: usize) -> Result<&mut DecodeBook, SchedulerError> {
        let book = self.decode.get_mut(instance).filter(|book| book.alive);
        book.ok_or(SchedulerError::UnknownInstance { instance })
    }

    /// Returns the median of the factors by which the steps of decode instances differ from the model's; 1 without any.
    pub(super) fn usual_decode_factor(&self) -> f64 {
        let mut factors: Vec<f64> = self.decode.iter().filter(|book| book.alive).map(|book| book.factor.0).collect();
        factors.sort_by(f64::total_cmp);
        factors.get(factors.len().saturating_sub(1) / 2).copied().unwrap_or(1.0)
    }

    /// Returns the bookings under the number of a prefill instance, which may be gone.
    pub(super) fn prefill_at(&mut self, instance: usize) -> &mut PrefillBook {
        &mut self.prefill[instance]
    }

    /// Returns the bookings under the number of a decode instance, which may be gone.
    pub(super) fn decode_at(&mut self, instance: usize) -> &mut DecodeBook {
        &mut self.decode[instance]
    }

    /// Books the prefill of a request with so many tokens to compute, at each stage if a group does it.
    pub(super) fn book_prefill(&mut self, id: u64, placement: &Placement, uncached: u32) -> Result<(), SchedulerError> {
        let Some(plan) = &placement.group else {
            self.prefill(placement.prefill)?.add(id, placement.prefill_ns, uncached, 0);
            return Ok(());
        };
        if let Some(gone) = plan.stages.iter().find(|stage| self.prefill(stage.instance).is_err()) {
            return Err(SchedulerError::UnknownInstance { instance: gone.instance });
        }
        let layers: u32 = plan.stages.iter().map(|stage| stage.layers).sum();
        for stage in &plan.stages {
            let part = u64::from(uncached) * u64::from(stage.layers) / u64::from(layers.max(1));
            self.prefill[stage.instance].add(id, stage.busy_ns, part as u32, stage.sends_ns);
        }
        Ok(())
    }

    /// Calls `change` with the bookings of each instance that prefills a request.
    pub(super) fn each_prefill(&mut self, placement: &Placement, mut change: impl FnMut(&mut PrefillBook)) {
        match &placement.group {
            None => change(&mut self.prefill[placement.prefill]),
            Some(plan) => plan.stages.iter().for_each(|stage| change(&mut self.prefill[stage.instance])),
        }
    }

    /// Returns the number of instances that accept requests, without those that a request excludes; at least 1.
    pub(super) fn serving(&self, barred: &[u32]) -> u64 {
        let serves = |(at, book): &(usize, &PrefillBook)| book.alive && book.takes && !barred.contains(&(*at as u32));
        self.prefill.iter().enumerate().filter(serves).count().max(1) as u64
    }

    /// Returns the prefill instances that accept requests, with the times at which their bookings are done.
    pub(super) fn planned(&self, now_ns: u64) -> Vec<PlannedInstance> {
        let taking = self.prefill.iter().enumerate().filter(|(_, book)| book.alive && book.takes);
        let planned = taking.map(|(at, book)| PlannedInstance {
            number: at as u32,
            free_ns: now_ns.saturating_add(book.wait_ns(now_ns)),
            factor: book.factor.0,
        });
        planned.collect()
    }

    /// Returns the prefill instances that accept a queued request.
    pub(super) fn takers(&self, policy: &dyn Policy, now_ns: u64) -> Vec<u32> {
        let takes = |book: &PrefillBook| {
            let view = || PrefillView {
                alive: true,
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                ..PrefillView::default()
            };
            book.alive && book.takes && policy.takes(&view())
        };
        let all = self.prefill.iter().enumerate();
        all.filter(|(_, book)| takes(book)).map(|(at, _)| at as u32).collect()
    }

    /// Books the transfer of a prompt's KV cache to a decode instance on the NIC of the prefill instance, unless that
    /// decodes itself. What the decode instance holds already is not known any more, so the whole prompt counts.
    pub(super) fn book_handover(&mut self, prefill: usize, decode: usize, took_ns: u64, now_ns: u64) {
        let book = &mut self.prefill[prefill];
        if book.decode != Some(decode) {
            book.egress_until_ns = book.egress_until_ns.max(now_ns).saturating_add(took_ns);
        }
    }

    /// Books a transfer on the NIC of its source, or evenly on all NICs if it comes from the pool.
    pub(super) fn book_transfer(&mut self, fetch: Fetch, took_ns: u64, now_ns: u64) {
        let busy = |book: &mut PrefillBook, took_ns: u64| {
            book.egress_until_ns = book.egress_until_ns.max(now_ns).saturating_add(took_ns);
            book.fetches_until_ns = book.fetches_until_ns.max(now_ns).saturating_add(took_ns);
        };
        match fetch {
            Fetch::Nothing => {}
            Fetch::One(source) => busy(&mut self.prefill[source], took_ns),
            Fetch::Pool { .. } => {
                let alive = self.prefill.iter().filter(|book| book.alive).count().max(1) as u64;
                self.prefill.iter_mut().for_each(|book| busy(book, took_ns / alive));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_covers_bookings_and_reported_load() {
        let mut bookings = Bookings::default();
        let at = bookings.add_prefill();
        let book = bookings.prefill(at).expect("an instance");
        book.add(1, 100, 10, 0);
        book.add(2, 50, 5, 4);
        book.started(1, 1_000);
        book.foreign_ns = 7;
        // A prefill that takes longer than predicted counts as no more than the predicted work.
        assert_eq!((book.wait_ns(1_000), book.wait_ns(1_040), book.wait_ns(2_000)), (157, 117, 57));
        book.done(1);
        assert_eq!(book.egress_wait_ns(2_000), 4);
        assert_eq!((book.wait_ns(2_000), book.uncached), (57, 5));
    }

    #[test]
    fn instance_numbers_are_reused_and_pool_transfers_are_divided() {
        let mut bookings = Bookings::default();
        assert_eq!((bookings.add_prefill(), bookings.add_prefill(), bookings.add_prefill()), (0, 1, 2));
        bookings.prefill(1).expect("an instance").alive = false;
        assert!(bookings.prefill(1).is_err());
        bookings.book_transfer(Fetch::Pool { keep: false }, 100, 1_000);
        assert_eq!(bookings.prefills()[0].egress_until_ns, 1_050, "two of three send");
        assert_eq!(bookings.add_prefill(), 1);
        assert_eq!(bookings.prefills()[1].egress_until_ns, 0);
    }
}
