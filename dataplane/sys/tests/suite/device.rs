//! Device memory over the drivers for tests: each test runs in a process of its own, as the driver is one to a process.

use kvplane_fake_devices::{Control, Counters, HandleType, is_missing};
use kvplane_sys::device::{
    CopyQueue, CopyTicket, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, Family, HANDLE_BYTES,
    Location, MemoryKind, PinnedRegion, ShareHandle, SharedAllocation, StreamHandle, is_any_driver_loaded, locate,
    open_families,
};
use kvplane_sys::{IoBuf, Region, RegionOptions, unix};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const FIRST: DeviceId = DeviceId { family: Family::Cuda, ordinal: 0 };
pub(crate) const MIB: u64 = 1 << 20;

fn fake() -> Control {
    kvplane_fake_cuda::load_cuda().unwrap()
}

pub(crate) fn host(bytes: usize) -> Arc<Region> {
    Region::allocate(&RegionOptions::new("device test", bytes)).unwrap()
}

pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    Control::pattern(seed, bytes as u64)
}

/// Polls until every batch below `ticket` and that one are done.
pub(crate) fn finish(queue: &mut CopyQueue, ticket: CopyTicket) {
    while queue.poll().unwrap() <= ticket {
        std::thread::yield_now();
    }
}

/// Checks that nothing of the driver is in use, and that it was never misused.
pub(crate) fn assert_released(fake: Control) {
    let counters = fake.counters();
    let Counters { copied_bytes, calls, .. } = counters;
    assert_eq!(counters, Counters { copied_bytes, calls, ..Counters::default() });
}

/// Copies a pattern to a device, inside it and back.
pub(crate) fn copy_around(id: DeviceId) {
    let device = Device::open(id).unwrap();
    let bytes = 3 * MIB as usize + 17;
    let (from, to) = (host(bytes), host(bytes));
    from.copy_in(0, &pattern(7, bytes));
    let _pins = [&from, &to].map(|region| PinnedRegion::new(&device, Arc::clone(region)).unwrap());
    let memory = DeviceMemory::allocate(&device, 2 * bytes as u64).unwrap();
    memory.check().unwrap();
    assert_eq!(locate(memory.address(), memory.bytes()).unwrap().kind, MemoryKind::Device(id));
    let [first, second] = [0, bytes as u64].map(|at| DeviceRange::new(&memory, at, bytes as u64));
    let mut queue = CopyQueue::new(&device).unwrap();
    let way = [
        DeviceCopy::ToDevice { from: IoBuf::whole(from), to: first.clone() },
        DeviceCopy::Between { from: first, to: second.clone() },
        DeviceCopy::ToHost { from: second, to: IoBuf::whole(Arc::clone(&to)) },
    ];
    let tickets: Vec<CopyTicket> = way.into_iter().map(|copy| queue.copy(vec![copy]).unwrap()).collect();
    finish(&mut queue, tickets[2]);
    let mut read = vec![0; bytes];
    to.copy_out(0, &mut read);
    assert_eq!(read, pattern(7, bytes));
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn bytes_survive_the_way_to_the_device_inside_it_and_back() {
    let fake = fake();
    copy_around(FIRST);
    assert_released(fake);
}

#[test]
fn hip_devices_copy_like_cuda_devices_and_the_callers_device_stays_current() {
    if is_missing(kvplane_fake_hip::load_hip) {
        return;
    }
    let fake = kvplane_fake_hip::load_hip().unwrap();
    for ordinal in [fake.ordinal(1), 0] {
        copy_around(DeviceId { family: Family::Hip, ordinal });
    }
    assert_released(fake);
    if fake.skips("an address that is used again") {
        return;
    }
    let managed = fake.allocate_managed(1, 4096);
    let second = DeviceId { family: Family::Hip, ordinal: 1 };
    assert_eq!(locate(managed, 4096).unwrap().kind, MemoryKind::Managed(second));
    let address = fake.allocate(1, MIB);
    // SAFETY: no copy is made from or to it after the free.
    let memory = unsafe { DeviceMemory::adopt(address, MIB) }.unwrap();
    let error = memory.export_dma_buf().unwrap_err();
    assert!(error.to_string().contains("no HSA runtime"), "{error}");
    fake.free(address);
    assert_eq!(fake.allocate(1, MIB), address);
    assert!(matches!(memory.check(), Err(DeviceError::Stale { .. })));
}

#[test]
fn a_batch_of_many_ranges_is_two_calls_and_a_context() {
    let fake = fake();
    if fake.skips("counted calls") {
        return;
    }
    let device = Device::open(FIRST).unwrap();
    let (pieces, length) = (200_usize, 512_usize);
    let region = host(pieces * length);
    let _pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
    let memory = DeviceMemory::allocate(&device, (2 * pieces * length) as u64).unwrap();
    region.copy_in(0, &pattern(9, pieces * length));
    let mut queue = CopyQueue::new(&device).unwrap();
    let warm = queue.copy(vec![]).unwrap();
    finish(&mut queue, warm);
    let scatter = (0..pieces).map(|piece| DeviceCopy::ToDevice {
        from: IoBuf::new(Arc::clone(&region), piece * length, length),
        to: DeviceRange::new(&memory, (2 * piece * length) as u64, length as u64),
    });
    let before = fake.counters().calls;
    let ticket = queue.copy(scatter.collect()).unwrap();
    assert_eq!(fake.counters().calls - before, 4, "push, copy, record, pop");
    finish(&mut queue, ticket);
    let read = fake.read(memory.address(), memory.bytes());
    let expected = pattern(9, pieces * length);
    for (piece, part) in expected.chunks(length).enumerate() {
        assert_eq!(&read[2 * piece * length..][..length], part, "{piece}");
    }
}

#[test]
fn copies_wait_for_what_the_caller_enqueued_before_on_its_stream() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let to = host(MIB as usize);
    let _pin = PinnedRegion::new(&device, Arc::clone(&to)).unwrap();
    let memory = DeviceMemory::allocate(&device, MIB).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    for (seed, raw) in [(1, fake.stream(0)), (2, StreamHandle::CUDA_DEFAULT.raw)] {
        fake.fill(raw, memory.address(), MIB, seed, 20_000_000);
        queue.wait_for(StreamHandle { family: Family::Cuda, raw }).unwrap();
        let from = DeviceRange::new(&memory, 0, MIB);
        let ticket = queue.copy(vec![DeviceCopy::ToHost { from, to: IoBuf::whole(Arc::clone(&to)) }]).unwrap();
        finish(&mut queue, ticket);
        let mut read = vec![0; MIB as usize];
        to.copy_out(0, &mut read);
        assert_eq!(read, pattern(seed, MIB as usize), "{seed}");
    }
}

#[test]
fn copies_wait_for_streams_of_other_devices_of_the_family() {
    let hip = kvplane_fake_hip::load_hip().unwrap();
    for (fake, family) in [(fake(), Family::Cuda), (hip, Family::Hip)] {
        let [device, other] = [0, 1].map(|ordinal| Device::open(DeviceId { family, ordinal }).unwrap());
        let to = host(MIB as usize);
        let pin = PinnedRegion::new(&device, Arc::clone(&to)).unwrap();
        let memory = DeviceMemory::allocate(&device, MIB).unwrap();
        let mut queue = CopyQueue::new(&device).unwrap();
        let raw = fake.stream(1);
        fake.fill(raw, memory.address(), MIB, 5, 20_000_000);
        queue.wait_for(StreamHandle { family, raw }).unwrap();
        let from = DeviceRange::new(&memory, 0, MIB);
        let ticket = queue.copy(vec![DeviceCopy::ToHost { from, to: IoBuf::whole(Arc::clone(&to)) }]).unwrap();
        finish(&mut queue, ticket);
        let mut read = vec![0; MIB as usize];
        to.copy_out(0, &mut read);
        assert_eq!(read, pattern(5, MIB as usize), "{family:?}");
        let unknown = queue.wait_for(StreamHandle { family, raw: 0xdead_0000 }).unwrap_err();
        assert!(matches!(unknown, DeviceError::Call { code: 400, .. }), "{unknown}");
        drop((queue, memory, pin, device, other));
        assert_eq!((fake.counters().events, fake.counters().contexts), (0, 0));
    }
}

#[test]
fn modelled_copies_take_the_time_of_their_engine_and_move_nothing() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let bytes = 4 * MIB;
    let to = host(bytes as usize);
    let _pin = PinnedRegion::new(&device, Arc::clone(&to)).unwrap();
    let memory = DeviceMemory::allocate(&device, bytes).unwrap();
    fake.write(memory.address(), &pattern(4, bytes as usize));
    let copy = || {
        let (from, to) = (DeviceRange::new(&memory, 0, bytes), IoBuf::whole(Arc::clone(&to)));
        vec![DeviceCopy::ToHost { from, to }]
    };
    fake.model_engines(1_000_000_000);
    let (mut queue, mut other) = (CopyQueue::new(&device).unwrap(), CopyQueue::new(&device).unwrap());
    let started = Instant::now();
    queue.copy(copy()).unwrap();
    let ticket = other.copy(copy()).unwrap();
    finish(&mut other, ticket);
    let two = Duration::from_nanos(2 * bytes);
    assert!(started.elapsed() >= two, "both queues share the engine of their direction");
    assert_eq!(fake.counters().copied_bytes, 2 * bytes);
    let mut read = vec![7; bytes as usize];
    to.copy_out(0, &mut read);
    assert!(read.iter().all(|byte| *byte == 0));
    fake.model_engines(0);
    let ticket = queue.copy(copy()).unwrap();
    finish(&mut queue, ticket);
    to.copy_out(0, &mut read);
    assert!(read == pattern(4, bytes as usize), "copies are made again");
}

#[test]
fn calls_within_a_hold_share_one_change_of_the_context() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let other = Device::open(DeviceId { ordinal: 1, ..FIRST }).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    // The events of the first three are used again.
    let copies = |queue: &mut CopyQueue, is_held: bool| {
        let before = fake.counters().calls;
        let mut copy = || (0..3).map(|_| queue.copy(vec![]).unwrap()).last().unwrap();
        let ticket = if is_held { device.hold(copy) } else { copy() };
        let calls = fake.counters().calls - before;
        finish(queue, ticket);
        calls
    };
    copies(&mut queue, false);
    let [apart, together] = [false, true].map(|is_held| copies(&mut queue, is_held));
    assert_eq!(apart - together, 4, "{apart} and {together}: three changes of the context, and one");
    // The other device's context is current for its calls only.
    device.hold(|| {
        let memory = DeviceMemory::allocate(&other, MIB).unwrap();
        assert_eq!(locate(memory.address(), MIB).unwrap().kind.device(), Some(other.id()));
        let memory = DeviceMemory::allocate(&device, MIB).unwrap();
        assert_eq!(locate(memory.address(), MIB).unwrap().kind.device(), Some(FIRST));
    });
    assert_eq!(fake.counters().without_context, 0);
    drop((queue, device, other));
    assert_released(fake);
}

#[test]
fn locate_distinguishes_host_device_and_managed_memory_and_rejects_the_rest() {
    let fake = fake();
    let region = host(4096);
    assert_eq!(locate(region.address(), 4096).unwrap().kind, MemoryKind::Host);
    assert_eq!(fake.counters().calls, 0, "host memory asks no driver");
    let device = Device::open(FIRST).unwrap();
    let memory = DeviceMemory::allocate(&device, 8192).unwrap();
    let Location { kind, allocation } = locate(memory.address() + 100, 8092).unwrap();
    let allocation = allocation.unwrap();
    assert_eq!((kind, allocation.base, allocation.bytes), (MemoryKind::Device(FIRST), memory.address(), 8192));
    let second = DeviceId { ordinal: fake.ordinal(1), ..FIRST };
    let managed = fake.allocate_managed(usize::from(second.ordinal), 4096);
    assert_eq!(locate(managed, 4096).unwrap().kind, MemoryKind::Managed(second));
    assert!(matches!(locate(memory.address() + 1, 8192), Err(DeviceError::BeyondAllocation { allocated: 8192, .. })));
    let freed = fake.allocate(0, 4096);
    fake.free(freed);
    for address in [freed, 64, u64::MAX - 5] {
        let error = locate(address, 1).unwrap_err();
        assert!(matches!(error, DeviceError::UnknownAddress { .. }), "{address:#x}: {error}");
    }
}

#[test]
fn memory_that_was_freed_is_stale_also_when_its_address_is_in_use_again() {
    let fake = fake();
    if fake.skips("an address that is used again") {
        return;
    }
    let address = fake.allocate(0, MIB);
    // SAFETY: no copy is made from or to it after the free.
    let memory = unsafe { DeviceMemory::adopt(address, MIB) }.unwrap();
    memory.check().unwrap();
    fake.free(address);
    assert!(matches!(memory.check(), Err(DeviceError::Stale { .. })));
    assert_eq!(fake.allocate(0, MIB), address, "the address is used again");
    assert!(matches!(memory.check(), Err(DeviceError::Stale { .. })));
    let region = host(4096);
    // SAFETY: it is rejected.
    let error = unsafe { DeviceMemory::adopt(region.address(), 4096) }.unwrap_err();
    assert!(error.to_string().contains("memory of the host"), "{error}");
}

#[test]
fn errors_of_the_driver_are_named_and_nothing_stays_in_flight() {
    let fake = fake();
    if fake.skips("injected errors") {
        return;
    }
    {
        let device = Device::open(FIRST).unwrap();
        let region = host(4096);
        let pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
        let twice = PinnedRegion::new(&device, Arc::clone(&region)).unwrap_err();
        assert!(twice.to_string().contains("ALREADY_REGISTERED"), "{twice}");
        let memory = DeviceMemory::allocate(&device, 4096).unwrap();
        let copy = || {
            let to = DeviceRange::new(&memory, 0, 4096);
            vec![DeviceCopy::ToDevice { from: IoBuf::whole(Arc::clone(&region)), to }]
        };
        let mut queue = CopyQueue::new(&device).unwrap();
        for (function, code, text) in [
            ("cuMemcpyAsync", 1, "cuMemcpyAsync failed on cuda:0 with CUDA_ERROR_INVALID_VALUE (1)"),
            ("cuEventRecord", 2, "cuEventRecord failed on cuda:0: out of memory"),
            ("cuCtxPushCurrent_v2", 201, "cuCtxPushCurrent failed on cuda:0 with CUDA_ERROR_INVALID_CONTEXT (201)"),
        ] {
            fake.fail(function, 0, code);
            let error = queue.copy(copy()).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
            let ticket = queue.copy(copy()).unwrap();
            finish(&mut queue, ticket);
        }
        fake.fail("cuMemAlloc_v2", 0, 2);
        assert!(matches!(DeviceMemory::allocate(&device, 1), Err(DeviceError::OutOfMemory { .. })));
        drop(pin);
    }
    assert_released(fake);
}

#[test]
fn a_lost_device_is_an_error_of_each_call_and_its_memory_is_never_released() {
    let fake = fake();
    if fake.skips("a device that is lost") {
        return;
    }
    let device = Device::open(FIRST).unwrap();
    let region = host(4096);
    let _pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
    let memory = DeviceMemory::allocate(&device, 4096).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    fake.set_copies(100_000_000, 0, 3);
    let to = DeviceRange::new(&memory, 0, 4096);
    queue.copy(vec![DeviceCopy::ToDevice { from: IoBuf::whole(Arc::clone(&region)), to: to.clone() }]).unwrap();
    fake.lose(0, 719);
    let error = queue.poll().unwrap_err();
    assert!(matches!(error, DeviceError::Lost { code: 719, .. }), "{error}");
    assert!(queue.copy(vec![DeviceCopy::ToDevice { from: IoBuf::whole(Arc::clone(&region)), to }]).is_err());
    let clones = Arc::strong_count(&region);
    drop(queue);
    assert_eq!(Arc::strong_count(&region), clones, "copies that may still write hold their memory");
}

/// Role of this program's second process: the Unix socket over which it gets an allocation.
const SOCKET: &str = "KVPLANE_TEST_SHARED";

/// Sends an allocation to another process, which runs the test of this name.
fn share_with(test: &str, shared: &SharedAllocation) -> std::process::Child {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let is_fabric = matches!(shared.handle, ShareHandle::Fabric(_));
    let mut words = vec![shared.process, shared.buffer_id, shared.bytes, shared.offset, u64::from(is_fabric)];
    let fds: Vec<BorrowedFd<'_>> = match &shared.handle {
        ShareHandle::Bytes(bytes) | ShareHandle::Fabric(bytes) => {
            words.extend(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
            Vec::new()
        }
        ShareHandle::Descriptor(fd) => vec![fd.as_fd()],
    };
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    unix::send_with_fds(&ours, &bytes, &fds).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let child = child.args([test, "--exact"]).env(SOCKET, "0").stdin(std::process::Stdio::from(OwnedFd::from(theirs)));
    child.spawn().unwrap()
}

/// Returns the allocation that this process was started for; `None` in the first process.
fn shared_with_us() -> Option<SharedAllocation> {
    std::env::var(SOCKET).ok()?;
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut bytes = [0; 104];
    let (count, mut fds) = unix::recv_with_fds(&socket, &mut bytes, 1).unwrap();
    let words: Vec<u64> = bytes[..count].as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let handle = match fds.pop() {
        Some(fd) => ShareHandle::Descriptor(fd),
        None if words[4] == 1 => ShareHandle::Fabric(bytes[40..104].try_into().unwrap()),
        None => ShareHandle::Bytes(bytes[40..104].try_into().unwrap()),
    };
    let [process, buffer_id, bytes, offset] = words[..4] else { panic!("{words:?}") };
    Some(SharedAllocation { family: Family::Cuda, pci: 0, process, buffer_id, bytes, offset, handle })
}

/// Maps what another process shares, once for all callers, and copies from and to it.
fn use_mapping(fake: Control, shared: SharedAllocation) {
    let device = Device::open(FIRST).unwrap();
    let longer = SharedAllocation { bytes: shared.bytes + 2 * MIB, buffer_id: 1 << 60, ..shared };
    assert!(DeviceMemory::map(&device, &longer).is_err(), "it is shorter than that");
    assert_eq!(fake.counters().mapped + fake.counters().allocations, 0, "nothing is mapped");
    let shared = SharedAllocation { bytes: longer.bytes - 2 * MIB, buffer_id: 5, ..longer };
    let memory = DeviceMemory::map(&device, &shared).unwrap();
    // Of a descriptor, nobody can tell whether it is of the same allocation as another one.
    let again = DeviceMemory::map(&device, &shared).unwrap();
    assert_eq!(Arc::ptr_eq(&memory, &again), !matches!(shared.handle, ShareHandle::Descriptor(_)));
    let other = Device::open(DeviceId { ordinal: 1, ..FIRST }).unwrap();
    let beside = DeviceMemory::map(&other, &shared).unwrap();
    assert_ne!(beside.address(), memory.address(), "each device has a mapping of its own");
    let region = host(MIB as usize);
    let mut queue = CopyQueue::new(&device).unwrap();
    let range = DeviceRange::new(&memory, shared.offset, MIB);
    let ticket =
        queue.copy(vec![DeviceCopy::ToHost { from: range.clone(), to: IoBuf::whole(Arc::clone(&region)) }]).unwrap();
    finish(&mut queue, ticket);
    let mut read = vec![0; MIB as usize];
    region.copy_out(0, &mut read);
    assert_eq!(read, pattern(5, MIB as usize));
    region.copy_in(0, &pattern(6, MIB as usize));
    let ticket = queue.copy(vec![DeviceCopy::ToDevice { from: IoBuf::whole(region), to: range }]).unwrap();
    finish(&mut queue, ticket);
    drop((memory, again, beside, queue, device, other));
    assert_eq!(fake.counters().mapped + fake.counters().allocations, 0, "the mappings have ended");
}

#[test]
fn another_process_maps_an_allocation_by_its_handle() {
    let fake = fake();
    if let Some(shared) = shared_with_us() {
        return use_mapping(fake, shared);
    }
    let device = Device::open(FIRST).unwrap();
    let address = fake.allocate(0, 2 * MIB);
    // SAFETY: no copy is made from or to it after the free.
    let memory = unsafe { DeviceMemory::adopt(address + 512, MIB) }.unwrap();
    fake.write(memory.address(), &pattern(5, MIB as usize));
    let shared = memory.share().unwrap();
    assert_eq!((shared.bytes, shared.offset, shared.pci), (2 * MIB, 512, device.info().pci_number()));
    assert!(matches!(shared.handle, ShareHandle::Bytes(_)));
    let own = DeviceMemory::map(&device, &shared).unwrap_err();
    assert!(own.to_string().contains("INVALID_CONTEXT"), "the process that made it cannot map it: {own}");
    let mut child = share_with("device::another_process_maps_an_allocation_by_its_handle", &shared);
    assert!(child.wait().unwrap().success());
    assert_eq!(fake.read(memory.address(), MIB), pattern(6, MIB as usize));
    let managed = fake.allocate_managed(0, 4096);
    // SAFETY: it is not freed.
    let managed = unsafe { DeviceMemory::adopt(managed, 4096) }.unwrap();
    assert!(matches!(managed.share(), Err(DeviceError::Unsupported { .. })));
}

/// Shares a physical allocation that was created for this type of handles with another process of this program, which
/// runs the test of this name, maps it, and writes to it.
fn share_physical(test: &str, handles: HandleType, check: impl FnOnce(&SharedAllocation)) {
    let fake = fake();
    if let Some(shared) = shared_with_us() {
        return use_mapping(fake, shared);
    }
    let address = fake.map(0, 2, 4 * MIB, Some(handles));
    // SAFETY: no copy is made from or to it after the free.
    let memory = unsafe { DeviceMemory::adopt(address + 5 * MIB, MIB) }.unwrap();
    fake.write(memory.address(), &pattern(5, MIB as usize));
    let shared = memory.share().unwrap();
    assert_eq!((shared.bytes, shared.offset), (4 * MIB, MIB));
    check(&shared);
    assert!(share_with(test, &shared).wait().unwrap().success());
    assert_eq!(fake.read(memory.address(), MIB), pattern(6, MIB as usize));
    drop(memory);
    fake.free(address);
    assert_eq!(fake.counters().mapped, 0);
}

#[test]
fn another_process_maps_a_physical_allocation_by_its_descriptor() {
    let name = "device::another_process_maps_a_physical_allocation_by_its_descriptor";
    share_physical(name, HandleType::Descriptor, |shared| {
        assert!(matches!(shared.handle, ShareHandle::Descriptor(_)));
    });
}

#[test]
fn another_process_maps_a_physical_allocation_without_a_descriptor_by_its_fabric_handle() {
    let name = "device::another_process_maps_a_physical_allocation_without_a_descriptor_by_its_fabric_handle";
    share_physical(name, HandleType::Fabric, |shared| {
        assert!(matches!(shared.handle, ShareHandle::Fabric(_)));
        let forged = SharedAllocation { handle: ShareHandle::Fabric([7; HANDLE_BYTES]), ..*shared };
        assert!(DeviceMemory::map(&Device::open(FIRST).unwrap(), &forged).is_err(), "no handle of this driver");
    });
}

#[test]
fn a_physical_allocation_that_was_created_for_no_handles_is_not_shared() {
    let fake = fake();
    let address = fake.map(0, 1, 2 * MIB, None);
    // SAFETY: no copy is made from or to it.
    let unshared = unsafe { DeviceMemory::adopt(address, MIB) }.unwrap();
    let error = unshared.share().unwrap_err();
    assert!(error.to_string().contains("not created for them"), "{error}");
    drop(unshared);
    fake.free(address);
    assert_eq!(fake.counters().mapped, 0);
}

#[test]
fn memory_of_copies_is_held_when_nobody_can_tell_whether_they_are_made() {
    let fake = fake();
    if fake.skips("errors that are injected") {
        return;
    }
    let device = Device::open(FIRST).unwrap();
    let memory = DeviceMemory::allocate(&device, MIB).unwrap();
    let region = Region::allocate(&RegionOptions::new("held", MIB as usize)).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    let clones = Arc::strong_count(&region);
    // The copy is enqueued, its event is not, and the wait for the copy fails.
    fake.fail("cuEventRecord", 0, 1);
    fake.fail("cuStreamSynchronize", 0, 1);
    let to = IoBuf::new(Arc::clone(&region), 0, MIB as usize);
    let error = queue.copy(vec![DeviceCopy::ToHost { from: DeviceRange::new(&memory, 0, MIB), to }]).unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert_eq!(Arc::strong_count(&region), clones + 1, "a copy that may still write holds its memory");
}

#[test]
fn a_driver_that_is_loaded_later_is_noticed() {
    assert!(!is_any_driver_loaded() && !is_any_driver_loaded());
    fake();
    assert!(is_any_driver_loaded() && is_any_driver_loaded());
}

#[test]
fn captures_of_the_callers_streams_go_on_while_copies_are_made() {
    let fake = fake();
    if fake.skips("captures that are observed") {
        return;
    }
    fake.set_copies(2_000_000, 0, 3);
    let device = Device::open(FIRST).unwrap();
    let memory = DeviceMemory::allocate(&device, MIB).unwrap();
    let region = Region::allocate(&RegionOptions::new("captured", MIB as usize)).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    let stream = StreamHandle { family: Family::Cuda, raw: fake.stream(0) };
    let ended = fake.capture(stream.raw, || {
        let pinned = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
        let to = IoBuf::new(Arc::clone(&region), 0, MIB as usize);
        let ticket = queue.copy(vec![DeviceCopy::ToHost { from: DeviceRange::new(&memory, 0, MIB), to }]).unwrap();
        finish(&mut queue, ticket);
        // What waits for a captured stream would become part of the graph.
        for captured in [stream, StreamHandle::CUDA_DEFAULT] {
            let error = queue.wait_for(captured).unwrap_err();
            assert!(error.to_string().contains("being captured"), "{error}");
        }
        drop(pinned);
    });
    assert_eq!((ended, fake.capture_mode()), (0, 0), "the capture goes on, and the thread's own mode is as before");
    queue.wait_for(stream).unwrap();
}

#[test]
fn copies_are_made_one_by_one_where_the_device_takes_no_batches() {
    let fake = fake();
    if fake.skips("a device without batches of copies") {
        return;
    }
    let device = Device::open(FIRST).unwrap();
    let (pieces, length) = (600_usize, 512_usize);
    let region = host(pieces * length);
    let _pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
    let memory = DeviceMemory::allocate(&device, (pieces * length) as u64).unwrap();
    region.copy_in(0, &pattern(3, pieces * length));
    let mut queue = CopyQueue::new(&device).unwrap();
    // Only the first call of a batch is taken, and none of later ones is made.
    fake.fail("cuMemcpyBatchAsync", 1, 801);
    for calls in [2, 2] {
        fake.write(memory.address(), &vec![0; pieces * length]);
        let copies = (0..pieces).map(|piece| DeviceCopy::ToDevice {
            from: IoBuf::new(Arc::clone(&region), piece * length, length),
            to: DeviceRange::new(&memory, (piece * length) as u64, length as u64),
        });
        let ticket = queue.copy(copies.collect()).unwrap();
        finish(&mut queue, ticket);
        assert_eq!(fake.read(memory.address(), memory.bytes()), pattern(3, pieces * length));
        assert_eq!(fake.calls("cuMemcpyBatchAsync"), calls);
    }
}

#[test]
fn a_driver_that_knows_fewer_properties_of_memory_describes_it() {
    let fake = fake();
    if fake.skips("an older driver") {
        return;
    }
    let address = fake.allocate(1, MIB);
    fake.fail("cuPointerGetAttributes", 0, 1);
    let found = locate(address, MIB).unwrap();
    assert_eq!(found.kind, MemoryKind::Device(DeviceId { ordinal: 1, ..FIRST }));
    // SAFETY: it is not freed.
    let memory = unsafe { DeviceMemory::adopt(address, MIB) }.unwrap();
    assert!(memory.allocation().rdma);
}

#[test]
fn a_device_without_a_flush_keeps_its_memory_from_rdma_devices() {
    let fake = fake();
    if fake.skips("a device without a flush") {
        return;
    }
    fake.forbid_flushes();
    let device = Device::open(FIRST).unwrap();
    assert!(device.info().hides_writes && !device.info().needs_flush);
    device.flush_writes().unwrap();
    assert_eq!(fake.calls("cuFlushGPUDirectRDMAWrites"), 0);
}

#[test]
fn copies_end_as_lost_whatever_a_query_of_them_answers() {
    let fake = fake();
    if fake.skips("a device that is lost") {
        return;
    }
    // Invalid value, out of memory, no device, invalid context, illegal address, not supported, unknown.
    for code in [1, 2, 100, 201, 700, 801, 999] {
        for call in ["cuEventQuery", "cuCtxPushCurrent_v2"] {
            let device = Device::open(FIRST).unwrap();
            let memory = DeviceMemory::allocate(&device, 4096).unwrap();
            let mut queue = CopyQueue::new(&device).unwrap();
            let to = IoBuf::new(host(4096), 0, 4096);
            queue.copy(vec![DeviceCopy::ToHost { from: DeviceRange::new(&memory, 0, 4096), to }]).unwrap();
            fake.fail(call, 0, code);
            let error = queue.poll().unwrap_err();
            assert!(error.is_lost(), "{call} {code}: {error}");
        }
    }
}

#[test]
fn a_context_that_is_gone_at_exit_is_no_error() {
    let fake = fake();
    if fake.skips("a context that is destroyed") {
        return;
    }
    for code in [4, 709] {
        let device = Device::open(FIRST).unwrap();
        let memory = DeviceMemory::allocate(&device, MIB).unwrap();
        let region = host(MIB as usize);
        let pinned = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
        let mut queue = CopyQueue::new(&device).unwrap();
        let to = IoBuf::new(Arc::clone(&region), 0, MIB as usize);
        queue.copy(vec![DeviceCopy::ToHost { from: DeviceRange::new(&memory, 0, MIB), to }]).unwrap();
        fake.lose(0, code);
        assert!(matches!(queue.poll(), Err(DeviceError::Lost { .. })), "{code}");
        drop((queue, pinned, memory, device));
        assert!(Arc::strong_count(&region) > 1, "a copy may still write it");
        fake.lose(0, 0);
    }
}

#[test]
fn a_dma_buf_descriptor_is_of_the_whole_allocation() {
    let fake = fake();
    if !Device::open(FIRST).unwrap().info().dma_buf {
        println!("skipped: this device exports no dma-buf descriptors");
        return;
    }
    let address = fake.allocate(0, 2 * MIB);
    // SAFETY: it is not freed.
    let part = unsafe { DeviceMemory::adopt(address + 4096, MIB) }.unwrap();
    let (fd, offset) = part.export_dma_buf().unwrap();
    assert_eq!(offset, 4096);
    assert_eq!(std::fs::File::from(fd).metadata().unwrap().len(), 2 * MIB);
    // It begins and ends inside pages.
    let [first, second] = [5000, 6000].map(|bytes| fake.allocate(0, bytes));
    assert!(fake.is_the_machines() || second % 4096 == 1024, "{first:#x} {second:#x}");
    // SAFETY: it is not freed.
    let part = unsafe { DeviceMemory::adopt(second + 10, 100) }.unwrap();
    let (fd, offset) = part.export_dma_buf().unwrap();
    assert!(fake.is_the_machines() || (offset, std::fs::File::from(fd).metadata().unwrap().len()) == (1034, 8192));
    let managed = fake.allocate_managed(0, 4096);
    // SAFETY: it is not freed.
    let managed = unsafe { DeviceMemory::adopt(managed, 4096) }.unwrap();
    assert!(matches!(managed.export_dma_buf(), Err(DeviceError::Unsupported { .. })));
}

#[test]
fn a_forked_child_gets_an_error_and_touches_no_driver() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let memory = DeviceMemory::allocate(&device, 4096).unwrap();
    // SAFETY: the child only calls functions that return before the driver, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_forked = |error: Option<DeviceError>| matches!(error, Some(DeviceError::Forked));
        let all = is_forked(Device::open(FIRST).err())
            && is_forked(CopyQueue::new(&device).err())
            && is_forked(memory.check().err())
            && is_forked(DeviceMemory::allocate(&device, 1).err());
        drop((memory, device));
        // SAFETY: ends the child without destructors.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child of this test.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    drop((memory, device));
    assert_released(fake);
}

#[test]
fn devices_are_listed_with_their_properties_and_unknown_ones_are_errors() {
    if fake().skips("its own devices") {
        return;
    }
    let families = open_families();
    let [(Family::Cuda, Ok(devices)), others @ ..] = &families[..] else { panic!("{families:?}") };
    let names = others.iter().map(|(family, devices)| (*family, matches!(devices, Err(DeviceError::NoDriver { .. }))));
    assert_eq!(names.collect::<Vec<_>>(), [(Family::Hip, true), (Family::Npu, true)], "{families:?}");
    let addresses: Vec<&str> = devices.iter().map(|device| device.pci_address.as_str()).collect();
    assert_eq!(addresses, ["0000:a1:00.0", "0000:a2:00.0"]);
    let first = &devices[0];
    assert_eq!((first.copy_engines, first.dma_buf, first.needs_flush, first.host_node), (2, true, true, Some(0)));
    let error = Device::open(DeviceId { ordinal: 2, ..FIRST }).unwrap_err();
    assert_eq!(error.to_string(), "there is no device cuda:2: 2 of its kind are visible to this process");
}

#[test]
fn without_a_driver_the_error_names_its_library() {
    let Err(error) = Device::open(FIRST) else {
        println!("skipped: this machine has a driver");
        return;
    };
    assert!(matches!(error, DeviceError::NoDriver { .. }), "{error}");
    assert!(error.to_string().contains("libcuda.so.1"), "{error}");
    let error = locate(64, 1).unwrap_err();
    assert!(error.to_string().contains("no driver can tell more"), "{error}");
}
