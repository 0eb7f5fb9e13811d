//! Asynchronous events of a device that belong to no request: port state changes and failures.

use crate::verbs::ffi::*;

/// Asynchronous event of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum AsyncEvent {
    /// A port lost its link.
    PortError { port: u8 },
    /// A port carries traffic again.
    PortActive { port: u8 },
    /// A port's address in its subnet changed, or its subnet's manager or keys did.
    LidChange { port: u8 },
    /// A port's GID table changed and has to be queried again.
    GidChange { port: u8 },
    /// The device failed or was removed: it is unusable.
    DeviceFatal,
    /// A queue pair failed with an error that none of its requests reports.
    QueuePairFatal { qp_num: u32 },
    /// A peer's request to this queue pair violated its access rights; the queue pair has failed.
    QueuePairAccess { qp_num: u32 },
    /// The last receive that a failed queue pair took from its shared receive queue has been reported.
    LastReceive { qp_num: u32 },
    /// A completion queue overflowed: completions are lost, and the queue pairs on it fail.
    CompletionQueueError,
    /// A shared receive queue failed.
    SharedQueueError,
    /// Another event that needs no action, by its number in verbs.
    Other(u32),
}

impl AsyncEvent {
    /// # Safety
    /// The event's element is alive: the event is not acknowledged yet.
    pub(crate) unsafe fn from_raw(raw: &ibv_async_event) -> Self {
        // The union's number is in the pointer's low bytes on x86-64.
        let port = raw.element.addr() as u8;
        let qp_num = || {
            let queue = raw.element.cast::<ibv_qp>();
            // SAFETY: called for events of queue pairs only, whose element is a queue pair and alive by the contract.
            if queue.is_null() { 0 } else { unsafe { (*queue).qp_num } }
        };
        match raw.event_type {
            EVENT_PORT_ERR => Self::PortError { port },
            EVENT_PORT_ACTIVE => Self::PortActive { port },
            EVENT_LID_CHANGE | EVENT_PKEY_CHANGE | EVENT_SM_CHANGE | EVENT_CLIENT_REREGISTER => {
                Self::LidChange { port }
            }
            EVENT_GID_CHANGE => Self::GidChange { port },
            EVENT_DEVICE_FATAL => Self::DeviceFatal,
            EVENT_QP_FATAL | EVENT_QP_REQ_ERR => Self::QueuePairFatal { qp_num: qp_num() },
            EVENT_QP_ACCESS_ERR => Self::QueuePairAccess { qp_num: qp_num() },
            EVENT_QP_LAST_WQE_REACHED => Self::LastReceive { qp_num: qp_num() },
            EVENT_CQ_ERR => Self::CompletionQueueError,
            EVENT_SRQ_ERR => Self::SharedQueueError,
            other => Self::Other(other),
        }
    }
}
