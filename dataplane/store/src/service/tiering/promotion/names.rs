//! Names of objects that only the SSD has, for lists.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::{GetError, Priority, Token};

use crate::service::shard::Shard;
use crate::service::shard::effects::{Effect, ListedName};
use crate::service::tiering::ssd::Ssd;

/// Names being read, each with its list and its index in the page.
#[derive(Debug, Default)]
pub(super) struct Names {
    calls: BTreeMap<u64, (u64, usize)>,
}

impl Names {
    /// Begins to read a name.
    pub(super) fn read(&mut self, ssd: &mut Ssd, place: (u64, usize), digest: Digest) -> Result<(), GetError> {
        let token = ssd.new_token();
        ssd.tier.get_key(digest, Priority::Prefetch, token)?;
        self.calls.insert(token.0, place);
        Ok(())
    }

    /// Handles the end of the read of a name; if it failed, the object is gone, or its name is. False if the token
    /// belongs to another read.
    pub(super) fn done(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token, read: Option<Version>) -> bool {
        let Some(place) = self.calls.remove(&token.0) else { return false };
        let tail = ssd.tier.take_key(token);
        // Another version of the object has the same name.
        shard.effects.note(Effect::Name(ListedName { list: place.0, at: place.1, read: read.zip(tail) }));
        true
    }
}
