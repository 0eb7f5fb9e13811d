//! The C program of `tests/two_engines.c`, compiled against the header and the library, and run.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo puts the library: beside the directory of this test.
fn library_directory() -> PathBuf {
    let test = std::env::current_exe().expect("a path");
    let deps = test.parent().expect("a directory");
    let found = [deps, deps.parent().expect("a target directory")];
    let has = |directory: &&Path| directory.join("libtransfer_engine.so").exists();
    found.into_iter().find(has).expect("cargo built the library with its tests").to_owned()
}

fn compiler() -> Option<&'static str> {
    ["cc", "gcc", "clang"].into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

#[test]
fn a_c_program_moves_bytes_between_two_engines() {
    let Some(cc) = compiler() else {
        println!("skipped: the C interface: no C compiler here");
        return;
    };
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library_directory();
    let program = library.join(format!("two_engines-{}", std::process::id()));
    let compiled = Command::new(cc)
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .arg("-I")
        .arg(crate_directory.join("include"))
        .arg(crate_directory.join("tests/two_engines.c"))
        .arg("-L")
        .arg(&library)
        .args(["-ltransfer_engine", "-o"])
        .arg(&program)
        .output()
        .expect("a compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new("timeout")
        .arg("120")
        .arg(&program)
        .env("LD_LIBRARY_PATH", &library)
        .env("MC_FORCE_TCP", "1")
        .output()
        .expect("the program");
    let _ = std::fs::remove_file(&program);
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{:?}\n{out}\n{err}", ran.status);
    assert!(out.lines().count() > 30 && !out.contains("FAILED"), "{out}");
}

#[test]
fn exactly_the_functions_of_the_headers_are_exported() {
    let headers = [include_str!("../include/transfer_engine_c.h"), include_str!("../include/p2p_store_c.h")];
    let declared = headers.into_iter().flat_map(str::lines).filter(|line| {
        line.contains('(') && !line.starts_with([' ', '#', '/', '*', '}']) && line.as_bytes()[0].is_ascii_lowercase()
    });
    let name = |line: &str| {
        let before = line.split('(').next().unwrap_or_default();
        before.rsplit([' ', '*']).next().unwrap_or_default().to_owned()
    };
    let mut wanted: Vec<String> = declared.filter(|line| !line.starts_with("extern")).map(name).collect();
    wanted.sort();
    assert_eq!(wanted.len(), 27 + 9, "{wanted:?}");
    let Ok(listed) = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library_directory().join("libtransfer_engine.so"))
        .output()
    else {
        println!("skipped: the list of exported functions: no nm here");
        return;
    };
    let text = String::from_utf8_lossy(&listed.stdout);
    let mut exported: Vec<String> = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .filter(|name| !name.starts_with("_") && !name.contains("rust"))
        .map(str::to_owned)
        .collect();
    exported.sort();
    assert_eq!(exported, wanted);
}
