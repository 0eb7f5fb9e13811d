//! Resharding for the C interface: reads the bytes of a rank of another parallel layout into memory.

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use kvplane::{NamedPart, ReadOptions, ReshardNames, packed_bytes};

use super::{INVALID_ARGUMENT, TRANSFER_ENGINE, code_of, deadline_of, failed, name_of, regions, with_store};
use crate::rim::{array, guarded};

/// Location of a rank's bytes, laid out as in C.
#[repr(C)]
pub(crate) struct PartPlace {
    participant: *const c_char,
    name: *const c_char,
    version: u64,
    buffer: usize,
    offsets: *const u64,
    offsets_len: usize,
}

// Layout of the header on 64-bit machines.
const _: () = assert!(size_of::<PartPlace>() == 48);

/// # Safety
/// Null, or `count` offsets.
unsafe fn offsets(pointer: *const u64, count: usize) -> Option<Vec<u64>> {
    // SAFETY: by the caller's promise.
    (!pointer.is_null()).then(|| unsafe { slice::from_raw_parts(pointer, count) }.to_vec())
}

/// # Safety
/// Strings with a final zero or null, and offsets as many as it says or null.
unsafe fn named(part: &PartPlace) -> Result<NamedPart, c_int> {
    // SAFETY: by the caller's promise.
    unsafe {
        Ok(NamedPart {
            participant: name_of(part.participant)?.to_owned(),
            object: name_of(part.name)?.to_owned(),
            version: (part.version != 0).then_some(part.version),
            buffer: part.buffer,
            offsets: offsets(part.offsets, part.offsets_len),
        })
    }
}

/// Writes the number of bytes of a rank of a manifest to `size`.
///
/// # Safety
/// Strings with a final zero or null, and room for a number or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreReshardSize(
    target: *const c_char,
    participant: *const c_char,
    size: *mut u64,
) -> c_int {
    guarded(TRANSFER_ENGINE, || {
        // SAFETY: by the caller's promise.
        let names = unsafe { name_of(target).and_then(|target| Ok((target, name_of(participant)?))) };
        let bytes = names.and_then(|(target, who)| packed_bytes(target, who).map_err(|error| code_of(&error)));
        match bytes {
            Ok(_) if size.is_null() => failed(INVALID_ARGUMENT, "the pointer for the size is null"),
            Ok(bytes) => {
                // SAFETY: by the caller's promise.
                unsafe { size.write(bytes) };
                0
            }
            Err(code) => code,
        }
    })
}

/// Reads the fragments of a rank of the target's manifest into memory, from the bytes that the source's ranks wrote.
///
/// # Safety
/// A live store; strings with a final zero; arrays as long as it says; memory that stays mapped while this runs.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn p2pStoreReshard(
    store: *mut c_void,
    source: *const c_char,
    target: *const c_char,
    participant: *const c_char,
    parts: *const PartPlace,
    part_count: usize,
    addr: *mut c_void,
    size: u64,
    to: *const u64,
    to_len: usize,
    deadline_seconds: f64,
    checked: *mut u64,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, |store| {
            let (source, target, participant) = (name_of(source)?, name_of(target)?, name_of(participant)?);
            let names = ReshardNames { source, target, participant };
            let parts = array(parts, part_count);
            let parts = parts.ok_or_else(|| failed(INVALID_ARGUMENT, "the list of parts is null"))?;
            let parts = parts.iter().map(|part| named(part)).collect::<Result<Vec<NamedPart>, c_int>>()?;
            let memory = regions(&raw const addr, &raw const size, 1)?;
            let to = offsets(to, to_len);
            let options = ReadOptions { deadline: deadline_of(deadline_seconds)?, each: None };
            let read = store.reshard_named(names, &parts, &memory[0], to.as_deref(), &options);
            let read = read.map_err(|error| code_of(&error))?;
            if !checked.is_null() {
                checked.write(read.checked);
            }
            Ok(())
        })
    }
}
