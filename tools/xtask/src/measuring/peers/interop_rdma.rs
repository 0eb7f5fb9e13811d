//! `cargo x interop --rdma`: runs a stock wheel against kvplane's C library over RDMA, in a virtual machine with
//! soft-RoCE.
//!
//! The machine has no network beyond itself, so the stock engine, which listens on every address, is not exposed.

use std::path::Path;

use super::install::{self, Peer};
use crate::process::{self, Failure};
use crate::rig;
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// Options of the machine. The timeout is long because emulated, the wheel alone takes half a minute to load.
const MACHINE: [&str; 6] = ["--rxe", "4", "--mem", "3072", "--timeout", "900"];
/// Address and devices of the two sides.
const SIDES: [&str; 2] = ["10.77.0.1,rxe0,rxe2", "10.77.0.2,rxe1,rxe3"];

/// Runs the test; skipped with a line where there is no wheel, or where no machine can be prepared.
pub(super) fn run(workspace: &Workspace, arguments: &[String]) -> Result<(), Failure> {
    setup::run(&[Group::Build])?;
    let folder = super::folder(workspace, None);
    if let Err(failure) = install::install(Peer::Mooncake, &folder) {
        eprintln!("interop: skipped: no stock wheel: {failure}");
        return Ok(());
    }
    if let Err(failure) = rig::prepare_with_tools(workspace) {
        eprintln!("interop: skipped: no virtual machine can be prepared here: {failure}");
        return Ok(());
    }
    // Built together with the program, as in the release step: alone it would have other features, and be built once
    // more.
    let build = ["build", "--release", "--package", "kvplane-tools", "--package", "kvplane-capi"];
    process::run(&mut workspace.cargo(&build))?;
    let mut command = rig::script(workspace, &MACHINE);
    command.arg("--share").arg(share(&workspace.root, &folder)).arg("--");
    command.arg(folder.join("mc/bin/python")).arg(super::scripts(workspace).join("interop_rdma.py")).arg("run");
    command.arg(workspace.release_binary("libtransfer_engine.so")).args(SIDES).args(arguments);
    process::run(command.current_dir(&workspace.root))
}

/// Returns the directory of the host's temporary files that the machine must see: the tree, or the common ancestor of
/// the tree and the wheel.
fn share<'a>(root: &'a Path, folder: &Path) -> &'a Path {
    let holds = |directory: &&Path| folder.starts_with(directory) && directory.parent().is_some();
    root.ancestors().find(holds).unwrap_or(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_holds_the_tree_and_the_wheel() {
        let shared = |folder: &str| share(Path::new("/a/b/tree"), Path::new(folder)).display().to_string();
        assert_eq!(shared("/a/b/tree/target/peers"), "/a/b/tree");
        assert_eq!(shared("/a/b/peers"), "/a/b");
        assert_eq!(shared("/elsewhere/peers"), "/a/b/tree", "the machine sees the rest of the host anyway");
    }
}
