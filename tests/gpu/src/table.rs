//! Table of a device's rates.

use std::fmt;

use kvplane::device::DeviceId;

use crate::rates::Rate;

/// Rate of a plain copy, and ours for the same bytes.
pub(crate) struct Pair {
    pub(crate) plain: Rate,
    pub(crate) ours: Rate,
}

/// Rates for one length.
pub(crate) struct Row {
    pub(crate) bytes: u64,
    /// To the pool, from the pool, and to another process.
    pub(crate) pairs: [Pair; 3],
}

/// Rates of one device.
pub(crate) struct Table {
    title: String,
    peer: DeviceId,
    pub(crate) rows: Vec<Row>,
    /// Transports that carried bytes to the other process.
    pub(crate) transports: String,
}

impl Table {
    pub(crate) const fn new(title: String, peer: DeviceId) -> Self {
        Self { title, peer, rows: Vec::new(), transports: String::new() }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { title, peer, rows, transports } = self;
        writeln!(f, "\n{title}\n")?;
        writeln!(
            f,
            "GB/s, medians: a plain copy by the driver, the same bytes by kvplane, and the share of the latter.\n"
        )?;
        write!(f, "| bytes | to pinned memory | put | share | from pinned memory | get | share ")?;
        writeln!(f, "| copy to {peer} | write to a process on {peer} | share |")?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        for row in rows {
            write!(f, "| {} |", row.bytes)?;
            for Pair { plain, ours } in &row.pairs {
                write!(f, " {:.2} | {:.2} | {:.2} |", plain / 1e9, ours / 1e9, ours / plain)?;
            }
            writeln!(f)?;
        }
        writeln!(f, "\nBytes to the process went by {transports}.")
    }
}
