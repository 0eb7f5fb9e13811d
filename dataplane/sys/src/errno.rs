//! Error numbers of the kernel that callers tell apart, for crates that do not know libc.

pub use libc::{EAGAIN, EBADF, EDQUOT, EINTR, ENODEV, ENOSPC, ENXIO, EOPNOTSUPP, EPERM, EROFS};
