//! Objects that a shard has itself: in memory and, where there is one, on the SSD.
//!
//! A [`LocalStore`] says for both together what is there, whose it is, and what a put or a get of it meets. It knows
//! nothing of other shards: what comes from former owners, and replicas, are the business of the components above.

use std::collections::BTreeMap;

use kvplane_proto::digest::tenant_number;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::map::SlotOwners;
use kvplane_proto::message::{ObjectName, PutAck, PutItem};
use kvplane_proto::{Digest, Status};
use kvplane_tier::{RecordView, SlotSet, Tier};

use super::shard::Shard;
use super::shard::context::RequestContext;
use super::shard::deferrals::DeferredItem;
use super::shard::stream_read::Reader;
use super::tiering::reconciliation::changes::Changes;
use super::tiering::reconciliation::compare;
use super::tiering::{
    Demotion, MoveProgress, ObjectTenant, Promotion, SlotSources, Ssd, Strike, TierPolicy, Tiering, may_put_without_ssd,
};
use super::types::{CommittedObject, Identity, MapStanding, reserve_status};
use crate::store::Store;
use crate::{ReserveError, StoreConfig};

/// A shard, and the SSD under it.
pub(super) struct LocalStore {
    pub(super) shard: Shard,
    pub(super) tiering: Option<Box<Tiering>>,
}

/// What the answer of a put waits for on the SSD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SsdWaits {
    /// That the object is written.
    pub(super) write: bool,
    /// That what it replaces is struck out.
    pub(super) strike: bool,
}

impl LocalStore {
    pub(super) fn new(identity: Identity, store: Option<Store>) -> Self {
        Self { shard: Shard::new(identity, store), tiering: None }
    }

    /// Puts an SSD under the objects in memory.
    ///
    /// # Panics
    /// When there is no store, or one whose units do not suit direct I/O.
    pub(super) fn attach(&mut self, tier: Tier, policy: TierPolicy) {
        let store: &StoreConfig = self.shard.store.as_ref().expect("a tier is under a store").config();
        self.tiering = Some(Box::new(Tiering::new(tier, policy, store)));
        self.shard.tenants.has_ssd = true;
    }

    fn ssd(&self) -> Option<&Ssd> {
        Some(&self.tiering.as_ref()?.ssd)
    }

    /// What the SSD has of an object that may be given.
    pub(super) fn on_ssd(&self, digest: Digest) -> Option<RecordView> {
        self.ssd()?.locate(digest)
    }

    /// True where the SSD takes an object of so many bytes.
    pub(super) fn ssd_fits(&self, bytes: u64) -> bool {
        self.ssd().is_some_and(|ssd| ssd.fits(bytes))
    }

    /// True while the SSD still finds what it has, as after a start.
    pub(super) fn is_recovering(&self) -> bool {
        self.ssd().is_some_and(Ssd::is_recovering)
    }

    /// Bytes of an object, and whether it names the stripes of a larger one.
    pub(super) fn size_of(&self, digest: Digest) -> Option<(u64, bool)> {
        let on_ssd = || self.on_ssd(digest).map(|record| (record.payload_bytes.into(), record.names_parts));
        self.shard.peek(digest).map(|object| (object.extent.bytes, object.is_head)).or_else(on_ssd)
    }

    /// The tenant of an object, as far as it is known.
    pub(super) fn tenant_of(&self, digest: Digest) -> ObjectTenant {
        match &self.tiering {
            Some(tiering) => tiering.promotion.tenant_of(&tiering.ssd, &self.shard, digest),
            // Without an SSD, what has no tail never had one, and was charged as its put said.
            None => match self.shard.peek(digest) {
                Some(object) => ObjectTenant::Known(Some(object.tenant)),
                None => ObjectTenant::NotHere,
            },
        }
    }

    /// True for an object of another tenant than the peer's, whose ticket is for one only. It is none for the peer,
    /// who learns nothing of it; and what others have put under a digest stands in nobody's way.
    pub(super) fn is_foreign(&mut self, context: &RequestContext, digest: Digest) -> bool {
        let Some(own) = context.tenant else { return false };
        let foreign = self.tenant_of(digest).known().is_some_and(|tenant| tenant != own);
        self.shard.counters.unauthorized += u64::from(foreign);
        foreign
    }

    /// True for an object that is hidden from the peer: its ticket is for one tenant, and the object's is not known
    /// here.
    pub(super) fn is_hidden(&self, context: &RequestContext, digest: Digest) -> bool {
        context.tenant.is_some() && self.tenant_of(digest).known().is_none()
    }

    /// True for an object that is hidden from the peer, or another tenant's.
    pub(super) fn is_anothers(&mut self, context: &RequestContext, digest: Digest) -> bool {
        self.is_hidden(context, digest) || self.is_foreign(context, digest)
    }

    /// A check that this shard answers for an object, and that it is not another tenant's than the peer's.
    pub(super) fn may_ask(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        self.shard.answers_for(context, digest)?;
        if self.is_foreign(context, digest) { Err(Status::Unauthorized) } else { Ok(()) }
    }

    /// True where a put replaces the object that is there. A peer whose ticket is for one tenant owns the digests that
    /// names of its tenant have: what another one has put there gives way. Under other digests it puts what is new
    /// only, as the tenant of the object there may not be known, or not yet.
    pub(super) fn may_replace(
        &mut self,
        context: &RequestContext,
        item: &PutItem,
        name: &ObjectName<'_>,
    ) -> Result<bool, Status> {
        let replace = item.options().replace;
        let Some(own) = context.tenant else { return Ok(replace) };
        let foreign = self.is_foreign(context, item.digest);
        if item.key_bytes > 0 && tenant_number(name.tenant) == own {
            return Ok(replace || foreign);
        }
        self.shard.counters.unauthorized += u64::from(replace);
        if replace || foreign { Err(Status::Unauthorized) } else { Ok(false) }
    }

    /// Gives an object that is in memory now, if it is, to a get that waited for it.
    pub(super) fn serve(&mut self, digest: Digest, reader: Reader) {
        let Self { shard, tiering } = self;
        shard.serve(digest, reader, |shard| match tiering {
            Some(tiering) => tiering.promotion.tenant_of(&tiering.ssd, shard, digest).known(),
            None => shard.peek(digest).map(|object| object.tenant),
        });
    }

    /// Begins to read an object from the SSD, or joins a read of it.
    pub(super) fn read(&mut self, view: &RecordView, reader: Reader) -> Result<(), Status> {
        let Some(tiering) = &mut self.tiering else { return Err(Status::NotFound) };
        tiering.promotion.read(&mut tiering.ssd, &mut self.shard, view, reader)
    }

    /// Has the tail of an object on the SSD read, to know its tenant.
    pub(super) fn want_tenant(&mut self, digest: Digest) {
        if let Some(tiering) = &mut self.tiering {
            tiering.promotion.want_tenant(digest);
        }
    }

    /// Until when the objects of an exists are wanted in memory; nothing where they are not.
    pub(super) fn wants_ahead(&self, header: &Header) -> Option<u64> {
        Promotion::wants_ahead(self.ssd()?, header, self.shard.now_ns)
    }

    /// Begins to prefetch an object, if there is room, or if it is `needed`.
    pub(super) fn prefetch(&mut self, view: &RecordView, until_ns: u64, needed: bool) {
        if let Some(tiering) = &mut self.tiering {
            tiering.promotion.prefetch(&mut tiering.ssd, &mut self.shard, view, until_ns, needed);
        }
    }

    /// An object in memory is read: by now it may be worth being written.
    pub(super) fn note_get(&mut self, digest: Digest) {
        let Some(tiering) = &mut self.tiering else { return };
        tiering.promotion.use_prefetched(&mut tiering.ssd, digest);
        tiering.demotion.note_get(&mut tiering.ssd, &mut self.shard, digest);
    }

    /// A check that the SSD, where there is one, takes what a put brings and what it replaces.
    pub(super) fn may_put(
        &mut self,
        digest: Digest,
        bytes: u64,
        asked: Option<PutAck>,
        replace: bool,
        is_session: bool,
    ) -> Result<(), Status> {
        if let Some(ssd) = self.ssd() {
            ssd.may_strike(digest, replace)?;
            Demotion::may_be_so_long(ssd, bytes, asked, is_session)?;
        }
        self.may_keep(bytes, asked)
    }

    /// A check that an object of so many bytes is to be taken up now, and does not come at a time when the SSD cannot
    /// keep up.
    pub(super) fn may_keep(&mut self, bytes: u64, asked: Option<PutAck>) -> Result<(), Status> {
        match &mut self.tiering {
            Some(tiering) => tiering.demotion.may_put(&tiering.ssd, bytes, asked),
            None => may_put_without_ssd(asked),
        }
    }

    /// The status of a put that found no room in memory, or none in what its account may take. Where objects wait for
    /// the SSD, they are in the way for a while only, and the put is to come again.
    pub(super) fn no_room(&mut self, error: ReserveError, account: u16) -> Status {
        let passes = self.tiering.as_mut().is_some_and(|tiering| tiering.demotion.makes_room(error, account));
        if passes { Status::Busy } else { reserve_status(error) }
    }

    /// What the put of a part of a longer object waits for where it asked for nothing.
    pub(super) fn ack_of_parts(&self) -> Option<PutAck> {
        Demotion::ack_of_parts(self.ssd()?)
    }

    /// The status of a put that would wait for the SSD, of an object that is there already; nothing where it is on the
    /// SSD, or the put does not wait.
    pub(super) fn awaits_ssd(&mut self, digest: Digest, asked: Option<PutAck>) -> Option<Status> {
        let tiering = self.tiering.as_mut()?;
        tiering.demotion.awaits_ssd(&mut tiering.ssd, &mut self.shard, digest, asked)
    }

    /// What the answer of a put waits for on the SSD. To be asked once: it counts that the object was put.
    pub(super) fn waits_of(&mut self, made: &CommittedObject) -> SsdWaits {
        let Some(tiering) = &mut self.tiering else { return SsdWaits::default() };
        let ssd = &mut tiering.ssd;
        SsdWaits { write: Demotion::awaits(ssd, made), strike: ssd.must_strike(made.digest, made.replaces) }
    }

    /// An object was put: what it replaces is struck out on the SSD, and then it goes there by the policy. `told` is
    /// settled with each that is waited for.
    pub(super) fn keep(&mut self, made: &CommittedObject, waits: SsdWaits, told: Option<DeferredItem>) {
        let Some(tiering) = &mut self.tiering else { return };
        if waits.strike {
            tiering.promotion.forget_prefetched(made.digest);
            let strike = Strike::Replaced { digest: made.digest, version: made.version, told };
            tiering.ssd.queue_removal(made.digest, strike);
        }
        tiering.demotion.keep(&mut tiering.ssd, &mut self.shard, made, told.filter(|_| waits.write));
    }

    /// The answer where it is asked again whether a version was made that was.
    pub(super) fn kept(&self, digest: Digest, version: Version) -> Status {
        self.tiering
            .as_ref()
            .map_or(Status::Ok, |tiering| tiering.demotion.kept(&tiering.ssd, &self.shard, digest, version))
    }

    /// The record on the SSD of an object in memory says whether it has two owners, or is written once more.
    pub(super) fn write_promise(&mut self, digest: Digest) {
        if let Some(tiering) = &mut self.tiering {
            tiering.demotion.write_promise(&mut tiering.ssd, &mut self.shard, digest);
        }
    }

    /// An object that is in memory has moved here: the SSD is to have it as soon as it may be.
    pub(super) fn write_moved(&mut self, digest: Digest) -> MoveProgress {
        let Some(tiering) = &mut self.tiering else { return MoveProgress::Kept };
        tiering.demotion.write_moved(&mut tiering.ssd, &mut self.shard, digest)
    }

    /// Puts whose slot has left while they were written are refused now.
    pub(super) fn refuse_void_puts(&mut self) {
        if let Some(tiering) = &mut self.tiering {
            tiering.demotion.refuse_void_puts(&mut self.shard);
        }
    }

    /// The newest map that was heard of.
    pub(super) fn heard_epoch(&self) -> Epoch {
        let waiting = self.tiering.as_ref().and_then(|tiering| tiering.reconciliation.heard_epoch());
        waiting.unwrap_or(self.shard.ownership.epoch())
    }

    /// Slots of the newest map that was heard of that are not served yet.
    pub(super) fn pending_slots(&self) -> SlotSet {
        let served = self.shard.ownership.owned();
        self.tiering.as_ref().map_or_else(SlotSet::none, |tiering| tiering.reconciliation.pending_slots(served))
    }

    /// What a first map lets be believed of what the SSD has.
    pub(super) fn restore(&mut self, epoch: Epoch, standing: MapStanding) {
        if let Some(tiering) = &mut self.tiering {
            tiering.reconciliation.restore(&mut tiering.ssd, &mut self.shard, epoch, standing);
        }
    }

    /// Serves the slots of a map: at once, or with an SSD when those that came are written down.
    pub(super) fn serve_slots(&mut self, epoch: Epoch, owned: &dyn Fn(u16) -> bool) {
        let mut slots = SlotSet::none();
        (0..SLOTS as u16).filter(|slot| owned(*slot)).for_each(|slot| slots.insert(Slot(slot)));
        match &mut self.tiering {
            Some(tiering) => tiering.reconciliation.serve(&tiering.ssd, &mut self.shard, epoch, slots),
            None => self.shard.serve_slots(epoch, &slots),
        }
    }

    /// True for a slot that is in doubt, or was until a map gave it to this shard.
    pub(super) fn is_doubted(&self, slot: Slot) -> bool {
        self.ssd().is_some_and(|ssd| ssd.is_doubted(slot))
    }

    /// True where anything of slots that are served is hidden that may yet be shown.
    pub(super) fn is_comparing(&self) -> bool {
        self.ssd().is_some_and(Ssd::is_comparing)
    }

    /// A slot is another's from now on: what the SSD has of it is removed, or stays to be compared, if it is to be
    /// `kept`.
    pub(super) fn lose_slot(&mut self, slot: Slot, kept: bool) {
        let Some(tiering) = &mut self.tiering else { return };
        if !(kept && tiering.reconciliation.doubt(&mut tiering.ssd, &self.shard, slot)) {
            tiering.ssd.lose_slot(slot);
        }
    }

    /// This incarnation is over: what the SSD has of the slots that it had is in doubt, and what waits to be served
    /// will not be. True where the SSD keeps something.
    pub(super) fn end_incarnation(&mut self) -> bool {
        let Some(tiering) = &mut self.tiering else { return false };
        let kept = tiering.reconciliation.doubt_owned(&mut tiering.ssd, &mut self.shard);
        tiering.reconciliation.forget_wanted();
        kept
    }

    /// A map came, and it is known which slots have former owners: what becomes of those in doubt.
    pub(super) fn weigh_doubts(
        &mut self,
        sources: &SlotSources<'_>,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        if let Some(tiering) = &mut self.tiering {
            tiering.reconciliation.weigh(&mut tiering.ssd, &self.shard, sources, owned, owners);
        }
    }

    /// The former owner of these slots has told all that it knows of changes there.
    pub(super) fn compare_slots(&mut self, slots: &[Slot], told: &BTreeMap<Slot, Changes>) {
        if let Some(tiering) = &mut self.tiering {
            compare(&mut tiering.ssd, &self.shard, slots, told);
        }
    }
}
