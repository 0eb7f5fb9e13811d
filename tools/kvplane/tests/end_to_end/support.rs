//! Workplace of one test, and its processes.
//!
//! Waits have a deadline far above their usual time, so that a hang becomes a message; nothing here measures speed.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, Control, RdmaConfig, RdmaUse};

use crate::network::{End, installed_devices, instead_of_tcp, over_rdma};

/// Time limit after which an operation is taken to hang. Emulated processors are slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Directory and cluster name of one test; the directory is removed on drop.
pub(crate) struct Workplace {
    pub(crate) directory: PathBuf,
    pub(crate) cluster: String,
}

impl Workplace {
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            // The path is short: the paths of sockets may have 107 bytes.
            let unique = format!("kvp-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let directory = std::env::temp_dir().join(unique);
            match std::fs::DirBuilder::new().mode(0o700).create(&directory) {
                Ok(()) => return Self { directory, cluster: name.to_owned() },
                // The directory is of a killed run, by a process with the same number.
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{}", directory.display()),
            }
        }
    }

    /// Returns the directory of local identities and sockets.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.directory.join("run")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Creates a file with this content, of this mode.
    pub(crate) fn file_of_mode(&self, name: &str, content: &[u8], mode: u32) -> PathBuf {
        let path = self.file(name, content);
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    /// Creates a file with this content.
    pub(crate) fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Returns the binary with these arguments, and nothing else.
    pub(crate) fn bare(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvplane"));
        // Without the flag, a process must still not meet another test, or the user's own processes.
        command.args(arguments).env("XDG_RUNTIME_DIR", &self.directory).stdin(Stdio::null());
        // Lines that a test waits for should not appear in the log too.
        command.env("KVPLANE_LOG", "warn");
        command
    }

    /// Returns the binary with these arguments, this cluster and this runtime directory. Servers of objects use the
    /// devices of one end, clients those of the other.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.bare(arguments);
        command.args(["--cluster", &self.cluster, "--runtime-directory"]).arg(self.runtime());
        let devices = match arguments.first() {
            Some(&("dev" | "node")) => installed_devices(End::Serves),
            Some(&"replay") if arguments.contains(&"rdma") => installed_devices(End::Asks),
            _ => Vec::new(),
        };
        if !devices.is_empty() {
            command.args(["--rdma-devices", &devices.join(",")]);
        }
        command
    }

    /// Runs the command to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        finish(self.command(arguments), &[])
    }

    /// Starts `kvplane dev`.
    pub(crate) fn dev(&self, pool: &str, more: &[&str]) -> Process {
        let mut arguments = vec!["dev", "--pool", pool];
        arguments.extend(more);
        let dev = Process::start(self.command(&arguments));
        dev.wait_for("ready:");
        dev
    }

    /// Starts `kvplane node` with this number, as a supervisor does: the number of a killed node is free only when the
    /// control plane knows of its death.
    pub(crate) fn node(&self, number: u64, more: &[&str]) -> Process {
        self.node_in(number, more, &[])
    }

    /// Like [`Self::node`], with this environment besides.
    pub(crate) fn node_in(&self, number: u64, more: &[&str], environment: &[(&str, String)]) -> Process {
        let number = number.to_string();
        loop {
            let mut command = self.command(&[&["node", "--node-id", &number], more].concat());
            command.envs(environment.iter().map(|(name, value)| (name, value)));
            let mut node = Process::start(command);
            let (there, taken) = (format!("node {number} with"), format!("node id {number} is in use"));
            let started = wait_until(|| {
                let said = node.said();
                let says = |what: &str| said.iter().any(|line| line.contains(what));
                (says(&there) || says(&taken)).then(|| says(&there))
            });
            match started {
                Some(true) => return node,
                Some(false) => {}
                None => panic!("the node says {:?}", node.said()),
            }
            assert!(!node.ended().success());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn control(&self) -> Control {
        Control::Local { cluster: self.cluster.clone(), runtime_directory: Some(self.runtime()) }
    }

    /// Returns settings of a client over one transport.
    pub(crate) fn client_config(&self, way: Way) -> ClientConfig {
        ClientConfig {
            control: self.control(),
            shared_memory: way == Way::Shm,
            tcp: way == Way::Tcp && !over_rdma(),
            rdma: match way {
                Way::Shm => RdmaConfig::of(RdmaUse::Never),
                Way::Tcp => instead_of_tcp(End::Asks, RdmaUse::Require),
            },
            ..ClientConfig::local(&self.cluster)
        }
    }

    pub(crate) fn client(&self, way: Way) -> Client {
        Client::connect(&self.client_config(way)).unwrap()
    }

    /// Returns the names in the runtime directory with this ending.
    pub(crate) fn left_over(&self, ending: &str) -> Vec<String> {
        let names = |directory: PathBuf| -> Vec<String> {
            let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
        };
        let all = [names(self.runtime()), names(self.path("kvplane"))].concat();
        all.into_iter().filter(|name| name.ends_with(ending)).collect()
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Transport of bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Shm,
    /// Over the network: by TCP, or by RDMA if requested.
    Tcp,
}

impl Way {
    pub(crate) const BOTH: [Self; 2] = [Self::Shm, Self::Tcp];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }

    /// Returns the name of the transport in reports.
    pub(crate) fn carrier(self) -> &'static str {
        if self == Self::Tcp && over_rdma() { "rdma" } else { self.name() }
    }
}

/// Outcome of a process.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Outcome {
    /// Returns its output, after asserting success.
    #[track_caller]
    pub(crate) fn well(self) -> Vec<u8> {
        assert!(self.status.success(), "{} with {}", self.status, self.stderr);
        self.stdout
    }

    #[track_caller]
    pub(crate) fn text(self) -> String {
        String::from_utf8(self.well()).unwrap()
    }

    /// Asserts that it failed with this status and printed all of these words, in one line and without a panic.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "status with: {}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in: {}", self.stderr);
        }
        // A usage error is followed by clap's help.
        let lines = self.stderr.trim_end().lines().count();
        assert!(code == 2 || lines == 1, "{lines} lines: {}", self.stderr);
    }
}

/// Returns the full name of a test in the module at this path (`module_path!()`), by which another process of this
/// program runs it.
pub(crate) fn test_of(module: &str, test: &str) -> String {
    let inside = module.split_once("::").map_or("", |(_, inside)| inside);
    format!("{inside}::{test}")
}

/// Runs a process to its end with this input, and kills it when it takes too long.
pub(crate) fn finish(mut command: Command, input: &[u8]) -> Outcome {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The process may have ended without reading; that shows in its status.
    let _ = child.stdin.take().unwrap().write_all(input);
    let (stdout, stderr) = (collect(child.stdout.take().unwrap()), collect(child.stderr.take().unwrap()));
    let start = Instant::now();
    let (status, hung) = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break (status, false);
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            break (child.wait().unwrap(), true);
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let (stdout, stderr) = (stdout.join().unwrap(), String::from_utf8_lossy(&stderr.join().unwrap()).into_owned());
    assert!(!hung, "{command:?} did not end: {stderr}");
    Outcome { status, stdout, stderr }
}

fn collect(mut source: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        let _ = source.read_to_end(&mut all);
        all
    })
}

/// Running process; dropping it kills it.
pub(crate) struct Process {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    followers: [JoinHandle<()>; 2],
    label: String,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Self {
        let label = format!("{command:?}");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let followers = [
            follow(child.stdout.take().unwrap(), Arc::clone(&lines)),
            follow(child.stderr.take().unwrap(), Arc::clone(&lines)),
        ];
        Self { child, lines, followers, label }
    }

    /// Returns its process number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the lines that it has printed so far.
    pub(crate) fn said(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    /// Waits for the first line that contains `part`.
    #[track_caller]
    pub(crate) fn wait_for(&self, part: &str) -> String {
        let found = wait_until(|| self.said().into_iter().find(|line| line.contains(part)));
        found.unwrap_or_else(|| panic!("{} did not say {part:?} but {:?}", self.label, self.said()))
    }

    /// Returns the address behind `before` in the line that contains it.
    #[track_caller]
    pub(crate) fn address(&self, before: &str) -> SocketAddr {
        let line = self.wait_for(before);
        let rest = &line[line.find(before).unwrap() + before.len()..];
        let end = rest.find(|c: char| !(c.is_ascii_digit() || ".:".contains(c))).unwrap_or(rest.len());
        rest[..end].trim_end_matches(':').parse().unwrap_or_else(|_| panic!("no address in {line:?}"))
    }

    /// Returns its HTTP address.
    pub(crate) fn http(&self) -> SocketAddr {
        self.address("metrics on http://")
    }

    /// Returns its first data port.
    pub(crate) fn data(&self) -> SocketAddr {
        self.address("shard 0: ")
    }

    /// Returns its control port.
    pub(crate) fn quic(&self) -> SocketAddr {
        let line = self.wait_for("(QUIC)");
        let words: Vec<&str> = line.split(' ').collect();
        words[words.len() - 2].parse().unwrap()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Kills it with `kill -9`; returns when it is dead.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Kills all of them with `kill -9` at once: while one is dead and another lives, that one owns the first one's
    /// slots.
    pub(crate) fn kill_all(processes: &mut [Self]) {
        processes.iter_mut().for_each(|process| process.child.kill().unwrap());
        for process in processes {
            process.child.wait().unwrap();
        }
    }

    /// Stops it, and waits until it has ended.
    #[track_caller]
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.ended()
    }

    /// Returns its status, once it has ended and [`Self::said`] has all its lines.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let status = wait_until(|| {
            let status = self.child.try_wait().unwrap()?;
            self.followers.iter().all(JoinHandle::is_finished).then_some(status)
        });
        status.unwrap_or_else(|| panic!("{} did not stop: {:?}", self.label, self.said()))
    }

    /// Returns its status, once it has ended; a process that it started may still have its output.
    #[track_caller]
    pub(crate) fn exited(&mut self) -> ExitStatus {
        let status = wait_until(|| self.child.try_wait().unwrap());
        status.unwrap_or_else(|| panic!("{} did not end: {:?}", self.label, self.said()))
    }

    #[track_caller]
    pub(crate) fn assert_alive(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "{} ended with {ended:?}: {:?}", self.label, self.said());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls are harmless if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn follow(source: impl Read + Send + 'static, lines: Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(source).lines().map_while(Result::ok) {
            lines.lock().unwrap().push(line);
        }
    })
}

/// Sends a signal by its short name. The shell's built-in `kill` is always available.
pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}: {status}");
}

/// Polls `look` until it returns a value; `None` when it takes too long.
pub(crate) fn wait_until<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if start.elapsed() > PATIENCE {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns status and body of a GET.
pub(crate) fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    http_ask(address, "GET", path, "")
}

/// Sends a request with any method and a body.
pub(crate) fn http_ask(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    http_try(address, method, path, body).unwrap()
}

/// Sends a request to a server that may be gone.
pub(crate) fn http_try(address: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let bytes = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {bytes}\r\n");
    write!(stream, "{head}Connection: close\r\n\r\n{body}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let cut = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(cut)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(cut)?;
    Ok((status, body.to_owned()))
}

/// Returns the health of a control plane.
pub(crate) fn health(address: SocketAddr) -> serde_json::Value {
    let (status, body) = http_get(address, "/health");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// Returns a path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
