//! P2P store of the C interface: objects by name, with the semantics of the same calls in Mooncake's Go package.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use kvplane::rpc::p2p::ObjectSummary;
use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{
    Control, ControlLinkError, Error, GetOptions, Layout, P2pConfig, P2pStore, PublishOptions, Ranks, Region, Remote,
    Status, TransferError,
};

use crate::handles::ProcessLocal;
use crate::rim::{array, guarded, text, write_text};

mod reshard;

const INVALID_ARGUMENT: c_int = -1;
const ADDRESS_OVERLAPPED: c_int = -2;
const PAYLOAD_OPENED: c_int = -3;
const PAYLOAD_NOT_OPENED: c_int = -4;
const PAYLOAD_NOT_FOUND: c_int = -5;
const TOO_MANY_RETRIES: c_int = -6;
const TRANSFER_ENGINE: c_int = -7;
const CONTROL_PLANE: c_int = -8;

/// Maximum deadline of a fetch.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn failed(code: c_int, why: impl Into<String>) -> c_int {
    LAST.with(|last| *last.borrow_mut() = why.into());
    code
}

fn code_of(error: &Error) -> c_int {
    let refused = |refusal: &kvplane::rpc::Refusal, code: RefusalCode| refusal.code == code as u16;
    let code = match error {
        Error::Call(CallError::Refused(why)) if refused(why, RefusalCode::NotFound) => PAYLOAD_NOT_FOUND,
        Error::Call(CallError::Refused(why)) if refused(why, RefusalCode::AlreadyExists) => PAYLOAD_OPENED,
        Error::Call(CallError::Refused(why)) if refused(why, RefusalCode::BadRequest) => INVALID_ARGUMENT,
        Error::ControlLink(ControlLinkError::Addresses { .. }) => INVALID_ARGUMENT,
        Error::Call(_) | Error::Discovery(_) | Error::Connect(_) | Error::ControlLink(_) | Error::NoMap => {
            CONTROL_PLANE
        }
        Error::Transfer(TransferError::AddressOverlapped { .. }) => ADDRESS_OVERLAPPED,
        Error::Status { status: Status::NotFound | Status::DeadlineExceeded, .. } => TOO_MANY_RETRIES,
        Error::Argument(_)
        | Error::P2p(_)
        | Error::Transfer(TransferError::Argument(_))
        | Error::Identity(_)
        | Error::NoCertificate { .. }
        | Error::NoTickets { .. }
        | Error::TicketIssue(_)
        | Error::DataTls(_)
        | Error::Request(_)
        | Error::Directory(_) => INVALID_ARGUMENT,
        _ => TRANSFER_ENGINE,
    };
    failed(code, error.to_string())
}

/// Settings, laid out as in C.
#[repr(C)]
pub(crate) struct Options {
    cluster: *const c_char,
    control: *const c_char,
    certificates: *const c_char,
    runtime_directory: *const c_char,
    tenant: *const c_char,
    listen: *const c_char,
    host: *const c_char,
    rack: *const c_char,
}

/// Listed object, laid out as in C.
#[repr(C)]
pub(crate) struct PayloadInfo {
    name: *mut c_char,
    version: u64,
    max_shard_size: u64,
    total_size: u64,
    size_list: *mut u64,
    size_list_len: usize,
}

// Layout of the header on 64-bit machines.
const _: () = assert!(size_of::<Options>() == 64);
const _: () = assert!(size_of::<PayloadInfo>() == 48);

/// Reason why a store was not created.
#[derive(Debug)]
enum CreateError {
    /// An option is not UTF-8.
    NotText,
    /// Only one of the control plane's addresses and the certificates is set.
    HalfRemote,
    /// The address to listen on is malformed.
    Listen { text: String },
    /// An address of the control plane cannot be resolved.
    Resolve { text: String, source: io::Error },
    /// The store cannot join the cluster.
    Connect(Error),
}

impl fmt::Display for CreateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotText => f.write_str("an option is not UTF-8"),
            Self::HalfRemote => f.write_str("control and certificates must be set together, or neither"),
            Self::Listen { text } => write!(f, "listen: {text:?} is not ip:port"),
            Self::Resolve { text, source } => write!(f, "control: {text:?}: {source}"),
            Self::Connect(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CreateError {}

/// # Safety
/// Null, or strings with a final zero, or null ones.
unsafe fn config(options: *const Options) -> Result<P2pConfig, CreateError> {
    // SAFETY: by the caller's promise.
    let options = unsafe { options.as_ref() };
    let word = |field: fn(&Options) -> *const c_char| -> Result<Option<String>, CreateError> {
        let Some(pointer) = options.map(field).filter(|pointer| !pointer.is_null()) else { return Ok(None) };
        // SAFETY: by the caller's promise.
        let word = unsafe { text(pointer) }.ok_or(CreateError::NotText)?;
        Ok(Some(word.to_owned()).filter(|word| !word.is_empty()))
    };
    let cluster = word(|options| options.cluster)?.unwrap_or_else(|| "dev".to_owned());
    let runtime_directory = word(|options| options.runtime_directory)?.map(PathBuf::from);
    let certificates = word(|options| options.certificates)?;
    let control = match (word(|options| options.control)?, certificates) {
        (None, None) => Control::Local { cluster, runtime_directory: runtime_directory.clone() },
        (Some(addresses), Some(identity)) => {
            Control::Remote(Remote { cluster, addresses: resolve(&addresses)?, identity: PathBuf::from(identity) })
        }
        _ => return Err(CreateError::HalfRemote),
    };
    let mut config = P2pConfig::new(control);
    let listen = word(|options| options.listen)?;
    config.by_route = listen.is_none();
    if let Some(listen) = listen {
        let listen: SocketAddr = listen.parse().map_err(|_| CreateError::Listen { text: listen })?;
        config.engine.listen = SocketAddr::new(listen.ip(), 0);
        config.engine.data_port = listen.port();
    }
    config.engine.runtime_directory = runtime_directory;
    config.tenant = word(|options| options.tenant)?.unwrap_or_default();
    config.host = word(|options| options.host)?.unwrap_or(config.host);
    config.rack = word(|options| options.rack)?.unwrap_or_default();
    Ok(config)
}

fn resolve(addresses: &str) -> Result<Vec<SocketAddr>, CreateError> {
    let mut all = Vec::new();
    for one in addresses.split(',').map(str::trim).filter(|one| !one.is_empty()) {
        let found = one.to_socket_addrs();
        all.extend(found.map_err(|source| CreateError::Resolve { text: one.to_owned(), source })?);
    }
    Ok(all)
}

/// # Safety
/// `store` is null, or came from `p2pStoreCreate` and was not destroyed.
unsafe fn with_store(store: *mut c_void, work: impl FnOnce(&P2pStore) -> Result<(), c_int>) -> c_int {
    // SAFETY: a pointer that is not null is a live store, by the caller's promise.
    let Some(store) = (unsafe { store.cast::<ProcessLocal<P2pStore>>().as_ref() }) else {
        return failed(INVALID_ARGUMENT, "the store is null");
    };
    let Some(store) = store.get() else {
        return failed(TRANSFER_ENGINE, "the store belongs to the process that this one was forked from");
    };
    guarded(TRANSFER_ENGINE, || work(store).map_or_else(|code| code, |()| 0))
}

/// # Safety
/// Null or a string with a final zero.
unsafe fn name_of<'a>(name: *const c_char) -> Result<&'a str, c_int> {
    // SAFETY: by the caller's promise.
    unsafe { text(name) }.ok_or_else(|| failed(INVALID_ARGUMENT, "the name is null or not UTF-8"))
}

/// Returns the name of an object that is not held here: each object is held once, and released by one call.
///
/// # Safety
/// Null or a string with a final zero.
unsafe fn free_name<'a>(store: &P2pStore, name: *const c_char) -> Result<&'a str, c_int> {
    // SAFETY: by the caller's promise.
    let name = unsafe { name_of(name) }?;
    if store.holds(name, None) {
        return Err(failed(PAYLOAD_OPENED, format!("object {name:?} is held here already")));
    }
    Ok(name)
}

/// Converts a deadline; `None` for 0.
fn deadline_of(seconds: f64) -> Result<Option<Duration>, c_int> {
    let deadline = Duration::try_from_secs_f64(seconds);
    let deadline = deadline.map_err(|_| failed(INVALID_ARGUMENT, "the deadline is negative or not a number"))?;
    Ok(Some(deadline.min(LONGEST)).filter(|_| seconds > 0.0))
}

/// # Safety
/// Arrays of `count` elements, or null; ranges that stay mapped as the header says.
unsafe fn regions(addresses: *const *mut c_void, sizes: *const u64, count: usize) -> Result<Vec<Arc<Region>>, c_int> {
    // SAFETY: by the caller's promise.
    let (addresses, sizes) = unsafe { (array(addresses, count), array(sizes, count)) };
    let (Some(addresses), Some(sizes)) = (addresses, sizes) else {
        return Err(failed(INVALID_ARGUMENT, "the list of addresses or of sizes is null"));
    };
    let region = |(&address, &bytes): (&*mut c_void, &u64)| {
        let end = (address as u64).checked_add(bytes).filter(|&end| end <= isize::MAX as u64);
        if address.is_null() || bytes == 0 || end.is_none() {
            return Err(failed(INVALID_ARGUMENT, format!("{bytes} bytes at {address:?} cannot be registered")));
        }
        // SAFETY: by the caller's promise; unregistering waits until nothing uses the region.
        Ok(unsafe { Region::adopt(address.cast(), bytes as usize) })
    };
    addresses.iter().zip(sizes).map(region).collect()
}

/// Creates a store, or returns null.
///
/// # Safety
/// Conditions of the header: null, or options whose strings have a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreCreate(options: *const Options) -> *mut c_void {
    guarded(ptr::null_mut(), || {
        // SAFETY: by the caller's promise.
        let started =
            unsafe { config(options) }.and_then(|config| P2pStore::connect(config).map_err(CreateError::Connect));
        match started {
            Ok(store) => Box::into_raw(Box::new(ProcessLocal::new(store))).cast(),
            Err(why) => {
                failed(CONTROL_PLANE, why.to_string());
                ptr::null_mut()
            }
        }
    })
}

/// Destroys a store; null is ignored.
///
/// # Safety
/// A store without further users, or null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreDestroy(store: *mut c_void) {
    if !store.is_null() {
        // SAFETY: it came from `p2pStoreCreate`, and this is its last use, by the caller's promise.
        guarded((), || drop(unsafe { Box::from_raw(store.cast::<ProcessLocal<P2pStore>>()) }));
    }
}

/// Publishes ranges of memory as the buffers of an object, and serves it.
///
/// # Safety
/// A live store, a string with a final zero, arrays of `count` elements, and ranges that stay mapped.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreRegister(
    store: *mut c_void,
    name: *const c_char,
    addr_list: *const *mut c_void,
    size_list: *const u64,
    count: usize,
    max_shard_size: u64,
    force_create: c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, |store| {
            let (name, regions) = (free_name(store, name)?, regions(addr_list, size_list, count)?);
            // Without force, the content must be equal if any peer has the object: it is registered as the existing
            // version.
            let version = match store.find(name, None) {
                Ok(found) if force_create == 0 => Some(found.version),
                Ok(_) => None,
                Err(error) if code_of(&error) == PAYLOAD_NOT_FOUND => None,
                Err(error) => return Err(code_of(&error)),
            };
            let sizes: Vec<u64> = regions.iter().map(|region| region.bytes() as u64).collect();
            let shard_bytes = Some(Layout::fitting_shard_bytes(&sizes).min(max_shard_size));
            let options = PublishOptions { version, shard_bytes, ..PublishOptions::default() };
            store.register(name, &regions, &options).map(|_| ()).map_err(|error| code_of(&error))
        })
    }
}

/// Stops serving an object.
///
/// # Safety
/// A live store and a string with a final zero.
unsafe fn leave(store: *mut c_void, name: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, |store| {
            let name = name_of(name)?;
            if !store.holds(name, None) {
                return Err(failed(PAYLOAD_NOT_OPENED, format!("object {name:?} is not held here")));
            }
            store.unregister(name, None).map_err(|error| code_of(&error))
        })
    }
}

/// Stops serving an object that was registered or fetched.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreUnregister(store: *mut c_void, name: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { leave(store, name) }
}

/// Stops serving an object that was fetched.
///
/// # Safety
/// A live store and a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreDeleteReplica(store: *mut c_void, name: *const c_char) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { leave(store, name) }
}

/// Lists the objects whose names begin with `name_prefix`, each in its newest version.
///
/// # Safety
/// A live store, a string with a final zero, and room for a pointer and a number.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreList(
    store: *mut c_void,
    name_prefix: *const c_char,
    list: *mut *mut PayloadInfo,
    count: *mut usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, |store| {
            if list.is_null() || count.is_null() {
                return Err(failed(INVALID_ARGUMENT, "the pointers for the list are null"));
            }
            let found = store.list(name_of(name_prefix)?).map_err(|error| code_of(&error))?;
            // The newest version of each object comes last.
            let newest: BTreeMap<String, ObjectSummary> =
                found.into_iter().map(|object| (object.name.clone(), object)).collect();
            let mut infos = Vec::with_capacity(newest.len());
            for (name, object) in newest {
                match store.find(&name, Some(object.version)) {
                    Ok(found) => infos.push((name, object, found.layout.sizes().to_vec())),
                    // Removed meanwhile.
                    Err(error) if code_of(&error) == PAYLOAD_NOT_FOUND => {}
                    Err(error) => return Err(code_of(&error)),
                }
            }
            let infos: Box<[PayloadInfo]> = infos.into_iter().filter_map(told).collect();
            count.write(infos.len());
            list.write(Box::into_raw(infos).cast());
            Ok(())
        })
    }
}

/// Converts an object for C; `None` if its name contains a zero byte.
fn told(listed: (String, ObjectSummary, Vec<u64>)) -> Option<PayloadInfo> {
    let (name, object, sizes) = listed;
    let name = CString::new(name).ok()?.into_raw();
    let (size_list_len, size_list) = (sizes.len(), Box::into_raw(sizes.into_boxed_slice()).cast());
    let (version, max_shard_size, total_size) = (object.version, object.shard_bytes, object.total_bytes);
    Some(PayloadInfo { name, version, max_shard_size, total_size, size_list, size_list_len })
}

/// Frees the list that [`p2pStoreList`] returned; null is ignored.
///
/// # Safety
/// `list` and `count` come from one call of [`p2pStoreList`], and are freed once.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreFreeList(list: *mut PayloadInfo, count: usize) {
    if list.is_null() {
        return;
    }
    guarded((), || {
        // SAFETY: it was made by `p2pStoreList` with this length, by the caller's promise.
        let infos = unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(list, count)) };
        for info in &infos {
            // SAFETY: as above; each has its own name and sizes.
            unsafe {
                drop(CString::from_raw(info.name));
                drop(Box::from_raw(ptr::slice_from_raw_parts_mut(info.size_list, info.size_list_len)));
            }
        }
    });
}

/// Rank of a job, laid out as in C.
#[repr(C)]
pub(crate) struct RankOf {
    job: *const c_char,
    rank: u32,
    ranks: u32,
    patience_seconds: f64,
}

// As for `Options`.
const _: () = assert!(size_of::<RankOf>() == 24);

/// # Safety
/// A string with a final zero, or a null one.
unsafe fn ranks_of(rank: &RankOf) -> Result<Ranks, c_int> {
    let usual = Ranks::new(rank.rank, rank.ranks);
    let job = match rank.job.is_null() {
        true => String::new(),
        // SAFETY: by the caller's promise.
        false => unsafe { text(rank.job) }.ok_or_else(|| failed(INVALID_ARGUMENT, "the job is not UTF-8"))?.to_owned(),
    };
    Ok(Ranks { job, patience: deadline_of(rank.patience_seconds)?.unwrap_or(usual.patience), ..usual })
}

/// Fetches an object, as a rank of a job or alone.
///
/// # Safety
/// Conditions of [`p2pStoreRegister`]; the rank's job is null or a string with a final zero.
unsafe fn get_replica(
    store: *mut c_void,
    name: *const c_char,
    addr_list: *const *mut c_void,
    size_list: *const u64,
    count: usize,
    deadline_seconds: f64,
    rank: Option<&RankOf>,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        with_store(store, |store| {
            let (name, regions) = (free_name(store, name)?, regions(addr_list, size_list, count)?);
            let ranks = rank.map(|rank| ranks_of(rank)).transpose()?;
            let object = store.find(name, None).map_err(|error| code_of(&error))?;
            let options = GetOptions { deadline: deadline_of(deadline_seconds)?, ranks, ..GetOptions::default() };
            store.get_replica(&object, &regions, &options).map(|_| ()).map_err(|error| code_of(&error))
        })
    }
}

/// Fetches the newest version of an object into memory, verifies it, and serves it from then on.
///
/// # Safety
/// Conditions of [`p2pStoreRegister`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreGetReplica(
    store: *mut c_void,
    name: *const c_char,
    addr_list: *const *mut c_void,
    size_list: *const u64,
    count: usize,
    deadline_seconds: f64,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { get_replica(store, name, addr_list, size_list, count, deadline_seconds, None) }
}

/// Fetches an object like [`p2pStoreGetReplica`], from the other ranks of its job by a schedule.
///
/// # Safety
/// Conditions of [`p2pStoreRegister`]; a rank whose job is null or a string with a final zero.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreGetReplicaAsRank(
    store: *mut c_void,
    name: *const c_char,
    addr_list: *const *mut c_void,
    size_list: *const u64,
    count: usize,
    deadline_seconds: f64,
    rank: *const RankOf,
) -> c_int {
    // SAFETY: by the caller's promise.
    let Some(rank) = (unsafe { rank.as_ref() }) else {
        return failed(INVALID_ARGUMENT, "the rank is null: p2pStoreGetReplica fetches without one");
    };
    // SAFETY: as above.
    unsafe { get_replica(store, name, addr_list, size_list, count, deadline_seconds, Some(rank)) }
}

/// Writes the message of this thread's last failure to `buf_out`, truncated to `buf_len`.
///
/// # Safety
/// `buf_out` points to `buf_len` writable bytes, or is null.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn p2pStoreLastError(buf_out: *mut c_char, buf_len: usize) -> c_int {
    if buf_out.is_null() || buf_len == 0 {
        return INVALID_ARGUMENT;
    }
    let last = LAST.with(|last| last.borrow().clone());
    // SAFETY: by the caller's promise, and at least one byte.
    unsafe { write_text(buf_out, buf_len, &last) };
    0
}
