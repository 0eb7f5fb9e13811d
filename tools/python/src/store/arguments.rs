//! Conversion of the arguments of store calls.

use kvplane::{Client, Near, ObjectPriority, PutOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpython::{Keys, number_lists, numbers};
use crate::outcome::{INVALID, failed};
use crate::store::batches::Pieces;
use crate::store::ranges::Part;

/// Put options: group, soft pin in milliseconds, hard pin, data type, whether it replaces an existing object, number of
/// replicas, preferred segments, whether all objects of a batch are stored together, the priority, and the number of
/// replicas that the put waits for.
pub(crate) type KeepArguments = (u64, u32, bool, u8, bool, u8, Vec<String>, bool, i64, u8);

/// Put options, and the preferred segments.
pub(crate) struct KeepOptions {
    options: PutOptions,
    segments: Vec<String>,
    together: bool,
}

impl KeepOptions {
    /// Returns the options for puts with this client, after setting its preferred nodes.
    pub(crate) fn with(&self, client: &mut Client) -> &PutOptions {
        let nodes = self.segments.iter().filter_map(|segment| client.placement().node_of_segment(segment)).collect();
        client.placement().prefer(Near { nodes, together: self.together });
        &self.options
    }

    /// Returns the options where preferred nodes do not matter.
    pub(crate) const fn anywhere(&self) -> &PutOptions {
        &self.options
    }
}

/// Converts the put options.
///
/// # Errors
/// `ValueError` when the priority is out of range.
pub(crate) fn options(kept: Option<KeepArguments>) -> PyResult<KeepOptions> {
    let (group, soft_pin_ms, hard_pin, data_type, replace, replicas, segments, together, number, wait_replicas) =
        kept.unwrap_or_default();
    let priority = priority(number)?;
    let options = PutOptions {
        group,
        soft_pin_ms,
        hard_pin,
        priority,
        data_type,
        replace,
        replicas,
        wait_replicas,
        ..PutOptions::default()
    };
    Ok(KeepOptions { options, segments, together })
}

/// Converts the priority of an object.
///
/// # Errors
/// `ValueError` when it is out of range.
pub(crate) fn priority(number: i64) -> PyResult<ObjectPriority> {
    ObjectPriority::new(number).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Combines lists into one piece of memory for each object; `None` when they differ in length.
pub(crate) fn single(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Pieces>>> {
    let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
    let same = addresses.len() == sizes.len();
    Ok(same.then(|| addresses.into_iter().zip(sizes).map(|piece| vec![piece]).collect()))
}

/// Combines lists into several pieces of memory for each object; `None` when they differ in length.
pub(crate) fn several(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Pieces>>> {
    let (addresses, sizes) = (number_lists(addresses)?, number_lists(sizes)?);
    let same = addresses.len() == sizes.len() && addresses.iter().zip(&sizes).all(|(a, s)| a.len() == s.len());
    Ok(same.then(|| addresses.into_iter().zip(sizes).map(|(a, s)| a.into_iter().zip(s).collect()).collect()))
}

/// Returns the pieces, if there are as many as keys.
pub(crate) fn matching(keys: &Keys, pieces: Option<Vec<Pieces>>) -> Option<Vec<Pieces>> {
    let pieces = pieces.filter(|pieces| pieces.len() == keys.len());
    if pieces.is_none() {
        failed(INVALID, "the lists of keys, addresses and lengths differ in length");
    }
    pieces
}

/// Combines columns of equal length into ranges of objects.
///
/// # Errors
/// `ValueError` when they differ in length, or refer to missing keys.
pub(crate) fn parts(
    keys: &Keys,
    which: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    addresses: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
) -> PyResult<Vec<Part>> {
    let (which, offsets) = (numbers(which)?, numbers(offsets)?);
    let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
    let count = which.len();
    let same = offsets.len() == count && addresses.len() == count && sizes.len() == count;
    if !same || which.iter().any(|key| *key >= keys.len() as u64) {
        return Err(PyValueError::new_err("the lists of ranges differ in length, or refer to missing keys"));
    }
    let part =
        |at: usize| Part { key: which[at] as usize, offset: offsets[at], address: addresses[at], bytes: sizes[at] };
    Ok((0..count).map(part).collect())
}
