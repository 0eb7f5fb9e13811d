//! First messages of a connection between two processes of a mesh.
//!
//! The process of the higher rank connects and sends a [`Hello`]; the other one answers with a [`Welcome`]. Both name
//! the incarnations that they are and that they expect, so a process that reaches a reused address, or is the former
//! incarnation of its rank, gets no channel.
//!
//! ```text
//! hello:    0 version u8   1 from u8   2 to u8   3 world bytes u8   4 longest payload u32
//!           8 from's incarnation u64   16 to's incarnation u64   24 world, then the half of an RDMA connection
//! welcome:  0 version u8   1 zero u8   2 status u16   4 ring bytes u32   8 incarnation u64
//!           16 answer to the half of an RDMA connection
//! ```
//!
//! Little-endian. Over a Unix socket a message is padded with zeros to [`MESSAGE_BYTES`], with its length in front.

use kvplane_proto::Status;

/// Version of these messages, and of the layout of channels.
pub(crate) const VERSION: u8 = 1;
/// Limit of a world's name, in bytes.
pub(crate) const WORLD_BYTES: usize = u8::MAX as usize;
/// Length of every message over a Unix socket.
pub(crate) const MESSAGE_BYTES: usize = 512;
const HELLO_FIXED_BYTES: usize = 24;
const WELCOME_FIXED_BYTES: usize = 16;

/// Message of the process that connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Name of the world.
    pub(crate) world: String,
    /// Rank and incarnation of the sender.
    pub(crate) from: (u8, u64),
    /// Rank and incarnation of the process that it expects to reach.
    pub(crate) to: (u8, u64),
    /// Longest payload of frames.
    pub(crate) payload_bytes: u32,
    /// Its half of an RDMA connection; empty without one.
    pub(crate) rdma: Vec<u8>,
}

/// Answer to a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// `Ok`, or the reason of a refusal.
    pub(crate) status: Status,
    /// Incarnation of the sender.
    pub(crate) incarnation: u64,
    /// Capacity of each ring of a channel in shared memory; 0 over other lanes.
    pub(crate) ring_bytes: u32,
    /// Answer to the half of an RDMA connection; empty without one.
    pub(crate) rdma: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Hello {
    /// Encodes the message. The world's name is at most [`WORLD_BYTES`] long.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION, self.from.0, self.to.0, self.world.len() as u8];
        out.extend_from_slice(&self.payload_bytes.to_le_bytes());
        out.extend_from_slice(&self.from.1.to_le_bytes());
        out.extend_from_slice(&self.to.1.to_le_bytes());
        out.extend_from_slice(self.world.as_bytes());
        out.extend_from_slice(&self.rdma);
        out
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// The status to refuse it with.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, Status> {
        if body.first().is_some_and(|version| *version != VERSION) {
            return Err(Status::Incompatible);
        }
        let (fixed, rest) = body.split_at_checked(HELLO_FIXED_BYTES).ok_or(Status::BadRequest)?;
        let (world, rdma) = rest.split_at_checked(usize::from(fixed[3])).ok_or(Status::BadRequest)?;
        Ok(Self {
            world: String::from_utf8(world.to_vec()).map_err(|_| Status::BadRequest)?,
            from: (fixed[1], word(fixed, 8)),
            to: (fixed[2], word(fixed, 16)),
            payload_bytes: half(fixed, 4),
            rdma: rdma.to_vec(),
        })
    }
}

impl Welcome {
    /// Returns a refusal.
    pub(crate) const fn refusal(status: Status, incarnation: u64) -> Self {
        Self { status, incarnation, ring_bytes: 0, rdma: Vec::new() }
    }

    /// Encodes the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION, 0];
        out.extend_from_slice(&(self.status as u16).to_le_bytes());
        out.extend_from_slice(&self.ring_bytes.to_le_bytes());
        out.extend_from_slice(&self.incarnation.to_le_bytes());
        out.extend_from_slice(&self.rdma);
        out
    }

    /// Decodes the message; `None` if it is malformed or of another version.
    pub(crate) fn decode(body: &[u8]) -> Option<Self> {
        let (fixed, rdma) = body.split_at_checked(WELCOME_FIXED_BYTES)?;
        if fixed[0] != VERSION {
            return None;
        }
        Some(Self {
            status: Status::from_code(u16::from_le_bytes([fixed[2], fixed[3]]))?,
            incarnation: word(fixed, 8),
            ring_bytes: half(fixed, 4),
            rdma: rdma.to_vec(),
        })
    }
}

/// Pads a message for a Unix socket.
pub(crate) fn pad(message: &[u8]) -> [u8; MESSAGE_BYTES] {
    let mut out = [0; MESSAGE_BYTES];
    out[..2].copy_from_slice(&(message.len() as u16).to_le_bytes());
    out[2..2 + message.len()].copy_from_slice(message);
    out
}

/// Returns the message in padded bytes; `None` if its length is wrong.
pub(crate) fn unpad(bytes: &[u8; MESSAGE_BYTES]) -> Option<&[u8]> {
    bytes.get(2..2 + usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            world: "jobs/7".to_owned(),
            from: (5, 0x0102_0304_0506_0708),
            to: (2, 9),
            payload_bytes: 131_072,
            rdma: vec![0xAA, 0xBB],
        }
    }

    #[test]
    fn messages_have_these_bytes() {
        let expected = [
            1, 5, 2, 6, 0, 0, 2, 0, 8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 0, 0, 0, 0, b'j', b'o', b'b', b's', b'/', b'7',
            0xAA, 0xBB,
        ];
        assert_eq!(hello().encode(), expected);
        assert_eq!(Hello::decode(&expected), Ok(hello()));
        let welcome = Welcome { status: Status::Ok, incarnation: 9, ring_bytes: 1 << 20, rdma: vec![7] };
        let expected = [1, 0, 0, 0, 0, 0, 16, 0, 9, 0, 0, 0, 0, 0, 0, 0, 7];
        assert_eq!(welcome.encode(), expected);
        assert_eq!(Welcome::decode(&expected), Some(welcome));
        let refusal = Welcome::refusal(Status::Stale, 3);
        assert_eq!(Welcome::decode(&refusal.encode()), Some(refusal));
    }

    #[test]
    fn malformed_messages_are_refused() {
        let bytes = hello().encode();
        for length in 0..29 {
            assert_eq!(Hello::decode(&bytes[..length]), Err(Status::BadRequest), "{length}");
        }
        assert_eq!(Hello::decode(&[2; 64]), Err(Status::Incompatible));
        assert!(Welcome::decode(&[1; 15]).is_none() && Welcome::decode(&[2; 16]).is_none());
        let unknown = [1, 0, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(Welcome::decode(&unknown).is_none());
    }

    #[test]
    fn padded_messages_keep_their_length() {
        for length in [0, 1, MESSAGE_BYTES - 2] {
            let message = vec![3; length];
            assert_eq!(unpad(&pad(&message)), Some(&message[..]));
        }
        assert_eq!(unpad(&[0xFF; MESSAGE_BYTES]), None);
    }
}
