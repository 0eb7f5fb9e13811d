//! Puts and gets of many objects, each of one or several pieces of the caller's memory.
//!
//! Each item has an outcome of its own, even if it is malformed: the other items are carried out. A put may use memory
//! that is not registered, by a copy that the kernel makes; a get never does.

use std::collections::HashSet;
use std::sync::Arc;

use kvplane::memory_map::MemoryMap;
use kvplane::{Buffer, Error, HugePages, Region, RegionOptions, Slice};

use crate::cpython::Keys;
use crate::memory::{Entry, KernelView, Lookup, RangeAccess};
use crate::outcome::{INTERNAL, INVALID, INVALID_KEY, NOT_FOUND, failed, store_code};
use crate::store::arguments::KeepOptions;
use crate::store::clients::Clients;
use crate::store::member::Member;

/// Maximum length of a key.
const KEY_BYTES: usize = 4096;

/// Distance at which two places are checked together.
const NEAR: u64 = 64 << 10;
/// Bytes that are read through the kernel at once.
const CHUNK: usize = 1 << 20;

/// Pieces of one object: address and length of each.
pub(crate) type Pieces = Vec<(u64, u64)>;

/// Operation on the valid items.
#[derive(Clone, Copy)]
enum Work<'a> {
    Put(&'a KeepOptions),
    Get,
}

/// Memory of an object.
enum Memory {
    Registered(Vec<Slice>),
    /// Some of it is not registered: the length of all.
    Unregistered(u64),
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
    /// Objects of which a part is not in registered memory: index, key and length.
    unregistered: Vec<(usize, &'k [u8], u64)>,
    /// Copy of their bytes.
    copy: Option<Buffer>,
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
        if let Some(copy) = prepared.copy {
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
        unregistered: Vec::new(),
        copy: None,
    };
    for (index, key) in keys.iter().enumerate() {
        let slices = check_key(key).and_then(|()| slices(member, &mut prepared, &pieces[index], work));
        match slices {
            Ok(Memory::Registered(slices)) => prepared.items.push((index, key, slices)),
            Ok(Memory::Unregistered(bytes)) => prepared.unregistered.push((index, key, bytes)),
            Err(code) => prepared.codes[index] = code,
        }
    }
    if !prepared.unregistered.is_empty() {
        copy_unregistered(member, &mut prepared, pieces);
    }
    prepared
}

fn slices(
    member: &mut Member,
    prepared: &mut PreparedBatch<'_>,
    pieces: &[(u64, u64)],
    work: Work<'_>,
) -> Result<Memory, i64> {
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
            (None, Work::Put(_)) => return Ok(Memory::Unregistered(total)),
            (Some(_), _) => return Err(failed(INVALID, format!("the memory at {address:#x} is read-only"))),
            (None, Work::Get) => {
                return Err(failed(
                    INVALID,
                    format!("{bytes} bytes at {address:#x} are not in a registered buffer that is still mapped"),
                ));
            }
        }
    }
    Ok(Memory::Registered(slices))
}

/// Copies the objects that are not in registered memory into one region, through the kernel, which reports unmapped
/// memory, and adds those that it could copy to the items.
fn copy_unregistered(member: &mut Member, prepared: &mut PreparedBatch<'_>, pieces: &[Pieces]) {
    let mut objects = core::mem::take(&mut prepared.unregistered);
    // Checked before the allocation, which the kernel may place where nothing was mapped.
    let all = objects.iter().flat_map(|(index, ..)| pieces[*index].iter().copied().filter(|(_, bytes)| *bytes > 0));
    let foreign = foreign(all.collect());
    objects.retain(|(index, ..)| {
        let found = pieces[*index].iter().find(|place| foreign.contains(place));
        if let Some(&(address, length)) = found {
            prepared.codes[*index] = not_ours(address, length);
        }
        found.is_none()
    });
    if objects.is_empty() {
        return;
    }
    let copied = copy_together(&objects, pieces).map(|(region, codes)| (member.client.register(region), codes));
    let (copy, codes) = match copied {
        Ok(copied) => copied,
        Err(code) => {
            objects.iter().for_each(|(index, ..)| prepared.codes[*index] = code);
            return;
        }
    };
    let mut offset = 0;
    for ((index, key, bytes), code) in objects.into_iter().zip(codes) {
        match code {
            0 => prepared.items.push((index, key, vec![copy.slice(offset, bytes as usize)])),
            _ => prepared.codes[index] = code,
        }
        offset += bytes as usize;
    }
    prepared.items.sort_unstable_by_key(|(index, ..)| *index);
    prepared.copy = Some(copy);
}

/// Returns those of these places that are not all readable memory of this process.
fn foreign(mut places: Vec<(u64, u64)>) -> HashSet<(u64, u64)> {
    let map = MemoryMap::read().ok();
    let is_ours = |address, bytes| RangeAccess::by(map.as_ref(), address, bytes) != RangeAccess::No;
    let end = |place: &(u64, u64)| place.0.saturating_add(place.1);
    let mut found = HashSet::new();
    places.sort_unstable();
    // Neighbours are checked together, as each check walks the list of mappings.
    for group in places.chunk_by(|one, next| next.0 <= end(one).saturating_add(NEAR)) {
        let start = group[0].0;
        let last = group.iter().map(end).max().unwrap_or(start);
        if !is_ours(start, last - start) {
            found.extend(group.iter().copied().filter(|place| !is_ours(place.0, place.1)));
        }
    }
    found
}

/// Returns the bytes of objects, one after the other, and for each 0 or the code of an error.
fn copy_together(objects: &[(usize, &[u8], u64)], pieces: &[Pieces]) -> Result<(Arc<Region>, Vec<i64>), i64> {
    let total = objects.iter().try_fold(0_u64, |sum, (.., bytes)| sum.checked_add(*bytes));
    let bytes = total.and_then(|total| usize::try_from(total).ok());
    let bytes = bytes.ok_or_else(|| failed(INVALID, "more bytes than the address space"))?;
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-copy", bytes) };
    let region = Region::allocate(&options).map_err(|error| store_code(&Error::from(error)))?;
    let memory = KernelView::open().map_err(|error| failed(INTERNAL, format!("/proc/self/mem: {error}")))?;
    let (mut offset, mut chunk) = (0, vec![0; CHUNK.min(bytes)]);
    let mut copy = |offset: usize, (address, length): (u64, u64)| -> Result<(), i64> {
        let mut done = 0;
        while done < length {
            let take = chunk.len().min((length - done) as usize);
            let part = &mut chunk[..take];
            memory.read(address + done, part).map_err(|_| not_ours(address, length))?;
            region.copy_in(offset + done as usize, part);
            done += part.len() as u64;
        }
        Ok(())
    };
    let mut codes = Vec::with_capacity(objects.len());
    for (index, _, bytes) in objects {
        let end = offset + *bytes as usize;
        let copied = pieces[*index].iter().try_for_each(|&(address, length)| {
            copy(offset, (address, length))?;
            offset += length as usize;
            Ok(())
        });
        codes.push(copied.map_or_else(|code| code, |()| 0));
        offset = end;
    }
    Ok((region, codes))
}

fn not_ours(address: u64, length: u64) -> i64 {
    failed(INVALID, format!("{length} bytes at {address:#x} are not all memory of this process"))
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
