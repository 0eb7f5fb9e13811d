//! Local objects of a shard: in memory and, where there is one, on the SSD.
//!
//! A [`LocalStore`] joins both tiers: existence and tenants of objects, and the checks of puts and gets. It knows
//! nothing of other shards: migration and replication belong to the components above.

use std::collections::BTreeMap;

use kvplane_proto::digest::tenant_number;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::map::SlotOwners;
use kvplane_proto::message::{ObjectName, PutAck, PutItem};
use kvplane_proto::{Digest, Status};
use kvplane_tier::{RecordView, SlotSet, Tier};

use super::device_pool::DevicePool;
use super::kept_memory::KeptMemory;
use super::shard::Shard;
use super::shard::context::RequestContext;
use super::shard::deferrals::DeferredItem;
use super::shard::stream_read::Reader;
use super::sharing::{SharedRemoval, Sharing};
use super::tiering::reconciliation::changes::Changes;
use super::tiering::reconciliation::compare;
use super::tiering::reconciliation::verdict::SlotJudge;
use super::tiering::{
    Demotion, MoveProgress, ObjectTenant, RemovalCause, SlotSources, Ssd, TierPolicy, Tiering, may_put_without_ssd,
    wanted_until_ns,
};
use super::types::{CommittedObject, Identity, MapStanding, reserve_status};
use crate::ReserveError;
use crate::store::Store;

/// Shard and its tier.
pub(super) struct LocalStore {
    pub(super) shard: Shard,
    pub(super) tiering: Option<Box<Tiering>>,
    pub(super) device: Option<Box<DevicePool>>,
    pub(super) sharing: Option<Box<Sharing>>,
    /// Memory that outlives the process.
    pub(super) kept: Option<Box<KeptMemory>>,
}

/// Conditions on the SSD and on the shared tier that the reply of a put waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SsdWaits {
    /// The object is written.
    pub(super) write: bool,
    /// The tombstone of the replaced object is written.
    pub(super) removal: bool,
    /// The removal of the replaced object is in the log of the shared tier.
    pub(super) shared_removal: bool,
}

impl LocalStore {
    pub(super) fn new(identity: Identity, store: Store) -> Self {
        let has_device_pool = store.config().device_pool_bytes > 0;
        let device = has_device_pool.then(Box::<DevicePool>::default);
        Self { shard: Shard::new(identity, store), tiering: None, device, sharing: None, kept: None }
    }

    /// Attaches a tier.
    ///
    /// # Panics
    /// If the store has no pool, or units that do not suit direct I/O.
    pub(super) fn attach(&mut self, tier: Tier, policy: TierPolicy) {
        assert!(self.shard.store.config().has_pool(), "a tier belongs to a store");
        self.tiering = Some(Box::new(Tiering::new(tier, policy, self.shard.store.config())));
        self.shard.tenants.has_ssd = true;
        self.shard.store.objects_mut().detached_mut().keep();
    }

    pub(super) fn ssd(&self) -> Option<&Ssd> {
        Some(&self.tiering.as_ref()?.ssd)
    }

    /// Returns the record of an object on the SSD, if it may be read.
    pub(super) fn on_ssd(&self, digest: Digest) -> Option<RecordView> {
        self.ssd()?.locate(digest)
    }

    /// Returns true if the SSD accepts an object of this length.
    pub(super) fn ssd_fits(&self, bytes: u64) -> bool {
        self.ssd().is_some_and(|ssd| ssd.fits(bytes))
    }

    /// Returns true while the SSD is in recovery after a start.
    pub(super) fn is_recovering(&self) -> bool {
        self.ssd().is_some_and(Ssd::is_recovering)
    }

    /// Returns the length of an object, and whether it is a stripe head.
    pub(super) fn size_of(&self, digest: Digest) -> Option<(u64, bool)> {
        let on_ssd = || self.on_ssd(digest).map(|record| (record.payload_bytes.into(), record.names_parts));
        let in_shared_tier = || {
            self.sharing
                .as_ref()
                .and_then(|sharing| sharing.locate(digest))
                .map(|view| (view.bytes.into(), view.is_head))
        };
        let in_memory = self.shard.peek(digest).map(|object| (object.extent.bytes, object.is_head));
        in_memory.or_else(on_ssd).or_else(in_shared_tier)
    }

    /// Returns the tenant of an object, as far as it is known.
    pub(super) fn tenant_of(&self, digest: Digest) -> ObjectTenant {
        let here = match &self.tiering {
            Some(tiering) => tiering.promotion.tenant_of(&tiering.ssd, &self.shard, digest),
            // Without an SSD, an object without a tail never had one, and was charged as its put stated.
            None => match self.shard.peek(digest) {
                Some(object) => ObjectTenant::Known(Some(object.tenant)),
                None => ObjectTenant::NotHere,
            },
        };
        match self.sharing.as_ref().and_then(|sharing| sharing.locate(digest)).filter(|_| here == ObjectTenant::NotHere)
        {
            Some(view) => ObjectTenant::Known(Some(view.tenant)),
            None => here,
        }
    }

    /// Returns true if an object belongs to another tenant than the one of the peer's ticket. To such a peer the object
    /// does not exist; and objects that other tenants have put under a digest do not block its puts.
    pub(super) fn is_foreign(&mut self, context: &RequestContext, digest: Digest) -> bool {
        let Some(own) = context.tenant else { return false };
        let foreign = self.tenant_of(digest).known().is_some_and(|tenant| tenant != own);
        self.shard.counters.unauthorized += u64::from(foreign);
        foreign
    }

    /// Returns true if an object is hidden from the peer: its ticket is for one tenant, and the object's tenant is not
    /// known here.
    pub(super) fn is_hidden(&self, context: &RequestContext, digest: Digest) -> bool {
        context.tenant.is_some() && self.tenant_of(digest).known().is_none()
    }

    /// Returns true if an object is hidden from the peer, or belongs to another tenant.
    pub(super) fn is_anothers(&mut self, context: &RequestContext, digest: Digest) -> bool {
        self.is_hidden(context, digest) || self.is_foreign(context, digest)
    }

    /// Checks that this shard answers for an object, and that it does not belong to another tenant than the peer's.
    pub(super) fn may_ask(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        self.shard.answers_for(context, digest)?;
        if self.is_foreign(context, digest) { Err(Status::Unauthorized) } else { Ok(()) }
    }

    /// Returns true if a put may replace an existing object. A peer whose ticket is for one tenant owns the digests of
    /// its tenant's names: objects that others have put there are replaced. Under other digests it may only put new
    /// objects, because the tenant of the existing object may not be known (yet).
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

    /// Answers a get that waited for an object with the object, if it is in memory now.
    pub(super) fn serve(&mut self, digest: Digest, reader: Reader) {
        let Self { shard, tiering, .. } = self;
        shard.serve(digest, reader, |shard| match tiering {
            Some(tiering) => tiering.promotion.tenant_of(&tiering.ssd, shard, digest).known(),
            None => shard.peek(digest).map(|object| object.tenant),
        });
    }

    /// Begins to read an object from the SSD, or joins a read in flight.
    pub(super) fn read(&mut self, view: &RecordView, reader: Reader) -> Result<(), Status> {
        if let Some(sharing) = &mut self.sharing {
            sharing.note_get(view.digest, self.shard.now_ns);
        }
        let Some(tiering) = &mut self.tiering else { return Err(Status::NotFound) };
        tiering.promotion.read(&mut tiering.ssd, &mut self.shard, view, reader)
    }

    /// Requests a read of the tail of an object on the SSD, to learn its tenant.
    pub(super) fn want_tenant(&mut self, digest: Digest) {
        if let Some(tiering) = &mut self.tiering {
            tiering.promotion.want_tenant(digest);
        }
    }

    /// Returns the time until which the objects of an exists request are to be prefetched; `None` if not.
    pub(super) fn wants_ahead(&self, header: &Header) -> Option<u64> {
        wanted_until_ns(&self.ssd()?.policy, header, self.shard.now_ns)
    }

    /// Begins to prefetch an object, if there is room, or if it is `needed`.
    pub(super) fn prefetch(&mut self, view: &RecordView, until_ns: u64, needed: bool) {
        if let Some(tiering) = &mut self.tiering {
            tiering.promotion.prefetch(&mut tiering.ssd, &mut self.shard, view, until_ns, needed);
        }
    }

    /// Counts a get of an object in memory, which may now qualify to be written to the SSD, or to be uploaded.
    pub(super) fn note_get(&mut self, digest: Digest) {
        if let Some(sharing) = &mut self.sharing {
            sharing.note_get(digest, self.shard.now_ns);
        }
        let Some(tiering) = &mut self.tiering else { return };
        tiering.promotion.use_prefetched(&mut tiering.ssd, digest);
        tiering.demotion.note_get(&mut tiering.ssd, &mut self.shard, digest);
    }

    /// Checks that the SSD, where there is one, accepts an object that is put and the tombstone of the one that it
    /// replaces.
    pub(super) fn may_put(
        &mut self,
        digest: Digest,
        bytes: u64,
        asked: Option<PutAck>,
        replace: bool,
        is_session: bool,
        account: u16,
    ) -> Result<(), Status> {
        if let Some(sharing) = &self.sharing {
            sharing.may_remove(1)?;
        }
        if let Some(ssd) = self.ssd() {
            ssd.may_replace(digest, replace)?;
            Demotion::check_length(ssd, bytes, asked, is_session)?;
        }
        self.may_keep(bytes, asked, account)
    }

    /// Checks that an object of this length and account can be accepted now: backpressure while the SSD cannot keep up.
    pub(super) fn may_keep(&mut self, bytes: u64, asked: Option<PutAck>, account: u16) -> Result<(), Status> {
        match &mut self.tiering {
            Some(tiering) => {
                let weight = tiering.ssd.weight_of(self.shard.store.tenants().number(account));
                let now_ns = self.shard.now_ns;
                tiering.demotion.may_put(&tiering.ssd, bytes, asked, account, weight, now_ns)
            }
            None => may_put_without_ssd(asked),
        }
    }

    /// Returns the status of a put that found no memory, or exceeded its account's quota. Objects that wait for the SSD
    /// take memory for a while only: the put is answered as busy then.
    pub(super) fn no_room(&mut self, error: ReserveError, account: u16) -> Status {
        let passes = self.tiering.as_mut().is_some_and(|tiering| tiering.demotion.makes_room(error, account));
        if passes { Status::Busy } else { reserve_status(error) }
    }

    /// Returns the acknowledgement level of a put of a stripe or stripe head that names none.
    pub(super) fn ack_of_parts(&self) -> Option<PutAck> {
        Demotion::ack_of_parts(self.ssd()?)
    }

    /// Returns the status of a put that would wait for the SSD, if the object exists already; `None` if it is on the
    /// SSD, or the put does not wait.
    pub(super) fn awaits_ssd(&mut self, digest: Digest, asked: Option<PutAck>) -> Option<Status> {
        let tiering = self.tiering.as_mut()?;
        tiering.demotion.awaits_ssd(&mut tiering.ssd, &mut self.shard, digest, asked)
    }

    /// Returns the conditions on the SSD that the reply of a put waits for. To be called once for each put, as it
    /// counts the put.
    pub(super) fn waits_of(&mut self, made: &CommittedObject) -> SsdWaits {
        let shared_removal = self.sharing.as_ref().is_some_and(|sharing| sharing.must_remove(made.digest));
        let Some(tiering) = &mut self.tiering else { return SsdWaits { shared_removal, ..SsdWaits::default() } };
        let ssd = &mut tiering.ssd;
        let removal = ssd.must_remove(made.digest, made.replaces);
        SsdWaits { write: Demotion::awaits(ssd, made), removal, shared_removal }
    }

    /// Acts on a put: the records that it replaces get tombstones on the SSD, and then it is written there as the
    /// policy says; likewise in the shared tier. `told` is settled once for each condition that is waited for.
    pub(super) fn keep(&mut self, made: &CommittedObject, waits: SsdWaits, told: Option<DeferredItem>) {
        if let Some(sharing) = &mut self.sharing {
            if waits.shared_removal {
                sharing.remove(made.digest, SharedRemoval::Replaced { version: made.version, told });
            }
            sharing.note_put(made.digest, self.shard.now_ns);
        }
        let Some(tiering) = &mut self.tiering else { return };
        if waits.removal {
            tiering.promotion.forget_prefetched(made.digest);
            let cause = RemovalCause::Replaced { digest: made.digest, version: made.version, told };
            tiering.ssd.queue_removal(made.digest, cause);
        }
        tiering.demotion.keep(&mut tiering.ssd, &mut self.shard, made, told.filter(|_| waits.write));
    }

    /// Returns the status of a repeated commit of a version that was committed before.
    pub(super) fn kept(&self, digest: Digest, version: Version) -> Status {
        if self.sharing.as_ref().is_some_and(|sharing| sharing.is_removing(digest)) {
            return Status::Busy;
        }
        self.tiering
            .as_ref()
            .map_or(Status::Ok, |tiering| tiering.demotion.kept(&tiering.ssd, &self.shard, digest, version))
    }

    /// Writes the record on the SSD of an object in memory again, if its replication flag is outdated.
    pub(super) fn write_promise(&mut self, digest: Digest) {
        if let Some(tiering) = &mut self.tiering {
            tiering.demotion.write_promise(&mut tiering.ssd, &mut self.shard, digest);
        }
    }

    /// Writes an object in memory that was migrated to this shard to the SSD as soon as possible.
    pub(super) fn write_moved(&mut self, digest: Digest) -> MoveProgress {
        let Some(tiering) = &mut self.tiering else { return MoveProgress::Kept };
        tiering.demotion.write_moved(&mut tiering.ssd, &mut self.shard, digest)
    }

    /// Refuses the puts whose slot was lost while they were being written.
    pub(super) fn refuse_void_puts(&mut self) {
        if let Some(tiering) = &mut self.tiering {
            tiering.demotion.refuse_void_puts(&mut self.shard);
        }
    }

    /// Returns the epoch of the newest map received.
    pub(super) fn heard_epoch(&self) -> Epoch {
        let waiting = self.tiering.as_ref().and_then(|tiering| tiering.reconciliation.heard_epoch());
        waiting.unwrap_or(self.shard.ownership.epoch())
    }

    /// Returns the slots of the newest map received that are not served yet.
    pub(super) fn pending_slots(&self) -> SlotSet {
        let served = self.shard.ownership.owned();
        self.tiering.as_ref().map_or_else(SlotSet::none, |tiering| tiering.reconciliation.pending_slots(served))
    }

    /// Decides, by the first map, which records on the SSD can be trusted.
    pub(super) fn restore(&mut self, epoch: Epoch, standing: MapStanding) {
        if let Some(kept) = &mut self.kept {
            kept.heard(epoch, standing);
        }
        if let Some(tiering) = &mut self.tiering {
            tiering.reconciliation.restore(&mut tiering.ssd, &mut self.shard, epoch, standing);
        }
    }

    /// Serves the slots of a map: at once, or with an SSD when the new ones are durable there.
    pub(super) fn serve_slots(&mut self, epoch: Epoch, owned: &dyn Fn(u16) -> bool) {
        let mut slots = SlotSet::none();
        (0..SLOTS as u16).filter(|slot| owned(*slot)).for_each(|slot| slots.insert(Slot(slot)));
        match &mut self.tiering {
            Some(tiering) => tiering.reconciliation.serve(&tiering.ssd, &mut self.shard, epoch, slots),
            None => self.shard.serve_slots(epoch, &slots),
        }
    }

    /// Returns true if a slot is in doubt, or was until a map assigned it to this shard.
    pub(super) fn is_doubted(&self, slot: Slot) -> bool {
        self.ssd().is_some_and(|ssd| ssd.is_doubted(slot))
    }

    /// Returns true if records of served slots are hidden that reconciliation may yet make visible.
    pub(super) fn is_comparing(&self) -> bool {
        self.ssd().is_some_and(Ssd::is_comparing)
    }

    /// Ends a slot that belongs to another owner from now on: its records on the SSD are removed, or stay to be
    /// reconciled if `kept`.
    pub(super) fn lose_slot(&mut self, slot: Slot, kept: bool) {
        let Some(tiering) = &mut self.tiering else { return };
        if !(kept && tiering.reconciliation.doubt(&mut tiering.ssd, &self.shard, slot)) {
            tiering.ssd.lose_slot(slot);
        }
    }

    /// Ends an incarnation: the records on the SSD of its slots are in doubt, and slots that wait to be served are
    /// forgotten. Returns true if the SSD keeps anything.
    pub(super) fn end_incarnation(&mut self) -> bool {
        let Some(tiering) = &mut self.tiering else { return false };
        let kept = tiering.reconciliation.doubt_owned(&mut tiering.ssd, &mut self.shard);
        tiering.reconciliation.forget_wanted();
        kept
    }

    /// Decides about slots in doubt, and about the objects of a former process, after a map, when it is known which
    /// slots have former owners.
    pub(super) fn weigh_doubts(
        &mut self,
        sources: &SlotSources<'_>,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        if let Some(kept) = &mut self.kept
            && let Some((epoch, standing)) = kept.standing()
        {
            let judge = SlotJudge { me: self.shard.ownership.key(), epoch, standing, sources, owned, owners };
            kept.weigh(&mut self.shard, self.tiering.as_deref(), &judge);
        }
        if let Some(tiering) = &mut self.tiering {
            tiering.reconciliation.weigh(&mut tiering.ssd, &self.shard, sources, owned, owners);
        }
    }

    /// Reconciles these slots after their former owner has reported all changes that it knows of.
    pub(super) fn compare_slots(&mut self, slots: &[Slot], told: &BTreeMap<Slot, Changes>) {
        if let Some(tiering) = &mut self.tiering {
            compare(&mut tiering.ssd, &self.shard, slots, told);
        }
    }
}
