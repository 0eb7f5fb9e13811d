//! The P2P store from C: `tools/capi/tests/p2p_stores.c`, compiled against the header and the library, and run against
//! a real control plane.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvplane::Control;

mod bed;

use bed::Bed;

/// Where cargo puts the library: beside the directory of this test.
fn library_directory() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    let deps = test.parent().expect("a directory");
    let found = [deps, deps.parent().expect("a target directory")];
    let has = |directory: &&Path| directory.join("libtransfer_engine.so").exists();
    found.into_iter().find(has).expect("cargo built the library that this depends on").to_owned()
}

#[test]
fn a_c_program_shares_an_object() {
    let Some(cc) = ["cc", "gcc", "clang"].into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
    else {
        println!("skipped: the P2P store from C: no C compiler here");
        return;
    };
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/capi");
    let library = library_directory();
    let program = library.join(format!("p2p_stores-{}", std::process::id()));
    let compiled = Command::new(cc)
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(capi.join("include"))
        .arg(capi.join("tests/p2p_stores.c"))
        .arg("-L")
        .arg(&library)
        .args(["-ltransfer_engine", "-o"])
        .arg(&program)
        .output()
        .expect("a compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let bed = Bed::start(0, 0);
    let Control::Local { cluster, runtime_directory: Some(directory) } = bed.control_name() else {
        panic!("the control plane is on this host");
    };
    let ran = Command::new("timeout")
        .arg("120")
        .arg(&program)
        .args([Path::new(&cluster), &directory])
        .env("LD_LIBRARY_PATH", &library)
        .output()
        .expect("the program");
    let _ = std::fs::remove_file(&program);
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{:?}\n{out}\n{err}", ran.status);
    assert!(out.lines().count() > 25 && !out.contains("FAILED"), "{out}");
}
