//! State machine of a queue pair, as a declared table: the transitions, and the attributes that each requires.
//!
//! From the InfiniBand specification, for reliable connections. The device checks it too; the table rejects an invalid
//! transition before the call, and gives other implementations the same rules.

use crate::verbs::ffi::*;

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueState {
    /// Created. No request can be posted.
    Reset,
    /// Assigned to a port. Receives can be posted.
    Initialized,
    /// Connected to its peer: the peer's requests are served.
    ReadyToReceive,
    /// Fully connected: requests are sent.
    ReadyToSend,
    /// Failed, by an error or on purpose: posted requests are flushed.
    Error,
}

impl QueueState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Reset, Self::Initialized, Self::ReadyToReceive, Self::ReadyToSend, Self::Error];

    pub(crate) const fn raw(self) -> u32 {
        match self {
            Self::Reset => QPS_RESET,
            Self::Initialized => QPS_INIT,
            Self::ReadyToReceive => QPS_RTR,
            Self::ReadyToSend => QPS_RTS,
            Self::Error => QPS_ERR,
        }
    }

    /// Returns the required attributes of a transition; `None` if it is not allowed.
    pub(crate) fn to(self, to: Self) -> Option<u32> {
        TRANSITIONS.iter().find(|(from, into, _)| (*from, *into) == (self, to)).map(|(_, _, mask)| *mask)
    }

    /// Returns true if receives can be posted.
    pub(crate) const fn takes_receives(self) -> bool {
        !matches!(self, Self::Reset)
    }

    /// Returns true if requests can be posted: in the error state they are flushed at once.
    pub(crate) const fn takes_sends(self) -> bool {
        matches!(self, Self::ReadyToSend | Self::Error)
    }
}

#[cfg(feature = "verbs-provider")]
impl QueueState {
    /// Returns the state with this number in C; `None` if there is none here.
    #[must_use]
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.raw() == raw)
    }

    /// Returns the mask of exactly those attributes that a transition requires; `None` if it is not allowed.
    #[must_use]
    pub fn required_attributes(self, to: Self) -> Option<u32> {
        self.to(to)
    }
}

const INITIALIZE: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
const RECEIVE: u32 =
    QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
const SEND: u32 = QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;

/// Transitions: from, to, and the required attributes.
pub(crate) const TRANSITIONS: [(QueueState, QueueState, u32); 12] = [
    (QueueState::Reset, QueueState::Initialized, INITIALIZE),
    (QueueState::Initialized, QueueState::ReadyToReceive, RECEIVE),
    (QueueState::ReadyToReceive, QueueState::ReadyToSend, SEND),
    (QueueState::Reset, QueueState::Error, QP_STATE),
    (QueueState::Initialized, QueueState::Error, QP_STATE),
    (QueueState::ReadyToReceive, QueueState::Error, QP_STATE),
    (QueueState::ReadyToSend, QueueState::Error, QP_STATE),
    (QueueState::Error, QueueState::Error, QP_STATE),
    (QueueState::Initialized, QueueState::Reset, QP_STATE),
    (QueueState::ReadyToReceive, QueueState::Reset, QP_STATE),
    (QueueState::ReadyToSend, QueueState::Reset, QP_STATE),
    (QueueState::Error, QueueState::Reset, QP_STATE),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_in_one_piece() {
        let mut drawn = String::new();
        for from in QueueState::ALL {
            let ways: Vec<String> = QueueState::ALL
                .into_iter()
                .filter_map(|to| from.to(to).map(|mask| format!("{to:?}({mask:#x})")))
                .collect();
            drawn.push_str(&format!("{from:?} -> {}\n", ways.join(" ")));
        }
        assert_eq!(
            drawn,
            "Reset -> Initialized(0x39) Error(0x1)\n\
             Initialized -> Reset(0x1) ReadyToReceive(0x129181) Error(0x1)\n\
             ReadyToReceive -> Reset(0x1) ReadyToSend(0x12e01) Error(0x1)\n\
             ReadyToSend -> Reset(0x1) Error(0x1)\n\
             Error -> Reset(0x1) Error(0x1)\n"
        );
    }

    #[test]
    fn states_survive_their_numbers() {
        for state in QueueState::ALL {
            assert_eq!(QueueState::from_raw(state.raw()), Some(state));
        }
        assert_eq!(QueueState::from_raw(4), None);
    }
}
