//! CPUs and CPU time that this process may use.
//!
//! The limit of CPU time is the least one between the process's control group and the root, in the unified hierarchy
//! (`cpu.max`) or the CPU controller's legacy one. If the group's directory does not exist (a container sees its own
//! group as the root), the root's limit is taken.

use super::files::{read_number, read_text};
use super::tree::DeviceTree;
use crate::cpulist::{self, CpuSet};
use std::path::{Component, Path, PathBuf};

/// Most levels of control groups that are followed.
const MAX_GROUPS: usize = 64;

/// Returns the CPUs that this process may run on; `None` if the status file does not contain them.
pub(super) fn allowed_cpus(process: &Path) -> Option<CpuSet> {
    let status = read_text(&process.join("status"))?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    cpulist::parse(list).ok().filter(|cpus| !cpus.is_empty())
}

/// Returns the limit of the control groups in thousandths of a CPU; `None` for no limit.
pub(super) fn cpu_limit_millis(tree: DeviceTree<'_>, process: &Path) -> Option<u64> {
    let top = tree.join("fs/cgroup");
    let groups = read_text(&process.join("cgroup")).unwrap_or_default();
    let group_of = |wanted: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            wanted(controllers).then_some(path)
        })
    };
    let unified = group_of(&|controllers| controllers.is_empty()).unwrap_or("/");
    let old = group_of(&|controllers| controllers.split(',').any(|one| one == "cpu")).unwrap_or("/");
    let unified = least(&top, unified, unified_limit);
    let old = ["cpu", "cpu,cpuacct"].iter().filter_map(|name| least(&top.join(name), old, old_limit)).min();
    [unified, old].into_iter().flatten().min()
}

/// Returns the least limit of `group` and the groups above it, below `top`.
fn least(top: &Path, group: &str, limit: fn(&Path) -> Option<u64>) -> Option<u64> {
    let names = Path::new(group).components().filter(|part| matches!(part, Component::Normal(_))).take(MAX_GROUPS);
    let mut at = PathBuf::from(top);
    let mut limits = vec![limit(&at)];
    for name in names {
        at.push(name);
        limits.push(limit(&at));
    }
    limits.into_iter().flatten().min()
}

/// Parses the limit of a unified group: `200000 100000` is two CPUs; `max 100000` is no limit.
fn unified_limit(group: &Path) -> Option<u64> {
    let text = read_text(&group.join("cpu.max"))?;
    let mut words = text.split_whitespace();
    millis(words.next()?.parse().ok()?, words.next()?.parse().ok()?)
}

fn old_limit(group: &Path) -> Option<u64> {
    // A quota of -1 means no limit, and does not parse as a number here.
    millis(read_number(&group.join("cpu.cfs_quota_us"))?, read_number(&group.join("cpu.cfs_period_us"))?)
}

fn millis(quota_us: u64, period_us: u64) -> Option<u64> {
    quota_us.checked_mul(1_000)?.checked_div(period_us).filter(|&limit| limit > 0)
}
