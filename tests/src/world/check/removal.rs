//! Checker of removals: no read after remove, as far as that is promised.
//!
//! *At one shard*, strictly: once an incarnation of a shard has processed a remove of a key, no reply to a later
//! request names a version that it had before. (A request for several objects may be answered when the last of them
//! came from a disk; the first were pinned before.)
//!
//! *Across shards*: a remove that was answered by a shard at epoch `e` and acknowledged, and a get of the same key that
//! was submitted after that acknowledgement and answered by shards at epochs of at least `e` only, returns no version
//! that was made at an epoch up to `e` and whose put was acknowledged before the remove was submitted.
//!
//! *Of replicas*, whatever the epochs: a version that an incarnation of a shard has acknowledged as removed or replaced
//! is not read from its replica owners either by a get that begins later; and a client that got an object from its
//! owner does not get an older one from a replica owner after that. Exempt are gets that failed over to the replica
//! owner because the owner did not answer: they know no more than the map that they follow.
//!
//! Not promised: a shard that does not know epoch `e` yet believes that it owns the key and serves its objects, to
//! clients whose maps are as old; for the same reason a remove that such a shard answers does not reach the objects of
//! the newer owner; and a put that was sent more than once (its first lane was lost) may take effect again, as a new
//! version, when its in-flight duplicate arrives after the remove.

use std::collections::BTreeMap;

use super::shadow::Shadow;
use super::{CheckResult, Rule, broken};

/// Remove that its user knows to be done.
struct Removal {
    started_ns: u64,
    acked_ns: u64,
    epoch: u64,
    /// Incarnation that answered the remove.
    incarnation: usize,
}

/// Reply to a remove.
struct Answer {
    at_ns: u64,
    epoch: u64,
    incarnation: usize,
}

/// Replies and removes so far.
pub(crate) struct Removals {
    /// Replies to gets, by client and version: time, and epoch of the shard.
    gets: BTreeMap<(usize, u64), Vec<(u64, u64)>>,
    /// Replies to removes, by client and key.
    removes: BTreeMap<(usize, usize), Vec<Answer>>,
    done: Vec<Vec<Removal>>,
    /// Newest version that each client got of each key, by the incarnation of the shard that made it, with the time.
    seen: BTreeMap<(usize, usize, usize), (u64, u64)>,
}

impl Removals {
    pub(crate) fn new(keys: usize) -> Self {
        Self {
            gets: BTreeMap::new(),
            removes: BTreeMap::new(),
            done: (0..keys).map(|_| Vec::new()).collect(),
            seen: BTreeMap::new(),
        }
    }

    /// Records that a shard answers a client's get with a version. `asked` is the event of the request, and the epoch
    /// of the shard then.
    pub(crate) fn get_answered(
        &mut self,
        shadow: &Shadow,
        client: usize,
        version: u64,
        (event, epoch): (u64, u64),
        now_ns: u64,
    ) -> CheckResult {
        self.gets.entry((client, version)).or_default().push((now_ns, epoch));
        match shadow.commit_of(version) {
            Some(commit) if commit.removed.is_some_and(|removed| removed < event) => Err(broken(
                Rule::Removed,
                format!("version {version} was removed from the shard that answers it: {commit:?}"),
            )),
            _ => Ok(()),
        }
    }

    /// Forgets all removes: a disk lost a write that it had acknowledged, so removed objects may be back. That holds
    /// too for replies whose batch is not complete yet.
    pub(crate) fn void(&mut self) {
        self.done.iter_mut().for_each(Vec::clear);
        self.seen.clear();
        self.removes.clear();
    }

    /// Records that a shard answers a client's remove.
    pub(crate) fn remove_answered(&mut self, at: (usize, usize), epoch: u64, incarnation: usize, now_ns: u64) {
        self.removes.entry(at).or_default().push(Answer { at_ns: now_ns, epoch, incarnation });
    }

    /// Records that a user's remove is complete, with success or because there was no object.
    pub(crate) fn remove_done(&mut self, client: usize, key: usize, started_ns: u64, now_ns: u64) {
        let answers = self.removes.get(&(client, key)).map_or(&[][..], Vec::as_slice);
        let epoch = answers.iter().filter(|answer| answer.at_ns >= started_ns).map(|answer| answer.epoch).max();
        if let (Some(epoch), Some(&Answer { incarnation, .. })) = (epoch, answers.last()) {
            self.done[key].push(Removal { started_ns, acked_ns: now_ns, epoch, incarnation });
        }
    }

    /// Checks a user's completed get that did not fail over to a replica owner: a replica is not older than the
    /// versions that its owner acknowledged, nor than those that it gave this client before.
    pub(crate) fn check_copy(
        &mut self,
        shadow: &Shadow,
        (client, key): (usize, usize),
        version: u64,
        started_ns: u64,
        now_ns: u64,
        inherited: bool,
    ) -> CheckResult {
        let Some((incarnation, root, is_copy)) = shadow.root_of(version) else { return Ok(()) };
        let newest = self.seen.entry((client, key, incarnation)).or_insert((root, now_ns));
        // A shard that inherited the replica does not know versions that the owner had not acknowledged.
        if is_copy && !inherited && root < newest.0 && newest.1 < started_ns {
            let what = format!("client {client} got {root} of key {key} from a copy, and {} before that", newest.0);
            return Err(broken(Rule::Removed, what));
        }
        if root > newest.0 {
            *newest = (root, now_ns);
        }
        let gone = |removal: &&Removal| {
            let acked_ns = shadow.commit_of(root).and_then(|commit| commit.acked_ns);
            removal.incarnation == incarnation
                && removal.acked_ns < started_ns
                && acked_ns.is_some_and(|acked_ns| acked_ns < removal.started_ns)
        };
        match self.done[key].iter().find(gone).filter(|_| is_copy) {
            None => Ok(()),
            Some(Removal { started_ns, acked_ns, .. }) => {
                let what = format!(
                    "client {client} got {root} of key {key} from the replica {version}, and incarnation {incarnation} \
                     acknowledged its removal from {started_ns} to {acked_ns} ns"
                );
                Err(broken(Rule::Removed, what))
            }
        }
    }

    /// Checks a user's get that completed with a version.
    pub(crate) fn check_get(
        &self,
        shadow: &Shadow,
        client: usize,
        key: usize,
        version: u64,
        started_ns: u64,
    ) -> CheckResult {
        let answers = self.gets.get(&(client, version)).map_or(&[][..], Vec::as_slice);
        let least = answers.iter().filter(|(at_ns, _)| *at_ns >= started_ns).map(|(_, epoch)| *epoch).min();
        let Some(least) = least else {
            return Err(broken(
                Rule::Bytes,
                format!("version {version} of key {key} was returned without a shard's reply"),
            ));
        };
        let forbids = |removal: &&Removal| {
            removal.acked_ns < started_ns
                && least >= removal.epoch
                && shadow.settled_before(version, removal.epoch, removal.started_ns)
        };
        match self.done[key].iter().find(forbids) {
            None => Ok(()),
            Some(removal) => Err(broken(
                Rule::Removed,
                format!(
                    "a get of key {key} at {started_ns} ns returned version {version} ({:?}), answered at epoch \
                     {least}, after a remove at epoch {} that was done from {} to {} ns",
                    shadow.commit_of(version),
                    removal.epoch,
                    removal.started_ns,
                    removal.acked_ns
                ),
            )),
        }
    }
}
