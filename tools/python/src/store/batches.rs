//! Puts and gets of many objects, each of one or several pieces of the caller's memory.
//!
//! Each item has an outcome of its own, even if it is malformed: the other items are carried out. A put may use memory
//! that is not registered, by a copy that the kernel makes; a get never does.

use std::sync::Arc;

use kvplane::{Buffer, Error, HugePages, Region, RegionOptions, Slice};

use crate::cpython::Keys;
use crate::memory::{Entry, Lookup, RangeAccess, mapped, peek};
use crate::outcome::{INVALID, INVALID_KEY, NOT_FOUND, failed, store_code};
use crate::store::arguments::KeepOptions;
use crate::store::clients::Clients;
use crate::store::member::Member;

/// Maximum length of a key.
const KEY_BYTES: usize = 4096;

/// Pieces of one object: address and length of each.
pub(crate) type Pieces = Vec<(u64, u64)>;

/// Operation on the valid items.
#[derive(Clone, Copy)]
enum Work<'a> {
    Put(&'a KeepOptions),
    Get,
}

/// Prepared batch: the valid items, and the owners of their memory.
struct PreparedBatch<'k> {
    lookup: Lookup<'k>,
    /// Outcome code of each item of the caller.
    codes: Vec<i64>,
    /// Valid items: index, key and memory.
    items: Vec<(usize, &'k [u8], Vec<Slice>)>,
    /// Registered memory in use: it cannot be unregistered until this is dropped.
    entries: Vec<Arc<Entry>>,
    /// Copies of memory that is not registered.
    copies: Vec<Buffer>,
}

/// Stores objects. Returns 0 for each that exists afterwards, else an error code.
pub(crate) fn put(clients: &Clients, keys: &Keys, pieces: &[Pieces], keeping: &KeepOptions) -> Vec<i64> {
    run(clients, keys, pieces, Work::Put(keeping))
}

/// Reads objects. Returns the length of each, else an error code.
pub(crate) fn get(clients: &Clients, keys: &Keys, pieces: &[Pieces]) -> Vec<i64> {
    run(clients, keys, pieces, Work::Get)
}

fn run(clients: &Clients, keys: &Keys, pieces: &[Pieces], work: Work<'_>) -> Vec<i64> {
    if pieces.is_empty() {
        return Vec::new();
    }
    let outcome = clients.with(|member| {
        let mut prepared = prepare(clients, member, keys, pieces, work);
        carry_out(member, &mut prepared, work);
        for copy in prepared.copies {
            member.client.unregister(copy);
        }
        prepared.codes
    });
    outcome.unwrap_or_else(|code| vec![code; pieces.len()])
}

/// Checks the length of a key; returns the error code if it is invalid.
pub(crate) fn check_key(key: &[u8]) -> Result<(), i64> {
    match key.len() {
        1..=KEY_BYTES => Ok(()),
        bytes => Err(failed(INVALID_KEY, format!("a key has 1 to {KEY_BYTES} bytes, not {bytes}"))),
    }
}

fn prepare<'k>(
    clients: &'k Clients,
    member: &mut Member,
    keys: &'k Keys,
    pieces: &[Pieces],
    work: Work<'_>,
) -> PreparedBatch<'k> {
    let count = pieces.len();
    let mut prepared = PreparedBatch {
        lookup: clients.memory.lookup(),
        codes: vec![0; count],
        items: Vec::with_capacity(count),
        entries: Vec::new(),
        copies: Vec::new(),
    };
    for (index, key) in keys.iter().enumerate() {
        let slices = check_key(key).and_then(|()| slices(member, &mut prepared, &pieces[index], work));
        match slices {
            Ok(slices) => prepared.items.push((index, key, slices)),
            Err(code) => prepared.codes[index] = code,
        }
    }
    prepared
}

fn slices(
    member: &mut Member,
    prepared: &mut PreparedBatch<'_>,
    pieces: &[(u64, u64)],
    work: Work<'_>,
) -> Result<Vec<Slice>, i64> {
    let total = pieces.iter().try_fold(0_u64, |sum, (_, bytes)| sum.checked_add(*bytes));
    let Some(total @ 1..) = total else {
        return Err(failed(INVALID, "an object must have more than 0 bytes, and fewer than 2^64"));
    };
    let mut slices = Vec::with_capacity(pieces.len());
    for &(address, bytes) in pieces.iter().filter(|(_, bytes)| *bytes > 0) {
        match (prepared.lookup.find(address, bytes), work) {
            (Some(entry), _) if matches!(work, Work::Put(_)) || entry.backing.writable() => {
                slices.push(member.slice(&entry, address, bytes)?);
                if prepared.entries.last().is_none_or(|last| last.id != entry.id) {
                    prepared.entries.push(entry);
                }
            }
            (None, Work::Put(_)) => {
                let copy = copy_of(member, pieces, total)?;
                let slice = copy.slice(0, total as usize);
                prepared.copies.push(copy);
                return Ok(vec![slice]);
            }
            (Some(_), _) => return Err(failed(INVALID, format!("the memory at {address:#x} is read-only"))),
            (None, Work::Get) => {
                return Err(failed(
                    INVALID,
                    format!("{bytes} bytes at {address:#x} are not in a registered buffer that is still mapped"),
                ));
            }
        }
    }
    Ok(slices)
}

/// Copies memory that is not registered, through the kernel, which reports unmapped memory.
fn copy_of(member: &mut Member, pieces: &[(u64, u64)], total: u64) -> Result<Buffer, i64> {
    // Checked before the allocation, which the kernel may place where nothing was mapped.
    let nowhere = |(address, length): &&(u64, u64)| *length > 0 && mapped(*address, *length) == RangeAccess::No;
    if let Some((address, length)) = pieces.iter().find(nowhere) {
        return Err(failed(INVALID, format!("{length} bytes at {address:#x} are not all memory of this process")));
    }
    let bytes = usize::try_from(total).map_err(|_| failed(INVALID, "more bytes than the address space"))?;
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-copy", bytes) };
    let region = Region::allocate(&options).map_err(|error| store_code(&Error::from(error)))?;
    let (mut offset, mut chunk) = (0, vec![0; (1 << 20).min(bytes)]);
    for &(address, length) in pieces {
        let mut done = 0;
        while done < length {
            let take = chunk.len().min((length - done) as usize);
            let read = address.checked_add(done).ok_or(()).and_then(|at| peek(at, &mut chunk[..take]).map_err(drop));
            if read.is_err() {
                let why = format!("{length} bytes at {address:#x} are not all memory of this process");
                return Err(failed(INVALID, why));
            }
            region.copy_in(offset, &chunk[..take]);
            (offset, done) = (offset + take, done + take as u64);
        }
    }
    Ok(member.client.register(region))
}

fn carry_out(member: &mut Member, prepared: &mut PreparedBatch<'_>, work: Work<'_>) {
    let items = core::mem::take(&mut prepared.items);
    if items.is_empty() {
        return;
    }
    match outcomes(member, &items, work) {
        Ok(codes) => items.iter().zip(codes).for_each(|((index, ..), code)| prepared.codes[*index] = code),
        // The batch is rejected because of one item, or of a conflict of two: the others are carried out one by one.
        Err(_) if items.len() > 1 => {
            for item in items {
                let code = outcomes(member, std::slice::from_ref(&item), work);
                prepared.codes[item.0] = code.map_or_else(|error| store_code(&error), |codes| codes[0]);
            }
        }
        Err(error) => prepared.codes[items[0].0] = store_code(&error),
    }
}

fn outcomes(member: &mut Member, items: &[(usize, &[u8], Vec<Slice>)], work: Work<'_>) -> Result<Vec<i64>, Error> {
    let client = &mut member.client;
    let whole = items.iter().all(|(_, _, slices)| slices.len() == 1);
    let single: Vec<(&[u8], Slice)> =
        if whole { items.iter().map(|(_, key, slices)| (*key, slices[0])).collect() } else { Vec::new() };
    let parts: Vec<(&[u8], &[Slice])> =
        if whole { Vec::new() } else { items.iter().map(|(_, key, slices)| (*key, &slices[..])).collect() };
    match work {
        Work::Put(keeping) => {
            let options = keeping.with(client);
            let puts = if whole {
                client.batch_put_from_with(&single, options)?
            } else {
                client.scatter_gather().batch_put_from(&parts, options)?
            };
            Ok(puts.into_iter().map(|put| put.map_or_else(|error| store_code(&error), |_| 0)).collect())
        }
        Work::Get => {
            let gets =
                if whole { client.batch_get_into(&single)? } else { client.scatter_gather().batch_get_into(&parts)? };
            let code = |got: Result<Option<kvplane::Got>, Error>| match got {
                Ok(Some(got)) => got.bytes as i64,
                Ok(None) => failed(NOT_FOUND, "no such object"),
                Err(error) => store_code(&error),
            };
            Ok(gets.into_iter().map(code).collect())
        }
    }
}
