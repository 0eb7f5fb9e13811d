//! What takes hours, and is left to nights: seeds by the thousand, kills, broken frames, and planted bugs.

pub mod mutations;
pub mod seeds;
