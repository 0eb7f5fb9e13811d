//! Retries of objects that the device failed to write.
//!
//! An object whose write failed stays in memory and is retried after a pause, a few times: each failed attempt costs a
//! segment, and a device that fails them all is degraded soon. No reply waits for a retry: the put that waited for the
//! write was refused, and its object dropped. A request that waits for the object on the SSD during a pause fails at
//! once, instead of being busy until its deadline.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;

use super::dirty::DirtyObject;

/// Most retries of a failed write.
const TRIES_MOST: u8 = 4;
/// First pause; each further one is four times as long.
const PAUSE_NS: u64 = 1_000_000_000;

/// Objects to be written again, by time.
#[derive(Debug, Default)]
pub(super) struct Retries {
    waiting: BTreeMap<(u64, Digest, Version), DirtyObject>,
    /// Keys of these objects.
    paused: BTreeSet<(Digest, Version)>,
}

impl Retries {
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.waiting.first_key_value().map(|((due_ns, ..), _)| *due_ns)
    }

    /// Returns the objects that wait for their next attempt.
    pub(super) fn objects(&self) -> impl Iterator<Item = &DirtyObject> {
        self.waiting.values()
    }

    /// Like [`Self::objects`], mutable.
    pub(super) fn objects_mut(&mut self) -> impl Iterator<Item = &mut DirtyObject> {
        self.waiting.values_mut()
    }

    /// Returns true if a version waits for its next attempt. No reply waits for it any more.
    pub(super) fn has(&self, digest: Digest, version: Version) -> bool {
        self.paused.contains(&(digest, version))
    }

    /// Schedules a retry of a failed write; the object stays pinned until then. False if it has had its last.
    pub(super) fn add(&mut self, object: &DirtyObject, now_ns: u64) -> bool {
        if object.tries == TRIES_MOST {
            return false;
        }
        let due_ns = now_ns.saturating_add(PAUSE_NS << (2 * object.tries));
        let again = DirtyObject { tries: object.tries + 1, ..*object };
        self.waiting.insert((due_ns, object.digest, object.version), again);
        self.paused.insert((object.digest, object.version));
        true
    }

    /// Returns an object whose pause is over, or any if `all` pauses end now.
    pub(super) fn take_due(&mut self, now_ns: u64, all: bool) -> Option<DirtyObject> {
        let first = self.waiting.first_entry().filter(|first| all || first.key().0 <= now_ns)?;
        let object = first.remove();
        self.paused.remove(&(object.digest, object.version));
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::PinId;

    use super::*;

    #[test]
    fn each_pause_is_longer_and_the_last_attempt_is_final() {
        let (digest, version, pin) = (Digest(1), Version(2), PinId { index: 0, generation: 1 });
        let since = DirtyObject {
            pin,
            digest,
            version,
            bytes: 9,
            account: 0,
            tenant: 0,
            since_ns: 0,
            told: None,
            ack: None,
            copied: false,
            tries: 0,
        };
        let (mut retries, mut object, mut pauses) = (Retries::default(), since, Vec::new());
        while retries.add(&object, 100) {
            assert!(retries.has(digest, version) && !retries.has(digest, Version(3)));
            let due_ns = retries.poll_timeout().expect("it waits");
            assert!(retries.take_due(due_ns - 1, false).is_none());
            object = retries.take_due(due_ns, false).expect("its pause is over");
            assert!(!retries.has(digest, version) && retries.objects().count() == 0);
            pauses.push((due_ns - 100) / PAUSE_NS);
        }
        assert_eq!(pauses, [1, 4, 16, 64]);
        assert!(retries.add(&since, 100) && retries.take_due(100, true).is_some(), "writes stop");
    }
}
