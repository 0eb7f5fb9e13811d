//! Arguments of the store's calls, as their lists are taken apart.

use kvplane::{Client, Near, PutOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpython::{Keys, number_lists, numbers};
use crate::outcome::{INVALID, failed};
use crate::store::batches::Pieces;
use crate::store::ranges::Part;

/// How an object is to be kept: group, soft pin in milliseconds, hard pin, data type, whether it replaces another, how
/// many nodes are to have it, the segments near which it is to be, and whether all of a batch are to be together.
pub(crate) type KeepArguments = (u64, u32, bool, u8, bool, u8, Vec<String>, bool);

/// What the store is told of it.
pub(crate) struct KeepOptions {
    options: PutOptions,
    segments: Vec<String>,
    together: bool,
}

impl KeepOptions {
    /// The options for puts with this client, which knows then where objects are to be.
    pub(crate) fn with(&self, client: &mut Client) -> &PutOptions {
        let nodes = self.segments.iter().filter_map(|segment| client.node_of_segment(segment)).collect();
        client.prefer(Near { nodes, together: self.together });
        &self.options
    }

    /// The options where the place makes no difference.
    pub(crate) const fn anywhere(&self) -> &PutOptions {
        &self.options
    }
}

/// What the store is told of it.
pub(crate) fn options(kept: Option<KeepArguments>) -> KeepOptions {
    let (group, soft_pin_ms, hard_pin, data_type, replace, replicas, segments, together) = kept.unwrap_or_default();
    // As the original: a put is done when its copies are there, or turn out not to be possible.
    let wait_replicas = replicas > 1;
    let options = PutOptions {
        group,
        soft_pin_ms,
        hard_pin,
        data_type,
        replace,
        replicas,
        wait_replicas,
        ..PutOptions::default()
    };
    KeepOptions { options, segments, together }
}

/// One piece of memory for each object; nothing when the lists differ in length.
pub(crate) fn single(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Pieces>>> {
    let (addresses, sizes) = (numbers(addresses)?, numbers(sizes)?);
    let same = addresses.len() == sizes.len();
    Ok(same.then(|| addresses.into_iter().zip(sizes).map(|piece| vec![piece]).collect()))
}

/// Several pieces of memory for each object; nothing when the lists differ in length.
pub(crate) fn several(addresses: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Pieces>>> {
    let (addresses, sizes) = (number_lists(addresses)?, number_lists(sizes)?);
    let same = addresses.len() == sizes.len() && addresses.iter().zip(&sizes).all(|(a, s)| a.len() == s.len());
    Ok(same.then(|| addresses.into_iter().zip(sizes).map(|(a, s)| a.into_iter().zip(s).collect()).collect()))
}

/// The pieces, where there are as many as keys.
pub(crate) fn matching(keys: &Keys, pieces: Option<Vec<Pieces>>) -> Option<Vec<Pieces>> {
    let pieces = pieces.filter(|pieces| pieces.len() == keys.len());
    if pieces.is_none() {
        failed(INVALID, "the lists of keys, addresses and lengths differ in length");
    }
    pieces
}

/// Parts of objects, from columns of equal length.
///
/// # Errors
/// `ValueError` when they are not, or name keys that are not there.
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
        return Err(PyValueError::new_err("the lists of ranges differ in length, or name keys that are not there"));
    }
    let part =
        |at: usize| Part { key: which[at] as usize, offset: offsets[at], address: addresses[at], bytes: sizes[at] };
    Ok((0..count).map(part).collect())
}
