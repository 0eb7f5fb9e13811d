//! What a policy is shown.

use super::{Conductor, Request, Scratch};
use crate::index::Tiers;
use crate::policy::{Choice, DecodeView, PrefillView, QueuedRequest, View};

/// The views of all instances.
pub(super) struct Views {
    prefill: Vec<PrefillView>,
    decode: Vec<DecodeView>,
    pooled: u32,
    ahead_ns: u64,
    fastest_decode: Option<(usize, u64)>,
    busiest_ns: u64,
}

impl Conductor {
    /// What each instance has booked and has of this prompt.
    pub(super) fn views(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Views {
        let mut prefill: Vec<PrefillView> = self
            .prefill
            .iter()
            .enumerate()
            .map(|(at, book)| PrefillView {
                alive: book.alive && book.takes && !request.barred.prefill.contains(&(at as u32)),
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                queued_tokens: book.uncached,
                routed_size: book.routed_tokens,
                egress_wait_ns: book.egress_until_ns.saturating_sub(now_ns),
                factor: book.factor.0,
                ..PrefillView::default()
            })
            .collect();
        fill(self, false, request, Tiers::OWN, scratch, |at, blocks| prefill[at].held = blocks);
        if self.policy.looks_at_routes() {
            fill(self, true, request, Tiers::OWN, scratch, |at, blocks| prefill[at].routed = blocks);
        }
        let tokens = |blocks: u32| blocks.saturating_mul(self.config.block_tokens).min(request.tokens);
        for view in &mut prefill {
            (view.held, view.routed) = (tokens(view.held), tokens(view.routed));
        }
        let alive = prefill.iter().filter(|view| view.alive);
        let done_ns =
            |view: &PrefillView| view.wait_ns.saturating_add(self.model.predict_ns(request.tokens, view.held));
        let soonest_ns = alive.map(done_ns).min().unwrap_or(0);
        let decode = self.decode.iter().enumerate().map(|(at, book)| {
            let view = book.view(now_ns, now_ns.saturating_add(soonest_ns));
            DecodeView { alive: view.alive && !request.barred.decode.contains(&(at as u32)), ..view }
        });
        let decode: Vec<DecodeView> = decode.collect();
        let pooled = self.index.held_by_anybody(request.context, &request.hashes, Tiers::SHARED).unwrap_or(0);
        let (pooled, cached) = (tokens(pooled), prefill.iter().map(|view| view.held).max().unwrap_or(0));
        let ahead_ns = self.ahead_ns(request, self.model.predict_ns(request.tokens, cached.max(pooled)), now_ns);
        let taking = prefill.iter().filter(|view| view.alive);
        let busiest_ns = taking.map(|view| view.egress_wait_ns).max().unwrap_or(0);
        let fastest_decode = self.fastest_decode(&decode, request.tokens);
        Views { prefill, decode, pooled, ahead_ns, fastest_decode, busiest_ns }
    }

    /// The decode instance on which tokens come fastest with so many more; one without room only where all are.
    fn fastest_decode(&self, decode: &[DecodeView], tokens: u32) -> Option<(usize, u64)> {
        let weigh = |(at, decode): (usize, &DecodeView)| {
            let resident = decode.tokens + u64::from(tokens);
            let step_ns = self.config.decode_model.step_ns(resident, decode.requests as usize + 1);
            (resident > decode.capacity, step_ns, at)
        };
        let alive = decode.iter().enumerate().filter(|(_, decode)| decode.alive);
        alive.map(weigh).min().map(|(_, step_ns, at)| (at, step_ns))
    }

    pub(super) fn view<'a>(&'a self, views: &'a Views, now_ns: u64) -> View<'a> {
        View {
            now_ns,
            prefill: &views.prefill,
            decode: &views.decode,
            model: &self.model,
            decode_model: &self.config.decode_model,
            slo: self.config.slo,
            token_bytes: self.config.token_bytes,
            nic_bytes_s: self.config.nic_bytes_s,
            block_tokens: self.config.block_tokens,
            pooled: views.pooled,
            ahead_ns: views.ahead_ns,
            placed: self.placed,
            fastest_decode: views.fastest_decode,
            busiest_ns: views.busiest_ns,
        }
    }

    /// Work of those who wait and would go before a request, divided among the instances that it may go to and that
    /// take any.
    fn ahead_ns(&self, request: &Request, best_ns: u64, now_ns: u64) -> u64 {
        if self.queue.is_empty() {
            return 0;
        }
        let slo = self.config.slo;
        let own = self.policy.rank(&QueuedRequest { ask: request.ask(), best_ns }, now_ns, slo);
        let before = self.queue.iter().filter(|(other, _)| self.policy.rank(other, now_ns, slo) <= own);
        let serves = |(at, book): &(usize, &super::PrefillBook)| {
            book.alive && book.takes && !request.barred.prefill.contains(&(*at as u32))
        };
        let serving = self.prefill.iter().enumerate().filter(serves).count().max(1) as u64;
        before.fold(0u64, |sum, (other, _)| sum.saturating_add(other.best_ns)) / serving
    }

    /// How many of those who wait would go before a request, and the work of these, divided among the instances.
    #[must_use]
    pub fn ahead(&self, request: &Request, now_ns: u64) -> (usize, u64) {
        if self.queue.is_empty() {
            return (0, 0);
        }
        let best_ns = self.best_ns(request);
        let own = self.policy.rank(&QueuedRequest { ask: request.ask(), best_ns }, now_ns, self.config.slo);
        let others = self.queue.iter().filter(|(other, _)| other.ask.id != request.id);
        let before = others.filter(|(other, _)| self.policy.rank(other, now_ns, self.config.slo) <= own);
        (before.count(), self.ahead_ns(request, best_ns, now_ns))
    }

    /// What the policy would be shown of the instances for a request, and what it would say.
    #[must_use]
    pub fn explain(&self, request: &Request, now_ns: u64) -> (Vec<PrefillView>, Vec<DecodeView>, Choice) {
        let views = self.views(request, now_ns, &mut Scratch::default());
        let choice = self.policy.choose_now(&request.ask(), &self.view(&views, now_ns));
        (views.prefill, views.decode, choice)
    }

    /// A request that is booked or waits.
    #[must_use]
    pub fn request(&self, id: u64) -> Option<&Request> {
        let waiting = || self.queue.iter().find(|(waiting, _)| waiting.ask.id == id).map(|(_, request)| request);
        self.booked.get(&id).map(|kept| &kept.request).or_else(waiting)
    }

    /// A prefill instance's requests, and the time until all of them are done.
    #[must_use]
    pub fn prefill_booked(&self, instance: usize, now_ns: u64) -> (u32, u64) {
        self.prefill.get(instance).map_or((0, 0), |book| (book.jobs.len() as u32, book.wait_ns(now_ns)))
    }

    /// A decode instance's tokens and requests, on their way or there.
    #[must_use]
    pub fn decode_booked(&self, instance: usize, now_ns: u64) -> (u64, u32) {
        let view = self.decode.get(instance).map(|book| book.view(now_ns, now_ns));
        view.map_or((0, 0), |view| (view.tokens, view.requests))
    }

    /// Time of its prefill with the most that anybody has.
    pub(super) fn best_ns(&self, request: &Request) -> u64 {
        let mut scratch = Scratch::default();
        // An unknown context has nothing cached.
        let _ = self.index.find(request.context, &request.hashes, 1, Tiers::OWN, &mut scratch.found);
        let cached = scratch.found.best_blocks().saturating_mul(self.config.block_tokens);
        self.model.predict_ns(request.tokens, cached.min(request.tokens))
    }
}

/// Tells for each instance how many blocks it has, or ever had where `routed`.
fn fill(
    books: &Conductor,
    routed: bool,
    request: &Request,
    tiers: Tiers,
    scratch: &mut Scratch,
    mut tell: impl FnMut(usize, u32),
) {
    let (index, all) = (if routed { &books.routed } else { &books.index }, books.prefill.len());
    // An unknown context has nothing cached.
    if index.find(request.context, &request.hashes, all, tiers, &mut scratch.found).is_err() {
        return;
    }
    for found in scratch.found.matches() {
        let slot = usize::from(found.holder.slot());
        let by_slot = if routed { &books.routed_by_slot } else { &books.by_slot };
        let Some(at) = by_slot.get(slot).map(|at| *at as usize) else { continue };
        let holder = books.prefill.get(at).map(|book| if routed { book.routed } else { book.holder });
        if holder == Some(found.holder) {
            tell(at, found.blocks);
        }
    }
}
