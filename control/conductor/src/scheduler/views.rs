//! Views of the cluster for policies.

use super::decode::{DecodeGate, ExpectedOutput};
use super::queue::admission::least_ns;
use super::{Request, Scheduler, Scratch};
use crate::cost::DecodeModel;
use crate::policy::{Admission, Choice, DecodeView, GroupView, PrefillView, View};

/// Longest time after which decode instances are predicted to be fast enough.
const MOST_DECODE_WAIT_NS: u64 = 600_000_000_000;

/// Time at which a request is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binding {
    /// It arrives, and is queued behind others if it is admitted.
    Later,
    /// It arrives, and is bound at once, behind what instances have booked.
    AtOnce,
    /// It was admitted, and an instance is free for it.
    Queued,
}

/// Views of all instances.
pub(super) struct Views {
    prefill: Vec<PrefillView>,
    decode: Vec<DecodeView>,
    pooled: u32,
    admission: Admission,
    ahead_ns: u64,
    fastest_decode: Option<(usize, u64)>,
    decode_after_ns: u64,
    busiest_ns: u64,
    busiest_fetch_ns: u64,
    holding_decode: Option<usize>,
    output_tokens: u32,
    cache_tokens: u64,
    groups: Vec<GroupView>,
}

impl Scheduler {
    /// Returns the bookings of each instance, and the blocks of this prompt that it has. Decode load is predicted for
    /// the end of the prefill: of one that starts as soon as an instance is free, or behind the queue.
    pub(super) fn views(&self, request: &Request, binding: Binding, now_ns: u64, scratch: &mut Scratch) -> Views {
        let served_by = self.sessions.served_by(request);
        let mut prefill: Vec<PrefillView> = self
            .bookings
            .prefills()
            .iter()
            .enumerate()
            .map(|(at, book)| PrefillView {
                alive: book.alive && book.takes && !request.barred.prefill.contains(&(at as u32)),
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                queued_tokens: book.uncached,
                routed_size: self.caches.routed_tokens(at),
                egress_wait_ns: book.egress_wait_ns(now_ns),
                fetch_wait_ns: book.fetches_until_ns.saturating_sub(now_ns),
                factor: book.factor.0,
                decode: book.decode,
                claimed: self.sessions.claimed_tokens(at, request),
                served_session: served_by == Some(at),
                layer_wise: book.layer_wise,
                ..PrefillView::default()
            })
            .collect();
        self.caches.each_held(request, &mut scratch.found, |at, blocks| prefill[at].held = blocks);
        if self.policy.looks_at_routes() {
            self.caches.each_routed(request, &mut scratch.found, |at, blocks| prefill[at].routed = blocks);
        }
        let tokens = |blocks: u32| blocks.saturating_mul(self.config.block_tokens).min(request.tokens);
        for view in &mut prefill {
            (view.held, view.routed) = (tokens(view.held), tokens(view.routed));
        }
        let alive = prefill.iter().filter(|view| view.alive);
        let done_ns =
            |view: &PrefillView| view.wait_ns.saturating_add(self.model.predict_ns(request.tokens, view.held));
        let soonest_ns = alive.map(done_ns).min().unwrap_or(0);
        let pooled = tokens(self.caches.pooled_blocks(request));
        let cached = prefill.iter().map(|view| view.held).max().unwrap_or(0);
        let best_ns = self.model.predict_ns(request.tokens, cached.max(pooled));
        let (ahead, ahead_ns) = self.before(request, best_ns, now_ns);
        let output = self.decodes.expected(&request.terms);
        let (before, before_ns) = if binding == Binding::Later { (ahead, ahead_ns) } else { (0, 0) };
        let then_ns = now_ns.saturating_add(before_ns).saturating_add(soonest_ns);
        let decoding = self.bookings.decodes().iter().filter(|book| book.alive && book.takes).count();
        let prompt = self.queue.tokens() / self.queue.len().max(1) as u64;
        // Decode instances at the end of the prefill, if that is so much later.
        let decode_after = |later_ns: u64| -> Vec<DecodeView> {
            let served_ns = before_ns.saturating_add(later_ns);
            let queued = self.decodes.share_of(before, served_ns, prompt, output, decoding);
            let views = self.bookings.decodes().iter().enumerate().map(|(at, book)| {
                let view = book.view(now_ns, then_ns.saturating_add(later_ns), self.decodes.model());
                let expected = (view.expected.0.saturating_add(queued.0), view.expected.1.saturating_add(queued.1));
                let held = book.prefill.and_then(|at| prefill.get(at)).map_or(0, |view| view.held);
                let alive = view.alive && !request.barred.decode.contains(&(at as u32));
                DecodeView { alive, expected, held, ..view }
            });
            views.collect()
        };
        let decode = decode_after(0);
        let taking = prefill.iter().filter(|view| view.alive);
        let busiest_ns = taking.clone().map(|view| view.egress_wait_ns).max().unwrap_or(0);
        let busiest_fetch_ns = taking.map(|view| view.fetch_wait_ns).max().unwrap_or(0);
        let fastest_of = |decode: &[DecodeView]| fastest(decode, request.tokens, output, self.decodes.model());
        let fastest_decode = fastest_of(&decode);
        let tbt_ns = self.config.slo.tbt_ns;
        let is_slower_than = |fastest: Option<(usize, u64)>, limit_ns| fastest.is_some_and(|(_, ns)| ns > limit_ns);
        let is_rejected = tbt_ns < u64::MAX
            && binding != Binding::Queued
            && is_slower_than(fastest_decode, self.decodes.gate.limit_ns(tbt_ns));
        let decode_after_ns = if is_rejected {
            let limit_ns = DecodeGate::limit_after_rejection_ns(tbt_ns);
            fast_enough_after_ns(|later_ns| !is_slower_than(fastest_of(&decode_after(later_ns)), limit_ns))
        } else {
            0
        };
        let holding = decode.iter().enumerate().filter(|(_, view)| view.alive && view.held > 0);
        let holding_decode = holding.max_by_key(|(_, view)| view.held).map(|(at, _)| at);
        let output_tokens = output.map_or(0, |output| output.mean);
        let instances = self.bookings.prefills().iter().filter(|book| book.alive).count().max(1) as u64;
        let cache_tokens = self.caches.blocks() as u64 * u64::from(self.config.block_tokens) / instances;
        // A group takes instances that the promises of queued requests were planned on, and bubbles that they wait for:
        // so it gets nothing while others are queued.
        let others = || self.queue.len() - usize::from(self.queue.get(request.id).is_some());
        let groups = if request.terms.groups && others() == 0 {
            self.groups.views(self.bookings.prefills(), &request.barred.prefill)
        } else {
            Vec::new()
        };
        let admission = if request.admitted || binding == Binding::Queued || !self.policy.queues() {
            Admission::NOW
        } else {
            let instances = self.bookings.planned(now_ns);
            let order = self.order(self.bookings.serving(&request.barred.prefill), &instances, now_ns);
            self.queue.admission(request, best_ns, binding == Binding::AtOnce, &order)
        };
        Views {
            prefill,
            decode,
            pooled,
            admission,
            ahead_ns,
            fastest_decode,
            decode_after_ns,
            busiest_ns,
            busiest_fetch_ns,
            holding_decode,
            output_tokens,
            cache_tokens,
            groups,
        }
    }

    /// Returns the view of the cluster for a policy.
    pub(super) fn view<'a>(&'a self, views: &'a Views, now_ns: u64) -> View<'a> {
        View {
            now_ns,
            prefill: &views.prefill,
            decode: &views.decode,
            model: &self.model,
            decode_model: self.decodes.model(),
            slo: self.config.slo,
            tbt_limit_ns: self.decodes.gate.limit_ns(self.config.slo.tbt_ns),
            token_bytes: self.config.token_bytes,
            nic_bytes_s: self.config.nic_bytes_s,
            block_tokens: self.config.block_tokens,
            pooled: views.pooled,
            ahead_ns: views.ahead_ns,
            placed: self.placed,
            fastest_decode: views.fastest_decode,
            decode_after_ns: views.decode_after_ns,
            busiest_ns: views.busiest_ns,
            admission: views.admission,
            busiest_fetch_ns: views.busiest_fetch_ns,
            holding_decode: views.holding_decode,
            output_tokens: views.output_tokens,
            hands_over: self.config.hands_over,
            cache_tokens: views.cache_tokens,
            groups: &views.groups,
            offered: self.arrivals.offered(now_ns),
            queued: self.queue.len(),
        }
    }

    /// Returns the number of queued requests that are served before a request, and their work, divided by the number of
    /// instances.
    #[must_use]
    pub fn ahead(&self, request: &Request, now_ns: u64) -> (usize, u64) {
        if self.queue.is_empty() {
            return (0, 0);
        }
        self.before(request, self.best_ns(request), now_ns)
    }

    /// Returns [`Self::ahead`] of a request whose prefill takes `best_ns` with the best cache of any instance. The work
    /// is divided by the number of accepting instances that the request does not exclude.
    fn before(&self, request: &Request, best_ns: u64, now_ns: u64) -> (usize, u64) {
        if self.queue.is_empty() {
            return (0, 0);
        }
        let serving = self.bookings.serving(&request.barred.prefill);
        let (count, work_ns) = self.queue.before(request, best_ns, &self.order(serving, &[], now_ns));
        (count, work_ns / serving)
    }

    /// Returns the views of the instances for a request, and the decision that the policy would make.
    #[must_use]
    pub fn explain(&self, request: &Request, now_ns: u64) -> (Vec<PrefillView>, Vec<DecodeView>, Choice) {
        let views = self.views(request, Binding::AtOnce, now_ns, &mut Scratch::default());
        let choice = self.policy.choose_now(&request.ask(), &self.view(&views, now_ns));
        (views.prefill, views.decode, choice)
    }

    /// Returns a booked or queued request.
    #[must_use]
    pub fn request(&self, id: u64) -> Option<&Request> {
        self.reservations.get(id).map(|kept| &kept.request).or_else(|| self.queue.get(id))
    }

    /// Returns the number of a prefill instance's requests, and the time until all of them are done.
    #[must_use]
    pub fn prefill_booked(&self, instance: usize, now_ns: u64) -> (u32, u64) {
        self.bookings.prefills().get(instance).map_or((0, 0), |book| (book.jobs.len() as u32, book.wait_ns(now_ns)))
    }

    /// Returns the present state of a decode instance.
    #[must_use]
    pub fn decode_booked(&self, instance: usize, now_ns: u64) -> DecodeView {
        let view = self.bookings.decodes().get(instance).map(|book| book.view(now_ns, now_ns, self.decodes.model()));
        view.unwrap_or_default()
    }

    /// Predicts the duration of a request's prefill with the best cache of any instance.
    pub(super) fn best_ns(&self, request: &Request) -> u64 {
        let cached = self.caches.best_blocks(request).saturating_mul(self.config.block_tokens);
        self.model.predict_ns(request.tokens, cached.min(request.tokens))
    }
}

/// Returns the least time, to a quarter of a second, after which decode instances are fast enough; 0 if they are not
/// within [`MOST_DECODE_WAIT_NS`].
fn fast_enough_after_ns(is_enough: impl Fn(u64) -> bool) -> u64 {
    const STEP_NS: u64 = 250_000_000;
    let mut enough_ns = STEP_NS;
    while !is_enough(enough_ns) {
        enough_ns *= 2;
        if enough_ns > MOST_DECODE_WAIT_NS {
            return 0;
        }
    }
    let too_early_ns = if enough_ns > STEP_NS { enough_ns / 2 } else { 0 };
    least_ns(too_early_ns, enough_ns, STEP_NS, is_enough)
}

/// Returns the decode instance with the shortest step if it gets a request with this prompt and expected output; a full
/// one only if all are full. An instance has room for a request whose output is a long one.
fn fastest(
    decode: &[DecodeView],
    prompt: u32,
    output: Option<ExpectedOutput>,
    model: &DecodeModel,
) -> Option<(usize, u64)> {
    let ExpectedOutput { mean, high } = output.unwrap_or(ExpectedOutput { mean: 0, high: 0 });
    let weigh = |(at, decode): (usize, &DecodeView)| {
        let (tokens, requests) = (decode.expected.0.saturating_add(u64::from(prompt)), decode.expected.1 + 1);
        let step_ns = decode.step_ns(model, tokens.saturating_add(u64::from(mean)), requests);
        (tokens.saturating_add(u64::from(high)) > decode.capacity, step_ns, at)
    };
    let alive = decode.iter().enumerate().filter(|(_, decode)| decode.alive);
    alive.map(weigh).min().map(|(_, step_ns, at)| (at, step_ns))
}
