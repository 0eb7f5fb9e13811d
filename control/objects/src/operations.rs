//! Operations on a store, by `object_store`.

use std::sync::Arc;

use kvplane_proto::checksum::payload_checksum;
use kvplane_shared::{GetRange, ListedObject, Operation, Outcome, StoreError};
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};

use crate::errors::error_of;
use crate::place::OpenStore;

/// Most objects of one list: beyond it, the list fails.
const LISTED_MOST: usize = 1 << 20;
/// Longest object that is read as a whole, an index: a longer one is none of ours.
const WHOLE_BYTES_MOST: u64 = 4 << 30;
/// Bytes of which a checksum is computed before other operations go on.
const CHECKED_BYTES: usize = 1 << 20;

/// Owner of a pack's bytes while they are sent.
struct SharedBytes(Arc<Vec<u8>>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Carries out an operation on the objects of a store.
pub(crate) async fn carry_out(open: &OpenStore, operation: Operation) -> Result<Outcome, StoreError> {
    let OpenStore { store, prefix, marker } = open;
    let store = &**store;
    if let Some(marker) = marker {
        marker.check().await?;
    }
    // These need no object: it is their place that is missing.
    let of_place = |error: object_store::Error| match error_of(&error) {
        StoreError::NotFound => StoreError::Absent { reason: "404 Not Found: there is no such bucket".to_owned() },
        error => error,
    };
    let path = |name: &str| name.split('/').fold(prefix.clone(), |path, part| path.join(part));
    match operation {
        Operation::Put { name, bytes } => {
            let payload = PutPayload::from(bytes::Bytes::from_owner(SharedBytes(bytes)));
            store.put(&path(&name), payload).await.map_err(of_place)?;
            Ok(Outcome::Done)
        }
        Operation::Get { name, range } => get(store, &path(&name), range).await,
        Operation::Stat { name } => {
            let meta = store.head(&path(&name)).await.map_err(|error| error_of(&error))?;
            Ok(Outcome::Written { at_ms: written_ms(&meta) })
        }
        Operation::Delete { name } => match store.delete(&path(&name)).await.map_err(|error| error_of(&error)) {
            Ok(()) | Err(StoreError::NotFound) => Ok(Outcome::Done),
            Err(error) => Err(error),
        },
        Operation::List { prefix: of } => {
            let below = if of.is_empty() { prefix.clone() } else { path(&of) };
            list(store, prefix, &below).await
        }
    }
}

async fn get(store: &dyn ObjectStore, path: &Path, range: GetRange) -> Result<Outcome, StoreError> {
    let (part, checked, expected) = match range {
        GetRange::Whole => (None, 0, None),
        GetRange::Suffix { bytes } => (Some(object_store::GetRange::Suffix(bytes)), 0, None),
        GetRange::Bounded { offset, bytes, checked } => {
            (Some(object_store::GetRange::Bounded(offset..offset + bytes)), checked, Some(bytes))
        }
    };
    let options = GetOptions { range: part, ..GetOptions::default() };
    let found = match store.get_opts(path, options).await.map_err(|error| error_of(&error)) {
        Ok(found) => found,
        Err(StoreError::Other { reason }) => return after_refusal(store, path, range, reason).await,
        Err(error) => return Err(error),
    };
    let promised = found.range.end - found.range.start;
    if promised > WHOLE_BYTES_MOST {
        return Err(StoreError::Other { reason: format!("{path} has {promised} bytes") });
    }
    let bytes = found.bytes().await.map_err(|error| error_of(&error))?;
    let found = bytes.len() as u64;
    let expected = expected.unwrap_or(promised);
    if found != expected {
        return Err(StoreError::Short { expected, found });
    }
    let checked = usize::try_from(checked).unwrap_or(usize::MAX).min(bytes.len());
    let checksum = checksum_of(&bytes[..checked]).await;
    Ok(Outcome::Bytes { bytes: Vec::from(bytes), checksum })
}

/// Returns the result of a read that the store refused for another reason than access or load. A range of which nothing
/// is left is refused, by S3 (416) and by file systems, in words of their own: the length of the object tells a
/// shortened object from a store that fails.
async fn after_refusal(
    store: &dyn ObjectStore,
    path: &Path,
    range: GetRange,
    reason: String,
) -> Result<Outcome, StoreError> {
    let length = if range == GetRange::Whole { None } else { store.head(path).await.ok().map(|meta| meta.size) };
    match (range, length) {
        (GetRange::Bounded { offset, bytes, .. }, Some(length)) if length <= offset => {
            Err(StoreError::Short { expected: bytes, found: 0 })
        }
        (GetRange::Suffix { .. }, Some(0)) => Ok(Outcome::Bytes { bytes: Vec::new(), checksum: payload_checksum(&[]) }),
        _ => Err(StoreError::Other { reason }),
    }
}

/// Returns the checksum of bytes, and lets other operations go on in between.
async fn checksum_of(bytes: &[u8]) -> u64 {
    if bytes.len() <= CHECKED_BYTES {
        return payload_checksum(bytes);
    }
    let mut checksum = kvplane_proto::checksum::PayloadChecksum::new();
    for part in bytes.chunks(CHECKED_BYTES) {
        checksum.update(part);
        tokio::task::yield_now().await;
    }
    checksum.finish()
}

async fn list(store: &dyn ObjectStore, prefix: &Path, below: &Path) -> Result<Outcome, StoreError> {
    use futures_util::StreamExt as _;

    let start = format!("{prefix}/");
    let mut listed = Vec::new();
    let mut stream = store.list(Some(below));
    while let Some(meta) = stream.next().await {
        let meta = meta.map_err(|error| error_of(&error))?;
        if let Some(name) = meta.location.as_ref().strip_prefix(&start) {
            listed.push(ListedObject { name: name.to_owned(), bytes: meta.size, written_ms: written_ms(&meta) });
        }
        if listed.len() > LISTED_MOST {
            return Err(StoreError::Other { reason: format!("more than {LISTED_MOST} objects below {below}") });
        }
    }
    Ok(Outcome::Listed(listed))
}

fn written_ms(meta: &ObjectMeta) -> u64 {
    u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0)
}
