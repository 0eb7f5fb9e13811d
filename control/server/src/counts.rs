//! Counters of connections, calls and HTTP requests, and the recording of metrics at a scrape. Counting is an addition
//! to a plain number.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use kvplane_rpc::{Event, Rejection};
use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

/// The numbers. Methods, paths and reasons are fixed sets, so the tables are small.
#[derive(Clone, Default)]
pub(crate) struct Numbers {
    pub(crate) connections: u64,
    pub(crate) bad_frames: u64,
    pub(crate) rejected: BTreeMap<Rejection, u64>,
    /// Calls by method, and by whether they were answered or refused.
    pub(crate) calls: BTreeMap<(&'static str, bool), u64>,
    /// HTTP requests, by path and status.
    pub(crate) http: BTreeMap<(&'static str, u16), u64>,
}

impl Numbers {
    /// Returns the calls of a method: those answered, and those refused.
    pub(crate) fn calls_of(&self, method: &str) -> (u64, u64) {
        let count = |ok| {
            let found = self.calls.iter().find(|((name, was), _)| *name == method && *was == ok);
            found.map_or(0, |(_, count)| *count)
        };
        (count(true), count(false))
    }
}

/// Counters of one control plane.
#[derive(Default)]
pub(crate) struct Counts {
    numbers: Mutex<Numbers>,
}

impl Counts {
    fn with<T>(&self, change: impl FnOnce(&mut Numbers) -> T) -> T {
        // Numbers are consistent at every point, so a panic elsewhere does not spoil them.
        change(&mut self.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts an event of the endpoint of calls.
    pub(crate) fn observe(&self, event: Event) {
        self.with(|numbers| match event {
            Event::Connected => numbers.connections += 1,
            Event::Disconnected => numbers.connections = numbers.connections.saturating_sub(1),
            Event::Rejected(reason) => *numbers.rejected.entry(reason).or_default() += 1,
            Event::BadFrame => numbers.bad_frames += 1,
            Event::Called { method, ok } => *numbers.calls.entry((method, ok)).or_default() += 1,
        });
    }

    /// Counts an HTTP request by the status of its answer.
    pub(crate) fn observe_http(&self, path: &'static str, status: u16) {
        self.with(|numbers| *numbers.http.entry((path, status)).or_default() += 1);
    }

    /// Returns a copy of the present numbers.
    pub(crate) fn numbers(&self) -> Numbers {
        self.with(|numbers| numbers.clone())
    }
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricKind {
    Counter,
    Gauge,
}

impl MetricKind {
    /// Describes a metric of this kind to the recorder.
    pub(crate) fn describe(self, name: &'static str, help: &'static str) {
        match self {
            Self::Counter => describe_counter!(name, Unit::Count, help),
            Self::Gauge => describe_gauge!(name, Unit::Count, help),
        }
    }

    /// Records the value of a metric without labels.
    pub(crate) fn set(self, name: &'static str, value: u64) {
        match self {
            Self::Counter => counter!(name).absolute(value),
            Self::Gauge => gauge!(name).set(value as f64),
        }
    }

    /// Describes metrics of this kind, each with its help, and records their values; they have no labels.
    pub(crate) fn record(self, metrics: &[(&'static str, &'static str, u64)]) {
        for &(name, help, value) in metrics {
            self.describe(name, help);
            self.set(name, value);
        }
    }

    /// Records the value of a series. The label's value may come from a peer.
    pub(crate) fn set_labelled(self, name: &'static str, label: &'static str, of: &str, value: u64) {
        // The exporter takes a backslash before a quote for an escape: without this, two names could become one series,
        // and a scraper refuses the text as a whole.
        let of = of.replace('\\', "\\\\");
        match self {
            Self::Counter => counter!(name, label => of).absolute(value),
            Self::Gauge => gauge!(name, label => of).set(value as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use metrics::with_local_recorder;
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    #[test]
    fn names_of_peers_stay_apart_and_cannot_break_the_format() {
        let names = ["a", "a\"b", "a\\\"b", "a\\b", "a\\\\b", "a\nb", "a\\nb", "a\\", "{}"];
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, || {
            MetricKind::Gauge.describe("g", "What.");
            names.iter().for_each(|name| MetricKind::Gauge.set_labelled("g", "of", name, 7));
        });
        let text = recorder.handle().render();
        let expected = names.map(|name| {
            let escaped = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            format!("g{{of=\"{escaped}\"}} 7")
        });
        let series: BTreeSet<&str> = text.lines().filter(|line| line.starts_with("g{")).collect();
        assert_eq!(series, expected.iter().map(String::as_str).collect(), "{text}");
        assert!(text.starts_with("# HELP g What.\n# TYPE g gauge\n"), "{text}");
    }

    #[test]
    fn calls_are_counted_by_method_and_result() {
        let counts = Counts::default();
        for ok in [true, false, true] {
            counts.observe(Event::Called { method: "join", ok });
        }
        counts.observe(Event::Disconnected);
        counts.observe(Event::Connected);
        counts.observe_http("/health", 200);
        let numbers = counts.numbers();
        assert_eq!((numbers.calls_of("join"), numbers.calls_of("leave")), ((2, 1), (0, 0)));
        assert_eq!((numbers.connections, numbers.http[&("/health", 200)]), (1, 1), "none is below 0");
    }
}
