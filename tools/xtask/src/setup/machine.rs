//! Kernel facilities of this process: io_uring, and lockable memory.
//!
//! The module reads a few files below `/proc` and changes nothing. A limit found here only makes kvplane slower or
//! smaller, except a missing io_uring, without which no shard starts; so it is reported before the build.

use std::fs;

/// Kernel with all io_uring features that shards use: single issuer and deferred task work.
const FULL_KERNEL: (u32, u32) = (6, 1);
/// Oldest kernel with provided-buffer rings and multishot accept.
const OLDEST_KERNEL: (u32, u32) = (5, 19);
/// Locked memory below which a pool's pages cannot be registered with a ring in any useful number.
const USEFUL_MEMLOCK_BYTES: u64 = 1 << 30;
/// Bit of CAP_IPC_LOCK, which lifts the limit on locked memory.
const IPC_LOCK_BIT: u32 = 14;

/// Facts about the machine; `None` where the kernel does not show them.
#[derive(Debug, Default, Clone)]
pub struct Machine {
    /// Kernel release, as major and minor.
    pub kernel: Option<(u32, u32)>,
    /// Value of `kernel.io_uring_disabled`: 0 is on, 1 for privileged users, 2 is off.
    pub io_uring_disabled: Option<u32>,
    /// Soft limit on locked memory in bytes; `u64::MAX` is unlimited.
    pub memlock_bytes: Option<u64>,
    /// The limit on locked memory does not apply to this process.
    pub may_lock_all: bool,
}

/// Result of [`Machine::report`].
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    /// One short line.
    pub summary: String,
    /// Restrictions with their reasons and remedies; usually empty.
    pub reduced: Vec<String>,
}

impl Machine {
    /// Reads the facts of the current machine.
    #[must_use]
    pub fn read() -> Self {
        let text = |path: &str| fs::read_to_string(path).ok();
        Self {
            kernel: text("/proc/sys/kernel/osrelease").and_then(|text| kernel_version(&text)),
            io_uring_disabled: text("/proc/sys/kernel/io_uring_disabled").and_then(|text| text.trim().parse().ok()),
            memlock_bytes: text("/proc/self/limits").and_then(|text| memlock(&text)),
            may_lock_all: text("/proc/self/status").is_some_and(|text| has_ipc_lock(&text)),
        }
    }

    /// Summarizes the machine and its restrictions.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut reduced = Vec::new();
        let kernel = match self.kernel {
            Some((major, minor)) => format!("kernel {major}.{minor}"),
            None => "kernel unknown".to_string(),
        };
        match self.kernel {
            Some(version) if version < OLDEST_KERNEL => {
                reduced
                    .push(format!("{kernel} is older than 5.19: no shard can start, its io_uring lacks what they use"));
            }
            Some(version) if version < FULL_KERNEL => {
                reduced.push(format!("{kernel} is older than 6.1: rings run without deferred task work, and slower"));
            }
            _ => {}
        }
        let ring = match self.io_uring_disabled {
            Some(1) => "io_uring restricted",
            Some(2..) => "io_uring off",
            // The switch came with 6.6; older kernels have no way to turn io_uring off.
            Some(0) | None => "io_uring on",
        };
        if let Some(level @ 1..) = self.io_uring_disabled {
            let who = if level == 1 { "privileged users" } else { "nobody" };
            reduced.push(format!(
                "kernel.io_uring_disabled={level} lets {who} use io_uring: no shard starts without it; as root: \
                 sysctl kernel.io_uring_disabled=0"
            ));
        }
        let locked = self.report_memlock(&mut reduced);
        Report { summary: format!("{kernel}, {ring}, {locked}"), reduced }
    }

    fn report_memlock(&self, reduced: &mut Vec<String>) -> String {
        match self.memlock_bytes {
            _ if self.may_lock_all => "lockable memory unlimited".to_string(),
            Some(u64::MAX) => "lockable memory unlimited".to_string(),
            Some(bytes) => {
                let mebibytes = bytes >> 20;
                if bytes < USEFUL_MEMLOCK_BYTES {
                    reduced.push(format!(
                        "{mebibytes} MiB may be locked (ulimit -l): a pool larger than that is not registered with its \
                         ring, and moves with one more page walk; raise memlock in /etc/security/limits.conf"
                    ));
                }
                format!("lockable memory {mebibytes} MiB")
            }
            None => "lockable memory unknown".to_string(),
        }
    }
}

/// Parses the effective user id from `/proc/self/status`.
#[must_use]
pub fn effective_user(status: &str) -> Option<u32> {
    field(status, "Uid:")?.split_whitespace().nth(1)?.parse().ok()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

fn has_ipc_lock(status: &str) -> bool {
    let bits = field(status, "CapEff:").and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    bits.is_some_and(|bits| bits >> IPC_LOCK_BIT & 1 == 1)
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn memlock(limits: &str) -> Option<u64> {
    match field(limits, "Max locked memory")?.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_understood() {
        assert_eq!(kernel_version("6.18.44-rc1\n"), Some((6, 18)));
        assert_eq!(kernel_version("5.19-custom"), Some((5, 19)));
        assert_eq!(kernel_version("weird"), None);
        let limits = "Max locked memory         8388608              8388608              bytes     \n";
        assert_eq!(memlock(limits), Some(8 << 20));
        assert_eq!(memlock("Max locked memory  unlimited unlimited bytes\n"), Some(u64::MAX));
        let status = "Name:\tx\nUid:\t1000\t0\t0\t0\nCapEff:\t0000000000004000\n";
        assert_eq!(effective_user(status), Some(0));
        assert!(has_ipc_lock(status));
        assert!(!has_ipc_lock("CapEff:\t0000000000003000\n"));
    }

    #[test]
    fn a_full_machine_has_no_restrictions() {
        let kernel = Some((6, 18));
        let machine =
            Machine { kernel, io_uring_disabled: Some(0), memlock_bytes: Some(u64::MAX), ..Machine::default() };
        let report = machine.report();
        assert_eq!(report.summary, "kernel 6.18, io_uring on, lockable memory unlimited");
        assert_eq!(report.reduced, Vec::<String>::new());
    }

    #[test]
    fn each_reduction_is_named_with_its_number() {
        let machine = Machine {
            kernel: Some((5, 15)),
            io_uring_disabled: Some(2),
            memlock_bytes: Some(8 << 20),
            may_lock_all: false,
        };
        let reduced = machine.report().reduced.join("\n");
        for part in ["kernel 5.15", "io_uring_disabled=2", "8 MiB"] {
            assert!(reduced.contains(part), "{part} in {reduced}");
        }
        let holder = Machine { may_lock_all: true, ..machine };
        assert_eq!(holder.report().reduced.len(), 2);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(Machine::read().kernel.is_some());
    }
}
