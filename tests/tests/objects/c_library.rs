//! Test of the store from C: `tools/capi/tests/object_store.c`, compiled against the header and the library, and run
//! with a real control plane, whose only nodes are the program's own.

use std::path::Path;

use kvplane::rpc::RuntimeDirectory;

use crate::bed::Bed;
use crate::compiled::{compiler, run};

#[test]
fn a_c_program_puts_and_gets_objects() {
    let Some(cc) = compiler() else { return };
    // The program finds the control plane by the environment, as any does.
    let session = std::env::temp_dir().join(format!("kvplane-c-store-{}", std::process::id()));
    std::fs::create_dir_all(&session).expect("a directory");
    let bed = Bed::start_with(0, 0, |config| config.publish = Some(RuntimeDirectory::at(session.join("kvplane"))));
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/capi");
    let out = run(cc, &capi, "object_store", &["-pthread"], |command| {
        command.arg("127.0.0.1:50051").env("XDG_RUNTIME_DIR", &session);
        command.env_remove("KVPLANE_CLUSTER").env_remove("KVPLANE_CERTS");
    });
    assert!(out.lines().count() > 45, "{out}");
    drop(bed);
    let _ = std::fs::remove_dir_all(&session);
}
