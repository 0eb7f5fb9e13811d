//! Decoder of the store events that a Mooncake master publishes (its RFC 1527): objects stored, removed, or cleared.
//!
//! A batch is an array of a time, events and an optional rank; an event is a map. The block of an object follows from
//! its key, or from its model and hash. Objects of other ranks, groups and layers than the first are skipped, and so
//! are objects whose keys are not blocks': both are counted as foreign. An event that cannot be decoded is skipped and
//! counted.

use kvplane_proto::events::ObjectChange;

use super::hash;
use super::keys::{BlockKey, read_key};
use super::msgpack::Value;

/// Medium of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMedium {
    /// Memory.
    Memory,
    /// SSD.
    Ssd,
    /// Any medium.
    All,
}

/// Name of an object in an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectName<'a> {
    /// Digest that the publisher gives the object.
    Digest(u128),
    /// Key of the object.
    Key(&'a str),
    /// Block of a model, by its hash.
    Block(BlockKey),
    /// All objects.
    All,
}

/// Event of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct StoreEvent<'a> {
    pub change: ObjectChange,
    /// Tenant of the object; empty for the default tenant.
    pub tenant: &'a str,
    /// Part of the store that publishes the event: a clear affects only that part.
    pub backend: &'a str,
    /// Medium of the object.
    pub medium: StoreMedium,
    pub object: ObjectName<'a>,
    /// Block that the object contains, if known.
    pub block: Option<BlockKey>,
}

/// Decoded batch of a store's events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreBatch<'a> {
    /// Events, in order.
    pub events: Vec<StoreEvent<'a>>,
    /// Number of events that could not be decoded.
    pub unread: usize,
    /// Number of events about objects that are not blocks, or not those of the first rank.
    pub foreign: usize,
}

/// Returns the events of a batch; `None` if the value is not a batch.
fn events_of<'a, 'b>(value: &'b Value<'a>) -> Option<&'b [Value<'a>]> {
    match value {
        Value::Map(_) => value.get("events")?.array(),
        Value::Array(parts) => parts.get(1)?.array(),
        _ => None,
    }
}

/// Decodes a batch; `None` if the value is not a batch.
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
        "stored" => ObjectChange::Stored,
        "removed" => ObjectChange::Removed,
        "cleared" => ObjectChange::Cleared,
        _ => return None,
    };
    let medium = match text("medium")?.to_ascii_lowercase().as_str() {
        "cpu" | "memory" | "dram" => StoreMedium::Memory,
        "disk" | "ssd" | "nvme" => StoreMedium::Ssd,
        // Medium outside a store: the GPU of an engine.
        "gpu" => return Some(DecodedEvent::Foreign),
        "" if change == ObjectChange::Stored => StoreMedium::Memory,
        "" => StoreMedium::All,
        _ => return None,
    };
    let tenant = Some(text("tenant_id")?).filter(|tenant| *tenant != "default").unwrap_or_default();
    let backend = text("backend_id")?;
    let said = |object, block| Some(DecodedEvent::Event(StoreEvent { change, tenant, backend, medium, object, block }));
    if change == ObjectChange::Cleared {
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
        // For a removal, no more than the digest may be known.
        (Some(digest), _, block) if block.is_some() || change == ObjectChange::Removed => {
            said(ObjectName::Digest(digest), block)
        }
        (None, "", Some(block)) => said(ObjectName::Block(block.clone()), Some(block)),
        (None, key, Some(block)) => said(ObjectName::Key(key), Some(block)),
        (_, _, None) | (Some(_), ..) => Some(DecodedEvent::Foreign),
    }
}
