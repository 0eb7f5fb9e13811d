//! A parked end is woken by a message, and parks only while there is none.

use std::time::Duration;

use kvplane_proto::message::Operation;
use kvplane_transport::{RdmaOptions, Token};

use super::bed::{Bed, asks, on_devices};

#[test]
fn a_message_wakes_the_parked() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 4096, RdmaOptions::default());
        for index in 0..20 {
            for _ in 0..100 {
                bed.asked.round();
            }
            while !bed.asked.rdma.prepare_sleep().expect("a working device") {
                bed.asked.round();
            }
            assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Abort, index), &[], None));
            bed.asking.rdma.flush();
            let mut readiness = Vec::new();
            bed.asked.poller.wait(Duration::from_secs(30), &mut readiness).expect("a working poller");
            assert!(!readiness.is_empty(), "the parked end was not woken");
            for one in readiness {
                bed.asked.rdma.ready(Token::from_bits(one.token).expect("a token"));
            }
            bed.until("the frame is there", |bed| bed.asked.frames.len() == index as usize + 1);
        }
    });
}

#[test]
fn pending_input_prevents_sleep() {
    on_devices(|devices, fabric| {
        let mut bed = Bed::new(devices, 4096, RdmaOptions::default());
        assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Abort, 1), &[], None));
        bed.asking.rdma.flush();
        // Only software devices are certain to be this fast.
        if fabric.is_some() {
            assert!(!bed.asked.rdma.prepare_sleep().expect("a working device"));
        }
        bed.until("the frame is there", |bed| bed.asked.frames.len() == 1);
    });
}
