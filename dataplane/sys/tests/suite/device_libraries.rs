//! Driver libraries as the loader finds them: too old for a function, or under the name of one version. Each is opened
//! by a process of its own, whose loader looks in a directory of the test first.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvplane_sys::device::{Device, DeviceError, DeviceId, Family};

use crate::device::copy_around;

const CASE: &str = "KVPLANE_TEST_LIBRARIES";

/// Body of the other process, not a test of its own.
#[test]
fn the_process_with_the_libraries() {
    match std::env::var(CASE).as_deref() {
        Ok("old") => {
            for family in Family::ALL {
                let error = Device::open(DeviceId { family, ordinal: 0 }).unwrap_err();
                assert!(matches!(error, DeviceError::OldDriver { .. }), "{family:?}: {error}");
                println!("\nrefused: {error}");
            }
        }
        Ok("versioned") => {
            copy_around(DeviceId { family: Family::Hip, ordinal: 0 });
            println!("\ncopied");
        }
        _ => {}
    }
}

/// Runs that process with these libraries, name and file; returns what it prints.
fn run(case: &str, libraries: &[(&str, &Path)]) -> String {
    let directory = std::env::temp_dir().join(format!("kvplane-libraries-{case}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    for (name, file) in libraries {
        symlink(file, directory.join(name)).unwrap();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "device_libraries::the_process_with_the_libraries", "--nocapture"])
        .env(CASE, case)
        .env("LD_LIBRARY_PATH", &directory)
        .output()
        .unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    let printed = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{printed}{}", String::from_utf8_lossy(&child.stderr));
    printed
}

#[test]
fn a_library_without_the_functions_of_a_driver_is_named_with_the_version_that_has_them() {
    // Any library will do; this one is mapped by every process.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let file = maps.lines().find_map(|line| line.split_whitespace().last().filter(|path| path.ends_with("libc.so.6")));
    let file = PathBuf::from(file.expect("the C library"));
    let names = Family::ALL.map(|family| (family.library(), file.as_path()));
    let printed = run("old", &names);
    for family in Family::ALL {
        let words = format!("refused: the driver of {} devices is too old", family.prefix());
        assert_eq!(printed.lines().filter(|line| line.starts_with(&words)).count(), 1, "{printed}");
    }
    assert!(printed.contains("450 (CUDA 11)"), "{printed}");
}

#[test]
fn amd_s_library_is_found_under_the_name_of_its_version() {
    let links = kvplane_fake_devices::directory().unwrap();
    let file = std::fs::read_link(links.join(Family::Hip.library())).unwrap();
    for name in ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"] {
        assert!(run("versioned", &[(name, &file)]).contains("copied"), "{name}");
    }
}
