//! Payloads: eager in their frames, pushed to offered memory, fetched, and in parts through bounce buffers.

use std::sync::Arc;

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::message::Operation;
use kvplane_sys::{IoBuf, Region};
use kvplane_transport::{RdmaOptions, Target};

use super::bed::{Bed, End, answers, asks, check, fill, on_devices, part, request};

const MEMORY_BYTES: usize = 24 << 20;
const SIZES: [usize; 9] = [1, 100, 4096, 4097, 65_536, 131_072, 131_073, 1_000_003, 9 << 20];

/// Returns the memory from the start of the region.
fn front(end: &End, bytes: u64) -> IoBuf {
    part(&end.region, 0, bytes as usize)
}

fn sum(memory: &IoBuf) -> u64 {
    let mut bytes = vec![0; memory.bytes()];
    memory.copy_out(&mut bytes);
    payload_checksum(&bytes)
}

/// Returns pieces of at most 100 bytes, so that there are many.
fn pieces(region: &Arc<Region>, offset: usize, bytes: usize) -> Vec<IoBuf> {
    (0..bytes.div_ceil(100)).map(|index| part(region, offset + index * 200, 100.min(bytes - index * 100))).collect()
}

#[test]
fn requests_with_payloads_of_all_sizes() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, MEMORY_BYTES, RdmaOptions::default());
        let whole = part(&bed.asking.region, 0, MEMORY_BYTES);
        fill(&whole, 1);
        bed.asked.places = |end, header| Target::Memory { buffer: front(end, header.payload_bytes), checksum: true };
        for (index, bytes) in SIZES.into_iter().enumerate() {
            let source = part(&bed.asking.region, 777 * index, bytes);
            let header = asks(Operation::Put, index as u32).with_payload(bytes as u64, Some(0));
            let payload = bed.asking.outgoing(source.clone(), index as u64);
            assert!(bed.asking.rdma.send(bed.ask, &header, &[], payload));
            bed.until("the payload is there", |bed| bed.asked.payloads.len() == index + 1);
            bed.until("it has left", |bed| bed.asking.holds.len() == index + 1);
            assert_eq!(bed.asking.holds[index], index as u64);
            let stated = bed.asked.frames[index].0.payload_checksum;
            assert_eq!(bed.asked.payloads[index], (request(index as u32), Some(stated)));
            assert_eq!(sum(&source), stated);
            check(&front(&bed.asked, bytes as u64), 1, 777 * index as u64);
        }
    });
}

#[test]
fn answers_are_pushed_to_offered_memory() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, MEMORY_BYTES, RdmaOptions::default());
        fill(&part(&bed.asked.region, 0, MEMORY_BYTES), 2);
        bed.asking.places = |end, header| Target::Memory { buffer: front(end, header.payload_bytes), checksum: true };
        let mut long_bytes = 0;
        for (index, bytes) in SIZES.into_iter().enumerate() {
            // Offers more room than the payload needs.
            let wanted = part(&bed.asking.region, 0, bytes + 10);
            bed.asking.rdma.expect_answer(bed.ask, request(index as u32), wanted.into());
            assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Get, index as u32), &[], None));
            bed.until("the request is there", |bed| bed.asked.frames.len() == index + 1);
            let source = part(&bed.asked.region, 333 * index, bytes);
            let header = answers(Operation::Get, index as u32).with_payload(bytes as u64, Some(0));
            let payload = bed.asked.outgoing(source, index as u64);
            assert!(bed.asked.rdma.send(bed.serve, &header, &[], payload));
            bed.until("the payload is there", |bed| bed.asking.payloads.len() == index + 1);
            bed.until("it has left", |bed| bed.asked.holds.len() == index + 1);
            let stated = bed.asking.frames[index].0.payload_checksum;
            assert_eq!(bed.asking.payloads[index], (request(index as u32), Some(stated)));
            check(&front(&bed.asking, bytes as u64), 2, 333 * index as u64);
            long_bytes += if bytes > 4096 { bytes as u64 } else { 0 };
        }
        assert_eq!(bed.asked.rdma.counters().pushed_bytes, long_bytes);
    });
}

#[test]
fn answers_without_offered_memory_are_fetched() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, MEMORY_BYTES, RdmaOptions::default());
        fill(&part(&bed.asked.region, 0, MEMORY_BYTES), 3);
        // Into many pieces, in reverse order.
        bed.asking.places = |end, header| {
            let mut buffers = pieces(&end.region, 0, header.payload_bytes as usize);
            buffers.reverse();
            Target::Scatter { buffers, checksum: true }
        };
        for (index, bytes) in [5000, 100_100, 1 << 20].into_iter().enumerate() {
            let source = part(&bed.asked.region, 99, bytes);
            let header = answers(Operation::ReadMany, index as u32).with_payload(bytes as u64, Some(0));
            let payload = bed.asked.outgoing(source, 5);
            assert!(bed.asked.rdma.send(bed.serve, &header, &[], payload));
            bed.until("the payload is there", |bed| bed.asking.payloads.len() == index + 1);
            assert_eq!(bed.asking.payloads[index].1, Some(bed.asking.frames[index].0.payload_checksum));
            let mut at = 99;
            for place in pieces(&bed.asking.region, 0, bytes).iter().rev() {
                check(place, 3, at);
                at += place.bytes() as u64;
            }
        }
        bed.until("all have left", |bed| bed.asked.holds == [5, 5, 5]);
    });
}

#[test]
fn payloads_in_many_pieces_or_unregistered_memory_use_bounce_buffers() {
    on_devices(|devices, _| {
        for regions in [65_536, 0] {
            let options = RdmaOptions { regions, ..RdmaOptions::default() };
            let mut bed = Bed::new(devices, MEMORY_BYTES, options);
            fill(&part(&bed.asking.region, 0, MEMORY_BYTES), 4);
            bed.asked.places =
                |end, header| Target::Memory { buffer: front(end, header.payload_bytes), checksum: true };
            for (index, bytes) in [5000, 131_072, 131_073, 1_000_003].into_iter().enumerate() {
                // More at once than there are bounce buffers.
                for copy in 0..10 {
                    let source = pieces(&bed.asking.region, 0, bytes);
                    let number = (index * 10 + copy) as u32;
                    let header = asks(Operation::WriteMany, number).with_payload(bytes as u64, Some(0));
                    let payload = bed.asking.outgoing(source, u64::from(number));
                    assert!(bed.asking.rdma.send(bed.ask, &header, &[], payload));
                }
                bed.until("the payloads are there", |bed| bed.asked.payloads.len() == (index + 1) * 10);
                bed.until("they have left", |bed| bed.asking.holds.len() == (index + 1) * 10);
                for at in 0..bytes.div_ceil(100) {
                    let length = 100.min(bytes - at * 100);
                    check(&part(&bed.asked.region, at * 100, length), 4, at as u64 * 200);
                }
                let (payloads, frames) = (&bed.asked.payloads, &bed.asked.frames);
                assert!(payloads.iter().zip(frames).all(|(payload, (header, _))| payload.1 == header.checksum()));
            }
            let bounced = bed.asking.rdma.counters().bounced_bytes;
            assert_eq!(bounced, 10 * (5000 + 131_072 + 131_073 + 1_000_003));
        }
    });
}

#[test]
fn discarded_payloads_are_skipped() {
    on_devices(|devices, _| {
        for regions in [65_536, 0] {
            let options = RdmaOptions { regions, ..RdmaOptions::default() };
            let mut bed = Bed::new(devices, MEMORY_BYTES, options);
            for (index, bytes) in SIZES.into_iter().enumerate() {
                let source = part(&bed.asking.region, 0, bytes);
                let header = asks(Operation::Put, index as u32).with_payload(bytes as u64, None);
                let payload = bed.asking.outgoing(source, index as u64);
                assert!(bed.asking.rdma.send(bed.ask, &header, &[], payload));
            }
            bed.until("all were seen", |bed| bed.asked.payloads.len() == SIZES.len());
            bed.until("all have left", |bed| bed.asking.holds.len() == SIZES.len());
        }
    });
}
