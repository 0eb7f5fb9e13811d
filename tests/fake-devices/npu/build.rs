//! Gives the shared library the name under which programs load the runtime, see the one of CUDA.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libascendcl.so");
}
