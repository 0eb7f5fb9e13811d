//! `cargo x peers`, `cargo x stores` and `cargo x interop`: comparison with other engines and stores, in a network
//! namespace of their own.
//!
//! Stock Mooncake listens on every address without authentication. So everything runs in a network namespace that has
//! only loopback; where the kernel provides none, nothing is started and a line reports that.

pub mod install;
mod interop_rdma;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{self, Failure};
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;
use install::Peer;

/// Environment variable with the folder of the peers, unless `--folder` is given.
const FOLDER_VARIABLE: &str = "KVPLANE_PEERS";
/// Command that brings loopback up, then becomes the program: its arguments are the words after `lo`.
const LOOPBACK: [&str; 4] = ["sh", "-c", "ip link set lo up && exec \"$@\"", "lo"];

/// Arguments of `cargo x peers` that concern the installation.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    folder: Option<PathBuf>,
    peers: Vec<Peer>,
    install_only: bool,
    /// Arguments of the benchmark program.
    rest: Vec<String>,
}

fn parse(arguments: &[String]) -> Result<Request, Failure> {
    let mut request = Request { folder: None, peers: Vec::new(), install_only: false, rest: Vec::new() };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (word.as_str(), None),
        };
        let mut value = || value.clone().or_else(|| words.next().cloned());
        match name {
            "--install-only" => request.install_only = true,
            "--folder" => {
                let folder = value().ok_or_else(|| Failure::new("--folder takes a directory"))?;
                request.folder = Some(folder.into());
            }
            "--only" => {
                let list = value().ok_or_else(|| Failure::new("--only takes names of peers"))?;
                for name in list.split(',').filter(|name| *name != "raw") {
                    let unknown = || Failure::new(format!("--only: unknown peer `{name}`; known: {}", known()));
                    request.peers.push(Peer::parse(name).ok_or_else(unknown)?);
                }
                request.rest.push(format!("--only={list}"));
            }
            _ => request.rest.push(word.clone()),
        }
    }
    if request.peers.is_empty() {
        request.peers = Peer::ALL.to_vec();
    }
    Ok(request)
}

fn known() -> String {
    Peer::ALL.map(Peer::name).join(", ")
}

/// Installs the peers, builds, and measures all sides in turns.
pub fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let request = parse(arguments)?;
    setup::run(&[Group::Build])?;
    let folder = folder(workspace, request.folder);
    for &peer in &request.peers {
        if let Err(failure) = install::install(peer, &folder) {
            eprintln!("peers: skipped: {}: {failure}", peer.name());
        }
    }
    if request.install_only {
        return Ok(());
    }
    let build = ["build", "--release", "--package", "kvplane-tools", "--package", "kvplane-benches"];
    process::run(&mut workspace.cargo(&build))?;
    let Some(mut command) = in_own_network() else { return Ok(()) };
    command.arg(workspace.release_binary("kvplane-bench")).arg("peers").arg("--folder").arg(&folder);
    command.arg("--scripts").arg(scripts(workspace)).args(&request.rest);
    Err(process::become_program(&mut command))
}

/// Installs other stores, builds, and measures kvplane's store and theirs in turns.
pub fn stores(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    let request = parse_stores(arguments)?;
    setup::run(&[Group::Build])?;
    let folder = folder(workspace, request.folder);
    if let Err(failure) = install::install(Peer::Mooncake, &folder) {
        eprintln!("stores: skipped: mooncake: {failure}");
    }
    for (program, package) in [("redis-server", "redis-server"), ("memcached", "memcached")] {
        // Only the programs are needed; Debian's packages would start them as services too on a machine with an init.
        if process::find_program(program).is_none()
            && let Err(failure) = setup::install_named(&[package])
        {
            eprintln!("stores: skipped: {program}: {failure}");
        }
    }
    if request.install_only {
        return Ok(());
    }
    process::run(&mut workspace.cargo(&["build", "--release", "--package", "kvplane-benches"]))?;
    let Some(mut command) = in_own_network() else { return Ok(()) };
    command.arg(workspace.release_binary("kvplane-bench")).arg("stores").arg("--folder").arg(&folder);
    command.arg("--scripts").arg(scripts(workspace)).args(&request.rest);
    Err(process::become_program(&mut command))
}

/// Parses like `parse`, but passes the names of sides to the benchmark program.
fn parse_stores(arguments: &[String]) -> Result<Request, Failure> {
    let (sides, others): (Vec<_>, Vec<_>) = joined(arguments).into_iter().partition(|word| word.starts_with("--only="));
    let mut request = parse(&others)?;
    request.rest.extend(sides);
    Ok(request)
}

/// Joins `--only NAMES` to one word.
fn joined(arguments: &[String]) -> Vec<String> {
    let mut words = arguments.iter();
    let mut joined = Vec::new();
    while let Some(word) = words.next() {
        match (word.as_str(), words.as_slice().first()) {
            ("--only", Some(names)) => {
                joined.push(format!("--only={names}"));
                words.next();
            }
            _ => joined.push(word.clone()),
        }
    }
    joined
}

/// Runs a stock wheel and kvplane against each other's segments, over TCP or, with `--rdma`, over RDMA; `--debug` takes
/// the development build. Skipped with a line where there is no wheel.
pub fn interop(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    if let Some(("--rdma", rest)) = arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return interop_rdma::run(workspace, rest);
    }
    setup::run(&[Group::Build])?;
    let folder = folder(workspace, None);
    if let Err(failure) = install::install(Peer::Mooncake, &folder) {
        eprintln!("interop: skipped: no stock wheel: {failure}");
        return Ok(());
    }
    let (debug, rest): (Vec<_>, Vec<_>) = arguments.iter().partition(|word| *word == "--debug");
    let (mut build, built) = if debug.is_empty() {
        let build = workspace.cargo(&["build", "--release", "--package", "kvplane-tools"]);
        (build, workspace.release_binary("kvplane"))
    } else {
        (workspace.development_build(), workspace.debug_binary("kvplane"))
    };
    process::run(&mut build)?;
    let Some(mut command) = in_own_network() else { return Ok(()) };
    command.arg(folder.join("mc/bin/python")).arg(scripts(workspace).join("interop.py")).arg("run");
    command.arg(built).args(rest);
    process::run(&mut command)
}

fn folder(workspace: &Workspace, said: Option<PathBuf>) -> PathBuf {
    let folder = said.or_else(|| std::env::var_os(FOLDER_VARIABLE).map(PathBuf::from));
    let folder = folder.unwrap_or_else(|| workspace.target().join("peers"));
    std::path::absolute(&folder).unwrap_or(folder)
}

fn scripts(workspace: &Workspace) -> PathBuf {
    workspace.root.join("benches/peers")
}

/// Returns the first words of a command that runs in a network namespace with loopback only; prints the reason if there
/// is none.
fn in_own_network() -> Option<Command> {
    if let Err(failure) = tools() {
        eprintln!("peers: skipped: no network namespace: {failure}");
        return None;
    }
    // Root needs no more; other users may become root in a user namespace, if the kernel allows that.
    let ways: [&[&str]; 2] = [&["--net"], &["--user", "--map-root-user", "--net"]];
    for way in ways {
        let start = || {
            let mut command = Command::new("unshare");
            command.args(way).args(LOOPBACK);
            command
        };
        let mut probe = start();
        probe.arg("true").stdin(Stdio::null()).stderr(Stdio::null());
        if probe.status().is_ok_and(|status| status.success()) {
            return Some(start());
        }
    }
    eprintln!("peers: skipped: the kernel gives this user no network namespace, and stock Mooncake listens everywhere");
    None
}

fn tools() -> Result<(), Failure> {
    for (program, package) in [("unshare", "util-linux"), ("ip", "iproute2")] {
        let there = process::find_program(program).is_some() || Path::new("/usr/sbin").join(program).exists();
        if !there {
            setup::install_named(&[package])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Request, Failure> {
        parse(&line.split_whitespace().map(str::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn the_installation_takes_its_words_and_passes_on_the_others() {
        let request = parsed("--quick --only=ucx,raw --folder here --rounds 5").unwrap();
        assert_eq!(request.peers, [Peer::Ucx]);
        assert_eq!(request.folder, Some("here".into()));
        assert_eq!(request.rest, ["--quick", "--only=ucx,raw", "--rounds", "5"]);
        let all = parsed("--install-only").unwrap();
        assert_eq!((all.peers.len(), all.install_only), (Peer::ALL.len(), true));
    }

    #[test]
    fn sides_of_stores_are_passed_on() {
        let words = ["--only", "ours tcp,redis", "--rounds", "2"].map(str::to_string);
        let request = parse_stores(&words).unwrap();
        assert_eq!(request.rest, ["--rounds", "2", "--only=ours tcp,redis"]);
    }

    #[test]
    fn unknown_peers_are_named_beside_the_known() {
        let message = parsed("--only rsync").unwrap_err().message;
        assert!(message.contains("`rsync`") && message.contains("mooncake, nixl, ucx, gloo, iperf3"), "{message}");
        assert!(parsed("--only").is_err() && parsed("--folder").is_err());
    }
}
