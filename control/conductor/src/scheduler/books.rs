//! What is booked on each instance, and the calls that book and free.

use std::collections::VecDeque;

use super::{Conductor, ConductorError, Request, Reservation};
use crate::cost::Factor;
use crate::index::{HolderId, PrefixIndex, PrefixMatches, Tier, Tiers};
use crate::policy::{DecodeView, Fetch, Placement};

/// How long every decode is taken to last where it is predicted what will be resident later: the predictor of the arXiv
/// paper assumes such a constant, whose value is not published.
const DECODE_NS: u64 = 12_000_000_000;

/// A prefill instance's work.
pub(super) struct PrefillBook {
    pub alive: bool,
    /// Whether it gets new requests.
    pub takes: bool,
    pub holder: HolderId,
    pub routed: HolderId,
    /// Requests in the order of their booking: number, predicted time, tokens to compute.
    pub jobs: VecDeque<(u64, u64, u32)>,
    /// The one at work, and since when.
    running: Option<(u64, u64)>,
    pub egress_until_ns: u64,
    pub factor: Factor,
    /// Tokens of all prompts that ever came here; what several begin with counts once.
    pub routed_tokens: u64,
    /// Of all jobs: wider than the times themselves, so that the sum of any is exact.
    sum_ns: u128,
    pub uncached: u64,
    /// Work that it has beside what is booked, by its own word.
    pub foreign_ns: u64,
}

impl PrefillBook {
    pub(super) fn new(holder: HolderId, routed: HolderId) -> Self {
        Self {
            alive: true,
            takes: true,
            holder,
            routed,
            jobs: VecDeque::new(),
            running: None,
            egress_until_ns: 0,
            factor: Factor::default(),
            routed_tokens: 0,
            sum_ns: 0,
            uncached: 0,
            foreign_ns: 0,
        }
    }

    fn add(&mut self, id: u64, predicted_ns: u64, uncached: u32) {
        self.jobs.push_back((id, predicted_ns, uncached));
        self.sum_ns += u128::from(predicted_ns);
        self.uncached += u64::from(uncached);
    }

    pub(super) fn started(&mut self, id: u64, now_ns: u64) {
        self.running = Some((id, now_ns));
    }

    pub(super) fn done(&mut self, id: u64) {
        if let Some(at) = self.jobs.iter().position(|job| job.0 == id)
            && let Some((_, predicted_ns, uncached)) = self.jobs.remove(at)
        {
            self.sum_ns -= u128::from(predicted_ns);
            self.uncached -= u64::from(uncached);
        }
        self.running.take_if(|(running, _)| *running == id);
    }

    /// Until all that is booked is done.
    pub(super) fn wait_ns(&self, now_ns: u64) -> u64 {
        let worked = self.running.and_then(|(id, since)| {
            let job = self.jobs.iter().find(|job| job.0 == id)?;
            Some(now_ns.saturating_sub(since).min(job.1))
        });
        let left_ns = self.sum_ns - u128::from(worked.unwrap_or(0));
        u64::try_from(left_ns).unwrap_or(u64::MAX).saturating_add(self.foreign_ns)
    }
}

/// A decode instance's room.
pub(super) struct DecodeBook {
    pub alive: bool,
    /// Whether it gets new requests.
    pub takes: bool,
    capacity: u64,
    /// Tokens and requests that it has beside those booked, by its own word.
    pub foreign: (u64, u32),
    /// On their way: number, tokens, when they are expected.
    coming: Vec<(u64, u64, u64)>,
    /// In the batch: number, tokens, since when.
    running: Vec<(u64, u64, u64)>,
}

impl DecodeBook {
    pub(super) const fn new(capacity: u64) -> Self {
        Self { alive: true, takes: true, capacity, foreign: (0, 0), coming: Vec::new(), running: Vec::new() }
    }

    pub(super) fn begin(&mut self, id: u64, tokens: u64, now_ns: u64) {
        self.coming.retain(|entry| entry.0 != id);
        self.running.push((id, tokens, now_ns));
    }

    /// Tokens and requests in the batch that are booked.
    pub(super) fn booked(&self) -> (u64, u32) {
        self.running.iter().fold((0, 0), |(tokens, count), entry| (tokens + entry.1, count + 1))
    }

    fn forget(&mut self, id: u64) {
        self.coming.retain(|entry| entry.0 != id);
        self.running.retain(|entry| entry.0 != id);
    }

    /// What there is now, and what there will be at `then_ns` if each decode takes [`DECODE_NS`].
    pub(super) fn view(&self, _now_ns: u64, then_ns: u64) -> DecodeView {
        let sum = |(tokens, count): (u64, u32), entry: &(u64, u64, u64)| (tokens + entry.1, count + 1);
        let running = self.running.iter().fold(self.foreign, sum);
        let (tokens, requests) = self.coming.iter().fold(running, sum);
        let stays = |entry: &&(u64, u64, u64)| entry.2 <= then_ns && then_ns < entry.2.saturating_add(DECODE_NS);
        let later = self.running.iter().chain(&self.coming).filter(stays).fold((0, 0), sum);
        DecodeView { alive: self.alive && self.takes, tokens, requests, capacity: self.capacity, running, later }
    }
}

impl Conductor {
    /// Books a placement.
    pub(super) fn book(&mut self, request: Request, placement: Placement, now_ns: u64) -> Result<(), ConductorError> {
        let most = self.config.max_reservations;
        if self.booked.len() >= most {
            return Err(ConductorError::TooManyReservations { most });
        }
        let unknown = |instance| ConductorError::UnknownInstance { instance };
        let decode_known = placement.decode.is_none_or(|decode| self.decode.get(decode).is_some_and(|book| book.alive));
        let source = if let Fetch::One(source) = placement.fetch { source } else { placement.prefill };
        if !decode_known || source >= self.prefill.len() {
            return Err(unknown(source));
        }
        let book = self.prefill.get_mut(placement.prefill).filter(|book| book.alive);
        let book = book.ok_or_else(|| unknown(placement.prefill))?;
        book.add(request.id, placement.prefill_ns, request.tokens.saturating_sub(placement.reuse));
        let (holder, routed) = (book.holder, book.routed);
        let tokens = |blocks: u32| blocks.saturating_mul(self.config.block_tokens);
        let held = tokens(blocks_of(&self.index, &request, holder));
        let known = tokens(blocks_of(&self.routed, &request, routed));
        self.prefill[placement.prefill].routed_tokens += u64::from(request.tokens.saturating_sub(known));
        let keeps = |keep: bool| keep && self.config.keeps_fetched;
        let passes = matches!(placement.fetch, Fetch::Pool { keep } if !keeps(keep));
        let reused = if passes { (placement.reuse / self.config.block_tokens) as usize } else { 0 };
        // What is fetched and not kept is there for this request only.
        let (fetched, promised) = request.hashes.split_at(reused.min(request.hashes.len()));
        self.index.stored(request.context, holder, Tier::Promised, fetched.last().copied(), promised)?;
        self.routed.stored(request.context, routed, Tier::Gpu, None, &request.hashes)?;
        self.book_transfer(&placement, source, held, now_ns);
        if let Some(decode) = placement.decode {
            let expected_ns = now_ns.saturating_add(placement.takes_ns());
            self.decode[decode].coming.push((request.id, u64::from(request.tokens), expected_ns));
        }
        self.placed += 1;
        let reservation = Reservation { request, placement, prefilled: false, decoding: false, touched_ns: now_ns };
        self.leases_ns = self.leases_ns.min(now_ns.saturating_add(self.config.lease_ns));
        self.booked.insert(reservation.request.id, reservation);
        Ok(())
    }

    /// Books a transfer on the NIC of its source, or evenly on all where it comes from the pool.
    fn book_transfer(&mut self, placement: &Placement, source: usize, held: u32, now_ns: u64) {
        let bytes = u64::from(placement.reuse.saturating_sub(held)) * self.config.token_bytes;
        let took_ns = crate::cost::transfer_ns(bytes, self.config.nic_bytes_s);
        let busy = |book: &mut PrefillBook, took_ns: u64| {
            book.egress_until_ns = book.egress_until_ns.max(now_ns).saturating_add(took_ns);
        };
        match placement.fetch {
            Fetch::Nothing => {}
            Fetch::One(_) => busy(&mut self.prefill[source], took_ns),
            Fetch::Pool { .. } => {
                let alive = self.prefill.iter().filter(|book| book.alive).count().max(1) as u64;
                self.prefill.iter_mut().for_each(|book| busy(book, took_ns / alive));
            }
        }
    }

    pub(super) fn unbook_decode(&mut self, reservation: &Reservation) {
        if let Some(decode) = reservation.placement.decode {
            self.decode[decode].forget(reservation.request.id);
        }
    }

    pub(super) fn instance(&self, instance: usize) -> Result<&PrefillBook, ConductorError> {
        let book = self.prefill.get(instance).filter(|book| book.alive);
        book.ok_or(ConductorError::UnknownInstance { instance })
    }

    /// Ends promises that events should have taken over by now, and leases.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while self.promises.front().is_some_and(|promise| promise.until_ns <= now_ns) {
            let Some(promise) = self.promises.pop_front() else { break };
            // An instance that is gone took its promises along.
            let _ = self.index.removed(promise.context, promise.holder, Tier::Promised, &promise.hashes);
        }
        if now_ns < self.leases_ns {
            return;
        }
        let lease_ns = self.config.lease_ns;
        let over = |reservation: &Reservation| reservation.touched_ns.saturating_add(lease_ns) <= now_ns;
        let ids: Vec<u64> = self.booked.iter().filter(|(_, kept)| over(kept)).map(|(id, _)| *id).collect();
        for id in ids {
            // Its instance may be gone, then there is nothing left to free.
            let _ = self.release(id);
        }
        let next = self.booked.values().map(|kept| kept.touched_ns).min().unwrap_or(now_ns);
        self.leases_ns = next.saturating_add(lease_ns).max(now_ns + 1);
    }
}

/// Blocks of a prompt that a holder has.
fn blocks_of(index: &PrefixIndex, request: &Request, holder: HolderId) -> u32 {
    let mut found = PrefixMatches::default();
    match index.find(request.context, &request.hashes, usize::MAX, Tiers::OWN, &mut found) {
        Ok(()) => index.blocks_within(&found, holder, Tiers::OWN),
        Err(_) => 0,
    }
}
