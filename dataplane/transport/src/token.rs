//! Tokens of readiness events: driver, connection, and generation.
//!
//! All drivers of a host share one poller, so every event carries a token that identifies its receiver. The generation
//! makes an event of a former connection recognizable.

/// Identity of a readiness event's receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token {
    /// Driver or other source.
    pub source: Source,
    /// Index of the connection in its driver, below 2^24.
    pub index: u32,
    /// Generation of the connection at that index.
    pub generation: u32,
}

macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// Owner of a descriptor in the poller.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub enum Source {
            $($(#[$doc])* $name = $code,)*
        }

        impl Source {
            const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

sources! {
    /// The host's mailbox doorbell.
    Mailbox = 1,
    /// A TCP listener.
    TcpListener = 2,
    /// A TCP connection.
    TcpConnection = 3,
    /// A Unix listener.
    ShmListener = 4,
    /// The Unix socket of a shared-memory connection.
    ShmSocket = 5,
    /// The doorbell of a shared-memory connection.
    ShmDoorbell = 6,
    /// The queue of file transfers.
    Files = 7,
    /// Completions of an RDMA device.
    RdmaCompletions = 8,
    /// Asynchronous events of an RDMA device.
    RdmaEvents = 9,
    /// Completions of the tier's device.
    Tier = 10,
    /// Handshake replies of stock Mooncake engines.
    StockAnswers = 19,
    /// The listener for stock Mooncake engines.
    MooncakeListener = 16,
    /// A connection from a stock engine.
    MooncakeServed = 17,
    /// A connection to a stock engine.
    MooncakeLane = 18,
}

const INDEX_BITS: u32 = 24;

impl Token {
    /// Encodes the token as the poller's word.
    ///
    /// # Panics
    /// When the index does not fit 24 bits; connection tables are far smaller.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        assert!(self.index < 1 << INDEX_BITS, "connection index {}", self.index);
        (self.source as u64) << 56 | u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// Decodes the poller's word, the inverse of [`Self::to_bits`]; `None` if no driver encoded it.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        match Source::from_code((bits >> 56) as u8) {
            Some(source) => {
                Some(Self { source, index: (bits >> 32) as u32 & ((1 << INDEX_BITS) - 1), generation: bits as u32 })
            }
            None => None,
        }
    }
}

const _: () = assert!(kvplane_proto::Limits::CONNECTIONS < 1 << INDEX_BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_poller() {
        let token = Token { source: Source::ShmDoorbell, index: 0xff_fffe, generation: u32::MAX };
        assert_eq!(Token::from_bits(token.to_bits()), Some(token));
        assert_eq!(Token::from_bits(0), None);
    }
}
