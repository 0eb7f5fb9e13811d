//! Shadow model: every requested write, and every version that became visible, with its bytes.
//!
//! A *write* is one put request of a client; its bytes are a pattern of its own. A *commit* is a version that a shard
//! assigned. The checker looks into the pool at the moment of the commit and finds the write whose bytes are there, so
//! it need not trust the content of requests. From then on a version means those bytes: a get that names it must return
//! them all, an acknowledged put must name a commit of its own bytes.
//!
//! A write that was not acknowledged may have been applied, or may be applied later while pieces of it are still in
//! flight; a write may be committed once for each time that its client sent it, not more. Versions are unique in the
//! World, because each incarnation of a shard starts at a number of its own.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::message::ObjectPriority;

use super::{CheckResult, Rule, broken};
use crate::world::pattern;

/// Length below which the bytes of two writes may be equal by chance.
const CERTAIN_BYTES: u64 = 16;

struct Write {
    key: usize,
    bytes: u64,
    sends: u32,
    commits: u32,
}

/// Version that became visible.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Commit {
    pub(crate) key: usize,
    pub(crate) write: usize,
    pub(crate) bytes: u64,
    /// The version replaced those before it.
    pub(crate) replace: bool,
    /// Holder: an incarnation of a shard, or the incarnations that share a disk.
    pub(crate) incarnation: usize,
    /// Epoch of the shard at the commit.
    pub(crate) epoch: u64,
    /// Time when the put was acknowledged to a client.
    pub(crate) acked_ns: Option<u64>,
    /// Event at which the shard carried out the removal, or lost the slot.
    pub(crate) removed: Option<u64>,
    /// The version must survive every crash.
    pub(crate) promised: bool,
    /// A removal or a replacement was requested: nothing is promised of the version any more.
    pub(crate) void: bool,
    /// Version of another incarnation that it was copied or imported from.
    pub(crate) origin: Option<u64>,
    /// The version is the replica at a replica owner.
    pub(crate) is_copy: bool,
}

/// All writes and commits.
pub(crate) struct Shadow {
    digests: Vec<Digest>,
    by_digest: BTreeMap<Digest, usize>,
    writes: Vec<Write>,
    by_key: Vec<Vec<usize>>,
    commits: BTreeMap<u64, Commit>,
}

impl Shadow {
    pub(crate) fn new(keys: usize, tenant_of: impl Fn(usize) -> &'static [u8]) -> Self {
        let digest = |key| Digest::of(tenant_of(key), Self::name(key).as_bytes());
        let digests: Vec<Digest> = (0..keys).map(digest).collect();
        let by_digest = digests.iter().enumerate().map(|(key, &digest)| (digest, key)).collect();
        Self { by_key: vec![Vec::new(); keys], digests, by_digest, writes: Vec::new(), commits: BTreeMap::new() }
    }

    pub(crate) fn digest(&self, key: usize) -> Digest {
        self.digests[key]
    }

    pub(crate) fn key(&self, digest: Digest) -> Option<usize> {
        self.by_digest.get(&digest).copied()
    }

    pub(crate) fn commit_of(&self, version: u64) -> Option<&Commit> {
        self.commits.get(&version)
    }

    /// Records a put of a client's user.
    pub(crate) fn write(&mut self, key: usize, bytes: u64) -> usize {
        self.writes.push(Write { key, bytes, sends: 0, commits: 0 });
        let write = self.writes.len() - 1;
        self.by_key[key].push(write);
        write
    }

    /// Records that a client sends the bytes of a write.
    pub(crate) fn sent(&mut self, write: usize) {
        self.writes[write].sends += 1;
    }

    /// Records that a shard, in an incarnation and at an epoch, made these bytes visible.
    pub(crate) fn commit(
        &mut self,
        version: u64,
        digest: Digest,
        replace: bool,
        place: (usize, u64),
        bytes: &[u8],
    ) -> CheckResult {
        let Some(key) = self.key(digest) else {
            return Err(broken(Rule::Commit, format!("version {version} is of {digest}, which no client put")));
        };
        let length = bytes.len() as u64;
        let fits = |&write: &usize| {
            self.writes[write].bytes == length && pattern::first_difference(digest, write, bytes).is_none()
        };
        let candidates: Vec<usize> = self.by_key[key].iter().copied().filter(fits).collect();
        let Some(&any) = candidates.first() else {
            let what = format!("version {version} of key {key}: its {length} bytes are not of any put of that key");
            return Err(broken(Rule::Commit, what));
        };
        let open = |write: &usize| self.writes[*write].commits < self.writes[*write].sends;
        let write = candidates.into_iter().find(open).unwrap_or(any);
        self.writes[write].commits += 1;
        let Write { commits, sends, .. } = self.writes[write];
        if commits > sends && length >= CERTAIN_BYTES {
            let what = format!("write {write} of key {key} was sent {sends} times and committed {commits} times");
            return Err(broken(Rule::Commit, what));
        }
        for former in self.commits.values_mut().filter(|former| former.key == key && former.incarnation == place.0) {
            (former.promised, former.void) = (false, true);
        }
        let commit = Commit {
            key,
            write,
            bytes: length,
            replace,
            incarnation: place.0,
            epoch: place.1,
            acked_ns: None,
            removed: None,
            promised: false,
            void: false,
            origin: None,
            is_copy: false,
        };
        if let Some(former) = self.commits.insert(version, commit) {
            return Err(broken(Rule::Version, format!("version {version} was assigned twice: {former:?}, {commit:?}")));
        }
        Ok(())
    }

    /// Records that a shard's incarnation imported an object from a former owner of its slot, where it had the version
    /// `origin`: it is the same object, made then.
    pub(crate) fn imported(
        &mut self,
        version: u64,
        origin: u64,
        digest: Digest,
        incarnation: usize,
        bytes: &[u8],
    ) -> CheckResult {
        let Some(former) = self.commits.get(&origin).copied() else {
            return Err(broken(
                Rule::Commit,
                format!("version {version} was imported from {origin}, which does not exist"),
            ));
        };
        let key = self.key(digest).unwrap_or(usize::MAX);
        self.check_read(key, origin, bytes)?;
        let commit = Commit {
            incarnation,
            origin: Some(origin),
            replace: false,
            removed: None,
            promised: false,
            void: true,
            ..former
        };
        let commit = Commit { is_copy: false, ..commit };
        match self.commits.insert(version, commit) {
            Some(former) => Err(broken(Rule::Version, format!("version {version} was assigned twice: {former:?}"))),
            None => Ok(()),
        }
    }

    /// Marks an imported version as a replica that its owner pushed.
    pub(crate) fn copied(&mut self, version: u64) {
        if let Some(commit) = self.commits.get_mut(&version) {
            commit.is_copy = true;
        }
    }

    /// Returns the incarnation and version that a reader got in the end, and true if it read a replica of it.
    pub(crate) fn root_of(&self, version: u64) -> Option<(usize, u64, bool)> {
        let commit = self.commits.get(&version)?;
        let root = commit.origin.filter(|_| commit.is_copy).unwrap_or(version);
        Some((self.commits.get(&root)?.incarnation, root, commit.is_copy))
    }

    /// Checks a put that was acknowledged with a version.
    pub(crate) fn acked(&mut self, write: usize, version: u64, now_ns: u64) -> CheckResult {
        let Write { key, bytes, .. } = self.writes[write];
        let digest = self.digests[key];
        let Some(commit) = self.commits.get_mut(&version) else {
            return Err(broken(
                Rule::Commit,
                format!("write {write} was acked as version {version}, which does not exist"),
            ));
        };
        let mut expected = vec![0; bytes as usize];
        pattern::fill(digest, write, &mut expected);
        let same = commit.key == key
            && commit.bytes == bytes
            && pattern::first_difference(digest, commit.write, &expected).is_none();
        if !same {
            let what = format!("write {write} of key {key} was acked as version {version}, which is {commit:?}");
            return Err(broken(Rule::Commit, what));
        }
        commit.acked_ns.get_or_insert(now_ns);
        Ok(())
    }

    /// Checks the bytes that a get returned for this version.
    pub(crate) fn check_read(&self, key: usize, version: u64, bytes: &[u8]) -> CheckResult {
        let Some(commit) = self.commits.get(&version) else {
            return Err(broken(
                Rule::Bytes,
                format!("a get of key {key} returned version {version}, which does not exist"),
            ));
        };
        if commit.key != key || commit.bytes != bytes.len() as u64 {
            let what = format!("a get of key {key} returned {} bytes as version {version}: {commit:?}", bytes.len());
            return Err(broken(Rule::Bytes, what));
        }
        if let Some(at) = pattern::first_difference(self.digests[key], commit.write, bytes) {
            let what = format!("version {version} of key {key}: byte {at} of {} is wrong ({commit:?})", bytes.len());
            return Err(broken(Rule::Bytes, what));
        }
        Ok(())
    }

    /// Returns true if any put of a key had this length.
    pub(crate) fn has_length(&self, key: usize, bytes: u64) -> bool {
        self.by_key[key].iter().any(|&write| self.writes[write].bytes == bytes)
    }

    /// Records that a shard's incarnation removed a key: its versions below `floor` are gone.
    pub(crate) fn removed(&mut self, key: usize, incarnation: usize, floor: u64, event: u64) {
        for (_, commit) in
            self.commits.range_mut(..floor).filter(|(_, one)| one.key == key && one.incarnation == incarnation)
        {
            (commit.promised, commit.void) = (false, true);
            commit.removed.get_or_insert(event);
        }
    }

    /// Records the reply for a version. If the version replaces others, those are gone; returns the key then.
    pub(crate) fn replaced(&mut self, version: u64, event: u64) -> Option<usize> {
        let Commit { key, incarnation, .. } = self.commits.get(&version).copied().filter(|commit| commit.replace)?;
        self.removed(key, incarnation, version, event);
        Some(key)
    }

    /// Returns the priority that every put of a key names: the normal one for two keys of three.
    pub(crate) fn priority(key: usize) -> ObjectPriority {
        let number = if key.is_multiple_of(3) { (key / 3 % ObjectPriority::COUNT) as i64 - 4 } else { 0 };
        ObjectPriority::new(number).expect("it is in range")
    }

    /// Returns the name of a key.
    pub(crate) fn name(key: usize) -> String {
        format!("block-{key}")
    }

    /// Records that a shard's incarnation received a remove of a key: nothing is promised of versions below `floor` any
    /// more.
    pub(crate) fn removal_begins(&mut self, key: usize, incarnation: usize, floor: u64) {
        for (_, commit) in
            self.commits.range_mut(..floor).filter(|(_, one)| one.key == key && one.incarnation == incarnation)
        {
            (commit.promised, commit.void) = (false, true);
        }
    }

    /// Records a reply to a put by a shard that keeps its acknowledged objects.
    pub(crate) fn promise(&mut self, version: u64) {
        if let Some(commit) = self.commits.get_mut(&version).filter(|commit| !commit.void) {
            commit.promised = true;
        }
    }

    /// Returns keys and versions that must exist, of those that these incarnations hold.
    pub(crate) fn promised(&self, incarnations: &[usize]) -> Vec<(usize, u64)> {
        let here = |commit: &Commit| commit.promised && incarnations.contains(&commit.incarnation);
        self.commits.iter().filter(|(_, commit)| here(commit)).map(|(&version, commit)| (commit.key, version)).collect()
    }

    /// Drops the promises for objects of an incarnation, which may be gone.
    pub(crate) fn promises_void(&mut self, incarnation: usize, which: impl Fn(Digest) -> bool) {
        let digests = &self.digests;
        for commit in
            self.commits.values_mut().filter(|commit| commit.incarnation == incarnation && which(digests[commit.key]))
        {
            (commit.promised, commit.void) = (false, true);
        }
    }

    /// Drops the removals of an incarnation, which may be undone.
    pub(crate) fn removals_void(&mut self, incarnation: usize, which: impl Fn(Digest) -> bool) {
        let digests = &self.digests;
        let may = |commit: &&mut Commit| commit.incarnation == incarnation && which(digests[commit.key]);
        self.commits.values_mut().filter(may).for_each(|commit| commit.removed = None);
    }

    /// Records that a shard's incarnation dropped the objects of these digests: they may be older than those written
    /// elsewhere meanwhile.
    pub(crate) fn dropped(&mut self, incarnation: usize, event: u64, dropped: impl Fn(Digest) -> bool) {
        let digests = &self.digests;
        for commit in
            self.commits.values_mut().filter(|commit| commit.incarnation == incarnation && dropped(digests[commit.key]))
        {
            (commit.promised, commit.void) = (false, true);
            commit.removed.get_or_insert(event);
        }
    }

    /// Returns true if the version became visible at this epoch or before, and was acknowledged before this time.
    pub(crate) fn settled_before(&self, version: u64, epoch: u64, at_ns: u64) -> bool {
        let settled =
            |commit: &Commit| commit.epoch <= epoch && commit.acked_ns.is_some_and(|acked_ns| acked_ns < at_ns);
        let mut at = Some(version);
        while let Some(commit) = at.and_then(|version| self.commits.get(&version)) {
            if settled(commit) {
                return true;
            }
            at = commit.origin;
        }
        false
    }

    /// Like [`Self::dropped`], except for the versions that still exist.
    pub(crate) fn dropped_but(
        &mut self,
        incarnation: usize,
        event: u64,
        dropped: impl Fn(Digest) -> bool,
        there: &BTreeMap<Digest, u64>,
    ) {
        let digests = &self.digests;
        for (version, commit) in self.commits.iter_mut().filter(|(_, commit)| commit.incarnation == incarnation) {
            let digest = digests[commit.key];
            if dropped(digest) && there.get(&digest) != Some(version) {
                (commit.promised, commit.void) = (false, true);
                commit.removed.get_or_insert(event);
            }
        }
    }
}
