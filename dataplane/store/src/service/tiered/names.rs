//! Names of objects that only the SSD has, for lists.

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::{GetError, Priority, RecordView, Token};

use super::super::keys::List;
use super::{Call, Service};

impl Service {
    /// How many places the SSD's index has.
    pub(in crate::service) fn tier_places(&self) -> usize {
        self.tiered.as_ref().map_or(0, |tiered| tiered.tier.places())
    }

    /// Whether the SSD still finds what it has, as after a start.
    pub(in crate::service) fn tier_recovers(&self) -> bool {
        self.tiered.as_ref().is_some_and(|tiered| tiered.tier.is_recovering())
    }

    /// Where in the order of lists an object is.
    pub(in crate::service) fn tier_point(&self, digest: Digest) -> u32 {
        self.tiered.as_ref().map_or(0, |tiered| tiered.tier.point_of(digest))
    }

    /// What the SSD has of a piece of the order and may give.
    pub(in crate::service) fn tier_between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        let tiered = self.tiered.iter();
        tiered.flat_map(move |tiered| {
            // As `locate` does, of what is looked at anyway.
            tiered.tier.between(from, to).filter(|view| !tiered.is_hidden(view))
        })
    }

    /// Has names of a page read, as far as the tier takes it. Whether there was anything to do.
    pub(in crate::service) fn read_names(&mut self, list_id: u64, list: &mut List) -> bool {
        let mut progress = false;
        while let Some(&at) = list.wanted.last() {
            let Some(tiered) = &mut self.tiered else { return progress };
            let token = Token(tiered.next_call + 1);
            let (digest, version) = (list.page[at].item.digest, list.page[at].item.version);
            match tiered.tier.get_key(digest, Priority::Prefetch, token) {
                Ok(()) => {
                    tiered.call(Call::Name { list: list_id, at, version });
                    list.reading += 1;
                }
                Err(GetError::Busy) => return progress,
                Err(_) => list.page[at].is_gone = true,
            }
            list.wanted.pop();
            progress = true;
        }
        progress
    }

    /// A name was read, or cannot be: then the object is gone, or its name is.
    pub(super) fn name_read(&mut self, token: Token, read: Option<Version>) {
        let Some(tiered) = &mut self.tiered else { return };
        let tail = tiered.tier.take_key(token);
        let Some(Call::Name { list, at, version }) = tiered.calls.remove(&token.0) else { return };
        let Some(list) = self.lists.open.get_mut(&list) else { return };
        list.reading -= 1;
        match tail {
            // Another version of it has the same name.
            Some(tail) if read.is_some() => list.take_name(at, read.unwrap_or(version), tail),
            _ => list.page[at].is_gone = true,
        }
    }
}
