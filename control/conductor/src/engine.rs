//! Decoder of the cache events that inference engines publish, in the formats of vLLM, SGLang and TensorRT-LLM.
//!
//! A batch is a map, or an array of a time, events and an optional rank; an event is a map with a `type`, or an array
//! that begins with the type and may be truncated; or a map with `data`, as TensorRT-LLM serializes it
//! ([`tensorrt`]). A hash is an unsigned or signed number, or a digest, of which the last eight bytes count. An event
//! that cannot be decoded is counted and skipped. So are events about blocks of another size than the instance
//! registered with, and about further groups of layers: a hash does not tell how many tokens it covers.
//!
//! Blocks whose event contains their tokens are decoded with their contents ([`tokens`]), and a partial last block with
//! the number of its tokens. Of events without usable tokens, or with another number of them than their blocks have,
//! only the hashes count.

pub mod hashes;
pub mod keys;
pub mod msgpack;
pub mod store;
mod tensorrt;
pub mod tokens;

use crate::conductor::{BlockChange, StoredTokens};
use crate::index::BlockTier;
use msgpack::Value;
use tokens::BlockInputs;

/// Decoded batch of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineBatch {
    /// Changes, in order.
    pub events: Vec<BlockChange>,
    /// Number of events that could not be decoded.
    pub unread: usize,
    /// Number of events about blocks of other sizes, of other groups of layers, or in other media.
    pub foreign: usize,
}

/// Decoded event.
enum DecodedEvent {
    Changes(Vec<BlockChange>),
    /// About blocks that do not count.
    Foreign,
}

impl DecodedEvent {
    fn change(change: BlockChange) -> Self {
        Self::Changes(vec![change])
    }
}

/// Decodes a batch of an engine whose blocks have `block_tokens` tokens; `None` if the payload is not a batch.
#[must_use]
pub fn read_batch(payload: &[u8], block_tokens: u32) -> Option<EngineBatch> {
    let value = Value::read(payload)?;
    let events = match &value {
        Value::Map(_) => value.get("events")?.array()?,
        Value::Array(parts) => parts.get(1)?.array()?,
        _ => return None,
    };
    let mut batch = EngineBatch::default();
    for event in events {
        let read = match event.get("data") {
            Some(data @ Value::Map(_)) => tensorrt::read_event(data, block_tokens),
            _ => read_event(event, block_tokens),
        };
        match read {
            Some(DecodedEvent::Changes(changes)) => batch.events.extend(changes),
            Some(DecodedEvent::Foreign) => batch.foreign += 1,
            None => batch.unread += 1,
        }
    }
    Some(batch)
}

/// Fields of an event, by name and by position.
struct Fields<'a, 'b>(&'b Value<'a>);

impl<'a, 'b> Fields<'a, 'b> {
    /// Returns a field; `None` if it is missing or nil.
    fn get(&self, name: &str, place: usize) -> Option<&'b Value<'a>> {
        let found = match self.0 {
            Value::Array(values) => values.get(place),
            map => map.get(name),
        };
        found.filter(|value| **value != Value::Nil)
    }
}

/// Decodes an event; `None` if it cannot be decoded.
fn read_event(event: &Value<'_>, block_tokens: u32) -> Option<DecodedEvent> {
    let fields = Fields(event);
    let kind = fields.get("type", 0)?.text()?;
    let group_place = if kind == "BlockStored" { 9 } else { 3 };
    if let Some(Value::Int(group)) = fields.get("group_idx", group_place)
        && *group != 0
    {
        return Some(DecodedEvent::Foreign);
    }
    match kind {
        "BlockStored" => read_stored(&fields, block_tokens),
        "BlockRemoved" => {
            let medium = fields.get("medium", 2);
            let tier = match medium {
                None => None,
                Some(_) => match tier(medium)? {
                    Some(tier) => Some(tier),
                    None => return Some(DecodedEvent::Foreign),
                },
            };
            Some(DecodedEvent::change(removed(tier, hashes(fields.get("block_hashes", 1)?)?)))
        }
        "AllBlocksCleared" => Some(DecodedEvent::change(BlockChange::Cleared)),
        _ => None,
    }
}

fn read_stored(fields: &Fields<'_, '_>, block_tokens: u32) -> Option<DecodedEvent> {
    let mut hashes = hashes(fields.get("block_hashes", 1)?)?;
    let tokens = fields.get("token_ids", 3).and_then(Value::array).unwrap_or_default();
    // A page of SGLang that is not full has a size of its own.
    let is_part = |size: i128| hashes.len() == 1 && size < i128::from(block_tokens) && size == tokens.len() as i128;
    match fields.get("block_size", 4) {
        Some(Value::Int(size)) if *size != i128::from(block_tokens) && !is_part(*size) => {
            return Some(DecodedEvent::Foreign);
        }
        Some(Value::Int(_)) | None => {}
        Some(_) => return Some(DecodedEvent::Foreign),
    }
    let Some(tier) = tier(fields.get("medium", 6))? else { return Some(DecodedEvent::Foreign) };
    let parent = match fields.get("parent_block_hash", 2) {
        Some(parent) => Some(hash(parent)?),
        None => None,
    };
    let part_tokens = part_of(hashes.len(), tokens.len(), block_tokens);
    if let Some(contents) = contents_of(fields, hashes.len(), tokens, block_tokens) {
        let stored = StoredTokens { tier, parent, hashes, contents, part_tokens: part_tokens.unwrap_or(0) };
        return Some(DecodedEvent::change(BlockChange::StoredTokens(stored)));
    }
    if part_tokens.is_some() {
        // Blocks without contents are assumed to be full elsewhere.
        hashes.pop();
        if hashes.is_empty() {
            return Some(DecodedEvent::Foreign);
        }
    }
    Some(DecodedEvent::change(stored_by_hash(tier, parent, hashes)))
}

// A hash depends on the adapter already, and removals do not name it: requests do not name it either.
fn stored_by_hash(tier: BlockTier, parent: Option<u64>, hashes: Vec<u64>) -> BlockChange {
    BlockChange::Stored { lora: String::new(), salt: String::new(), tier, parent, hashes }
}

fn removed(tier: Option<BlockTier>, hashes: Vec<u64>) -> BlockChange {
    BlockChange::Removed { lora: String::new(), salt: String::new(), tier, hashes }
}

/// Returns the number of tokens of the last of this many blocks if it is not full, according to the number of tokens in
/// the event. Events may omit the tokens.
fn part_of(blocks: usize, tokens: usize, block_tokens: u32) -> Option<u32> {
    let block_tokens = block_tokens as usize;
    let before = blocks.checked_sub(1)?.saturating_mul(block_tokens);
    let rest = tokens.checked_sub(before)?;
    (rest > 0 && rest < block_tokens).then_some(rest as u32)
}

/// Returns the contents of an event's blocks; `None` if it does not contain the tokens of all of them.
fn contents_of(fields: &Fields<'_, '_>, blocks: usize, tokens: &[Value<'_>], block_tokens: u32) -> Option<Vec<u64>> {
    let block_tokens = block_tokens as usize;
    if blocks == 0 || tokens.len().div_ceil(block_tokens) != blocks {
        return None;
    }
    let token = |value: &Value<'_>| match value {
        Value::Int(token) => u32::try_from(*token).ok(),
        // Pairs of tokens, as with speculative decoding.
        _ => None,
    };
    let tokens: Vec<u32> = tokens.iter().map(token).collect::<Option<_>>()?;
    let adapter = fields.get("lora_name", 7).or_else(|| fields.get("lora_id", 5));
    let extra = match fields.get("extra_keys", 8) {
        None => None,
        Some(extra) => Some(extra.array().filter(|extra| extra.len() == blocks)?),
    };
    let content = |(at, tokens): (usize, &[u32])| {
        let keys = extra.map_or(&Value::Nil, |extra| &extra[at]);
        let keys = match keys {
            Value::Array(keys) => keys.as_slice(),
            Value::Nil => &[],
            _ => return None,
        };
        let mut inputs = BlockInputs::default();
        if let Some(adapter) = adapter.filter(|adapter| !keys.contains(adapter)) {
            inputs.push_value(adapter);
        }
        keys.iter().for_each(|key| inputs.push_value(key));
        Some(inputs.content(tokens))
    };
    tokens.chunks(block_tokens).enumerate().map(content).collect()
}

/// Returns the tier of a medium: `Some(None)` for a foreign medium, `None` for an unknown one.
fn tier(medium: Option<&Value<'_>>) -> Option<Option<BlockTier>> {
    let Some(medium) = medium else { return Some(Some(BlockTier::Gpu)) };
    Some(match medium.text()?.to_ascii_uppercase().as_str() {
        "GPU" => Some(BlockTier::Gpu),
        "CPU" | "CPU_PINNED" | "CPU_TIER1" | "HOST" => Some(BlockTier::Dram),
        "DISK" | "SSD" | "NVME" => Some(BlockTier::Ssd),
        "EXTERNAL" | "REMOTE" => None,
        _ => return None,
    })
}

fn hashes(value: &Value<'_>) -> Option<Vec<u64>> {
    value.array()?.iter().map(hash).collect()
}

/// Returns a hash as 64 bits.
fn hash(value: &Value<'_>) -> Option<u64> {
    match value {
        Value::Int(number) => {
            u64::try_from(*number).ok().or_else(|| i64::try_from(*number).ok().map(|number| number as u64))
        }
        Value::Bytes(bytes) if !bytes.is_empty() => {
            let last = &bytes[bytes.len().saturating_sub(8)..];
            Some(last.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
        }
        _ => None,
    }
}
