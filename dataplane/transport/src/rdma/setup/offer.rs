//! Wire format of connection setup: the halves that both sides exchange over another channel.
//!
//! ```text
//!  0 magic u32 "KVPO"  4 version u8       5 link layer u8   6 GID kind u8  7 MTU code u8
//!  8 queue pair u32   12 packet number u32 16 GID 16 bytes
//! 32 LID u16          34 grant u16        36 message bytes u32            40 bits per second u64
//! 48 reads served u8  49 reads started u8 50 rail u16       52 name bytes u8 53 zeros
//! 56 device name
//! ```
//!
//! An answer is a status, followed by the other half, or by a text with the reason of the rejection.

use kvplane_proto::Status;
use kvplane_sys::verbs::{Gid, GidKind, LinkLayer, Mtu};

use crate::rdma::link::GRANT_LEAST;
use crate::rdma::wire::{ENVELOPE_BYTES, KEY_BYTES, VERSION, WireError, word16, word32, word64};

const MAGIC: u32 = u32::from_le_bytes(*b"KVPO");
const HALF_BYTES: usize = 56;
/// Limit of a device name and of a reason, in bytes.
const TEXT_BYTES: usize = 255;
/// Smallest message size that a peer must support.
pub(in crate::rdma) const MESSAGE_BYTES_LEAST: u32 = 256;
const _: () = assert!(MESSAGE_BYTES_LEAST as usize >= 2 * (ENVELOPE_BYTES + KEY_BYTES));

/// One side's half of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Half {
    pub(super) link_layer: LinkLayer,
    pub(super) gid_kind: GidKind,
    pub(super) mtu: Mtu,
    pub(super) qp_num: u32,
    pub(super) packet_number: u32,
    pub(super) gid: Gid,
    pub(super) lid: u16,
    /// Receives that this side grants to the other.
    pub(super) grant: u16,
    /// Size of each receive, in bytes.
    pub(super) message_bytes: u32,
    pub(super) bits_per_second: u64,
    pub(super) reads_served: u8,
    pub(super) reads_started: u8,
    /// Position of this device: the other side prefers its own device at that position.
    pub(super) rail: u16,
    pub(super) device: String,
}

impl Half {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_le_bytes().to_vec();
        let layer = match self.link_layer {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
            LinkLayer::Other => 0,
        };
        let kind = match self.gid_kind {
            GidKind::InfiniBand => 0,
            GidKind::RoceV1 => 1,
            GidKind::RoceV2 => 2,
        };
        out.extend_from_slice(&[VERSION, layer, kind, self.mtu.raw() as u8]);
        out.extend_from_slice(&self.qp_num.to_le_bytes());
        out.extend_from_slice(&self.packet_number.to_le_bytes());
        out.extend_from_slice(&self.gid.0);
        out.extend_from_slice(&self.lid.to_le_bytes());
        out.extend_from_slice(&self.grant.to_le_bytes());
        out.extend_from_slice(&self.message_bytes.to_le_bytes());
        out.extend_from_slice(&self.bits_per_second.to_le_bytes());
        out.extend_from_slice(&[self.reads_served, self.reads_started]);
        out.extend_from_slice(&self.rail.to_le_bytes());
        let name = shortened(&self.device);
        out.extend_from_slice(&[name.len() as u8, 0, 0, 0]);
        out.extend_from_slice(name.as_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let Some((fixed, name)) = bytes.split_at_checked(HALF_BYTES) else { return Err(WireError::Short(bytes.len())) };
        let magic = word32(fixed, 0);
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        if fixed[4] != VERSION {
            return Err(WireError::Version(fixed[4]));
        }
        if name.len() != usize::from(fixed[52]) {
            return Err(WireError::Short(bytes.len()));
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&fixed[16..32]);
        let half = Self {
            link_layer: match fixed[5] {
                1 => LinkLayer::InfiniBand,
                2 => LinkLayer::Ethernet,
                _ => LinkLayer::Other,
            },
            gid_kind: match fixed[6] {
                0 => GidKind::InfiniBand,
                1 => GidKind::RoceV1,
                2 => GidKind::RoceV2,
                other => return Err(WireError::Field("the GID's kind", other.into())),
            },
            mtu: Mtu::from_raw(fixed[7].into()).ok_or(WireError::Field("the MTU", fixed[7].into()))?,
            qp_num: word32(fixed, 8),
            packet_number: word32(fixed, 12),
            gid: Gid(gid),
            lid: word16(fixed, 32),
            grant: word16(fixed, 34),
            message_bytes: word32(fixed, 36),
            bits_per_second: word64(fixed, 40),
            reads_served: fixed[48],
            reads_started: fixed[49],
            rail: word16(fixed, 50),
            device: String::from_utf8_lossy(name).into_owned(),
        };
        if half.grant < GRANT_LEAST {
            return Err(WireError::Field("the grant", half.grant.into()));
        }
        if half.message_bytes < MESSAGE_BYTES_LEAST {
            return Err(WireError::Field("the length of messages", half.message_bytes.into()));
        }
        Ok(half)
    }
}

/// Answer to an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Half(Half),
    Refused(Status, String),
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (status, rest) = match self {
            Self::Half(half) => (Status::Ok, half.encode()),
            Self::Refused(status, why) => (*status, shortened(why).as_bytes().to_vec()),
        };
        let mut out = (status as u16).to_le_bytes().to_vec();
        out.extend_from_slice(&rest);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let Some((code, rest)) = bytes.split_first_chunk::<2>() else { return Err(WireError::Short(bytes.len())) };
        let code = u16::from_le_bytes(*code);
        match Status::from_code(code).ok_or(WireError::Field("the status", code.into()))? {
            Status::Ok => Half::decode(rest).map(Self::Half),
            status => {
                let text = &rest[..rest.len().min(TEXT_BYTES)];
                Ok(Self::Refused(status, String::from_utf8_lossy(text).into_owned()))
            }
        }
    }
}

/// Truncates a text to the limit of the wire format.
fn shortened(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn half() -> Half {
        Half {
            link_layer: LinkLayer::Ethernet,
            gid_kind: GidKind::RoceV2,
            mtu: Mtu::Bytes4096,
            qp_num: 0x0001_0203,
            packet_number: 0x0004_0506,
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1]),
            lid: 0x0708,
            grant: 16,
            message_bytes: 8192,
            bits_per_second: 100_000_000_000,
            reads_served: 16,
            reads_started: 15,
            rail: 1,
            device: "rxe1".to_owned(),
        }
    }

    #[test]
    fn the_layout_stays() {
        let golden = [
            0x4b, 0x56, 0x50, 0x4f, 1, 2, 2, 5, 3, 2, 1, 0, 6, 5, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10,
            77, 0, 1, 8, 7, 16, 0, 0, 32, 0, 0, 0, 0xe8, 0x76, 0x48, 0x17, 0, 0, 0, 16, 15, 1, 0, 4, 0, 0, 0, b'r',
            b'x', b'e', b'1',
        ];
        assert_eq!(half().encode(), golden);
        assert_eq!(Half::decode(&golden), Ok(half()));
        let refused = Answer::Refused(Status::Busy, "no place".to_owned());
        assert_eq!(Answer::decode(&refused.encode()), Ok(refused));
        let accepted = Answer::Half(half());
        assert_eq!(Answer::decode(&accepted.encode()), Ok(accepted));
        assert_eq!(shortened(&"ä".repeat(200)).len(), 254);
    }

    #[test]
    fn offers_below_the_minimum_are_rejected() {
        for bad in [Half { grant: 3, ..half() }, Half { message_bytes: 100, ..half() }] {
            assert!(Half::decode(&bad.encode()).is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..120), at in 0usize..60) {
            let _ = Answer::decode(&bytes);
            let mut near = half().encode();
            near[at] ^= bytes.first().copied().unwrap_or(1);
            let _ = Half::decode(&near);
            let _ = Half::decode(&near[..at]);
        }
    }
}
