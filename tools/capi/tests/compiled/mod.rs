//! Compiles C programs of `tools/capi/tests` against the headers and the library, and runs them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the directory of the library: beside that of this test.
pub(crate) fn library_directory() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    let deps = test.parent().expect("a directory");
    let found = [deps, deps.parent().expect("a target directory")];
    let has = |directory: &&Path| directory.join("libtransfer_engine.so").exists();
    found.into_iter().find(has).expect("cargo built the library that this depends on").to_owned()
}

/// Returns a compiler; without one, prints a line.
pub(crate) fn compiler() -> Option<&'static str> {
    let cc = ["cc", "gcc", "clang"].into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if cc.is_none() {
        println!("skipped: the C interface: no C compiler here");
    }
    cc
}

/// Compiles the program of that name with further flags and runs it; returns its output, which has to report success.
pub(crate) fn run(cc: &str, capi: &Path, name: &str, flags: &[&str], with: impl FnOnce(&mut Command)) -> String {
    let library = library_directory();
    let program = library.join(format!("{name}-{}", std::process::id()));
    let compiled = Command::new(cc)
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg("-I")
        .arg(capi.join("include"))
        .arg(capi.join("tests").join(name).with_extension("c"))
        .arg("-L")
        .arg(&library)
        .args(["-ltransfer_engine".as_ref(), "-o".as_ref(), program.as_os_str()] as [&OsStr; 3])
        .output()
        .expect("a compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let mut command = Command::new("timeout");
    command.arg("120").arg(&program).env("LD_LIBRARY_PATH", &library);
    with(&mut command);
    let ran = command.output().expect("the program");
    let _ = std::fs::remove_file(&program);
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{:?}\n{out}\n{err}", ran.status);
    assert!(!out.contains("FAILED"), "{out}");
    out.into_owned()
}
