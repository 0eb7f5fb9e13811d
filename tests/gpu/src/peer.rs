//! Rates to the device memory of another process of this host: this program again, which obeys lines.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use kvplane::device::{Device, DeviceId, DeviceMemory};
use kvplane::{
    Opcode, RegisterOptions, SegmentHandle, SubmitOptions, TaskState, TransferEngine, TransferEngineConfig,
    TransferRequest,
};
use kvplane_fake_devices::Control;

use crate::rates::{Rate, check, median};
use crate::{Error, cards};

/// Serves device memory until the standard input ends. A line `BYTES SEED` checks the first bytes.
pub(crate) fn serve(id: DeviceId, bytes: u64) -> Result<(), Error> {
    let control = cards::load(id.family)?;
    let memory = DeviceMemory::allocate(&Device::open(id)?, bytes)?;
    let engine = TransferEngine::start(TransferEngineConfig::default())?;
    engine.register(Arc::clone(&memory), &RegisterOptions::default())?;
    println!("{} {}", engine.name(), memory.address());
    for line in std::io::stdin().lines() {
        let line = line?;
        let (bytes, seed) = line.split_once(' ').ok_or("a line is BYTES SEED")?;
        let found = control.read(memory.address(), bytes.parse()?);
        match check(&found, seed.parse()?, "a write") {
            Ok(()) => println!("right"),
            Err(error) => println!("{error}"),
        }
    }
    engine.unregister(memory.address())?;
    Ok(())
}

/// Process with device memory, and an engine here that writes to it.
pub(crate) struct Peer {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    engine: TransferEngine,
    segment: SegmentHandle,
    address: u64,
    ours: Arc<DeviceMemory>,
    control: Control,
}

impl Peer {
    /// Starts the process with memory on this device, as much as `ours`, which is registered here.
    pub(crate) fn start(id: DeviceId, ours: &Arc<DeviceMemory>, control: Control) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peer", &id.to_string(), &ours.bytes().to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (input, output) = input.zip(output).ok_or("pipes")?;
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let (name, address) = line.trim().split_once(' ').ok_or("the other process did not start")?;
        let engine = TransferEngine::start(TransferEngineConfig::default())?;
        engine.register(Arc::clone(ours), &RegisterOptions::default())?;
        let segment = engine.open_segment(name)?;
        let address = address.parse()?;
        Ok(Self { process, input, output, engine, segment, address, ours: Arc::clone(ours), control })
    }

    /// Measures writes. Compares the bytes of each there.
    pub(crate) fn measure(&mut self, bytes: u64) -> Result<Rate, Error> {
        median(bytes, |round| {
            self.control.write(self.ours.address(), &Control::pattern(round, bytes));
            let write = TransferRequest {
                opcode: Opcode::Write,
                source: self.ours.address(),
                target: self.segment,
                target_offset: self.address,
                length: bytes,
            };
            let began = Instant::now();
            let batch = self.engine.submit(&[write], &SubmitOptions::default())?;
            let state = batch.wait().state;
            let took = began.elapsed();
            if state != TaskState::Completed {
                return Err(format!("a write ended as {state:?}: {}", batch.problem().unwrap_or_default()).into());
            }
            writeln!(self.input, "{bytes} {round}")?;
            let mut line = String::new();
            self.output.read_line(&mut line)?;
            if line.trim() == "right" { Ok(took) } else { Err(line.into()) }
        })
    }

    /// Returns the transports that carried bytes, and whether copies between mapped memory did.
    pub(crate) fn transports(&self) -> String {
        let metrics = self.engine.metrics();
        let used = metrics.rails.iter().filter(|rail| rail.bytes > 0);
        let mut names: Vec<&str> = used.map(|rail| rail.transport.name()).collect();
        names.dedup();
        if metrics.peer_memory.written_bytes > 0 {
            names.push("a mapping of its memory");
        }
        names.join(", ")
    }

    /// Ends the process.
    pub(crate) fn end(self) -> Result<(), Error> {
        let Self { mut process, input, engine, ours, .. } = self;
        engine.unregister(ours.address())?;
        drop((engine, input));
        let status = process.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the other process ended with {status}").into()) }
    }
}
