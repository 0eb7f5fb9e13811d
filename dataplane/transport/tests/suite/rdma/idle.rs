//! Idle connections.

use std::time::Instant;

use kvplane_proto::message::Operation;
use kvplane_transport::RdmaOptions;

use super::bed::{Bed, DEADLINE, asks, on_devices};

/// Keepalive period of one millisecond, in nanoseconds.
const OFTEN: u64 = 1_000_000;

#[test]
fn keepalive_probes_idle_peers_and_detects_dead_ones() {
    on_devices(|devices, fabric| {
        let mut bed = Bed::new(devices, 1 << 20, RdmaOptions { keepalive_ns: OFTEN, ..RdmaOptions::default() });
        let until = Instant::now() + DEADLINE;
        while bed.asking.rdma.counters().keepalives < 5 || bed.asked.rdma.counters().keepalives < 5 {
            bed.asking.round();
            bed.asked.round();
            assert!(Instant::now() < until, "no probe was sent");
        }
        assert!(bed.asking.gone.is_empty() && bed.asked.gone.is_empty(), "{:?}", bed.asking.gone);
        assert!(bed.asked.frames.is_empty(), "a sign of life is no message");
        // Keepalive does not disturb other frames.
        assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Hello, 1), &[], None));
        while bed.asked.frames.is_empty() {
            bed.asking.round();
            bed.asked.round();
            assert!(Instant::now() < until, "the frame is lost");
        }
        let Some(fabric) = fabric else { return };
        // The peer's device does not respond any more, and neither does its host.
        bed.asking.rdma.close(bed.ask, kvplane_transport::CloseCause::Closed);
        let mut bed = Bed::new(devices, 1 << 20, RdmaOptions { keepalive_ns: OFTEN, ..RdmaOptions::default() });
        fabric.set_port(1, false);
        while bed.asking.gone.is_empty() {
            bed.asking.round();
            assert!(Instant::now() < until, "the dead peer was not detected");
        }
        fabric.set_port(1, true);
    });
}
