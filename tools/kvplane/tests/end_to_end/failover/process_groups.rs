//! Test of process groups from C: `tools/capi/tests/process_group.c`, compiled against the header and the library. Its
//! rank 0 starts this binary as the control plane.

use std::path::Path;

use crate::compiled::{compiler, run};
use crate::support::Workplace;

#[test]
fn a_c_program_reduces_among_processes_and_survives_one() {
    let Some(cc) = compiler() else { return };
    let place = Workplace::new("c");
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
    let out = run(cc, &capi, "process_group", &[], |command| {
        // The control plane is found in the runtime directory.
        command.env("XDG_RUNTIME_DIR", &place.directory).env("KVPLANE_BINARY", env!("CARGO_BIN_EXE_kvplane"));
        for name in ["KVPLANE_CONTROL", "KVPLANE_CLUSTER", "KVPLANE_CERTS"] {
            command.env_remove(name);
        }
    });
    assert!(out.lines().count() > 120, "{out}");
}
