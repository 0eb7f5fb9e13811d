//! Purpose of requests on a queue pair, encoded in the token that the device returns.

/// Purpose of a request on a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Request whose completion needs no handling.
    Nothing,
    /// Message in this slot.
    Slot(u32),
    /// Last write of this payload.
    Push(u32),
    /// Read of the incoming payload.
    Pull,
    /// Part of a copy that is not its last.
    CopyPart,
    /// Last part of the copy with this token, or the whole copy.
    Copy(u64),
    /// Like [`Self::Copy`], of a copy that is complete only when the peer has flushed its device.
    FlushedCopy(u64),
}

/// Shift of the kind in a token.
const KIND_SHIFT: u32 = 60;
const COPY: u64 = 5;

impl Work {
    pub(super) const fn to_bits(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Slot(slot) => 1 << KIND_SHIFT | slot as u64,
            Self::Push(index) => 2 << KIND_SHIFT | index as u64,
            Self::Pull => 3 << KIND_SHIFT,
            Self::CopyPart => 4 << KIND_SHIFT,
            Self::Copy(token) => COPY << KIND_SHIFT | token,
            Self::FlushedCopy(token) => 6 << KIND_SHIFT | token,
        }
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        match bits >> KIND_SHIFT {
            1 => Self::Slot(bits as u32),
            2 => Self::Push(bits as u32),
            3 => Self::Pull,
            4 => Self::CopyPart,
            COPY => Self::Copy(bits & Self::MOST_TOKEN),
            6 => Self::FlushedCopy(bits & Self::MOST_TOKEN),
            _ => Self::Nothing,
        }
    }

    /// Returns true if this is [`Self::Copy`].
    #[inline]
    pub(super) const fn is_copy(bits: u64) -> bool {
        bits >> KIND_SHIFT == COPY
    }

    /// Largest token of a copy.
    pub(super) const MOST_TOKEN: u64 = (1 << KIND_SHIFT) - 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_survives_the_device() {
        let all = [
            Work::Nothing,
            Work::Slot(7),
            Work::Push(u32::MAX),
            Work::Pull,
            Work::CopyPart,
            Work::Copy(Work::MOST_TOKEN),
            Work::FlushedCopy(Work::MOST_TOKEN),
        ];
        for work in all {
            assert_eq!(Work::from_bits(work.to_bits()), work);
        }
    }
}
