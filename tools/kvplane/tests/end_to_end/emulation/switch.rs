//! Pure core of the emulated network: an Ethernet switch whose ports impair the frames that pass them. Time and
//! randomness are arguments; the outputs are frames with the time and the port at which they leave.

use std::collections::HashMap;
use std::time::Duration;

use kvplane_proto::rng::Rng;
use serde::{Deserialize, Serialize};

use super::tcp::{Flow, Segment};

/// Longest queue in front of a limited rate: a frame that would wait for longer is dropped.
const QUEUE_NS: u64 = 200_000_000;
/// Most TCP connections that are known.
const MOST_FLOWS: usize = 4096;

/// Impairment of the frames of a port in one direction. Shares are of all frames, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Impairment {
    pub(crate) delay: Duration,
    /// Most that is added to the delay. The order stays.
    pub(crate) jitter: Duration,
    pub(crate) lost: f64,
    /// Share of frames that overtake those that are delayed.
    pub(crate) reordered: f64,
    pub(crate) duplicated: f64,
    /// Share of frames in which a bit is flipped.
    pub(crate) damaged: f64,
    /// Bytes per second; 0 for no limit.
    pub(crate) rate: u64,
}

/// Direction of frames, as the host behind a port sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Direction {
    Sent,
    Received,
}

/// Frames by what happened to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) forwarded: u64,
    pub(crate) lost: u64,
    pub(crate) queue_full: u64,
    pub(crate) reordered: u64,
    pub(crate) duplicated: u64,
    pub(crate) damaged: u64,
    /// Connections that were reset, or of which one end was reset.
    pub(crate) reset: u64,
    /// Frames of connections of which only one end was reset.
    pub(crate) swallowed: u64,
}

/// A frame that leaves through a port.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub(crate) at_ns: u64,
    pub(crate) port: usize,
    pub(crate) frame: Vec<u8>,
}

/// One direction of a port.
#[derive(Debug, Default)]
struct Lane {
    impairment: Impairment,
    /// Time at which the last frame in order leaves.
    last_ns: u64,
    /// Time at which the limited rate admits the next frame.
    free_ns: u64,
}

/// State of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlowState {
    Open,
    /// The next segment resets both ends, or only one.
    Resets {
        both: bool,
    },
    /// One end was reset, and the other does not learn of it.
    HalfOpen,
}

/// An Ethernet switch. The host behind port `n` has the hardware address [`hardware_address`]`(n)`.
#[derive(Debug)]
pub(crate) struct Switch {
    sent: Vec<Lane>,
    received: Vec<Lane>,
    flows: HashMap<Flow, ([usize; 2], FlowState)>,
    rng: Rng,
    counters: Counters,
}

/// Returns the hardware address of the host behind a port.
pub(crate) const fn hardware_address(port: usize) -> [u8; 6] {
    [2, 0, 0, 0, 1, port as u8]
}

impl Lane {
    /// Returns the times at which a frame leaves that entered at `now_ns`: none if it is lost, two if it is
    /// duplicated.
    fn pass(&mut self, now_ns: u64, frame: &mut [u8], rng: &mut Rng, counters: &mut Counters) -> Vec<u64> {
        let Impairment { delay, jitter, lost, reordered, duplicated, damaged, rate } = self.impairment;
        if rng.chance(lost) {
            counters.lost += 1;
            return Vec::new();
        }
        let mut ready_ns = now_ns;
        if let Some(sending_ns) = (frame.len() as u64 * 1_000_000_000).checked_div(rate) {
            let begin_ns = self.free_ns.max(now_ns);
            if begin_ns - now_ns > QUEUE_NS {
                counters.queue_full += 1;
                return Vec::new();
            }
            ready_ns = begin_ns + sending_ns;
            self.free_ns = ready_ns;
        }
        if rng.chance(damaged) {
            counters.damaged += 1;
            // Behind the hardware addresses: a frame for another host would only be lost.
            let bit = rng.below((frame.len() as u64 - 12) * 8) as usize;
            frame[12 + bit / 8] ^= 1 << (bit % 8);
        }
        let at_ns = if rng.chance(reordered) {
            counters.reordered += 1;
            ready_ns
        } else {
            let jitter_ns = if jitter.is_zero() { 0 } else { rng.below(jitter.as_nanos() as u64) };
            let at_ns = (ready_ns + delay.as_nanos() as u64 + jitter_ns).max(self.last_ns);
            self.last_ns = at_ns;
            at_ns
        };
        let mut times = vec![at_ns];
        if rng.chance(duplicated) {
            counters.duplicated += 1;
            times.push(at_ns);
        }
        times
    }
}

impl Switch {
    pub(crate) fn new(ports: usize, seed: u64) -> Self {
        let lanes = || (0..ports).map(|_| Lane::default()).collect();
        let rng = Rng::new(seed, "emulated network");
        Self { sent: lanes(), received: lanes(), flows: HashMap::new(), rng, counters: Counters::default() }
    }

    pub(crate) const fn counters(&self) -> Counters {
        self.counters
    }

    pub(crate) fn impair(&mut self, port: usize, direction: Direction, impairment: Impairment) {
        let lanes = match direction {
            Direction::Sent => &mut self.sent,
            Direction::Received => &mut self.received,
        };
        lanes[port].impairment = impairment;
    }

    /// Removes all impairments. Connections of which one end was reset stay as they are.
    pub(crate) fn mend(&mut self) {
        self.sent.iter_mut().chain(&mut self.received).for_each(|lane| lane.impairment = Impairment::default());
    }

    /// Resets the TCP connections that pass a port, each with its next segment: both ends, or only one of them, whose
    /// peer keeps a half-open connection.
    pub(crate) fn reset(&mut self, port: usize, both: bool) {
        for (ports, state) in self.flows.values_mut() {
            if ports.contains(&port) && *state == FlowState::Open {
                *state = FlowState::Resets { both };
            }
        }
    }

    /// Forwards a frame that entered a port.
    pub(crate) fn forward(&mut self, from: usize, frame: &[u8], now_ns: u64) -> Vec<Delivery> {
        let mut deliveries = Vec::new();
        let Some(target) = frame.first_chunk::<6>().filter(|_| frame.len() >= 14) else { return deliveries };
        let is_for = |port: &usize| *port != from && (target[0] & 1 == 1 || *target == hardware_address(*port));
        let ports: Vec<usize> = (0..self.sent.len()).filter(is_for).collect();
        let mut frame = frame.to_vec();
        if let (Some(segment), [to]) = (Segment::parse(&frame), &ports[..]) {
            match self.follow(from, *to, &segment) {
                FlowState::Open => {}
                FlowState::HalfOpen => {
                    self.counters.swallowed += 1;
                    return deliveries;
                }
                FlowState::Resets { both } => {
                    self.counters.reset += 1;
                    let (onward, back) = (segment.reset_onward(), segment.reset_back());
                    let towards_target = both || self.rng.chance(0.5);
                    if towards_target {
                        deliveries.push(Delivery { at_ns: now_ns, port: *to, frame: onward });
                    }
                    if both || !towards_target {
                        deliveries.push(Delivery { at_ns: now_ns, port: from, frame: back });
                    }
                    return deliveries;
                }
            }
        }
        for at_ns in self.sent[from].pass(now_ns, &mut frame, &mut self.rng, &mut self.counters) {
            for port in &ports {
                let mut arriving = frame.clone();
                let lane = &mut self.received[*port];
                for at_ns in lane.pass(at_ns, &mut arriving, &mut self.rng, &mut self.counters) {
                    self.counters.forwarded += 1;
                    deliveries.push(Delivery { at_ns, port: *port, frame: arriving.clone() });
                }
            }
        }
        deliveries
    }

    /// Returns what the segment's connection has to suffer.
    fn follow(&mut self, from: usize, to: usize, segment: &Segment<'_>) -> FlowState {
        let flow = segment.flow();
        if segment.is_first() {
            if self.flows.len() == MOST_FLOWS {
                self.flows.clear();
            }
            self.flows.insert(flow, ([from, to], FlowState::Open));
        }
        let Some((_, state)) = self.flows.get_mut(&flow) else { return FlowState::Open };
        let before = *state;
        match before {
            FlowState::Resets { both: true } => drop(self.flows.remove(&flow)),
            FlowState::Resets { both: false } => *state = FlowState::HalfOpen,
            FlowState::Open | FlowState::HalfOpen => {}
        }
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulation::tcp::tests::segment;

    const MS: u64 = 1_000_000;

    fn frame(from: usize, to: usize) -> Vec<u8> {
        let mut frame = [hardware_address(to), hardware_address(from)].concat();
        frame.extend([0x88, 0xb5]);
        frame.extend((0..100).map(|at| at as u8));
        frame
    }

    #[test]
    fn frames_reach_their_host_or_all_and_unimpaired_ones_in_order_unchanged() {
        let mut switch = Switch::new(3, 1);
        for now_ns in 0..50 {
            let expected = Delivery { at_ns: now_ns, port: 2, frame: frame(0, 2) };
            assert_eq!(switch.forward(0, &frame(0, 2), now_ns), [expected]);
        }
        let mut broadcast = frame(1, 0);
        broadcast[..6].fill(0xff);
        let ports: Vec<_> = switch.forward(1, &broadcast, 9).iter().map(|delivery| delivery.port).collect();
        assert_eq!(ports, [0, 2]);
        assert_eq!(switch.forward(1, &[1, 2, 3], 9), []);
    }

    #[test]
    fn a_port_loses_delays_and_limits_in_the_direction_that_is_impaired() {
        let mut switch = Switch::new(3, 1);
        switch.impair(1, Direction::Sent, Impairment { lost: 1.0, ..Impairment::default() });
        assert_eq!(switch.forward(1, &frame(1, 2), 0), []);
        assert_eq!(switch.forward(2, &frame(2, 1), 0).len(), 1);
        let slow = Impairment { delay: Duration::from_millis(20), rate: 114_000, ..Impairment::default() };
        switch.mend();
        switch.impair(1, Direction::Received, slow);
        // A frame of 114 bytes takes a millisecond. The queue holds 200 ms.
        let times: Vec<_> =
            (0..300).flat_map(|_| switch.forward(2, &frame(2, 1), 0)).map(|delivery| delivery.at_ns).collect();
        assert_eq!(times, (1..=201).map(|number| (20 + number) * MS).collect::<Vec<_>>());
        assert_eq!(switch.counters().queue_full, 99);
    }

    #[test]
    fn shares_of_the_frames_are_lost_reordered_duplicated_and_damaged() {
        let mut switch = Switch::new(2, 7);
        let delay = Duration::from_millis(5);
        let all =
            Impairment { delay, lost: 0.1, reordered: 0.2, duplicated: 0.1, damaged: 0.1, ..Impairment::default() };
        switch.impair(0, Direction::Sent, all);
        let mut passed = 0;
        for now_ns in 0..10_000 {
            for delivery in switch.forward(0, &frame(0, 1), now_ns) {
                passed += 1;
                let differing: u32 =
                    delivery.frame.iter().zip(frame(0, 1)).map(|(one, other)| (one ^ other).count_ones()).sum();
                assert!(differing <= 1, "{differing} bits");
            }
        }
        let counters = switch.counters();
        assert_eq!(passed, 10_000 - counters.lost + counters.duplicated);
        for (share, expected) in
            [(counters.lost, 1000), (counters.duplicated, 900), (counters.damaged, 900), (counters.reordered, 1800)]
        {
            assert!(share.abs_diff(expected) < 150, "{counters:?}");
        }
    }

    #[test]
    fn connections_are_reset_at_both_ends_or_become_half_open() {
        let mut switch = Switch::new(2, 3);
        let onward = |first: bool| segment(0, 1, first);
        for both in [true, false] {
            switch.forward(0, &onward(true), 0);
            assert_eq!(switch.forward(0, &onward(false), 0).len(), 1);
            switch.reset(1, both);
            let resets = switch.forward(0, &onward(false), 0);
            assert_eq!(resets.len(), if both { 2 } else { 1 });
            assert!(resets.iter().all(|reset| Segment::parse(&reset.frame).is_some_and(|segment| segment.is_reset())));
            // What follows passes to a host that knows no such connection any more, or nowhere.
            assert_eq!(switch.forward(0, &onward(false), 0).len(), usize::from(both));
            assert_eq!(switch.forward(1, &segment(1, 0, false), 0).len(), usize::from(both));
        }
        assert_eq!((switch.counters().reset, switch.counters().swallowed), (2, 2));
    }
}
