//! Tail of an object: its name and options, stored behind its bytes in the pool and with its record on an SSD.
//!
//! Layout: a head of 24 bytes, the tenant's name, the key. The head: group u64, tenant u32, soft pin in milliseconds
//! u32, length of the key u16, length of the tenant's name u8, data type u8, flags u8, priority i8, number of replicas
//! u8, a zero byte. The number of replicas is 0 up to two: earlier versions read such tails only. All integers are
//! little-endian. A tail has no checksum of its own: the name is verified against the object's digest, and
//! on an SSD the record's checksum covers it.

use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{ObjectName, ObjectPriority, PutFlags, PutItem, PutOptions};
use kvplane_proto::{Digest, Limits};

use crate::entry::TAIL_BYTES_MOST;

/// Length of a tail's head.
pub const TAIL_HEAD_BYTES: usize = 24;
/// Offset of the priority in a tail's head.
const PRIORITY_AT: usize = 21;
/// Offset of the number of replicas in a tail's head.
const REPLICAS_AT: usize = 22;
/// Length of the longest tail.
pub const TAIL_MOST: usize = TAIL_HEAD_BYTES + Limits::NAME_BYTES + Limits::KEY_BYTES;

const _: () = assert!(TAIL_MOST <= TAIL_BYTES_MOST as usize);

/// Head of a tail: everything before the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TailHead {
    /// Options under which the object is kept.
    pub options: PutOptions,
    /// Length of the key, in bytes.
    pub key_bytes: u16,
    /// Length of the tenant's name, in bytes.
    pub tenant_bytes: u8,
}

impl TailHead {
    /// Returns the head of a put's tail; `None` if the put has neither name nor options.
    #[must_use]
    pub fn of(item: &PutItem) -> Option<Self> {
        let options = item.options();
        let replicas = if options.replicas > 2 { options.replicas } else { 0 };
        let options = PutOptions { replace: false, replicas, wait_replicas: 0, ack: None, ..options };
        let head = Self { options, key_bytes: item.key_bytes, tenant_bytes: item.tenant_bytes };
        (item.key_bytes > 0 || options != PutOptions::default()).then_some(head)
    }

    /// Returns the length of the name.
    #[must_use]
    pub const fn name_bytes(&self) -> usize {
        self.key_bytes as usize + self.tenant_bytes as usize
    }

    /// Returns the length of the whole tail.
    #[must_use]
    pub const fn tail_bytes(&self) -> usize {
        TAIL_HEAD_BYTES + self.name_bytes()
    }

    /// Appends the tail to `out`.
    pub fn encode(&self, name: &ObjectName<'_>, out: &mut Vec<u8>) {
        let PutOptions { tenant, group, soft_pin_ms, data_type, replicas, .. } = self.options;
        let flags = PutItem::plain(kvplane_proto::Digest(0), 0).with_options(&self.options).flags;
        out.extend_from_slice(&group.to_le_bytes());
        out.extend_from_slice(&tenant.to_le_bytes());
        out.extend_from_slice(&soft_pin_ms.to_le_bytes());
        out.extend_from_slice(&self.key_bytes.to_le_bytes());
        let priority = self.options.priority.bits();
        out.extend_from_slice(&[self.tenant_bytes, data_type, flags.bits(), priority, replicas, 0]);
        out.extend_from_slice(name.tenant);
        out.extend_from_slice(name.key);
    }

    /// Decodes a head; `None` if the bytes are not one.
    #[must_use]
    pub fn decode(bytes: &[u8; TAIL_HEAD_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let of_requests = |flags: PutFlags| flags.has(PutFlags::REPLACE) || flags.has(PutFlags::WAIT_REPLICAS);
        let flags = PutFlags::from_bits(bytes[20]).filter(|flags| !of_requests(*flags) && flags.ack().is_none())?;
        let head = Self {
            options: PutOptions {
                tenant: word(8),
                group: u64::from(word(4)) << 32 | u64::from(word(0)),
                soft_pin_ms: word(12),
                hard_pin: flags.has(PutFlags::HARD_PIN),
                priority: ObjectPriority::from_bits(bytes[PRIORITY_AT])?,
                data_type: bytes[19],
                replace: false,
                part: flags.part(),
                replicas: bytes[REPLICAS_AT],
                ..PutOptions::default()
            },
            key_bytes: u16::from_le_bytes([bytes[16], bytes[17]]),
            tenant_bytes: bytes[18],
        };
        let has_replicas = head.options.replicas == 0 || (3..=Limits::REPLICAS).contains(&head.options.replicas);
        let meant = usize::from(head.key_bytes) <= Limits::KEY_BYTES && has_replicas && bytes[23] == 0;
        meant.then_some(head)
    }

    /// Decodes a whole tail; `None` if the bytes are not one.
    #[must_use]
    pub fn split(bytes: &[u8]) -> Option<(Self, ObjectName<'_>)> {
        let (head, name) = bytes.split_first_chunk::<TAIL_HEAD_BYTES>()?;
        let head = Self::decode(head)?;
        let name = (name.len() == head.name_bytes()).then_some(name)?;
        Some((head, ObjectName::split(name, head.tenant_bytes)?))
    }
}

/// Returns true if a tail belongs to this object, as far as it shows: a tail without a name may.
pub(in crate::service) fn is_of(tail: &[u8], digest: Digest) -> bool {
    TailHead::split(tail).is_some_and(|(head, name)| head.key_bytes == 0 || name.digest() == digest)
}

/// Returns the number of the tenant that an object with this tail is charged to.
pub(in crate::service) fn tenant_of(head: &TailHead, name: &ObjectName<'_>) -> u32 {
    if head.key_bytes > 0 { tenant_number(name.tenant) } else { head.options.tenant }
}

/// Returns the number of the tenant that the object with this tail is charged to: the default tenant's without one.
#[must_use]
pub fn tenant_of_tail(tail: &[u8]) -> u32 {
    TailHead::split(tail).map_or(0, |(head, name)| tenant_of(&head, &name))
}

/// Returns true if reclaim of the SSD has to keep the object with this tail.
pub(in crate::service) fn is_hard_pinned(tail: &[u8]) -> bool {
    TailHead::split(tail).is_some_and(|(head, _)| head.options.hard_pin)
}

/// Sets the priority in a tail, if there is one.
pub(in crate::service) fn set_priority(tail: &mut [u8], priority: ObjectPriority) {
    if tail.len() >= TAIL_HEAD_BYTES {
        tail[PRIORITY_AT] = priority.bits();
    }
}

/// Returns the tail at an offset of a pool of this length; empty if there is none. A process that has mapped the pool
/// may have corrupted the lengths in it, which may not lead beyond the pool's end.
pub(in crate::service) fn tail_within(at: u64, pool_bytes: u64, mut read: impl FnMut(u64, &mut [u8])) -> Vec<u8> {
    let room = pool_bytes.saturating_sub(at);
    let mut head = [0; TAIL_HEAD_BYTES];
    if room < TAIL_HEAD_BYTES as u64 {
        return Vec::new();
    }
    read(at, &mut head);
    let bytes = TailHead::decode(&head).map_or(0, |head| head.tail_bytes());
    if bytes == 0 || bytes as u64 > room {
        return Vec::new();
    }
    let mut tail = vec![0; bytes];
    read(at, &mut tail);
    tail
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_encoded_tail_decodes_to_itself(
            words in any::<(u32, u64, u32, bool, u8)>(),
            priority in -4..=4i64,
            replicas in 0..=Limits::REPLICAS,
            tenant in prop::collection::vec(any::<u8>(), 0..=255),
            key in prop::collection::vec(any::<u8>(), 1..=300),
        ) {
            let (account, group, soft_pin_ms, hard_pin, data_type) = words;
            let wishes = PutOptions { tenant: account, group, soft_pin_ms, hard_pin, ..PutOptions::default() };
            let priority = ObjectPriority::new(priority).expect("it is in range");
            let options = PutOptions { priority, data_type, replace: true, replicas, wait_replicas: 9, ..wishes };
            let name = ObjectName { tenant: &tenant, key: &key };
            let head = TailHead::of(&PutItem::named(&name, 1, &options)).expect("it has a name");
            let mut bytes = Vec::new();
            head.encode(&name, &mut bytes);
            prop_assert_eq!(bytes.len(), head.tail_bytes());
            prop_assert_eq!(TailHead::split(&bytes), Some((head, name)));
            let replicas = if replicas > 2 { replicas } else { 0 };
            prop_assert_eq!(head.options, PutOptions { replace: false, replicas, wait_replicas: 0, ..options });
            prop_assert!(TailHead::split(&bytes[..bytes.len() - 1]).is_none());
        }

        #[test]
        fn no_bytes_make_decoding_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some((head, name)) = TailHead::split(&bytes) {
                let mut again = Vec::new();
                head.encode(&name, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn corrupted_lengths_yield_no_tail() {
        let (name, options) = (ObjectName { tenant: b"acme", key: b"a key" }, PutOptions::default());
        let head = TailHead::of(&PutItem::named(&name, 1, &options)).expect("it has a name");
        let mut tail = Vec::new();
        head.encode(&name, &mut tail);
        let mut pool = vec![0; 100];
        pool.extend_from_slice(&tail);
        let read = |pool: &[u8], at: u64| {
            tail_within(at, pool.len() as u64, |at, into: &mut [u8]| {
                into.copy_from_slice(&pool[at as usize..][..into.len()]);
            })
        };
        assert_eq!(read(&pool, 100), tail);
        let bytes = pool.len() as u64;
        for at in [bytes - 23, bytes, bytes + 1, u64::MAX] {
            assert!(read(&pool, at).is_empty(), "{at}");
        }
        // A stated key length beyond the rest of the pool.
        pool[117] = 15;
        assert!(read(&pool, 100).is_empty());
    }

    #[test]
    fn an_object_without_name_and_options_has_no_tail() {
        let plain = PutItem::plain(Digest(1), 2);
        assert_eq!(TailHead::of(&plain), None);
        assert_eq!(TailHead::of(&plain.with_options(&PutOptions { replace: true, ..PutOptions::default() })), None);
        assert!(TailHead::of(&plain.with_options(&PutOptions { hard_pin: true, ..PutOptions::default() })).is_some());
    }
}
