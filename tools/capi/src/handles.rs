//! Tables of handles: a handle is a number that was given once, and is never a pointer to memory. Values behind
//! pointers, where the interface has pointers. Both belong to the process that made them: their threads and connections
//! do not exist in a fork of it.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
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
    /// The entry belongs to the process that this one was forked from, with its threads and connections.
    is_of_parent: bool,
}

impl fmt::Display for HandleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, handle, is_of_parent } = self;
        match (handle.is_null(), is_of_parent) {
            (true, _) => write!(f, "the {what} is null"),
            (false, true) => write!(f, "{what} {handle:?} belongs to the process that this one was forked from"),
            (false, false) => write!(f, "{handle:?} is no {what}, or was destroyed"),
        }
    }
}

impl std::error::Error for HandleError {}

/// Table of one kind of things that C code has handles of.
pub(crate) struct Handles<T> {
    /// Entries, each with the process that added it.
    entries: RwLock<BTreeMap<usize, (u32, Arc<T>)>>,
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
        let entry = (std::process::id(), entry);
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(number, entry);
        ptr::without_provenance_mut(number)
    }

    /// Returns the entry of a handle.
    pub(crate) fn get(&self, handle: *mut c_void) -> Result<Arc<T>, HandleError> {
        let found = self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&handle.addr()).cloned();
        let (process, entry) = found.ok_or_else(|| self.error(handle, false))?;
        if process == std::process::id() { Ok(entry) } else { Err(self.error(handle, true)) }
    }

    /// Takes the entry of a handle out; `None` for null. In a fork of the process that added it, it stays.
    pub(crate) fn remove(&self, handle: *mut c_void) -> Result<Option<Arc<T>>, HandleError> {
        if handle.is_null() {
            return Ok(None);
        }
        self.get(handle)?;
        let found = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.addr());
        found.map(|(_, entry)| Some(entry)).ok_or_else(|| self.error(handle, false))
    }

    const fn error(&self, handle: *mut c_void, is_of_parent: bool) -> HandleError {
        HandleError { what: self.what, handle, is_of_parent }
    }
}

/// Value that only the process uses, and ends, that made it. In a fork it is left as it is.
#[derive(Debug)]
pub(crate) struct ProcessLocal<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// Returns the value; `None` in a fork of the process that made it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.is_ours().then_some(&*self.value)
    }

    fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: the value is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
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
        // As if this were a fork.
        for (process, _) in numbers.entries.write().expect("held by nobody").values_mut() {
            *process = 0;
        }
        let expected = format!("number {two:?} belongs to the process that this one was forked from");
        assert_eq!(numbers.get(two).expect_err("the parent's").to_string(), expected);
        assert_eq!(numbers.remove(two).expect_err("the parent's").to_string(), expected);
    }

    #[test]
    fn a_value_of_another_process_is_neither_lent_nor_ended() {
        let value = Arc::new(7);
        let ours = ProcessLocal::new(Arc::clone(&value));
        assert_eq!(ours.get().map(|held| **held), Some(7));
        drop(ours);
        assert_eq!(Arc::strong_count(&value), 1);
        let foreign = ProcessLocal { process: 0, value: ManuallyDrop::new(Arc::clone(&value)) };
        assert!(foreign.get().is_none());
        drop(foreign);
        assert_eq!(Arc::strong_count(&value), 2);
    }
}
