//! Keeps what dependencies export out of the library: crc-fast has functions for C with the features that another
//! package turns on, and a library must export its own names only.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
