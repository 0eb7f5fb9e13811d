//! The kvplane binary and tebench.
