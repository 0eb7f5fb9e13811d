//! Routing of slices: by maps, after failures, and to replica owners.

mod failures;
mod hedges;
mod maps;
mod spread;
