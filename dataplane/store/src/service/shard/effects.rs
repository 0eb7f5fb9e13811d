//! What happened below that the components above have to act on.
//!
//! A component calls downwards only. What follows further up from something that it did is noted here, in order, and
//! the service carries it out as soon as the call is over.

use std::collections::VecDeque;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

/// Something for the components above.
#[derive(Debug)]
pub(in crate::service) enum Effect {
    /// Slots are served that were not: their objects may lack replicas.
    SlotsServed,
    /// What the SSD has is known anew: it may lack replicas.
    RecordsChanged,
    /// An object came back from the SSD that is to have a replica.
    LacksReplica,
    /// An object does not wait for the SSD any more: it is there, or the SSD did not take it, or memory has lost it.
    Written { digest: Digest, is_on_ssd: bool },
    /// This version of an object came from a former owner.
    Imported { digest: Digest, version: Version },
    /// Nothing is to be waited for any more to know the tenant of an object.
    TenantSettled(Digest),
    /// The name of an object was read for a list, or cannot be.
    Name(ListedName),
}

/// A name that a list waited for.
#[derive(Debug)]
pub(in crate::service) struct ListedName {
    pub(in crate::service) list: u64,
    /// Which object of its page.
    pub(in crate::service) at: usize,
    /// The tail that was read, and the version that has it; none where the object or its name is gone.
    pub(in crate::service) read: Option<(Version, Vec<u8>)>,
}

/// Effects in their order.
#[derive(Debug, Default)]
pub(in crate::service) struct Effects(VecDeque<Effect>);

impl Effects {
    pub(in crate::service) fn note(&mut self, effect: Effect) {
        self.0.push_back(effect);
    }

    /// The next one to be carried out.
    pub(in crate::service) fn take(&mut self) -> Option<Effect> {
        self.0.pop_front()
    }
}
