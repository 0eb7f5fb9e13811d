//! A user without permission, and a limit that is too small, on a real device. Only in the rig, where the permissions
//! of device files may be changed: this program runs itself again as another user and reads its output.

use kvplane_sys::verbs::{Access, ProtectionDomain, Verbs};
use kvplane_sys::{IoBuf, Region, RegionOptions};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const ROLE: &str = "KVPLANE_TEST_AS_NOBODY";

/// Role of the other user: opens the first device, registers a megabyte and prints the result.
#[test]
fn unprivileged_user_registers_memory() {
    if std::env::var_os(ROLE).is_none() {
        return eprintln!("skipped: the other user's part of the cases on real devices");
    }
    let outcome = Verbs::open().and_then(|verbs| verbs.devices()).and_then(|devices| {
        let context = devices[0].open()?;
        let region = Region::allocate(&RegionOptions::new("much", 1 << 20)).expect("memory");
        ProtectionDomain::new(&context)?.register(&IoBuf::whole(region), Access::LOCAL)
    });
    match outcome {
        Ok(memory) => println!("registered {memory:?}"),
        Err(error) => println!("refused: {error}"),
    }
}

fn run_as_nobody(limit_kib: &str) -> String {
    let this = std::env::current_exe().expect("this program");
    let script = format!(
        "ulimit -l {limit_kib} && exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all \
         --bounding-set=-all {} --exact verbs::refusals::unprivileged_user_registers_memory --nocapture",
        this.display()
    );
    let output = Command::new("sh").args(["-c", &script]).env(ROLE, "1").output().expect("run");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Runs in the rig.
pub(crate) fn are_explained() {
    let files: Vec<_> = fs::read_dir("/dev/infiniband")
        .expect("devices")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.to_string_lossy().contains("uverbs"))
        .collect();
    let allow = |mode| {
        for file in &files {
            fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("permissions");
        }
    };
    allow(0o600);
    let text = run_as_nobody("unlimited");
    assert!(text.contains("no permission for") && text.contains("/dev/infiniband/uverbs"), "{text}");
    allow(0o666);
    let text = run_as_nobody("64");
    assert!(text.contains("cannot pin 1048576 bytes") && text.contains("65536 bytes in all"), "{text}");
    let text = run_as_nobody("4096");
    assert!(text.contains("registered MemoryRegion"), "{text}");
    eprintln!("no permission and too little to lock: explained");
}
