//! Tests of the format of memory images: what is encoded is decoded, and damage is never taken for an image.

use proptest::prelude::*;

use super::*;

fn identity(uuid: u128, cluster: &str) -> MemoryIdentity {
    MemoryIdentity {
        uuid,
        cluster: cluster.to_owned(),
        node: NodeId(7),
        shard: ShardId(1),
        shards: 2,
        pool_bytes: 1 << 30,
        unit_bytes: 256,
    }
}

fn origins() -> impl Strategy<Value = ImageOrigin> {
    any::<[u64; 4]>().prop_map(|[incarnation, state, epoch, opening]| ImageOrigin {
        incarnation: Incarnation(incarnation),
        state,
        epoch: Epoch(epoch),
        opening,
    })
}

fn objects() -> impl Strategy<Value = KeptObject> {
    let tails = (any::<Option<u8>>(), any::<(u64, u32, u64)>());
    (any::<u128>(), any::<[u64; 6]>(), tails, any::<[bool; 6]>(), any::<(u8, u32)>(), -4..=4i64, any::<u8>()).prop_map(
        |(
            digest,
            numbers,
            (page_class, (offset, bytes, checksum)),
            flags,
            (extra_granules, tenant),
            priority,
            copies,
        )| {
            let [version, sum, at, length, group, soft_pin_ns] = numbers;
            let [hard_pin, head, wanted, protected, lent, replica] = flags;
            KeptObject {
                digest: Digest(digest),
                version: Version(version),
                checksum: sum,
                extent: Extent { offset: at, bytes: length },
                extra_granules,
                tail: TailPlace { page_class, offset, bytes, checksum },
                tenant,
                group,
                soft_pin_ns,
                priority: ObjectPriority::new(priority).expect("it is in range"),
                hard_pin,
                head,
                wanted,
                protected,
                lent,
                replica,
                copies,
                at: ReplicaSet::from_bits(copies / 2).expect("seven bits"),
            }
        },
    )
}

fn contents() -> impl Strategy<Value = ImageContents> {
    let extents = any::<(u64, u64)>().prop_map(|(offset, bytes)| Extent { offset, bytes });
    let members = any::<(u64, u64)>().prop_map(|(node, incarnation)| (NodeId(node), Incarnation(incarnation)));
    let outstanding = any::<(u128, u64, u16)>().prop_map(|(digest, node, shard)| {
        let owner = ShardKey { node: NodeId(node), incarnation: Incarnation(node / 3), shard: ShardId(shard) };
        OutstandingReplica { digest: Digest(digest), owner }
    });
    let lists = (
        prop::collection::vec(objects(), 0..12),
        prop::collection::vec(extents, 0..4),
        prop::collection::vec(members, 0..4),
        prop::collection::vec(outstanding, 0..4),
    );
    (lists, any::<u64>()).prop_map(|((objects, withheld, members, outstanding), next)| ImageContents {
        objects,
        withheld,
        members,
        outstanding,
        next_version: Version(next),
    })
}

/// Encodes contents, and the header of a complete image of them.
fn image(contents: &ImageContents, origin: ImageOrigin) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = Vec::new();
    let checksum = contents.encode(|piece| bytes.extend_from_slice(piece));
    let mut header = ImageHeader::of(identity(11, "a cluster"), origin, contents, checksum);
    header.phase = ImagePhase::Complete;
    (header.encode(), bytes)
}

proptest! {
    #[test]
    fn an_encoded_image_decodes_to_itself(contents in contents(), origin in origins()) {
        let (header, bytes) = image(&contents, origin);
        prop_assert_eq!(bytes.len() as u64, contents.encoded_bytes());
        let found = ImageHeader::decode(&header).expect("a header");
        prop_assert_eq!((&found.identity, found.origin), (&identity(11, "a cluster"), origin));
        prop_assert_eq!(found.check_complete(), Ok(()));
        prop_assert_eq!(found.encode(), header);
        prop_assert_eq!(found.decode_contents(&bytes), Ok(contents));
    }

    /// One flipped bit, or a missing end, is an error, wherever it is.
    #[test]
    fn damage_is_an_error(contents in contents(), origin in origins(), at in any::<usize>(), bit in 0..8u32) {
        let (mut header, mut bytes) = image(&contents, origin);
        let found = ImageHeader::decode(&header).expect("a header");
        if !bytes.is_empty() {
            let short = found.decode_contents(&bytes[..at % bytes.len()]);
            prop_assert_eq!(short, Err(ImageError::Contents));
            let place = at % bytes.len();
            bytes[place] ^= 1 << bit;
            prop_assert_eq!(found.decode_contents(&bytes), Err(ImageError::Contents));
        }
        // What is behind the header's checksum means nothing.
        header[at % (CHECKSUM_AT + 8)] ^= 1 << bit;
        let damaged = ImageHeader::decode(&header).and_then(|header| header.check_complete());
        prop_assert!(damaged.is_err(), "{damaged:?}");
    }

    #[test]
    fn no_bytes_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), numbers in any::<[u64; 3]>()) {
        let _ = ImageHeader::decode(&bytes);
        let mut long = bytes.clone();
        long.resize(HEADER_BYTES, 0);
        long[..8].copy_from_slice(&MAGIC);
        let _ = ImageHeader::decode(&long);
        let [objects, withheld, contents_checksum] = numbers;
        let header = ImageHeader { objects, withheld, contents_checksum, ..ImageHeader::in_use(identity(1, "")) };
        prop_assert_eq!(header.decode_contents(&bytes), Err(ImageError::Contents));
    }
}

#[test]
fn only_a_complete_image_counts() {
    let (mut header, _) = image(&ImageContents::default(), ImageOrigin::default());
    for (phase, outcome) in [(1u32, Err(ImageError::InUse)), (2, Err(ImageError::Unfinished)), (3, Ok(()))] {
        header[PHASE_AT..PHASE_AT + 4].copy_from_slice(&phase.to_le_bytes());
        assert_eq!(ImageHeader::decode(&header).and_then(|header| header.check_complete()), outcome);
    }
    let new = ImageHeader::in_use(identity(1, "new"));
    assert_eq!(ImageHeader::decode(&new.encode()), Ok(new.clone()));
    assert_eq!((new.check_complete(), new.contents_bytes()), (Err(ImageError::InUse), Some(0)));
}

#[test]
fn another_format_is_named() {
    let (mut header, _) = image(&ImageContents::default(), ImageOrigin::default());
    header[FORMAT_AT] = 9;
    assert_eq!(ImageHeader::decode(&header), Err(ImageError::Format { found: 9 }));
    assert_eq!(ImageHeader::decode(&[0; HEADER_BYTES]), Err(ImageError::Magic));
    assert_eq!(ImageHeader::decode(&header[..100]), Err(ImageError::Magic));
}

proptest! {
    #[test]
    fn extents_of_dropped_objects_that_are_lent_are_withheld(before in contents(), bits in any::<u16>()) {
        let is_kept = |object: &KeptObject| bits >> (object.digest.0 % 16) & 1 == 1;
        let mut after = before.clone();
        after.retain(512, is_kept);
        let kept: Vec<KeptObject> = before.objects.iter().copied().filter(is_kept).collect();
        prop_assert_eq!(&after.objects, &kept);
        let lent = before.objects.iter().filter(|object| object.lent && !is_kept(object));
        let offsets: Vec<u64> = lent.map(|object| object.extent.offset).collect();
        let withheld = &after.withheld[before.withheld.len()..];
        prop_assert_eq!(withheld.iter().map(|extent| extent.offset).collect::<Vec<_>>(), offsets);
        prop_assert!(withheld.iter().all(|extent| extent.bytes % 512 == 0 || extent.bytes == u64::MAX));
    }
}

/// The bytes of one object, which every later version of this format reads.
#[test]
fn the_encoding_of_an_object_is_fixed() {
    let object = KeptObject {
        digest: Digest(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        version: Version(0x11),
        checksum: 0x12,
        extent: Extent { offset: 0x13, bytes: 0x14 },
        extra_granules: 0x15,
        tail: TailPlace { page_class: Some(3), offset: 0x16, bytes: 0x17, checksum: 0x18 },
        tenant: 0x19,
        group: 0x1a,
        soft_pin_ns: 0x1b,
        priority: ObjectPriority::new(-1).expect("it is in range"),
        hard_pin: true,
        head: false,
        wanted: true,
        protected: false,
        lent: true,
        replica: true,
        copies: 2,
        at: ReplicaSet::FIRST.with(2),
    };
    let mut bytes = Vec::new();
    object.encode(&mut bytes);
    let mut expected = vec![0x10, 0x0f, 0x0e, 0x0d, 0x0c, 0x0b, 0x0a, 9, 8, 7, 6, 5, 4, 3, 2, 1];
    for word in [0x11u64, 0x12, 0x13, 0x14, 0x16, 0x18, 0x1a, 0x1b] {
        expected.extend_from_slice(&word.to_le_bytes());
    }
    expected.extend_from_slice(&[0x19, 0, 0, 0, 0x17, 0, 0, 0, 0b111_0101, 0xf, 0x15, 3, 2, 0b101, 0, 0]);
    assert_eq!(bytes, expected);
    assert_eq!(bytes.len(), OBJECT_BYTES);
}
