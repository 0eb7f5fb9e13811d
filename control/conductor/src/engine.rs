//! Decoder of the cache events that inference engines publish, in the formats of vLLM and SGLang.
//!
//! A batch is a map, or an array of a time, events and an optional rank; an event is a map with a `type`, or an array
//! that begins with the type and may be truncated. A hash is an unsigned or signed number, or a digest, of which the
//! last eight bytes count. An event that cannot be decoded is counted and skipped. So are events about blocks of
//! another size than the instance registered with, and about further groups of layers: a hash does not tell how many
//! tokens it covers.
//!
//! If an event contains the tokens of a prompt's first block, they are kept with its hash: a caller that knows the hash
//! seed can verify that the engine hashes as expected.

pub mod hashes;
pub mod keys;
pub mod msgpack;
pub mod store;

use crate::conductor::BlockChange;
use crate::index::BlockTier;
use msgpack::Value;

/// Decoded batch of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineBatch {
    /// Changes, in order.
    pub events: Vec<BlockChange>,
    /// Number of events that could not be decoded.
    pub unread: usize,
    /// Number of events about blocks of other sizes, of other groups of layers, or in other media.
    pub foreign: usize,
    /// First block of a prompt, if there is one whose hash depends on its tokens alone.
    pub root: Option<RootBlock>,
}

/// First block of a prompt: its tokens, and the hash that the engine gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootBlock {
    /// All tokens of the block.
    pub tokens: Vec<u32>,
    /// Last 64 bits of the hash.
    pub hash: u64,
}

impl RootBlock {
    /// Returns true if the hash is the one that vLLM gives these tokens (`sha256_cbor`) with this `PYTHONHASHSEED`.
    #[must_use]
    pub fn is_of(&self, seed: &str) -> bool {
        hashes::vllm(&self.tokens, self.tokens.len(), seed, "", "") == [self.hash]
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
        match read_event(event, block_tokens) {
            Some(Some(read)) => {
                if batch.root.is_none() {
                    batch.root = root_of(event, &read, block_tokens);
                }
                batch.events.push(read);
            }
            Some(None) => batch.foreign += 1,
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

/// Decodes an event: `Some(None)` if it is foreign, `None` if it cannot be decoded.
fn read_event(event: &Value<'_>, block_tokens: u32) -> Option<Option<BlockChange>> {
    let fields = Fields(event);
    let kind = fields.get("type", 0)?.text()?;
    if let Some(Value::Int(group)) = event.get("group_idx")
        && *group != 0
    {
        return Some(None);
    }
    match kind {
        "BlockStored" => {
            let size = fields.get("block_size", 4);
            if size.is_some_and(|size| *size != Value::Int(i128::from(block_tokens))) {
                return Some(None);
            }
            let Some(tier) = tier(fields.get("medium", 6))? else { return Some(None) };
            let parent = match fields.get("parent_block_hash", 2) {
                Some(parent) => Some(hash(parent)?),
                None => None,
            };
            let mut hashes = hashes(fields.get("block_hashes", 1)?)?;
            let told = fields.get("token_ids", 3).and_then(Value::array).map_or(0, <[_]>::len);
            if ends_in_part(hashes.len(), told, block_tokens) {
                // Blocks are assumed to be full elsewhere: no request reuses a partial one.
                hashes.pop();
                if hashes.is_empty() {
                    return Some(None);
                }
            }
            // A hash depends on the adapter already, and removals do not name it: requests do not name it either.
            let lora = String::new();
            Some(Some(BlockChange::Stored { lora, salt: String::new(), tier, parent, hashes }))
        }
        "BlockRemoved" => {
            let medium = fields.get("medium", 2);
            let tier = match medium {
                None => None,
                Some(_) => match tier(medium)? {
                    Some(tier) => Some(tier),
                    None => return Some(None),
                },
            };
            let hashes = hashes(fields.get("block_hashes", 1)?)?;
            Some(Some(BlockChange::Removed { lora: String::new(), salt: String::new(), tier, hashes }))
        }
        "AllBlocksCleared" => Some(Some(BlockChange::Cleared)),
        _ => None,
    }
}

/// Returns true if the last of this many blocks is not full, according to the number of tokens in the event. Events may
/// omit the tokens.
fn ends_in_part(blocks: usize, tokens: usize, block_tokens: u32) -> bool {
    let block_tokens = block_tokens as usize;
    let full = blocks.saturating_mul(block_tokens);
    tokens < full && tokens > full.saturating_sub(block_tokens)
}

/// Returns the first stored block, if it begins a prompt and the event contains its tokens.
fn root_of(event: &Value<'_>, read: &BlockChange, block_tokens: u32) -> Option<RootBlock> {
    let BlockChange::Stored { parent: None, hashes, .. } = read else { return None };
    let fields = Fields(event);
    // Adapters and salts are inputs of the hash too.
    let extra = fields.get("extra_keys", 8).and_then(Value::array).and_then(|extra| extra.first());
    let plain = extra.is_none_or(|extra| *extra == Value::Nil);
    if !plain || fields.get("lora_id", 5).is_some() || fields.get("lora_name", 7).is_some() {
        return None;
    }
    let tokens = fields.get("token_ids", 3)?.array()?.get(..block_tokens as usize)?;
    let token = |value: &Value<'_>| match value {
        Value::Int(token) => u32::try_from(*token).ok(),
        _ => None,
    };
    Some(RootBlock { tokens: tokens.iter().map(token).collect::<Option<_>>()?, hash: *hashes.first()? })
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
