//! Codes of a call on many items: an invalid item has a code of its own, and the others are answered together.

use crate::outcome::INTERNAL;

/// Outcome codes of the items of a call, in order.
pub(crate) struct Codes {
    codes: Vec<i64>,
}

impl Codes {
    /// Creates the codes of checked items: the error code of an invalid one.
    pub(crate) fn of(checked: impl Iterator<Item = Result<(), i64>>) -> Self {
        Self { codes: checked.map(|checked| checked.err().unwrap_or(0)).collect() }
    }

    /// Returns the indices of the valid items.
    pub(crate) fn good(&self) -> impl Iterator<Item = usize> + '_ {
        self.codes.iter().enumerate().filter(|(_, code)| **code == 0).map(|(index, _)| index)
    }

    /// Returns all codes; `answers` has those of the valid items, in order.
    pub(crate) fn answered(mut self, answers: Vec<i64>) -> Vec<i64> {
        let mut answers = answers.into_iter();
        for code in self.codes.iter_mut().filter(|code| **code == 0) {
            *code = answers.next().unwrap_or(INTERNAL);
        }
        self.codes
    }
}
