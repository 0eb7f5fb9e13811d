//! Builder of a sysfs tree from a few lines of text, as the kernel would describe that machine.
//!
//! Each line is a word, a path or name, and settings. `let` names a part of a path, used as `$name`. A PCI path begins
//! with the root complex (`17` is `pci0000:17`) and goes through the bridges to the function (`1a:00.0`). The files
//! also hold what hwloc needs: masks beside lists, and the configuration space of bridges.

mod devices;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory with `sys` and `proc/self` in it, removed when dropped.
pub(crate) struct Tree {
    base: PathBuf,
}

type Settings<'a> = BTreeMap<&'a str, &'a str>;

impl Tree {
    /// Builds the machine that `text` describes. Panics on an invalid line, as the text is a test's input.
    pub(crate) fn build(text: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = std::env::temp_dir().join(format!("kvplane-machine-{}-{number}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let mut builder = Builder { tree: Self { base }, node_cpus: BTreeMap::new(), functions: BTreeMap::new() };
        let mut names: BTreeMap<String, String> = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let mut line = line.to_owned();
            for (name, value) in names.iter().rev() {
                line = line.replace(&format!("${name}"), value);
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            if let ["let", name, value] = words[..] {
                names.insert(name.to_owned(), value.to_owned());
                continue;
            }
            let settings = words[2..].iter().map(|word| word.split_once('=').expect("name=value")).collect();
            builder.line(words[0], words[1], &settings);
        }
        builder.finish()
    }

    pub(crate) fn sys(&self) -> PathBuf {
        self.base.join("sys")
    }

    /// Returns a directory like `/proc/self`.
    #[allow(dead_code, reason = "each test that includes this file uses a part of it")]
    pub(crate) fn process(&self) -> PathBuf {
        self.base.join("proc/self")
    }

    /// Returns the root of the file system for libhwloc.
    #[allow(dead_code, reason = "each test that includes this file uses a part of it")]
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.base.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Creates a relative link, like the kernel's.
    fn link(&self, path: &str, target: &str) {
        let up = "../".repeat(path.split('/').count() - 1);
        let path = self.base.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(format!("{up}{target}"), path).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // A leftover in the temporary directory does not fail the test.
        let _ = fs::remove_dir_all(&self.base);
    }
}

struct Builder {
    tree: Tree,
    node_cpus: BTreeMap<u32, BTreeSet<usize>>,
    /// Directory of each function or bridge, and the largest bus below it.
    functions: BTreeMap<String, String>,
}

/// Formats a list: `0-3,8`.
fn cpus(list: &str) -> BTreeSet<usize> {
    let mut out = BTreeSet::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        out.extend(first.parse::<usize>().unwrap()..=last.parse().unwrap());
    }
    out
}

/// Formats a mask: `00000003,ffffffff`.
fn mask(cpus: &BTreeSet<usize>) -> String {
    let mut words = vec![0_u32; cpus.last().map_or(1, |last| last / 32 + 1)];
    for cpu in cpus {
        words[cpu / 32] |= 1 << (cpu % 32);
    }
    let words: Vec<String> = words.iter().rev().map(|word| format!("{word:08x}")).collect();
    words.join(",") + "\n"
}

fn list(cpus: &BTreeSet<usize>) -> String {
    let words: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    words.join(",") + "\n"
}

fn kib(size: &str) -> u64 {
    let (digits, unit) = size.split_at(size.len() - 1);
    digits.parse::<u64>().unwrap()
        << match unit {
            "K" => 0,
            "M" => 10,
            "G" => 20,
            "T" => 30,
            other => panic!("{other}"),
        }
}

impl Builder {
    fn line(&mut self, word: &str, what: &str, set: &Settings<'_>) {
        match word {
            "package" => self.package(what, set),
            "node" => self.node(what, set),
            "allowed" => self.tree.file("proc/self/status", format!("Name:\tx\nCpus_allowed_list:\t{what}\n")),
            "limit" => {
                self.tree.file("proc/self/cgroup", "0::/pod/app\n");
                self.tree.file("sys/fs/cgroup/pod/cpu.max", format!("{}\n", what.replace('/', " ")));
                self.tree.file("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n");
            }
            "gpu" => self.gpu(what, set),
            "rdma" => self.rdma(what, set),
            "nic" => self.nic(what, set),
            "nvme" => self.nvme(what, set),
            "fabric" => self.fabric(what, set),
            "rxe" => self.rxe(what, set),
            "missing" => {
                let path = self.tree.base.join("sys").join(what);
                if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
            }
            other => panic!("no machine has a {other}"),
        }
    }

    /// Adds a package: `package 0 cpus=0-3 smt=4 l3=32M`; the CPUs n and n+smt share a core, and smt=0 means no
    /// threads.
    fn package(&mut self, id: &str, set: &Settings<'_>) {
        let all = cpus(set["cpus"]);
        let step: usize = set["smt"].parse().unwrap();
        let first = *all.first().unwrap();
        for &cpu in &all {
            let base = if step > 0 && all.contains(&cpu.wrapping_sub(step)) { cpu - step } else { cpu };
            let mut core = BTreeSet::from([base]);
            if step > 0 && all.contains(&(base + step)) {
                core.insert(base + step);
            }
            let at = format!("sys/devices/system/cpu/cpu{cpu}");
            for (name, text) in [
                ("core_cpus_list", list(&core)),
                ("thread_siblings_list", list(&core)),
                ("core_cpus", mask(&core)),
                ("thread_siblings", mask(&core)),
                ("package_cpus", mask(&all)),
                ("core_siblings", mask(&all)),
                ("core_id", format!("{}\n", base - first)),
                ("physical_package_id", format!("{id}\n")),
            ] {
                self.tree.file(&format!("{at}/topology/{name}"), text);
            }
            let caches = [
                ("1", "Data", "48K", &core),
                ("1", "Instruction", "32K", &core),
                ("2", "Unified", "2048K", &core),
                ("3", "Unified", set["l3"], &all),
            ];
            for (index, (level, kind, size, shared)) in caches.into_iter().enumerate() {
                let at = format!("{at}/cache/index{index}");
                for (name, text) in [
                    ("level", format!("{level}\n")),
                    ("type", format!("{kind}\n")),
                    ("size", format!("{}K\n", kib(size))),
                    ("shared_cpu_list", list(shared)),
                    ("shared_cpu_map", mask(shared)),
                ] {
                    self.tree.file(&format!("{at}/{name}"), text);
                }
            }
        }
    }

    /// Adds a node: `node 0 cpus=0-3 memory=64G distances=10,21`, with `access=latency,bandwidth` and `cxl=yes`.
    fn node(&mut self, id: &str, set: &Settings<'_>) {
        let of_node = set.get("cpus").map_or(BTreeSet::new(), |list| cpus(list));
        let at = format!("sys/devices/system/node/node{id}");
        self.tree.file(&format!("{at}/cpulist"), if of_node.is_empty() { "\n".to_owned() } else { list(&of_node) });
        self.tree.file(&format!("{at}/cpumap"), mask(&of_node));
        self.tree.file(&format!("{at}/meminfo"), format!("Node {id} MemTotal:  {} kB\n", kib(set["memory"])));
        self.tree.file(&format!("{at}/distance"), set["distances"].replace(',', " ") + "\n");
        if let Some((latency, bandwidth)) = set.get("access").and_then(|access| access.split_once(',')) {
            for (name, text) in [
                ("read_latency", latency),
                ("write_latency", latency),
                ("read_bandwidth", bandwidth),
                ("write_bandwidth", bandwidth),
            ] {
                self.tree.file(&format!("{at}/access0/initiators/{name}"), format!("{text}\n"));
            }
            let near = set.get("initiator").unwrap_or(&id);
            let target = format!("sys/devices/system/node/node{near}");
            self.tree.link(&format!("{at}/access0/initiators/node{near}"), &target);
        }
        if set.contains_key("cxl") {
            let device =
                format!("sys/devices/platform/ACPI0017:00/root0/decoder0.0/region{id}/dax_region{id}/dax{id}.0");
            self.tree.file(&format!("{device}/target_node"), format!("{id}\n"));
            self.tree.link(&format!("sys/bus/dax/devices/dax{id}.0"), &device);
        }
        self.node_cpus.insert(id.parse().unwrap(), of_node);
    }

    /// Creates the bridges and the function of a path; returns the function's directory.
    fn function(&mut self, path: &str, class: &str, id: &str, set: &Settings<'_>) -> String {
        let mut parts = path.split('/');
        let root = parts.next().unwrap();
        let mut at = format!("sys/devices/pci0000:{root}");
        let parts: Vec<String> = parts.map(|part| format!("0000:{part}")).collect();
        let node = set.get("node").copied().unwrap_or("-1");
        for (index, address) in parts.iter().enumerate() {
            at = format!("{at}/{address}");
            let last = index + 1 == parts.len();
            let (class, id) = if last { (class, id) } else { ("060400", "1000:c030") };
            let (vendor, device) = id.split_once(':').unwrap();
            for (name, text) in [
                ("class", format!("0x{class}\n")),
                ("vendor", format!("0x{vendor}\n")),
                ("device", format!("0x{device}\n")),
                ("numa_node", format!("{node}\n")),
                ("subsystem_vendor", format!("0x{vendor}\n")),
                ("subsystem_device", "0x0000\n".to_owned()),
            ] {
                self.tree.file(&format!("{at}/{name}"), text);
            }
            let everywhere = || self.node_cpus.values().flatten().copied().collect();
            let near = node.parse::<u32>().ok().and_then(|node| self.node_cpus.get(&node).cloned());
            self.tree.file(&format!("{at}/local_cpus"), mask(&near.unwrap_or_else(everywhere)));
            self.tree.link(&format!("sys/bus/pci/devices/{address}"), &at);
            self.functions.insert(address.clone(), at.clone());
        }
        if let Some(driver) = set.get("driver") {
            self.tree.file(&format!("sys/bus/pci/drivers/{driver}/uevent"), "");
            self.tree.link(&format!("{at}/driver"), &format!("sys/bus/pci/drivers/{driver}"));
        }
        at
    }

    fn finish(self) -> Tree {
        let all: BTreeSet<usize> = self.node_cpus.values().flatten().copied().collect();
        let nodes: BTreeSet<usize> = self.node_cpus.keys().map(|&node| node as usize).collect();
        for name in ["online", "possible", "present"] {
            self.tree.file(&format!("sys/devices/system/cpu/{name}"), list(&all));
            self.tree.file(&format!("sys/devices/system/node/{name}"), list(&nodes));
        }
        let cpuinfo: Vec<String> =
            all.iter().map(|cpu| format!("processor\t: {cpu}\nmodel name\t: Synthetic\n\n")).collect();
        self.tree.file("proc/cpuinfo", cpuinfo.concat());
        for (address, directory) in &self.functions {
            self.tree.file(&format!("{directory}/config"), self.configuration(address, directory));
        }
        self.tree
    }

    /// Encodes the first 64 bytes of a function's configuration space: for a bridge, the buses behind it.
    fn configuration(&self, address: &str, directory: &str) -> [u8; 64] {
        let bus = |address: &str| u8::from_str_radix(&address[5..7], 16).unwrap();
        let mut space = [0_u8; 64];
        let below = self.functions.iter().filter(|(_, other)| other.starts_with(&format!("{directory}/")));
        let buses: BTreeSet<u8> = below.map(|(address, _)| bus(address)).collect();
        let read = |name: &str| fs::read_to_string(self.tree.base.join(directory).join(name)).unwrap();
        let number = |text: &str| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap();
        space[0..2].copy_from_slice(&(number(&read("vendor")) as u16).to_le_bytes());
        space[2..4].copy_from_slice(&(number(&read("device")) as u16).to_le_bytes());
        space[9..12].copy_from_slice(&number(&read("class")).to_le_bytes()[..3]);
        if let (Some(first), Some(last)) = (buses.first(), buses.last()) {
            space[0x0e] = 1;
            (space[0x18], space[0x19], space[0x1a]) = (bus(address), *first, *last);
        }
        space
    }
}
