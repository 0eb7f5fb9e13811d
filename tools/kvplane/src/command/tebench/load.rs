//! Load of a benchmark: operation, sizes, threads and classes of service of a run, and the work of each thread in a
//! case.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::BoolishValueParser;
use kvplane::{Intent, SubmitOptions};
use kvplane_tools::tebench::classes::{self, engine_weights};
use kvplane_tools::tebench::{Case, Class, Promises, Range, Sweep, Workload};

use super::{Failure, OpType, values};
use crate::command::process::durations;
use crate::command::size;

/// Default time limit of a batch.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Flags of the load: operation, sizes, threads.
#[derive(Args, Clone)]
pub(super) struct LoadFlags {
    /// Operation to measure.
    #[arg(long = "op_type", value_enum, default_value = "read")]
    pub(super) op_type: OpType,
    /// Write, read back and compare every block, with patterns that follow from the address.
    #[arg(long = "check_consistency", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub(super) check_consistency: bool,
    /// Smallest block size, in bytes.
    #[arg(long = "start_block_size", value_parser = size::parse, default_value = "4096")]
    start_block_size: u64,
    /// Largest block size, in bytes; sizes double from the smallest.
    #[arg(long = "max_block_size", value_parser = size::parse, default_value = "64M")]
    max_block_size: u64,
    /// Smallest batch size, in requests.
    #[arg(long = "start_batch_size", default_value_t = 1)]
    start_batch_size: u64,
    /// Largest batch size, in requests; sizes double from the smallest.
    #[arg(long = "max_batch_size", default_value_t = 1)]
    max_batch_size: u64,
    /// Smallest number of threads.
    #[arg(long = "start_num_threads", default_value_t = 1)]
    start_num_threads: u64,
    /// Largest number of threads; numbers double from the smallest.
    #[arg(long = "max_num_threads", default_value_t = 1)]
    max_num_threads: u64,
    /// Duration of each case after the warm-up, in seconds; fractions are allowed.
    #[arg(long = "duration", default_value = "5", value_parser = values::seconds)]
    pub(super) duration: f64,
    /// Warm-up before each case, in seconds.
    #[arg(long = "warm_up", default_value = "1", value_parser = values::seconds_or_none)]
    pub(super) warm_up: f64,
    /// Offset in each of the target's buffers, in bytes, at which transfers begin.
    #[arg(long = "target_offset", value_parser = size::parse, default_value = "0")]
    pub(super) target_offset: u64,
    /// Range of the target's buffer that is used, in bytes. 0: all of it.
    #[arg(long = "target_range_size", value_parser = size::parse, default_value = "0")]
    pub(super) target_range_size: u64,
    /// Minimum interval between the starts of two batches of a thread, in microseconds.
    #[arg(long = "request_interval_us", default_value_t = 0, value_parser = durations::microseconds())]
    pub(super) request_interval_us: u64,
    /// Time limit of a batch, in microseconds. 0: 10 s.
    #[arg(long = "timeout_us", default_value_t = 0, value_parser = durations::microseconds())]
    timeout_us: u64,
    /// Send a notice to the target after each batch, as a part of it.
    #[arg(long = "notifi", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub(super) notifi: bool,
    /// Deadline of the batches of tight threads, in microseconds: they have priority over other batches. 0: none.
    #[arg(long = "deadline_us", default_value_t = 0, value_parser = durations::microseconds())]
    deadline_us: u64,
    /// Number of tight threads, counted from the first thread.
    #[arg(long = "deadline_tight_threads", default_value_t = 0)]
    deadline_tight_threads: u64,
    /// Share connections between threads, so that deadlines of tight threads are kept at the cost of the others.
    #[arg(long = "deadline_bw_arbitration", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    deadline_bw_arbitration: bool,
    /// Purpose of all transfers, which decides their priority.
    #[arg(long = "tent_intent_type", default_value = "unspec", value_parser = classes::intent_named)]
    tent_intent_type: Intent,
    /// Classes of service that share the engine by weight: name:threads:slo_us:weight[:isolated_gbps],...
    #[arg(long = "qos_classes", default_value = "")]
    qos_classes: String,
    /// Classes of service like --qos_classes, as a JSON array of objects.
    #[arg(long = "qos_classes_json", default_value = "")]
    qos_classes_json: String,
    /// Classes of service with different loads, instead of a sweep: a JSON array of objects with name, threads,
    /// block_size, batch_size, intent_type, slo_us, weight, and optionally deadline_us and isolated_gbps.
    #[arg(long = "workload_classes_json", default_value = "")]
    workload_classes_json: String,
    /// Link capacity, in GB/s, to which the throughput of all classes is related. 0: unknown.
    #[arg(long = "qos_link_capacity_gbps", default_value = "0", value_parser = values::capacity)]
    pub(super) qos_link_capacity_gbps: f64,
    /// File to append a record of the classes to for each case, as JSON lines.
    #[arg(long = "qos_output_jsonl")]
    pub(super) qos_output_jsonl: Option<PathBuf>,
}

/// Work of the threads.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// All threads do the same, by a sweep; there may be no classes.
    Sweep(Sweep, Vec<Class>),
    /// Each class has a load of its own.
    Mixed(Vec<Workload>),
}

/// Work of one thread in a case.
#[derive(Clone, Debug)]
pub(super) struct Lot {
    pub(super) block_bytes: u64,
    pub(super) batch: u64,
    /// Deadline, priority, tenant and weight of its batches.
    pub(super) options: SubmitOptions,
    pub(super) promises: Promises,
}

impl LoadFlags {
    /// Returns the work, after checking that all flags fit together.
    pub(super) fn work(&self, total_buffer_bytes: u64) -> Result<Work, Failure> {
        if self.check_consistency && matches!(self.op_type, OpType::WriteSeed | OpType::ReadVerify) {
            return Err("--check_consistency writes and reads by itself: omit --op_type".into());
        }
        let range = |start, max| Range { start, max };
        let threads = range(self.start_num_threads, self.max_num_threads);
        let blocks = range(self.start_block_size, self.max_block_size);
        let batches = range(self.start_batch_size, self.max_batch_size);
        let sweep = Sweep::new(threads, blocks, batches, total_buffer_bytes)?;
        if self.deadline_tight_threads > self.max_num_threads {
            let (tight, most) = (self.deadline_tight_threads, self.max_num_threads);
            return Err(format!("--deadline_tight_threads is {tight} but max_num_threads {most}").into());
        }
        let given = [
            ("--qos_classes", &self.qos_classes),
            ("--qos_classes_json", &self.qos_classes_json),
            ("--workload_classes_json", &self.workload_classes_json),
        ];
        let mut given = given.into_iter().filter(|(_, text)| !text.is_empty());
        let Some((flag, text)) = given.next() else {
            return match &self.qos_output_jsonl {
                Some(_) => Err("--qos_output_jsonl has nothing to record without classes".into()),
                None => Ok(Work::Sweep(sweep, Vec::new())),
            };
        };
        if let Some((other, _)) = given.next() {
            return Err(format!("{flag} and {other} both define classes: give one").into());
        }
        let named = |error: classes::ClassError| format!("{flag}: {error}");
        if self.start_num_threads != self.max_num_threads {
            let (start, max) = (self.start_num_threads, self.max_num_threads);
            let words = format!("{flag} needs as many threads in every case: start_num_threads is {start}, max {max}");
            return Err(words.into());
        }
        if flag == "--workload_classes_json" {
            return self.mixed(classes::parse_workloads(text).map_err(named)?, total_buffer_bytes);
        }
        let parse = if flag == "--qos_classes" { classes::parse } else { classes::parse_json };
        let found = parse(text).map_err(named)?;
        classes::check_threads(&found, self.start_num_threads).map_err(named)?;
        Ok(Work::Sweep(sweep, found))
    }

    fn mixed(&self, found: Vec<Workload>, total_buffer_bytes: u64) -> Result<Work, Failure> {
        let classes: Vec<Class> = found.iter().map(|workload| workload.class.clone()).collect();
        let threads = self.start_num_threads;
        classes::check_threads(&classes, threads).map_err(|error| format!("--workload_classes_json: {error}"))?;
        if self.tent_intent_type != Intent::Unspecified {
            return Err("--tent_intent_type is a setting of each class: not with --workload_classes_json".into());
        }
        if self.deadline_us != 0 || self.deadline_tight_threads != 0 {
            return Err("--deadline_us is a setting of each class: not with --workload_classes_json".into());
        }
        let slot = found.iter().map(|workload| workload.block_bytes * workload.batch).max().unwrap_or(0);
        if slot.checked_mul(threads).is_none_or(|bytes| bytes > total_buffer_bytes) {
            let words = format!("{threads} threads with {slot} bytes each need more than total_buffer_size");
            return Err(format!("{words} {total_buffer_bytes}").into());
        }
        Ok(Work::Mixed(found))
    }

    /// Returns true if the flags request features that only the engine has, not sessions.
    pub(super) fn needs_engine(&self) -> bool {
        let classes = [&self.qos_classes, &self.qos_classes_json, &self.workload_classes_json];
        self.notifi
            || self.deadline_us > 0
            || self.deadline_bw_arbitration
            || self.tent_intent_type != Intent::Unspecified
            || classes.iter().any(|text| !text.is_empty())
    }

    /// Returns the number of sets of connections: one if classes or deadlines compete with each other, else one for
    /// each thread.
    pub(super) fn initiators(&self) -> usize {
        let classes = [&self.qos_classes, &self.qos_classes_json, &self.workload_classes_json];
        match self.deadline_bw_arbitration || classes.iter().any(|text| !text.is_empty()) {
            true => 1,
            false => self.max_num_threads.clamp(1, 64) as usize,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        if self.timeout_us == 0 { TIMEOUT } else { Duration::from_micros(self.timeout_us) }
    }

    /// Returns the deadline of tight threads and their number; `None` if there is no deadline.
    pub(super) fn tight(&self) -> Option<(u64, usize)> {
        (self.deadline_us > 0).then_some((self.deadline_us, self.deadline_tight_threads as usize))
    }

    fn lot(&self, block_bytes: u64, batch: u64, deadline_us: u64, intent: Intent) -> Lot {
        let due = (deadline_us > 0).then(|| Duration::from_micros(deadline_us));
        let options = SubmitOptions { deadline: Some(self.timeout()), due, intent, ..SubmitOptions::default() };
        let deadline_ns = if deadline_us > 0 { deadline_us.saturating_mul(1000) } else { u64::MAX };
        Lot { block_bytes, batch, options, promises: Promises { deadline_ns, ..Promises::default() } }
    }

    /// Returns the work of each thread of a case.
    pub(super) fn lots(&self, case: Case, classes: &[Class]) -> Vec<Lot> {
        let (deadline_us, tight) = self.tight().unwrap_or_default();
        let lot = |thread| {
            let deadline_us = if thread < tight { deadline_us } else { 0 };
            self.lot(case.block_bytes, case.batch, deadline_us, self.tent_intent_type)
        };
        let mut lots: Vec<Lot> = (0..case.threads as usize).map(lot).collect();
        assign(&mut lots, classes);
        lots
    }

    /// Returns the work of each thread of a mixed run.
    pub(super) fn mixed_lots(&self, workloads: &[Workload], classes: &[Class]) -> Vec<Lot> {
        let lots = workloads.iter().flat_map(|workload| {
            let Workload { class, block_bytes, batch, deadline_us, intent } = workload;
            let lot = self.lot(*block_bytes, *batch, *deadline_us, *intent);
            std::iter::repeat_n(lot, class.threads as usize)
        });
        let mut lots: Vec<Lot> = lots.collect();
        assign(&mut lots, classes);
        lots
    }
}

/// Makes each class a tenant with the class's weight and objective.
fn assign(lots: &mut [Lot], classes: &[Class]) {
    let weights = engine_weights(classes);
    for (number, range) in classes::ranges(classes).into_iter().enumerate() {
        for lot in &mut lots[range] {
            lot.options.tenant = number as u32 + 1;
            lot.options.weight = weights[number];
            let slo_us = classes[number].slo_us;
            lot.promises.slo_ns = if slo_us > 0 { slo_us.saturating_mul(1000) } else { u64::MAX };
        }
    }
}
