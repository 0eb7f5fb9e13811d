//! Host of the emulated network: a process in a network namespace, with a TAP device per port of its switch. A TAP
//! device has no offloads, so each frame is whole and has its checksums; it works on kernels without netem.
//!
//! One thread reads each device, and one more writes the frames when their time has come. Commands arrive as lines of
//! JSON over a Unix socket, and are answered with the counters.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use super::switch::{Counters, Direction, Impairment, Switch, hardware_address};
use crate::namespaces::Space;
use crate::support::{Process, Workplace, test_of, text};

/// Environment variable that makes this program the emulator: its socket, and the number of its ports.
const ROLE: &str = "KVPLANE_TEST_EMULATOR";
/// Longest frame: an Ethernet frame with a VLAN tag.
const FRAME: usize = 1518;
/// Most frames that wait for their time.
const WAITING: usize = 100_000;

/// Command to the emulator.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Impair { port: usize, direction: Direction, impairment: Impairment },
    Reset { port: usize, both: bool },
    Mend,
    Count,
}

/// Frame by the time at which it leaves; frames of one time leave in order.
type Waiting = Reverse<(u64, u64, usize, Vec<u8>)>;

struct State {
    switch: Switch,
    waiting: BinaryHeap<Waiting>,
    number: u64,
}

struct Host {
    devices: Vec<SyncDevice>,
    state: Mutex<State>,
    has_frame: Condvar,
    start: Instant,
}

impl Host {
    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Reads the frames of a port.
    fn read(&self, port: usize) {
        let mut frame = [0; FRAME];
        loop {
            // A device fails while its interface is down.
            let Ok(bytes) = self.devices[port].recv(&mut frame) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let mut state = self.state.lock().unwrap();
            let deliveries = state.switch.forward(port, &frame[..bytes], self.now_ns());
            for delivery in deliveries {
                if state.waiting.len() < WAITING {
                    state.number += 1;
                    let number = state.number;
                    state.waiting.push(Reverse((delivery.at_ns, number, delivery.port, delivery.frame)));
                }
            }
            drop(state);
            self.has_frame.notify_one();
        }
    }

    /// Writes frames when their time has come.
    fn write(&self) {
        let mut state = self.state.lock().unwrap();
        loop {
            let now_ns = self.now_ns();
            match state.waiting.peek() {
                Some(Reverse((at_ns, ..))) if *at_ns <= now_ns => {
                    let Some(Reverse((_, _, port, frame))) = state.waiting.pop() else { continue };
                    drop(state);
                    let _ = self.devices[port].send(&frame);
                    state = self.state.lock().unwrap();
                }
                Some(Reverse((at_ns, ..))) => {
                    let wait = Duration::from_nanos(at_ns - now_ns);
                    state = self.has_frame.wait_timeout(state, wait).unwrap().0;
                }
                None => state = self.has_frame.wait(state).unwrap(),
            }
        }
    }

    fn carry_out(&self, order: &Order) -> Counters {
        let mut state = self.state.lock().unwrap();
        let switch = &mut state.switch;
        match *order {
            Order::Impair { port, direction, impairment } => switch.impair(port, direction, impairment),
            Order::Reset { port, both } => switch.reset(port, both),
            Order::Mend => switch.mend(),
            Order::Count => {}
        }
        switch.counters()
    }
}

/// Entry point of the emulator, not a test: without the role it does nothing.
#[test]
fn emulator() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (ports, socket) = role.split_once(' ').expect("ports and a socket");
    let ports: usize = ports.parse().expect("a number");
    let device = |port: usize| {
        DeviceBuilder::new().name(format!("tap{port}")).layer(Layer::L2).mac_addr(hardware_address(port)).build_sync()
    };
    let devices: Result<Vec<_>, _> = (0..ports).map(device).collect();
    let devices = match devices {
        Ok(devices) => devices,
        Err(error) => return println!("no TAP devices here: {error}"),
    };
    let state = State { switch: Switch::new(ports, 1), waiting: BinaryHeap::new(), number: 0 };
    let host = Arc::new(Host { devices, state: Mutex::new(state), has_frame: Condvar::new(), start: Instant::now() });
    for port in 0..ports {
        let host = Arc::clone(&host);
        std::thread::spawn(move || host.read(port));
    }
    let writer = Arc::clone(&host);
    std::thread::spawn(move || writer.write());
    let listener = UnixListener::bind(socket).expect("a socket");
    println!("emulates {ports} ports");
    let (stream, _) = listener.accept().expect("a controller");
    let mut answers = stream.try_clone().expect("a socket");
    for line in BufReader::new(stream).lines() {
        let order = serde_json::from_str::<Order>(&line.expect("a line")).expect("an order");
        let counters = serde_json::to_string(&host.carry_out(&order)).expect("counters");
        writeln!(answers, "{counters}").expect("answered");
    }
}

/// An emulated network: the namespace `hub`, whose interface is port 0, and a namespace per other port.
pub(crate) struct Emulation {
    _process: Process,
    stream: BufReader<UnixStream>,
}

impl Emulation {
    /// Creates the namespaces and connects them; `address` returns the address of each port. `None`, after printing a
    /// note, on a machine without namespaces or TAP devices.
    pub(crate) fn start(
        place: &Workplace,
        leaves: usize,
        address: impl Fn(usize) -> String,
    ) -> Option<(Self, Space, Vec<Space>)> {
        let started = Self::try_start(place, leaves, address);
        if started.is_none() {
            println!(
                "skipped: no network namespaces with TAP devices here (unshare --map-root-user --net, /dev/net/tun)"
            );
        }
        started
    }

    fn try_start(
        place: &Workplace,
        leaves: usize,
        address: impl Fn(usize) -> String,
    ) -> Option<(Self, Space, Vec<Space>)> {
        let hub = Space::fresh("ip link set lo up")?;
        let socket: PathBuf = place.path("emulator");
        let mut command = Command::new(std::env::current_exe().unwrap());
        let function = test_of(module_path!(), "emulator");
        command.args([&function, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, format!("{} {}", leaves + 1, text(&socket)));
        let process = Process::start(hub.inside(&command));
        let line = crate::support::wait_until(|| {
            process.said().into_iter().find(|line| line.contains("emulates") || line.contains("no TAP devices"))
        })?;
        if !line.contains("emulates") {
            println!("{line}");
            return None;
        }
        let stream = BufReader::new(UnixStream::connect(&socket).expect("the emulator listens"));
        run(&hub, &format!("ip addr add {}/24 dev tap0 && ip link set tap0 up", address(0)))?;
        let spaces: Option<Vec<Space>> = (1..=leaves)
            .map(|port| {
                let mut command = hub.enter();
                command.args(["unshare", "--net"]);
                let leaf = Space::new(command, "ip link set lo up")?;
                run(&hub, &format!("ip link set tap{port} netns {} name eth0", leaf.pid()))?;
                run(&leaf, &format!("ip addr add {}/24 dev eth0 && ip link set eth0 up", address(port)))?;
                Some(leaf)
            })
            .collect();
        Some((Self { _process: process, stream }, hub, spaces?))
    }

    fn order(&mut self, order: &Order) -> Counters {
        let line = serde_json::to_string(order).expect("an order");
        writeln!(self.stream.get_mut(), "{line}").expect("the emulator reads");
        let mut answer = String::new();
        self.stream.read_line(&mut answer).expect("the emulator answers");
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error} in {answer:?}"))
    }

    /// Impairs a port in both directions.
    pub(crate) fn impair(&mut self, port: usize, impairment: Impairment) {
        self.impair_one_way(port, Direction::Sent, impairment);
        self.impair_one_way(port, Direction::Received, impairment);
    }

    pub(crate) fn impair_one_way(&mut self, port: usize, direction: Direction, impairment: Impairment) {
        self.order(&Order::Impair { port, direction, impairment });
    }

    /// Resets the TCP connections through a port: both ends, or one of them, whose peer keeps a half-open connection.
    pub(crate) fn reset(&mut self, port: usize, both: bool) {
        self.order(&Order::Reset { port, both });
    }

    /// Removes all impairments.
    pub(crate) fn mend(&mut self) -> Counters {
        self.order(&Order::Mend)
    }

    pub(crate) fn counters(&mut self) -> Counters {
        self.order(&Order::Count)
    }
}

fn run(space: &Space, script: &str) -> Option<()> {
    space.enter().args(["sh", "-c", script]).status().is_ok_and(|end| end.success()).then_some(())
}
