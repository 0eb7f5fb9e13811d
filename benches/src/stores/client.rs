//! Client process of kvplane, which obeys the same commands as the drivers of other stores (`benches/peers/stores.py`).

use std::io::BufRead;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::memory::Memory;
use super::ours::{Copies, Ours};
use crate::Failure;
use crate::peer::say;

/// First word of the role of such a process.
pub(crate) const ROLE_CLIENT: &str = "stores-client";
const CHECKED_BYTES: usize = 512 << 20;
/// Number of calls of which some are read again.
const CHECKED_CALLS: usize = 8;

/// Key of an object, as long as those of the other stores' drivers.
pub(crate) type Key = [u8; 16];

/// Operations of a client on a call's keys. Items of a batch are at the offsets given by the memory.
pub(crate) trait Objects {
    fn put(&mut self, memory: &Memory, call: usize, keys: &[Key], size: usize) -> Result<(), Failure>;
    fn get(&mut self, memory: &Memory, keys: &[Key], size: usize) -> Result<(), Failure>;
    fn remove(&mut self, keys: &[Key]) -> Result<(), Failure>;

    /// Copies received objects to their expected location, which is not timed.
    fn settle(&self, _memory: &Memory) {}
}

/// Runs until its input ends. `server` is the line that the server printed.
pub(crate) fn run(way: &str, server: &str, index: &str, buffer_bytes: &str) -> Result<(), Failure> {
    let index = index.parse()?;
    let memory = Memory::new(index, buffer_bytes.parse()?)?;
    let objects: Box<dyn Objects> = match way {
        "memcpy" => Box::new(Copies::new(server.parse()?, &memory)),
        _ => Box::new(Ours::connect(way, server, &memory)?),
    };
    let mut client = Client { index, memory, objects, keys: Vec::new() };
    say(&json!({ "ready": true, "pids": [std::process::id()] }).to_string())?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = client.obey(&words).unwrap_or_else(|problem| json!({ "error": problem.to_string() }));
        say(&answer.to_string())?;
    }
    Ok(())
}

struct Client {
    index: u64,
    memory: Memory,
    objects: Box<dyn Objects>,
    /// Keys of every call that put.
    keys: Vec<Vec<Key>>,
}

impl Client {
    fn obey(&mut self, words: &[&str]) -> Result<Value, Failure> {
        match words {
            ["put", size, batch, seconds, most, round] => {
                let (batch, most): (usize, usize) = (batch.parse()?, most.parse()?);
                let prefix = format!("{:04}{:02}", round.parse::<u32>()? % 10_000, self.index);
                self.keys = (0..most).map(|call| (0..batch).map(|item| key(&prefix, call, item)).collect()).collect();
                self.put(size.parse()?, seconds.parse()?)
            }
            ["get", size, _, seconds] => {
                let (size, count) = (size.parse()?, self.keys.len());
                let (memory, keys, objects) = (&self.memory, &self.keys, &mut self.objects);
                timed(usize::MAX, seconds.parse()?, |call| objects.get(memory, &keys[call % count], size))
            }
            ["check", size, batch] => self.check(size.parse()?, batch.parse()?),
            ["clear"] => {
                let keys = std::mem::take(&mut self.keys);
                for some in &keys {
                    self.objects.remove(some)?;
                }
                Ok(json!({}))
            }
            _ => Err(format!("{words:?} means nothing here").into()),
        }
    }

    fn put(&mut self, size: usize, seconds: f64) -> Result<Value, Failure> {
        let (memory, keys, objects) = (&self.memory, &self.keys, &mut self.objects);
        let outcome = timed(keys.len(), seconds, |call| objects.put(memory, call, &keys[call], size));
        let calls = outcome.as_ref().ok().and_then(|answer| answer["calls"].as_u64()).unwrap_or(0);
        self.keys.truncate(calls as usize);
        outcome
    }

    /// Reads some calls' objects again, over overwritten memory, and compares every byte.
    fn check(&mut self, size: usize, batch: usize) -> Result<Value, Failure> {
        let mut checked = 0;
        for call in (0..self.keys.len()).step_by((self.keys.len() / CHECKED_CALLS).max(1)) {
            self.memory.wipe();
            self.objects.get(&self.memory, &self.keys[call], size)?;
            self.objects.settle(&self.memory);
            if let Some(item) = (0..batch).find(|item| !self.memory.is_right(size, call, *item)) {
                return Err(format!("wrong bytes in item {item} of call {call}").into());
            }
            checked += batch * size;
            if checked >= CHECKED_BYTES {
                break;
            }
        }
        Ok(json!({ "checked_bytes": checked }))
    }
}

fn key(prefix: &str, call: usize, item: usize) -> Key {
    let mut key = [b'0'; 16];
    let text = format!("{prefix}{call:06}{item:04}");
    key.copy_from_slice(&text.as_bytes()[..16]);
    key
}

/// Repeats a call until the time is over.
fn timed(most: usize, seconds: f64, mut call: impl FnMut(usize) -> Result<(), Failure>) -> Result<Value, Failure> {
    let mut samples_ns: Vec<u64> = Vec::with_capacity(1 << 16);
    let (begin_s, start) = (unix_s(), Instant::now());
    let mut before = Duration::ZERO;
    for number in 0..most {
        call(number).map_err(|error| format!("call {number}: {error}"))?;
        let after = start.elapsed();
        samples_ns.push((after - before).as_nanos() as u64);
        before = after;
        if after.as_secs_f64() >= seconds {
            break;
        }
    }
    let end_s = unix_s();
    samples_ns.sort_unstable();
    let at =
        |share: f64| samples_ns[((share * samples_ns.len() as f64) as usize).min(samples_ns.len() - 1)] as f64 / 1e3;
    Ok(json!({
        "calls": samples_ns.len(), "begin": begin_s, "end": end_s,
        "p50_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999),
    }))
}

fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
