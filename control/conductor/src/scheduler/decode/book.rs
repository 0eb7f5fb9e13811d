//! Bookings of a decode instance: the requests in its batch, those that are expected, and the load predicted from both.

use super::outputs::ExpectedOutput;
use crate::cost::{DecodeModel, Factor};
use crate::policy::DecodeView;

/// Assumed duration of every decode in [`DecodeView::later`]: the predictor of the arXiv paper assumes such a constant,
/// whose value is not published.
const DECODE_NS: u64 = 12_000_000_000;

/// Booked decode of a request.
#[derive(Clone, Copy, Debug)]
pub(in crate::scheduler) struct DecodeJob {
    /// Number of the request.
    pub id: u64,
    /// Length of its prompt in tokens.
    pub prompt: u32,
    /// Its expected output; none if nothing is known: then it is expected to stay.
    pub output: Option<ExpectedOutput>,
    /// Time of its start, or the expected one.
    pub start_ns: u64,
}

impl DecodeJob {
    /// Returns the tokens that it has when it ends, as far as that is known.
    fn booked_tokens(&self) -> u64 {
        u64::from(self.prompt) + self.output.map_or(0, |output| u64::from(output.mean))
    }

    /// Returns the tokens of KV cache that it is expected to have at `then_ns`, with steps of this duration; `None` if
    /// it has not started or has ended by then.
    fn resident_at(&self, now_ns: u64, then_ns: u64, step_ns: f64) -> Option<u64> {
        let generated = |until_ns: u64| until_ns.saturating_sub(self.start_ns) as f64 / step_ns;
        let then = generated(then_ns);
        let stays = match self.output {
            _ if self.start_ns > then_ns => false,
            None => true,
            // It may have generated more than was expected at first.
            Some(output) => then < output.total_after(generated(now_ns)),
        };
        // Without an expected output the growth is not known either.
        let grown = if self.output.is_some() { then as u64 } else { 0 };
        stays.then(|| u64::from(self.prompt) + grown)
    }
}

/// Bookings of a decode instance.
pub(in crate::scheduler) struct DecodeBook {
    pub alive: bool,
    /// True if it accepts new requests.
    pub takes: bool,
    capacity: u64,
    /// Reported tokens and requests beyond the bookings.
    pub foreign: (u64, u32),
    /// Ratio of its steps to the model's.
    pub factor: Factor,
    /// Its number among the prefill instances, if it prefills too.
    pub prefill: Option<usize>,
    /// True once it has reported steps: they say more than the durations of its requests.
    pub reports_steps: bool,
    coming: Vec<DecodeJob>,
    running: Vec<DecodeJob>,
}

impl DecodeBook {
    pub(in crate::scheduler) fn new(capacity: u64, prefill: Option<usize>) -> Self {
        Self {
            alive: true,
            takes: true,
            capacity,
            foreign: (0, 0),
            factor: Factor::default(),
            prefill,
            reports_steps: false,
            coming: Vec::new(),
            running: Vec::new(),
        }
    }

    /// Books a request, with the time at which it is expected.
    pub(in crate::scheduler) fn expect(&mut self, job: DecodeJob) {
        self.coming.push(job);
    }

    /// Notes that an expected request is in the batch from now on.
    pub(in crate::scheduler) fn begin(&mut self, id: u64, now_ns: u64) {
        if let Some(at) = self.coming.iter().position(|job| job.id == id) {
            let job = self.coming.swap_remove(at);
            self.running.push(DecodeJob { start_ns: now_ns, ..job });
        }
    }

    /// Returns the booked tokens and requests in the batch.
    pub(in crate::scheduler) fn booked(&self) -> (u64, u32) {
        sum(&self.running, (0, 0))
    }

    pub(in crate::scheduler) fn forget(&mut self, id: u64) {
        self.coming.retain(|job| job.id != id);
        self.running.retain(|job| job.id != id);
    }

    /// Returns the duration of a step of the present batch.
    fn step_ns(&self, model: &DecodeModel) -> f64 {
        let (tokens, requests) = sum(&self.running, self.foreign);
        self.factor.of(model.step_ns(tokens, requests as usize)).max(1) as f64
    }

    /// Returns the tokens and requests that are resident now, with the reported ones beyond the bookings.
    pub(in crate::scheduler) fn resident(&self, now_ns: u64, model: &DecodeModel) -> (u64, u32) {
        let (jobs, step_ns) = (self.running.iter().chain(&self.coming), self.step_ns(model));
        let resident = jobs.filter_map(|job| job.resident_at(now_ns, now_ns, step_ns));
        resident.fold(self.foreign, |(sum, count), tokens| (sum + tokens, count + 1))
    }

    /// Returns [`Self::resident`] as predicted for `then_ns`. Requests whose prefill ends later count too: they come
    /// while one that starts then is still there.
    fn predicted(&self, now_ns: u64, then_ns: u64, model: &DecodeModel) -> (u64, u32) {
        let step_ns = self.step_ns(model);
        let running = self.running.iter().filter_map(|job| job.resident_at(now_ns, then_ns, step_ns));
        let coming = self.coming.iter().filter_map(|job| job.resident_at(now_ns, then_ns.max(job.start_ns), step_ns));
        running.chain(coming).fold(self.foreign, |(sum, count), tokens| (sum + tokens, count + 1))
    }

    /// Returns the present state, and the one predicted for `then_ns`.
    pub(in crate::scheduler) fn view(&self, now_ns: u64, then_ns: u64, model: &DecodeModel) -> DecodeView {
        let running = sum(&self.running, self.foreign);
        let (tokens, requests) = sum(&self.coming, running);
        let stays = |job: &&DecodeJob| job.start_ns <= then_ns && then_ns < job.start_ns.saturating_add(DECODE_NS);
        let later = self.running.iter().chain(&self.coming).filter(stays);
        let later = later.fold((0, 0), |(tokens, count), job| (tokens + job.booked_tokens(), count + 1));
        DecodeView {
            alive: self.alive && self.takes,
            tokens,
            requests,
            capacity: self.capacity,
            running,
            later,
            expected: self.predicted(now_ns, then_ns, model),
            factor: self.factor.0,
            held: 0,
        }
    }
}

/// Adds the booked tokens and the number of `jobs` to `first`.
fn sum(jobs: &[DecodeJob], first: (u64, u32)) -> (u64, u32) {
    jobs.iter().fold(first, |(tokens, count), job| (tokens + job.booked_tokens(), count + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn load_is_predicted_for_the_end_of_a_prefill() {
        let model = DecodeModel { base_ns: 10e6, token_ns: 0.0, request_ns: 0.0 };
        let mut book = DecodeBook::new(1 << 20, None);
        let output = Some(ExpectedOutput { mean: 100, high: 300 });
        book.expect(DecodeJob { id: 1, prompt: 1_000, output, start_ns: 0 });
        book.begin(1, 0);
        book.expect(DecodeJob { id: 2, prompt: 500, output, start_ns: 600 * MS });
        book.expect(DecodeJob { id: 3, prompt: 70, output: None, start_ns: 2_000 * MS });
        let at = |now_ms: u64, then_ms: u64| book.predicted(now_ms * MS, then_ms * MS, &model);
        // Half of the first one's output is there; the others have not generated anything.
        assert_eq!(at(0, 500), (1_050 + 500 + 70, 3));
        assert_eq!(at(0, 900), (1_090 + 530 + 70, 3));
        // The first one has ended, as far as one knows now; later it turns out to be a longer one.
        assert_eq!(at(0, 1_200), (560 + 70, 2));
        assert_eq!(at(1_100, 1_200), (1_120 + 560 + 70, 3));
        // Without an expected output a request stays.
        assert_eq!(at(0, 100_000), (70, 1));
        assert_eq!((book.booked(), book.resident(500 * MS, &model)), ((1_100, 1), (1_050, 1)));
        let view = book.view(0, 500 * MS, &model);
        assert_eq!((view.tokens, view.requests, view.expected), (1_100 + 600 + 70, 3, (1_620, 3)));
        book.foreign = (5, 1);
        assert_eq!(book.predicted(0, 1_200 * MS, &model), (635, 3), "reported load stays");
        book.forget(1);
        assert_eq!(book.resident(500 * MS, &model), (5, 1));
    }
}
