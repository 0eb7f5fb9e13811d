//! Tests of the answering side: a host that is played by hand, then one that plays at random.

mod differential;
mod drafts;
mod fences;
mod gate;
mod handshake;
mod keys;
mod moves;
mod objects;
mod ownership;
mod random;
mod ranges;
mod rig;
mod seconds;
mod segments;
mod shared;
mod tiered;
mod times;
