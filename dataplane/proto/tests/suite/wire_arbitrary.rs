//! Arbitrary bytes into every decoder: no panic, no allocation beyond the limits, and one encoding for every accepted
//! value.
//!
//! Only the handshake and the segment descriptor own memory after decoding; their capacity is compared with the size of
//! the input.

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::message::{
    Bitmap, CommitItem, CommitReply, DigestItem, GetItem, Hello, IdItem, Item, KeyItem, KeyPage, ListItem, ListReply,
    LookupReply, PutItem, RangeItem, ReadItem, RegionDescriptor, ReserveReply, RetainItem, RetainReply, RunItem,
    SegmentDescriptor, SizeReply, Welcome, WriteItem, decode_items, decode_puts, encode_items,
};
use kvplane_proto::{Epoch, Limits, SegmentId, ShardId};
use proptest::prelude::*;

fn check_items<T: Item + Clone>(body: &[u8], items: u32) {
    let Some(decoded) = decode_items::<T>(body, items) else { return };
    assert!(items as usize <= Limits::ITEMS_PER_FRAME);
    assert_eq!(decoded.len(), items as usize);
    assert_eq!(decoded.clone().count(), items as usize);
    let mut again = Vec::new();
    encode_items(decoded, &mut again);
    assert_eq!(again, body);
}

fn check_puts(body: &[u8], items: u32) {
    let Some(puts) = decode_puts(body, items) else { return };
    assert_eq!(puts.len(), items as usize);
    let (mut again, mut names) = (Vec::new(), Vec::new());
    for (item, name) in puts {
        assert!(name.is_within_limits());
        item.encode(&mut again);
        names.extend_from_slice(name.tenant);
        names.extend_from_slice(name.key);
    }
    again.extend_from_slice(&names);
    assert_eq!(again, body);
}

fn check_every_item(body: &[u8], items: u32) {
    check_items::<DigestItem>(body, items);
    check_items::<GetItem>(body, items);
    check_items::<SizeReply>(body, items);
    check_items::<RetainItem>(body, items);
    check_items::<RetainReply>(body, items);
    check_items::<ReadItem>(body, items);
    check_items::<WriteItem>(body, items);
    check_items::<RunItem>(body, items);
    check_items::<LookupReply>(body, items);
    check_items::<PutItem>(body, items);
    check_items::<RangeItem>(body, items);
    check_items::<ListItem>(body, items);
    check_items::<ListReply>(body, items);
    check_items::<KeyItem>(body, items);
    check_puts(body, items);
    if let Some(page) = KeyPage::decode(body) {
        assert_eq!(page.keys().count() as u64, page.reply().items);
    }
    check_items::<ReserveReply>(body, items);
    check_items::<CommitItem>(body, items);
    check_items::<CommitReply>(body, items);
    check_items::<IdItem>(body, items);
    if let Some(map) = Bitmap::decode(body, items) {
        let set = (0..map.len()).filter(|&index| map.get(index)).count();
        assert!(set <= items as usize && body.len() == (items as usize).div_ceil(8));
    }
}

fn check_handshake(body: &[u8]) {
    if let Ok(hello) = Hello::decode(body) {
        assert!(hello.cluster.capacity() <= Limits::NAME_BYTES);
        assert_eq!(hello.encode(), body);
    }
    if let Ok(welcome) = Welcome::decode(body) {
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }
    if let Ok(descriptor) = SegmentDescriptor::decode(body) {
        assert!(descriptor.name.capacity() <= Limits::NAME_BYTES);
        assert!(descriptor.regions.capacity() <= Limits::REGIONS_PER_SEGMENT);
        assert!(descriptor.regions.capacity() * 32 <= body.len());
        assert_eq!(SegmentDescriptor::decode(&descriptor.encode()), Ok(descriptor));
    }
}

/// Bytes that look like a descriptor or a handshake with arbitrary lengths.
fn claims() -> impl Strategy<Value = Vec<u8>> {
    let fixed = prop::collection::vec(prop_oneof![Just(0u8), Just(1), Just(255), any::<u8>()], 0..64);
    (fixed, prop::collection::vec(any::<u8>(), 0..300)).prop_map(|(mut fixed, rest)| {
        fixed.extend(rest);
        fixed
    })
}

fn name() -> impl Strategy<Value = String> {
    prop::collection::vec(any::<char>(), 0..60).prop_map(|chars| chars.into_iter().collect())
}

fn hello() -> impl Strategy<Value = Hello> {
    (any::<[u8; 2]>(), any::<[u64; 4]>(), any::<[u16; 2]>(), name()).prop_map(|(versions, words, shorts, cluster)| {
        Hello {
            version_min: versions[0],
            version_max: versions[1],
            client: words[0],
            node: NodeId(words[1]),
            incarnation: Incarnation(words[2]),
            connection: words[3],
            shard: ShardId(shorts[0]),
            lane: shorts[1],
            fetches: versions[0] & 1 != 0,
            cluster,
        }
    })
}

fn descriptor() -> impl Strategy<Value = SegmentDescriptor> {
    let region = (any::<[u64; 3]>(), any::<[bool; 2]>()).prop_map(|(words, [shareable, writable])| RegionDescriptor {
        segment: SegmentId::from_bits(words[0]),
        address: words[1],
        bytes: words[2],
        shareable,
        writable,
    });
    (name(), prop::collection::vec(region, 0..20)).prop_map(|(name, regions)| SegmentDescriptor { name, regions })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bodies_never_panic(body in prop::collection::vec(any::<u8>(), 0..600), items in any::<u32>()) {
        check_every_item(&body, items);
    }

    #[test]
    fn bodies_of_a_fitting_length_never_panic(
        body in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..600),
        bytes in prop::sample::select(vec![8usize, 16, 24, 32, 40, 48, 56]),
    ) {
        let items = body.len() / bytes;
        check_every_item(&body[..items * bytes], items as u32);
    }

    #[test]
    fn arbitrary_handshakes_and_descriptors_never_panic(body in claims()) {
        check_handshake(&body);
    }

    #[test]
    fn damaged_hellos_never_panic(hello in hello(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut body = hello.encode();
        prop_assert!(Hello::decode(&body) == Ok(hello));
        let at = at.index(body.len());
        body[at] = byte;
        check_handshake(&body);
    }

    #[test]
    fn damaged_descriptors_never_panic(
        descriptor in descriptor(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut body = descriptor.encode();
        prop_assert!(SegmentDescriptor::decode(&body) == Ok(descriptor));
        let at = at.index(body.len());
        body[at] = byte;
        check_handshake(&body);
    }

    #[test]
    fn welcomes_survive(words in any::<[u64; 4]>(), version in any::<u8>(), shard in any::<u16>()) {
        let welcome = Welcome {
            version,
            node: NodeId(words[0]),
            incarnation: Incarnation(words[1]),
            shard: ShardId(shard),
            epoch: Epoch(words[2]),
            pool_bytes: words[3],
        };
        prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }

    #[test]
    fn bitmaps_survive(bits in prop::collection::vec(any::<bool>(), 0..200)) {
        let mut body = Vec::new();
        Bitmap::encode(bits.iter().copied(), &mut body);
        let map = Bitmap::decode(&body, bits.len() as u32).expect("its own length");
        prop_assert_eq!((0..bits.len()).map(|index| map.get(index)).collect::<Vec<_>>(), bits);
    }
}
