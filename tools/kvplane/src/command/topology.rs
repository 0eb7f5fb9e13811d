//! `kvplane topology`: shows the machine's topology, the placement of shards, and the affinity of NICs to memory.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use kvplane::device::{Device, DeviceError, DeviceId, DeviceInfo, DeviceMemory, Family, open_families};
use kvplane::{
    DeviceRegistration, Environment, Explanation, MemoryRails, RankedRail, RdmaConfig, RegisterOptions, TransferEngine,
    TransferEngineConfig, discover_machine, scheduler_affinity,
};
use kvplane_topology::rails::{GivenMatrix, MAX_MATRIX_BYTES};
use kvplane_topology::{
    CpuSet, Machine, PlanRequest, RailMatrix, Sysfs, cpulist, draw, hwloc, merge, plan, rail_matrix, synthetic,
};

use crate::command::Failure;

/// Length of the memory of a device that is registered to explain how RDMA devices access it.
const SAMPLE_BYTES: u64 = 2 << 20;

/// Show the machine's topology, the placement of shards, and the affinity of NICs to memory.
#[derive(Args)]
pub(crate) struct Topology {
    /// Number of shards to plan for. Default: chosen from the machine's topology.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    shards: Option<u16>,
    /// CPUs to plan for, such as 0-3,8. Default: the allowed CPUs of this process.
    #[arg(long, value_name = "LIST", value_parser = cpulist::parse)]
    cpus: Option<CpuSet>,
    /// Read the topology of a saved machine from a directory like /sys. A directory proc/self beside it is read too.
    #[arg(long, value_name = "ROOT", conflicts_with = "synthetic")]
    sysfs: Option<PathBuf>,
    /// Read the structure from an hwloc file (lstopo --of xml); with --sysfs, the rest is read from there.
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    hwloc_xml: Option<PathBuf>,
    /// Show a synthetic machine, such as "numa:2 core:4 pu:2".
    #[arg(long)]
    synthetic: Option<String>,
    /// Check a NIC priority matrix of Mooncake or a topology of TENT (JSON) against the machine, and show its tiers.
    #[arg(long, value_name = "FILE")]
    matrix: Option<PathBuf>,
    /// Explain the placement of each shard and each rail.
    #[arg(long)]
    why: bool,
    /// Output format. The format mooncake is the matrix that Mooncake's tools read.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Show the transports by which the engine of this name is reached from here, and the reasons.
    #[arg(long, value_name = "PEER",
        conflicts_with_all = ["shards", "cpus", "sysfs", "hwloc_xml", "synthetic", "why"])]
    explain: Option<String>,
    /// Load the drivers of accelerators, and show the devices that they report to a process of this user.
    #[arg(long, conflicts_with_all =
        ["shards", "cpus", "sysfs", "hwloc_xml", "synthetic", "why", "explain", "matrix", "format"])]
    devices: bool,
    /// Print as JSON, like --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
    Svg,
    Mooncake,
}

impl Topology {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let format = if self.json { Format::Json } else { self.format };
        if self.devices {
            return devices(format == Format::Json);
        }
        if let Some(peer) = &self.explain {
            return explain(peer, self.matrix.as_deref(), format == Format::Json);
        }
        let machine = self.machine()?;
        let here = self.sysfs.is_none() && self.hwloc_xml.is_none() && self.synthetic.is_none();
        let affinity = if here { scheduler_affinity(&machine) } else { None };
        let affinity = match (affinity, &self.cpus) {
            (Some(affinity), Some(cpus)) => Some(affinity.intersection(cpus).copied().collect()),
            (affinity, cpus) => cpus.clone().or(affinity),
        };
        let plan = plan(&machine, &PlanRequest { shards: self.shards.map(usize::from), affinity });
        let mut rails = rail_matrix(&machine);
        if let Some(path) = &self.matrix {
            rails = given(path, &rails)?;
        }
        match format {
            Format::Text => print!("{}", draw::text(&machine, &plan, &rails)),
            Format::Json => println!("{}", draw::json(&machine, &plan, &rails)),
            Format::Svg => print!("{}", draw::svg(&machine, &plan, &rails)),
            Format::Mooncake => println!("{}", rails.to_mooncake()),
        }
        if self.why {
            // The other formats contain the reasons, or are for programs: they stay complete.
            match format {
                Format::Text => print!("{}", draw::why(&plan, &rails)),
                _ => eprint!("{}", draw::why(&plan, &rails)),
            }
        }
        Ok(())
    }

    fn machine(&self) -> Result<Machine, Failure> {
        if let Some(text) = &self.synthetic {
            return Ok(synthetic::parse(text)?);
        }
        let xml = self.hwloc_xml.as_deref().map(|path| read_file(path, hwloc::MAX_XML_BYTES)).transpose()?;
        let from_hwloc = xml.as_deref().map(hwloc::parse).transpose()?;
        let saved = match &self.sysfs {
            Some(root) => Some(Sysfs::at(root, process_beside(root)).read()?),
            None => None,
        };
        Ok(match (from_hwloc, saved) {
            (Some(from_hwloc), Some(saved)) => merge::merge(from_hwloc, saved),
            (Some(machine), None) | (None, Some(machine)) => machine,
            (None, None) => discover_machine()?,
        })
    }
}

/// Prints the devices of all drivers.
fn devices(json: bool) -> Result<(), Failure> {
    let families = open_families();
    if json {
        println!("{}", serde_json::to_string_pretty(&devices_json(&families))?);
        return Ok(());
    }
    for (family, devices) in &families {
        let (family, library) = (family.prefix(), family.library());
        match devices {
            Ok(devices) => println!("{family}: {} devices by {library}", devices.len()),
            Err(error) => println!("{family}: no devices: {error}"),
        }
        for info in devices.iter().flatten() {
            let address = if info.pci_address.is_empty() { "unknown" } else { info.pci_address.as_str() };
            println!("  {}: {}, PCI {address}", info.id, info.name);
            let node = info.host_node.map_or_else(|| "unknown".to_owned(), |node| node.to_string());
            let exports = if info.dma_buf { "exports dma-buf descriptors" } else { "exports no dma-buf descriptors" };
            println!("    NUMA node {node}, {} copy engines, {exports}", info.copy_engines);
        }
    }
    Ok(())
}

fn devices_json(families: &[(Family, Result<Vec<DeviceInfo>, DeviceError>)]) -> serde_json::Value {
    let device = |info: &DeviceInfo| {
        serde_json::json!({
            "location": info.id.to_string(),
            "name": info.name,
            "pci_address": info.pci_address,
            "numa_node": info.host_node,
            "copy_engines": info.copy_engines,
            "dma_buf": info.dma_buf,
        })
    };
    let family = |(family, devices): &(Family, Result<Vec<DeviceInfo>, DeviceError>)| {
        let error = devices.as_ref().err().map(ToString::to_string);
        let devices: Vec<_> = devices.iter().flatten().map(device).collect();
        serde_json::json!({
            "family": family.prefix(),
            "library": family.library(),
            "devices": devices,
            "error": error,
        })
    };
    families.iter().map(family).collect()
}

/// Returns the directory of the process description that a saved tree may have beside it.
fn process_beside(root: &Path) -> PathBuf {
    let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    root.parent().unwrap_or(&root).join("proc/self")
}

/// Reads a matrix and fits it to the machine; differences in preference are printed as notes.
fn given(path: &Path, rails: &RailMatrix) -> Result<RailMatrix, Failure> {
    let text = read_file(path, MAX_MATRIX_BYTES)?;
    let fitted = GivenMatrix::parse(&text).and_then(|given| rails.with_given(&given));
    let mut fitted = fitted.map_err(|error| format!("{}: {error}", path.display()))?;
    let differences = rails.differences(&fitted);
    let verdict = match differences.len() {
        0 => "prefers the nearest rails everywhere",
        _ => "is usable, but differs from the nearest rails",
    };
    fitted.notes.insert(0, format!("{} {verdict}.", path.display()));
    fitted.notes.extend(differences);
    Ok(fitted)
}

/// Reads a text file of at most `limit` bytes.
fn read_file(path: &Path, limit: usize) -> Result<String, Failure> {
    let describe = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let bytes = std::fs::metadata(path).map_err(describe)?.len();
    if bytes > limit as u64 {
        return Err(format!("{} has {bytes} bytes: the limit is {limit}", path.display()).into());
    }
    Ok(std::fs::read_to_string(path).map_err(describe)?)
}

/// Resolves the paths to a peer as an engine of the same machine and user would. Where there are RDMA devices, some
/// memory of each device is registered with them, to explain how they access it.
fn explain(peer: &str, matrix: Option<&Path>, json: bool) -> Result<(), Failure> {
    let environment = Environment::of_process()?;
    let rdma = RdmaConfig { matrix: matrix.map(|path| path.display().to_string()), ..RdmaConfig::default() };
    let has_rdma = rdma.usable().is_ok();
    let engine = TransferEngine::start(TransferEngineConfig { environment, rdma, ..TransferEngineConfig::default() })?;
    if has_rdma {
        for info in open_families().into_iter().filter_map(|(_, devices)| devices.ok()).flatten() {
            if let Err(why) = register_sample(&engine, info.id) {
                eprintln!("memory of {} cannot be registered: {why}", info.id);
            }
        }
    }
    let found = engine.explain(peer)?;
    if json {
        println!("{:#}", as_json(peer, &found));
    } else {
        print!("{}", as_text(peer, &found));
    }
    Ok(())
}

/// Registers a little memory of a device, for transfers of this engine only.
fn register_sample(engine: &TransferEngine, id: DeviceId) -> Result<(), Failure> {
    let memory = DeviceMemory::allocate(&Device::open(id)?, SAMPLE_BYTES)?;
    engine.register(memory, &RegisterOptions { remote_accessible: false, ..RegisterOptions::default() })?;
    Ok(())
}

fn as_json(peer: &str, found: &Explanation) -> serde_json::Value {
    let choices: Vec<_> = found
        .choices
        .iter()
        .map(|one| {
            serde_json::json!({
                "transport": one.transport,
                "usable": one.usable,
                "reason": one.reason,
                "mapped": one.mapped.to_string(),
                "pointers": one.pointers.to_string(),
            })
        })
        .collect();
    let chosen = serde_json::json!({ "mapped": found.for_mapped(), "pointers": found.for_pointers() });
    let rail = |rail: &RankedRail| {
        let RankedRail { own, peer, rank, reason } = rail;
        serde_json::json!({ "own": own, "peer": peer, "rank": rank, "reason": reason })
    };
    let memory = |one: &MemoryRails| {
        let rails: Vec<_> = one.rails.iter().map(rail).collect();
        serde_json::json!({ "own": one.own, "peer": one.peer, "rails": rails })
    };
    let rails: Vec<_> = found.rails.iter().map(memory).collect();
    let registration = |one: &DeviceRegistration| {
        let path = one.path.name();
        serde_json::json!({
            "device": one.device.to_string(),
            "nic": one.nic,
            "bytes": one.bytes,
            "path": path,
            "reason": one.path.to_string(),
        })
    };
    let registrations: Vec<_> = found.registrations.iter().map(registration).collect();
    serde_json::json!({
        "peer": peer,
        "chosen": chosen,
        "transports": choices,
        "rails": rails,
        "device_memory": registrations,
    })
}

fn as_text(peer: &str, found: &Explanation) -> String {
    let chosen = |transport: Option<&'static str>| transport.unwrap_or("no path");
    let mut text = format!(
        "{peer}\n  memory that can be mapped   {}\n  any other memory            {}\n\n",
        chosen(found.for_mapped()),
        chosen(found.for_pointers())
    );
    for one in &found.choices {
        let mark = if one.usable { "yes" } else { "no" };
        text.push_str(&format!("  {:<9} {mark:<4} {}\n", one.transport, one.reason));
        if one.usable {
            text.push_str(&format!("{:17}mapped memory: {}; any other: {}\n", "", one.mapped, one.pointers));
        }
    }
    if !found.registrations.is_empty() {
        text.push_str("\nmemory of devices, as RDMA devices access it:\n");
    }
    for one in &found.registrations {
        text.push_str(&format!("  {one}\n"));
    }
    for one in &found.rails {
        text.push('\n');
        one.to_string().lines().for_each(|line| text.push_str(&format!("  {line}\n")));
    }
    text
}
