//! Structs of the header, and the description of a communicator that they hold.

use std::ffi::{c_char, c_int};
use std::ptr;

use kvplane::group::{FailureMode, GroupSpec, MAX_RANKS, WorldRank};

use super::mirror::Mirror;
use super::outcome::{CallFailure, ResultCode, TEXT_BYTES};
use crate::rim::{array, text};

const MAGIC: u32 = 0x20b6_de6b;
const VERSION: u32 = 1;
/// Marks a field that is not set.
const UNSET: c_int = c_int::MIN;
/// Bytes of the struct before its last field was added.
const LEAST_BYTES: usize = 104;
/// Most bytes that a later version of the struct may have.
const MOST_BYTES: usize = 4096;

/// Description of a communicator, laid out as in C.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CommConfig {
    struct_size: usize,
    magic: u32,
    version: u32,
    group_id: *const c_char,
    rank: c_int,
    size: c_int,
    max_group_size: c_int,
    global_ranks: *const i32,
    global_rank_count: usize,
    device_type: c_int,
    device_index: c_int,
    id_resolve_policy: c_int,
    auto_deactivate_on_failure: c_int,
    auto_sync_on_failure: c_int,
    active_ranks_mirror: *mut i32,
    active_ranks_mirror_count: usize,
    active_ranks_mirror_is_device: c_int,
    active_ranks_mirror_device_index: c_int,
    preferred_gpu_collective_backend: c_int,
}

/// Answer to a proposal, laid out as in C.
#[repr(C)]
pub(crate) struct ProposalResponse {
    pub(crate) status: c_int,
    pub(crate) new_epoch: u64,
    pub(crate) dropped_rank_count: usize,
    pub(crate) dropped_ranks: [i32; MAX_RANKS],
    pub(crate) reject_reason: [c_char; TEXT_BYTES],
}

/// Answer to a synchronization after a failure, laid out as in C.
#[repr(C)]
pub(crate) struct SyncResponse {
    pub(crate) status: c_int,
    pub(crate) reject_reason: [c_char; TEXT_BYTES],
}

// Layout of the header on 64-bit machines.
const _: () = assert!(size_of::<CommConfig>() == 112);
const _: () = assert!(std::mem::offset_of!(CommConfig, global_ranks) == 40);
const _: () = assert!(std::mem::offset_of!(CommConfig, active_ranks_mirror) == 80);
const _: () = assert!(std::mem::offset_of!(CommConfig, preferred_gpu_collective_backend) == LEAST_BYTES);
const _: () = assert!(size_of::<ProposalResponse>() == 536);
const _: () = assert!(std::mem::offset_of!(ProposalResponse, dropped_ranks) == 24);
const _: () = assert!(size_of::<SyncResponse>() == 260);
const _: () = assert!(MAX_RANKS == 64);

/// Place of a process in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorldPlace {
    pub(crate) rank: u8,
    /// Most processes of the world.
    pub(crate) size: u8,
}

impl WorldPlace {
    pub(crate) fn new(rank: c_int, size: c_int) -> Result<Self, CallFailure> {
        match (u8::try_from(rank), u8::try_from(size)) {
            (Ok(rank), Ok(size)) if rank < size && usize::from(size) <= MAX_RANKS => Ok(Self { rank, size }),
            _ => Err(CallFailure::argument(format_args!(
                "global rank {rank} of at most {size} processes: a world has 1 to {MAX_RANKS}, with ranks from 0"
            ))),
        }
    }
}

/// A membership that a program describes.
pub(crate) struct MembershipSpec {
    pub(crate) spec: GroupSpec,
    pub(crate) mirror: Option<Mirror>,
}

fn argument(text: &str) -> CallFailure {
    CallFailure::argument(text)
}

impl CommConfig {
    /// Reads a struct of whichever version.
    ///
    /// # Safety
    /// `config` is null, or points to as many bytes as its first field says.
    unsafe fn read(config: *const Self) -> Result<Self, CallFailure> {
        if config.is_null() {
            return Err(CallFailure::argument("the configuration is null"));
        }
        // SAFETY: by the caller's promise.
        let bytes = unsafe { config.cast::<usize>().read_unaligned() };
        if !(LEAST_BYTES..=MOST_BYTES).contains(&bytes) {
            return Err(CallFailure::argument(format_args!(
                "the configuration has structSize {bytes}, not {LEAST_BYTES} to {MOST_BYTES}: it begins with \
                 MOONCAKE_PG_COMM_CONFIG_INITIALIZER"
            )));
        }
        let mut read = Self {
            struct_size: 0,
            magic: 0,
            version: 0,
            group_id: ptr::null(),
            rank: 0,
            size: 0,
            max_group_size: 0,
            global_ranks: ptr::null(),
            global_rank_count: 0,
            device_type: 0,
            device_index: 0,
            id_resolve_policy: 0,
            auto_deactivate_on_failure: 0,
            auto_sync_on_failure: 0,
            active_ranks_mirror: ptr::null_mut(),
            active_ranks_mirror_count: 0,
            active_ranks_mirror_is_device: 0,
            active_ranks_mirror_device_index: 0,
            preferred_gpu_collective_backend: 0,
        };
        let known = bytes.min(size_of::<Self>());
        // SAFETY: the program's struct has as many bytes, and each field of ours takes any.
        unsafe { ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut read).cast::<u8>(), known) };
        if (read.magic, read.version) != (MAGIC, VERSION) {
            return Err(CallFailure::argument(format_args!(
                "the configuration has magic {:#x} and version {}, not {MAGIC:#x} and {VERSION}",
                read.magic, read.version
            )));
        }
        Ok(read)
    }

    /// Returns the membership that a struct describes, of the process of a place.
    ///
    /// # Safety
    /// Conditions of [`Self::read`]; a string with a final zero or null; as many ranks as it says or null; a mirror of
    /// as many entries as it says, valid for the life of the communicator, or null.
    pub(crate) unsafe fn describe(config: *const Self, place: WorldPlace) -> Result<MembershipSpec, CallFailure> {
        // SAFETY: by the caller's promise.
        let config = unsafe { Self::read(config) }?;
        // SAFETY: as above.
        let name = unsafe { text(config.group_id) }.ok_or_else(|| argument("groupId is null or not UTF-8"))?;
        match config.device_type {
            0 => {}
            1 => {
                let text = "communicators for the memory of devices are not supported: set deviceType to \
                            mooncakePgDeviceCpu";
                return Err(CallFailure::new(ResultCode::NotSupported, text));
            }
            other => return Err(argument(&format!("deviceType {other}: there are 0 and 1"))),
        }
        let size = usize::try_from(config.size).ok().filter(|size| (1..=MAX_RANKS).contains(size));
        let size = size.ok_or_else(|| argument(&format!("size {}: it is 1 to {MAX_RANKS}", config.size)))?;
        let max_size = if config.max_group_size == UNSET { config.size } else { config.max_group_size };
        let max_size = u8::try_from(max_size).ok().filter(|most| (size..=MAX_RANKS).contains(&usize::from(*most)));
        let max_size = max_size.ok_or_else(|| {
            argument(&format!("maxGroupSize {}: it is {size}, the size, to {MAX_RANKS}", config.max_group_size))
        })?;
        if config.global_rank_count != size {
            return Err(argument(&format!("{} global ranks in a group of size {size}", config.global_rank_count)));
        }
        // SAFETY: as above.
        let ranks = unsafe { array(config.global_ranks, size) }.ok_or_else(|| argument("globalRanks is null"))?;
        let order = ranks.iter().map(|&rank| place.rank_of(rank)).collect::<Result<Vec<_>, _>>()?;
        if let Some(twice) = order.iter().enumerate().find_map(|(at, rank)| order[..at].contains(rank).then_some(rank))
        {
            return Err(argument(&format!("global rank {} is twice in globalRanks", twice.0)));
        }
        let own = usize::try_from(config.rank).ok().and_then(|rank| order.get(rank));
        match own {
            None => return Err(argument(&format!("rank {} in a group of size {size}", config.rank))),
            Some(found) if found.0 != place.rank => {
                return Err(argument(&format!(
                    "rank {} is global rank {} by globalRanks, and this process has global rank {}",
                    config.rank, found.0, place.rank
                )));
            }
            Some(_) => {}
        }
        let is_joining = match config.id_resolve_policy {
            0 => false,
            1 => true,
            other => return Err(argument(&format!("idResolvePolicy {other}: there are 0 and 1"))),
        };
        let failure_mode = match (config.auto_deactivate_on_failure != 0, config.auto_sync_on_failure != 0) {
            (true, true) => FailureMode::Automatic,
            (true, false) => FailureMode::Deferred,
            (false, false) => FailureMode::Manual,
            (false, true) => return Err(argument("autoSyncOnFailure needs autoDeactivateOnFailure")),
        };
        let mirror = config.mirror(usize::from(max_size))?;
        Ok(MembershipSpec {
            spec: GroupSpec { name: name.to_owned(), order, max_size, failure_mode, is_joining },
            mirror,
        })
    }

    fn mirror(&self, max_size: usize) -> Result<Option<Mirror>, CallFailure> {
        let (address, entries) = (self.active_ranks_mirror, self.active_ranks_mirror_count);
        if address.is_null() {
            return match entries {
                0 => Ok(None),
                _ => Err(CallFailure::argument("activeRanksMirror is null, and has entries")),
            };
        }
        if self.active_ranks_mirror_is_device != 0 {
            let text = "a mirror in the memory of a device is not supported";
            return Err(CallFailure::new(ResultCode::NotSupported, text));
        }
        if entries < max_size || !address.is_aligned() {
            return Err(CallFailure::argument(format_args!(
                "activeRanksMirror has {entries} entries at {address:?}; it needs {max_size}, aligned"
            )));
        }
        Ok(Some(Mirror::new(address, max_size)))
    }
}

impl WorldPlace {
    fn rank_of(self, rank: i32) -> Result<WorldRank, CallFailure> {
        let found = u8::try_from(rank).ok().filter(|rank| *rank < self.size).map(WorldRank);
        found.ok_or_else(|| {
            CallFailure::argument(format_args!("global rank {rank} in a world of at most {} processes", self.size))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: WorldPlace = WorldPlace { rank: 3, size: 8 };
    const RANKS: [i32; 3] = [0, 3, 5];

    fn config() -> CommConfig {
        CommConfig {
            struct_size: size_of::<CommConfig>(),
            magic: MAGIC,
            version: VERSION,
            group_id: c"group".as_ptr(),
            rank: 1,
            size: 3,
            max_group_size: UNSET,
            global_ranks: RANKS.as_ptr(),
            global_rank_count: 3,
            device_type: 0,
            device_index: UNSET,
            id_resolve_policy: 0,
            auto_deactivate_on_failure: 1,
            auto_sync_on_failure: 1,
            active_ranks_mirror: ptr::null_mut(),
            active_ranks_mirror_count: 0,
            active_ranks_mirror_is_device: 0,
            active_ranks_mirror_device_index: UNSET,
            preferred_gpu_collective_backend: 0,
        }
    }

    fn describe(change: impl FnOnce(&mut CommConfig)) -> Result<MembershipSpec, CallFailure> {
        let mut config = config();
        change(&mut config);
        // SAFETY: the ranks, the name and the struct are there.
        unsafe { CommConfig::describe(&raw const config, PLACE) }
    }

    #[test]
    fn a_description_is_read_in_both_sizes() {
        for bytes in [LEAST_BYTES, 112, 4096] {
            let mut config = [config(); 40];
            config[0].struct_size = bytes;
            // SAFETY: as many bytes as the largest size.
            let found = unsafe { CommConfig::describe(config.as_ptr(), PLACE) }.expect("valid").spec;
            assert_eq!((found.name.as_str(), found.max_size, found.is_joining), ("group", 3, false));
            assert_eq!(found.order, [0, 3, 5].map(WorldRank));
            assert_eq!(found.failure_mode, FailureMode::Automatic);
        }
        let spec = describe(|config| {
            (config.max_group_size, config.id_resolve_policy) = (64, 1);
            config.auto_sync_on_failure = 0;
        });
        let spec = spec.expect("valid").spec;
        assert_eq!((spec.max_size, spec.is_joining, spec.failure_mode), (64, true, FailureMode::Deferred));
    }

    #[test]
    fn wrong_descriptions_are_named() {
        let text = |change: fn(&mut CommConfig)| describe(change).err().expect("refused").text;
        assert!(text(|config| config.struct_size = 103).contains("structSize 103"));
        assert!(text(|config| config.struct_size = usize::MAX).contains("structSize"));
        assert!(text(|config| config.magic = 1).contains("magic 0x1"));
        assert!(text(|config| config.version = 2).contains("version 2"));
        assert!(text(|config| config.group_id = ptr::null()).contains("groupId"));
        assert!(text(|config| config.device_type = 1).contains("mooncakePgDeviceCpu"));
        assert!(text(|config| config.size = UNSET).contains("size"));
        assert!(text(|config| config.size = 65).contains("size 65"));
        assert!(text(|config| config.max_group_size = 65).contains("maxGroupSize 65"));
        assert!(text(|config| config.max_group_size = 2).contains("maxGroupSize 2"));
        assert!(text(|config| config.global_rank_count = 65).contains("65 global ranks"));
        assert!(text(|config| config.global_ranks = ptr::null()).contains("globalRanks"));
        assert!(text(|config| config.global_ranks = [0, 3, 8].as_ptr()).contains("global rank 8"));
        assert!(text(|config| config.global_ranks = [0, 3, -1].as_ptr()).contains("global rank -1"));
        assert!(text(|config| config.global_ranks = [0, 3, 0].as_ptr()).contains("twice"));
        assert!(text(|config| config.rank = 0).contains("this process has global rank 3"));
        assert!(text(|config| config.rank = 3).contains("rank 3 in a group"));
        assert!(text(|config| config.rank = UNSET).contains("rank"));
        assert!(text(|config| config.auto_deactivate_on_failure = 0).contains("autoSyncOnFailure"));
        assert!(text(|config| config.id_resolve_policy = 2).contains("idResolvePolicy 2"));
        assert!(text(|config| config.active_ranks_mirror_count = 3).contains("activeRanksMirror"));
        assert!(text(|config| config.active_ranks_mirror = ptr::dangling_mut()).contains("0 entries"));
        assert!(WorldPlace::new(0, 65).is_err() && WorldPlace::new(-1, 2).is_err() && WorldPlace::new(2, 2).is_err());
        // SAFETY: null is allowed.
        assert!(unsafe { CommConfig::describe(ptr::null(), PLACE) }.is_err());
    }
}
