//! Counters beside the cases: by transport over the whole run, and by groups of threads with deadlines.

use kvplane::{Histogram, SlowTransfer};
use serde::{Serialize, Serializer};

use super::stats::{CaseStats, Samples};
use super::sweep::Case;

/// Counters of one transport over a whole run, warm-ups included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Name of the transport.
    pub transport: &'static str,
    /// Completed slices.
    pub operations: u64,
    /// Bytes of the completed slices.
    pub bytes: u64,
    /// Slices that failed on the transport and were retried.
    pub retries: u64,
    /// Slices that failed over to another path.
    pub failovers: u64,
    /// Time that slices waited in the queue.
    pub queue: Histogram,
    /// Time from the submission of a slice to its completion.
    pub service: Histogram,
}

/// Times in µs: upper bounds, within a quarter of the true value.
#[derive(Serialize)]
struct Times {
    p50_us: f64,
    p99_us: f64,
    queue_p50_us: f64,
    queue_p99_us: f64,
}

impl Serialize for Transport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Row {
            transport: &'static str,
            operations: u64,
            bytes: u64,
            retries: u64,
            failovers: u64,
            #[serde(flatten)]
            times: Times,
        }
        let Self { transport, operations, bytes, retries, failovers, .. } = *self;
        Row { transport, operations, bytes, retries, failovers, times: self.times() }.serialize(serializer)
    }
}

/// Slow transfer, with the time of its stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Slow {
    /// Transport that carried the transfer last.
    pub transport: &'static str,
    /// Bytes of the transfer.
    pub bytes: u64,
    /// Number of earlier attempts.
    pub attempts: u8,
    /// Time of earlier attempts, in µs.
    pub earlier_us: u64,
    /// Time of waiting for a rail, in µs.
    pub queue_us: u64,
    /// Time behind other transfers on the same connection, in µs.
    pub lane_us: u64,
    /// Time from then to the completion, in µs.
    pub service_us: u64,
}

impl Slow {
    /// Converts an engine's record of a slow transfer.
    #[must_use]
    pub const fn of(slow: &SlowTransfer) -> Self {
        Self {
            transport: slow.transport.name(),
            bytes: slow.bytes,
            attempts: slow.attempts,
            earlier_us: slow.earlier_ns / 1000,
            queue_us: slow.queue_ns / 1000,
            lane_us: slow.lane_ns / 1000,
            service_us: slow.service_ns / 1000,
        }
    }
}

impl Transport {
    /// Adds the counts to those of the same transport in `all`.
    pub fn add(self, all: &mut Vec<Self>) {
        match all.iter_mut().find(|other| other.transport == self.transport) {
            None => all.push(self),
            Some(other) => {
                other.operations += self.operations;
                other.bytes += self.bytes;
                other.retries += self.retries;
                other.failovers += self.failovers;
                other.queue.merge(&self.queue);
                other.service.merge(&self.service);
            }
        }
    }

    /// Formats the line for operators and scripts.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { transport, operations, bytes, retries, failovers, .. } = self;
        let Times { p50_us, p99_us, queue_p99_us, .. } = self.times();
        format!(
            "  [transport] name={transport} operations={operations} bytes={bytes} retries={retries} \
             failovers={failovers} p50_us={p50_us:.1} p99_us={p99_us:.1} queue_p99_us={queue_p99_us:.1}"
        )
    }

    fn times(&self) -> Times {
        let us = |times: &Histogram, share| times.quantile_ns(share) as f64 / 1e3;
        Times {
            p50_us: us(&self.service, 0.5),
            p99_us: us(&self.service, 0.99),
            queue_p50_us: us(&self.queue, 0.5),
            queue_p99_us: us(&self.queue, 0.99),
        }
    }
}

/// Group of a case's threads: those with a deadline, or those without.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeadlineGroup {
    /// `tight` or `loose`.
    pub group: &'static str,
    /// Number of threads.
    pub threads: u64,
    /// Deadline of a batch, in µs; 0 for none.
    pub deadline_us: u64,
    /// Completed batches.
    pub operations: u64,
    /// Batches that missed the deadline.
    pub missed: u64,
    /// Throughput of the group, in GB/s.
    pub throughput_gbps: f64,
}

impl DeadlineGroup {
    /// Returns both groups of a case whose first `tight` threads have this deadline; a group without threads is left
    /// out.
    #[must_use]
    pub fn of(case: Case, threads: &[(Samples, u64)], tight: usize, deadline_us: u64) -> Vec<Self> {
        let (with, without) = threads.split_at(tight.min(threads.len()));
        let group = |group, threads: &[(Samples, u64)], deadline_us| {
            let stats = CaseStats::new(case, threads, None);
            let kept: u64 = threads.iter().map(|(samples, _)| samples.kept().deadline).sum();
            Self {
                group,
                threads: threads.len() as u64,
                deadline_us,
                operations: stats.batches,
                missed: stats.batches - kept,
                throughput_gbps: stats.bandwidth_gb_s,
            }
        };
        let groups = [group("tight", with, deadline_us), group("loose", without, 0)];
        groups.into_iter().filter(|group| group.threads > 0).collect()
    }

    /// Formats the line for operators and scripts.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { group, threads, deadline_us, operations, missed, throughput_gbps } = self;
        let (deadline, missed) = match deadline_us {
            0 => (String::new(), String::new()),
            _ => (format!(" deadline_us={deadline_us}"), format!(" missed={missed}")),
        };
        format!(
            "  [deadline-{group}] threads={threads}{deadline} operations={operations} \
             throughput={throughput_gbps:.6} GB/s{missed}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::Promises;
    use super::*;

    #[test]
    fn counts_of_one_transport_add_up() {
        let one = |transport, bytes: u64| {
            let mut counts = Transport {
                transport,
                operations: 1,
                bytes,
                retries: 0,
                failovers: 2,
                queue: Histogram::new(),
                service: Histogram::new(),
            };
            counts.queue.add(100);
            counts.service.add(bytes * 100);
            counts
        };
        let mut all = Vec::new();
        [one("tcp", 10), one("shm", 20), one("tcp", 30)].into_iter().for_each(|counts| counts.add(&mut all));
        assert_eq!(all.iter().map(|one| (one.transport, one.bytes)).collect::<Vec<_>>(), [("tcp", 40), ("shm", 20)]);
        let line =
            "  [transport] name=tcp operations=2 bytes=40 retries=0 failovers=4 p50_us=1.0 p99_us=3.1 queue_p99_us=0.1";
        assert_eq!(all[0].line(), line);
        let json = serde_json::to_value(&all[0]).unwrap();
        assert_eq!((&json["transport"], &json["bytes"], &json["p99_us"]), (&"tcp".into(), &40.into(), &3.072.into()));
    }

    #[test]
    fn threads_are_grouped_by_deadline() {
        let case = Case { threads: 3, block_bytes: 1000, batch: 1 };
        let thread = |deadline_ns| {
            let promises = Promises { deadline_ns, ..Promises::default() };
            let mut samples = Samples::new(16, 1, 0).with_promises(promises);
            [500, 1500].into_iter().for_each(|ns| samples.record(ns));
            (samples, 2000)
        };
        let threads = [thread(1000), thread(u64::MAX), thread(u64::MAX)];
        let lines: Vec<_> = DeadlineGroup::of(case, &threads, 1, 1).iter().map(DeadlineGroup::line).collect();
        let tight = "  [deadline-tight] threads=1 deadline_us=1 operations=2 throughput=1.000000 GB/s missed=1";
        let loose = "  [deadline-loose] threads=2 operations=4 throughput=2.000000 GB/s";
        assert_eq!(lines, [tight, loose]);
        assert_eq!(DeadlineGroup::of(case, &threads, 9, 1).len(), 1);
    }
}
