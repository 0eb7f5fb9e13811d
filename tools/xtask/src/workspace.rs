//! Locations of the workspace: the root of the source tree, the target directory, and cargo itself.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::Failure;

/// Source tree that this program was built from.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// Directory of the workspace's `Cargo.toml`.
    pub root: PathBuf,
}

impl Workspace {
    /// Finds the workspace two levels above this crate's manifest.
    pub fn find() -> Result<Self, Failure> {
        // At run time cargo provides the manifest's directory; the built-in path serves a binary started by hand.
        let manifest =
            env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
        let root = manifest.join("../..");
        let found = std::fs::read_to_string(root.join("Cargo.toml")).is_ok_and(|text| text.contains("[workspace]"));
        if !found {
            let shown = root.display();
            return Err(Failure::new(format!("{shown}/Cargo.toml is not a workspace; start this as `cargo x`")));
        }
        let root = root.canonicalize().map_err(|error| Failure::new(format!("{}: {error}", root.display())))?;
        Ok(Self { root })
    }

    /// Returns cargo's output directory: `$CARGO_TARGET_DIR`, else `target/`.
    #[must_use]
    pub fn target(&self) -> PathBuf {
        match env::var_os("CARGO_TARGET_DIR") {
            // Cargo resolves a relative path against the directory in which it was started, as does `absolute`.
            Some(path) => std::path::absolute(&path).unwrap_or_else(|_| path.into()),
            None => self.root.join("target"),
        }
    }

    /// Returns the path of a release binary.
    #[must_use]
    pub fn release_binary(&self, name: &str) -> PathBuf {
        self.target().join("release").join(name)
    }

    /// Returns the path of a binary of the development build.
    #[must_use]
    pub fn debug_binary(&self, name: &str) -> PathBuf {
        self.target().join("debug").join(name)
    }

    /// Returns cargo with `arguments`, in the workspace's root.
    #[must_use]
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("cargo");
        command.args(arguments).current_dir(&self.root);
        // The variables that `cargo run` sets for this program mean nothing to the crates that are built now. Build
        // scripts that look at them (ring's) would run again, with all that depends on them, after each switch between
        // `cargo build` and `cargo x`.
        let ours = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(|name| ours.iter().any(|prefix| name.starts_with(prefix))) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// Returns the command of the development build of the whole workspace, with the tests: features then unify as they
    /// do for these, and nothing is built twice.
    #[must_use]
    pub fn development_build(&self) -> Command {
        self.cargo(&["build", "--workspace", "--lib", "--bins", "--tests"])
    }
}

/// Returns `path` relative to the current directory if it lies below that, for display and arguments.
#[must_use]
pub fn relative(path: &Path) -> PathBuf {
    let below = env::current_dir().ok().and_then(|here| path.strip_prefix(here).ok().map(Path::to_path_buf));
    below.unwrap_or_else(|| path.to_path_buf())
}
