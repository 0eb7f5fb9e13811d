//! Heads of the frames that members exchange.
//!
//! A head has 64 bytes, little-endian; docs/wire.md has the table. A head that does not decode is of a peer of another
//! version, or damaged: the connection is not used any longer.

use core::fmt;

use kvplane_group::{GroupId, GroupRank};

use crate::data_type::DataType;
use crate::operation::{CollectiveKind, Signature};
use crate::reduction::Reduction;

/// Bytes of an encoded head.
pub const HEAD_BYTES: usize = 64;
/// Version of the format.
const VERSION: u8 = 1;
/// No reduction, or no root.
const NONE: u8 = u8::MAX;

/// Meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum FrameKind {
    /// The sender has begun the operation and accepts its data.
    Start,
    /// Bytes of a step of the operation, from `offset` of the step's span on.
    Data { step: u16, offset: u64 },
    /// The sender has all of the operation's result.
    Confirm,
    /// The sender lacks the result of the operation, which is complete, and requests it from a member that has it.
    Fetch,
    /// Bytes of that result, of `total` bytes.
    Result { offset: u64, total: u64 },
    /// The sender has ended the operation without a result: nobody completes it.
    Abort { cause: AbortCause },
    /// The sender has a message of `total` bytes; its first bytes follow.
    Offer { message: u64, tag: i32, total: u64 },
    /// The sender has memory for a message, with what the offer brought, and accepts the rest of it.
    Accept { message: u64 },
    /// The sender has no room of that size for a message.
    Reject { message: u64, room: u64 },
    /// More bytes of a message.
    Message { message: u64, offset: u64 },
    /// The sender has given up a message that it offered.
    Withdraw { message: u64 },
    /// The sender has received the rest of a message.
    Arrival { message: u64 },
    /// The sender leaves the group, and awaits that the receiver has completed the operation.
    Leave,
    /// The sender has completed the operation that the receiver awaits.
    MayLeave,
}

/// Cause of an operation's end without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum AbortCause {
    /// `peer` calls another operation than the sender, whose signature is the frame's.
    Mismatch { peer: GroupRank },
    /// The sender's deadline passed while it waited for `peer`.
    Deadline { peer: GroupRank },
    /// The sender has no memory for it.
    NoMemory,
}

/// Head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The group.
    pub group: GroupId,
    /// Epoch of the sender's view; of a message, 0.
    pub epoch: u64,
    /// Number of the operation; of a message, 0.
    pub operation: u64,
    /// Meaning of the frame.
    pub kind: FrameKind,
    /// Operation that the sender calls; frames of messages and fetches have none.
    pub signature: Option<Signature>,
}

/// Bytes that are no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum HeadError {
    /// Another version of the format.
    Version { found: u8 },
    /// A number that names nothing.
    Invalid { field: &'static str, found: u64 },
}

impl fmt::Display for HeadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { found } => write!(f, "a frame of version {found} instead of {VERSION}"),
            Self::Invalid { field, found } => write!(f, "a frame with {found} as its {field}"),
        }
    }
}

impl std::error::Error for HeadError {}

impl Head {
    /// Encodes the head.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let (kind, step, first, second, extra) = match self.kind {
            FrameKind::Start => (0, 0, 0, 0, 0),
            FrameKind::Data { step, offset } => (1, step, offset, 0, 0),
            FrameKind::Confirm => (2, 0, 0, 0, 0),
            FrameKind::Fetch => (3, 0, 0, 0, 0),
            FrameKind::Result { offset, total } => (4, 0, offset, total, 0),
            FrameKind::Abort { cause: AbortCause::Mismatch { peer } } => (5, 0, 0, 0, u32::from(peer.0)),
            FrameKind::Abort { cause: AbortCause::Deadline { peer } } => (6, 0, 0, 0, u32::from(peer.0)),
            FrameKind::Offer { message, tag, total } => (7, 0, message, total, tag.cast_unsigned()),
            FrameKind::Accept { message } => (8, 0, message, 0, 0),
            FrameKind::Reject { message, room } => (9, 0, message, room, 0),
            FrameKind::Message { message, offset } => (10, 0, message, offset, 0),
            FrameKind::Withdraw { message } => (11, 0, message, 0, 0),
            FrameKind::Abort { cause: AbortCause::NoMemory } => (12, 0, 0, 0, 0),
            FrameKind::Leave => (13, 0, 0, 0, 0),
            FrameKind::MayLeave => (14, 0, 0, 0, 0),
            FrameKind::Arrival { message } => (15, 0, message, 0, 0),
        };
        let mut bytes = [0; HEAD_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &[VERSION, kind]);
        put(2, &step.to_le_bytes());
        put(4, &extra.to_le_bytes());
        put(8, &self.group.0.to_le_bytes());
        put(16, &self.epoch.to_le_bytes());
        put(24, &self.operation.to_le_bytes());
        put(32, &first.to_le_bytes());
        put(40, &second.to_le_bytes());
        if let Some(signature) = self.signature {
            let reduction = signature.reduction.map_or(NONE, |reduction| reduction as u8);
            let root = signature.root.map_or(NONE, |root| root.0);
            // Counts are below 2^40 each: 44 bits, 44 bits, and 8 bits for each of the rest.
            let bits = u128::from(signature.sends) | (u128::from(signature.receives) << 44);
            let rest = [signature.kind as u8 + 1, signature.data_type as u8, reduction, root];
            put(48, &bits.to_le_bytes()[..11]);
            put(60, &rest);
        }
        bytes
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// When the bytes are of another version, or a number names nothing.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self, HeadError> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let [version, kind, low, high, ..] = *bytes;
        if version != VERSION {
            return Err(HeadError::Version { found: version });
        }
        let step = u16::from_le_bytes([low, high]);
        let extra = u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 + byte]));
        let (first, second) = (word(32), word(40));
        let peer = GroupRank(extra as u8);
        let kind = match kind {
            0 => FrameKind::Start,
            1 => FrameKind::Data { step, offset: first },
            2 => FrameKind::Confirm,
            3 => FrameKind::Fetch,
            4 => FrameKind::Result { offset: first, total: second },
            5 => FrameKind::Abort { cause: AbortCause::Mismatch { peer } },
            6 => FrameKind::Abort { cause: AbortCause::Deadline { peer } },
            7 => FrameKind::Offer { message: first, tag: extra.cast_signed(), total: second },
            8 => FrameKind::Accept { message: first },
            9 => FrameKind::Reject { message: first, room: second },
            10 => FrameKind::Message { message: first, offset: second },
            11 => FrameKind::Withdraw { message: first },
            12 => FrameKind::Abort { cause: AbortCause::NoMemory },
            13 => FrameKind::Leave,
            14 => FrameKind::MayLeave,
            15 => FrameKind::Arrival { message: first },
            _ => return Err(HeadError::Invalid { field: "kind", found: u64::from(kind) }),
        };
        Ok(Self { group: GroupId(word(8)), epoch: word(16), operation: word(24), kind, signature: signature(bytes)? })
    }
}

fn signature(bytes: &[u8; HEAD_BYTES]) -> Result<Option<Signature>, HeadError> {
    let [kind, data_type, reduction, root] = std::array::from_fn(|at| bytes[60 + at]);
    if kind == 0 {
        return Ok(None);
    }
    let invalid = |field, found: u8| HeadError::Invalid { field, found: u64::from(found) };
    let mut bits = [0; 16];
    bits[..11].copy_from_slice(&bytes[48..59]);
    let bits = u128::from_le_bytes(bits);
    let mask = (1 << 44) - 1;
    let reduction = match reduction {
        NONE => None,
        number => Some(Reduction::from_number(number).ok_or_else(|| invalid("reduction", number))?),
    };
    Ok(Some(Signature {
        kind: CollectiveKind::from_number(kind - 1).ok_or_else(|| invalid("collective", kind))?,
        data_type: DataType::from_number(data_type).ok_or_else(|| invalid("type of elements", data_type))?,
        reduction,
        root: (root != NONE).then_some(GroupRank(root)),
        sends: (bits & mask) as u64,
        receives: ((bits >> 44) & mask) as u64,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> Vec<FrameKind> {
        let (offset, total, message, room) = (1 << 39, 1 << 40, u64::MAX, 3);
        vec![
            FrameKind::Start,
            FrameKind::Data { step: 65_535, offset },
            FrameKind::Confirm,
            FrameKind::Fetch,
            FrameKind::Result { offset, total },
            FrameKind::Abort { cause: AbortCause::Mismatch { peer: GroupRank(63) } },
            FrameKind::Abort { cause: AbortCause::Deadline { peer: GroupRank(1) } },
            FrameKind::Offer { message, tag: -7, total },
            FrameKind::Accept { message },
            FrameKind::Reject { message, room },
            FrameKind::Message { message, offset },
            FrameKind::Withdraw { message },
            FrameKind::Abort { cause: AbortCause::NoMemory },
            FrameKind::Leave,
            FrameKind::MayLeave,
            FrameKind::Arrival { message },
        ]
    }

    #[test]
    fn heads_are_decoded_as_they_were() {
        let signatures = [
            None,
            Some(Signature {
                kind: CollectiveKind::Barrier,
                data_type: DataType::Bool,
                reduction: Some(Reduction::Xor),
                root: Some(GroupRank(63)),
                sends: 1 << 40,
                receives: (1 << 40) - 1,
            }),
        ];
        for (kind, signature) in kinds().into_iter().flat_map(|kind| signatures.map(|signature| (kind, signature))) {
            let head = Head { group: GroupId(u64::MAX), epoch: 1 << 63, operation: 77, kind, signature };
            assert_eq!(Head::decode(&head.encode()), Ok(head));
        }
    }

    #[test]
    fn heads_have_golden_bytes() {
        let signature = Signature {
            kind: CollectiveKind::AllReduce,
            data_type: DataType::F32,
            reduction: Some(Reduction::Sum),
            root: None,
            sends: 5,
            receives: 5,
        };
        let kind = FrameKind::Data { step: 2, offset: 0x0300 };
        let head = Head { group: GroupId(9), epoch: 8, operation: 7, kind, signature: Some(signature) };
        let hex: String = head.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        let golden = "0101020000000000\
                      0900000000000000\
                      0800000000000000\
                      0700000000000000\
                      0003000000000000\
                      0000000000000000\
                      0500000000500000\
                      00000000010700ff";
        assert_eq!(hex, golden);
    }

    proptest! {
        #[test]
        fn other_bytes_are_refused_or_decoded(bytes in proptest::array::uniform32(any::<u8>()), kind in 0u8..17) {
            let mut head = [0; HEAD_BYTES];
            head[..32].copy_from_slice(&bytes);
            head[32..].copy_from_slice(&bytes);
            head[..2].copy_from_slice(&[VERSION, kind]);
            if let Ok(decoded) = Head::decode(&head) {
                prop_assert_eq!(Head::decode(&decoded.encode()), Ok(decoded));
            }
        }
    }
}
