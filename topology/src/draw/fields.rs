//! JSON form of the model and the plan: every field under its name.
//!
//! Programs rely on the names: renaming a field of the model renames it here, and the tests fail.

use crate::json;
use crate::model::{CacheKind, Gpu, LinkLayer, Machine, NodeKind, PciAddress, PciRoot, PortState};
use crate::plan::ShardPlan;
use crate::rails::{Location, Nearness, RailMatrix};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// Formats machine, plan and rails as one JSON object with the members `machine`, `plan` and `rails`, on one line
/// without a line feed.
#[must_use]
pub fn json(machine: &Machine, plan: &ShardPlan, rails: &RailMatrix) -> String {
    #[derive(Serialize)]
    struct Drawing<'a> {
        machine: &'a Machine,
        plan: &'a ShardPlan,
        rails: &'a RailMatrix,
    }
    json::text(&Drawing { machine, plan, rails })
}

impl Serialize for Gpu {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Gpu", 6)?;
        fields.serialize_field("pci", &self.pci)?;
        fields.serialize_field("vendor", self.vendor())?;
        fields.serialize_field("vendor_id", &self.vendor_id)?;
        fields.serialize_field("device_id", &self.device_id)?;
        fields.serialize_field("numa_node", &self.numa_node)?;
        fields.serialize_field("driver", &self.driver)?;
        fields.end()
    }
}

impl Serialize for ShardPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("ShardPlan", 4)?;
        fields.serialize_field("shards", &self.shards)?;
        fields.serialize_field("housekeeping_cores", &self.housekeeping_cores)?;
        fields.serialize_field("notes", &self.notes)?;
        fields.serialize_field("must_park_at_once", &self.must_park_at_once())?;
        fields.end()
    }
}

/// Implements an enumeration's JSON form as its word.
macro_rules! serialize_word {
    ($($type:ty),*) => {
        $(impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.word())
            }
        })*
    };
}

serialize_word!(NodeKind, CacheKind, PortState, LinkLayer, Nearness);

/// Implements a type's JSON form as the text that it shows.
macro_rules! serialize_text {
    ($($type:ty),*) => {
        $(impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        })*
    };
}

serialize_text!(Location, PciAddress, PciRoot);
