//! Shared library `libascendcl.so` for tests: it exports AscendCL's functions of [`kvplane_fake_devices`].

#![forbid(unsafe_code)]

pub use kvplane_fake_devices::load_npu;
