//! What a policy is shown.

use super::{Conductor, Request, Scratch};
use crate::index::{PrefixIndex, Tier, Tiers};
use crate::policy::{DecodeView, PrefillView, View, Waiting};

/// The views of all instances.
pub(super) struct Views {
    prefill: Vec<PrefillView>,
    decode: Vec<DecodeView>,
    pooled: u32,
    ahead_ns: u64,
}

impl Conductor {
    /// What each instance has booked and has of this prompt.
    pub(super) fn views(&self, request: &Request, now_ns: u64, scratch: &mut Scratch) -> Views {
        let mut prefill: Vec<PrefillView> = self
            .prefill
            .iter()
            .map(|book| PrefillView {
                alive: book.alive,
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                queued_tokens: book.uncached,
                routed_size: book.routed_tokens,
                egress_wait_ns: book.egress_until_ns.saturating_sub(now_ns),
                factor: book.factor.0,
                ..PrefillView::default()
            })
            .collect();
        let all = prefill.len();
        let holder = |at: usize| self.prefill[at].holder;
        let stored = Tiers::only(Tier::Dram);
        fill(&self.index, request, Tiers::OWN, scratch, all, holder, |at, tokens| prefill[at].held = tokens);
        fill(&self.index, request, stored, scratch, all, holder, |at, tokens| prefill[at].stored = tokens);
        let routed = |at: usize| self.prefill[at].routed;
        fill(&self.routed, request, Tiers::OWN, scratch, all, routed, |at, tokens| prefill[at].routed = tokens);
        let tokens = |blocks: u32| blocks.saturating_mul(self.config.block_tokens).min(request.tokens);
        for view in &mut prefill {
            (view.held, view.stored, view.routed) = (tokens(view.held), tokens(view.stored), tokens(view.routed));
        }
        let alive = prefill.iter().filter(|view| view.alive);
        let soonest_ns =
            alive.map(|view| view.wait_ns + self.model.predict_ns(request.tokens, view.held)).min().unwrap_or(0);
        let decode = self.decode.iter().map(|book| book.view(now_ns, now_ns + soonest_ns)).collect();
        let pooled = self.index.held_by_anybody(request.context, &request.hashes, stored).unwrap_or(0);
        let (pooled, cached) = (tokens(pooled), prefill.iter().map(|view| view.held).max().unwrap_or(0));
        let ahead_ns = self.ahead_ns(request, self.model.predict_ns(request.tokens, cached.max(pooled)), now_ns);
        Views { prefill, decode, pooled, ahead_ns }
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
        }
    }

    /// Work of those who wait and would go before a request, divided among the instances.
    fn ahead_ns(&self, request: &Request, best_ns: u64, now_ns: u64) -> u64 {
        if self.queue.is_empty() {
            return 0;
        }
        let slo = self.config.slo;
        let own = self.policy.rank(&Waiting { ask: request.ask(), best_ns }, now_ns, slo);
        let before = self.queue.iter().filter(|(other, _)| self.policy.rank(other, now_ns, slo) <= own);
        let alive = self.prefill.iter().filter(|book| book.alive).count().max(1) as u64;
        before.map(|(other, _)| other.best_ns).sum::<u64>() / alive
    }

    /// Time of its prefill with the most that anybody has.
    pub(super) fn best_ns(&self, request: &Request) -> u64 {
        let mut scratch = Scratch::default();
        // An unknown context has nothing cached.
        let _ = self.index.find(request.context, &request.hashes, 1, Tiers::OWN, &mut scratch.found);
        let cached = scratch.found.best_blocks().saturating_mul(self.config.block_tokens);
        self.model.predict_ns(request.tokens, cached.min(request.tokens))
    }

    /// Whether any instance takes one of those who wait.
    pub(super) fn anybody_takes(&self, now_ns: u64) -> bool {
        self.prefill.iter().filter(|book| book.alive).any(|book| {
            self.policy.takes(&PrefillView {
                alive: true,
                wait_ns: book.wait_ns(now_ns),
                requests: book.jobs.len() as u32,
                ..PrefillView::default()
            })
        })
    }
}

/// Tells for each instance how many blocks it has.
fn fill(
    index: &PrefixIndex,
    request: &Request,
    tiers: Tiers,
    scratch: &mut Scratch,
    all: usize,
    holder: impl Fn(usize) -> crate::index::HolderId,
    mut tell: impl FnMut(usize, u32),
) {
    // An unknown context has nothing cached.
    if index.find(request.context, &request.hashes, all, tiers, &mut scratch.found).is_err() {
        return;
    }
    for found in scratch.found.matches() {
        // Instances are registered one by one, so slots follow their numbers until one is lost.
        let slot = usize::from(found.holder.slot());
        let at = if slot < all && holder(slot) == found.holder {
            Some(slot)
        } else {
            (0..all).find(|at| holder(*at) == found.holder)
        };
        if let Some(at) = at {
            tell(at, found.blocks);
        }
    }
}
