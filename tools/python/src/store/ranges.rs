//! Parts of objects, and objects that are written part by part.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane::{BeginOutcome, Error, Fill, ObjectRange, Put, PutOptions, PutSession};

use crate::cpython::Keys;
use crate::outcome::{INVALID, NOT_FOUND, failed, store_code};
use crate::store::batches::check_key;
use crate::store::clients::Clients;

/// How long a session may be left alone.
const IDLE: Duration = Duration::from_secs(300);
/// Objects that are asked for at a time when they are opened.
const OPENED: usize = 4096;
/// Sessions that one store object may have open.
const SESSIONS: usize = 65_536;

/// A part of an object and where it goes or comes from.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// Number of its key.
    pub(crate) key: usize,
    /// Where in the object.
    pub(crate) offset: u64,
    /// Where in this process.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// Begins to read objects part by part: 0 and its version for each that is there, else the number of an error. This
/// asks each for a byte, so it is an access: what was about to be evicted is the newest now, and what was on an SSD
/// only is in memory.
pub(crate) fn open(clients: &Clients, keys: &Keys) -> Vec<(i64, u64)> {
    let opened = clients.with(|member| {
        let mut found: Vec<(i64, u64)> = keys.iter().map(|key| (check_key(key).err().unwrap_or(0), 0)).collect();
        let bounce = match member.bounce() {
            Ok(bounce) => bounce,
            Err(error) => return vec![(store_code(&error), 0); keys.len()],
        };
        let good: Vec<usize> = (0..keys.len()).filter(|&index| found[index].0 == 0).collect();
        for some in good.chunks(OPENED) {
            let first = |(place, &index): (usize, &usize)| ObjectRange {
                key: keys.get(index),
                offset: 0,
                into: bounce.slice(place, 1),
            };
            let ranges: Vec<ObjectRange<'_>> = some.iter().enumerate().map(first).collect();
            let outcomes = member.client.get_ranges(&ranges);
            let failed_all = outcomes.as_ref().err().map(store_code);
            let mut outcomes = outcomes.unwrap_or_default().into_iter();
            for &index in some {
                found[index] = match (failed_all, outcomes.next()) {
                    (Some(code), _) => (code, 0),
                    (None, Some(Ok(Some(version)))) => (0, version.0),
                    (None, Some(Ok(None)) | None) => (failed(NOT_FOUND, "no such object"), 0),
                    (None, Some(Err(error))) => (store_code(&error), 0),
                };
            }
        }
        found
    });
    opened.unwrap_or_else(|code| vec![(code, 0); keys.len()])
}

/// Brings parts of objects; the length of each, else the number of an error. Where there are `versions`, one for each
/// key, parts of another version are as if there were no object.
pub(crate) fn get(clients: &Clients, keys: &Keys, parts: &[Part], versions: Option<&[u64]>) -> Vec<i64> {
    if parts.is_empty() {
        return Vec::new();
    }
    if versions.is_some_and(|versions| versions.len() != keys.len()) {
        return vec![failed(INVALID, "there are not as many versions as keys"); parts.len()];
    }
    let outcome = clients.with(|member| {
        let mut codes = vec![0; parts.len()];
        let (mut ranges, mut which, mut held) = (Vec::new(), Vec::new(), Vec::new());
        let mut lookup = clients.memory.lookup();
        for (index, part) in parts.iter().enumerate() {
            let entry = lookup.find(part.address, part.bytes).filter(|entry| entry.writable);
            let key = keys.get(part.key);
            codes[index] = match (check_key(key), entry) {
                (Err(code), _) => code,
                _ if part.bytes == 0 => 0,
                (_, None) => {
                    let Part { address, bytes, .. } = part;
                    failed(INVALID, format!("{bytes} bytes at {address:#x} are not in a registered, writable buffer"))
                }
                (Ok(()), Some(entry)) => {
                    let into = member.slice(&entry, part.address, part.bytes);
                    ranges.push(ObjectRange { key, offset: part.offset, into });
                    which.push(index);
                    held.push(entry);
                    0
                }
            };
        }
        let mut put_down = |index: usize, outcome: Result<Option<kvplane::Version>, Error>| {
            codes[index] = match outcome {
                Ok(Some(found)) => match versions.map(|versions| versions[parts[index].key]) {
                    Some(begun) if begun != found.0 => {
                        failed(NOT_FOUND, "the object was replaced since its session began")
                    }
                    _ => parts[index].bytes as i64,
                },
                Ok(None) => failed(NOT_FOUND, "no such object"),
                Err(error) => store_code(&error),
            };
        };
        match member.client.get_ranges(&ranges) {
            Ok(outcomes) => which.iter().zip(outcomes).for_each(|(index, outcome)| put_down(*index, outcome)),
            Err(_) if ranges.len() > 1 => {
                for (range, index) in ranges.iter().zip(&which) {
                    let one = member.client.get_ranges(std::slice::from_ref(range));
                    put_down(*index, one.and_then(|mut one| one.pop().unwrap_or(Ok(None))));
                }
            }
            Err(error) => which.iter().for_each(|index| codes[*index] = store_code(&error)),
        }
        drop(held);
        codes
    });
    outcome.unwrap_or_else(|code| vec![code; parts.len()])
}

/// Objects that are being written, by key.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<Vec<u8>, Arc<PutSession>>>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<PutSession>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to write objects of these lengths; 0 for each that can be written.
    pub(crate) fn begin(&self, clients: &Clients, keys: &Keys, sizes: &[u64], options: &PutOptions) -> Vec<i64> {
        let begin = |index: usize| {
            let key = keys.get(index);
            check_key(key)?;
            if self.lock().len() >= SESSIONS {
                return Err(failed(INVALID, format!("{SESSIONS} sessions are open: the most")));
            }
            let begun = clients.with(|member| member.client.put_session(key, sizes[index], options, IDLE))?;
            match begun.map_err(|error| store_code(&error))? {
                BeginOutcome::Session(session) => {
                    self.lock().insert(key.to_vec(), Arc::new(session));
                    Ok(0)
                }
                BeginOutcome::Exists => Err(failed(-705, "there is an object under this key")),
            }
        };
        (0..keys.len()).map(|index| begin(index).unwrap_or_else(|code| code)).collect()
    }

    /// Writes parts of objects that were begun; the length of each.
    pub(crate) fn fill(&self, clients: &Clients, keys: &Keys, parts: &[Part]) -> Vec<i64> {
        if parts.is_empty() {
            return Vec::new();
        }
        let outcome = clients.with(|member| {
            let mut codes = vec![0; parts.len()];
            let (mut ready, mut which) = (Vec::new(), Vec::new());
            let mut lookup = clients.memory.lookup();
            for (index, part) in parts.iter().enumerate() {
                let session = self.lock().get(keys.get(part.key)).cloned();
                codes[index] = match (session, lookup.find(part.address, part.bytes)) {
                    (None, _) => failed(NOT_FOUND, "no session of this key is open"),
                    (_, None) => failed(INVALID, format!("{:#x} is not in a registered buffer", part.address)),
                    (Some(session), Some(entry)) => {
                        let from = member.slice(&entry, part.address, part.bytes);
                        ready.push((session, part.offset, from, entry));
                        which.push(index);
                        part.bytes as i64
                    }
                };
            }
            let fill = |(session, offset, from, _): &(Arc<PutSession>, u64, _, _)| -> (Arc<PutSession>, u64, _) {
                (Arc::clone(session), *offset, *from)
            };
            let held: Vec<_> = ready.iter().map(fill).collect();
            let fills: Vec<Fill<'_>> =
                held.iter().map(|(session, offset, from)| Fill { session, offset: *offset, from: *from }).collect();
            match member.client.fill(&fills) {
                Ok(outcomes) => {
                    for (index, outcome) in which.iter().zip(outcomes) {
                        if let Err(error) = outcome {
                            codes[*index] = store_code(&error);
                        }
                    }
                }
                Err(error) => which.iter().for_each(|index| codes[*index] = store_code(&error)),
            }
            codes
        });
        outcome.unwrap_or_else(|code| vec![code; parts.len()])
    }

    /// Makes objects of what was written (`commit`), or gives them up; 0 for each that went well.
    pub(crate) fn end(&self, clients: &Clients, keys: &Keys, commit: bool) -> Vec<i64> {
        let end = |key: &[u8]| {
            let session = self.lock().remove(key).ok_or_else(|| failed(NOT_FOUND, "no session of this key is open"))?;
            let ended = clients.with(|member| match commit {
                true => member.client.commit_session(&session).map(|_: Put| ()),
                false => member.client.abort_sessions(&[&session]).map(drop),
            })?;
            ended.map_err(|error| {
                let code = store_code(&error);
                // What is missing can still be written.
                if error.status() == Some(kvplane::Status::Pending) {
                    self.lock().insert(key.to_vec(), Arc::clone(&session));
                }
                code
            })?;
            Ok(0)
        };
        keys.iter().map(|key| end(key).unwrap_or_else(|code: i64| code)).collect()
    }
}
