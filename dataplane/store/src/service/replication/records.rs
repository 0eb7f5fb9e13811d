//! Replicas that a replica owner has on its SSD, and the records that a request for a replica may read.

use kvplane_proto::ids::Slot;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{RecordView, SlotSet};

use crate::service::local::LocalStore;
use crate::service::shard::context::RequestContext;
use crate::service::tiering::break_off_events;

/// Returns the record of an object on the SSD that may be read for a request: for one that accepts replicas, or repairs
/// another copy, also that of a replica.
pub(in crate::service) fn readable_record(
    local: &LocalStore,
    context: &RequestContext,
    digest: Digest,
) -> Option<RecordView> {
    let ssd = local.ssd()?;
    if context.repairs() {
        return whole_record(local, digest);
    }
    if local.shard.reads_replica(context, digest) { ssd.locate_replica(digest) } else { ssd.locate(digest) }
}

/// Returns the record of an object or replica on the SSD, unless it is damaged: a request for a repair does not wait
/// for the repair of this copy, which may wait for the other.
pub(in crate::service) fn whole_record(local: &LocalStore, digest: Digest) -> Option<RecordView> {
    let ssd = local.ssd()?;
    ssd.locate_any(digest).filter(|_| !ssd.damaged.has(digest))
}

/// Returns `None` if the request does not accept a replica of an object, else whether there is one.
pub(in crate::service) fn may_read_replica(
    local: &LocalStore,
    context: &RequestContext,
    digest: Digest,
) -> Option<bool> {
    let here = local.shard.may_read_replica(context, digest)?;
    Some(here || readable_record(local, context, digest).is_some())
}

/// Acts on a replica that was received: it is written to the SSD as the policy says.
pub(in crate::service) fn keep_replica(local: &mut LocalStore, digest: Digest) {
    if let Some(tiering) = &mut local.tiering {
        tiering.demotion.keep_replica(&mut tiering.ssd, digest);
    }
}

/// Checks that a replica of this length and account can be accepted now: backpressure while the SSD cannot keep up.
pub(in crate::service) fn may_keep_replica(local: &mut LocalStore, bytes: u64, account: u16) -> Result<(), Status> {
    let Some(tiering) = &mut local.tiering else { return Ok(()) };
    let weight = tiering.ssd.weight_of(local.shard.store.tenants().number(account));
    tiering.demotion.may_keep_replica(&tiering.ssd, bytes, account, weight, local.shard.now_ns)
}

/// Records the replicas of all slots of which this shard is a replica owner.
pub(in crate::service) fn begin_replicas(local: &mut LocalStore) {
    if let Some(tiering) = &mut local.tiering {
        local.shard.replicas.relation_slots().for_each(|slot| tiering.ssd.replicas.begin(slot));
    }
}

/// Ends the role of replica owner of slots. The replica records of those that this shard has inherited, or exports to
/// their new owner, become records of objects; the others are void.
pub(in crate::service) fn end_replicas(
    local: &mut LocalStore,
    slots: impl IntoIterator<Item = Slot>,
    exported: &SlotSet,
) {
    let LocalStore { shard, tiering: Some(tiering), .. } = local else { return };
    let mut has_inherited = false;
    for slot in slots {
        let inherited = exported.has(slot) || shard.replicas.has_inherited(slot);
        tiering.ssd.end_replicas(slot, inherited);
        has_inherited |= inherited;
    }
    if has_inherited {
        break_off_events(shard);
    }
}
