//! Gives the shared library the name under which programs load the driver, so that a process that has loaded it from
//! any path finds it again by that name.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
