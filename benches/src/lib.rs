//! Benchmarks whose figures stand in docs/performance.md.
