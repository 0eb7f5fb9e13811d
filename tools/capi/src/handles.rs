//! Tables of handles: a handle is a number that was given once, and is never a pointer to memory.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Numbers of all tables, so that a handle of one is in no other.
static NEXT: AtomicUsize = AtomicUsize::new(1);
/// Distance between two handles: they look like addresses, and one is none of memory that a program has.
const STEP: usize = 16;

/// Error of a handle that is in no table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandleError {
    /// Kind of the table.
    what: &'static str,
    handle: *mut c_void,
}

impl fmt::Display for HandleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, handle } = self;
        match handle.is_null() {
            true => write!(f, "the {what} is null"),
            false => write!(f, "{handle:?} is no {what}, or was destroyed"),
        }
    }
}

impl std::error::Error for HandleError {}

/// Table of one kind of things that C code has handles of.
pub(crate) struct Handles<T> {
    entries: RwLock<BTreeMap<usize, Arc<T>>>,
    /// Names the kind, for messages.
    what: &'static str,
}

impl<T> Handles<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { entries: RwLock::new(BTreeMap::new()), what }
    }

    /// Adds an entry, and returns its handle.
    pub(crate) fn add(&self, entry: Arc<T>) -> *mut c_void {
        let number = NEXT.fetch_add(1, Ordering::Relaxed) * STEP;
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(number, entry);
        ptr::without_provenance_mut(number)
    }

    /// Returns the entry of a handle.
    pub(crate) fn get(&self, handle: *mut c_void) -> Result<Arc<T>, HandleError> {
        let found = self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&handle.addr()).cloned();
        found.ok_or_else(|| self.missing(handle))
    }

    /// Takes the entry of a handle out; `None` for null.
    pub(crate) fn remove(&self, handle: *mut c_void) -> Result<Option<Arc<T>>, HandleError> {
        if handle.is_null() {
            return Ok(None);
        }
        let found = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.addr());
        found.map(Some).ok_or_else(|| self.missing(handle))
    }

    const fn missing(&self, handle: *mut c_void) -> HandleError {
        HandleError { what: self.what, handle }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_handles_are_errors() {
        let (numbers, others) = (Handles::new("number"), Handles::new("other"));
        let (one, two) = (numbers.add(Arc::new(1)), numbers.add(Arc::new(2)));
        let other = others.add(Arc::new(3));
        assert_eq!((*numbers.get(one).expect("there"), *numbers.get(two).expect("there")), (1, 2));
        assert_eq!(
            numbers.get(other).expect_err("another kind").to_string(),
            format!("{other:?} is no number, or was destroyed")
        );
        assert_eq!(numbers.remove(one).expect("there").as_deref(), Some(&1));
        assert!(numbers.get(one).is_err() && numbers.remove(one).is_err());
        assert!(numbers.remove(ptr::null_mut()).expect("ignored").is_none());
        assert_eq!(numbers.get(ptr::null_mut()).expect_err("null").to_string(), "the number is null");
    }
}
