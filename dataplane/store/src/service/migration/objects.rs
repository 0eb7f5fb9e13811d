//! Import of one object: its reservation, its bytes, and the copy at its former owner until the object is on the SSD
//! here.

use kvplane_proto::message::{ObjectName, Part, PutAck, PutItem};
use kvplane_proto::{Digest, Status};

use super::Migration;
use super::imports::{Call, Object, Waiter};
use super::sources::ListedObject;
use crate::service::fetches::{Fetch, Want};
use crate::service::local::LocalStore;
use crate::service::shard::effects::Effect;
use crate::service::shard::tail::TailHead;
use crate::service::shared_objects::note_import;
use crate::service::tiering::MoveProgress;
use crate::service::types::{CommittedObject, Memory, MemoryExtent};
use crate::{CommitError, Copies, Replica, Reserve};

/// Outcome of an object's import.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// The object is here, or there is none to import.
    Settled,
    /// The source did not send it. The walk is to find it again.
    Failed,
    /// There was no memory for it at the moment, here or at its source. The walk is to find it again.
    Busy,
}

/// Applies the SSD's backpressure to imports: `Busy` while its backlog is full, or its tenant has its part of it.
fn may_move(local: &mut LocalStore, bytes: u64, tenant: u32) -> Result<(), Status> {
    let asked = local.tiering.is_some().then_some(PutAck::Buffered);
    let account = local.shard.store.tenants_mut().account_of_unconfigured(tenant);
    local.may_keep(bytes, asked, account)
}

impl Migration {
    /// Begins to fetch an object in the background.
    pub(super) fn next_object(&mut self, local: &mut LocalStore, source: u32) -> Option<Fetch> {
        let now_ns = local.shard.now_ns;
        loop {
            let imports = &mut self.imports;
            if !imports.pace.has_room() {
                return None;
            }
            let entry = imports.sources.get_mut(&source).filter(|source| source.retry_ns() <= now_ns)?;
            let listed = entry.queue.pop_front()?;
            let digest = listed.item.digest;
            if !imports.is_current(source, digest) || imports.objects.contains_key(&digest) {
                self.check_source(local, source);
                continue;
            }
            if local.on_ssd(digest).is_some() {
                imports.drop_there(source, digest);
                continue;
            }
            if may_move(local, listed.item.bytes, listed.item.options().tenant) == Err(Status::Busy) {
                // The SSD's backlog is full: the object stays queued, and the walk waits with it.
                imports.sources.get_mut(&source)?.queue.push_front(listed);
                return None;
            }
            if local.shard.store.exists(digest) {
                self.keep_moved(local, source, digest);
                continue;
            }
            imports.sources.get_mut(&source)?.open += 1;
            let object = Object { source, extent: None, waiters: Vec::new(), void: false, demanded: false };
            imports.objects.insert(digest, object);
            if let Some(fetch) = self.begin_object(local, &listed) {
                return Some(fetch);
            }
        }
    }

    /// Reserves memory for an object that was described, and returns the request for its bytes.
    pub(super) fn begin_object(&mut self, local: &mut LocalStore, listed: &ListedObject) -> Option<Fetch> {
        let (digest, bytes) = (listed.item.digest, listed.item.bytes);
        let name = ObjectName { tenant: &listed.tenant, key: &listed.key };
        let plain = PutItem::plain(digest, bytes).with_options(&listed.item.options());
        let key_bytes = listed.item.key_bytes;
        let put = PutItem { key_bytes, tenant_bytes: listed.item.tenant_bytes, ..plain };
        let tail = TailHead::of(&put).filter(|_| key_bytes == 0 || name.digest() == digest);
        let tail_bytes = tail.map_or(0, |tail| tail.tail_bytes() as u32);
        let options = put.options();
        let mut keep = local.shard.keep_again(&options, options.tenant);
        if options.hard_pin && local.ssd_fits(bytes) {
            // An object on the SSD need not be pinned in memory beyond the share that may be pinned.
            let store = &local.shard.store;
            keep.hard_pin = store.tenants().pins_allow(store.pool().granules_of(bytes));
        }
        let head = options.part == Part::Head;
        let replica = if options.replicas > 1 { Replica::First } else { Replica::None };
        let wanted = Reserve {
            tail_bytes,
            has_tail: tail.is_some(),
            keep,
            head,
            replica,
            copies: Copies::of_put(options.replicas, 0),
            moves: true,
            ..Reserve::plain(digest, bytes)
        };
        let reserved = may_move(local, bytes, options.tenant).map(|()| local.shard.store.reserve_for(&wanted));
        // Objects that wait for the SSD take memory for a while only: this import is not to be given up for that.
        let reserved = reserved.and_then(|reserved| reserved.map_err(|error| local.no_room(error, keep.account)));
        let (reservation, extent) = match reserved {
            Ok(reserved) => reserved,
            Err(status) => {
                // A reservation or object in its way is being imported too, or is in use, and ends sooner or later. An
                // object that is too large for this shard stays where it is.
                let source = self.imports.objects.get(&digest).map_or(0, |object| object.source);
                if status == Status::Exists {
                    self.keep_moved(local, source, digest);
                }
                if status == Status::TooLarge {
                    self.imports.leave_there(source, digest);
                }
                let ends = matches!(status, Status::Exists | Status::TooLarge);
                self.object_ended(local, digest, if ends { End::Settled } else { End::Busy });
                return None;
            }
        };
        if let Some(tail) = tail {
            local.shard.write_tail(reservation, &tail, &name);
        }
        let imports = &mut self.imports;
        let object = imports.objects.get_mut(&digest).expect("an object that is being imported");
        object.extent = Some((reservation, bytes));
        imports.pace.begin(bytes);
        let source = object.source;
        let Some(key) = imports.sources.get(&source).map(|source| source.key) else {
            self.object_ended(local, digest, End::Settled);
            return None;
        };
        let extent = MemoryExtent { memory: Memory::Pool, offset: extent.offset, bytes };
        Some(imports.ask(&mut local.shard, key, Want::Object(digest, extent), Call::Object(digest)))
    }

    /// Commits an object that was received, unless it was put or removed here, or its slot belongs to another owner.
    pub(super) fn object_came(&mut self, local: &mut LocalStore, digest: Digest, bytes: u64, checksum: u64) {
        let Some(object) = self.imports.objects.get(&digest) else { return };
        let (source, demanded) = (object.source, object.demanded);
        let Some((reservation, reserved_bytes)) = object.extent else { return };
        let current = !object.void && self.imports.is_current(source, digest);
        let fits = bytes == reserved_bytes && local.shard.ownership.owns(digest);
        if !current || !fits || local.on_ssd(digest).is_some() {
            self.object_ended(local, digest, if current && !fits { End::Failed } else { End::Settled });
            return;
        }
        let store = &mut local.shard.store;
        // The commit consumes the reservation in any case.
        let committed = store.commit(reservation, checksum);
        if let Some(object) = self.imports.objects.get_mut(&digest) {
            object.extent = None;
        }
        self.imports.pace.end(bytes);
        match committed {
            Ok(version) => {
                self.counters.imported += 1;
                self.counters.imported_bytes += bytes;
                self.counters.fetched += u64::from(demanded);
                let made = CommittedObject { version, digest, bytes, replaces: false, is_copy: false, ack: None };
                let mut waits = local.waits_of(&made);
                waits.shared_removal &= !note_import(local, &made, checksum);
                local.shard.effects.note(Effect::Imported { digest, version });
                local.keep(&made, waits, None);
                self.keep_moved(local, source, digest);
            }
            // The object was put here meanwhile.
            Err(error) => debug_assert_eq!(error, CommitError::Exists, "a reservation that the shard holds"),
        }
        self.object_ended(local, digest, End::Settled);
    }

    /// Handles an object of a source that is in memory here. If there is an SSD that accepts the object, the source
    /// drops its copy only when it is on the SSD here: that copy may be the only one that survives a restart, or an
    /// eviction.
    fn keep_moved(&mut self, local: &mut LocalStore, source: u32, digest: Digest) {
        let (moved, now_ns) = (local.write_moved(digest), local.shard.now_ns);
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        match moved {
            MoveProgress::Waits => _ = entry.unwritten.insert(digest),
            MoveProgress::Kept => entry.drop_object(digest),
            MoveProgress::Refused => entry.look_again(now_ns),
        }
    }

    /// Handles an object that does not wait for the SSD any more: it is written, or memory has lost it, or the SSD
    /// refused it. If it was imported, its source drops its copy, or, unless it `is_settled`, sends it again.
    pub(in crate::service) fn written(&mut self, local: &LocalStore, digest: Digest, is_settled: bool) {
        let source = self.imports.source_of(digest);
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        if !entry.unwritten.remove(&digest) {
            return;
        }
        if is_settled {
            entry.drop_object(digest);
        } else {
            entry.look_again(local.shard.now_ns);
        }
        self.check_source(local, source);
    }

    /// Ends the import of an object: its waiters get the object if it is here, or are to retry if there was no memory
    /// for it.
    pub(super) fn object_ended(&mut self, local: &mut LocalStore, digest: Digest, end: End) {
        let again = end != End::Settled;
        let imports = &mut self.imports;
        let Some(Object { source, extent, waiters, void, .. }) = imports.objects.remove(&digest) else { return };
        if let Some((reservation, bytes)) = extent {
            imports.pace.end(bytes);
            local.shard.store.abort(reservation).expect("a reservation that the shard holds");
        }
        self.counters.void += u64::from(void);
        self.counters.failures += u64::from(again);
        if let Some(entry) = imports.sources.get_mut(&source) {
            entry.open -= 1;
            if again {
                entry.look_again(local.shard.now_ns);
            }
        }
        for (waiter, timing) in waiters {
            local.shard.answers.outputs.late(timing, digest);
            let turns_away = end == End::Busy && !local.shard.store.exists(digest);
            match waiter {
                Waiter::Reader(reader) if turns_away => local.shard.turn_away(reader, Status::Busy),
                Waiter::Reader(reader) => local.serve(digest, reader),
                Waiter::Tenant if turns_away => {}
                Waiter::Tenant => local.shard.effects.note(Effect::TenantSettled(digest)),
            }
        }
        self.check_source(local, source);
    }
}
