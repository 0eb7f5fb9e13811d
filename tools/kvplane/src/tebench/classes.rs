//! Classes of service: their threads, objectives and loads in a run.
//!
//! The formats are those of Mooncake's tebench: `name:threads:slo_us:weight[:isolated_gbps]`, the same as JSON, and
//! JSON with the load of each class. Threads are assigned to classes in order: the first class has the first threads.

use std::fmt;
use std::ops::Range;

use kvplane_client::Intent;
use serde_json::Value;

/// Most threads of one class.
const THREADS_MOST: u64 = 1 << 16;

/// Class of service.
#[derive(Clone, PartialEq, Debug)]
pub struct Class {
    /// Name, unique among the classes.
    pub name: String,
    /// Number of threads, at least 1.
    pub threads: u64,
    /// Objective for the time of a batch, in µs: a slower batch does not count towards goodput. 0: no objective.
    pub slo_us: u64,
    /// Weight relative to the other classes, more than 0.
    pub weight: f64,
    /// Throughput of the class alone on the machine, in GB/s, from another run.
    pub isolated_gb_s: Option<f64>,
}

/// Class with its load.
#[derive(Clone, PartialEq, Debug)]
pub struct Workload {
    /// Class of the threads.
    pub class: Class,
    /// Size of a request, in bytes.
    pub block_bytes: u64,
    /// Number of requests of a batch.
    pub batch: u64,
    /// Deadline of each batch, in µs from its start; 0 for none.
    pub deadline_us: u64,
    /// Purpose of the transfers.
    pub intent: Intent,
}

/// Error about an invalid class; its text names the class and the fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClassError(String);

impl fmt::Display for ClassError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ClassError {}

fn wrong<T>(words: String) -> Result<T, ClassError> {
    Err(ClassError(words))
}

/// Parses classes from `name:threads:slo_us:weight[:isolated_gbps],...`.
///
/// # Errors
/// Returns [`ClassError`] with the class and its fault.
pub fn parse(text: &str) -> Result<Vec<Class>, ClassError> {
    let classes = text.split(',').map(|entry| one(entry.trim())).collect::<Result<Vec<_>, _>>()?;
    distinct(classes, |class| &class.name)
}

fn one(entry: &str) -> Result<Class, ClassError> {
    let fields: Vec<&str> = entry.split(':').collect();
    let (&[name, threads, slo, weight], rest) = match fields.split_first_chunk::<4>() {
        Some((first, rest)) if rest.len() <= 1 => (first, rest),
        _ => return wrong(format!("class {entry:?} is not name:threads:slo_us:weight[:isolated_gbps]")),
    };
    let number = |field: &str, value: &str| {
        let bad = || ClassError(format!("class {name:?}: {field} {value:?} is not a whole number from 0"));
        value.parse::<u64>().map_err(|_| bad())
    };
    let rate = |field: &str, value: &str| {
        let bad = || ClassError(format!("class {name:?}: {field} {value:?} is not a number"));
        value.parse::<f64>().map_err(|_| bad())
    };
    let isolated_gb_s = rest.first().map(|value| rate("isolated_gbps", value)).transpose()?;
    let (threads, slo_us) = (number("threads", threads)?, number("slo_us", slo)?);
    Class { name: name.to_owned(), threads, slo_us, weight: rate("weight", weight)?, isolated_gb_s }.checked()
}

impl Class {
    fn checked(self) -> Result<Self, ClassError> {
        let Self { name, threads, weight, .. } = &self;
        if name.is_empty() {
            return wrong("a class has no name".to_owned());
        }
        if !(1..=THREADS_MOST).contains(threads) {
            return wrong(format!("class {name:?}: threads is {threads}, it must be from 1 to {THREADS_MOST}"));
        }
        let positive = |field: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => wrong(format!("class {name:?}: {field} is {value}, it must be more than 0 and finite")),
        };
        positive("weight", *weight)?;
        self.isolated_gb_s.map_or(Ok(()), |rate| positive("isolated_gbps", rate))?;
        Ok(self)
    }
}

fn distinct<T>(items: Vec<T>, name: impl Fn(&T) -> &str) -> Result<Vec<T>, ClassError> {
    for (at, item) in items.iter().enumerate() {
        if items[..at].iter().any(|other| name(other) == name(item)) {
            return wrong(format!("two classes are named {:?}", name(item)));
        }
    }
    Ok(items)
}

/// Parses classes from a JSON array of objects with `name`, `threads`, `slo_us`, `weight` and optionally
/// `isolated_gbps`.
///
/// # Errors
/// Returns [`ClassError`] with the entry and its fault.
pub fn parse_json(text: &str) -> Result<Vec<Class>, ClassError> {
    let entries = entries(text)?;
    let classes = entries.iter().enumerate().map(|(at, value)| from_json(at, value));
    distinct(classes.collect::<Result<Vec<_>, _>>()?, |class| &class.name)
}

/// Parses workloads from a JSON array: like [`parse_json`], with `block_size`, `batch_size`, `intent_type` and
/// optionally `deadline_us` in each object.
///
/// # Errors
/// Returns [`ClassError`] with the entry and its fault.
pub fn parse_workloads(text: &str) -> Result<Vec<Workload>, ClassError> {
    let workload = |(at, value): (usize, &Value)| {
        let class = from_json(at, value)?;
        let size = |field| match whole(at, value, field)? {
            0 => wrong(format!("entry {at}: {field} is 0, it must be at least 1")),
            size => Ok(size),
        };
        let (block_bytes, batch) = (size("block_size")?, size("batch_size")?);
        if block_bytes.checked_mul(batch).is_none() {
            return wrong(format!("entry {at}: {batch} blocks of {block_bytes} bytes exceed 64 bits of bytes"));
        }
        let deadline_us = match value.get("deadline_us") {
            None => 0,
            Some(_) => whole(at, value, "deadline_us")?,
        };
        let intent = value.get("intent_type").and_then(Value::as_str).unwrap_or_default();
        let intent = intent_named(intent).map_err(|words| ClassError(format!("entry {at}: intent_type {words}")))?;
        Ok(Workload { class, block_bytes, batch, deadline_us, intent })
    };
    let workloads = entries(text)?.iter().enumerate().map(workload).collect::<Result<Vec<_>, _>>()?;
    distinct(workloads, |workload| &workload.class.name)
}

fn entries(text: &str) -> Result<Vec<Value>, ClassError> {
    let value: Value = serde_json::from_str(text).map_err(|error| ClassError(format!("not JSON: {error}")))?;
    match value {
        Value::Array(entries) if !entries.is_empty() => Ok(entries),
        _ => wrong("it must be a JSON array with at least one class".to_owned()),
    }
}

fn from_json(at: usize, value: &Value) -> Result<Class, ClassError> {
    let rate = |field: &str| match value.get(field) {
        Some(number) => match number.as_f64() {
            Some(number) => Ok(Some(number)),
            None if number.is_null() => Ok(None),
            None => wrong(format!("entry {at}: {field} is {number}, it must be a number")),
        },
        None => Ok(None),
    };
    let Some(name) = value.get("name").and_then(Value::as_str) else {
        return wrong(format!("entry {at}: name must be a string"));
    };
    let Some(weight) = rate("weight")? else {
        return wrong(format!("entry {at}: weight is missing"));
    };
    let (threads, slo_us) = (whole(at, value, "threads")?, whole(at, value, "slo_us")?);
    Class { name: name.to_owned(), threads, slo_us, weight, isolated_gb_s: rate("isolated_gbps")? }.checked()
}

fn whole(at: usize, value: &Value, field: &str) -> Result<u64, ClassError> {
    match value.get(field) {
        None => wrong(format!("entry {at}: {field} is missing")),
        Some(found) => found
            .as_u64()
            .ok_or_else(|| ClassError(format!("entry {at}: {field} is {found}, it must be a whole number from 0"))),
    }
}

/// Error of a name that is no intent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownIntent {
    /// The name.
    pub name: String,
}

impl fmt::Display for UnknownIntent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        write!(
            f,
            "{name:?} is not one of unspec, foreground_get, background_prefetch, migration, checkpoint, \
             weight_loading, staging_internal"
        )
    }
}

impl std::error::Error for UnknownIntent {}

/// Returns the intent of this name, as tebench spells it.
///
/// # Errors
/// Lists the known names.
pub fn intent_named(name: &str) -> Result<Intent, UnknownIntent> {
    Ok(match name {
        "unspec" | "intent_unspec" => Intent::Unspecified,
        "foreground_get" => Intent::ForegroundGet,
        "background_prefetch" => Intent::BackgroundPrefetch,
        "migration" => Intent::Migration,
        "checkpoint" => Intent::Checkpoint,
        "weight_loading" => Intent::WeightLoading,
        "staging_internal" => Intent::Staging,
        _ => return Err(UnknownIntent { name: name.to_owned() }),
    })
}

/// Checks that the classes have exactly this number of threads.
///
/// # Errors
/// Returns [`ClassError`] with both numbers.
pub fn check_threads(classes: &[Class], threads: u64) -> Result<(), ClassError> {
    let configured: u64 = classes.iter().map(|class| class.threads).sum();
    match configured == threads {
        true => Ok(()),
        false => wrong(format!("the classes have {configured} threads, the run has {threads}: set start_num_threads")),
    }
}

/// Returns the range of threads of each class.
#[must_use]
pub fn ranges(classes: &[Class]) -> Vec<Range<usize>> {
    let mut next = 0;
    classes
        .iter()
        .map(|class| {
            let first = next;
            next += class.threads as usize;
            first..next
        })
        .collect()
}

/// Converts the classes' weights to those of the engine: whole numbers in the same proportions, as far as 16 bits can
/// express them.
#[must_use]
pub fn engine_weights(classes: &[Class]) -> Vec<u16> {
    let weights = || classes.iter().map(|class| class.weight);
    let (least, most) = (weights().fold(f64::INFINITY, f64::min), weights().fold(0.0, f64::max));
    // Steps are fine where the range allows it; the largest weight fits in any case.
    let scale = (64.0 / least).min(f64::from(u16::MAX) / most);
    weights().map(|weight| (weight * scale).round().clamp(1.0, f64::from(u16::MAX)) as u16).collect()
}

#[cfg(test)]
mod tests;
