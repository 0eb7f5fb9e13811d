//! Error numbers of the kernel that callers tell apart, for crates that do not know libc.

pub use libc::{EACCES, EAGAIN, EBADF, EDQUOT, EINTR, EINVAL, ENODEV, ENOSPC, ENOTTY, ENXIO, EOPNOTSUPP, EPERM, EROFS};
