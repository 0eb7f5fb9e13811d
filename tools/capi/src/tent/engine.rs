//! Engines of TENT's interface: their settings, start, names and end.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use kvplane::{Environment, TransferEngine};

use super::error::{TentError, checked, print_once, with_engine};
use super::memory::LocalMemory;
use super::settings::{
    KEY_BYTES, PATH_BYTES, SettingsError, ThreadSettings, VALUE_BYTES, combine, engine_config, read, without_effect,
};
use super::transports::UsedTransports;
use crate::batches::Batches;
use crate::handles::Handles;
use crate::rim::{guarded, text_within, write_text};

/// Variable of the environment with settings for all engines: JSON, or the path of a file with JSON.
const SHARED_SETTINGS: &str = "MC_TENT_CONF";

/// Engines by their handles.
pub(super) static ENGINES: Handles<Engine> = Handles::new("transfer engine");

thread_local! {
    static SETTINGS: RefCell<ThreadSettings> = const { RefCell::new(ThreadSettings::new()) };
}

/// Engine, its batches, and the memory that it allocated.
pub(crate) struct Engine {
    pub(super) batches: Batches,
    pub(super) engine: TransferEngine,
    /// Dropped after the engine, which uses it.
    pub(super) memory: LocalMemory,
    pub(super) transports: UsedTransports,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Before the engine, which batches in flight use.
        self.batches.clear();
    }
}

impl Engine {
    /// Starts an engine with the settings of this thread and of the environment.
    fn start() -> Result<Self, Box<dyn Error>> {
        let program = SETTINGS.with_borrow_mut(ThreadSettings::values)?;
        let shared = std::env::var(SHARED_SETTINGS).ok().filter(|source| !source.is_empty());
        let values = combine(program, shared.as_deref().map(read).transpose()?.unwrap_or_default());
        for key in without_effect(&values) {
            print_once("tent_create_engine", &format_args!("the setting {key} has no effect here"));
        }
        let environment = Environment::of_process().map_err(|error| SettingsError::Environment(error.to_string()))?;
        // An engine beyond loopback prints a warning to standard error.
        let config = engine_config(&values, environment)?;
        let (tcp, shm) = (config.tcp, config.shared_memory);
        let engine = TransferEngine::start(config)?;
        let rdma = !engine.snapshot()?.rdma.is_empty();
        let transports = UsedTransports { tcp, shm, rdma };
        Ok(Self { batches: Batches::default(), engine, memory: LocalMemory::default(), transports })
    }
}

/// Returns a text of a setting.
///
/// # Safety
/// Null, or a string with a final zero.
unsafe fn setting<'a>(text: *const c_char, what: &'static str, most: usize) -> Result<&'a str, SettingsError> {
    // SAFETY: by the caller's promise.
    unsafe { text_within(text, most) }.ok_or(SettingsError::Text { what, most })
}

/// Runs work on the settings of this thread; its error is that of the next engine.
fn with_settings(work: impl FnOnce(&mut ThreadSettings) -> Result<(), SettingsError>) {
    guarded((), || {
        SETTINGS.with_borrow_mut(|settings| {
            if let Err(error) = work(settings) {
                settings.fail(error);
            }
        });
    });
}

/// Names the file with the settings of the engines that this thread creates.
///
/// # Safety
/// A string with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_load_config_from_file(path: *const c_char) {
    with_settings(|settings| {
        // SAFETY: by the caller's promise. A text of JSON may be longer than a path.
        let source = unsafe { setting(path, "path of the settings", VALUE_BYTES) }?;
        if source.len() > PATH_BYTES && !source.trim_start().starts_with('{') {
            return Err(SettingsError::Text { what: "path of the settings", most: PATH_BYTES });
        }
        settings.load_from(source);
        Ok(())
    });
}

/// Makes a setting of the engines that this thread creates.
///
/// # Safety
/// Strings with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_set_config(key: *const c_char, value: *const c_char) {
    with_settings(|settings| {
        // SAFETY: by the caller's promise.
        let (key, value) = unsafe {
            (setting(key, "key of a setting", KEY_BYTES)?, setting(value, "value of a setting", VALUE_BYTES)?)
        };
        settings.set(key, value);
        Ok(())
    });
}

/// Starts an engine, or returns null.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_create_engine() -> *mut c_void {
    guarded(ptr::null_mut(), || match Engine::start() {
        Ok(engine) => ENGINES.add(Arc::new(engine)),
        Err(error) => {
            print_once("tent_create_engine", &error);
            ptr::null_mut()
        }
    })
}

/// Destroys an engine and cancels its transfers; null is ignored.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_destroy_engine(engine: *mut c_void) {
    checked("tent_destroy_engine", || {
        drop(ENGINES.remove(engine)?);
        Ok(())
    });
}

/// Returns 1 for an engine that was created and not destroyed, else 0.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn tent_available(engine: *mut c_void) -> c_int {
    guarded(0, || c_int::from(ENGINES.get(engine).is_ok()))
}

/// Writes a text and a final zero.
///
/// # Safety
/// Null, or `bytes` writable bytes.
unsafe fn put(out: *mut c_char, bytes: usize, text: &str) -> Result<(), TentError> {
    if out.is_null() {
        return Err(TentError::Null { what: "the place for the text" });
    }
    if bytes <= text.len() {
        return Err(TentError::Room { bytes, needed: text.len() + 1 });
    }
    // SAFETY: by the caller's promise.
    unsafe { write_text(out, bytes, text) };
    Ok(())
}

/// Writes the name by which peers open the engine's segment to `buf`.
///
/// # Safety
/// `buf_len` writable bytes, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_segment_name(engine: *mut c_void, buf: *mut c_char, buf_len: usize) -> c_int {
    with_engine("tent_segment_name", engine, |engine| {
        // SAFETY: by the caller's promise.
        unsafe { put(buf, buf_len, engine.engine.name()) }
    })
}

/// Writes the address of the engine's handshake daemon to `addr_buf` and `port`.
///
/// # Safety
/// `buf_len` writable bytes and a place for the port, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tent_rpc_server_addr_port(
    engine: *mut c_void,
    addr_buf: *mut c_char,
    buf_len: usize,
    port: *mut u16,
) -> c_int {
    with_engine("tent_rpc_server_addr_port", engine, |engine| {
        if port.is_null() {
            return Err(TentError::Null { what: "the place for the port" });
        }
        let address = engine.engine.directory().address();
        // SAFETY: by the caller's promise.
        unsafe {
            put(addr_buf, buf_len, &address.ip().to_string())?;
            port.write(address.port());
        }
        Ok(())
    })
}
