//! Range reads of objects, and put sessions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane::{BeginOutcome, Error, Fill, ObjectRange, Put, PutOptions, PutSession};

use crate::cpython::Keys;
use crate::outcome::{INVALID, NOT_FOUND, failed, store_code};
use crate::store::batches::check_key;
use crate::store::clients::Clients;

/// Idle limit of a put session.
const IDLE: Duration = Duration::from_secs(300);
/// Objects per request when objects are opened.
const OPENED: usize = 4096;
/// Limit of open sessions of one store object.
const SESSIONS: usize = 65_536;

/// Range of an object, and the memory that it goes to or comes from.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// Index of its key.
    pub(crate) key: usize,
    /// Offset in the object.
    pub(crate) offset: u64,
    /// Address in this process.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// Opens objects for range reads. Returns 0 and the version for each that exists, else an error code. One byte of each
/// is read, so it counts as an access: it protects the object from eviction, and promotes one that is on an SSD only.
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
            let outcomes = member.client.ranges().get(&ranges);
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

/// Reads ranges of objects. Returns the length of each, else an error code. With `versions`, one for each key, ranges
/// of another version count as missing.
pub(crate) fn get(clients: &Clients, keys: &Keys, parts: &[Part], versions: Option<&[u64]>) -> Vec<i64> {
    if parts.is_empty() {
        return Vec::new();
    }
    if versions.is_some_and(|versions| versions.len() != keys.len()) {
        return vec![failed(INVALID, "the lists of keys and versions differ in length"); parts.len()];
    }
    let outcome = clients.with(|member| {
        let mut codes = vec![0; parts.len()];
        let (mut ranges, mut which, mut held) = (Vec::new(), Vec::new(), Vec::new());
        let mut lookup = clients.memory.lookup();
        for (index, part) in parts.iter().enumerate() {
            let entry = lookup.find(part.address, part.bytes).filter(|entry| entry.backing.writable());
            let key = keys.get(part.key);
            codes[index] = match (check_key(key), entry) {
                (Err(code), _) => code,
                _ if part.bytes == 0 => 0,
                (_, None) => {
                    let Part { address, bytes, .. } = part;
                    failed(INVALID, format!("{bytes} bytes at {address:#x} are not in a registered, writable buffer"))
                }
                (Ok(()), Some(entry)) => match member.slice(&entry, part.address, part.bytes) {
                    Ok(into) => {
                        ranges.push(ObjectRange { key, offset: part.offset, into });
                        which.push(index);
                        held.push(entry);
                        0
                    }
                    Err(code) => code,
                },
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
        match member.client.ranges().get(&ranges) {
            Ok(outcomes) => which.iter().zip(outcomes).for_each(|(index, outcome)| put_down(*index, outcome)),
            Err(_) if ranges.len() > 1 => {
                for (range, index) in ranges.iter().zip(&which) {
                    let one = member.client.ranges().get(std::slice::from_ref(range));
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

/// Open put sessions, by key.
#[derive(Default)]
pub(crate) struct Sessions(Mutex<HashMap<Vec<u8>, Arc<PutSession>>>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<PutSession>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens put sessions for objects of these lengths. Returns 0 for each that can be written.
    pub(crate) fn begin(&self, clients: &Clients, keys: &Keys, sizes: &[u64], options: &PutOptions) -> Vec<i64> {
        let begin = |index: usize| {
            let key = keys.get(index);
            check_key(key)?;
            if self.lock().len() >= SESSIONS {
                return Err(failed(INVALID, format!("{SESSIONS} sessions are open, which is the limit")));
            }
            let begun = clients.with(|member| member.client.put_sessions().open(key, sizes[index], options, IDLE))?;
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

    /// Writes ranges of open put sessions. Returns the length of each, else an error code.
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
                    (Some(session), Some(entry)) => match member.slice(&entry, part.address, part.bytes) {
                        Ok(from) => {
                            ready.push((session, part.offset, from, entry));
                            which.push(index);
                            part.bytes as i64
                        }
                        Err(code) => code,
                    },
                };
            }
            let fill = |(session, offset, from, _): &(Arc<PutSession>, u64, _, _)| -> (Arc<PutSession>, u64, _) {
                (Arc::clone(session), *offset, *from)
            };
            let held: Vec<_> = ready.iter().map(fill).collect();
            let fills: Vec<Fill<'_>> =
                held.iter().map(|(session, offset, from)| Fill { session, offset: *offset, from: *from }).collect();
            match member.client.put_sessions().fill(&fills) {
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

    /// Commits put sessions (`commit`), or aborts them. Returns 0 for each that succeeded.
    pub(crate) fn end(&self, clients: &Clients, keys: &Keys, commit: bool) -> Vec<i64> {
        let end = |key: &[u8]| {
            let session = self.lock().remove(key).ok_or_else(|| failed(NOT_FOUND, "no session of this key is open"))?;
            let ended = clients.with(|member| match commit {
                true => member.client.put_sessions().commit(&session).map(|_: Put| ()),
                false => member.client.put_sessions().batch_abort(&[&session]).map(drop),
            })?;
            ended.map_err(|error| {
                let code = store_code(&error);
                // The missing ranges can still be written.
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
