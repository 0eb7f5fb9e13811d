//! Decodes: what is learned of them, and whether requests are being rejected because of decode load; the bookings of an
//! instance.

mod book;
mod gate;
mod outputs;

use super::request::{RequestOutput, ServiceTerms};
use crate::cost::{DecodeModel, DecodeSteps, LearnedDecode};

pub(super) use book::{DecodeBook, DecodeJob};
pub(super) use gate::DecodeGate;
pub(super) use outputs::ExpectedOutput;
pub use outputs::OutputErrors;
use outputs::OutputLengths;

/// Knowledge of a pool about decodes, from finished requests and reports, and its gate of admission.
pub struct Decodes {
    learned: LearnedDecode,
    outputs: OutputLengths,
    pub(super) gate: DecodeGate,
    /// False if nothing is learned.
    learns: bool,
}

impl Decodes {
    pub(super) fn new(initial: DecodeModel, learns: bool) -> Self {
        let (learned, outputs) = (LearnedDecode::new(initial), OutputLengths::new());
        Self { learned, outputs, gate: DecodeGate::default(), learns }
    }

    /// Returns the model of decode steps as fitted so far.
    #[must_use]
    pub const fn learned(&self) -> &LearnedDecode {
        &self.learned
    }

    /// Returns the median and the 90th percentile of the outputs of the last finished requests, in tokens; `None` if
    /// too few have finished.
    #[must_use]
    pub fn output_quantiles(&self) -> Option<(u32, u32)> {
        self.outputs.quantiles()
    }

    /// Returns the errors of the outputs that were expected of finished requests; `None` before the first one.
    #[must_use]
    pub fn output_errors(&self) -> Option<OutputErrors> {
        self.outputs.errors()
    }

    pub(super) const fn model(&self) -> &DecodeModel {
        self.learned.model()
    }

    /// Returns the output that a request is expected to have; `None` if nothing is known.
    pub(super) fn expected(&self, terms: &ServiceTerms) -> Option<ExpectedOutput> {
        self.outputs.expected(terms)
    }

    /// Learns from the output of a request.
    pub(super) fn finished(&mut self, terms: &ServiceTerms, output: RequestOutput) {
        if self.learns && output.tokens > 0 {
            self.outputs.finished(terms, output.tokens);
        }
    }

    /// Refits the model of decode steps by steps of a decode instance: those that it reports, or else those of its
    /// requests. `usual` is the median of the factors of all instances.
    pub(super) fn learn_steps(&mut self, book: &mut DecodeBook, usual: f64, steps: &DecodeSteps, reported: bool) {
        if !self.learns || (book.reports_steps && !reported) {
            return;
        }
        let factor = book.factor.0;
        if let Some((predicted_ns, took_ns)) = self.learned.report(steps, factor, factor / usual) {
            book.reports_steps |= reported;
            book.factor.report(predicted_ns, took_ns);
        }
    }

    /// Returns the tokens and requests that each of `instances` will have of `ahead` queued requests that are served
    /// within `ahead_ns`, with prompts of `prompt` tokens: divided evenly, as long as their outputs last.
    pub(super) fn share_of(
        &self,
        ahead: usize,
        ahead_ns: u64,
        prompt: u64,
        output: Option<ExpectedOutput>,
        instances: usize,
    ) -> (u64, u32) {
        if ahead == 0 || instances == 0 {
            return (0, 0);
        }
        let generated = output.map_or(0, |output| output.mean);
        let mean_tokens = prompt + u64::from(generated);
        let lasts_ns = self.model().step_ns(mean_tokens, 1) as f64 * f64::from(generated);
        // Those that are served first have ended by then.
        let stays = if output.is_some() { (lasts_ns / ahead_ns.max(1) as f64).min(1.0) } else { 1.0 };
        let requests = ahead as f64 * stays / instances as f64;
        ((requests * mean_tokens as f64) as u64, requests.round() as u32)
    }
}
