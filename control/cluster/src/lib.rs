//! Membership, incarnations, heartbeats, segment catalog: the pure control core.
