//! Tests of the answering side: a host that is played by hand, then one that plays at random.

mod connections;
mod differential;
mod keys;
mod moves;
mod objects;
mod ownership;
mod put_sessions;
mod random;
mod ranges;
mod rig;
mod seconds;
mod segments;
mod shared;
mod tiered;
mod times;
