//! What a master of Mooncake publishes of its store (its RFC 1527): objects that came, went, or are all gone.
//!
//! A batch is an array of a time, events and perhaps a rank, and an event a map. Which block an object is, its key
//! says, or its model and its hash. Objects of other ranks, groups and layers than the first are left out, as those of
//! keys that are no blocks' are: both are counted as foreign. What cannot be read costs its event.

use super::hash;
use super::keys::{BlockKey, read_key};
use super::msgpack::Value;

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreChange {
    /// It is there.
    Stored,
    /// It is there no more.
    Removed,
    /// Nothing is there.
    Cleared,
}

/// Where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMedium {
    /// In memory.
    Memory,
    /// On an SSD.
    Ssd,
    /// Wherever it was.
    All,
}

/// How an object is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectName<'a> {
    /// By the digest that the publisher gives it.
    Digest(u128),
    /// By its key.
    Key(&'a str),
    /// By the hash of its block, of a model.
    Block(BlockKey),
    /// Not at all: all there is.
    All,
}

/// An event of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreEvent<'a> {
    /// What.
    pub change: StoreChange,
    /// Whose; empty for the default tenant's.
    pub tenant: &'a str,
    /// The part of the store that says so: what it clears is its own.
    pub backend: &'a str,
    /// Where.
    pub medium: StoreMedium,
    /// Of which object.
    pub object: ObjectName<'a>,
    /// The block that it is, where that is said.
    pub block: Option<BlockKey>,
}

/// A batch of a store's events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreBatch<'a> {
    /// What changed, in order.
    pub events: Vec<StoreEvent<'a>>,
    /// Events that could not be read.
    pub unread: usize,
    /// Events about objects that are no blocks, or not those of the first rank.
    pub foreign: usize,
}

/// The events of a batch; none where it is no batch at all.
fn events_of<'a, 'b>(value: &'b Value<'a>) -> Option<&'b [Value<'a>]> {
    match value {
        Value::Map(_) => value.get("events")?.array(),
        Value::Array(parts) => parts.get(1)?.array(),
        _ => None,
    }
}

/// Reads a batch; none where it is no batch at all.
#[must_use]
pub fn read_store_batch<'b>(value: &'b Value<'_>) -> Option<StoreBatch<'b>> {
    let mut batch = StoreBatch::default();
    for event in events_of(value)? {
        match read_event(event) {
            Some(DecodedEvent::Event(event)) => batch.events.push(event),
            Some(DecodedEvent::Foreign) => batch.foreign += 1,
            None => batch.unread += 1,
        }
    }
    Some(batch)
}

enum DecodedEvent<'b> {
    Event(StoreEvent<'b>),
    Foreign,
}

fn read_event<'b>(event: &'b Value<'_>) -> Option<DecodedEvent<'b>> {
    let get = |name: &str| event.get(name).filter(|value| **value != Value::Nil);
    let text = |name: &str| get(name).map_or(Some(""), Value::text);
    let change = match get("event_type")?.text()? {
        "stored" => StoreChange::Stored,
        "removed" => StoreChange::Removed,
        "cleared" => StoreChange::Cleared,
        _ => return None,
    };
    let medium = match text("medium")?.to_ascii_lowercase().as_str() {
        "cpu" | "memory" | "dram" => StoreMedium::Memory,
        "disk" | "ssd" | "nvme" => StoreMedium::Ssd,
        // Elsewhere than a store is, where it says so: on the GPU of an engine.
        "gpu" => return Some(DecodedEvent::Foreign),
        "" if change == StoreChange::Stored => StoreMedium::Memory,
        "" => StoreMedium::All,
        _ => return None,
    };
    let tenant = Some(text("tenant_id")?).filter(|tenant| *tenant != "default").unwrap_or_default();
    let backend = text("backend_id")?;
    let said = |object, block| Some(DecodedEvent::Event(StoreEvent { change, tenant, backend, medium, object, block }));
    if change == StoreChange::Cleared {
        return said(ObjectName::All, None);
    }
    let ranks = ["tp_rank", "pp_rank", "pcp_rank", "dcp_rank", "group_id", "layer_id"];
    if ranks.iter().any(|rank| get(rank).is_some_and(|value| *value != Value::Int(0))) {
        return Some(DecodedEvent::Foreign);
    }
    let key = text("object_key")?;
    let hashed = match get("seq_hashes").and_then(Value::array).and_then(|hashes| hashes.first()) {
        Some(number) => Some(hash(number)?),
        None => None,
    };
    let model = text("model_name")?;
    let block = match hashed {
        Some(hash) if !model.is_empty() => Some(BlockKey { model: model.to_owned(), hash }),
        _ => read_key(key),
    };
    let digest = match text("object_digest")? {
        "" => None,
        digits => Some(u128::from_str_radix(digits, 16).ok()?),
    };
    match (digest, key, block) {
        // Of one that went, not more may be known than its name.
        (Some(digest), _, block) if block.is_some() || change == StoreChange::Removed => {
            said(ObjectName::Digest(digest), block)
        }
        (None, "", Some(block)) => said(ObjectName::Block(block.clone()), Some(block)),
        (None, key, Some(block)) => said(ObjectName::Key(key), Some(block)),
        (_, _, None) | (Some(_), ..) => Some(DecodedEvent::Foreign),
    }
}
