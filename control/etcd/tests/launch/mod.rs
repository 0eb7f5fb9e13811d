//! Real etcd clusters of one member or several, for tests of several crates: their members are started, killed, stopped
//! and restarted.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane_etcd::{Certificates, Gateway, Http, Range};

/// Timeout of the start.
const PATIENCE: Duration = Duration::from_secs(60);

/// Running member of an etcd cluster; dropping it kills the process. Its files are kept.
pub(crate) struct Etcd {
    child: Child,
    directory: PathBuf,
    client: SocketAddr,
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
        if !is_installed() {
            return None;
        }
        let (client, peer) = (free_address(), format!("http://{}", free_address()));
        let mut more: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        more.extend(membership("default", &peer, &format!("default={peer}")));
        if let Some(certificates) = &certificates {
            let files = [("--cert-file", "server.pem"), ("--key-file", "server.key"), ("--trusted-ca-file", "ca.pem")];
            for (flag, file) in files {
                more.extend([flag.to_owned(), certificates.join(file).to_str().unwrap().to_owned()]);
            }
            more.push("--client-cert-auth".to_owned());
        }
        let child = launch(directory, client, &more, certificates.is_some());
        let etcd = Self { child, directory: directory.to_owned(), client, more, certificates };
        etcd.wait();
        Some(etcd)
    }

    /// Starts a new cluster of this number of members, with their files below `directory`; returns `None`, after
    /// printing a note, if etcd is not installed.
    pub(crate) fn start_cluster(directory: &Path, members: usize) -> Option<Vec<Self>> {
        if !is_installed() {
            return None;
        }
        let peers: Vec<_> =
            (0..members).map(|number| (format!("m{number}"), format!("http://{}", free_address()))).collect();
        let all: Vec<_> = peers.iter().map(|(name, peer)| format!("{name}={peer}")).collect();
        let start = |(name, peer): &(String, String)| {
            let (client, more) = (free_address(), membership(name, peer, &all.join(",")));
            let directory = directory.join(name);
            let child = launch(&directory, client, &more, false);
            Self { child, directory, client, more, certificates: None }
        };
        let cluster: Vec<_> = peers.iter().map(start).collect();
        cluster.iter().for_each(Self::wait);
        Some(cluster)
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
        self.child = launch(&self.directory, self.client, &self.more, self.certificates.is_some());
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

/// Returns true if etcd is installed; prints a note otherwise.
fn is_installed() -> bool {
    let known = Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if known.is_err() {
        println!("skipped: etcd is not installed (cargo x setup test)");
    }
    known.is_ok()
}

/// Returns the arguments of a member of a new cluster, with its name, its address for other members, and all of them.
fn membership(name: &str, peer: &str, all: &str) -> Vec<String> {
    let words = ["--name", name, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer];
    [&words[..], &["--initial-cluster", all]].concat().into_iter().map(str::to_owned).collect()
}

fn launch(directory: &Path, client: SocketAddr, more: &[String], tls: bool) -> Child {
    let mut command = Command::new("etcd");
    let client = format!("{}://{client}", if tls { "https" } else { "http" });
    command.arg("--data-dir").arg(directory).args([
        "--listen-client-urls",
        &client,
        "--advertise-client-urls",
        &client,
    ]);
    command.args(["--log-level", "error"]).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}
