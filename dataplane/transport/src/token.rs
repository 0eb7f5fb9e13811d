//! Tokens of readiness: which driver, which of its connections, and what.
//!
//! All drivers of a host share one poller, so what it reports carries a token that finds its way back. A generation
//! makes the event of a former connection recognisable.

/// What an event belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token {
    /// Which driver or source.
    pub source: Source,
    /// Its index of the connection, below 2^24.
    pub index: u32,
    /// Which connection at that index.
    pub generation: u32,
}

macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// Whose descriptor it is.
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
    /// Events of an RDMA device.
    RdmaEvents = 9,
    /// The queue of the tier's device.
    Tier = 10,
    /// Answers of stock Mooncake engines to handshakes.
    StockAnswers = 19,
    /// The listener for stock Mooncake engines.
    MooncakeListener = 16,
    /// A connection of a stock engine.
    MooncakeServed = 17,
    /// A connection to a stock engine.
    MooncakeLane = 18,
}

const INDEX_BITS: u32 = 24;

impl Token {
    /// The token as the poller's word.
    ///
    /// # Panics
    /// When the index does not fit 24 bits; connection tables are far smaller.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        assert!(self.index < 1 << INDEX_BITS, "connection index {}", self.index);
        (self.source as u64) << 56 | u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// The inverse of [`Self::to_bits`]; `None` for a word that no driver made.
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
