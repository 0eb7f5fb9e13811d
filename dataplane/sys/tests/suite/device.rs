//! Device memory over the drivers for tests: each test runs in a process of its own, as the driver is one to a process.

use kvplane_fake_devices::{Control, Counters};
use kvplane_sys::device::{
    CopyQueue, CopyTicket, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, Family, Location,
    MemoryKind, PinnedRegion, StreamHandle, locate, open_families,
};
use kvplane_sys::{IoBuf, Region, RegionOptions};
use std::sync::Arc;

const FIRST: DeviceId = DeviceId { family: Family::Cuda, ordinal: 0 };
const MIB: u64 = 1 << 20;

fn fake() -> Control {
    kvplane_fake_cuda::load_cuda().unwrap()
}

fn host(bytes: usize) -> Arc<Region> {
    Region::allocate(&RegionOptions::new("device test", bytes)).unwrap()
}

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    Control::pattern(seed, bytes as u64)
}

/// Polls until every batch below `ticket` and that one are done.
fn finish(queue: &mut CopyQueue, ticket: CopyTicket) {
    while queue.poll().unwrap() <= ticket {
        std::thread::yield_now();
    }
}

/// Checks that nothing of the driver is in use, and that it was never misused.
fn assert_released(fake: Control) {
    let counters = fake.counters();
    let Counters { copied_bytes, calls, .. } = counters;
    assert_eq!(counters, Counters { copied_bytes, calls, ..Counters::default() });
}

/// Copies a pattern to a device, inside it and back.
fn copy_around(id: DeviceId) {
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
    let fake = kvplane_fake_hip::load_hip().unwrap();
    for ordinal in [1, 0] {
        copy_around(DeviceId { family: Family::Hip, ordinal });
    }
    assert_released(fake);
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
    let managed = fake.allocate_managed(1, 4096);
    let second = DeviceId { ordinal: 1, ..FIRST };
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

#[test]
fn another_process_maps_an_allocation_by_its_handle() {
    const HANDLE: &str = "KVPLANE_TEST_HANDLE";
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    if let Ok(text) = std::env::var(HANDLE) {
        let bytes: Vec<u8> = (0..64).map(|at| u8::from_str_radix(&text[2 * at..][..2], 16).unwrap()).collect();
        let handle = bytes.try_into().unwrap();
        let beyond = DeviceMemory::map(&device, &handle, MIB + 1).unwrap_err();
        assert!(matches!(beyond, DeviceError::BeyondAllocation { allocated: MIB, .. }), "{beyond}");
        assert_eq!(fake.counters().allocations, 0, "the mapping has ended");
        let memory = DeviceMemory::map(&device, &handle, MIB).unwrap();
        assert_eq!(fake.read(memory.address(), MIB), pattern(5, MIB as usize));
        fake.write(memory.address() + 4096, &[42; 16]);
        return;
    }
    let memory = DeviceMemory::allocate(&device, MIB).unwrap();
    fake.write(memory.address(), &pattern(5, MIB as usize));
    let (handle, offset) = memory.share().unwrap();
    assert_eq!(offset, 0);
    assert!(DeviceMemory::map(&device, &handle, MIB).is_err(), "the process that made it cannot map it");
    let text: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    let test = "device::another_process_maps_an_allocation_by_its_handle";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let status = child.args([test, "--exact"]).env(HANDLE, text).status().unwrap();
    assert!(status.success());
    assert_eq!(fake.read(memory.address() + 4096, 16), [42; 16]);
    let managed = fake.allocate_managed(0, 4096);
    // SAFETY: it is not freed.
    let managed = unsafe { DeviceMemory::adopt(managed, 4096) }.unwrap();
    assert!(matches!(managed.share(), Err(DeviceError::Unsupported { .. })));
}

#[test]
fn a_dma_buf_descriptor_is_of_the_whole_allocation() {
    let fake = fake();
    let address = fake.allocate(0, 2 * MIB);
    // SAFETY: it is not freed.
    let part = unsafe { DeviceMemory::adopt(address + 4096, MIB) }.unwrap();
    let (fd, offset) = part.export_dma_buf().unwrap();
    assert_eq!(offset, 4096);
    assert_eq!(std::fs::File::from(fd).metadata().unwrap().len(), 2 * MIB);
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
    let _fake = fake();
    let families = open_families();
    let [(Family::Cuda, Ok(devices)), (Family::Hip, Err(DeviceError::NoDriver { .. }))] = &families[..] else {
        panic!("{families:?}")
    };
    let addresses: Vec<&str> = devices.iter().map(|device| device.pci_address.as_str()).collect();
    assert_eq!(addresses, ["0000:a1:00.0", "0000:a2:00.0"]);
    let first = &devices[0];
    assert_eq!((first.copy_engines, first.dma_buf, first.needs_flush, first.host_node), (2, true, true, Some(0)));
    let error = Device::open(DeviceId { ordinal: 2, ..FIRST }).unwrap_err();
    assert_eq!(error.to_string(), "there is no device cuda:2: 2 of its kind are visible to this process");
}

#[test]
fn without_a_driver_the_error_names_its_library() {
    let error = Device::open(FIRST).unwrap_err();
    assert!(matches!(error, DeviceError::NoDriver { .. }), "{error}");
    assert!(error.to_string().contains("libcuda.so.1"), "{error}");
    let error = locate(64, 1).unwrap_err();
    assert!(error.to_string().contains("no driver can tell more"), "{error}");
}
