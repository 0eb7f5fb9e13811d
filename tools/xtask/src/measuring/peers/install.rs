//! Installation of peers from their packages into a folder: a virtual environment for each wheel, UCX's wheel unpacked.
//!
//! Versions are pinned so that figures are comparable. An existing installation is left as it is. A peer that cannot be
//! installed is reported and left out; it never ends the run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{self, Failure};
use crate::setup;

/// Stock Mooncake: its build without an accelerator.
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";
/// NIXL, which contains its own UCX.
const NIXL: &str = "nixl-cu12==1.5.1";
/// UCX with its perftest.
const UCX: &str = "libucx-cu12==1.22.0";
/// Python versions for which all these wheels exist, the best first.
const PYTHONS: [&str; 4] = ["python3.11", "python3.12", "python3.10", "python3"];

/// Peer, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Stock Mooncake over TCP.
    Mooncake,
    /// NIXL over TCP and with its automatic choice.
    Nixl,
    /// UCX's perftest over TCP and shared memory.
    Ucx,
    /// Gloo, out of the distribution's torch.
    Gloo,
    /// A stream of plain TCP.
    Iperf3,
}

impl Peer {
    /// All peers.
    pub const ALL: [Self; 5] = [Self::Mooncake, Self::Nixl, Self::Ucx, Self::Gloo, Self::Iperf3];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
            Self::Ucx => "ucx",
            Self::Gloo => "gloo",
            Self::Iperf3 => "iperf3",
        }
    }

    /// Returns the peer of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|peer| peer.name() == name)
    }

    /// Returns the Debian packages that the peer needs.
    const fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Mooncake => &["libibverbs1", "libnuma1", "libcurl4"],
            Self::Nixl | Self::Ucx => &[],
            Self::Gloo => &["python3-torch"],
            Self::Iperf3 => &["iperf3"],
        }
    }
}

/// Installs one peer; the error gives the reason if that fails.
pub fn install(peer: Peer, folder: &Path) -> Result<(), Failure> {
    if is_there(peer, folder) {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    setup::install_named(peer.packages())?;
    match peer {
        Peer::Mooncake => wheels(&folder.join("mc"), &[&[MOONCAKE, "numpy"]])?,
        // NIXL's wheel requires torch, which it does not use here.
        Peer::Nixl => wheels(&folder.join("nixl"), &[&["--no-deps", NIXL], &["numpy"]])?,
        Peer::Ucx => unpack_ucx(folder)?,
        Peer::Gloo | Peer::Iperf3 => {}
    }
    if is_there(peer, folder) {
        return Ok(());
    }
    Err(Failure::new(format!("{} was installed but does not start", peer.name())))
}

/// Returns true if a peer can be started, which is found by starting it.
#[must_use]
pub fn is_there(peer: Peer, folder: &Path) -> bool {
    let python = |path: PathBuf, import: &str| starts(Command::new(path).args(["-c", import]));
    match peer {
        Peer::Mooncake => python(folder.join("mc/bin/python"), "import numpy, mooncake.engine"),
        Peer::Nixl => python(folder.join("nixl/bin/python"), "import numpy, nixl_cu12._api"),
        Peer::Ucx => {
            let root = folder.join("ucx/libucx");
            starts(Command::new(root.join("bin/ucx_info")).arg("-v").env("LD_LIBRARY_PATH", root.join("lib")))
        }
        // The distribution's torch belongs to the distribution's Python, even if another one is first in the path.
        Peer::Gloo => python("/usr/bin/python3".into(), "import torch.distributed"),
        Peer::Iperf3 => starts(Command::new("iperf3").arg("-v")),
    }
}

fn starts(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Creates a virtual environment and runs pip with each list of arguments.
fn wheels(venv: &Path, installs: &[&[&str]]) -> Result<(), Failure> {
    if !starts(Command::new(venv.join("bin/python")).args(["-m", "pip", "--version"])) {
        let python = python()?;
        process::run(Command::new(python).args(["-m", "venv", "--clear"]).arg(venv))?;
    }
    for arguments in installs {
        process::run(&mut pip(&venv.join("bin/python"), "install", arguments))?;
    }
    Ok(())
}

fn pip(python: &Path, command: &str, arguments: &[&str]) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check", command]).args(arguments);
    pip
}

/// Finds a Python that can create virtual environments; Debian's needs a package of its own for that.
fn python() -> Result<PathBuf, Failure> {
    let usable = |python: &PathBuf| starts(Command::new(python).args(["-c", "import venv, ensurepip"]));
    let found = || PYTHONS.iter().filter_map(|name| process::find_program(name)).find(usable);
    if let Some(python) = found() {
        return Ok(python);
    }
    setup::install_named(&["python3-venv"])?;
    found().ok_or_else(|| Failure::new(format!("no Python that makes virtual environments: {PYTHONS:?}")))
}

fn unpack_ucx(folder: &Path) -> Result<(), Failure> {
    let (wheel, root) = (folder.join("wheels"), folder.join("ucx"));
    let venv = folder.join("pip");
    wheels(&venv, &[])?;
    let python = venv.join("bin/python");
    let into = wheel.to_string_lossy();
    process::run(&mut pip(&python, "download", &["--no-deps", "--dest", &into, UCX]))?;
    let entries = fs::read_dir(&wheel).map_err(|error| Failure::new(format!("{into}: {error}")))?;
    let is_ucx = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libucx"));
    let file = entries.flatten().map(|entry| entry.path()).find(is_ucx);
    let file = file.ok_or_else(|| Failure::new(format!("{into} holds no wheel of UCX")))?;
    process::run(Command::new(&python).args(["-m", "zipfile", "-e"]).arg(file).arg(&root))?;
    // The archive's file modes are lost in unpacking.
    process::run(
        Command::new("chmod")
            .arg("+x")
            .args(["ucx_perftest", "ucx_info"].map(|program| root.join("libucx/bin").join(program))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_known_by_name() {
        for peer in Peer::ALL {
            assert_eq!(Peer::parse(peer.name()), Some(peer));
        }
        assert_eq!(Peer::parse("rsync"), None);
    }

    #[test]
    fn an_empty_folder_has_no_peers() {
        let folder = std::env::temp_dir().join("kvplane-no-peers-here");
        for peer in [Peer::Mooncake, Peer::Nixl, Peer::Ucx] {
            assert!(!is_there(peer, &folder));
        }
    }

    #[test]
    fn versions_are_fixed() {
        for wheel in [MOONCAKE, NIXL, UCX] {
            assert!(wheel.contains("=="), "{wheel}");
        }
    }
}
