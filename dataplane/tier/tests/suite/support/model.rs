//! Reference model: the calls of each key, in order, and their acknowledgements.

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::rng::mix64;

/// Acknowledgement level of a step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Promise {
    None,
    Buffered,
    Durable,
    /// For checks in which only the bytes count: above every level that a step can have.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// Version put and its length; `None` for a removal.
    pub(crate) put: Option<(u64, u32)>,
    pub(crate) promise: Promise,
    pub(crate) failed: bool,
}

#[derive(Default, Debug)]
pub(crate) struct History {
    pub(crate) steps: Vec<Step>,
    /// Step whose object, or an earlier one, reclaim evicted.
    pub(crate) evicted: Option<usize>,
    /// Every version ever put, and its length.
    pub(crate) ever: BTreeMap<u64, u32>,
}

#[derive(Default)]
pub(crate) struct Model {
    pub(crate) keys: BTreeMap<Digest, History>,
}

/// Returns true if a version of an object is put as a stripe head.
pub(crate) const fn names_parts(version: Version) -> bool {
    version.0.is_multiple_of(3)
}

/// Returns true if a version of an object is put as replicated.
pub(crate) const fn copied(version: Version) -> bool {
    version.0.is_multiple_of(5)
}

/// Fills in the bytes of a version of an object: each depends on its offset.
pub(crate) fn fill(digest: Digest, version: u64, out: &mut [u8]) {
    for (at, word) in out.chunks_mut(8).enumerate() {
        let bytes = mix64(digest.low() ^ version.rotate_left(32) ^ (at as u64) << 1).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

impl History {
    fn push(&mut self, put: Option<(u64, u32)>) -> usize {
        self.steps.push(Step { put, promise: Promise::None, failed: false });
        if let Some((version, bytes)) = put {
            self.ever.insert(version, bytes);
        }
        self.steps.len() - 1
    }

    /// Returns the version that a get finds if nothing fails.
    pub(crate) fn current(&self) -> Option<(u64, u32)> {
        let at = self.steps.len().checked_sub(1)?;
        let step = self.steps[at];
        if step.failed || self.evicted.is_some_and(|evicted| evicted >= at) { None } else { step.put }
    }

    pub(crate) fn step_of(&self, version: u64) -> Option<usize> {
        self.steps.iter().rposition(|step| step.put.is_some_and(|(put, _)| put == version))
    }

    /// Checks the version found after a restart, at which every step of level `promise` counts, and begins a new
    /// history with it.
    ///
    /// If the tier takes no writes, it could not flush its findings: then the history continues.
    pub(crate) fn restarted(
        &mut self,
        found: Option<u64>,
        promise: Promise,
        strict: bool,
        flushed: bool,
    ) -> Result<(), String> {
        if promise == Promise::Nothing {
            let known = found.is_none_or(|version| self.ever.contains_key(&version));
            return if known { Ok(()) } else { Err(format!("found {found:?}, which was never put: {self:?}")) };
        }
        let floor = self.steps.iter().rposition(|step| step.promise >= promise);
        let verdict = self.judge(found, floor, strict);
        let is_removed = floor.is_some_and(|floor| self.steps[floor..].iter().all(|step| step.put.is_none()));
        let may_return = found.is_none() && !is_removed && (!strict || self.evicted.is_some());
        if !flushed || may_return {
            // An object that could not be read, or was evicted, may be there after the next restart.
            if found.is_none() {
                self.evicted = self.steps.len().checked_sub(1);
            }
            let uncertain = self.steps.iter_mut().filter(|step| step.promise < promise);
            uncertain.for_each(|step| step.promise = Promise::None);
            return verdict;
        }
        let step = found.and_then(|version| self.ever.get(&version).map(|bytes| (version, *bytes)));
        self.steps.clear();
        self.evicted = None;
        if step.is_some() || !self.ever.is_empty() {
            self.steps.push(Step { put: step, promise: Promise::Durable, failed: false });
        }
        verdict
    }

    pub(crate) fn judge(&self, found: Option<u64>, floor: Option<usize>, strict: bool) -> Result<(), String> {
        let told = || format!("found {found:?}, promised step {floor:?} of {self:?}");
        match found {
            Some(version) => {
                let Some(step) = self.step_of(version) else {
                    return Err(format!("a version that is none: {}", told()));
                };
                if floor.is_some_and(|floor| step < floor) {
                    return Err(format!("older than what was promised: {}", told()));
                }
            }
            None if strict => {
                let Some(floor) = floor else { return Ok(()) };
                let gone = self.evicted.is_some_and(|evicted| evicted >= floor);
                let is_last = floor + 1 == self.steps.len();
                if is_last && !gone && self.steps[floor].put.is_some() && !self.steps[floor].failed {
                    return Err(format!("lost: {}", told()));
                }
            }
            None => {}
        }
        Ok(())
    }
}

impl Model {
    pub(crate) fn put(&mut self, digest: Digest, version: u64, bytes: u32) -> usize {
        self.keys.entry(digest).or_default().push(Some((version, bytes)))
    }

    pub(crate) fn remove(&mut self, digest: Digest) -> usize {
        self.keys.entry(digest).or_default().push(None)
    }
}
