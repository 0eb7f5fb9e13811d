//! Results of calls, and the text of a thread's last failure.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvplane::group::{Failure, GroupError, OperationError, Outcome, Rank, RankSet};
use kvplane::rpc::{CallError, RefusalCode};
use kvplane::{ControlLinkError, Error};

use crate::handles::HandleError;
use crate::rim::write_text;

/// Room for a text, with its final zero.
pub(crate) const TEXT_BYTES: usize = 256;

/// Result of a call, by its number in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum ResultCode {
    Success,
    InvalidArgument,
    InvalidState,
    NotSupported,
    Timeout,
    ResourceBusy,
    TransferEngine,
    Rpc,
    System,
    Internal,
}

const MEANINGS: [&CStr; 10] = [
    c"success",
    c"an argument is invalid",
    c"the call does not fit the state",
    c"not supported",
    c"the time is over",
    c"something is still in use, or a limit is reached",
    c"the connections to the other processes failed",
    c"the control plane is unreachable, or refuses the call",
    c"the system has no memory, no thread or no program for it",
    c"an internal error",
];

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallFailure {
    pub(crate) code: ResultCode,
    pub(crate) text: String,
}

impl CallFailure {
    pub(crate) fn new(code: ResultCode, text: impl fmt::Display) -> Self {
        Self { code, text: text.to_string() }
    }

    pub(crate) fn argument(text: impl fmt::Display) -> Self {
        Self::new(ResultCode::InvalidArgument, text)
    }

    pub(crate) fn state(text: impl fmt::Display) -> Self {
        Self::new(ResultCode::InvalidState, text)
    }
}

impl From<HandleError> for CallFailure {
    fn from(error: HandleError) -> Self {
        Self::argument(error)
    }
}

impl From<GroupError> for CallFailure {
    fn from(error: GroupError) -> Self {
        let code = match &error {
            GroupError::Control(error) => code_of_control(error),
            GroupError::Mesh(_) => ResultCode::TransferEngine,
            GroupError::Failed(failure) => code_of_failure(failure),
            GroupError::BufferSize { .. } | GroupError::Overlap { .. } => ResultCode::InvalidArgument,
            GroupError::Memory(_) | GroupError::Thread(_) => ResultCode::System,
            GroupError::Ended => ResultCode::InvalidState,
            GroupError::Late { .. } | GroupError::NotActivated { .. } => ResultCode::Timeout,
            _ => ResultCode::Internal,
        };
        Self::new(code, error)
    }
}

impl From<OperationError> for CallFailure {
    fn from(error: OperationError) -> Self {
        Self::new(code_of_operation(&error), error)
    }
}

fn code_of_control(error: &Error) -> ResultCode {
    let refusal = match error {
        Error::Call(CallError::Refused(refusal)) => refusal.known_code(),
        _ => None,
    };
    match (refusal, error) {
        (Some(RefusalCode::BadRequest), _) => ResultCode::InvalidArgument,
        (Some(RefusalCode::LimitReached), _) => ResultCode::ResourceBusy,
        (
            Some(
                RefusalCode::IncarnationEnded
                | RefusalCode::AlreadyExists
                | RefusalCode::NotFound
                | RefusalCode::UnknownMember
                | RefusalCode::UnknownClient,
            ),
            _,
        ) => ResultCode::InvalidState,
        (None, Error::Argument(_) | Error::Identity(_) | Error::NoCertificate { .. } | Error::Directory(_)) => {
            ResultCode::InvalidArgument
        }
        (None, Error::ControlLink(ControlLinkError::Addresses { .. })) => ResultCode::InvalidArgument,
        _ => ResultCode::Rpc,
    }
}

const fn code_of_operation(error: &OperationError) -> ResultCode {
    match error {
        OperationError::NotReducible { .. } => ResultCode::NotSupported,
        _ => ResultCode::InvalidArgument,
    }
}

const fn code_of_failure(failure: &Failure) -> ResultCode {
    match failure {
        Failure::Malformed(error) => code_of_operation(error),
        Failure::Mismatch { .. } | Failure::MessageSize { .. } | Failure::NoPeer { .. } => ResultCode::InvalidArgument,
        Failure::Deadline { .. } | Failure::OthersDeadline { .. } | Failure::NotActive => ResultCode::Timeout,
        Failure::TooMany { .. } => ResultCode::ResourceBusy,
        _ => ResultCode::InvalidState,
    }
}

/// True if a joiner's group does not exist: its founding members may be about to make it.
pub(crate) fn is_without_group(error: &GroupError) -> bool {
    match error {
        GroupError::Control(Error::Call(CallError::Refused(refusal))) => {
            refusal.known_code() == Some(RefusalCode::NotFound)
        }
        _ => false,
    }
}

/// Returns the reason why a proposal was rejected; `None` for one that was not.
pub(crate) fn reason_of(outcome: &Outcome) -> Option<String> {
    match outcome {
        Outcome::Applied { .. } | Outcome::Unchanged { .. } => None,
        Outcome::NotReady { ranks } => Some(format!(
            "{} not ready in time, or did not reach the others: they call mooncakePgCommJoin first",
            names_of(*ranks, "was", "were")
        )),
        Outcome::NoMemberLeft => Some("the view would have no member".to_owned()),
        Outcome::NotAutomatic => {
            Some("failed ranks of this group are deactivated by mooncakePgCommDeactivateRanks".to_owned())
        }
    }
}

/// Returns `rank 3 was`, `ranks 3, 4 were`.
pub(crate) fn names_of<R: Rank>(ranks: RankSet<R>, one: &str, several: &str) -> String {
    let names: Vec<_> = ranks.iter().map(|rank| rank.index().to_string()).collect();
    match names.len() {
        1 => format!("rank {} {one}", names[0]),
        _ => format!("ranks {} {several}", names.join(", ")),
    }
}

thread_local! {
    static LAST: RefCell<[u8; TEXT_BYTES]> = const { RefCell::new([0; TEXT_BYTES]) };
}

fn keep(text: &str) {
    let mut bytes = [0; TEXT_BYTES];
    let kept = text.floor_char_boundary(TEXT_BYTES - 1);
    bytes[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    LAST.with(|last| *last.borrow_mut() = bytes);
}

/// Makes a call: a failure is kept as the thread's last one, and a panic is a failure.
pub(crate) fn call(work: impl FnOnce() -> Result<(), CallFailure>) -> c_int {
    let internal = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(CallFailure::new(ResultCode::Internal, format_args!("an internal error: {text}")))
    };
    match catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(internal) {
        Ok(()) => ResultCode::Success as c_int,
        Err(failure) => {
            keep(&failure.text);
            failure.code as c_int
        }
    }
}

/// Writes to a place that the caller provided; `what` names it if it is null.
///
/// # Safety
/// `place` is null or valid for a write.
pub(crate) unsafe fn put<T>(place: *mut T, value: T, what: &str) -> Result<(), CallFailure> {
    if place.is_null() {
        return Err(CallFailure::argument(format_args!("the pointer for {what} is null")));
    }
    // SAFETY: by the caller's promise.
    unsafe { place.write(value) };
    Ok(())
}

/// Returns a text as an array with a final zero.
pub(crate) fn text_of(text: &str) -> [c_char; TEXT_BYTES] {
    let mut out = [0; TEXT_BYTES];
    // SAFETY: as many writable bytes.
    unsafe { write_text(out.as_mut_ptr(), TEXT_BYTES, &text[..text.floor_char_boundary(TEXT_BYTES - 1)]) };
    out
}

/// Returns the meaning of a result.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgGetErrorString(result: c_int) -> *const c_char {
    let meaning = usize::try_from(result).ok().and_then(|number| MEANINGS.get(number));
    meaning.map_or(c"no result has this number".as_ptr(), |meaning| meaning.as_ptr())
}

/// Returns the text of this thread's last failure.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn mooncakePgGetLastError() -> *const c_char {
    // The array has no destructor: it is there until the thread ends.
    LAST.try_with(|last| last.as_ptr().cast_const().cast()).unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvplane::group::GroupRank;

    use super::*;

    fn last() -> String {
        // SAFETY: it has a final zero, and this thread makes no call meanwhile.
        unsafe { CStr::from_ptr(mooncakePgGetLastError()) }.to_str().expect("text").to_owned()
    }

    #[test]
    fn failures_keep_their_text_and_panics_are_failures() {
        assert_eq!(last(), "");
        assert_eq!(call(|| Err(CallFailure::state("not now"))), 2);
        assert_eq!(call(|| Ok(())), 0);
        assert_eq!(last(), "not now");
        assert_eq!(call(|| panic!("on purpose")), 9);
        assert_eq!(last(), "an internal error: on purpose");
        assert_eq!(call(|| Err(CallFailure::argument("\u{e9}".repeat(200)))), 1);
        assert_eq!(last(), "\u{e9}".repeat(127));
    }

    #[test]
    fn errors_have_the_numbers_of_the_header() {
        let code = |error: GroupError| CallFailure::from(error).code as c_int;
        assert_eq!(code(Failure::NoPeer { rank: GroupRank(3) }.into()), 1);
        assert_eq!(code(GroupError::Ended), 2);
        assert_eq!(code(GroupError::Late { call: "join", after: Duration::from_secs(1) }), 4);
        assert_eq!(code(Failure::Deadline { awaited: RankSet::single(GroupRank(1)) }.into()), 4);
        assert_eq!(code(Failure::TooMany { limit: 1 }.into()), 5);
    }

    #[test]
    fn every_result_has_a_meaning() {
        for number in -1..=10 {
            // SAFETY: constants with a final zero.
            let text = unsafe { CStr::from_ptr(mooncakePgGetErrorString(number)) }.to_str().expect("text");
            assert_eq!(text == "no result has this number", !(0..10).contains(&number), "{number}");
        }
    }
}
