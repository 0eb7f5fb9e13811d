//! Pins and priorities that clients set after the puts of their objects.

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Items, Operation, RetainItem, RetainReply, Retaining, encode_items};
use kvplane_proto::{Digest, Status};

use crate::eviction::ChosenPolicy;
use crate::service::device_moves::recall;
use crate::service::local::LocalStore;
use crate::service::migration::Migration;
use crate::service::shard::context::RequestContext;
use crate::store::{ObjectPins, PinError};

const NS_PER_MS: u64 = 1_000_000;

/// Pins and priorities that clients set, in one shard.
pub(super) struct ClientPins<'a> {
    pub(super) local: &'a mut LocalStore,
    pub(super) migration: &'a Migration,
}

impl ClientPins<'_> {
    /// Carries out the items of a request, and answers it.
    pub(super) fn answer(&mut self, context: &RequestContext, header: &Header, items: Items<'_, RetainItem>) {
        let replies: Vec<RetainReply> = items
            .map(|item| match self.retain_one(context, &item) {
                Ok(objects) => RetainReply { status: Status::Ok, objects },
                Err(status) => RetainReply { status, objects: 0 },
            })
            .collect();
        let (peer, request, count) = (context.peer, header.request, replies.len());
        let answers = &mut self.local.shard.answers;
        answers.items(peer, Operation::Retain, request, count, |body| encode_items(replies, body));
    }

    /// Carries out one item; returns the number of objects that it concerned.
    fn retain_one(&mut self, context: &RequestContext, item: &RetainItem) -> Result<u64, Status> {
        let what = item.retaining().ok_or(Status::BadRequest)?;
        // New owners import what is there; pins of clients do not concern them.
        if context.fetches {
            return Err(Status::Unauthorized);
        }
        let most_ms = self.local.shard.store.config().soft_pin_max_ms;
        // A retention is a guarantee, so it is refused rather than shortened.
        if item.duration_ms > most_ms && (what != Retaining::Soft || most_ms == 0) {
            return Err(Status::PinLimit);
        }
        let duration_ns = u64::from(item.duration_ms.min(most_ms)) * NS_PER_MS;
        let (number, is_group) = match what {
            Retaining::Soft => {
                return self.change(context, item.digest, |pins| pins.pin_softly(item.digest, duration_ns));
            }
            Retaining::Object(number) => {
                return self.change(context, item.digest, |pins| pins.retain(item.digest, number, duration_ns));
            }
            Retaining::Priority(priority) => {
                return self.change(context, item.digest, |pins| pins.set_priority(item.digest, priority));
            }
            Retaining::Group(number) => (number, true),
            Retaining::All(number) => (number, false),
        };
        if context.tenant.is_some_and(|own| own != item.tenant) {
            self.local.shard.counters.unauthorized += 1;
            return Err(Status::Unauthorized);
        }
        let store = &mut self.local.shard.store;
        let Some(account) = store.tenants().known_account(item.tenant) else { return Ok(0) };
        let mut pins = ObjectPins::from(store);
        match (is_group, duration_ns) {
            (true, _) => pins.retain_group(account, number, duration_ns).map_err(status_of),
            (false, 0) => Ok(pins.release(account, number)),
            (false, _) => Ok(pins.renew(account, number, duration_ns)),
        }
    }

    /// Changes a pin, or the priority, of one object.
    fn change(
        &mut self,
        context: &RequestContext,
        digest: Digest,
        change: impl FnOnce(&mut ObjectPins<'_, ChosenPolicy>) -> Result<(), PinError>,
    ) -> Result<u64, Status> {
        let local = &mut *self.local;
        if local.is_foreign(context, digest) {
            return Err(Status::NotFound);
        }
        // Of an object that comes from the SSD, tenant, group, hard pin and priority are known once its tail is read,
        // and are set then: a change would be lost with that.
        let has_no_tail = local.shard.store.exists(digest) && local.tenant_of(digest).known().is_none();
        if has_no_tail || self.migration.is_coming(digest) {
            return Err(Status::Busy);
        }
        match change(&mut ObjectPins::from(&mut local.shard.store)) {
            Ok(()) => Ok(1),
            Err(PinError::OnDevice) => {
                recall(local, digest, None)?;
                Err(Status::Busy)
            }
            Err(why) => Err(status_of(why)),
        }
    }
}

const fn status_of(error: PinError) -> Status {
    match error {
        PinError::NotFound => Status::NotFound,
        PinError::OnDevice => Status::Busy,
        PinError::PinLimit { .. } | PinError::TooManyRetentions => Status::PinLimit,
    }
}
