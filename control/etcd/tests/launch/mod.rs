//! Real etcd cluster of one member, for tests of several crates: started, killed, stopped and restarted.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane_etcd::{Certificates, Gateway, Http, Range};

/// Timeout of the start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Running etcd; dropping it kills the process. Its files are kept.
pub(crate) struct Etcd {
    child: Child,
    directory: PathBuf,
    client: SocketAddr,
    peer: SocketAddr,
    more: Vec<String>,
    certificates: Option<PathBuf>,
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Returns the deadline of a call.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

impl Etcd {
    /// Starts a new etcd with its files in `directory`; returns `None`, after printing a note, if etcd is not
    /// installed.
    pub(crate) fn start(directory: &Path, more: &[&str]) -> Option<Self> {
        Self::start_with(directory, more, None)
    }

    /// Starts a new etcd that serves TLS: `certificates` has `server.pem` and `server.key`, and the files that clients
    /// need.
    pub(crate) fn start_with(directory: &Path, more: &[&str], certificates: Option<PathBuf>) -> Option<Self> {
        let known = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if known.is_err() {
            println!("skipped: etcd is not installed (cargo x setup test)");
            return None;
        }
        let (client, peer) = (free_address(), free_address());
        let mut more: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        if let Some(certificates) = &certificates {
            let files = [("--cert-file", "server.pem"), ("--key-file", "server.key"), ("--trusted-ca-file", "ca.pem")];
            for (flag, file) in files {
                more.extend([flag.to_owned(), certificates.join(file).to_str().unwrap().to_owned()]);
            }
            more.push("--client-cert-auth".to_owned());
        }
        let child = launch(directory, client, peer, &more, certificates.is_some());
        let etcd = Self { child, directory: directory.to_owned(), client, peer, more, certificates };
        etcd.wait();
        Some(etcd)
    }

    fn wait(&self) {
        let range = Range { from: b"a", to: &[], limit: 1, revision: 0 };
        let until = Instant::now() + PATIENCE;
        while let Err(error) = self.gateway().range(&range, soon()) {
            assert!(Instant::now() < until, "{error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns a client of this etcd.
    pub(crate) fn gateway(&self) -> Gateway {
        let certificates = self.certificates.as_deref().map(|directory| Certificates::read(directory).unwrap());
        let scheme = if certificates.is_some() { "https" } else { "http" };
        Gateway::new(vec![format!("{scheme}://{}", self.client)], Http::kept(1 << 20, certificates))
    }

    /// Returns the address that clients connect to.
    pub(crate) fn address(&self) -> SocketAddr {
        self.client
    }

    /// Returns the directory of its files.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Kills it (`kill -9`); returns when the process has ended.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Restarts it with the same files and address, after it was killed.
    pub(crate) fn restart(&mut self) {
        self.child = launch(&self.directory, self.client, self.peer, &self.more, self.certificates.is_some());
        self.wait();
    }

    /// Sends it a signal, by name.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // Both calls are harmless if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(directory: &Path, client: SocketAddr, peer: SocketAddr, more: &[String], tls: bool) -> Child {
    let mut command = Command::new("etcd");
    let client = format!("{}://{client}", if tls { "https" } else { "http" });
    let peer = format!("http://{peer}");
    command.arg("--data-dir").arg(directory).args([
        "--listen-client-urls",
        &client,
        "--advertise-client-urls",
        &client,
    ]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}"), "--log-level", "error"]).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}
