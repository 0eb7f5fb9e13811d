//! Peer process: this program again, in another role.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};

use kvplane::{Client, HugePages, Region, RegionOptions, TransferEngine, cpu};

use crate::Failure;
use crate::bed;
use crate::objects::tails;
use crate::stores;

/// First argument of a process in another role.
pub(crate) const ROLE: &str = "--role";
/// Size of the segment that a target serves, in bytes.
pub(crate) const SEGMENT_BYTES: usize = 64 << 20;

/// Running peer process, ended on drop.
pub(crate) struct Peer {
    child: Child,
    /// Its first line: the address that it listens on.
    pub(crate) said: String,
    stdin: Option<ChildStdin>,
}

impl Peer {
    pub(crate) fn start(words: &[&str]) -> Result<Self, Failure> {
        Self::start_as(ROLE, words)
    }

    /// Starts a process of another benchmark, which knows it by the role.
    pub(crate) fn start_as(role: &str, words: &[&str]) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        let stdout = child.stdout.take().ok_or("the peer's output was to be a pipe")?;
        BufReader::new(stdout).read_line(&mut said)?;
        let stdin = child.stdin.take();
        Ok(Self { child, said: said.trim().to_owned(), stdin })
    }

    /// Sends it a command.
    pub(crate) fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let stdin = self.stdin.as_mut().ok_or("the peer's input was to be a pipe")?;
        writeln!(stdin, "{line}")?;
        Ok(stdin.flush()?)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        // Both calls are harmless if it has ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a role until the parent ends.
pub(crate) fn run(words: &[String]) -> Result<(), Failure> {
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let ["on-core", core, ..] = words.as_slice() {
        cpu::pin_current_thread(core.parse()?)?;
        words.drain(..2);
    }
    match words.as_slice() {
        ["target", way, pacing, directory] => target(way, pacing, directory),
        ["same-host", directory] => {
            let shard = crate::transports::same_host::owner(directory)?;
            say(&shard.address().to_string())?;
            wait_for_parent();
            Ok(())
        }
        ["many-peers"] => {
            let shard = crate::transports::many_peers::owner()?;
            say(&shard.address().to_string())?;
            wait_for_parent();
            Ok(())
        }
        ["perftest", device, pacing, directory] => crate::transports::perftest::serve(device, pacing, directory),
        ["echo", pacing, sent, answered] => echo(pacing == &"spin", sent.parse()?, answered.parse()?),
        ["victim", way, directory] => victim(way, directory),
        [tails::ROLE_CHURN, way, directory] => tails::churn(way, directory),
        [stores::ROLE_SERVER, pool_bytes] => stores::serve(pool_bytes),
        [stores::ROLE_CLIENT, way, server, index, bytes] => stores::client(way, server, index, bytes),
        _ => Err(format!("unknown role {words:?}").into()),
    }
}

pub(crate) fn say(line: &str) -> Result<(), Failure> {
    println!("{line}");
    Ok(std::io::stdout().flush()?)
}

/// Waits for the end of the input, which closes with the parent.
fn wait_for_parent() {
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
}

fn target(way: &str, pacing: &str, directory: &str) -> Result<(), Failure> {
    let engine = TransferEngine::start(bed::engine_config(way, pacing, directory)?)?;
    let options = RegionOptions {
        shared: true,
        huge: HugePages::Try,
        prefault: true,
        ..RegionOptions::new("bench-target", SEGMENT_BYTES)
    };
    engine.register(Region::allocate(&options)?, &kvplane::RegisterOptions::default())?;
    say(engine.name())?;
    wait_for_parent();
    Ok(())
}

/// Answers each `sent` bytes with `answered` bytes.
fn echo(spin: bool, sent: usize, answered: usize) -> Result<(), Failure> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    say(&listener.local_addr()?.to_string())?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(spin)?;
    let (mut question, answer) = (vec![0; sent], vec![7; answered]);
    while receive(&mut stream, &mut question)? {
        send(&mut stream, &answer)?;
    }
    Ok(())
}

/// Fills `bytes` from a socket, spinning if it is nonblocking. Returns false at the end.
pub(crate) fn receive(stream: &mut TcpStream, bytes: &mut [u8]) -> std::io::Result<bool> {
    let mut at = 0;
    while at < bytes.len() {
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Ok(false),
            Ok(count) => at += count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

pub(crate) fn send(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match stream.write(&bytes[at..]) {
            Ok(count) => at += count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Puts and gets large objects in batches until it is killed in the middle of one.
fn victim(way: &str, directory: &str) -> Result<(), Failure> {
    let mut client = Client::connect(&bed::client_config(way, "spin", directory)?)?;
    let (count, bytes) = (8usize, 4usize << 20);
    let memory = client.register(Region::allocate(&RegionOptions::new("victim", count * bytes))?);
    say("ready")?;
    for round in 0u64.. {
        let keys: Vec<String> = (0..count).map(|n| format!("victim-{}-{round}-{n}", std::process::id())).collect();
        let items: Vec<_> = keys.iter().enumerate().map(|(n, key)| (key, memory.slice(n * bytes, bytes))).collect();
        // The pool is smaller than the objects put over time, so outcomes vary; only the traffic matters.
        drop(client.batch_put_from(&items)?);
        drop(client.batch_get_into(&items)?);
    }
    Ok(())
}
