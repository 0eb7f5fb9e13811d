//! Processors for which the workspace can be built, and what a build for another one than this machine's needs.
//!
//! Cargo's configuration names the linker and the emulator of each (`.cargo/config.toml`); this module installs them.

use std::process::Command;

use super::packages::Group;
use crate::process::{self, Failure};

/// Processor for which the workspace can be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// The processor of the machines that kvplane is tested on.
    X86,
    /// 64-bit Arm.
    Aarch64,
}

impl Target {
    /// Returns the target of that name, as cargo spells it.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        [Self::X86, Self::Aarch64].into_iter().find(|target| target.name() == name)
    }

    /// Returns the name that cargo knows.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// Returns true if this machine runs what is built for the target.
    #[must_use]
    pub fn is_native(self) -> bool {
        self.name().starts_with(std::env::consts::ARCH)
    }

    /// Installs what a build for this target needs beside the toolchain.
    ///
    /// # Errors
    /// If a package is missing and cannot be installed, or rustup has no library for the target.
    pub fn prepare(self) -> Result<(), Failure> {
        if self.is_native() {
            return super::run(&[Group::Build]);
        }
        super::run(&[Group::Build, Group::Cross])?;
        let listed = Command::new("rustup").args(["target", "list", "--installed"]).output();
        let installed = listed.is_ok_and(|output| {
            String::from_utf8_lossy(&output.stdout).lines().any(|target| target.trim() == self.name())
        });
        if installed {
            return Ok(());
        }
        process::run(Command::new("rustup").args(["target", "add", self.name()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_known_by_cargos_names() {
        assert_eq!(Target::parse("aarch64-unknown-linux-gnu"), Some(Target::Aarch64));
        assert_eq!(Target::parse("x86_64-unknown-linux-gnu"), Some(Target::X86));
        assert_eq!(Target::parse("aarch64"), None);
    }
}
