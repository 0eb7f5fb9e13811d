//! Transports by their numbers in TENT's interface, and those that an engine uses.

use std::ffi::c_int;

use super::error::TentError;

/// Names of the transports by their numbers; 0 stands for any.
const NAMES: [&str; 13] = [
    "unspec",
    "rdma",
    "mnnvl",
    "shm",
    "nvlink",
    "gds",
    "io_uring",
    "tcp",
    "ascend_direct",
    "sunrise_link",
    "tpu",
    "ub",
    "mpcomm",
];
const RDMA: usize = 1;
const SHM: usize = 3;
const IO_URING: usize = 6;
const TCP: usize = 7;

/// Transports that an engine uses: it chooses among them for each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UsedTransports {
    pub(super) tcp: bool,
    /// Shared memory, mapped or copied by the kernel.
    pub(super) shm: bool,
    pub(super) rdma: bool,
}

impl UsedTransports {
    /// Checks the transport that a request to memory or to a file is pinned to.
    ///
    /// # Errors
    /// When it has no such number, is not used, or is one of several: the engine chooses for each peer, not for each
    /// request.
    pub(super) fn check_hint(self, number: c_int, to_file: bool) -> Result<(), TentError> {
        match (known(number)?, to_file) {
            (0, _) | (IO_URING, true) => Ok(()),
            (transport, true) => {
                let what = format!("the transport {} for a file", NAMES[transport]);
                Err(TentError::Unsupported { what, instead: "files are read and written by io_uring" })
            }
            (transport, false) => self.check_only(transport),
        }
    }

    /// Checks the transport with which memory is to be registered.
    ///
    /// # Errors
    /// Errors of [`Self::check_hint`].
    pub(super) fn check_registration(self, number: c_int) -> Result<(), TentError> {
        match known(number)? {
            0 => Ok(()),
            transport => self.check_only(transport),
        }
    }

    /// Checks the transport for which memory is to be allocated.
    ///
    /// # Errors
    /// When it has no such number, or is not used.
    pub(super) fn check_allocation(self, number: c_int) -> Result<(), TentError> {
        match known(number)? {
            0 => Ok(()),
            transport if self.has(transport) => Ok(()),
            transport => Err(unused(transport)),
        }
    }

    const fn has(self, transport: usize) -> bool {
        match transport {
            RDMA => self.rdma,
            SHM => self.shm,
            TCP => self.tcp,
            _ => false,
        }
    }

    fn check_only(self, transport: usize) -> Result<(), TentError> {
        if !self.has(transport) {
            return Err(unused(transport));
        }
        if [RDMA, SHM, TCP].into_iter().any(|other| other != transport && self.has(other)) {
            let instead = "an engine chooses among its transports for each peer; switch the others off with \
                           transports/NAME/enable before it is created";
            return Err(TentError::Unsupported { what: format!("only {}", NAMES[transport]), instead });
        }
        Ok(())
    }
}

/// Returns a transport's number, if there is one.
fn known(number: c_int) -> Result<usize, TentError> {
    let known = usize::try_from(number).ok().filter(|number| *number < NAMES.len());
    known.ok_or(TentError::Number { what: "a transport", number: number.into() })
}

fn unused(transport: usize) -> TentError {
    let what = format!("the transport {}", NAMES[transport]);
    TentError::Unsupported { what, instead: "this engine does not use it" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: UsedTransports = UsedTransports { tcp: true, shm: true, rdma: true };

    #[test]
    fn a_transport_is_pinned_where_it_is_the_only_one() {
        let tcp = UsedTransports { shm: false, rdma: false, ..ALL };
        assert!(tcp.check_hint(7, false).is_ok() && tcp.check_registration(7).is_ok());
        assert!(ALL.check_hint(7, false).is_err() && ALL.check_registration(7).is_err());
        assert!(ALL.check_allocation(7).is_ok() && tcp.check_allocation(3).is_err());
        assert!(ALL.check_hint(0, false).is_ok() && ALL.check_registration(0).is_ok());
        for number in [2, 4, 5, 8, 9, 10, 11, 12, 13, -1] {
            assert!(ALL.check_hint(number, false).is_err() && ALL.check_allocation(number).is_err(), "{number}");
        }
    }

    #[test]
    fn files_have_one_transport() {
        assert!(ALL.check_hint(6, true).is_ok() && ALL.check_hint(0, true).is_ok());
        assert!(ALL.check_hint(7, true).is_err() && ALL.check_hint(6, false).is_err());
    }
}
