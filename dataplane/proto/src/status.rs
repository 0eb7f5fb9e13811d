//! The outcome of a request, as a stable number on the wire and a sentence for people.

use core::fmt;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// Outcome of a request. Numbers are append-only: peers of other versions rely on them.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u16)]
        pub enum Status {
            $($(#[$doc])* $name = $code,)*
        }

        impl Status {
            /// Every status, in number order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The status with this number, if it is one this version knows.
            #[must_use]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The sentence for people.
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
    /// The object is there already; nothing was changed.
    Exists = 2, "the object exists already and was left as it is";
    /// Not enough room, even after evicting everything that may be evicted; or the SSD failed to take what was to be
    /// written to it, or takes no writes and so cannot take note of a removal.
    NoSpace = 3, "the pool is full of what is pinned or being written: add memory; or the SSD failed to take the write";
    /// The object is over the limit of one object, or larger than the pool.
    TooLarge = 4, "the object is larger than the store accepts";
    /// An object of 0 bytes cannot be stored.
    Empty = 5, "an object of 0 bytes cannot be stored";
    /// The request is malformed or breaks a limit.
    BadRequest = 6, "the request is malformed or over a limit";
    /// The shard does not own the slot; the sender's map is old or new.
    WrongOwner = 7, "this shard does not own the key; fetch the cluster map again";
    /// The deadline passed first.
    DeadlineExceeded = 8, "the deadline passed before the request was done";
    /// A bounded queue or table is full; try again later.
    Busy = 9, "the peer is at a limit of its own; try again";
    /// The bytes do not match their checksum.
    Corrupt = 10, "the bytes do not match their checksum";
    /// The peer may not do this.
    Unauthorized = 11, "not authorised";
    /// No common protocol version, or another cluster.
    Incompatible = 12, "the peers speak no common version or belong to different clusters";
    /// The id belongs to something that is gone.
    Stale = 13, "the id is of something that is gone";
    /// The range is not within the object or the segment.
    OutOfRange = 14, "the range is not within the object or the registered segment";
    /// The caller's buffer is smaller than the object.
    BufferTooSmall = 15, "the buffer is smaller than the object";
    /// The connection to the peer was lost and could not be had again in time.
    Unreachable = 16, "the peer cannot be reached";
    /// The cluster has no member that owns the slot.
    NoOwner = 17, "no member owns the key; the cluster has no storage";
    /// The caller withdrew the request.
    Cancelled = 18, "cancelled by the caller";
    /// The peer does not know this kind of request.
    Unsupported = 19, "the peer does not support this request";
    /// The tenant has used up its quota, and what it has cannot be evicted; or the object alone is longer than that.
    QuotaExceeded = 20, "the tenant's quota of memory has no room for it: the object alone is longer than the quota, \
                         or the rest is held by what cannot be evicted; kvplane ctl tenants shows and raises it";
    /// No such tenant, where only known ones may put.
    NoTenant = 21, "there is no such tenant; make it with kvplane ctl tenants set";
    /// The share of memory for objects that are never evicted is used up.
    PinLimit = 22, "the share of memory for pinned objects is used up; put it without a hard pin or remove some";
    /// The object is being written, and not all of the range is there yet.
    Pending = 23, "the object is being written, and not all of these bytes are there yet";
    /// The object is kept in stripes, and this is what names them: to be asked for as such.
    Striped = 24, "the object is kept in stripes";
    /// A greeting is to be followed by the proof of a ticket.
    Prove = 25, "the shard wants a ticket of the control plane; a client gets one with an identity of its cluster";
    /// The ticket was made with a key that the shard was not given.
    NoKey = 26, "the shard was not given the key of this ticket yet; if that lasts, its node does not reach the \
                 control plane";
    /// The ticket is not good any more by the ticket time that the shard's node was told.
    TicketEnded = 27, "the shard counts the ticket as ended and was shown no newer one; if that lasts, the client does \
                       not reach the control plane, or the shard's node follows another one";
    /// A put is to be acknowledged when an SSD has it, and the object's owner has none.
    NoSsd = 28, "the node of this key has no SSD to acknowledge the put from; leave that to the node, or give it --ssd";
    /// The shard takes sealed connections only.
    WantsTls = 29, "the shard wants TLS on data connections: start this process with --data-tls offer or require";
    /// No sealed connection could be had; never on the wire.
    TlsFailed = 30, "the TLS handshake with the shard failed: look at both ends' certificates and --data-tls, and at \
                     this process' log for which it is";
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
