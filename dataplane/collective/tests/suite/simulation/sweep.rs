//! Directed faults.
