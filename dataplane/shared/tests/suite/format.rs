//! Packs, checkpoints and manifests: golden bytes, what was written is read back, and other bytes never pass.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Slot};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Version};
use kvplane_shared::NewObject;
use kvplane_shared::format::{
    CheckpointReader, CheckpointWriter, Entry, EntryKind, HEADER_BYTES, Manifest, PackEnd, PackRow, PackWriter, Stream,
    pack_number,
};
use kvplane_tier::SlotSet;
use proptest::prelude::*;

fn stream() -> Stream {
    let shard = ShardKey { node: NodeId(7), incarnation: Incarnation(0x1234), shard: ShardId(3) };
    Stream { cluster: 0xc1, state: 0xabcd, shard }
}

fn object(digest: u128, payload: &[u8]) -> NewObject<'_> {
    NewObject {
        digest: Digest(digest),
        version: Version(9),
        bytes: payload.len() as u32,
        checksum: 0,
        tail: b"tail",
        tenant: 5,
        is_head: digest % 2 == 1,
        is_replicated: false,
    }
}

fn pack_of(payloads: &[Vec<u8>]) -> (Vec<u8>, Vec<Entry>) {
    let mut writer = PackWriter::new();
    for (at, payload) in payloads.iter().enumerate() {
        assert!(writer.push(&object(at as u128, payload), |into| into.copy_from_slice(payload)));
    }
    writer.remove(Digest(99));
    writer.seal(stream(), 4, 1000)
}

#[test]
fn names_are_parsed_back() {
    let stream = stream();
    let name = stream.pack(0x17);
    assert_eq!(name, "000000000000abcd/0000000000000007-0003-0000000000001234/pack-0000000000000017");
    let (parsed, rest) = Stream::parse(stream.cluster, &name).expect("a name of a stream");
    assert_eq!((parsed, pack_number(rest)), (stream, Some(0x17)));
    assert_eq!(pack_number("pack-1"), None);
    for other in ["", "a/b/c", "manifest", "000000000000abcd/0000000000000007-0003/manifest"] {
        assert_eq!(Stream::parse(1, other), None, "{other}");
    }
}

#[test]
fn golden_bytes() {
    let (pack, _) = pack_of(&[vec![1, 2, 3]]);
    let manifest = Manifest {
        epoch: Epoch(3),
        checkpoint: 1,
        after: 2,
        upto: 4,
        owned: SlotSet::none(),
        released: SlotSet::none(),
        releasing: SlotSet::none(),
    };
    let row = PackRow { shard: stream().shard, number: 4, bytes: pack.len() as u64, written_ms: 1000 };
    let mut writer = CheckpointWriter::new(&[row]);
    writer.push(&Entry { kind: EntryKind::Object, bytes: 3, offset: 64, ..Entry::removal(Digest(1)) }, 0);
    let checkpoint = writer.seal(stream(), 2);
    let sums = [&pack, &manifest.encode(stream(), 3), &checkpoint].map(|bytes| (bytes.len(), payload_checksum(bytes)));
    assert_eq!(sums, GOLDEN, "the format of version 1 has changed");
}

const GOLDEN: [(usize, u64); 3] =
    [(215, 8_097_206_891_135_646_655), (4168, 2_894_982_198_031_777_522), (144, 10_761_993_942_121_655_715)];

#[test]
fn a_payload_with_another_checksum_is_refused() {
    let mut writer = PackWriter::new();
    let wrong = NewObject { checksum: 1, ..object(1, b"bytes") };
    assert!(!writer.push(&wrong, |into| into.copy_from_slice(b"bytes")));
    assert_eq!((writer.bytes(), writer.entries().len()), (HEADER_BYTES as u64, 0));
    let right = NewObject { checksum: payload_checksum(b"bytes"), ..wrong };
    assert!(writer.push(&right, |into| into.copy_from_slice(b"bytes")));
}

fn decode(pack: &[u8], last: usize) -> Option<Vec<Entry>> {
    let last = &pack[pack.len() - last.min(pack.len())..];
    let end = PackEnd::decode(stream(), 4, pack.len() as u64, last).ok()?;
    (0..end.len()).map(|at| end.entry(at).ok()).collect()
}

proptest! {
    #[test]
    fn packs_are_read_back(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..20)) {
        let (pack, entries) = pack_of(&payloads);
        prop_assert_eq!(decode(&pack, usize::MAX), Some(entries.clone()));
        let length = PackEnd::length(&pack).expect("a trailer") as usize;
        prop_assert_eq!(decode(&pack, length), Some(entries.clone()));
        prop_assert_eq!(decode(&pack, length - 1), None);
        for (payload, entry) in payloads.iter().zip(&entries) {
            let at = entry.offset as usize;
            prop_assert_eq!(&pack[at..at + payload.len()], &payload[..]);
            prop_assert_eq!(entry.checksum, payload_checksum(payload));
            prop_assert_eq!(&pack[at + payload.len()..][..4], b"tail");
        }
    }

    #[test]
    fn a_flipped_bit_of_an_end_or_a_manifest_is_found(at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let (mut pack, _) = pack_of(&[vec![7; 100]]);
        let length = PackEnd::length(&pack).expect("a trailer") as usize;
        let place = pack.len() - length + at.index(length);
        pack[place] ^= 1 << bit;
        prop_assert_eq!(decode(&pack, usize::MAX), None);

        let [mut owned, mut released, mut releasing] = [(); 3].map(|()| SlotSet::none());
        owned.insert(Slot(11));
        released.insert(Slot(12));
        releasing.insert(Slot(9));
        let manifest = Manifest { epoch: Epoch(3), checkpoint: 1, after: 2, upto: 4, owned, released, releasing };
        let mut bytes = manifest.encode(stream(), 3);
        prop_assert_eq!(Manifest::decode(stream(), 3, &bytes), Ok(manifest));
        let place = at.index(bytes.len());
        bytes[place] ^= 1 << bit;
        prop_assert!(Manifest::decode(stream(), 3, &bytes).is_err());
    }

    #[test]
    fn checkpoints_are_read_back_and_flipped_bits_are_found(
        count in 0_u32..300, at in any::<prop::sample::Index>(), bit in 0..8_u8
    ) {
        let rows: Vec<PackRow> = (0..3)
            .map(|number| PackRow { shard: stream().shard, number, bytes: 5000, written_ms: 7 })
            .collect();
        let mut writer = CheckpointWriter::new(&rows);
        let entry = |number: u32| Entry {
            kind: EntryKind::Object, version: Version(number.into()), offset: number, bytes: 9, tail_bytes: 2,
            ..Entry::removal(Digest(number.into()))
        };
        (0..count).for_each(|number| writer.push(&entry(number), number % 3));
        let bytes = writer.seal(stream(), 6);
        let read = |bytes: Vec<u8>| {
            let mut reader = CheckpointReader::new(stream(), 6, bytes).ok()?;
            let mut found = Vec::new();
            while let Some(next) = reader.next_entry().ok()? {
                found.push(next);
            }
            reader.is_whole().then_some(found)
        };
        let expected: Vec<_> = (0..count).map(|number| (entry(number), rows[number as usize % 3])).collect();
        prop_assert_eq!(read(bytes.clone()), Some(expected));
        let mut broken = bytes;
        let place = at.index(broken.len());
        broken[place] ^= 1 << bit;
        prop_assert_eq!(read(broken), None);
    }

    #[test]
    fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), magic in 0..4_usize) {
        let mut bytes = bytes;
        if let Some(start) = bytes.get_mut(..6) {
            start.copy_from_slice([b"KVSP\x01\x00", b"KVSE\x01\x00", b"KVSC\x01\x00", b"KVSM\x01\x00"][magic]);
        }
        let _ = Manifest::decode(stream(), 3, &bytes);
        let _ = PackEnd::length(&bytes);
        let _ = PackEnd::decode(stream(), 4, bytes.len() as u64, &bytes);
        if let Ok(mut reader) = CheckpointReader::new(stream(), 6, bytes) {
            while let Ok(Some(_)) = reader.next_entry() {}
        }
    }
}
