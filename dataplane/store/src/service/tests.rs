//! Tests of the service: with a scripted host, then with a random one.

mod connections;
mod damage;
mod device_pool;
mod differential;
mod kept_memory;
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
mod sharing;
mod tiered;
mod times;
