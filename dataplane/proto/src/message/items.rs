//! The fixed-size records that bodies are made of.

use super::put::{PutFlags, Zeros};
use crate::digest::Digest;
use crate::flags::ItemFlags;
use crate::ids::{PinId, RequestId, ReservationId, SegmentId, Version};
use crate::limits::Limits;
use crate::status::Status;

/// A record with a fixed size on the wire.
pub trait Item: Sized {
    /// Its size.
    const BYTES: usize;
    /// Appends exactly [`Self::BYTES`].
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads back what `encode` wrote; `bytes` has exactly [`Self::BYTES`]. `None` when a field has no meaning.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// Iterator over the records of a checked body.
#[derive(Clone, Debug)]
pub struct Items<'a, T> {
    bytes: &'a [u8],
    marker: core::marker::PhantomData<T>,
}

/// The records of a body that states `items` of them; `None` when its length says otherwise or one has no meaning.
#[must_use]
pub fn decode_items<T: Item>(body: &[u8], items: u32) -> Option<Items<'_, T>> {
    let count = items as usize;
    if count > Limits::QUESTIONS_PER_FRAME || body.len() != count * T::BYTES {
        return None;
    }
    body.chunks_exact(T::BYTES)
        .all(|record| T::decode(record).is_some())
        .then_some(Items { bytes: body, marker: core::marker::PhantomData })
}

/// Appends records to a body.
pub fn encode_items<T: Item>(items: impl IntoIterator<Item = T>, out: &mut Vec<u8>) {
    for item in items {
        item.encode(out);
    }
}

impl<T: Item> Iterator for Items<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        let (record, rest) = self.bytes.split_at_checked(T::BYTES)?;
        self.bytes = rest;
        T::decode(record)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.bytes.len() / T::BYTES;
        (left, Some(left))
    }
}

impl<T: Item> ExactSizeIterator for Items<'_, T> {}

/// A field of a record.
trait Field: Copy {
    const BYTES: usize;
    fn put(self, out: &mut Vec<u8>);
    fn take(bytes: &[u8]) -> Option<Self>;
}

macro_rules! fields {
    ($($type:ty: $bytes:literal, |$value:ident| $word:expr, |$raw:ident: $number:ty| $back:expr;)*) => {
        $(impl Field for $type {
            const BYTES: usize = $bytes;

            fn put(self, out: &mut Vec<u8>) {
                let $value = self;
                out.extend_from_slice(&<$number>::to_le_bytes($word));
            }

            fn take(bytes: &[u8]) -> Option<Self> {
                let $raw = <$number>::from_le_bytes(bytes.get(..$bytes)?.try_into().ok()?);
                $back
            }
        })*
    };
}

fields! {
    u8: 1, |value| value, |raw: u8| Some(raw);
    u16: 2, |value| value, |raw: u16| Some(raw);
    u32: 4, |value| value, |raw: u32| Some(raw);
    u64: 8, |value| value, |raw: u64| Some(raw);
    Digest: 16, |value| value.0, |raw: u128| Some(Digest(raw));
    RequestId: 8, |value| value.to_bits(), |raw: u64| Some(Self::from_bits(raw));
    SegmentId: 8, |value| value.to_bits(), |raw: u64| Some(Self::from_bits(raw));
    PinId: 8, |value| value.to_bits(), |raw: u64| Some(Self::from_bits(raw));
    ReservationId: 8, |value| value.to_bits(), |raw: u64| Some(Self::from_bits(raw));
    Version: 8, |value| value.0, |raw: u64| Some(Self(raw));
    Status: 8, |value| value as u64, |raw: u64| Self::from_code(u16::try_from(raw).ok()?);
    ItemFlags: 8, |value| value.bits(), |raw: u64| Self::from_bits(raw);
    PutFlags: 1, |value| value.0, |raw: u8| Self::from_bits(raw);
}

impl Field for Zeros {
    const BYTES: usize = Self::BYTES;

    fn put(self, out: &mut Vec<u8>) {
        out.resize(out.len() + Self::BYTES, 0);
    }

    fn take(bytes: &[u8]) -> Option<Self> {
        bytes.get(..Self::BYTES)?.iter().all(|byte| *byte == 0).then_some(Self)
    }
}

macro_rules! records {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Item for $name {
            const BYTES: usize = 0 $(+ <$type as Field>::BYTES)*;

            fn encode(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                let mut rest = bytes;
                $(let $field = <$type as Field>::take(rest)?;
                rest = rest.get(<$type as Field>::BYTES..)?;)*
                rest.is_empty().then_some(Self { $($field,)* })
            }
        })*
    };
}

records! {
    /// Names one object.
    DigestItem {
        /// The object.
        digest: Digest,
    }
    /// Names one version of an object.
    VersionItem {
        /// The object.
        digest: Digest,
        /// The version.
        version: Version,
    }
    /// Asks for one object over a stream.
    GetItem {
        /// The object.
        digest: Digest,
        /// Id of this item's own reply.
        request: RequestId,
        /// Room at the asker; a larger object is answered with `BufferTooSmall` and its length in the argument.
        capacity_bytes: u64,
    }
    /// Asks for one range of an object over a stream.
    RangeItem {
        /// The object.
        digest: Digest,
        /// Id of this item's own reply.
        request: RequestId,
        /// Where in it.
        offset: u64,
        /// How much.
        bytes: u64,
    }
    /// Asks which objects are there, from a point on.
    ListItem {
        /// Any digest that the shard owns: says which shard is meant.
        digest: Digest,
        /// From the answer before; 0 to begin.
        walk: u64,
        /// From the answer before; 0 to begin.
        from: u64,
        /// 1: their names are wanted. 2: only the object of this digest is. 4: what changed is wanted instead.
        /// 8: it is to be removed.
        flags: u64,
    }
    /// Begins the answer to a list.
    ListReply {
        /// To be sent back with the next request.
        walk: u64,
        /// Where the next request goes on; 0 when this was all.
        next: u64,
        /// How many objects follow.
        items: u64,
    }
    /// An object that is there.
    KeyItem {
        /// The object.
        digest: Digest,
        /// Its version.
        version: Version,
        /// Its length.
        bytes: u64,
        /// The group that it belongs to; 0 for none.
        group: u64,
        /// The account that it is charged to; 0 for none.
        tenant: u32,
        /// For how long it was to be kept before others, in milliseconds.
        soft_pin_ms: u32,
        /// Bytes of the key; 0 where it is not known, or its name is not wanted.
        key_bytes: u16,
        /// Bytes of the tenant's name.
        tenant_bytes: u8,
        /// What it is, by the putter's numbers.
        data_type: u8,
        /// See the constants of [`KeyItem`].
        flags: u32,
    }
    /// Answers a size: `NotFound`, or `Ok` and the length.
    SizeReply {
        /// `Ok` or `NotFound`.
        status: Status,
        /// Length of the object.
        bytes: u64,
    }
    /// Asks for one range of a segment.
    ReadItem {
        /// Id of this item's own reply.
        request: RequestId,
        /// The segment.
        segment: SegmentId,
        /// Where in it.
        offset: u64,
        /// How much.
        bytes: u64,
    }
    /// Says where a payload goes.
    WriteItem {
        /// The segment.
        segment: SegmentId,
        /// Where in it.
        offset: u64,
    }
    /// Names evenly spaced ranges of a segment: range `i` starts at `offset + i * stride_bytes`. One range alone is a
    /// run of 1.
    RunItem {
        /// The segment.
        segment: SegmentId,
        /// Where the first range starts.
        offset: u64,
        /// From the start of one range to the start of the next.
        stride_bytes: u64,
        /// How much each range holds.
        bytes: u32,
        /// How many there are.
        ranges: u32,
    }
    /// Tells where an object lies in the shared pool; the pin holds it there.
    LookupReply {
        /// `Ok`, or why not; then the rest is 0.
        status: Status,
        /// To be released.
        pin: PinId,
        /// Where in the pool.
        offset: u64,
        /// Length of the object.
        bytes: u64,
        /// Its version.
        version: Version,
        /// CRC-64/NVME of its bytes.
        checksum: u64,
        /// Flags.
        flags: ItemFlags,
    }
    /// An object to be kept. Behind all records of a body stand their names, in order: tenant, then key.
    PutItem {
        /// The object.
        digest: Digest,
        /// Its length.
        bytes: u64,
        /// The group that it belongs to; 0 for none.
        group: u64,
        /// The account that it is charged to; 0 for none.
        tenant: u32,
        /// For how long it is kept before others, in milliseconds; 0 for not at all.
        soft_pin_ms: u32,
        /// Bytes of the key; 0 where the key is not told.
        key_bytes: u16,
        /// Bytes of the tenant's name.
        tenant_bytes: u8,
        /// What it is, by the caller's numbers.
        data_type: u8,
        /// What is asked beside.
        flags: PutFlags,
        /// How many owners are to have it; 0 is 1.
        replicas: u8,
        /// For later versions.
        zeros: Zeros,
    }
    /// Tells where to write an object in the shared pool.
    ReserveReply {
        /// `Ok`, or why not; then the rest is 0.
        status: Status,
        /// To be committed or aborted.
        reservation: ReservationId,
        /// Where in the pool.
        offset: u64,
    }
    /// Says that an object's bytes are in place.
    CommitItem {
        /// From the reservation's answer.
        reservation: ReservationId,
        /// CRC-64/NVME of the bytes.
        checksum: u64,
    }
    /// Answers a commit.
    CommitReply {
        /// `Ok`, `Exists` when another put was first, or why not.
        status: Status,
        /// The object's version, under `Ok`.
        version: Version,
        /// Flags.
        flags: ItemFlags,
    }
    /// Names a range of an object that is being written.
    FillItem {
        /// The object, by what its beginning was answered with.
        draft: u64,
        /// Where in it.
        offset: u64,
        /// How much.
        bytes: u64,
    }
    /// Names a pin, a reservation or an object that is being written.
    IdItem {
        /// Bits of the id.
        id: u64,
    }
}

/// One bit for each item, the first in the lowest bit of the first byte.
#[derive(Clone, Debug)]
pub struct Bitmap<'a> {
    bytes: &'a [u8],
    items: usize,
}

impl<'a> Bitmap<'a> {
    /// The bitmap in a body that states `items`; `None` when its length says otherwise.
    #[must_use]
    pub fn decode(body: &'a [u8], items: u32) -> Option<Self> {
        let items = items as usize;
        (body.len() == items.div_ceil(8)).then_some(Self { bytes: body, items })
    }

    /// The bitmap in a body that states `items`, and another behind it where there is one.
    #[must_use]
    pub fn decode_two(body: &'a [u8], items: u32) -> Option<(Self, Option<Self>)> {
        let (first, second) = body.split_at_checked((items as usize).div_ceil(8))?;
        let second = if second.is_empty() { None } else { Some(Self::decode(second, items)?) };
        Some((Self::decode(first, items)?, second))
    }

    /// Writes the bits to a list of as many.
    ///
    /// # Panics
    /// When the list has another length.
    pub fn copy_to(&self, bits: &mut [bool]) {
        assert_eq!(bits.len(), self.items, "a place for each bit");
        for (bits, byte) in bits.chunks_mut(8).zip(self.bytes) {
            for (at, bit) in bits.iter_mut().enumerate() {
                *bit = byte >> at & 1 != 0;
            }
        }
    }

    /// Appends a bitmap.
    pub fn encode(bits: impl IntoIterator<Item = bool>, out: &mut Vec<u8>) {
        let mut bits = bits.into_iter();
        while let Some(first) = bits.next() {
            let rest = (1..8).zip(&mut bits);
            out.push(rest.fold(u8::from(first), |byte, (at, bit)| byte | u8::from(bit) << at));
        }
    }

    /// Number of bits.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.items
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.items == 0
    }

    /// The bit of item `index`; false past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> bool {
        index < self.items && self.bytes[index / 8] & (1 << (index % 8)) != 0
    }
}
