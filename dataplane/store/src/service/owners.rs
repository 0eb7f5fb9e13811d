//! Slots change hands: a map gives slots to this shard and takes others, and each component of the store acts on it.

use kvplane_proto::Digest;
use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, SLOTS, Slot};
use kvplane_proto::map::SlotOwners;

use super::Service;
use super::types::{CloseReason, MapStanding};

impl Service {
    /// Serves these slots from now on, by a map of which nothing else is known. See [`Self::own`].
    pub fn set_owned(&mut self, epoch: Epoch, owned: impl Fn(u16) -> bool) {
        self.own(epoch, MapStanding { state: 0, since: epoch, kept: Epoch(0) }, owned);
    }

    /// Serves these slots from now on; those that are new, with a tier, as soon as that is written down. Objects of
    /// slots that left are removed: if the slot comes back later, what was here may be older than what was written
    /// elsewhere meanwhile.
    pub fn own(&mut self, epoch: Epoch, standing: MapStanding, owned: impl Fn(u16) -> bool) {
        self.change_owners(epoch, standing, &owned, None);
    }

    /// Serves the slots that a map of this state of the control plane gives to this shard. As [`Self::own`], but what
    /// moved goes along: objects of slots that left stay for their new owners to fetch, and what was in slots that came
    /// is fetched from their former ones: see [`Self::poll_fetch`].
    pub fn follow(&mut self, state: u64, owners: &SlotOwners) {
        let me = self.ownership.key();
        let standing = MapStanding { state, since: owners.since, kept: owners.kept };
        let owned = |slot| owners.owner(Slot(slot)) == Some(me);
        self.change_owners(owners.epoch, standing, &owned, Some(owners));
        if self.sessions.needs_tickets() {
            self.ownership.note_incarnations(owners);
            self.sessions.end_former_incarnations(&mut self.answers.outputs, &self.ownership);
        }
    }

    fn change_owners(
        &mut self,
        epoch: Epoch,
        standing: MapStanding,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let heard = self.heard_epoch();
        if epoch < heard {
            return;
        }
        self.restore_owned(epoch, standing);
        // In an epoch that was missed, a slot may have been another's and come back: nothing from before it is to be
        // trusted, unless no slot has changed hands since, or only once, and in the way that the map tells.
        let told = owners.is_some_and(|owners| owners.from <= heard);
        let missed = heard != Epoch(0) && epoch.0 > heard.0 + 1 && standing.since > heard && !told;
        if let (true, Some(store)) = (missed, &mut self.store) {
            self.counters.dropped_objects += store.remove_all();
        }
        self.change_copies(epoch, heard, missed, owners);
        let owners_kept = owners.filter(|_| !missed);
        // One that has nothing any more was away, or its node is: what an SSD has is kept to be compared.
        let idle = !(0..SLOTS as u16).any(owned);
        let mut lost = self.end_exports(owners_kept);
        // A slot that goes on before it is served is lost like one that was: an SSD may have its objects.
        let pending = self.pending_slots();
        for slot in 0..SLOTS {
            let at = Slot(slot as u16);
            if (self.ownership.owned().has(at) || pending.has(at)) && (missed || !owned(slot as u16)) {
                lost = true;
                let kept = self.ownership.close(at) || self.is_doubted(at);
                self.lose_slot(slot, kept && (missed || idle), owners_kept);
            }
        }
        if let (true, false, Some(store)) = (lost, missed, &mut self.store) {
            let (ownership, exports) = (&self.ownership, &self.moves.exports);
            let copies = &self.copies;
            let kept = |digest: Digest| ownership.owns(digest) || exports.has(digest) || copies.keeps(digest.slot());
            self.counters.dropped_objects += store.retain(kept);
        }
        if lost {
            self.refuse_void_puts();
            self.end_void_drafts();
        }
        self.change_imports(heard, missed, owned, owners);
        self.serve_owned(epoch, &owned);
    }

    /// Starts a new incarnation of the shard: its former one was declared over, so its objects may be older than what
    /// others were given meanwhile. Those in memory are dropped, those on an SSD are kept to be compared, every
    /// connection is closed, and nothing is owned until the next [`Self::set_owned`].
    pub fn begin_incarnation(&mut self, incarnation: Incarnation) {
        self.ownership.begin_incarnation(incarnation);
        let kept = self.doubt_owned();
        self.forget_wanted();
        if kept {
            self.counters.dropped_objects += self.store.as_mut().map_or(0, crate::Store::remove_all);
            self.refuse_void_puts();
            self.end_void_drafts();
        }
        self.set_owned(self.ownership.epoch(), |_| false);
        self.ownership.forget_epoch();
        for peer in self.sessions.select(|_| true) {
            self.sessions.close(&mut self.answers.outputs, peer, CloseReason::Refused(Status::WrongOwner));
        }
    }
}
