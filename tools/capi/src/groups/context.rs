//! Contexts: the process of a rank in a world.

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvplane::group::{self, GroupProcess, GroupProcessConfig};
use kvplane::{Control, OwnAddress};

use super::coordinator::{self, CoordinatorAddress};
use super::layout::WorldPlace;
use super::outcome::{CallFailure, ResultCode, call, put};
use crate::handles::Handles;
use crate::rim::{array, text, with_engine, write_text};

/// Time after which a collective fails if a living rank has not called it.
const COLLECTIVE: Duration = Duration::from_secs(30 * 60);
/// Time within which a message arrives.
const MESSAGE: Duration = Duration::from_secs(10);
/// Time within which a synchronization after a failure ends.
const RECONCILIATION: Duration = Duration::from_secs(30);
/// Deadline of calls to the control plane.
const CONTROL: Duration = Duration::from_secs(30);
/// Most devices that a program may name.
const DEVICES: usize = 64;

static CONTEXTS: Handles<Context> = Handles::new("context");

/// Settings that do not change after the initialization.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    /// Address or name of this host, as the program gave it.
    host: String,
    /// Names of RDMA devices.
    devices: Vec<String>,
}

/// State of a context.
struct ContextState {
    settings: Settings,
    place: Option<WorldPlace>,
    /// Address of the coordinator that this context launched.
    launched: Option<String>,
    process: Option<Arc<GroupProcess>>,
    /// Number of communicators.
    uses: usize,
    is_destroyed: bool,
}

/// Process of a rank in a world.
pub(crate) struct Context {
    state: Mutex<ContextState>,
    collective_us: AtomicU64,
    message_us: AtomicU64,
    reconciliation_us: AtomicU64,
}

/// A communicator's use of its context.
pub(crate) struct ContextUse {
    context: Arc<Context>,
}

impl Drop for ContextUse {
    fn drop(&mut self) {
        self.context.state().uses -= 1;
    }
}

const fn microseconds(time: Duration) -> AtomicU64 {
    AtomicU64::new(time.as_micros() as u64)
}

impl ContextState {
    fn place(&self) -> Result<WorldPlace, CallFailure> {
        self.place.ok_or_else(|| CallFailure::state("the context is not initialized: mooncakePgContextInitialize"))
    }

    /// Changes the settings. Once the context is initialized, they stay as they are.
    fn set(&mut self, change: impl FnOnce(&mut Settings)) -> Result<(), CallFailure> {
        let mut changed = self.settings.clone();
        change(&mut changed);
        if self.place.is_some() && changed != self.settings {
            return Err(CallFailure::state(
                "the context is initialized: its address and devices do not change any more",
            ));
        }
        self.settings = changed;
        Ok(())
    }

    /// Returns the settings of the process.
    fn process_config(&self, control: Control, world: &str, rank: u8) -> Result<GroupProcessConfig, CallFailure> {
        let OwnAddress { listen, announce, .. } = OwnAddress::resolve(&self.settings.host, None);
        let devices = group::open_devices(&self.settings.devices);
        let unusable = |error| CallFailure::argument(format_args!("mooncakePgContextSetDeviceFilter: {error}"));
        let config = GroupProcessConfig::new(control, world, rank);
        Ok(GroupProcessConfig { listen, announce, rdma: devices.map_err(unusable)?, deadline: CONTROL, ..config })
    }
}

impl Context {
    fn new() -> Self {
        let settings = Settings { host: IpAddr::V4(Ipv4Addr::LOCALHOST).to_string(), devices: Vec::new() };
        let state = ContextState { settings, place: None, launched: None, process: None, uses: 0, is_destroyed: false };
        Self {
            state: Mutex::new(state),
            collective_us: microseconds(COLLECTIVE),
            message_us: microseconds(MESSAGE),
            reconciliation_us: microseconds(RECONCILIATION),
        }
    }

    pub(crate) fn of(context: *mut c_void) -> Result<Arc<Self>, CallFailure> {
        Ok(CONTEXTS.get(context)?)
    }

    fn state(&self) -> MutexGuard<'_, ContextState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time after which a collective fails.
    pub(crate) fn collective_timeout(&self) -> Duration {
        Duration::from_micros(self.collective_us.load(Ordering::Relaxed))
    }

    /// Returns the time within which a message arrives.
    pub(crate) fn message_timeout(&self) -> Duration {
        Duration::from_micros(self.message_us.load(Ordering::Relaxed))
    }

    /// Returns the time within which a synchronization after a failure ends.
    pub(crate) fn reconciliation_window(&self) -> Duration {
        Duration::from_micros(self.reconciliation_us.load(Ordering::Relaxed))
    }

    /// Begins the use of a communicator: the context is not destroyed before its end.
    pub(crate) fn begin_use(context: &Arc<Self>) -> Result<(ContextUse, Arc<GroupProcess>, WorldPlace), CallFailure> {
        let mut state = context.state();
        let place = state.place()?;
        let process = state
            .process
            .clone()
            .ok_or_else(|| CallFailure::state("the context has no coordinator: mooncakePgContextConnectCoordinator"))?;
        state.uses += 1;
        drop(state);
        Ok((ContextUse { context: Arc::clone(context) }, process, place))
    }

    fn initialize(&self, rank: c_int, size: c_int) -> Result<(), CallFailure> {
        let place = WorldPlace::new(rank, size)?;
        let mut state = self.state();
        match state.place {
            Some(known) if known != place => Err(CallFailure::state(format_args!(
                "the context was initialized with rank {} of {}, and not with rank {rank} of {size}",
                known.rank, known.size
            ))),
            _ => {
                state.place = Some(place);
                Ok(())
            }
        }
    }

    fn launch(&self) -> Result<String, CallFailure> {
        let mut state = self.state();
        let rank = state.place()?.rank;
        if rank != 0 {
            return Err(CallFailure::state(format_args!("global rank 0 launches the coordinator, not rank {rank}")));
        }
        if let Some(launched) = &state.launched {
            return Ok(launched.clone());
        }
        let launched = coordinator::launch()?.to_string();
        state.launched = Some(launched.clone());
        Ok(launched)
    }

    fn connect(&self, address: &str) -> Result<(), CallFailure> {
        let address: CoordinatorAddress = address.parse().map_err(CallFailure::argument)?;
        let mut state = self.state();
        let rank = state.place()?.rank;
        if state.process.is_some() {
            return Ok(());
        }
        let config = state.process_config(address.control()?, address.world(), rank)?;
        let process = GroupProcess::join(config)?;
        state.process = Some(Arc::new(process));
        Ok(())
    }

    /// Leaves the world.
    fn end(&self) -> Result<(), CallFailure> {
        let mut state = self.state();
        if state.uses > 0 {
            return Err(CallFailure::new(
                ResultCode::ResourceBusy,
                format_args!("the context has {} communicators: mooncakePgCommDestroy", state.uses),
            ));
        }
        state.is_destroyed = true;
        if let Some(process) = state.process.take() {
            // Without an answer, the control plane finds the process silent.
            drop(process.close());
        }
        Ok(())
    }
}

/// Makes a call with a context.
fn with_context(context: *mut c_void, work: impl FnOnce(&Context) -> Result<(), CallFailure>) -> c_int {
    call(|| {
        let context = Context::of(context)?;
        if context.state().is_destroyed {
            return Err(CallFailure::argument("the context was destroyed"));
        }
        work(&context)
    })
}

/// Converts a time of the header, which is not negative.
fn time_of(timeout_us: i64) -> Result<u64, CallFailure> {
    let time = u64::try_from(timeout_us);
    time.map_err(|_| CallFailure::argument(format_args!("a time of {timeout_us} us: it is not negative")))
}

/// Creates a context.
///
/// # Safety
/// A place for the context, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextCreate(context: *mut *mut c_void) -> c_int {
    call(|| {
        if context.is_null() {
            return Err(CallFailure::argument("the pointer for the context is null"));
        }
        // SAFETY: by the caller's promise.
        unsafe { put(context, CONTEXTS.add(Arc::new(Context::new())), "the context") }
    })
}

/// Sets the rank of the process in its world.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgContextInitialize(
    context: *mut c_void,
    global_rank: c_int,
    max_world_size: c_int,
) -> c_int {
    with_context(context, |context| context.initialize(global_rank, max_world_size))
}

/// Finds or starts a control plane, and writes the address by which processes connect to it.
///
/// # Safety
/// An array of as many writable bytes as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextLaunchCoordinator(
    context: *mut c_void,
    address: *mut c_char,
    address_bytes: usize,
) -> c_int {
    with_context(context, |context| {
        if address.is_null() {
            return Err(CallFailure::argument("the pointer for the coordinator's address is null"));
        }
        let launched = context.launch()?;
        if launched.len() >= address_bytes {
            return Err(CallFailure::argument(format_args!(
                "the coordinator's address has {} bytes and a final zero, and there is room for {address_bytes}",
                launched.len()
            )));
        }
        // SAFETY: by the caller's promise, and at least one byte.
        unsafe { write_text(address, address_bytes, &launched) };
        Ok(())
    })
}

/// Joins the world at a control plane.
///
/// # Safety
/// A string with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextConnectCoordinator(
    context: *mut c_void,
    coordinator_address: *const c_char,
) -> c_int {
    with_context(context, |context| {
        // SAFETY: by the caller's promise.
        let address = unsafe { text(coordinator_address) };
        context.connect(address.ok_or_else(|| CallFailure::argument("the coordinator's address is null or not UTF-8"))?)
    })
}

/// Sets the address at which other processes connect to this one.
///
/// # Safety
/// A string with a final zero, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextSetHostIp(context: *mut c_void, host_ip: *const c_char) -> c_int {
    with_context(context, |context| {
        // SAFETY: by the caller's promise.
        let host = unsafe { text(host_ip) }.filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| CallFailure::argument("the host's address is null, empty or not UTF-8"))?;
        context.state().set(|settings| host.clone_into(&mut settings.host))
    })
}

/// Takes the address of an engine as the process's; null changes nothing.
///
/// # Safety
/// A live engine, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextSetTransferEngine(
    context: *mut c_void,
    transfer_engine: *mut c_void,
) -> c_int {
    with_context(context, |context| {
        let mut host = None;
        // SAFETY: by the caller's promise.
        unsafe {
            with_engine(transfer_engine, |engine| {
                host = Some(engine.engine.directory().address().ip().to_string());
                Ok(0)
            });
        }
        host.map_or(Ok(()), |host| context.state().set(|settings| settings.host = host))
    })
}

/// Names the RDMA devices that connections use.
///
/// # Safety
/// An array of as many strings with a final zero as it says, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn mooncakePgContextSetDeviceFilter(
    context: *mut c_void,
    filters: *const *const c_char,
    filter_count: usize,
) -> c_int {
    with_context(context, |context| {
        if filter_count > DEVICES {
            return Err(CallFailure::argument(format_args!("{filter_count} devices: at most {DEVICES} are named")));
        }
        // SAFETY: by the caller's promise.
        let filters = unsafe { array(filters, filter_count) };
        let filters = filters.ok_or_else(|| CallFailure::argument("the list of devices is null"))?;
        let mut devices = Vec::new();
        for filter in filters {
            // SAFETY: as above.
            let name = unsafe { text(*filter) };
            let name = name.ok_or_else(|| CallFailure::argument("the name of a device is null or not UTF-8"))?;
            if !devices.iter().any(|known| known == name) {
                devices.push(name.to_owned());
            }
        }
        context.state().set(|settings| settings.devices = devices)
    })
}

/// Sets the time after which a collective fails if a living rank has not called it; 0 for the default.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgContextSetCollectiveTimeout(context: *mut c_void, timeout_us: usize) -> c_int {
    with_context(context, |context| {
        let usual = COLLECTIVE.as_micros() as u64;
        context.collective_us.store(if timeout_us == 0 { usual } else { timeout_us as u64 }, Ordering::Relaxed);
        Ok(())
    })
}

/// Sets the time within which a message arrives.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgContextSetP2PTimeout(context: *mut c_void, timeout_us: i64) -> c_int {
    with_context(context, |context| {
        context.message_us.store(time_of(timeout_us)?, Ordering::Relaxed);
        Ok(())
    })
}

/// Sets the time within which a synchronization after a failure ends.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgContextSetFaultReconciliationWindow(context: *mut c_void, timeout_us: i64) -> c_int {
    with_context(context, |context| {
        context.reconciliation_us.store(time_of(timeout_us)?, Ordering::Relaxed);
        Ok(())
    })
}

/// Leaves the world; null is ignored.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgContextDestroy(context: *mut c_void) -> c_int {
    call(|| {
        if context.is_null() {
            return Ok(());
        }
        Context::of(context)?.end()?;
        CONTEXTS.remove(context)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn context() -> *mut c_void {
        let mut context = ptr::null_mut();
        // SAFETY: a place for the answer.
        assert_eq!(unsafe { mooncakePgContextCreate(&raw mut context) }, 0);
        context
    }

    fn is(code: ResultCode, result: c_int) -> bool {
        result == code as c_int
    }

    #[test]
    fn calls_in_another_order_are_refused() {
        let context = context();
        let mut text = [0; 64];
        // SAFETY: room for as many bytes as it says, and strings.
        unsafe {
            let mut launch = |bytes| mooncakePgContextLaunchCoordinator(context, text.as_mut_ptr(), bytes);
            assert!(is(ResultCode::InvalidState, launch(64)));
            assert!(is(
                ResultCode::InvalidState,
                mooncakePgContextConnectCoordinator(context, c"127.0.0.1:1".as_ptr())
            ));
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextInitialize(context, 0, 65)));
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextInitialize(context, 3, 3)));
            assert!(is(ResultCode::Success, mooncakePgContextInitialize(context, 1, 3)));
            assert!(is(ResultCode::Success, mooncakePgContextInitialize(context, 1, 3)));
            assert!(is(ResultCode::InvalidState, mooncakePgContextInitialize(context, 2, 3)));
            let mut launch = |bytes| mooncakePgContextLaunchCoordinator(context, text.as_mut_ptr(), bytes);
            assert!(is(ResultCode::InvalidState, launch(64)), "rank 1");
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextConnectCoordinator(context, ptr::null())));
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextConnectCoordinator(context, c"".as_ptr())));
        }
        let mut comm = ptr::null_mut();
        // SAFETY: null is allowed.
        let created = unsafe { super::super::membership::mooncakePgCommCreate(context, ptr::null(), &raw mut comm) };
        assert!(is(ResultCode::InvalidState, created), "without a coordinator");
        assert!(is(ResultCode::Success, mooncakePgContextDestroy(context)));
        assert!(is(ResultCode::InvalidArgument, mooncakePgContextDestroy(context)));
        assert!(is(ResultCode::Success, mooncakePgContextDestroy(ptr::null_mut())));
    }

    #[test]
    fn settings_are_fixed_by_the_initialization() {
        let handle = context();
        // SAFETY: strings, and null.
        unsafe {
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextSetHostIp(handle, ptr::null())));
            assert!(is(ResultCode::Success, mooncakePgContextSetHostIp(handle, c"127.0.0.2".as_ptr())));
            assert!(is(ResultCode::Success, mooncakePgContextSetTransferEngine(handle, ptr::null_mut())));
            assert!(is(ResultCode::InvalidArgument, mooncakePgContextSetDeviceFilter(handle, ptr::null(), 1)));
            let names = [c"mlx5_0".as_ptr(), c"mlx5_1".as_ptr(), c"mlx5_0".as_ptr()];
            assert!(is(ResultCode::Success, mooncakePgContextSetDeviceFilter(handle, names.as_ptr(), 3)));
            assert!(is(ResultCode::Success, mooncakePgContextInitialize(handle, 0, 2)));
            assert!(is(ResultCode::Success, mooncakePgContextSetHostIp(handle, c"127.0.0.2".as_ptr())), "as it is");
            assert!(is(ResultCode::InvalidState, mooncakePgContextSetHostIp(handle, c"127.0.0.1".as_ptr())));
            assert!(is(ResultCode::InvalidState, mooncakePgContextSetDeviceFilter(handle, ptr::null(), 0)));
        }
        let context = Context::of(handle).expect("there");
        assert_eq!(context.state().settings.devices, ["mlx5_0", "mlx5_1"]);
        assert!(is(ResultCode::Success, mooncakePgContextSetCollectiveTimeout(handle, 5)));
        assert_eq!(context.collective_timeout(), Duration::from_micros(5));
        assert!(is(ResultCode::Success, mooncakePgContextSetCollectiveTimeout(handle, 0)));
        assert_eq!(context.collective_timeout(), COLLECTIVE);
        assert!(is(ResultCode::InvalidArgument, mooncakePgContextSetP2PTimeout(handle, -1)));
        assert!(is(ResultCode::Success, mooncakePgContextSetFaultReconciliationWindow(handle, 7)));
        assert_eq!((context.message_timeout(), context.reconciliation_window()), (MESSAGE, Duration::from_micros(7)));
        assert!(is(ResultCode::Success, mooncakePgContextDestroy(handle)));
        assert!(is(ResultCode::InvalidArgument, mooncakePgContextSetP2PTimeout(handle, 1)));
    }
}
