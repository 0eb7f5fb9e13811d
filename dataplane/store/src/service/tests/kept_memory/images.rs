//! Tests of image files: the next process reads what this one wrote, or has the reason why it does not count.

use core::convert::Infallible;

use super::super::rig::{POOL_BYTES, identity};
use super::*;
use crate::image::MemoryIdentity;
use crate::service::{ImageFile, LayoutChange, MemoryImage};

/// File that is a vector of bytes.
#[derive(Clone, Debug, Default)]
struct Bytes(Vec<u8>);

impl ImageFile for Bytes {
    type Error = Infallible;

    fn bytes(&self) -> Result<u64, Infallible> {
        Ok(self.0.len() as u64)
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), Infallible> {
        self.0.resize(bytes as usize, 0);
        Ok(())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Infallible> {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        self.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn memory() -> MemoryIdentity {
    let Identity { cluster, node, shard, .. } = identity();
    MemoryIdentity { uuid: 1, cluster, node, shard, shards: 1, pool_bytes: POOL_BYTES, unit_bytes: 256 }
}

/// Returns the file that a process with three objects has left.
fn left() -> Bytes {
    let mut file = Bytes::default();
    let (image, found) = MemoryImage::open(&mut file, memory(), false).expect("a file");
    assert_eq!(found, Ok(None));
    let mut rig = start(1, None);
    rig.service.own(Epoch(5), standing(4), |_| true);
    let peer = rig.join(Path::Stream);
    (1..=3).for_each(|key| assert_eq!(rig.put(peer, key, 100).status(), Status::Ok));
    assert_eq!(image.close(&mut file, &mut rig.service, &Pool, false), Ok(Some(3)));
    file
}

/// Adding or removing an SSD changes the unit of allocation only, and the operator is to know that.
#[test]
fn memory_of_another_layout_says_what_has_changed() {
    let file = left();
    let open = |identity: MemoryIdentity| MemoryImage::open(&mut file.clone(), identity, true).expect("a file").1;
    assert!(open(memory()).is_ok_and(|found| found.is_some_and(|found| found.contents.objects.len() == 3)));
    let changes = [
        (MemoryIdentity { unit_bytes: 4096, ..memory() }, LayoutChange::Unit { former: 256, now: 4096 }),
        (
            MemoryIdentity { pool_bytes: 2 * POOL_BYTES, ..memory() },
            LayoutChange::Pool { former: POOL_BYTES, now: 2 * POOL_BYTES },
        ),
        // Each of them has another part of the pool then.
        (
            MemoryIdentity { shards: 2, pool_bytes: POOL_BYTES / 2, ..memory() },
            LayoutChange::Shards { former: 1, now: 2 },
        ),
        (
            MemoryIdentity { shard: ShardId(memory().shard.0 + 1), ..memory() },
            LayoutChange::Shard { former: memory().shard, now: ShardId(memory().shard.0 + 1) },
        ),
    ];
    for (identity, change) in changes {
        assert_eq!(open(identity), Err(Discard::Layout(change)));
    }
    let said = Discard::Layout(LayoutChange::Unit { former: 256, now: 4096 }).to_string();
    assert!(said.contains("4096 bytes, and 256 before") && said.contains("SSDs"), "{said}");
}
