//! Cells of the comparison: operation, size of objects, objects of one call, and number of clients.

pub(crate) use crate::peers::cells::{human, parse_size};

/// Minimum memory of a store; with less, runs of small objects would be over at once.
pub(crate) const LEAST_POOL_BYTES: u64 = 3 << 29;
/// Largest source memory of a client, in bytes. The source exceeds the caches; the part of a batch beyond its end
/// reuses it. The destination of gets holds the whole batch.
pub(crate) const MOST_SOURCE_BYTES: u64 = 128 << 20;
const LEAST_BUFFER_BYTES: u64 = 16 << 20;
/// Memory of a side's clients above which only one side's clients run at a time.
const MOST_TOGETHER_BYTES: u64 = 512 << 20;

/// Operation; puts come first, because gets read their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Put of new keys.
    Put,
    /// Get of existing keys.
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

/// Measured point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    /// Size of an object, in bytes.
    pub(crate) size: u64,
    /// Number of objects of one call.
    pub(crate) batch: u64,
    /// Number of client processes.
    pub(crate) clients: u64,
}

impl Cell {
    /// Returns the bytes that one call of every client moves.
    pub(crate) const fn bytes(&self) -> u64 {
        self.size * self.batch * self.clients
    }

    /// Returns the size of each client's destination buffer.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        buffer_for(self.size * self.batch)
    }

    /// Returns true if the clients of all sides can run at a time.
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

/// Returns the part of a store's memory that is filled: keys fall to its parts at random, and none may be evicted.
pub(crate) const fn share(pool_bytes: u64) -> u64 {
    pool_bytes / 20 * 13
}

/// Returns the memory of which `bytes` are that part.
pub(crate) const fn pool_for(bytes: u64) -> u64 {
    (bytes / 13 * 20 + (64 << 20)) >> 20 << 20
}

/// Returns the size of a client's destination buffer for calls of this size; a power of two, like the sizes.
pub(crate) fn buffer_for(call_bytes: u64) -> u64 {
    call_bytes.next_power_of_two().max(LEAST_BUFFER_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_large_enough_for_its_cell() {
        for bytes in [1, 4096, 2 << 30, 8 << 30] {
            assert!(share(pool_for(bytes)) >= bytes, "{bytes}");
        }
    }

    #[test]
    fn cells_are_formatted_with_units() {
        assert_eq!(Cell { size: 4096, batch: 16, clients: 1 }.to_string(), "4 KiB x 16, 1 client");
        assert_eq!(Cell { size: 1 << 20, batch: 1, clients: 4 }.to_string(), "1 MiB x 1, 4 clients");
    }
}
