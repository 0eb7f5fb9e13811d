//! End-to-end and simulated tests of the whole system.
