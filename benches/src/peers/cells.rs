//! Cells of the comparison: operation, block size and batch, as Mooncake's tebench counts them.

/// Size of a side's buffer, in bytes: cells whose blocks times batch exceed it are skipped.
pub(crate) const BUFFER_BYTES: u64 = 1 << 30;
/// The scatter case: many small ranges of one peer in one batch.
pub(crate) const SCATTER: (u64, u64) = (4 << 10, 1024);

/// Direction of a transfer, seen from its initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Initiator's memory to the target's.
    Write,
    /// Target's memory to the initiator's.
    Read,
}

impl Op {
    pub(crate) const BOTH: [Self; 2] = [Self::Write, Self::Read];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// Measured point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) op: Op,
    pub(crate) block_bytes: u64,
    /// Number of blocks of one call.
    pub(crate) batch: u64,
}

impl Cell {
    pub(crate) const fn bytes(&self) -> u64 {
        self.block_bytes * self.batch
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {} {}", human(self.block_bytes), self.batch, self.op.word())
    }
}

/// Returns the cells of one block size, and a line for each batch that does not fit in the buffer.
pub(crate) fn of_size(block_bytes: u64, batches: &[u64], buffer_bytes: u64) -> (Vec<Cell>, Vec<String>) {
    let mut cells = Vec::new();
    let mut skipped = Vec::new();
    for &batch in batches {
        if block_bytes.saturating_mul(batch) > buffer_bytes {
            let fits = human(buffer_bytes);
            skipped.push(format!("skipped: {} x {batch} is more than the buffer of {fits}", human(block_bytes)));
            continue;
        }
        cells.extend(Op::BOTH.map(|op| Cell { op, block_bytes, batch }));
    }
    (cells, skipped)
}

/// Formats a size: `4 KiB`.
pub(crate) fn human(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} B"),
    }
}

/// Parses a size: `4K`, `1M`, `65536`.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, text.chars().last()?),
        None => (text, 'B'),
    };
    let shift = match unit {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        _ => 0,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).filter(|&bytes| bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_beyond_the_buffer_are_reported() {
        let (cells, skipped) = of_size(64 << 20, &[1, 16, 128], BUFFER_BYTES);
        assert_eq!(cells.len(), 4);
        assert_eq!(cells[3].to_string(), "64 MiB x 16 read");
        assert_eq!(skipped, ["skipped: 64 MiB x 128 is more than the buffer of 1 GiB"]);
    }

    #[test]
    fn sizes_are_read_as_typed() {
        assert_eq!(parse_size("4K"), Some(4096));
        assert_eq!(parse_size("65536"), Some(65536));
        assert_eq!(["0", "", "K", "4T", "99999999999G"].map(parse_size), [None; 5]);
        assert_eq!([human(4096), human(1 << 30), human(1000)], ["4 KiB", "1 GiB", "1000 B"]);
    }
}
