//! Table of reused positions, each with a generation.

/// Table of reused positions, each with a generation. Grows to the largest number of entries in use; never shrinks.
pub(crate) struct Table<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    recycled: Vec<T>,
    live: usize,
}

/// A position: the generation of its present or last holder, whether it is live, and its value.
struct Entry<T> {
    generation: u32,
    live: bool,
    value: T,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), recycled: Vec::new(), live: 0 }
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, value: T) -> (u32, u32) {
        self.live += 1;
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            (entry.live, entry.value) = (true, value);
            return (index, entry.generation);
        }
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 entries");
        self.entries.push(Entry { generation: 1, live: true, value });
        (index, 1)
    }

    /// Returns at least `count` free positions, for copies of `like`. Those that are used are then reported with
    /// [`Self::filled`].
    #[inline]
    pub(crate) fn vacant(&mut self, like: &T, count: usize) -> Vacant<'_, T>
    where
        T: Copy,
    {
        self.prepare(like, count);
        let Self { entries, free, .. } = self;
        Vacant { entries, free: free.iter().rev() }
    }

    /// Marks so many of the vacant positions as used.
    #[inline]
    pub(crate) fn filled(&mut self, count: usize) {
        self.free.truncate(self.free.len() - count);
        self.live += count;
    }

    /// Ensures so many free positions, filled with copies of any value.
    fn prepare(&mut self, any: &T, count: usize)
    where
        T: Copy,
    {
        let first = self.entries.len();
        let until = first + count.saturating_sub(self.free.len());
        if first == until {
            return;
        }
        let end = u32::try_from(until).expect("fewer than 2^32 entries");
        self.entries.resize_with(until, || Entry { generation: 1, live: false, value: *any });
        // They are used after those that are free already, in order, as if entries were inserted one by one.
        self.free.splice(..0, (first as u32..end).rev());
    }

    #[inline]
    pub(crate) fn get(&self, index: u32, generation: u32) -> Option<&T> {
        let entry = self.entries.get(index as usize)?;
        (entry.generation == generation && entry.live).then_some(&entry.value)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        let entry = self.entries.get_mut(index as usize)?;
        (entry.generation == generation && entry.live).then_some(&mut entry.value)
    }

    /// Returns the entry at a position that the client's tables state to be live.
    #[inline]
    pub(crate) fn at(&mut self, index: u32) -> &mut T {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        &mut entry.value
    }

    /// Returns the live entry at a position, with its generation.
    #[inline]
    pub(crate) fn named(&mut self, index: u32) -> (u32, &mut T) {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        (entry.generation, &mut entry.value)
    }

    /// Returns the live entry at a position, read-only.
    #[inline]
    pub(crate) fn peek(&self, index: u32) -> &T {
        let entry = &self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        &entry.value
    }

    #[inline]
    pub(crate) fn generation(&self, index: u32) -> u32 {
        self.entries[index as usize].generation
    }

    /// Frees an entry; its value stays in place until the position is reused.
    #[inline]
    pub(crate) fn end(&mut self, index: u32) -> &mut T {
        let entry = &mut self.entries[index as usize];
        assert!(entry.live, "a live table entry");
        entry.live = false;
        // Never 0, so that the default id is always stale.
        entry.generation = entry.generation.wrapping_add(1).max(1);
        self.free.push(index);
        self.live -= 1;
        &mut entry.value
    }

    /// Frees an entry and returns its value.
    pub(crate) fn remove(&mut self, index: u32, vacant: T) -> T {
        core::mem::replace(self.end(index), vacant)
    }

    /// Keeps a removed value for the reuse of its allocations.
    pub(crate) fn recycle(&mut self, value: T) {
        if self.recycled.len() < 64 {
            self.recycled.push(value);
        }
    }

    pub(crate) fn recycled(&mut self) -> Option<T> {
        self.recycled.pop()
    }

    pub(crate) const fn len(&self) -> usize {
        self.live
    }
}

/// Vacant positions of a table that are being filled, in the order in which single inserts would use them.
pub(crate) struct Vacant<'a, T> {
    entries: &'a mut [Entry<T>],
    free: core::iter::Rev<core::slice::Iter<'a, u32>>,
}

impl<T: Copy> Vacant<'_, T> {
    /// Fills the next position with a copy of `like`. Returns index, generation and entry.
    #[inline(always)]
    pub(crate) fn fill(&mut self, like: &T) -> Option<(u32, u32, &mut T)> {
        let &index = self.free.next()?;
        let entry = self.entries.get_mut(index as usize)?;
        (entry.live, entry.value) = (true, *like);
        Some((index, entry.generation, &mut entry.value))
    }

    /// Returns the entry at a position, live or not.
    #[inline(always)]
    pub(crate) fn at(&mut self, index: u32) -> &mut T {
        &mut self.entries[index as usize].value
    }

    /// Leaves the position that was filled last free.
    #[inline]
    pub(crate) fn leave(&mut self, index: u32) {
        self.entries[index as usize].live = false;
    }
}
