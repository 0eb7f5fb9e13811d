//! Shared library `libcuda.so.1` for tests: it exports CUDA's functions of [`kvplane_fake_devices`].

#![forbid(unsafe_code)]

pub use kvplane_fake_devices::load_cuda;
