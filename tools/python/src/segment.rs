//! Memory that this process gives to the cluster: storage nodes of one shard each.

use std::time::Duration;

use kvplane::{Control, Node, NodeConfig, Pacing};

use crate::control::within;
use crate::outcome::{INTERNAL, NO_ROOM, failed};

/// How long a node may take to join: its memory is mapped first.
const JOIN: Duration = Duration::from_secs(20);
/// The longest that its objects may take to go to others when it leaves in order.
const DRAIN: Duration = Duration::from_secs(60);
/// The least that a node has.
const LEAST_BYTES: u64 = 2 << 20;

/// A node of this process.
pub(crate) struct Segment {
    pub(crate) name: String,
    node: Node,
}

impl Segment {
    /// Joins with this much memory; else the number of the error.
    pub(crate) fn join(control: &Control, bytes: u64) -> Result<Self, i64> {
        let config = NodeConfig {
            control: control.clone(),
            shards: Some(1),
            // It shares its cores with an inference engine.
            pacing: Some(Pacing::Park),
            ..NodeConfig::local("", bytes.max(LEAST_BYTES))
        };
        let late = format!("the node did not join within {} s", JOIN.as_secs());
        let started = within(JOIN, late, move || Node::start(&config).map_err(|error| error.to_string()));
        let node = started.map_err(|why| failed(NO_ROOM, format!("no segment of {bytes} bytes: {why}")))?;
        let name = node.addresses().first().map(ToString::to_string).unwrap_or_default();
        Ok(Self { name, node })
    }

    /// Leaves the cluster; with `grace`, its objects go to others before, as far as that time and their room allow.
    pub(crate) fn leave(self, grace: Duration) -> i64 {
        let drained = if grace.is_zero() { Ok(0) } else { self.node.drain(grace.min(DRAIN)) };
        match drained {
            Ok(_) => 0,
            Err(error) => failed(INTERNAL, error.to_string()),
        }
    }
}
