//! What is counted beside the cases: by transport over the whole run, and by groups of threads with deadlines.

use serde::Serialize;

use super::stats::{CaseStats, Samples};
use super::sweep::Case;

/// What one transport did over a whole run, warm-ups included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Transport {
    /// Its name.
    pub transport: &'static str,
    /// Slices done.
    pub operations: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Slices that failed on it and were sent again.
    pub retries: u64,
    /// Slices that went over to another way.
    pub failovers: u64,
}

impl Transport {
    /// Adds counts to the transport's own among `all`.
    pub fn add(self, all: &mut Vec<Self>) {
        match all.iter_mut().find(|other| other.transport == self.transport) {
            None => all.push(self),
            Some(other) => {
                other.operations += self.operations;
                other.bytes += self.bytes;
                other.retries += self.retries;
                other.failovers += self.failovers;
            }
        }
    }

    /// The line for people and scripts.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { transport, operations, bytes, retries, failovers } = self;
        format!(
            "  [transport] name={transport} operations={operations} bytes={bytes} retries={retries} \
             failovers={failovers}"
        )
    }
}

/// The threads of a case that have a deadline, or those that have none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeadlineGroup {
    /// `tight` or `loose`.
    pub group: &'static str,
    /// Its threads.
    pub threads: u64,
    /// Their deadline, in µs; 0 for none.
    pub deadline_us: u64,
    /// Batches done.
    pub operations: u64,
    /// Batches that took longer than that.
    pub missed: u64,
    /// What they moved, in GB/s.
    pub throughput_gbps: f64,
}

impl DeadlineGroup {
    /// Both groups of a case whose first `tight` threads have this deadline; a group without threads is left out.
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

    /// The line for people and scripts.
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
        let one = |transport, bytes| Transport { transport, operations: 1, bytes, retries: 0, failovers: 2 };
        let mut all = Vec::new();
        [one("tcp", 10), one("shm", 20), one("tcp", 30)].into_iter().for_each(|counts| counts.add(&mut all));
        assert_eq!(all.iter().map(|one| (one.transport, one.bytes)).collect::<Vec<_>>(), [("tcp", 40), ("shm", 20)]);
        assert_eq!(all[0].line(), "  [transport] name=tcp operations=2 bytes=40 retries=0 failovers=4");
    }

    #[test]
    fn threads_with_deadlines_are_told_apart() {
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
