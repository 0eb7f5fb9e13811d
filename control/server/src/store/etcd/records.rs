//! Keys in etcd, and changes fenced by the turn that they belong to.

use std::thread;
use std::time::{Duration, Instant};

use kvplane_cluster::{Change, Record};
use kvplane_etcd::{Compare, Entry, Gateway, GatewayError, Operation, Outcome, Range};

use super::error::{EtcdChangeError, StoredStateError};
use super::{CALL, COMMIT};

/// Operations per transaction: etcd accepts 128.
const OPERATIONS: usize = 100;
/// Bytes of keys and values per transaction: etcd accepts 1.5 MiB.
const TRANSACTION_BYTES: usize = 512 << 10;
/// Entries per page.
const PAGE: u32 = 500;
/// Version of the keys' layout; records carry their own.
const FORMAT: &str = "1";
/// Backoff between attempts at one change.
const AGAIN: Duration = Duration::from_millis(20);

/// A key below the cluster's prefix, and its new value; none to remove it.
pub(super) type KeyChange = (Vec<u8>, Option<Vec<u8>>);

pub(super) fn key_change(change: &Change) -> KeyChange {
    let key = |bytes: Vec<u8>| [b"records/", &*bytes].concat();
    match change {
        Change::Put(record) => {
            let mut value = Vec::new();
            record.encode(&mut value);
            (key(record.key().to_bytes()), Some(value))
        }
        Change::Remove(removed) => (key(removed.to_bytes()), None),
    }
}

pub(super) fn tickets_change(text: &str) -> KeyChange {
    (b"tickets".to_vec(), Some(text.as_bytes().to_vec()))
}

pub(super) fn state_change(state_id: u64) -> KeyChange {
    (b"state".to_vec(), Some(format!("{FORMAT} {state_id:016x}").into_bytes()))
}

pub(super) fn ticket_time_change(seconds: u64) -> KeyChange {
    (b"ticket-time".to_vec(), Some(seconds.to_string().into_bytes()))
}

/// Names of a cluster's keys.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    base: Vec<u8>,
}

impl Keys {
    pub(super) fn new(prefix: &str, cluster: &str) -> Self {
        Self { base: format!("{prefix}{cluster}/").into_bytes() }
    }

    pub(super) fn of(&self, name: &[u8]) -> Vec<u8> {
        [&self.base, name].concat()
    }
}

/// Stored state of a cluster.
#[derive(Debug, Default)]
pub(super) struct StoredRecords {
    pub(super) state_id: Option<u64>,
    pub(super) records: Vec<Record>,
    pub(super) tickets: Option<String>,
    pub(super) ticket_time_s: Option<u64>,
    /// A batch that was stored completely and not carried out yet.
    batch: Vec<KeyChange>,
}

/// Error of reading the stored state.
#[derive(Debug)]
pub(super) enum ReadError {
    /// etcd does not answer; a retry may succeed.
    Gateway(GatewayError),
    /// A change that a former leader left could not be carried out; a retry may succeed.
    Change(EtcdChangeError),
    /// The stored state is unusable.
    Damaged(StoredStateError),
}

impl From<GatewayError> for ReadError {
    fn from(error: GatewayError) -> Self {
        Self::Gateway(error)
    }
}

/// Fenced changes of one turn.
pub(super) struct FencedChanges<'a> {
    pub(super) gateway: &'a Gateway,
    pub(super) keys: &'a Keys,
    /// Value of `leader` while the turn lasts.
    pub(super) leader: &'a [u8],
    pub(super) turn: u64,
    /// Number of changes made in this turn.
    pub(super) changes: u64,
}

/// Returns the value of `fence` after this number of changes of a turn.
pub(super) fn fence(turn: u64, changes: u64) -> Vec<u8> {
    format!("{turn:016x} {changes}").into_bytes()
}

impl FencedChanges<'_> {
    /// Carries out `changes`, all or none.
    pub(super) fn commit(&mut self, changes: &[KeyChange]) -> Result<(), EtcdChangeError> {
        let by = Instant::now() + COMMIT;
        let bytes: usize = changes.iter().map(size).sum();
        if changes.len() <= OPERATIONS && bytes <= TRANSACTION_BYTES {
            return self.transact(changes, by);
        }
        // First the whole batch is stored; the key `batch` makes it valid.
        let batch = encode(changes);
        let parts: Vec<KeyChange> = batch
            .chunks(TRANSACTION_BYTES)
            .enumerate()
            .map(|(part, bytes)| (part_key(part), Some(bytes.to_vec())))
            .collect();
        for part in &parts {
            self.transact(std::slice::from_ref(part), by)?;
        }
        self.transact(&[(b"batch".to_vec(), Some(parts.len().to_string().into_bytes()))], by)?;
        self.finish(changes, Instant::now() + COMMIT)
    }

    /// Carries out a stored batch.
    fn finish(&mut self, changes: &[KeyChange], by: Instant) -> Result<(), EtcdChangeError> {
        let mut rest = changes;
        while !rest.is_empty() {
            let mut bytes = 0;
            let most = rest.iter().take(OPERATIONS).take_while(|change| {
                bytes += size(change);
                bytes <= TRANSACTION_BYTES
            });
            let count = most.count().max(1);
            self.transact(&rest[..count], by)?;
            rest = &rest[count..];
        }
        let (from, to) = (self.keys.of(b"batch"), self.keys.of(b"batch0"));
        self.fenced(&[Operation::DeleteRange(&from, &to)], by)
    }

    fn transact(&mut self, changes: &[KeyChange], by: Instant) -> Result<(), EtcdChangeError> {
        let keys: Vec<Vec<u8>> = changes.iter().map(|(key, _)| self.keys.of(key)).collect();
        let operation = |(key, change): (&'_ Vec<u8>, &'_ KeyChange)| (key.clone(), change.1.clone());
        let owned: Vec<(Vec<u8>, Option<Vec<u8>>)> = keys.iter().zip(changes).map(operation).collect();
        let operations: Vec<Operation<'_>> = owned
            .iter()
            .map(|(key, value)| match value {
                Some(value) => Operation::Put(key, value),
                None => Operation::Delete(key),
            })
            .collect();
        self.fenced(&operations, by)
    }

    /// Retries until the transaction is carried out, another leader is found, or the deadline passes. An attempt may
    /// succeed although its answer is lost, and one that etcd processes late must not undo what followed it: the fence
    /// detects both.
    fn fenced(&mut self, operations: &[Operation<'_>], by: Instant) -> Result<(), EtcdChangeError> {
        let (fence_key, leader_key) = (self.keys.of(b"fence"), self.keys.of(b"leader"));
        let (before, after) = (fence(self.turn, self.changes), fence(self.turn, self.changes + 1));
        let mut all = vec![Operation::Put(&fence_key, &after), Operation::Put(&leader_key, self.leader)];
        all.extend_from_slice(operations);
        loop {
            let compares = [Compare::Value(&fence_key, &before), Compare::Value(&leader_key, self.leader)];
            let attempt = by.min(Instant::now() + CALL);
            match self.gateway.transact(&compares, &all, &[&fence_key], attempt) {
                Ok(Outcome::Done) => break,
                Ok(Outcome::Refused(found)) if found.first().is_some_and(|entry| entry.value == after) => break,
                Ok(Outcome::Refused(_)) => return Err(EtcdChangeError::OtherLeader),
                Err(error) if Instant::now() + AGAIN >= by => return Err(EtcdChangeError::Gateway(error)),
                Err(_) => thread::sleep(AGAIN),
            }
        }
        self.changes += 1;
        Ok(())
    }

    /// Reads the whole state, carries out a batch that a former leader left, and gives a new state its identity.
    pub(super) fn take_over(&mut self, fresh_id: u64) -> Result<StoredRecords, ReadError> {
        let mut stored = read(self.gateway, self.keys)?;
        if !stored.batch.is_empty() {
            self.finish(&std::mem::take(&mut stored.batch), Instant::now() + COMMIT).map_err(ReadError::Change)?;
            stored = read(self.gateway, self.keys)?;
        }
        if stored.state_id.is_none() {
            self.commit(&[state_change(fresh_id)]).map_err(ReadError::Change)?;
            stored.state_id = Some(fresh_id);
        }
        Ok(stored)
    }
}

fn size(change: &KeyChange) -> usize {
    change.0.len() + change.1.as_ref().map_or(0, Vec::len) + 64
}

fn part_key(part: usize) -> Vec<u8> {
    format!("batch/{part:08}").into_bytes()
}

/// Reads all keys of the cluster, as of one revision.
pub(super) fn read(gateway: &Gateway, keys: &Keys) -> Result<StoredRecords, ReadError> {
    let base = keys.of(b"");
    let mut end = base.clone();
    // The base ends in a slash, so this is the first key without that prefix.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    let (mut from, mut revision, mut entries) = (base.clone(), 0, Vec::new());
    loop {
        let range = Range { from: &from, to: &end, limit: PAGE, revision };
        let found = gateway.range(&range, Instant::now() + CALL)?;
        revision = found.revision;
        entries.extend(found.entries);
        match entries.last() {
            Some(last) if found.more => from = [&*last.key, &[0]].concat(),
            _ => break,
        }
    }
    sort(&entries, base.len()).map_err(ReadError::Damaged)
}

fn sort(entries: &[Entry], base: usize) -> Result<StoredRecords, StoredStateError> {
    let mut stored = StoredRecords::default();
    let (mut parts, mut whole) = (Vec::new(), 0);
    for Entry { key, value, .. } in entries {
        let name = key.get(base..).unwrap_or_default();
        if let Some(record) = name.strip_prefix(b"records/") {
            let key = || String::from_utf8_lossy(key).into_owned();
            let found = Record::decode(value).map_err(|source| StoredStateError::Record { key: key(), source })?;
            if found.key().to_bytes() != record {
                return Err(StoredStateError::OtherKey { found: found.key() });
            }
            stored.records.push(found);
        } else if name.starts_with(b"batch/") {
            parts.push(value);
        } else {
            let text = String::from_utf8_lossy(value);
            match name {
                b"batch" => {
                    whole = text.parse().map_err(|_| StoredStateError::Parts { text: text.into_owned() })?;
                }
                b"tickets" => stored.tickets = Some(text.into_owned()),
                b"ticket-time" => {
                    let seconds = text.parse().map_err(|_| StoredStateError::TicketTime { text: text.into_owned() })?;
                    stored.ticket_time_s = Some(seconds);
                }
                b"state" => {
                    let (format, id) = text.split_once(' ').unwrap_or((&text, ""));
                    if format != FORMAT {
                        return Err(StoredStateError::Format { found: format.to_owned(), supported: FORMAT });
                    }
                    let id =
                        u64::from_str_radix(id, 16).map_err(|_| StoredStateError::Identity { text: id.to_owned() })?;
                    stored.state_id = Some(id);
                }
                _ => {}
            }
        }
    }
    if whole > parts.len() {
        return Err(StoredStateError::MissingParts { parts: whole, found: parts.len() });
    }
    // Further parts are left over from a batch that was never stored completely.
    let bytes: Vec<u8> = parts[..whole].iter().flat_map(|part| part.iter().copied()).collect();
    stored.batch = decode(&bytes).ok_or(StoredStateError::Batch)?;
    Ok(stored)
}

/// Encodes a batch: for each key its length, its bytes, whether it has a value, the value's length and bytes.
fn encode(changes: &[KeyChange]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut put = |bytes: &[u8]| {
        out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        out.extend_from_slice(bytes);
    };
    for (key, value) in changes {
        put(key);
        put(&[u8::from(value.is_some())]);
        put(value.as_deref().unwrap_or_default());
    }
    out
}

fn decode(mut bytes: &[u8]) -> Option<Vec<KeyChange>> {
    let mut next = || {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        bytes = rest;
        Some(part)
    };
    let mut changes = Vec::new();
    while let Some(key) = next() {
        let (is_put, value) = (next()?, next()?);
        changes.push((key.to_vec(), (is_put == [1]).then(|| value.to_vec())));
    }
    bytes.is_empty().then_some(changes)
}

#[cfg(test)]
#[path = "../../../../etcd/tests/launch/mod.rs"]
mod launch;

#[cfg(test)]
mod tests {
    use super::launch::{Etcd, soon};
    use super::*;

    /// Creates the turn of this number, without changes.
    fn turn<'a>(gateway: &'a Gateway, keys: &'a Keys, turn: u64) -> FencedChanges<'a> {
        FencedChanges { gateway, keys, leader: b"the same", turn, changes: 0 }
    }

    fn begin(gateway: &Gateway, keys: &Keys, turn: u64) {
        gateway.put(&keys.of(b"leader"), b"the same", soon()).expect("etcd answers");
        gateway.put(&keys.of(b"fence"), &fence(turn, 0), soon()).expect("etcd answers");
    }

    /// Creates changes of tenants, one record each.
    fn tenants(range: std::ops::Range<u32>, weight: u32) -> Vec<KeyChange> {
        let tenant = |n| kvplane_cluster::Tenant { name: format!("tenant {n:05}"), dram_bytes: Some(7), weight };
        range.map(|n| key_change(&Change::Put(Record::Tenant(tenant(n))))).collect()
    }

    fn weights(gateway: &Gateway, keys: &Keys) -> Vec<u32> {
        let stored = read(gateway, keys).unwrap_or_else(|error| panic!("{error:?}"));
        let weight = |record| match record {
            Record::Tenant(tenant) => tenant.weight,
            other => panic!("{other:?}"),
        };
        stored.records.into_iter().map(weight).collect()
    }

    #[test]
    fn changes_are_whole_in_order_and_of_one_leader() {
        let directory = std::env::temp_dir().join(format!("kvp-turns-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let Some(etcd) = Etcd::start(&directory, &[]) else { return };
        let (gateway, keys) = (etcd.gateway(), Keys::new("/k/", "c"));
        begin(&gateway, &keys, 1);
        let mut first = turn(&gateway, &keys, 1);
        let stored = first.take_over(77).unwrap_or_else(|error| panic!("{error:?}"));
        assert_eq!((stored.state_id, stored.records.len()), (Some(77), 0));
        // One that fits a transaction, and one that does not.
        first.commit(&tenants(0..3, 1)).expect("small");
        let late = (fence(1, first.changes - 1), fence(1, first.changes));
        first.commit(&tenants(0..1_300, 2)).expect("large");
        assert_eq!(weights(&gateway, &keys), vec![2; 1_300]);
        // A transaction that etcd processes late, after later ones.
        let again = gateway.transact(
            &[Compare::Value(&keys.of(b"fence"), &late.0)],
            &[Operation::Put(&keys.of(b"fence"), &late.1)],
            &[],
            soon(),
        );
        assert!(matches!(again, Ok(Outcome::Refused(_))), "{again:?}");
        // A transaction whose answer was lost counts once.
        let before = first.changes;
        first.commit(&tenants(0..1, 3)).expect("once");
        first.changes = before;
        first.commit(&tenants(0..1, 3)).expect("its fence shows that it was carried out");

        // A leader that dies when the whole batch is stored and a part of it is carried out.
        let changes = tenants(0..1_300, 4);
        let parts: Vec<Vec<u8>> = encode(&changes).chunks(TRANSACTION_BYTES).map(<[u8]>::to_vec).collect();
        for (part, bytes) in parts.iter().enumerate() {
            first.commit(&[(part_key(part), Some(bytes.clone()))]).expect("a part");
        }
        let count = parts.len().to_string().into_bytes();
        first.commit(&[(b"batch".to_vec(), Some(count))]).expect("it counts");
        first.commit(&changes[..40]).expect("a part of it");
        begin(&gateway, &keys, 2);
        let mut second = turn(&gateway, &keys, 2);
        let stored = second.take_over(78).unwrap_or_else(|error| panic!("{error:?}"));
        assert_eq!((stored.state_id, stored.records.len()), (Some(77), 1_300));
        assert_eq!(weights(&gateway, &keys), vec![4; 1_300]);
        // A fenced leader changes nothing, whatever it believes.
        assert!(
            first
                .commit(&tenants(0..1, 9))
                .expect_err("it does not lead")
                .to_string()
                .contains("another control plane")
        );
        assert_eq!(weights(&gateway, &keys), vec![4; 1_300]);
        drop(etcd);
        let _ = std::fs::remove_dir_all(&directory);
    }

    #[test]
    fn a_stored_batch_is_read_back_completely_or_not_at_all() {
        let changes: Vec<KeyChange> = (0..300u16)
            .map(|n| {
                let value = (n % 3 != 0).then(|| vec![n as u8; usize::from(n)]);
                (n.to_le_bytes().to_vec(), value)
            })
            .collect();
        let bytes = encode(&changes);
        assert_eq!(decode(&bytes), Some(changes));
        assert_eq!(decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(decode(&[]), Some(Vec::new()));
    }

    #[test]
    fn stored_keys_are_parsed_or_rejected() {
        let entry = |name: &str, value: &[u8]| Entry {
            key: format!("/k/{name}").into_bytes(),
            value: value.to_vec(),
            modified: 1,
        };
        let found = [entry("state", b"1 00000000000000ff"), entry("ticket-time", b"77"), entry("tickets", b"t")];
        let stored = sort(&found, 3).expect("good");
        assert_eq!(
            (stored.state_id, stored.tickets.as_deref(), stored.ticket_time_s),
            (Some(255), Some("t"), Some(77))
        );
        assert!(sort(&[entry("ticket-time", b"noon")], 3).expect_err("damaged").to_string().contains("\"noon\""));
        assert!(sort(&[entry("state", b"2 00")], 3).expect_err("newer").to_string().contains("format \"2\""));
        assert!(sort(&[entry("records/x", b"junk")], 3).is_err());
        let half = [entry("batch/00000000", &encode(&[(vec![1], None)]))];
        assert!(sort(&half, 3).expect("good").batch.is_empty(), "it was not written down as a whole");
        let left_over = entry("batch/00000001", b"junk");
        let whole = [half[0].clone(), left_over, entry("batch", b"1")];
        assert_eq!(sort(&whole, 3).expect("good").batch, [(vec![1], None)]);
        assert!(sort(&whole[1..], 3).is_err(), "a part is missing");
    }
}
