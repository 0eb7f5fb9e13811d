//! Notifications of lower components that the components above have to act on.
//!
//! A component calls downwards only. Consequences for components above are noted here, in order, and the service
//! carries them out as soon as the call returns.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

/// Notification for the components above.
#[derive(Debug)]
pub(in crate::service) enum Effect {
    /// Slots are newly served: their objects may lack replicas.
    SlotsServed,
    /// The tier's index has changed as a whole: its objects may lack replicas.
    RecordsChanged,
    /// An object was promoted from the SSD and lacks a replica.
    LacksReplica,
    /// An object does not wait for the SSD any more: it is written, or the SSD refused it, or memory has lost it.
    Written {
        digest: Digest,
        /// True if the object is on the SSD, or its tenant's quota keeps it off the SSD: a source may drop its copy.
        is_settled: bool,
    },
    /// An object has all the replicas that it is to have.
    Replicated(Digest),
    /// This version of an object was imported from a former owner.
    Imported { digest: Digest, version: Version },
    /// The tenant of an object is known, or no read that could tell it is in flight any more.
    TenantSettled(Digest),
    /// The bytes of an object may be damaged: another shard received others than its checksum says.
    Suspect(Digest),
    /// The bytes of this version of an object are damaged.
    Damaged { digest: Digest, version: Version },
    /// The name of an object was read for a list, or cannot be read.
    Name(ListedName),
}

/// Name that a list waited for.
#[derive(Debug)]
pub(in crate::service) struct ListedName {
    pub(in crate::service) list: u64,
    /// Index of the object in its page.
    pub(in crate::service) at: usize,
    /// Tail that was read, and the version that it belongs to; `None` if the object or its name is gone.
    pub(in crate::service) read: Option<(Version, Vec<u8>)>,
}

/// Queue of effects, in order.
#[derive(Debug, Default)]
pub(in crate::service) struct Effects(VecDeque<Effect>);

impl Effects {
    pub(in crate::service) fn note(&mut self, effect: Effect) {
        self.0.push_back(effect);
    }

    /// Dequeues the next effect to be carried out.
    pub(in crate::service) fn take(&mut self) -> Option<Effect> {
        self.0.pop_front()
    }
}
