//! Effects of the call in progress: durable changes, members that are lost, and whether a new map is published.

use std::collections::VecDeque;

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::ClusterMap;

use crate::message::{Change, Output};
use crate::record::{Record, RecordKey};

/// An incarnation of a node.
pub(crate) type NodeIncarnation = (NodeId, Incarnation);

/// Effects of a call, and the outputs that the driver has not taken yet.
#[derive(Default)]
pub(crate) struct Effects {
    /// Durable changes, in order.
    changes: Vec<Change>,
    lost: Vec<NodeIncarnation>,
    /// Incarnations that are over: what they served is gone with them.
    ended: Vec<NodeIncarnation>,
    map_changed: bool,
    outputs: VecDeque<Output>,
}

impl Effects {
    /// A record is to be durable.
    pub(crate) fn put(&mut self, record: Record) {
        self.changes.push(Change::Put(record));
    }

    /// Notes that the record under a key is to be removed.
    pub(crate) fn remove(&mut self, key: RecordKey) {
        self.changes.push(Change::Remove(key));
    }

    /// A member was silent beyond its deadline.
    pub(super) fn lose(&mut self, lost: NodeIncarnation) {
        self.lost.push(lost);
    }

    /// An incarnation is over.
    pub(super) fn end(&mut self, ended: NodeIncarnation) {
        self.ended.push(ended);
    }

    /// Incarnations that are over, since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<NodeIncarnation> {
        std::mem::take(&mut self.ended)
    }

    /// The map may be another where `changes` is true.
    pub(crate) fn change_map(&mut self, changes: bool) {
        self.map_changed |= changes;
    }

    /// True when the map may differ from the newest one.
    pub(crate) const fn map_changed(&self) -> bool {
        self.map_changed
    }

    pub(super) fn take_map_changed(&mut self) -> bool {
        std::mem::take(&mut self.map_changed)
    }

    /// Durable changes so far, which no other output takes.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The driver is to do this after what it is to do already.
    pub(crate) fn emit(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Ends a call: the driver makes changes durable, then tells of those who are lost, then publishes the map.
    pub(super) fn flush(&mut self, map: Option<ClusterMap>) {
        if !self.changes.is_empty() {
            let changes = self.take_changes();
            self.emit(Output::Persist(changes));
        }
        for (node, incarnation) in std::mem::take(&mut self.lost) {
            self.emit(Output::MemberLost { node, incarnation });
        }
        if let Some(map) = map {
            self.emit(Output::MapChanged(map));
        }
    }

    /// The next output that the driver has not taken.
    pub(crate) fn take_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Outputs that the driver has not taken.
    pub(crate) fn outputs(&self) -> &VecDeque<Output> {
        &self.outputs
    }
}
