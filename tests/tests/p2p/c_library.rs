//! Test of the P2P store from C: `tools/capi/tests/p2p_stores.c`, compiled against the header and the library, and run
//! with a real control plane.

use std::path::Path;

use kvplane::Control;

use crate::bed::Bed;
use crate::compiled::{compiler, run};

#[test]
fn a_c_program_shares_an_object() {
    let Some(cc) = compiler() else { return };
    let bed = Bed::start(0, 0);
    let Control::Local { cluster, runtime_directory: Some(directory) } = bed.control_name() else {
        panic!("the control plane is on this host");
    };
    let capi = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/capi");
    let out = run(cc, &capi, "p2p_stores", &["-pthread"], |command| {
        command.args([Path::new(&cluster), &directory]);
    });
    assert!(out.lines().count() > 25, "{out}");
}
