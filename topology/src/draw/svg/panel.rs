//! Panel of one NUMA node: its cores, then its devices by root complex and switch.

use super::MARGIN;
use super::canvas::{Canvas, Rect, fit};
use crate::cpulist;
use crate::draw::{cells::Cell, cells::Use, devices::attached_by, home, node_heading};
use crate::model::{Machine, PciAddress, PciPath, PciRoot};
use crate::plan::ShardPlan;
use crate::rails::{RailMatrix, natural_key};
use std::collections::BTreeMap;

const PAD: u32 = 14;
const CORE: u32 = 24;
const CHIP: (u32, u32) = (128, 38);
const GAP: u32 = 6;

/// A node that is drawn but not placed.
pub(super) struct Panel {
    canvas: Canvas,
    pub(super) height: u32,
}

impl Panel {
    /// Places the panel with its frame in the drawing.
    pub(super) fn place(self, canvas: &mut Canvas, x: u32, y: u32, width: u32, height: u32) {
        canvas.rect(&Rect { x, y, width, height }, "panel", "");
        canvas.place(&self.canvas, x, y);
    }
}

/// A device, drawn as a chip.
struct Chip {
    class: &'static str,
    name: String,
    detail: String,
    title: String,
    pci: Option<PciPath>,
}

pub(super) fn build(machine: &Machine, plan: &ShardPlan, rails: &RailMatrix, node: Option<u32>, width: u32) -> Panel {
    let mut canvas = Canvas::new();
    let heading = node_heading(machine, node);
    let (name, rest) = heading.trim_end().split_once(": ").unwrap_or((heading.trim_end(), ""));
    canvas.text(PAD, 26, "heading", name);
    canvas.text(PAD + 8 + 9 * name.chars().count() as u32, 26, "small", rest);
    let cells = crate::draw::cells::cells(machine, plan);
    let cells: Vec<&Cell> = cells.iter().filter(|cell| cell.numa_node == node).collect();
    let mut y = cores(&mut canvas, &cells, plan, width, 40);
    let mut by_root: BTreeMap<Option<PciRoot>, Vec<Chip>> = BTreeMap::new();
    for chip in chips(machine, rails, node) {
        by_root.entry(chip.pci.as_ref().map(|pci| pci.root)).or_default().push(chip);
    }
    let unplaced = by_root.remove(&None);
    // Complexes with switches come first: having one shape, they fill rows.
    let mut by_root: Vec<(Option<PciRoot>, Vec<Chip>)> = by_root.into_iter().collect();
    by_root
        .sort_by_key(|(_, chips)| !chips.iter().any(|chip| chip.pci.as_ref().is_some_and(|pci| pci.bridges.len() > 1)));
    let titled = by_root.into_iter().map(|(root, chips)| (root.map_or(String::new(), |root| root.to_string()), chips));
    let titled = titled.chain(unplaced.map(|chips| ("not on a PCI bus".to_owned(), chips)));
    // Root complexes are placed side by side while they fit.
    let (mut x, mut tallest) = (PAD, 0);
    for (title, chips) in titled {
        let drawn = complex(&title, &chips, width - 2 * PAD);
        if x + drawn.width > width - PAD && x > PAD {
            (x, y, tallest) = (PAD, y + tallest + GAP, 0);
        }
        canvas.rect(&Rect { x, y, width: drawn.width, height: drawn.height }, "complex", "");
        canvas.place(&drawn.canvas, x, y);
        x += drawn.width + GAP;
        tallest = tallest.max(drawn.height);
    }
    if tallest > 0 {
        y += tallest + GAP;
    }
    Panel { canvas, height: y + PAD - GAP }
}

fn cores(canvas: &mut Canvas, cells: &[&Cell], plan: &ShardPlan, width: u32, top: u32) -> u32 {
    if cells.is_empty() {
        return top;
    }
    let per_row = ((width - 2 * PAD) / (CORE + 3)).max(1);
    for (index, cell) in cells.iter().enumerate() {
        let (x, y) = (PAD + index as u32 % per_row * (CORE + 3), top + index as u32 / per_row * (CORE + 3));
        let cpus = cpulist::format(&cell.cpus);
        let shard = cell.shards.first().copied();
        let (class, ink, mark, what) = match (shard, cell.usage) {
            (Some(shard), _) => {
                let reason = plan.shards.get(shard).map_or("", |seat| seat.reason.as_str());
                ("shard", "oncore", label(shard), format!("shard {shard}: {reason}"))
            }
            (None, Use::Housekeeping) => ("housekeeping", "core", "hk".to_owned(), "housekeeping".to_owned()),
            (None, Use::Denied) => ("denied", "core", "–".to_owned(), "this process may not run here".to_owned()),
            (None, Use::Shard) => ("free", "core", String::new(), String::new()),
        };
        canvas.rect(&Rect { x, y, width: CORE, height: CORE }, class, &format!("CPU {cpus}: {what}"));
        canvas.text(x + CORE / 2, y + 16, ink, &mark);
    }
    let rows = (cells.len() as u32).div_ceil(per_row);
    top + rows * (CORE + 3) + GAP
}

/// Formats a shard's label: three digits leave no room for the letter.
fn label(shard: usize) -> String {
    if shard < 100 { format!("s{shard}") } else { shard.to_string() }
}

fn chips(machine: &Machine, rails: &RailMatrix, node: Option<u32>) -> Vec<Chip> {
    let mut chips = Vec::new();
    let names = crate::draw::devices::gpu_names(machine);
    for (gpu, name) in machine.gpus.iter().zip(names).filter(|(gpu, _)| home(machine, gpu.numa_node, true) == node) {
        let driver = gpu.driver.as_deref().unwrap_or("driver unknown");
        chips.push(Chip {
            class: "gpu",
            name: name.unwrap_or_else(|| "GPU".to_owned()),
            detail: format!("{} {}", gpu.vendor(), short(gpu.pci.function)),
            title: format!("GPU {}, {}, {driver}", gpu.pci.function, gpu.vendor()),
            pci: Some(gpu.pci.clone()),
        });
    }
    for device in
        machine.rdma_devices.iter().filter(|device| home(machine, device.numa_node, device.pci.is_some()) == node)
    {
        let rail = rails.rail(&device.name);
        let excluded = rails.excluded.iter().find(|one| one.name == device.name);
        let speed = rail.and_then(|rail| rail.speed_mbps).map_or("speed unknown".to_owned(), crate::rails::gigabits);
        let over = device.ports.iter().find_map(|port| port.netdev.as_deref()).unwrap_or_default();
        chips.push(Chip {
            class: if rail.is_some() { "nic" } else { "nicoff" },
            name: device.name.clone(),
            detail: if rail.is_some() { format!("{speed} {over}") } else { "no rail".to_owned() },
            title: excluded.map_or_else(
                || format!("{}: {speed}, over {over}", device.name),
                |one| format!("{}: {}", one.name, one.reason),
            ),
            pci: device.pci.clone(),
        });
    }
    let plain = machine.nics.iter().filter(|nic| {
        home(machine, nic.numa_node, nic.pci.is_some()) == node && nic.rdma_device.is_none() && !nic.loopback
    });
    for nic in plain {
        let speed = nic.speed_mbps.map_or("speed unknown".to_owned(), crate::rails::gigabits);
        chips.push(Chip {
            class: if nic.up { "nic" } else { "nicoff" },
            name: nic.name.clone(),
            detail: if nic.up { speed.clone() } else { "down".to_owned() },
            title: format!("interface {}: {speed}, {}", nic.name, if nic.up { "up" } else { "down" }),
            pci: nic.pci.clone(),
        });
    }
    for disk in machine.block_devices.iter().filter(|disk| home(machine, disk.numa_node, disk.pci.is_some()) == node) {
        let size = crate::draw::size_text(disk.bytes);
        let attached = attached_by(disk, &machine.nvme_controllers);
        let transport = attached.and_then(|controller| controller.transport.as_deref());
        let kind = match (transport, disk.nvme) {
            (Some(transport), _) => format!(" over {transport}"),
            (None, true) => " NVMe".to_owned(),
            (None, false) => String::new(),
        };
        let from = attached.and_then(|controller| controller.address.as_deref());
        let from = from.map_or(String::new(), |address| format!(" from {address}"));
        chips.push(Chip {
            class: "drive",
            name: disk.name.clone(),
            detail: format!("{size}{kind}"),
            title: format!("disk {}: {size}{from}", disk.name),
            pci: disk.pci.clone(),
        });
    }
    // Accelerators before NICs before drives, each in the order of their names.
    let rank = |chip: &Chip| ["gpu", "nic", "nicoff", "drive"].iter().position(|class| *class == chip.class);
    chips.sort_by_cached_key(|chip| (rank(chip), natural_key(&chip.name)));
    chips
}

/// Formats an address as `1b:00.0`: the domain is nearly always the first.
fn short(address: PciAddress) -> String {
    format!("{:02x}:{:02x}.{:x}", address.bus, address.device, address.function)
}

/// A root complex that is drawn but not placed.
struct Complex {
    canvas: Canvas,
    width: u32,
    height: u32,
}

/// Draws one root complex, at most `room` wide: switches as boxes, other devices directly.
fn complex(title: &str, chips: &[Chip], room: u32) -> Complex {
    let mut by_port: BTreeMap<Option<PciAddress>, Vec<&Chip>> = BTreeMap::new();
    for chip in chips {
        let pci = chip.pci.as_ref();
        // A second bridge belongs to a switch: a single one is the root port of a card.
        let port = pci.filter(|pci| pci.bridges.len() > 1).and_then(|pci| pci.bridges.first().copied());
        by_port.entry(port).or_default().push(chip);
    }
    let mut canvas = Canvas::new();
    canvas.text(GAP, 15, "tiny", title);
    let direct = by_port.remove(&None).unwrap_or_default();
    let mut flow = Flow { x: GAP, y: 22, tallest: 0, widest: 0, room };
    for (port, chips) in by_port {
        let columns = (chips.len() as u32).min(2);
        let rows = (chips.len() as u32).div_ceil(columns);
        let size = (columns * (CHIP.0 + GAP) + GAP, 20 + rows * (CHIP.1 + GAP));
        let (x, y) = flow.next(size);
        canvas.rect(&Rect { x, y, width: size.0, height: size.1 }, "switch", "");
        let name = port.map_or(String::new(), |port| format!("switch at {}", short(port)));
        canvas.text(x + GAP, y + 14, "tiny", &name);
        for (index, chip) in chips.iter().enumerate() {
            let (column, row) = (index as u32 % columns, index as u32 / columns);
            draw_chip(&mut canvas, chip, x + GAP + column * (CHIP.0 + GAP), y + 20 + row * (CHIP.1 + GAP));
        }
    }
    flow.new_row();
    for chip in &direct {
        let (x, y) = flow.next(CHIP);
        draw_chip(&mut canvas, chip, x, y);
    }
    flow.new_row();
    Complex { canvas, width: flow.widest.max(CHIP.0 + 2 * GAP), height: flow.y }
}

/// Layout of boxes from left to right, with a new row when one does not fit.
struct Flow {
    x: u32,
    y: u32,
    tallest: u32,
    widest: u32,
    room: u32,
}

impl Flow {
    fn next(&mut self, size: (u32, u32)) -> (u32, u32) {
        if self.x + size.0 + GAP > self.room && self.x > GAP {
            self.new_row();
        }
        let place = (self.x, self.y);
        self.x += size.0 + GAP;
        self.widest = self.widest.max(self.x);
        self.tallest = self.tallest.max(size.1);
        place
    }

    fn new_row(&mut self) {
        if self.tallest > 0 {
            (self.x, self.y, self.tallest) = (GAP, self.y + self.tallest + GAP, 0);
        }
    }
}

fn draw_chip(canvas: &mut Canvas, chip: &Chip, x: u32, y: u32) {
    canvas.rect(&Rect { x, y, width: CHIP.0, height: CHIP.1 }, chip.class, &chip.title);
    canvas.text(x + 8, y + 16, "label", &fit(&chip.name, 16));
    canvas.text(x + 8, y + 30, "tiny", &fit(chip.detail.trim_end(), 22));
}

/// Draws the key of cores and devices; returns the position of its end.
pub(super) fn key(canvas: &mut Canvas, y: u32) -> u32 {
    let entries = [
        ("shard", "core of a shard"),
        ("housekeeping", "housekeeping"),
        ("denied", "not allowed"),
        ("gpu", "GPU"),
        ("nic", "NIC"),
        ("nicoff", "NIC not in use"),
        ("drive", "drive"),
        ("switch", "PCI switch"),
        ("complex", "root complex"),
    ];
    let mut x = MARGIN;
    for (class, meaning) in entries {
        canvas.rect(&Rect { x, y, width: 16, height: 14 }, class, "");
        canvas.text(x + 22, y + 11, "small", meaning);
        x += 40 + 7 * meaning.chars().count() as u32;
    }
    y + 24
}
