//! System packages that the project needs, each with its purpose and a probe for it.
//!
//! A group is installed only by the commands that need it, so a plain build never installs packages that only a
//! benchmark uses. Optional features add their own group.

use std::process::{Command, Stdio};

use crate::process;

/// Group of packages that are needed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Packages for the default build.
    Build,
    /// Packages for the tests, beside the build: third-party programs that they start.
    Test,
    /// Packages for the benchmarks, which compare with other programs in the same run.
    Bench,
    /// Packages that prepare and describe the virtual machine of `cargo x rig`; QEMU itself is unpacked aside.
    Rig,
    /// Packages that pack and test the Python packages.
    Python,
    /// Packages that build for aarch64 on another processor, and emulate one.
    Cross,
}

impl Group {
    /// All groups.
    pub const ALL: [Self; 6] = [Self::Build, Self::Test, Self::Bench, Self::Rig, Self::Python, Self::Cross];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Build => "build",
            Self::Test => "test",
            Self::Bench => "bench",
            Self::Rig => "rig",
            Self::Python => "python",
            Self::Cross => "cross",
        }
    }

    /// Returns the group of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.name() == name)
    }
}

/// Test for the presence of a package.
#[derive(Debug, Clone, Copy)]
pub enum Probe {
    /// A program in `$PATH`, from any source.
    Program(&'static str),
    /// Debian's package database; on other distributions the package counts as present, as their compiler includes it.
    Database,
}

/// System package.
#[derive(Debug)]
pub struct Package {
    /// Name in Debian and Ubuntu.
    pub debian: &'static str,
    /// Name in Fedora and its relatives.
    pub fedora: &'static str,
    /// Name in Arch Linux.
    pub arch: &'static str,
    /// Purpose of the package.
    pub purpose: &'static str,
    /// Group that needs the package.
    pub group: Group,
    /// Test for its presence.
    pub probe: Probe,
}

/// All packages, in the order in which they are listed.
pub const ALL: [Package; 18] = [
    Package {
        debian: "gcc",
        fedora: "gcc",
        arch: "gcc",
        purpose: "cc: links every binary and compiles the assembly of ring, which QUIC's TLS uses",
        group: Group::Build,
        probe: Probe::Program("cc"),
    },
    Package {
        debian: "libc6-dev",
        fedora: "glibc-devel",
        arch: "glibc",
        purpose: "the C library's headers and start files, which cc needs and only recommends",
        group: Group::Build,
        probe: Probe::Database,
    },
    Package {
        debian: "etcd-server",
        fedora: "etcd",
        arch: "etcd",
        purpose: "a real etcd, over which tests run several control planes",
        group: Group::Test,
        probe: Probe::Program("etcd"),
    },
    Package {
        debian: "iperf3",
        fedora: "iperf3",
        arch: "iperf3",
        purpose: "the TCP stream figure that the loopback benchmark is compared with",
        group: Group::Bench,
        probe: Probe::Program("iperf3"),
    },
    Package {
        debian: "perftest",
        fedora: "perftest",
        arch: "perftest",
        purpose: "ib_write_bw and its kin: figures that RDMA is compared with, in the virtual machine too",
        group: Group::Bench,
        probe: Probe::Program("ib_write_bw"),
    },
    Package {
        debian: "fio",
        fedora: "fio",
        arch: "fio",
        purpose: "the raw figures of a disk that the benchmarks of the SSD tier are compared with",
        group: Group::Bench,
        probe: Probe::Program("fio"),
    },
    Package {
        debian: "ibverbs-providers",
        fedora: "libibverbs",
        arch: "rdma-core",
        purpose: "libibverbs and its soft-RoCE driver, which the machine reads from the host",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "busybox-static",
        fedora: "busybox",
        arch: "busybox",
        purpose: "the shell and mount of the machine before it has a root",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "kmod",
        fedora: "kmod",
        arch: "kmod",
        purpose: "modprobe: which modules a machine needs, in which order",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "iproute2",
        fedora: "iproute",
        arch: "iproute2",
        purpose: "ip and rdma: set up the machine's NICs and their soft-RoCE devices",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "cpio",
        fedora: "cpio",
        arch: "cpio",
        purpose: "packs the machine's initial file system",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "zstd",
        fedora: "zstd",
        arch: "zstd",
        purpose: "unpacks kernels that are compressed with it",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "xz-utils",
        fedora: "xz",
        arch: "xz",
        purpose: "unpacks the kernel and its modules on the host",
        group: Group::Rig,
        probe: Probe::Database,
    },
    Package {
        debian: "python3",
        fedora: "python3",
        arch: "python",
        purpose: "packs the wheels of the Python packages and runs their tests",
        group: Group::Python,
        probe: Probe::Program("python3"),
    },
    Package {
        debian: "python3-numpy",
        fedora: "python3-numpy",
        arch: "python-numpy",
        purpose: "the arrays of the tests of expert parallelism, which are skipped without it",
        group: Group::Python,
        probe: Probe::Database,
    },
    Package {
        debian: "gcc-aarch64-linux-gnu",
        fedora: "gcc-aarch64-linux-gnu",
        arch: "aarch64-linux-gnu-gcc",
        purpose: "links programs for aarch64 and compiles ring's assembly for it",
        group: Group::Cross,
        probe: Probe::Program("aarch64-linux-gnu-gcc"),
    },
    Package {
        debian: "libc6-dev-arm64-cross",
        fedora: "glibc-devel",
        arch: "aarch64-linux-gnu-glibc",
        purpose: "the C library of aarch64, which that compiler only recommends",
        group: Group::Cross,
        probe: Probe::Database,
    },
    Package {
        debian: "qemu-user",
        fedora: "qemu-user",
        arch: "qemu-user",
        purpose: "runs programs for aarch64 on another processor, one system call at a time",
        group: Group::Cross,
        probe: Probe::Program("qemu-aarch64"),
    },
];

/// Returns the packages of `wanted` that are missing.
#[must_use]
pub fn missing<'a>(wanted: &[&'a Package]) -> Vec<&'a Package> {
    let in_database = |package: &&&Package| matches!(package.probe, Probe::Database);
    let asked: Vec<&str> = wanted.iter().filter(in_database).map(|package| package.debian).collect();
    let answer = if asked.is_empty() { None } else { ask_database(&asked) };
    let is_missing = |package: &&&'a Package| match package.probe {
        Probe::Program(program) => process::find_program(program).is_none(),
        Probe::Database => answer.as_ref().is_some_and(|answer| !is_installed(answer, package.debian)),
    };
    wanted.iter().filter(is_missing).copied().collect()
}

/// Queries dpkg; returns one line `name status` for each package that it knows; `None` without dpkg. One process serves
/// all names, because each start costs ten milliseconds.
fn ask_database(names: &[&str]) -> Option<String> {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${Package} ${db:Status-Status}\\n"]).args(names).stderr(Stdio::null());
    let output = query.output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns true if dpkg has a package of that name; false without dpkg.
#[must_use]
pub fn is_in_database(name: &str) -> bool {
    ask_database(&[name]).is_some_and(|answer| is_installed(&answer, name))
}

fn is_installed(answer: &str, name: &str) -> bool {
    answer.lines().any(|line| line.split_once(' ') == Some((name, "installed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_counts_wherever_it_comes_from() {
        let package = |program| Package { probe: Probe::Program(program), ..test_package() };
        assert!(missing(&[&package("sh")]).is_empty());
        assert_eq!(missing(&[&package("no-such-program-at-all")]).len(), 1);
    }

    #[test]
    fn removed_packages_are_not_installed() {
        let answer = "libc6-dev installed\nold config-files\n";
        assert!(is_installed(answer, "libc6-dev"));
        assert!(!is_installed(answer, "old"));
        assert!(!is_installed(answer, "libc6"));
    }

    #[test]
    fn packages_of_tests_are_not_installed_for_a_build_or_the_demo() {
        let built: Vec<&str> =
            ALL.iter().filter(|package| package.group == Group::Build).map(|package| package.debian).collect();
        assert_eq!(built, ["gcc", "libc6-dev"]);
        assert!(ALL.iter().any(|package| package.debian == "etcd-server" && package.group == Group::Test));
    }

    #[test]
    fn every_package_has_a_purpose() {
        for package in &ALL {
            assert!(package.purpose.len() > 20, "{}", package.debian);
        }
    }

    fn test_package() -> Package {
        let probe = Probe::Database;
        Package { debian: "a", fedora: "a", arch: "a", purpose: "test", group: Group::Build, probe }
    }
}
