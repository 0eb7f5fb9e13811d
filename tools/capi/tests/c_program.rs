//! Compiles the C programs of the transfer engine against the headers and the library, and runs them.

use std::path::Path;
use std::process::Command;

mod compiled;

use compiled::{compiler, library_directory, run};

#[test]
fn a_c_program_moves_bytes_between_two_engines() {
    let Some(cc) = compiler() else { return };
    let capi = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = run(cc, capi, "two_engines", &["-pthread"], |command| {
        command.env("MC_FORCE_TCP", "1");
    });
    assert!(out.lines().count() > 30, "{out}");
}

#[test]
fn a_c_program_moves_bytes_of_devices() {
    let Some(cc) = compiler() else { return };
    let drivers = kvplane_fake_devices::directory().expect("the drivers for tests");
    let capi = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = run(cc, capi, "devices", &["-ldl"], |command| {
        let path = [library_directory(), drivers].map(|directory| directory.display().to_string()).join(":");
        command.env("LD_LIBRARY_PATH", path).env("MC_FORCE_TCP", "1");
    });
    assert!(out.lines().count() > 20, "{out}");
}

#[test]
fn a_c_program_of_tents_interface_moves_bytes_between_processes() {
    let Some(cc) = compiler() else { return };
    let capi = Path::new(env!("CARGO_MANIFEST_DIR"));
    for way in ["tcp", "shm"] {
        let out = run(cc, capi, "tent_processes", &["-pthread"], |command| {
            command.arg(way);
        });
        assert!(out.lines().count() > 100, "{out}");
    }
}

#[test]
fn exactly_the_functions_of_the_headers_are_exported() {
    let headers = [
        include_str!("../include/transfer_engine_c.h"),
        include_str!("../include/tent/transfer_engine.h"),
        include_str!("../include/p2p_store_c.h"),
        include_str!("../include/mooncake_pg.h"),
        include_str!("../include/store_c.h"),
    ];
    let declared = headers.into_iter().flat_map(str::lines).filter(|line| {
        line.contains('(') && !line.starts_with([' ', '#', '/', '*', '}']) && line.as_bytes()[0].is_ascii_lowercase()
    });
    let name = |line: &str| {
        let before = line.split('(').next().unwrap_or_default();
        before.rsplit([' ', '*']).next().unwrap_or_default().to_owned()
    };
    let mut wanted: Vec<String> = declared.filter(|line| !line.starts_with("extern")).map(name).collect();
    wanted.sort();
    assert_eq!(wanted.len(), 27 + 33 + 12 + 51 + 19, "{wanted:?}");
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
