//! Outcomes of store calls as Mooncake's numbers.

/// `INTERNAL_ERROR`: also the result of a call before the setup, and of a null pointer.
pub(crate) const INTERNAL: i64 = -1;
/// `NO_AVAILABLE_HANDLE`: no space.
pub(crate) const NO_ROOM: i64 = -200;
/// `INVALID_PARAMS`.
pub(crate) const INVALID: i64 = -600;
/// `OBJECT_NOT_FOUND`.
pub(crate) const NOT_FOUND: i64 = -704;
/// `RPC_FAIL`: the control plane or a node is not reached.
pub(crate) const UNREACHABLE: i64 = -900;
