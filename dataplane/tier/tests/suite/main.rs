//! Integration tests of the SSD tier, in one binary: a module for each subject.

mod blank;
mod calls;
mod crash;
mod crowded;
mod damage;
mod golden;
mod lengths;
mod quotas;
mod random;
mod replacements;
mod rest;
mod scrub;
mod support;
mod timers;
