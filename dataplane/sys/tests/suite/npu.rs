//! Memory of Ascend devices over the driver for tests: each test runs in a process of its own, as the driver is one to
//! a process.

use crate::device::{MIB, assert_released, copy_around, finish, host, pattern};
use kvplane_fake_devices::Control;
use kvplane_sys::IoBuf;
use kvplane_sys::device::{
    CopyQueue, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, Family, Location, MemoryKind,
    PinnedRegion, StreamHandle, locate, open_families,
};
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::sync::Arc;

const FIRST: DeviceId = DeviceId { family: Family::Npu, ordinal: 0 };
const SECOND: DeviceId = DeviceId { family: Family::Npu, ordinal: 1 };

fn fake() -> Control {
    kvplane_fake_npu::load_npu().unwrap()
}

#[test]
fn bytes_survive_the_way_to_the_device_inside_it_and_back() {
    let fake = fake();
    [SECOND, FIRST].into_iter().for_each(copy_around);
    assert_released(fake);
}

/// Functions of the library, as another part of the program calls them.
struct Caller {
    set_device: extern "C" fn(i32) -> c_int,
    get_context: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
}

impl Caller {
    fn new() -> Self {
        let symbol = |name: &CStr| {
            // SAFETY: both names end with a zero byte, and the library is loaded already.
            unsafe {
                let library = libc::dlopen(c"libascendcl.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
                libc::dlsym(library, name.as_ptr())
            }
        };
        // SAFETY: the signatures of these functions.
        unsafe {
            Self {
                set_device: std::mem::transmute::<*mut c_void, extern "C" fn(i32) -> c_int>(symbol(c"aclrtSetDevice")),
                get_context: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut *mut c_void) -> c_int>(
                    symbol(c"aclrtGetCurrentContext"),
                ),
            }
        }
    }

    fn context(&self) -> Option<u64> {
        let mut context = std::ptr::null_mut();
        // SAFETY: a place of this function.
        let code = unsafe { (self.get_context)(&raw mut context) };
        (code == 0).then_some(context as u64)
    }
}

#[test]
fn a_context_of_the_caller_stays_current_and_none_of_ours_outlives_its_device() {
    let fake = fake();
    let caller = Caller::new();
    copy_around(FIRST);
    assert_eq!(caller.context(), None, "the thread had none, and ours was released");
    assert_eq!((caller.set_device)(1), 0);
    let own = caller.context();
    assert!(own.is_some());
    copy_around(FIRST);
    assert_eq!(caller.context(), own);
    copy_around(SECOND);
    assert_eq!((caller.context(), fake.counters().contexts), (own, 1), "the caller's is not released");
}

#[test]
fn a_batch_of_many_ranges_is_one_call_each_way() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let (pieces, length) = (200_usize, 512_usize);
    let [from, to] = [0, 1].map(|_| host(pieces * length));
    let _pins = [&from, &to].map(|region| PinnedRegion::new(&device, Arc::clone(region)).unwrap());
    let memory = DeviceMemory::allocate(&device, (2 * pieces * length) as u64).unwrap();
    from.copy_in(0, &pattern(9, pieces * length));
    let mut queue = CopyQueue::new(&device).unwrap();
    let warm = queue.copy(vec![]).unwrap();
    finish(&mut queue, warm);
    let place = |piece: usize| DeviceRange::new(&memory, (2 * piece * length) as u64, length as u64);
    let part = |region, piece: usize| IoBuf::new(Arc::clone(region), piece * length, length);
    let scatter =
        (0..pieces).map(|piece| DeviceCopy::ToDevice { from: part(&from, piece), to: place(piece) }).collect();
    let gather = (0..pieces).map(|piece| DeviceCopy::ToHost { from: place(piece), to: part(&to, piece) }).collect();
    for copies in [scatter, gather] {
        let before = fake.counters().calls;
        let ticket = queue.copy(copies).unwrap();
        assert_eq!(fake.counters().calls - before, 3, "a look at the context, copy, record");
        finish(&mut queue, ticket);
    }
    let mut read = vec![0; pieces * length];
    to.copy_out(0, &mut read);
    assert_eq!(read, pattern(9, pieces * length));
    assert_eq!(fake.counters().unpinned, 0);
}

#[test]
fn batches_that_the_library_does_not_take_are_copied_one_by_one() {
    let fake = fake();
    let device = Device::open(SECOND).unwrap();
    let region = host(8192);
    region.copy_in(0, &pattern(3, 8192));
    let _pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
    let address = fake.allocate_managed(1, 8192);
    // SAFETY: it is freed behind the last use.
    let managed = unsafe { DeviceMemory::adopt(address, 8192) }.unwrap();
    assert_eq!(managed.allocation().kind, MemoryKind::Managed(SECOND));
    let memory = DeviceMemory::allocate(&device, 8192).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    for (memory, unsupported) in [(&managed, false), (&memory, true)] {
        if unsupported {
            fake.fail("aclrtMemcpyBatchAsync", 0, 207_000);
        }
        let to = |at: usize| DeviceCopy::ToDevice {
            from: IoBuf::new(Arc::clone(&region), at, 4096),
            to: DeviceRange::new(memory, at as u64, 4096),
        };
        let nothing =
            DeviceCopy::ToDevice { from: IoBuf::new(Arc::clone(&region), 0, 0), to: DeviceRange::new(memory, 0, 0) };
        let ticket = queue.copy(vec![to(0), to(4096)]).unwrap();
        finish(&mut queue, ticket);
        assert_eq!(fake.read(memory.address(), 8192), pattern(3, 8192));
        let ticket = queue.copy(vec![nothing, to(0)]).unwrap();
        finish(&mut queue, ticket);
    }
    drop((queue, managed));
    fake.free(address);
}

#[test]
fn copies_between_two_devices_are_made_once_they_may_access_each_other() {
    let fake = fake();
    {
        let devices = [FIRST, SECOND].map(|id| Device::open(id).unwrap());
        let [from, to] = devices.each_ref().map(|device| DeviceMemory::allocate(device, MIB).unwrap());
        fake.write(from.address(), &pattern(4, MIB as usize));
        let mut queue = CopyQueue::new(&devices[1]).unwrap();
        let between =
            || DeviceCopy::Between { from: DeviceRange::new(&from, 0, MIB), to: DeviceRange::new(&to, 0, MIB) };
        fake.fail("aclrtDeviceEnablePeerAccess", 0, 207_000);
        assert!(matches!(queue.copy(vec![between()]), Err(DeviceError::Unsupported { id: SECOND, .. })));
        for _ in 0..2 {
            let ticket = queue.copy(vec![between()]).unwrap();
            finish(&mut queue, ticket);
        }
        assert_eq!(fake.read(to.address(), MIB), pattern(4, MIB as usize));
    }
    assert_released(fake);
}

#[test]
fn copies_wait_for_what_the_caller_enqueued_before_on_its_stream() {
    let fake = fake();
    let device = Device::open(FIRST).unwrap();
    let to = host(MIB as usize);
    let _pin = PinnedRegion::new(&device, Arc::clone(&to)).unwrap();
    let memory = DeviceMemory::allocate(&device, MIB).unwrap();
    let mut queue = CopyQueue::new(&device).unwrap();
    let named = StreamHandle { family: Family::Npu, raw: fake.stream(0) };
    for (seed, stream) in [(1, named), (2, StreamHandle::default_of(Family::Npu))] {
        fake.fill(stream.raw, memory.address(), MIB, seed, 20_000_000);
        queue.wait_for(stream).unwrap();
        let from = DeviceRange::new(&memory, 0, MIB);
        let ticket = queue.copy(vec![DeviceCopy::ToHost { from, to: IoBuf::whole(Arc::clone(&to)) }]).unwrap();
        finish(&mut queue, ticket);
        let mut read = vec![0; MIB as usize];
        to.copy_out(0, &mut read);
        assert_eq!(read, pattern(seed, MIB as usize), "{seed}");
    }
    assert!(matches!(queue.wait_for(StreamHandle::CUDA_DEFAULT), Err(DeviceError::Unsupported { .. })));
}

#[test]
fn locate_distinguishes_host_and_device_memory_and_rejects_the_rest() {
    let fake = fake();
    let region = host(4096);
    assert_eq!(locate(region.address(), 4096).unwrap().kind, MemoryKind::Host);
    assert_eq!(fake.counters().calls, 0, "host memory asks no driver");
    let address = fake.allocate(1, 8192);
    let Location { kind, allocation } = locate(address + 100, 8092).unwrap();
    let allocation = allocation.unwrap();
    assert_eq!((kind, allocation.base, allocation.bytes), (MemoryKind::Device(SECOND), address, 8192));
    assert!(!allocation.rdma && !allocation.handle, "its memory is staged only");
    assert!(matches!(locate(address + 1, 8192), Err(DeviceError::BeyondAllocation { allocated: 8192, .. })));
    // SAFETY: no copy is made from or to it after the free.
    let memory = unsafe { DeviceMemory::adopt(address, 8192) }.unwrap();
    assert!(matches!(memory.export_dma_buf(), Err(DeviceError::Unsupported { .. })));
    assert!(matches!(memory.share(), Err(DeviceError::Unsupported { .. })));
    memory.check().unwrap();
    fake.free(address);
    assert!(matches!(memory.check(), Err(DeviceError::Stale { id: SECOND, .. })));
    for address in [address, 64, u64::MAX - 5] {
        let error = locate(address, 1).unwrap_err();
        assert!(matches!(error, DeviceError::UnknownAddress { .. }), "{address:#x}: {error}");
    }
}

#[test]
fn errors_are_named_and_nothing_stays_in_flight() {
    let fake = fake();
    {
        let device = Device::open(FIRST).unwrap();
        let region = host(4096);
        let pin = PinnedRegion::new(&device, Arc::clone(&region)).unwrap();
        let twice = PinnedRegion::new(&device, Arc::clone(&region)).unwrap_err();
        assert!(twice.to_string().contains("ALREADY_REGISTERED"), "{twice}");
        let memory = DeviceMemory::allocate(&device, 4096).unwrap();
        let mut queue = CopyQueue::new(&device).unwrap();
        let copy = || {
            let to = DeviceRange::new(&memory, 0, 4096);
            vec![DeviceCopy::ToDevice { from: IoBuf::whole(Arc::clone(&region)), to }]
        };
        for (function, code, text) in [
            ("aclrtMemcpyAsync", 107_000, "aclrtMemcpyAsync failed on npu:0 with ACL_ERROR_RT_PARAM_INVALID (107000)"),
            ("aclrtRecordEvent", 207_018, "aclrtRecordEvent failed on npu:0: out of memory"),
            ("aclrtMemcpyAsync", 99, "with an error of AscendCL (99)"),
        ] {
            fake.fail(function, 0, code);
            let error = queue.copy(copy()).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
            let ticket = queue.copy(copy()).unwrap();
            finish(&mut queue, ticket);
        }
        fake.fail("aclrtMalloc", 0, 207_001);
        assert!(matches!(DeviceMemory::allocate(&device, 1), Err(DeviceError::OutOfMemory { .. })));
        fake.fail("aclrtSetStreamFailureMode", 0, 207_000);
        assert!(
            matches!(CopyQueue::new(&device), Err(DeviceError::Unsupported { .. })),
            "a failure would pass for bytes"
        );
        drop(pin);
    }
    assert_released(fake);
    fake.fail("aclrtSetDevice", 0, 507_033);
    assert!(matches!(Device::open(FIRST), Err(DeviceError::Call { code: 507_033, .. })));
    fake.fail("aclrtGetCurrentContext", 1, 107_002);
    assert!(matches!(Device::open(FIRST), Err(DeviceError::Lost { .. })), "there is no default context");
    assert_released(fake);
    let error = Device::open(DeviceId { ordinal: 2, ..FIRST }).unwrap_err();
    assert_eq!(error.to_string(), "there is no device npu:2: 2 of its kind are visible to this process");
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
    fake.lose(0, 507_054);
    let error = queue.poll().unwrap_err();
    assert!(matches!(error, DeviceError::Lost { code: 507_054, .. }), "{error}");
    assert!(queue.copy(vec![DeviceCopy::ToDevice { from: IoBuf::whole(Arc::clone(&region)), to }]).is_err());
    let clones = Arc::strong_count(&region);
    drop(queue);
    assert_eq!(Arc::strong_count(&region), clones, "copies that may still write hold their memory");
}

#[test]
fn devices_are_listed_and_an_initialized_library_is_used_as_it_is() {
    let _fake = fake();
    let init = {
        // SAFETY: the name of a loaded library and of one of its functions, with that function's signature.
        unsafe {
            let library = libc::dlopen(c"libascendcl.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            let symbol = libc::dlsym(library, c"aclInit".as_ptr());
            std::mem::transmute::<*mut c_void, extern "C" fn(*const libc::c_char) -> c_int>(symbol)
        }
    };
    assert_eq!(init(std::ptr::null()), 0);
    let families = open_families();
    let Some((Family::Npu, Ok(devices))) = families.last() else { panic!("{families:?}") };
    let addresses: Vec<&str> = devices.iter().map(|device| device.pci_address.as_str()).collect();
    assert_eq!(addresses, ["0000:c1:00.0", "0000:c2:00.0"]);
    let first = &devices[0];
    assert_eq!((first.id, first.dma_buf, first.needs_flush, first.host_node), (FIRST, false, false, None));
}
