//! `cargo x interop --rdma`: a stock wheel and our C library over RDMA, in a virtual machine with soft-RoCE.
//!
//! The machine has no network beyond itself, so the stock engine, which listens on every address, harms nobody.

use std::path::Path;

use super::install::{self, Peer};
use crate::process::{self, Failure};
use crate::rig;
use crate::setup::{self, packages::Group};
use crate::workspace::Workspace;

/// What the machine has. It may take this long: emulated, the wheel alone takes half a minute to load.
const MACHINE: [&str; 6] = ["--rxe", "4", "--mem", "3072", "--timeout", "900"];
/// The two sides: an address and devices.
const SIDES: [&str; 2] = ["10.77.0.1,rxe0,rxe2", "10.77.0.2,rxe1,rxe3"];

/// Skipped with a line where there is no wheel, or no machine can be prepared.
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
    // With the program, as the release step does: alone it would have other features, and be built once more.
    let build = ["build", "--release", "--package", "kvplane-tools", "--package", "kvplane-capi"];
    process::run(&mut workspace.cargo(&build))?;
    let mut command = rig::script(workspace, &MACHINE);
    command.arg("--share").arg(share(&workspace.root, &folder)).arg("--");
    command.arg(folder.join("mc/bin/python")).arg(super::scripts(workspace).join("interop_rdma.py")).arg("run");
    command.arg(workspace.release_binary("libtransfer_engine.so")).args(SIDES).args(arguments);
    process::run(command.current_dir(&workspace.root))
}

/// What the machine must see of the host's temporary files, which it has none of: the tree, or what holds it and the
/// wheel.
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
