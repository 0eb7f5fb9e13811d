//! Parts of `tebench` without measurement: the sweep, classes of service, the statistics of a case, the table, the
//! plots.
//!
//! Flags, sweep order and the first eight columns are those of Mooncake's tebench, so that its scripts and readers'
//! habits carry over; the median and the CPU time per gigabyte follow as kvplane's own columns. The code that drives
//! transfers is in the binary.

pub mod classes;
pub mod counts;
pub mod devices;
pub mod plot;
pub mod qos;
pub mod stats;
pub mod sweep;
pub mod table;

pub use classes::{Class, Workload};
pub use stats::{CaseStats, Promises, Samples};
pub use sweep::{Case, Range, Step, Sweep, SweepError};
