//! Captures of streams into graphs, in the drivers that have them: CUDA and HIP, whose functions and numbers are alike.
//!
//! While any thread captures a stream, the driver forbids the others calls that might synchronize with it: such a call
//! fails, and ends the capture. A thread whose mode is relaxed may make them.

use super::driver::RawStream;
use libc::{c_int, c_void};
use std::ops::RangeInclusive;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` and the other errors of calls that a capture forbids; those of HIP too.
const FORBIDDEN: RangeInclusive<c_int> = 900..=907;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`, `hipStreamCaptureModeRelaxed`.
const RELAXED: c_int = 2;

/// Sets the mode of the calling thread, and stores the former one in its place.
pub(super) type ExchangeMode = unsafe extern "C" fn(*mut c_int) -> c_int;

/// Stores the state of a stream's capture: 0 for none.
pub(super) type IsCapturing = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;

/// Functions of a driver for captures, as far as it has them.
#[derive(Clone, Copy, Default)]
pub(crate) struct Captures {
    pub(super) exchange: Option<ExchangeMode>,
    pub(super) is_capturing: Option<IsCapturing>,
}

impl Captures {
    /// Permits this thread the calls that a capture by whichever thread forbids otherwise. Returns its former mode, for
    /// [`Self::restore`]; `None` where the driver has no modes.
    pub(crate) fn relax(self) -> Option<c_int> {
        self.exchange_mode(RELAXED)
    }

    /// Gives this thread the mode that it had before [`Self::relax`].
    pub(crate) fn restore(self, mode: c_int) {
        let _ = self.exchange_mode(mode);
    }

    fn exchange_mode(self, mut mode: c_int) -> Option<c_int> {
        // SAFETY: the driver reads and stores one integer.
        let code = unsafe { self.exchange?(&raw mut mode) };
        (code == 0).then_some(mode)
    }

    /// Returns true if a stream is being captured into a graph: what waits for it would become part of the graph. The
    /// default stream of CUDA and HIP waits for captured ones, and so counts as captured with them.
    pub(crate) fn includes(self, stream: RawStream) -> bool {
        let Some(is_capturing) = self.is_capturing else { return false };
        let mut state = 0;
        // SAFETY: the driver checks the stream, and stores one integer.
        let code = unsafe { is_capturing(stream.0 as *mut c_void, &raw mut state) };
        Self::forbids(code) || code == 0 && state != 0
    }

    /// Returns true if a call was refused with this code because of a capture.
    pub(crate) fn forbids(code: c_int) -> bool {
        FORBIDDEN.contains(&code)
    }
}
