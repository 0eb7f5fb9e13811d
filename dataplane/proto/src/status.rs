//! Outcome of a request: a stable number on the wire and a sentence for people.

use core::fmt;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// Outcome of a request. Numbers are append-only, as peers of other versions rely on them.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u16)]
        pub enum Status {
            $($(#[$doc])* $name = $code,)*
        }

        impl Status {
            /// Every status, in number order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the status with this number, or `None` if this version does not know it.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Returns the sentence for people.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

statuses! {
    /// Done.
    Ok = 0, "ok";
    /// No such object.
    NotFound = 1, "no such object";
    /// The object exists already; nothing was changed.
    Exists = 2, "the object exists already and was left as it is";
    /// The shard has no memory left, even after evicting every object that may be evicted; or the SSD failed to take
    /// the write; or the SSD tier is degraded, or the shared tier fails, and cannot record a removal.
    NoSpace = 3, "the pool is full of pinned or uncommitted objects: add memory; or the SSD or the shared tier failed \
                  to take the write or removal";
    /// The object exceeds the limit for one object, or the size of the pool.
    TooLarge = 4, "the object is larger than the store accepts";
    /// An object of 0 bytes cannot be stored.
    Empty = 5, "an object of 0 bytes cannot be stored";
    /// The request is malformed or exceeds a limit.
    BadRequest = 6, "the request is malformed or over a limit";
    /// The shard does not own the slot: the client's map is older or newer than the shard's.
    WrongOwner = 7, "this shard does not own the key; fetch the cluster map again";
    /// The deadline passed before the request completed.
    DeadlineExceeded = 8, "the deadline passed before the request completed";
    /// Backpressure: a bounded queue or table of the peer is full. Back off and retry.
    Busy = 9, "the peer is busy: one of its queues or tables is full; back off and retry";
    /// The bytes do not match their checksum.
    Corrupt = 10, "the bytes do not match their checksum";
    /// The client lacks the right for this request.
    Unauthorized = 11, "not authorised";
    /// The peers have no common protocol version, or belong to different clusters.
    Incompatible = 12, "the peers have no common protocol version, or belong to different clusters";
    /// The id refers to something that no longer exists: a pin, a reservation, a put session, a segment or an
    /// incarnation.
    Stale = 13, "the id refers to something that no longer exists";
    /// The range is not within the object or the segment.
    OutOfRange = 14, "the range is not within the object or the registered segment";
    /// The caller's buffer is smaller than the object.
    BufferTooSmall = 15, "the buffer is smaller than the object";
    /// The connection to the peer was lost and could not be re-established in time.
    Unreachable = 16, "the peer cannot be reached";
    /// No member of the cluster owns the slot.
    NoOwner = 17, "no member owns the key; the cluster has no storage";
    /// The caller cancelled the request.
    Cancelled = 18, "cancelled by the caller";
    /// The peer does not support this operation.
    Unsupported = 19, "the peer does not support this request";
    /// The tenant's quota is used up by objects that cannot be evicted, or the object alone is larger than the quota.
    QuotaExceeded = 20, "the tenant's quota has no room for the object: the object alone is larger than the quota, \
                         or objects that cannot be evicted use it up; kvplane ctl tenants shows and raises it";
    /// The tenant does not exist, and the node accepts puts of known tenants only.
    NoTenant = 21, "no such tenant; create it with kvplane ctl tenants set";
    /// The share of memory for hard-pinned objects is used up.
    PinLimit = 22, "the memory for hard-pinned objects is used up; put it without a hard pin, or remove some";
    /// The range belongs to an uncommitted put session and is not completely written.
    Pending = 23, "the object is still being written, and not all of this range is written yet";
    /// The object is a stripe head: it is read as one with [`FrameFlags::HEADS`](crate::FrameFlags::HEADS).
    Striped = 24, "the object is kept in stripes";
    /// Challenge to a hello: the client has to prove its ticket next.
    Prove = 25, "the shard requires a ticket; the control plane issues one to a client with an identity of the cluster";
    /// The shard does not have the key that the ticket was issued with.
    NoKey = 26, "the shard does not have the key of this ticket yet; if that lasts, its node cannot reach the \
                 control plane";
    /// The ticket has expired by the ticket time that the shard's node last received.
    TicketEnded = 27, "the ticket has expired and the client has not renewed it; if that lasts, the client cannot \
                       reach the control plane, or the shard's node follows another control plane";
    /// The put requests an acknowledgement from the SSD, and the object's owner has no SSD.
    NoSsd = 28, "the owner of this key has no SSD to acknowledge the put from; omit the level, or give the node --ssd";
    /// The shard accepts TLS connections only.
    WantsTls = 29, "the shard requires TLS on data connections: start this process with --data-tls offer or require";
    /// The TLS handshake failed; never on the wire.
    TlsFailed = 30, "the TLS handshake with the shard failed: check both ends' certificates and --data-tls, and \
                     this process's log for the reason";
    /// A device failed during the transfer, or its memory was freed while it was registered.
    DeviceFailed = 31, "a device failed during the transfer, or its memory was freed while it was registered: see the \
                        log of the memory's owner; a lost device is usable again after a restart of the process";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_stable_and_invertible() {
        for (index, &status) in Status::ALL.iter().enumerate() {
            assert_eq!(status as usize, index, "{status:?} moved");
            assert_eq!(Status::from_code(status as u16), Some(status));
        }
        assert_eq!(Status::from_code(Status::ALL.len() as u16), None);
    }
}
