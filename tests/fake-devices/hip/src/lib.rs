//! Shared library `libamdhip64.so` for tests: it exports HIP's functions of [`kvplane_fake_devices`].

#![forbid(unsafe_code)]

pub use kvplane_fake_devices::load_hip;
