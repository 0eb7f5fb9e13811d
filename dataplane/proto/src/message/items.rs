//! Fixed-size records that bodies consist of.

use super::priority::ObjectPriority;
use super::put_flags::{PutFlags, Zeros};
use crate::digest::Digest;
use crate::flags::ItemFlags;
use crate::ids::{PinId, RequestId, ReservationId, SegmentId, Version};
use crate::limits::Limits;
use crate::status::Status;

/// A record with a fixed size on the wire.
pub trait Item: Sized {
    /// Size of the record in bytes.
    const BYTES: usize;
    /// Appends exactly [`Self::BYTES`] bytes.
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes a record; `bytes` has exactly [`Self::BYTES`]. Returns `None` if a field has an invalid value.
    fn decode(bytes: &[u8]) -> Option<Self>;
}

/// Iterator over the records of a validated body.
#[derive(Clone, Debug)]
pub struct Items<'a, T> {
    bytes: &'a [u8],
    marker: core::marker::PhantomData<T>,
}

/// Returns the `items` records of a body; `None` if the body has another length or a record is invalid.
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

/// Field of a record.
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
    ObjectPriority: 1, |value| value.bits(), |raw: u8| Self::from_bits(raw);
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
    /// Object to act on.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    DigestItem {
        digest: Digest,
    }
    /// One version of an object.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    VersionItem {
        digest: Digest,
        version: Version,
    }
    /// Get of one object over a stream.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    GetItem {
        digest: Digest,
        /// Request id of this item's reply.
        request: RequestId,
        /// Size of the client's buffer; a larger object is answered with `BufferTooSmall` and its length in the
        /// argument.
        capacity_bytes: u64,
    }
    /// Read of one range of an object over a stream.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    RangeItem {
        digest: Digest,
        /// Request id of this item's reply.
        request: RequestId,
        /// Start of the range within the object.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    }
    /// Request for one page of a list of objects.
    ListItem {
        /// Any digest of a slot that the shard owns; it selects the shard.
        digest: Digest,
        /// [`ListReply::walk`] of the previous page; 0 for the first page.
        walk: u64,
        /// [`ListReply::next`] of the previous page; 0 for the first page.
        from: u64,
        /// Bits [`ListItem::NAMES`], [`ListItem::ONE`], [`ListItem::CHANGES`] and [`ListItem::REMOVES`].
        flags: u64,
    }
    /// Head of a page of a list.
    ListReply {
        /// Id of the walk, to be returned in the next request.
        walk: u64,
        /// Position of the next page; 0 if this page is the last.
        next: u64,
        /// Number of objects that follow.
        items: u64,
    }
    /// An object in a page of a list.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    KeyItem {
        digest: Digest,
        version: Version,
        /// Length of the object.
        bytes: u64,
        /// Group of the object; 0 for none.
        group: u64,
        /// Number of the tenant that the object is charged to; 0 for the default tenant.
        tenant: u32,
        /// Soft pin that the put requested, in milliseconds.
        soft_pin_ms: u32,
        /// Bytes of the key; 0 if the key is unknown or names were not requested.
        key_bytes: u16,
        /// Bytes of the tenant's name.
        tenant_bytes: u8,
        /// Data type, a number chosen by the putter.
        data_type: u8,
        /// Bits of the constants of [`KeyItem`].
        flags: u32,
    }
    /// Reply to `Size`, for one object.
    SizeReply {
        /// `Ok` or `NotFound`.
        status: Status,
        /// Length of the object.
        bytes: u64,
    }
    /// Read of one range of a segment.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    ReadItem {
        /// Request id of this item's reply.
        request: RequestId,
        segment: SegmentId,
        /// Start of the range within the segment.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    }
    /// Destination of a payload.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    WriteItem {
        segment: SegmentId,
        /// Start of the range within the segment.
        offset: u64,
    }
    /// Evenly spaced ranges of a segment: range `i` starts at `offset + i * stride_bytes`. A single range is a run of
    /// 1.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    RunItem {
        segment: SegmentId,
        /// Start of the first range within the segment.
        offset: u64,
        /// Distance from the start of one range to the start of the next.
        stride_bytes: u64,
        /// Length of each range.
        bytes: u32,
        /// Number of ranges.
        ranges: u32,
    }
    /// Location of a pinned object in the shared pool.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    LookupReply {
        /// `Ok`, or the reason of the failure; then the other fields are 0.
        status: Status,
        /// Read pin, to be released by the client.
        pin: PinId,
        /// Start of the object within the pool.
        offset: u64,
        /// Length of the object.
        bytes: u64,
        version: Version,
        /// CRC-64/NVME of the object's bytes.
        checksum: u64,
        flags: ItemFlags,
    }
    /// Put of one object. The names of a body's puts follow all its records, in the same order: tenant, then key.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    PutItem {
        digest: Digest,
        /// Length of the object.
        bytes: u64,
        /// Group of the object; 0 for none.
        group: u64,
        /// Number of the tenant that the object is charged to; 0 for the default tenant.
        tenant: u32,
        /// Soft pin: time in milliseconds during which other objects are evicted first; 0 for none.
        soft_pin_ms: u32,
        /// Bytes of the key; 0 if the put has no name.
        key_bytes: u16,
        /// Bytes of the tenant's name.
        tenant_bytes: u8,
        /// Data type, a number chosen by the caller.
        data_type: u8,
        /// Flags of the put.
        flags: PutFlags,
        /// Number of replicas, the owner's included; 0 means 1.
        replicas: u8,
        /// Priority of the object among its tenant's when memory is needed.
        priority: ObjectPriority,
        /// Number of replicas, the owner's included, that the reply waits for under the flag for it; 0 means all.
        waits: u8,
        /// Reserved for later versions.
        zeros: Zeros,
    }
    /// Pin of an object, of a group or of a retention: see [`super::Retaining`].
    RetainItem {
        /// Digest of the object; of others, any digest of a slot that the shard owns, which selects the shard.
        digest: Digest,
        /// Number of the retention, or of the group.
        number: u64,
        /// Number of the tenant, for what is not an object; 0 for the default tenant.
        tenant: u32,
        /// Duration in milliseconds, from now, at most [`Limits::SOFT_PIN_MS`]; 0 ends the pin or the retention.
        duration_ms: u32,
        /// Number of a [`super::Retaining`].
        what: u64,
    }
    /// Reply to a [`RetainItem`].
    RetainReply {
        /// `Ok`, `NotFound` if there is no such object in memory, or the reason of the failure.
        status: Status,
        /// Number of objects that are pinned now, or were released.
        objects: u64,
    }
    /// Location in the shared pool to write an object to.
    ReserveReply {
        /// `Ok`, or the reason of the failure; then the other fields are 0.
        status: Status,
        /// Reservation, to be committed or aborted by the client.
        reservation: ReservationId,
        /// Start of the reservation within the pool.
        offset: u64,
    }
    /// Commit of a reservation whose bytes are in place.
    CommitItem {
        /// Reservation from the [`ReserveReply`].
        reservation: ReservationId,
        /// CRC-64/NVME of the object's bytes.
        checksum: u64,
    }
    /// Reply to a commit.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    CommitReply {
        /// `Ok`, `Exists` if another put committed first, or the reason of the failure.
        status: Status,
        /// Version of the object, if the status is `Ok`.
        version: Version,
        flags: ItemFlags,
    }
    /// A range of a put session.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    FillItem {
        /// Number of the put session, from the reply to `Begin`.
        session: u64,
        /// Start of the range within the object.
        offset: u64,
        /// Length of the range.
        bytes: u64,
    }
    /// A pin, a reservation, a put session or a connection.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    IdItem {
        id: u64,
    }
}

/// Bitmap with one bit for each item, the first in the lowest bit of the first byte.
#[derive(Clone, Debug)]
pub struct Bitmap<'a> {
    bytes: &'a [u8],
    items: usize,
}

impl<'a> Bitmap<'a> {
    /// Decodes the bitmap of a body of `items` items; `None` if the body has another length.
    #[must_use]
    pub fn decode(body: &'a [u8], items: u32) -> Option<Self> {
        let items = items as usize;
        (body.len() == items.div_ceil(8)).then_some(Self { bytes: body, items })
    }

    /// Decodes the bitmap of a body of `items` items, and the second bitmap behind it, if there is one.
    #[must_use]
    pub fn decode_two(body: &'a [u8], items: u32) -> Option<(Self, Option<Self>)> {
        let (first, second) = body.split_at_checked((items as usize).div_ceil(8))?;
        let second = if second.is_empty() { None } else { Some(Self::decode(second, items)?) };
        Some((Self::decode(first, items)?, second))
    }

    /// Copies the bits to a slice of the same length.
    ///
    /// # Panics
    /// If the slice has another length.
    pub fn copy_to(&self, bits: &mut [bool]) {
        assert_eq!(bits.len(), self.items, "the slice has as many places as the bitmap has bits");
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

    /// Returns the number of bits.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.items
    }

    /// Returns true if the bitmap has no bits.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.items == 0
    }

    /// Returns the bit of item `index`; false beyond the end.
    #[must_use]
    pub fn get(&self, index: usize) -> bool {
        index < self.items && self.bytes[index / 8] & (1 << (index % 8)) != 0
    }
}
