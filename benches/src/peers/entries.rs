//! Sides of a run: kvplane's, and each requested peer whose programs are installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::driver::Driver;
use super::options::Options;
use super::ours::Ours;
use super::programs::{Iperf, Perftest};
use super::raw::{Memcpy, PingPong};
use super::side::Entry;
use crate::Failure;

/// Python of the system, which has the distribution's torch.
const SYSTEM_PYTHON: &str = "/usr/bin/python3";

/// Returns all sides. Missing peers are reported on standard output.
pub(crate) fn of(options: &Options) -> Result<Vec<Entry>, Failure> {
    let mut entries = ours(options)?;
    for (peer, problem, sides) in peers(options) {
        match problem {
            _ if !options.only.is_empty() && !options.only.iter().any(|name| name == peer) => {}
            Some(problem) => println!("skipped: {peer}: {problem}"),
            None => entries.extend(sides),
        }
    }
    // The order of the tables puts comparable sides next to each other.
    entries.sort_by_key(|entry| super::NAMES.iter().position(|name| *name == entry.name));
    Ok(entries)
}

fn ours(options: &Options) -> Result<Vec<Entry>, Failure> {
    let binary = std::env::current_exe()?.with_file_name("kvplane");
    let help = Command::new(&binary).args(["tebench", "--help"]).output();
    let help = help.map_err(|error| format!("{}: {error}; build it first", binary.display()))?;
    let has_cma = String::from_utf8_lossy(&help.stdout).contains("cma");
    let side = |name, transport, pacing, checksum| {
        Entry::new(name, pacing, Ours::new(binary.clone(), transport, pacing, checksum))
    };
    let mut entries = vec![
        side("ours tcp", "tcp", "spin", false),
        side("ours tcp parked", "tcp", "park", false),
        side("ours shm", "shm", "spin", false),
    ];
    if has_cma {
        entries.push(side("ours cma", "cma", "spin", false));
    } else {
        println!("skipped: ours cma: this tebench has no such transport");
    }
    if !options.quick {
        entries.push(side("ours tcp checked", "tcp", "spin", true));
        entries.push(side("ours shm parked", "shm", "park", false));
    }
    entries.retain(|entry| {
        let name = entry.name.trim_start_matches("ours ").replace(' ', "-");
        options.ours.is_empty() || options.ours.contains(&name)
    });
    Ok(entries)
}

/// Returns each peer with its missing part, and its sides.
fn peers(options: &Options) -> Vec<(&'static str, Option<String>, Vec<Entry>)> {
    let python = |venv: &str| options.folder.join(venv).join("bin/python");
    let driver = |python: &Path, script: &str, arguments| {
        Driver::new(python.to_owned(), options.scripts.join(script), arguments)
    };
    let missing = |path: &Path| (!path.exists()).then(|| format!("{} is not there", path.display()));
    let (mooncake, nixl, torch) = (python("mc"), python("nixl"), PathBuf::from(SYSTEM_PYTHON));
    let ucx = options.folder.join("ucx/libucx");
    let perftest = |name, transports| Entry::new(name, "spin", Perftest::new(ucx.clone(), transports));
    let nixl_side = |name, arguments| Entry::new(name, "spin", driver(&nixl, "nixl_driver.py", arguments));
    let mooncake_side = driver(&mooncake, "mooncake_driver.py", &[]);
    vec![
        ("mooncake", missing(&mooncake), vec![Entry::new("mooncake tcp", "spin, I/O parks", mooncake_side)]),
        ("nixl", missing(&nixl), vec![nixl_side("nixl tcp", &["tcp"]), nixl_side("nixl auto", &["auto"])]),
        (
            "ucx",
            missing(&ucx.join("bin/ucx_perftest")),
            vec![perftest("ucx tcp", "tcp,self"), perftest("ucx shm", "posix,cma,self")],
        ),
        ("gloo", no_torch(&torch), vec![Entry::new("gloo", "park", driver(&torch, "gloo_driver.py", &[]))]),
        ("iperf3", no_iperf(), vec![Entry::new("iperf3", "block", Iperf::new())]),
        (
            "raw",
            None,
            vec![
                Entry::new("raw spinning", "spin", PingPong { pacing: "spin" }),
                Entry::new("raw blocking", "block", PingPong { pacing: "park" }),
                Entry::new("memcpy", "-", Memcpy::default()),
            ],
        ),
    ]
}

fn no_torch(python: &Path) -> Option<String> {
    let mut command = Command::new(python);
    let found = command.args(["-c", "import torch.distributed"]).output();
    let there = found.is_ok_and(|output| output.status.success());
    (!there).then(|| format!("{} has no torch", python.display()))
}

fn no_iperf() -> Option<String> {
    Command::new("iperf3").arg("-v").output().err().map(|error| format!("iperf3: {error}"))
}
