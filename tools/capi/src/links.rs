//! Statistics of the paths to peers.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};

use kvplane::{RailSnapshot, SegmentHandle, TransferEngine};
use serde_json::json;

use crate::engine::Engine;
use crate::rim::{INVALID_ARGUMENT, with_engine, write_text};
use crate::types::{DEVICE_NAME_BYTES, NicLoad};

fn device(rail: &RailSnapshot) -> String {
    format!("{}:{}/{}", rail.transport.name(), rail.peer, rail.number)
}

/// Writes the load of up to `count` rails to `stats` and the number of all rails to `count`.
///
/// # Safety
/// A live engine, a count, and as many places as it says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getNicLoadStats(engine: *mut c_void, stats: *mut NicLoad, count: *mut usize) -> c_int {
    if stats.is_null() || count.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: by the caller's promise: the count is readable and says how many places are writable.
    unsafe {
        with_engine(engine, |engine| {
            write_loads(&engine.engine, stats, &mut *count);
            Ok(0)
        })
    }
}

/// Writes the load of up to `count` rails to `stats` and the number of all rails to `count`.
///
/// # Safety
/// Places are writable, as many as the count says.
pub(crate) unsafe fn write_loads(engine: &TransferEngine, stats: *mut NicLoad, count: &mut usize) {
    let rails = engine.metrics().rails;
    for (place, rail) in rails.iter().take(*count).enumerate() {
        let mut load = NicLoad {
            device_name: [0; DEVICE_NAME_BYTES],
            inflight_bytes: rail.inflight_bytes,
            ewma_bandwidth_bps: rail.bytes_per_second as f64 * 8.0,
        };
        // SAFETY: the place is writable, by the caller's promise, and the name has its own length.
        unsafe {
            write_text(load.device_name.as_mut_ptr(), DEVICE_NAME_BYTES, &device(rail));
            stats.add(place).write(load);
        }
    }
    *count = rails.len();
}

/// Describes the paths to all peers in `buf_out`, as text or JSON, truncated to `buf_len`.
///
/// # Safety
/// A live engine and `buf_len` writable bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn showLinks(
    engine: *mut c_void,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_engine(engine, |engine| {
            if buf_out.is_null() || buf_len == 0 {
                return Err(INVALID_ARGUMENT);
            }
            let rails = engine.engine.metrics().rails;
            let memory = memory(engine)?;
            let text = if json != 0 { as_json(engine, &rails, &memory) } else { as_text(engine, &rails, &memory) };
            write_text(buf_out, buf_len, &text);
            Ok(0)
        })
    }
}

/// Returns the registered bytes by location.
fn memory(engine: &Engine) -> Result<BTreeMap<String, u64>, c_int> {
    let own = engine.engine.segment_info(SegmentHandle::LOCAL).map_err(|error| error.code())?;
    let mut memory = BTreeMap::new();
    for buffer in own.buffers {
        *memory.entry(buffer.location.unwrap_or_default()).or_default() += buffer.bytes;
    }
    Ok(memory)
}

fn as_text(engine: &Engine, rails: &[RailSnapshot], memory: &BTreeMap<String, u64>) -> String {
    let lines = rails.iter().map(|rail| {
        format!(
            "  {:<10} {:<24} {:?}, {} operations, {} bytes, {} retries, {} MB/s\n",
            rail.transport.name(),
            rail.peer,
            rail.health,
            rail.operations,
            rail.bytes,
            rail.retries,
            rail.bytes_per_second / 1_000_000
        )
    });
    let memory = memory.iter().map(|(location, bytes)| format!("  {location:<10} {bytes} bytes registered\n"));
    format!("{}\n", engine.engine.name()) + &memory.chain(lines).collect::<String>()
}

fn as_json(engine: &Engine, rails: &[RailSnapshot], memory: &BTreeMap<String, u64>) -> String {
    let links: Vec<_> = rails
        .iter()
        .map(|rail| {
            json!({
                "peer": rail.peer,
                "transport": rail.transport.name(),
                "rail": rail.number,
                "health": format!("{:?}", rail.health),
                "operations": rail.operations,
                "bytes": rail.bytes,
                "retries": rail.retries,
                "failovers": rail.failovers,
                "bytes_per_second": rail.bytes_per_second,
                "inflight_bytes": rail.inflight_bytes,
            })
        })
        .collect();
    json!({ "name": engine.engine.name(), "memory": memory, "links": links }).to_string()
}
