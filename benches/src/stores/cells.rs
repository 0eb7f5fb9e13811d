//! What is measured: an operation, the size of the objects, how many one call has, and how many clients call.

pub(crate) use crate::peers::cells::{human, parse_size};

/// A store has at least so much memory, or runs of small objects would be over at once.
pub(crate) const LEAST_POOL_BYTES: u64 = 3 << 29;
/// A client puts from memory that is larger than the caches, where its calls are, and no larger than this: what is
/// beyond in a batch is put from the same memory again. What it gets needs room for the whole batch.
pub(crate) const MOST_SOURCE_BYTES: u64 = 128 << 20;
const LEAST_BUFFER_BYTES: u64 = 16 << 20;
/// Where the clients of a side need more than this, those of one side are there at a time.
const MOST_TOGETHER_BYTES: u64 = 512 << 20;

/// Puts first: gets read what they left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// New keys.
    Put,
    /// Keys that are there.
    Get,
}

impl Op {
    pub(crate) const BOTH: [Self; 2] = [Self::Put, Self::Get];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
        }
    }
}

/// One measured point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Bytes of an object.
    pub(crate) size: u64,
    /// Objects of one call.
    pub(crate) batch: u64,
    /// Processes that call.
    pub(crate) clients: u64,
}

impl Cell {
    /// What one call of every client moves.
    pub(crate) const fn bytes(&self) -> u64 {
        self.size * self.batch * self.clients
    }

    /// Each client's room for what it gets.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        buffer_for(self.size * self.batch)
    }

    /// Whether the clients of all sides can be there at a time.
    pub(crate) fn is_modest(&self) -> bool {
        self.clients * self.buffer_bytes() <= MOST_TOGETHER_BYTES
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let many = if self.clients == 1 { "1 client" } else { "clients" };
        let clients = if self.clients == 1 { many.to_owned() } else { format!("{} {many}", self.clients) };
        write!(f, "{} x {}, {clients}", human(self.size), self.batch)
    }
}

/// How much of a store's memory is filled: keys fall to its parts by chance, and none may be evicted.
pub(crate) const fn share(pool_bytes: u64) -> u64 {
    pool_bytes / 20 * 13
}

/// The memory of which `bytes` are that share.
pub(crate) const fn pool_for(bytes: u64) -> u64 {
    (bytes / 13 * 20 + (64 << 20)) >> 20 << 20
}

/// A client's room for what it gets where one call of it moves so much; a power of two, as sizes are.
pub(crate) fn buffer_for(call_bytes: u64) -> u64 {
    call_bytes.next_power_of_two().max(LEAST_BUFFER_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_room_for_what_it_was_made_for() {
        for bytes in [1, 4096, 2 << 30, 8 << 30] {
            assert!(share(pool_for(bytes)) >= bytes, "{bytes}");
        }
    }

    #[test]
    fn cells_are_said_as_people_do() {
        assert_eq!(Cell { size: 4096, batch: 16, clients: 1 }.to_string(), "4 KiB x 16, 1 client");
        assert_eq!(Cell { size: 1 << 20, batch: 1, clients: 4 }.to_string(), "1 MiB x 1, 4 clients");
    }
}
