//! Store of the C interface: the calls of Mooncake's `store_c.h`, with its numbers.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use kvplane::{Near, PutOptions};

use crate::handles::Handles;
use crate::rim::{array, guarded, text, write_text};
use outcome::{INTERNAL, INVALID, NOT_FOUND};
use store::{PutConfig, Store};

mod clients;
mod memory;
mod outcome;
mod store;

/// Most replicas of an object.
const MOST_REPLICAS: u8 = 8;

/// Stores by their handles.
static STORES: Handles<Store> = Handles::new("store");

/// Options of puts, laid out as in C.
#[repr(C)]
pub(crate) struct ReplicateConfig {
    replica_num: usize,
    with_soft_pin: c_int,
    with_hard_pin: c_int,
    preferred_segments: *const *const c_char,
    preferred_segments_count: usize,
}

// Layout of the header on 64-bit machines.
const _: () = assert!(size_of::<ReplicateConfig>() == 32);

/// Runs a call with the store of a handle; returns `otherwise` for a handle of none, and where the call returns `None`.
fn with_store<T>(store: *mut c_void, otherwise: T, work: impl FnOnce(&Store) -> Option<T>) -> T
where
    T: Copy,
{
    let Ok(store) = STORES.get(store) else { return otherwise };
    guarded(otherwise, || work(&store).unwrap_or(otherwise))
}

/// Converts a key, which need not be UTF-8; `None` for null.
///
/// # Safety
/// Null or a string with a final zero that does not change during the call.
unsafe fn key_of<'a>(key: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: by the caller's promise.
    (!key.is_null()).then(|| unsafe { CStr::from_ptr(key) }.to_bytes())
}

/// # Safety
/// Null, or an array of `count` such strings.
unsafe fn keys_of<'a>(keys: *const *const c_char, count: usize) -> Option<Vec<&'a [u8]>> {
    // SAFETY: by the caller's promise.
    unsafe { array(keys, count)?.iter().map(|key| key_of(*key)).collect() }
}

/// Converts buffers to addresses and lengths; `None` for a null pointer with a length.
///
/// # Safety
/// Null, or arrays of `count` elements.
unsafe fn places_of(buffers: *const *mut c_void, sizes: *const usize, count: usize) -> Option<Vec<(u64, u64)>> {
    // SAFETY: by the caller's promise.
    let (buffers, sizes) = unsafe { (array(buffers, count)?, array(sizes, count)?) };
    let place = |(&buffer, &size): (&*mut c_void, &usize)| {
        (!buffer.is_null() || size == 0).then_some((buffer as u64, size as u64))
    };
    buffers.iter().zip(sizes).map(place).collect()
}

/// # Safety
/// Null, or options whose segments are strings with a final zero or null.
unsafe fn config_of(config: *const ReplicateConfig) -> PutConfig {
    // SAFETY: by the caller's promise.
    let Some(config) = (unsafe { config.as_ref() }) else { return PutConfig::default() };
    // SAFETY: as above.
    let segments = unsafe { array(config.preferred_segments, config.preferred_segments_count) }.unwrap_or_default();
    // SAFETY: as above.
    let segments = segments.iter().filter_map(|one| unsafe { text(*one) }).map(str::to_owned).collect();
    let options = PutOptions {
        // Replicas are best effort: more than an object can have are as many as it can.
        replicas: u8::try_from(config.replica_num).unwrap_or(u8::MAX).min(MOST_REPLICAS),
        soft_pin_ms: if config.with_soft_pin == 0 { 0 } else { PutOptions::SOFT_PIN_MS },
        hard_pin: config.with_hard_pin != 0,
        ..PutOptions::default()
    };
    PutConfig { options, segments }
}

impl PutConfig {
    /// Returns the options for puts with a client, after setting its preferred nodes.
    fn with(&self, client: &mut kvplane::Client) -> &PutOptions {
        let nodes = self.segments.iter().filter_map(|segment| client.placement().node_of_segment(segment)).collect();
        client.placement().prefer(Near { nodes, together: false });
        &self.options
    }
}

/// Writes codes to C's array.
///
/// # Safety
/// A writable element for each code.
unsafe fn write_codes<T: TryFrom<i64>>(out: *mut T, codes: &[i64], otherwise: impl Fn() -> T) {
    for (index, code) in codes.iter().enumerate() {
        // SAFETY: by the caller's promise.
        unsafe { out.add(index).write(T::try_from(*code).unwrap_or_else(|_| otherwise())) };
    }
}

fn to_int(code: i64) -> c_int {
    c_int::try_from(code).unwrap_or(INTERNAL as c_int)
}

/// Creates a store that is not set up; null on failure.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncake_store_create() -> *mut c_void {
    guarded(ptr::null_mut(), || STORES.add(Arc::new(Store::default())))
}

/// Destroys a store: leaves the cluster with the memory that it provides. Null, a store that was destroyed and, in a
/// fork, the parent's are ignored.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncake_store_destroy(store: *mut c_void) {
    guarded((), || drop(STORES.remove(store)));
}

/// Connects to a cluster, and provides it with `global_segment_size` bytes of memory.
///
/// # Safety
/// A live store; strings with a final zero, or null.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the call's signature in the header")]
pub(crate) unsafe extern "C" fn mooncake_store_setup(
    store: *mut c_void,
    local_hostname: *const c_char,
    _metadata_server: *const c_char,
    global_segment_size: u64,
    _local_buffer_size: u64,
    protocol: *const c_char,
    _device_name: *const c_char,
    master_server_addr: *const c_char,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let word = |pointer: *const c_char| match pointer.is_null() {
                true => Some(""),
                false => text(pointer),
            };
            let (host, protocol, master) = (word(local_hostname)?, word(protocol)?, word(master_server_addr)?);
            Some(to_int(store.set_up(host, global_segment_size, protocol, master)))
        })
    }
}

/// Connects to the control plane of this host.
///
/// # Safety
/// Conditions of [`mooncake_store_setup`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_init_all(
    store: *mut c_void,
    protocol: *const c_char,
    device_name: *const c_char,
    mount_segment_size: u64,
) -> c_int {
    let (host, none) = (c"localhost".as_ptr(), ptr::null());
    // SAFETY: by the caller's promise.
    unsafe { mooncake_store_setup(store, host, none, mount_segment_size, 0, protocol, device_name, none) }
}

/// Returns 0 when the cluster answers, 1 before the setup, 2 when it does not answer.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncake_store_health_check(store: *mut c_void) -> c_int {
    with_store(store, INTERNAL as c_int, |store| Some(store.check()))
}

/// Stores a value.
///
/// # Safety
/// A live store, a string with a final zero, `size` readable bytes, and options or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_put(
    store: *mut c_void,
    key: *const c_char,
    value: *const c_void,
    size: usize,
    config: *const ReplicateConfig,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { mooncake_store_put_from(store, key, value.cast_mut(), size, config) }
}

/// Stores memory; registered memory is sent from where it is, and other memory for the duration of the call.
///
/// # Safety
/// Conditions of [`mooncake_store_put`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_put_from(
    store: *mut c_void,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
    config: *const ReplicateConfig,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let (key, places) = (key_of(key)?, places_of(&raw const buffer, &raw const size, 1)?);
            Some(to_int(store.put(&[key], &places, &config_of(config)).first().copied()?))
        })
    }
}

/// Stores many objects, and writes the outcome of each.
///
/// # Safety
/// Conditions of [`mooncake_store_put`], with arrays of `count` elements.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_batch_put_from(
    store: *mut c_void,
    keys: *const *const c_char,
    buffers: *const *mut c_void,
    sizes: *const usize,
    count: usize,
    config: *const ReplicateConfig,
    results_out: *mut c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let (keys, places) = (keys_of(keys, count)?, places_of(buffers, sizes, count)?);
            (!results_out.is_null()).then_some(())?;
            write_codes(results_out, &store.put(&keys, &places, &config_of(config)), || INTERNAL as c_int);
            Some(if store.is_set_up() { 0 } else { INTERNAL as c_int })
        })
    }
}

/// Reads an object into registered memory. Returns its length.
///
/// # Safety
/// A live store, a string with a final zero, and `size` writable bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_get_into(
    store: *mut c_void,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
) -> i64 {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL, |store| {
            let (key, places) = (key_of(key)?, places_of(&raw const buffer, &raw const size, 1)?);
            store.get(&[key], &places).first().copied()
        })
    }
}

/// Reads many objects, and writes the length of each.
///
/// # Safety
/// Conditions of [`mooncake_store_get_into`], with arrays of `count` elements.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_batch_get_into(
    store: *mut c_void,
    keys: *const *const c_char,
    buffers: *const *mut c_void,
    sizes: *const usize,
    count: usize,
    results_out: *mut i64,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let (keys, places) = (keys_of(keys, count)?, places_of(buffers, sizes, count)?);
            (!results_out.is_null()).then_some(())?;
            write_codes(results_out, &store.get(&keys, &places), || INTERNAL);
            Some(if store.is_set_up() { 0 } else { INTERNAL as c_int })
        })
    }
}

/// Returns 1 if there is an object, 0 if not.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_is_exist(store: *mut c_void, key: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| Some(to_int(store.exist(&[key_of(key)?]).first().copied()?)))
    }
}

/// Writes the same for many keys.
///
/// # Safety
/// Conditions of [`mooncake_store_is_exist`], with arrays of `count` elements.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_batch_is_exist(
    store: *mut c_void,
    keys: *const *const c_char,
    count: usize,
    results_out: *mut c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let keys = keys_of(keys, count)?;
            (!results_out.is_null()).then_some(())?;
            write_codes(results_out, &store.exist(&keys), || INTERNAL as c_int);
            Some(if store.is_set_up() { 0 } else { INTERNAL as c_int })
        })
    }
}

/// Returns the length of an object.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_get_size(store: *mut c_void, key: *const c_char) -> i64 {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL, |store| {
            let key = key_of(key)?;
            Some(store.with(|client| Ok(client.size(key)?.map_or(NOT_FOUND, |bytes| bytes as i64))))
        })
    }
}

/// Writes the name of this process, as replicas are described; -1 if there is no room for it.
///
/// # Safety
/// A live store and `buf_len` writable bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_get_hostname(
    store: *mut c_void,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let name = store.name();
            (!buf_out.is_null() && name.len() < buf_len).then_some(())?;
            write_text(buf_out, buf_len, &name);
            Some(0)
        })
    }
}

/// Removes an object, also one that is being read; there are no leases, and `force` has no effect.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_remove(store: *mut c_void, key: *const c_char, _force: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL as c_int, |store| {
            let key = key_of(key)?;
            Some(to_int(store.with(|client| Ok(if client.remove(key)? { 0 } else { NOT_FOUND }))))
        })
    }
}

/// Removes the objects whose keys match. Returns their number.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_remove_by_regex(
    store: *mut c_void,
    pattern: *const c_char,
    _force: c_int,
) -> i64 {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, INTERNAL, |store| {
            let Some(pattern) = text(pattern) else { return (!pattern.is_null()).then_some(INVALID) };
            Some(store.with(|client| Ok(client.keys().remove_matching(pattern)? as i64)))
        })
    }
}

/// Removes all objects of the tenant. Returns their number.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncake_store_remove_all(store: *mut c_void, _force: c_int) -> i64 {
    with_store(store, INTERNAL, |store| Some(store.with(|client| Ok(client.keys().remove_all(false)? as i64))))
}

/// Registers memory as source of puts and destination of gets; read-only memory as source alone.
///
/// # Safety
/// Memory that stays mapped until it is unregistered or the store is destroyed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncake_store_register_buffer(
    store: *mut c_void,
    buffer: *mut c_void,
    size: usize,
) -> c_int {
    with_store(store, INTERNAL as c_int, |store| {
        // SAFETY: by the caller's promise.
        (!buffer.is_null() && size > 0).then(|| to_int(unsafe { store.register(buffer as u64, size as u64) }))
    })
}

/// Unregisters memory; when this returns 0, no call uses it any more.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncake_store_unregister_buffer(store: *mut c_void, buffer: *mut c_void) -> c_int {
    with_store(store, INTERNAL as c_int, |store| Some(to_int(store.unregister(buffer as u64))))
}
