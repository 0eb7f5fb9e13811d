//! The JSON form of the model and the plan: every field under its own name.
//!
//! The names are what programs rely on: renaming a field of the model renames it here, and the tests see it.

use crate::json::{self, ToJson};
use crate::model::{BlockDevice, Cache, CacheKind, Core, Machine, Nic, NumaNode};
use crate::plan::{ShardPlan, ShardSeat};

/// One JSON object with the members `machine` and `plan`, on one line without a line feed.
#[must_use]
pub fn json(machine: &Machine, plan: &ShardPlan) -> String {
    let mut out = String::new();
    json::object(&mut out, |o| {
        o.field("machine", machine).field("plan", plan);
    });
    out
}

/// Gives a type its JSON form: an object with the named fields.
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

json_fields!(Machine { numa_nodes, cores, caches, nics, block_devices, allowed_cpus });
json_fields!(NumaNode { id, memory_bytes, distances });
json_fields!(Core { id, numa_node, package, core_id, smt_siblings });
json_fields!(Cache { level, kind, shared_cpus, size_bytes });
json_fields!(Nic { name, numa_node, speed_mbps, up, loopback, rdma_device });
json_fields!(BlockDevice { name, numa_node, nvme, bytes, rotational });
json_fields!(ShardSeat { shard, core, numa_node });
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
