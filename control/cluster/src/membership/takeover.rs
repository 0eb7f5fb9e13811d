//! Start of a membership from known members: from stored records, or from an adopted map.

use kvplane_proto::ids::Epoch;
use kvplane_proto::map::{ClusterMap, MapError};

use super::members::Row;
use super::{Joiner, Membership};
use crate::message::Output;
use crate::record::{Devices, Header, MemberRecord, Record};
use crate::state::MemberState;

impl Membership {
    /// Restores a node, the layout or devices from a record. Silence of a node counts from `graced_ns` on.
    pub(crate) fn restore(&mut self, record: Record, graced_ns: u64) {
        match record {
            Record::Member(MemberRecord { member, state, ended, capacity_bytes, version }) => {
                let state = if state == MemberState::Suspect { MemberState::Active } else { state };
                let row = Row::new(member, state, self.now_ns);
                self.members.insert(Row { capacity_bytes, version, ended, heard_ns: graced_ns, heard: false, ..row });
            }
            Record::Layout(layout) => self.maps.restore_layout(layout),
            Record::Devices(said) => self.devices.insert(said),
            Record::Header(_) | Record::Segment(_) | Record::Tenant(_) | Record::TenantSsd(..) => {}
            Record::World(_) | Record::Conductor(_) => {}
        }
    }

    /// Resumes from the restored records, by the header if there is one.
    pub(crate) fn resume(&mut self, header: Option<&Header>) -> Result<(), MapError> {
        match header {
            None => self.effects.put(self.maps.header(&self.config)),
            Some(header) => self.effects.change_map(self.maps.restore_header(header, self.config.replicas)),
        }
        self.members.forget_longest_ended(self.config.limits.ended_incarnations, &mut self.devices, &mut self.effects);
        self.take_over_map();
        self.maps.validate()
    }

    /// Inserts a member of a map that is adopted. A member that has not offered a map has the usual grace.
    pub(crate) fn adopt_member(&mut self, joiner: Joiner, heard: bool, devices: Option<(u128, Epoch)>) {
        let Joiner { member, capacity_bytes, version } = joiner;
        let (node, incarnation) = (member.node, member.incarnation);
        if let Some((devices, since)) = devices {
            let said = Devices { node, incarnation, devices, since };
            self.devices.insert(said);
            self.effects.put(Record::Devices(said));
        }
        let grace_ns = if heard { 0 } else { self.config.restart_grace_ns };
        let heard_ns = self.now_ns.saturating_add(grace_ns);
        let row = Row::new(member, MemberState::Active, self.now_ns);
        self.members.insert(Row { capacity_bytes, version, heard_ns, heard, ..row });
    }

    /// Adopts the map of a lost state, after its members were adopted.
    pub(crate) fn adopt_map(&mut self, state: u64, map: &ClusterMap) {
        self.maps.adopt(map);
        self.effects.change_map(map.replicas != self.config.replicas);
        self.effects.put(Record::Layout(self.maps.layout().clone()));
        self.take_over_map();
        self.effects.put(self.maps.header(&self.config));
        self.members.iter().for_each(|row| self.effects.put(row.record()));
        let changes = self.effects.take_changes();
        self.effects.emit(Output::Adopt { state, changes });
        self.effects.emit(Output::MapChanged(self.maps.map().clone()));
        self.counters.adoptions += 1;
    }

    /// Gives members the shares of the restored or adopted map.
    fn take_over_map(&mut self) {
        self.shares.restore(&mut self.members, &self.maps);
        self.shares.moves_began(self.now_ns, &self.config);
        self.maps.restore_members(self.members.of_map());
        // Nothing was restored, or not of these members: the layout before is unknown.
        if !self.effects.map_changed() && self.maps.note_layout(&[]) {
            self.shares.moves_began(self.now_ns, &self.config);
            self.effects.put(Record::Layout(self.maps.layout().clone()));
        }
    }
}
