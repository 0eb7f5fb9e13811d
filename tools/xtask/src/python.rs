//! `cargo x wheel` and `cargo x python`: packs the Python packages, and tests them against a live cluster.
//!
//! Cargo builds the native module like any other crate; the wheels around it are packed by `tools/python/wheel.py`,
//! which needs only Python's standard library. Tests run from a directory that is laid out like an installation, with
//! the `kvplane` of the same build beside it. A machine without Python 3.9 or later skips them with a line.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::linkage;
use crate::process::{self, Failure};
use crate::setup::{self, packages::Group, targets::Target};
use crate::workspace::Workspace;

/// Names of interpreters; the first one that exists and is new enough is taken.
const PYTHONS: [&str; 7] =
    ["python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9"];

/// Tests that are skipped without numpy.
const NEED_NUMPY: [&str; 5] =
    ["test_experts", "test_elastic_buffer", "test_experts_group", "test_structured_objects", "test_docs"];

/// Packages to build: the module, and the program that the tests run against and the wheel contains.
const PACKAGES: [&str; 4] = ["--package", "kvplane-tools", "--package", "kvplane-python"];

/// Rounds of the search for leaks, of four calls each.
const NIGHTLY_TURNS: &str = "25000";

/// Packs both wheels into `target/wheels`, or those for another processor into `target/TARGET/wheels`.
pub fn wheel(workspace: &Workspace, target: Option<Target>) -> Result<(), Failure> {
    setup::run(&[Group::Build, Group::Python])?;
    let python = find().ok_or_else(|| Failure::new(missing()))?;
    let folder = match target.filter(|target| !target.is_native()) {
        None => {
            build(workspace, true)?;
            workspace.target()
        }
        Some(target) => {
            target.prepare()?;
            let words = [&["build", "--release", "--target", target.name()], &PACKAGES[..]].concat();
            process::run(&mut workspace.cargo(&words))?;
            let folder = workspace.target().join(target.name());
            check_module(&module(&folder.join("release")))?;
            folder
        }
    };
    let built = folder.join("release");
    let mut pack = script(workspace, &python, "wheel.py");
    pack.arg("--module").arg(module(&built)).arg("--binary").arg(built.join("kvplane"));
    process::run(pack.arg("--out").arg(folder.join("wheels")))
}

/// Builds, lays the packages out and runs the tests: all, or those that `arguments` name (`test_store`,
/// `test_store.Puts.test_empty`). `--debug` among them builds with the development profile, `--nightly` makes the
/// search for leaks 100,000 calls long, `--gpu` gives the tests of device pointers the drivers of this machine, and
/// `--upstream DIR` runs Mooncake's own client tests from a checkout instead. `--torch DIR` installs torch, without the
/// libraries of a GPU, in a folder of its own (`KVPLANE_TORCH`, else `target/torch`), and runs there the tests of
/// `mooncake.pg` and Mooncake's own tests of process groups on CPUs.
pub fn test(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    let Some(python) = find() else {
        eprintln!("python: skipped: {}", missing());
        return Ok(());
    };
    let release = !arguments.iter().any(|word| word == "--debug");
    build(workspace, release)?;
    let built = workspace.target().join(if release { "release" } else { "debug" });
    let stage = workspace.target().join("python-stage");
    process::run(
        script(workspace, &python, "wheel.py").arg("--module").arg(module(&built)).arg("--stage").arg(&stage),
    )?;
    let environment = |command: &mut Command| {
        command.env("PYTHONPATH", &stage).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("KVPLANE_BINARY", built.join("kvplane"));
    };
    let ours = ["--debug", "--nightly", "--gpu"];
    let words: Vec<&String> = arguments.iter().filter(|word| !ours.contains(&word.as_str())).collect();
    if words.first().is_some_and(|word| *word == "--upstream") {
        let checkout = words.get(1).ok_or_else(|| Failure::new("--upstream: name a checkout of Mooncake"))?;
        let mut tests = script(workspace, &python, "tests/upstream.py");
        environment(&mut tests);
        tests.arg(checkout).args(&words[2..]);
        return process::run(&mut tests);
    }
    if words.first().is_some_and(|word| *word == "--torch") {
        let checkout = words.get(1).ok_or_else(|| Failure::new("--torch: name a checkout of Mooncake"))?;
        return with_torch(workspace, &python, environment, checkout, &words[2..]);
    }
    let mut surface = script(workspace, &python, "surface.py");
    environment(&mut surface);
    process::run(&mut surface)?;
    let mut tests = script(workspace, &python, "tests/run.py");
    environment(&mut tests);
    // Memory that a test uses after its owner is gone is unmapped in every run, or holds other bytes, instead of being
    // whole in most.
    tests.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_PERTURB_", "165");
    if arguments.iter().any(|word| word == "--nightly") {
        tests.env("KVPLANE_PYTHON_TURNS", NIGHTLY_TURNS);
    }
    if arguments.iter().any(|word| word == "--gpu") {
        tests.env("KVPLANE_GPU", "1");
    }
    tests.args(&words);
    process::run(&mut tests)?;
    // An interpreter without numpy has skipped some.
    let has_numpy = |python: &PathBuf| runs(python, "import numpy");
    let other = interpreters().find(has_numpy).filter(|_| words.is_empty() && !has_numpy(&python));
    let Some(other) = other else { return Ok(()) };
    let mut tests = script(workspace, &other, "tests/run.py");
    environment(&mut tests);
    process::run(tests.args(NEED_NUMPY))
}

/// Runs the tests that need torch: this package's own, unless `names` name some of Mooncake's, and Mooncake's.
fn with_torch(
    workspace: &Workspace,
    python: &Path,
    environment: impl Fn(&mut Command),
    checkout: &str,
    names: &[&String],
) -> Result<(), Failure> {
    let folder = std::env::var_os("KVPLANE_TORCH").map_or_else(|| workspace.target().join("torch"), PathBuf::from);
    let folder = std::path::absolute(&folder).unwrap_or(folder);
    process::run(script(workspace, python, "torch_cpu.py").arg(&folder))?;
    let tests = |name: &str| {
        let mut command = Command::new(folder.join("run"));
        command.arg("python").arg(workspace.root.join("tools/python/tests").join(name)).current_dir(&workspace.root);
        environment(&mut command);
        command
    };
    if names.is_empty() {
        process::run(tests("run.py").arg("test_pg"))?;
    }
    process::run(tests("upstream_groups.py").arg(checkout).args(names))
}

fn build(workspace: &Workspace, release: bool) -> Result<(), Failure> {
    let mut command = if release {
        workspace.cargo(&[&["build", "--release"], &PACKAGES[..]].concat())
    } else {
        workspace.development_build()
    };
    process::run(&mut command)?;
    check_module(&module(&workspace.target().join(if release { "release" } else { "debug" })))
}

/// Libraries of the C library, which every Linux with the interpreter has.
const LIBRARIES: [&str; 8] = [
    "libc.so",
    "libm.so",
    "libgcc_s.so",
    "libpthread.so",
    "libdl.so",
    "librt.so",
    "ld-linux-x86-64.so",
    "ld-linux-aarch64.so",
];

/// Rejects a module that needs other libraries than those of the C library, as it could not be imported where they are
/// missing. This is above all `libpython`, whose file name depends on the Python version.
fn check_module(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    let bytes =
        std::fs::read(path).map_err(|error| Failure::new(format!("{shown}: {error}; `cargo x python` builds it")))?;
    let needed = linkage::needed_libraries(&bytes).map_err(|error| Failure::new(format!("{shown}: {error}")))?;
    if let Some(library) = foreign(&needed) {
        return Err(Failure::new(format!(
            "{shown} cannot be imported without {library}: build it with PYO3_BUILD_EXTENSION_MODULE=1, as \
             .cargo/config.toml has it, and open other libraries at run time"
        )));
    }
    eprintln!("linkage: {shown} needs only {}", needed.join(", "));
    Ok(())
}

fn foreign(needed: &[String]) -> Option<&String> {
    needed.iter().find(|library| !LIBRARIES.iter().any(|known| library.starts_with(known)))
}

/// Returns the path of the native module as cargo names it.
fn module(built: &Path) -> PathBuf {
    built.join("libkvplane_python.so")
}

fn script(workspace: &Workspace, python: &Path, name: &str) -> Command {
    let mut command = Command::new(python);
    command.arg(workspace.root.join("tools/python").join(name)).current_dir(&workspace.root);
    command
}

/// Finds a Python that is new enough. Shims without a version behind them do not start, and do not count.
/// Returns the first interpreter that is new enough.
fn find() -> Option<PathBuf> {
    interpreters().next()
}

/// Returns the interpreters that are new enough.
fn interpreters() -> impl Iterator<Item = PathBuf> {
    let found = PYTHONS.iter().flat_map(|name| process::find_programs(name));
    found.filter(|python| runs(python, "import sys; sys.exit(sys.version_info < (3, 9))"))
}

/// Returns true if an interpreter runs a program without an error.
fn runs(python: &Path, program: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", program]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn missing() -> String {
    format!("no Python 3.9 or later among {}; `cargo x setup python` installs one", PYTHONS.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_need_the_c_library_only() {
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<String>>();
        assert_eq!(foreign(&names(&["libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"])), None);
        let linked = names(&["libc.so.6", "libpython3.11.so.1.0"]);
        assert_eq!(foreign(&linked), Some(&linked[1]));
    }
}
