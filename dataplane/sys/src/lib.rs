//! Regions, io_uring rings, shared rings, descriptors: the only crate that may say unsafe.
