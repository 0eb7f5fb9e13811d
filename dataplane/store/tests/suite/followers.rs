//! Tests that a subscriber knows all objects from a snapshot and the events since then.

use std::collections::BTreeMap;

use kvplane_proto::events::{ObjectChange, ObjectMedium};
use kvplane_proto::{Digest, Version};
use kvplane_store::events::EventPage;
use kvplane_store::{Store, StoreConfig};
use proptest::prelude::*;

const POOL_BYTES: u64 = 1 << 20;

#[derive(Default)]
struct Follower {
    objects: BTreeMap<Digest, u64>,
    from: u64,
}

impl Follower {
    fn apply(&mut self, page: &EventPage) {
        assert_eq!((page.lost, page.first), (0, self.from));
        for event in &page.events {
            assert_eq!(event.medium, ObjectMedium::Memory);
            match event.change {
                ObjectChange::Stored => drop(self.objects.insert(event.digest, event.bytes)),
                ObjectChange::Removed => drop(self.objects.remove(&event.digest)),
                ObjectChange::Cleared => self.objects.clear(),
            }
        }
        self.from = page.first + page.events.len() as u64;
    }
}

fn store() -> Store {
    let config = StoreConfig { max_objects: 64, ..StoreConfig::for_pool(POOL_BYTES) };
    Store::new(config, Version(1)).expect("a valid configuration")
}

/// Applies one step: a put that may evict, a removal, or a clearance.
fn step(store: &mut Store, what: u8, name: u8) {
    let digest = Digest(u128::from(name));
    match what {
        0..=5 => {
            let bytes = 1 + u64::from(name) * 997;
            if let Ok((reservation, _)) = store.reserve(digest, bytes) {
                store.commit(reservation, 0).expect("nobody else puts");
            }
        }
        6..=8 => drop(store.remove(digest)),
        _ => drop(store.remove_all()),
    }
}

proptest! {
    #[test]
    fn a_snapshot_that_is_taken_while_things_change_and_the_events_since_give_what_there_is(
        before in prop::collection::vec((0u8..9, any::<u8>()), 0..200),
        during in prop::collection::vec((0u8..10, any::<u8>()), 1..200),
        page in 1u32..9,
    ) {
        let mut store = store();
        before.into_iter().for_each(|(what, name)| step(&mut store, what, name));
        store.objects_mut().events_mut().keep(1000);
        let mut follower = Follower { from: store.objects().events().next(), ..Follower::default() };
        let (mut cursor, mut steps) = (Some(0), during.into_iter());
        while let Some(from) = cursor {
            let (objects, next) = store.objects().walk(from, page);
            follower.objects.extend(objects);
            cursor = next;
            if let Some((what, name)) = steps.next() {
                step(&mut store, what, name);
            }
        }
        follower.apply(&store.objects().events().read(follower.from, 1000));
        for (what, name) in steps {
            step(&mut store, what, name);
            follower.apply(&store.objects().events().read(follower.from, 3));
        }
        follower.apply(&store.objects().events().read(follower.from, 1000));
        let there: BTreeMap<Digest, u64> = store.objects().walk(0, u32::MAX).0.into_iter().collect();
        prop_assert_eq!(follower.objects, there);
        store.check();
    }
}
