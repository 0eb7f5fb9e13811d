//! JSON form of the model and the plan: every field under its name.
//!
//! Programs rely on the names: renaming a field of the model renames it here, and the tests fail.

use crate::json::{self, ToJson};
use crate::model::{
    BlockDevice, Cache, CacheKind, Core, Gpu, HardwareQueue, LinkLayer, Machine, Nic, NodeAccess, NodeKind, NumaNode,
    NvmeController, PciPath, PortState, RdmaDevice, RdmaPort,
};
use crate::plan::{QueueShare, ShardPlan, ShardSeat};
use crate::rails::{ExcludedDevice, Location, Nearness, Rail, RailMatrix, Row, Tier};

/// Formats machine, plan and rails as one JSON object with the members `machine`, `plan` and `rails`, on one line
/// without a line feed.
#[must_use]
pub fn json(machine: &Machine, plan: &ShardPlan, rails: &RailMatrix) -> String {
    let mut out = String::new();
    json::object(&mut out, |o| {
        o.field("machine", machine).field("plan", plan).field("rails", rails);
    });
    out
}

/// Implements a type's JSON form as an object with the named fields.
macro_rules! json_fields {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl ToJson for $type {
            fn write_json(&self, out: &mut String) {
                json::object(out, |o| {
                    $(o.field(stringify!($field), &self.$field);)*
                });
            }
        }
    };
}

json_fields!(Machine {
    numa_nodes,
    cores,
    caches,
    nics,
    rdma_devices,
    block_devices,
    nvme_controllers,
    gpus,
    allowed_cpus,
    cpu_limit_millis,
    notes,
});
json_fields!(NumaNode { id, kind, memory_bytes, distances, access });
json_fields!(NodeAccess { read_latency_ns, write_latency_ns, read_mib_per_s, write_mib_per_s });
json_fields!(Core { id, numa_node, package, core_id, smt_siblings });
json_fields!(Cache { level, kind, shared_cpus, size_bytes });
json_fields!(Nic { name, numa_node, pci, driver, speed_mbps, mtu_bytes, queues, up, loopback, rdma_device });
json_fields!(RdmaDevice { name, numa_node, pci, driver, ports });
json_fields!(RdmaPort { number, state, physical_state, link_layer, speed_mbps, active_mtu_bytes, netdev });
json_fields!(BlockDevice { name, numa_node, pci, nvme, controllers, bytes, block_bytes, rotational, hardware_queues });
json_fields!(HardwareQueue { index, cpus });
json_fields!(NvmeController { name, numa_node, pci, transport, address, model, state, queues, subsystem });
json_fields!(ShardSeat { shard, core, numa_node, nics, drives, reason });
json_fields!(QueueShare { device, queue, numa_node, local });
json_fields!(RailMatrix { rails, excluded, rows, notes });
json_fields!(Rail { name, port, netdev, speed_mbps, active_mtu_bytes, numa_node, pci });
json_fields!(ExcludedDevice { name, reason });
json_fields!(Row { location, tiers });
json_fields!(Tier { nearness, distance, slow, rails, reason });

impl ToJson for Gpu {
    fn write_json(&self, out: &mut String) {
        json::object(out, |o| {
            o.field("pci", &self.pci)
                .field("vendor", self.vendor())
                .field("vendor_id", &self.vendor_id)
                .field("device_id", &self.device_id)
                .field("numa_node", &self.numa_node)
                .field("driver", &self.driver);
        });
    }
}

impl ToJson for PciPath {
    fn write_json(&self, out: &mut String) {
        let bridges: Vec<String> = self.bridges.iter().map(ToString::to_string).collect();
        json::object(out, |o| {
            o.field("root", &self.root.to_string())
                .field("bridges", &bridges)
                .field("function", &self.function.to_string());
        });
    }
}

/// Implements an enumeration's JSON form as its word.
macro_rules! json_word {
    ($($type:ty),*) => {
        $(impl ToJson for $type {
            fn write_json(&self, out: &mut String) {
                self.word().write_json(out);
            }
        })*
    };
}

json_word!(NodeKind, PortState, LinkLayer, Nearness);

impl ToJson for Location {
    fn write_json(&self, out: &mut String) {
        self.to_string().write_json(out);
    }
}

impl ToJson for ShardPlan {
    fn write_json(&self, out: &mut String) {
        json::object(out, |o| {
            o.field("shards", &self.shards)
                .field("housekeeping_cores", &self.housekeeping_cores)
                .field("notes", &self.notes)
                .field("must_park_at_once", &self.must_park_at_once());
        });
    }
}

impl ToJson for CacheKind {
    fn write_json(&self, out: &mut String) {
        let kind = match self {
            Self::Data => "data",
            Self::Instruction => "instruction",
            Self::Unified => "unified",
        };
        kind.write_json(out);
    }
}
