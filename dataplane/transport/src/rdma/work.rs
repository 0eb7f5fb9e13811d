//! What requests on a queue pair are for, as a word that the device gives back.

/// What a request on the queue pair was for: its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Nothing that anybody waits for.
    Nothing,
    /// A message in this slot.
    Slot(u32),
    /// The last write of this payload.
    Push(u32),
    /// A read of the payload that arrives.
    Pull,
    /// A part of a copy that is not its last.
    CopyPart,
    /// The last part of the copy of this token, or all of it.
    Copy(u64),
}

/// Where a token has the kind of its work.
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
        }
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        match bits >> KIND_SHIFT {
            1 => Self::Slot(bits as u32),
            2 => Self::Push(bits as u32),
            3 => Self::Pull,
            4 => Self::CopyPart,
            COPY => Self::Copy(bits & Self::MOST_TOKEN),
            _ => Self::Nothing,
        }
    }

    /// Whether this is [`Self::Copy`].
    #[inline]
    pub(super) const fn is_copy(bits: u64) -> bool {
        bits >> KIND_SHIFT == COPY
    }

    /// The largest token of a copy.
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
        ];
        for work in all {
            assert_eq!(Work::from_bits(work.to_bits()), work);
        }
    }
}
