//! Error numbers of the kernel that callers distinguish, for crates that do not depend on libc.

pub use libc::{EACCES, EAGAIN, EBADF, EDQUOT, EINTR, EINVAL, ENODEV, ENOSPC, ENOTTY, ENXIO, EOPNOTSUPP, EPERM, EROFS};
