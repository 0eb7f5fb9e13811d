//! Effects of the call in progress: durable changes, lost members, and whether a new map is published.

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
    /// Ended incarnations: their segments end with them.
    ended: Vec<NodeIncarnation>,
    map_changed: bool,
    outputs: VecDeque<Output>,
}

impl Effects {
    /// Notes that a record is to be made durable.
    pub(crate) fn put(&mut self, record: Record) {
        self.changes.push(Change::Put(record));
    }

    /// Notes that the record under a key is to be removed.
    pub(crate) fn remove(&mut self, key: RecordKey) {
        self.changes.push(Change::Remove(key));
    }

    /// Notes that a member is lost: its silence or its ports prove that it is dead.
    pub(super) fn lose(&mut self, lost: NodeIncarnation) {
        self.lost.push(lost);
    }

    /// Notes that an incarnation has ended.
    pub(super) fn end(&mut self, ended: NodeIncarnation) {
        self.ended.push(ended);
    }

    /// Takes the incarnations that have ended since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<NodeIncarnation> {
        std::mem::take(&mut self.ended)
    }

    /// Notes that the map may have changed, if `changes` is true.
    pub(crate) fn change_map(&mut self, changes: bool) {
        self.map_changed |= changes;
    }

    /// Returns true if the map may differ from the newest one.
    pub(crate) const fn map_changed(&self) -> bool {
        self.map_changed
    }

    pub(super) fn take_map_changed(&mut self) -> bool {
        std::mem::take(&mut self.map_changed)
    }

    /// Takes the durable changes so far, for an output of their own.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Appends an output to those that the driver has not taken.
    pub(crate) fn emit(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Ends a call: the driver persists the changes, then reports the lost members, then publishes the map.
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

    /// Takes the next output.
    pub(crate) fn take_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the outputs that the driver has not taken.
    pub(crate) fn outputs(&self) -> &VecDeque<Output> {
        &self.outputs
    }
}
