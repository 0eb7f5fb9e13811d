//! CPUs in sysfs: online CPUs, their cores and NUMA nodes, and the caches above them.

use super::files::{numbered_children, read_cpus, read_number, read_text};
use crate::cpulist::{CpuSet, MAX_CPUS};
use crate::model::{Cache, CacheKind, Core};
use std::collections::BTreeSet;
use std::path::Path;

/// Most caches of a CPU; real ones have four.
const MAX_CACHES_PER_CPU: usize = 16;

/// Returns the online CPUs; empty if the directory names none.
pub(super) fn online_cpus(cpu_directory: &Path) -> CpuSet {
    match read_cpus(&cpu_directory.join("online")) {
        Some(cpus) if !cpus.is_empty() => cpus,
        _ => numbered_children(cpu_directory, "cpu")
            .into_iter()
            .map(|number| number as usize)
            .filter(|&cpu| cpu < MAX_CPUS)
            .collect(),
    }
}

pub(super) fn read_core(cpu_directory: &Path, id: usize, numa_node: Option<u32>) -> Core {
    let topology = cpu_directory.join(format!("cpu{id}/topology"));
    // The first name is the newer one; both hold the hardware threads of one core.
    let mut smt_siblings = read_cpus(&topology.join("core_cpus_list"))
        .or_else(|| read_cpus(&topology.join("thread_siblings_list")))
        .unwrap_or_default();
    smt_siblings.insert(id);
    Core {
        id,
        numa_node,
        package: read_number(&topology.join("physical_package_id")),
        core_id: read_number(&topology.join("core_id")),
        smt_siblings,
    }
}

/// Reads the caches. Each CPU lists the caches above it; a cache that several CPUs list is kept once.
pub(super) fn read_caches(cpu_directory: &Path, online: &CpuSet) -> Vec<Cache> {
    let mut caches = BTreeSet::new();
    for cpu in online {
        let directory = cpu_directory.join(format!("cpu{cpu}/cache"));
        let indices = numbered_children(&directory, "index");
        caches.extend(indices.into_iter().take(MAX_CACHES_PER_CPU).filter_map(|index| {
            let cache = directory.join(format!("index{index}"));
            let kind = match read_text(&cache.join("type"))?.trim() {
                "Data" => CacheKind::Data,
                "Instruction" => CacheKind::Instruction,
                "Unified" => CacheKind::Unified,
                _ => return None,
            };
            Some(Cache {
                level: read_number(&cache.join("level"))?,
                kind,
                shared_cpus: read_cpus(&cache.join("shared_cpu_list"))?,
                size_bytes: parse_size(read_text(&cache.join("size"))?.trim()),
            })
        }));
    }
    caches.into_iter().collect()
}

/// Parses `48K` as bytes; the kernel prints cache sizes in kibibytes.
fn parse_size(text: &str) -> Option<u64> {
    let kibibytes: u64 = text.strip_suffix('K')?.parse().ok()?;
    kibibytes.checked_mul(1 << 10).filter(|&bytes| bytes > 0)
}
