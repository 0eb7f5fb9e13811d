//! Registrations of device memory with software devices, over the driver for tests.

use super::bed::{End, fill, pair, pattern};
use kvplane_soft_verbs::{DmaBufRule, Loopback, SoftPort};
use kvplane_sys::device::{Device as Gpu, DeviceId, DeviceMemory, Family};
use kvplane_sys::verbs::{Access, DmaBuf, MemoryRegion, Operation, Remote, Status, VerbsError};
use std::sync::Arc;

const CUDA: DeviceId = DeviceId { family: Family::Cuda, ordinal: 0 };
const BYTES: u64 = 1 << 20;

fn memory() -> Arc<DeviceMemory> {
    kvplane_fake_cuda::load_cuda().expect("the driver for tests");
    DeviceMemory::allocate(&Gpu::open(CUDA).expect("a device"), BYTES).expect("memory of a device")
}

/// Writes to a registration as a peer, and checks that the bytes are on the device.
fn write_to(a: &mut End, registered: &MemoryRegion, seed: u64) {
    fill(&a.region, seed, 0, 5000);
    let to = Remote { address: registered.address() + 77, key: registered.remote_key() };
    a.post(seed, Operation::Write { to }, 0, 5000);
    assert_eq!(a.wait_one().status, Status::Success);
    let fake = kvplane_fake_cuda::load_cuda().expect("the driver for tests");
    assert_eq!(fake.read(registered.address() + 77, 5000), pattern(seed, 0, 5000));
}

#[test]
fn a_dma_buf_is_accessed_by_the_addresses_of_the_device() {
    let fabric = Loopback::new(&[SoftPort::default(); 2]);
    let devices = fabric.verbs().devices().expect("devices");
    let (mut a, b) = pair(&devices[0], &devices[1]);
    let memory = memory();
    let buffer = DmaBuf::export(&memory).expect("a descriptor");
    let whole = b.domain.register_dma_buf(&buffer, 0, BYTES, Access::REMOTE).expect("registered");
    assert_eq!((whole.address(), whole.bytes() as u64), (memory.address(), BYTES));
    assert!(whole.memory().is_none());
    write_to(&mut a, &whole, 1);
    let part = b.domain.register_dma_buf(&buffer, 4096, 8192, Access::REMOTE).expect("registered");
    assert_eq!((part.address(), part.bytes()), (memory.address() + 4096, 8192));
    // The kernel holds the buffer.
    drop(buffer);
    write_to(&mut a, &part, 2);
    // Our own requests name it in the same way.
    let fake = kvplane_fake_cuda::load_cuda().expect("the driver for tests");
    fake.write(memory.address(), &pattern(3, 0, 100));
    let local = a.domain.register_dma_buf(&DmaBuf::export(&memory).expect("a descriptor"), 0, BYTES, Access::LOCAL);
    let local = local.expect("registered");
    a.memory = local;
    a.post(4, Operation::Write { to: b.remote(10) }, 0, 100);
    assert_eq!(a.wait_one().status, Status::Success);
    assert_eq!(super::bed::read(&b.region, 10, 100), pattern(3, 0, 100));
}

#[test]
fn a_range_across_mappings_is_refused_in_another_way_than_a_dma_buf() {
    let fabric = Loopback::new(&[SoftPort::default(); 2]);
    let devices = fabric.verbs().devices().expect("devices");
    let (mut a, b) = pair(&devices[0], &devices[1]);
    let memory = memory();
    let buffer = DmaBuf::export(&memory).expect("a descriptor");
    let register = |from, bytes| b.domain.register_dma_buf(&buffer, from, bytes, Access::REMOTE);
    let piece = 64 << 10;
    let to_boundary = piece - memory.address() % piece;
    fabric.set_dma_bufs(1, DmaBufRule::Within(piece));
    assert!(register(0, to_boundary + 1).expect_err("it crosses a mapping's end").is_invalid());
    write_to(&mut a, &register(to_boundary, piece).expect("it is one mapping"), 1);
    fabric.set_dma_bufs(1, DmaBufRule::Refused(95));
    let error = register(0, 4096).expect_err("no dma-bufs");
    assert!(!error.is_invalid() && error.to_string().contains("loop1 cannot register 4096 bytes"), "{error}");
    let error = b.domain.register_peer_memory(&memory, Access::REMOTE).expect_err("no module");
    assert!(matches!(&error, VerbsError::Register { source, .. } if source.raw_os_error() == Some(14)), "{error}");
    fabric.set_peer_memory(1, true);
    write_to(&mut a, &b.domain.register_peer_memory(&memory, Access::REMOTE).expect("registered"), 2);
}
