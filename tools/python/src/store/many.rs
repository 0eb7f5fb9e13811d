//! Batches of many Python values: stored from Python's memory, or received into memory that becomes Python's.
//!
//! Short values are packed into one piece of memory for the transfer, because registering memory with a client costs
//! more than copying them; long ones are sent and received in place.

use std::sync::Arc;

use kvplane::{Client, Error, Got, Region, Slice};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::cpython::Keys;
use crate::memory::adopt;
use crate::outcome::{INVALID, NOT_FOUND, failed, store_code};
use crate::store::arguments::KeepOptions;
use crate::store::batches::check_key;
use crate::store::clients::Clients;
use crate::store::codes::Codes;
use crate::store::member::Member;
use crate::store::{DIRECT_BYTES, values};
use crate::waiting::waiting;

/// Most parts of an object that are sent from where they are; more are joined first.
const MOST_PARTS: usize = 1_024;

/// Python memory: address and length. The caller keeps it there until the call has ended.
pub(crate) type Place = (u64, u64);

/// Memory registered with a client for the duration of a call.
struct LentPlaces {
    buffers: Vec<kvplane::Buffer>,
    /// Packed short values, each at the offset of its slice.
    together: Vec<u8>,
    slices: Vec<Slice>,
}

impl LentPlaces {
    /// Registers the places with a client; with `send`, packs the short values.
    ///
    /// # Safety
    /// The places stay mapped until `give_back`, and no other code writes those that are received into.
    unsafe fn new(client: &mut Client, places: &[Place], send: bool) -> Option<Self> {
        let short = |place: &&Place| place.1 < DIRECT_BYTES;
        let bytes: u64 = places.iter().filter(short).map(|place| place.1).sum();
        let mut together = vec![0; usize::try_from(bytes).ok()?];
        let (mut buffers, mut slices, mut at) = (Vec::new(), Vec::with_capacity(places.len()), 0);
        for &(address, length) in places.iter().filter(short).filter(|_| send) {
            let room = &mut together[at..at + length as usize];
            // SAFETY: by the caller's promise; the destination is owned. If other code writes the source meanwhile, a
            // mix is stored.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, room.as_mut_ptr(), room.len()) };
            at += room.len();
        }
        at = 0;
        // SAFETY: the memory is owned by `together`, which lives as long as this.
        let common = unsafe { adopt(together.as_mut_ptr() as u64, bytes) }.map(|region| client.register(region));
        for place in places {
            let &(address, bytes) = place;
            if let (true, Some(common)) = (short(&place), &common) {
                let length = bytes as usize;
                slices.push(common.slice(at, length));
                at += length;
                continue;
            }
            // SAFETY: by the caller's promise.
            let region: Option<Arc<Region>> = unsafe { adopt(address, bytes) };
            let Some(buffer) = region.map(|region| client.register(region)) else {
                buffers.extend(common);
                buffers.drain(..).for_each(|buffer| client.unregister(buffer));
                return None;
            };
            slices.push(buffer.slice(0, bytes as usize));
            buffers.push(buffer);
        }
        buffers.extend(common);
        Some(Self { buffers, together, slices })
    }

    /// Unregisters the places; with `received`, copies short values to their places, as far as they were received.
    ///
    /// # Safety
    /// Conditions of [`Self::new`], with the same places.
    unsafe fn give_back(self, client: &mut Client, places: &[Place], received: Option<&[i64]>) {
        self.buffers.into_iter().for_each(|buffer| client.unregister(buffer));
        let mut at = 0;
        let short = places.iter().enumerate().filter(|(_, place)| place.1 < DIRECT_BYTES);
        for (index, &(address, bytes)) in short {
            let length = bytes as usize;
            if let Some(got) = received.map(|codes| codes[index]).filter(|code| *code > 0) {
                let value = &self.together[at..at + length.min(got as usize)];
                // SAFETY: by the caller's promise, and no longer than the place.
                unsafe { std::ptr::copy(value.as_ptr(), address as *mut u8, value.len()) };
            }
            at += length;
        }
    }
}

/// Returns the code of a get's outcome.
fn got_code(got: Result<Option<Got>, Error>) -> i64 {
    match got {
        Ok(Some(got)) => got.bytes as i64,
        Ok(None) => failed(NOT_FOUND, "no such object"),
        Err(error) => store_code(&error),
    }
}

/// Runs items as one batch; if that is rejected as a whole, one by one.
fn each_or_all<T: Copy>(items: &[T], mut run: impl FnMut(&[T]) -> Result<Vec<i64>, Error>) -> Vec<i64> {
    match run(items) {
        Ok(codes) => codes,
        Err(error) if items.len() == 1 => vec![store_code(&error)],
        Err(_) => {
            let one =
                |item: &T| run(std::slice::from_ref(item)).map_or_else(|error| store_code(&error), |codes| codes[0]);
            items.iter().map(one).collect()
        }
    }
}

/// Stores the values at these places. Returns 0 for each object that exists afterwards, else an error code.
///
/// # Safety
/// The places stay mapped until this returns.
pub(crate) unsafe fn put(clients: &Clients, keys: &Keys, places: &[Place], keeping: &KeepOptions) -> Vec<i64> {
    let run = |member: &mut Member, items: &[(&[u8], Slice)]| {
        let options = keeping.with(&mut member.client);
        each_or_all(items, |some| {
            let puts = member.client.batch_put_from_with(some, options)?;
            Ok(puts.into_iter().map(|put| put.map_or_else(|error| store_code(&error), |_| 0)).collect())
        })
    };
    // SAFETY: by the caller's promise.
    unsafe { at_places(clients, keys, places, true, run) }
}

/// Stores what is at these places, in order, as one object. Returns 0 if it exists afterwards, else an error code.
///
/// # Safety
/// The places stay mapped until this returns.
pub(crate) unsafe fn put_parts(clients: &Clients, key: &[u8], places: &[Place], keeping: &KeepOptions) -> i64 {
    let places: Vec<Place> = places.iter().copied().filter(|place| place.1 > 0).collect();
    let total = places.iter().fold(0_u64, |sum, place| sum.saturating_add(place.1));
    if total < DIRECT_BYTES || places.len() > MOST_PARTS {
        let mut value = Vec::with_capacity(total as usize);
        for (address, bytes) in places {
            // SAFETY: by the caller's promise. If other code writes the bytes meanwhile, a mix is stored.
            value.extend_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, bytes as usize) });
        }
        return clients.with(|member| member.put_copied(key, &value, keeping)).unwrap_or_else(|code| code);
    }
    let put = clients.with(|member| {
        // SAFETY: by the caller's promise.
        let Some(lent) = (unsafe { LentPlaces::new(&mut member.client, &places, true) }) else {
            return failed(INVALID, "a part is not a valid range");
        };
        let options = keeping.with(&mut member.client);
        let put = member.client.scatter_gather().put_from(key, &lent.slices, options);
        // SAFETY: by the caller's promise.
        unsafe { lent.give_back(&mut member.client, &places, None) };
        put.map_or_else(|error| store_code(&error), |_| 0)
    });
    put.unwrap_or_else(|code| code)
}

/// Receives objects at these places. Returns the length of each, else an error code.
///
/// # Safety
/// The places stay mapped until this returns, and no other code uses them until then.
pub(crate) unsafe fn get(clients: &Clients, keys: &Keys, places: &[Place]) -> Vec<i64> {
    let run = |member: &mut Member, items: &[(&[u8], Slice)]| {
        each_or_all(items, |some| Ok(member.client.batch_get_into(some)?.into_iter().map(got_code).collect()))
    };
    // SAFETY: by the caller's promise.
    unsafe { at_places(clients, keys, places, false, run) }
}

/// Runs a batch of the valid keys with non-empty places.
///
/// # Safety
/// The conditions of its callers hold for `places`.
unsafe fn at_places(
    clients: &Clients,
    keys: &Keys,
    places: &[Place],
    send: bool,
    run: impl FnOnce(&mut Member, &[(&[u8], Slice)]) -> Vec<i64>,
) -> Vec<i64> {
    let empty = |bytes: u64| if bytes == 0 { Err(failed(INVALID, "an object of 0 bytes")) } else { Ok(()) };
    let checked = |(key, place): (&[u8], &Place)| check_key(key).and_then(|()| empty(place.1));
    let codes = Codes::of(keys.iter().zip(places).map(checked));
    let good: Vec<usize> = codes.good().collect();
    if good.is_empty() {
        return codes.answered(Vec::new());
    }
    let places: Vec<Place> = good.iter().map(|index| places[*index]).collect();
    let done = clients.with(|member| {
        // SAFETY: by the caller's promise.
        let lent = unsafe { LentPlaces::new(&mut member.client, &places, send) };
        let Some(lent) = lent else { return vec![failed(INVALID, "a place is not a valid range"); places.len()] };
        let items: Vec<(&[u8], Slice)> =
            good.iter().zip(&lent.slices).map(|(index, slice)| (keys.get(*index), *slice)).collect();
        let codes = run(member, &items);
        // SAFETY: by the caller's promise.
        unsafe { lent.give_back(&mut member.client, &places, (!send).then_some(&codes)) };
        codes
    });
    codes.answered(done.unwrap_or_else(|code| vec![code; places.len()]))
}

/// Returns the bytes of many objects, or an error code for each: one batch for the lengths, one for the gets.
pub(crate) fn get_values<'py>(py: Python<'py>, clients: &Clients, keys: &Keys) -> PyResult<Bound<'py, PyList>> {
    let sizes = values::ask(py, clients, keys, |client, keys| {
        let size = |size: Option<u64>| size.map_or(NOT_FOUND, |bytes| bytes as i64);
        Ok(client.batch_size(keys)?.into_iter().map(size).collect())
    })?;
    let mut some = Keys::default();
    let (mut values, mut places) = (Vec::with_capacity(sizes.len()), Vec::new());
    for (key, &size) in keys.iter().zip(&sizes) {
        if size <= 0 {
            values.push(size.into_pyobject(py)?.into_any());
            continue;
        }
        // SAFETY: a new object of so many bytes that no other code refers to; an error is the null pointer.
        let value = unsafe {
            Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(std::ptr::null(), size as isize))?
        };
        // SAFETY: it is such an object.
        places.push((unsafe { ffi::PyBytes_AsString(value.as_ptr()) } as u64, size as u64));
        some.add(key);
        values.push(value);
    }
    // SAFETY: `values` keeps the bytes until after the call, and no code reads them before it has ended.
    let codes = waiting(py, || unsafe { get(clients, &some, &places) })?;
    let mut codes = codes.into_iter().zip(&places);
    for (index, _) in sizes.iter().enumerate().filter(|(_, size)| **size > 0) {
        let Some((code, place)) = codes.next() else { break };
        if code as u64 == place.1 {
            continue;
        }
        // Another object replaced it between the two batches: it is read by itself.
        let replaced = code == INVALID || code > 0;
        values[index] =
            if replaced { values::get(py, clients, keys.get(index))? } else { code.into_pyobject(py)?.into_any() };
    }
    PyList::new(py, values)
}
