//! Checker of puts that become visible: a put makes an object at the owner of its slot, and replaces another one only
//! if the put allows it. The World inspects the store right before the event that commits, and the map that the shard
//! follows.

use std::collections::BTreeSet;

use kvplane_proto::Digest;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{CommitItem, Item, Kind, Operation, PutItem, PutOptions, decode_items};

use crate::world::World;
use crate::world::check::observe::Room;
use crate::world::check::{CheckResult, Rule, broken};
use crate::world::scenario::Mischief;

impl World {
    /// Records, before reservations are committed, the objects that the shard has already.
    pub(crate) fn look_before_commits(&mut self, index: u32, header: &Header, body: &[u8]) {
        if header.kind != Kind::Request(Operation::Commit) {
            return;
        }
        let Some(connection) = self.connections.get(&index) else { return };
        let items = decode_items::<CommitItem>(body, header.items).into_iter().flatten();
        let rooms = items.filter_map(|item| connection.held.room(item.reservation));
        let digests: Vec<Digest> = rooms.map(|room| room.digest).collect();
        self.look_before(index, &digests);
    }

    /// Records, before the payload of a put is complete, if the shard has the object already.
    pub(crate) fn look_before_put(&mut self, index: u32) {
        let digest = self.connections.get(&index).and_then(|connection| connection.held.put_digest());
        self.look_before(index, digest.as_slice());
    }

    fn look_before(&mut self, index: u32, digests: &[Digest]) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let store = self.incarnations[connection.incarnation].service.store();
        let there = |digest: &&Digest| store.peek(**digest).is_some();
        connection.held.there = digests.iter().filter(there).copied().collect::<BTreeSet<Digest>>();
    }

    /// Checks a put that became visible as this version.
    pub(crate) fn check_made(&mut self, index: u32, room: &Room, version: u64) -> CheckResult {
        let Some(connection) = self.connections.get_mut(&index) else { return Ok(()) };
        let incarnation = connection.incarnation;
        // A second put of the same frame finds the object.
        let first = connection.held.there.insert(room.digest);
        if !first && !room.replace {
            let what = format!("version {version} replaced an object without the option to replace: {room:?}");
            return Err(broken(Rule::Commit, what));
        }
        let (epoch, slot) = (self.incarnations[incarnation].epoch, room.digest.slot());
        let owner = self.owners.get(&epoch).and_then(|owners| owners.owner(slot));
        if owner == Some(self.key_of(incarnation)) {
            return Ok(());
        }
        let what = format!(
            "incarnation {incarnation} committed version {version} of {slot:?}, which {owner:?} owns at epoch {epoch}"
        );
        Err(broken(Rule::Commit, what))
    }

    /// [`Mischief::ReplaceAlways`]: the body of puts that all replace existing objects.
    pub(crate) fn forge_replace(&self, header: &Header, body: &[u8]) -> Option<Vec<u8>> {
        let puts = matches!(header.kind, Kind::Request(Operation::Put | Operation::Reserve));
        if !puts || !self.scenario.has(Mischief::ReplaceAlways) {
            return None;
        }
        let (records, names) = body.split_at_checked(header.items as usize * PutItem::BYTES)?;
        let mut forged = Vec::with_capacity(body.len());
        for item in decode_items::<PutItem>(records, header.items)? {
            let options = PutOptions { replace: true, ..item.options() };
            item.with_options(&options).encode(&mut forged);
        }
        forged.extend_from_slice(names);
        Some(forged)
    }
}
