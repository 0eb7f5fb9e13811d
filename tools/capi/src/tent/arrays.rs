//! Arrays that are given to C code and taken back from it.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Arrays of one type that C code has: their addresses and lengths, so that taking one back twice has no effect.
pub(super) struct GivenArrays<T> {
    lengths: Mutex<BTreeMap<usize, usize>>,
    of: PhantomData<fn(T)>,
}

impl<T: Copy> GivenArrays<T> {
    pub(super) const fn new() -> Self {
        Self { lengths: Mutex::new(BTreeMap::new()), of: PhantomData }
    }

    /// Gives an array away; null for an empty one.
    pub(super) fn give(&self, items: Vec<T>) -> *mut T {
        if items.is_empty() {
            return ptr::null_mut();
        }
        let length = items.len();
        let first = Box::into_raw(items.into_boxed_slice()).cast::<T>();
        self.lengths.lock().unwrap_or_else(PoisonError::into_inner).insert(first as usize, length);
        first
    }

    /// Frees an array that was given away. No effect on other pointers.
    pub(super) fn take_back(&self, first: *mut T) {
        let length = self.lengths.lock().unwrap_or_else(PoisonError::into_inner).remove(&(first as usize));
        if let Some(length) = length {
            // SAFETY: an array of this length began there, and only this call has taken it out of the table.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(first, length)) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_freed_once() {
        let arrays = GivenArrays::new();
        assert!(arrays.give(Vec::<u64>::new()).is_null());
        let first = arrays.give(vec![1u64, 2, 3]);
        // SAFETY: three elements were given.
        assert_eq!(unsafe { *first.add(2) }, 3);
        arrays.take_back(first);
        arrays.take_back(first);
        arrays.take_back(ptr::null_mut());
        assert!(arrays.lengths.lock().expect("no panic").is_empty());
    }
}
