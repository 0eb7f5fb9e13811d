//! What engines publish of their caches, in the shapes of vLLM and SGLang, as changes for the Conductor.
//!
//! Batches are maps, or arrays of a time, events and perhaps a rank; events are maps with a `type`, or arrays that
//! begin with it and may end early. Hashes are unsigned or signed numbers, or digests, of which the last eight bytes
//! count. What cannot be read costs its event and is counted. Blocks of another size than the instance registered
//! with, and those of further groups of layers, are counted and left out: a hash says nothing of how much it stands
//! for.
//!
//! Where an event tells the tokens of a prompt's first block, they are kept with its hash: who knows what hashes should
//! begin with can see whether they do.

pub mod hashes;
pub mod keys;
pub mod msgpack;
pub mod store;

use crate::conductor::CacheEvent;
use crate::index::Tier;
use msgpack::Value;

/// A batch of changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineBatch {
    /// What changed, in order.
    pub events: Vec<CacheEvent>,
    /// Events that could not be read.
    pub unread: usize,
    /// Events about blocks of other sizes, other groups of layers, or kept elsewhere.
    pub foreign: usize,
    /// The first block of a prompt, where there is one whose hash depends on its tokens alone.
    pub root: Option<RootBlock>,
}

/// The first block of a prompt: its tokens, and the hash that an engine gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootBlock {
    /// All of them.
    pub tokens: Vec<u32>,
    /// The last 64 bits.
    pub hash: u64,
}

impl RootBlock {
    /// Whether it has the hash that vLLM gives these tokens (`sha256_cbor`) with this `PYTHONHASHSEED`.
    #[must_use]
    pub fn is_of(&self, seed: &str) -> bool {
        hashes::vllm(&self.tokens, self.tokens.len(), seed, "", "") == [self.hash]
    }
}

/// Reads a batch of an engine whose blocks are of `block_tokens` tokens; none where it is no batch at all.
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

/// The fields of an event, by name and by place.
struct Fields<'a, 'b>(&'b Value<'a>);

impl<'a, 'b> Fields<'a, 'b> {
    /// A field; none where it is not there, or nil.
    fn get(&self, name: &str, place: usize) -> Option<&'b Value<'a>> {
        let found = match self.0 {
            Value::Array(values) => values.get(place),
            map => map.get(name),
        };
        found.filter(|value| **value != Value::Nil)
    }
}

/// An event; nothing within where it does not concern us, nothing at all where it cannot be read.
fn read_event(event: &Value<'_>, block_tokens: u32) -> Option<Option<CacheEvent>> {
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
                // Everything else counts blocks as full: no request reuses a part of one.
                hashes.pop();
                if hashes.is_empty() {
                    return Some(None);
                }
            }
            // A hash depends on the adapter already, and removals do not name it: requests name none either.
            let lora = String::new();
            Some(Some(CacheEvent::Stored { lora, salt: String::new(), tier, parent, hashes }))
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
            Some(Some(CacheEvent::Removed { lora: String::new(), salt: String::new(), tier, hashes }))
        }
        "AllBlocksCleared" => Some(Some(CacheEvent::Cleared)),
        _ => None,
    }
}

/// True where the last of this many blocks is not full, by the number of tokens in the event. Events may leave the
/// tokens out.
fn ends_in_part(blocks: usize, tokens: usize, block_tokens: u32) -> bool {
    let block_tokens = block_tokens as usize;
    let full = blocks.saturating_mul(block_tokens);
    tokens < full && tokens > full.saturating_sub(block_tokens)
}

/// The first block of what was stored, where it begins a prompt and its tokens are told.
fn root_of(event: &Value<'_>, read: &CacheEvent, block_tokens: u32) -> Option<RootBlock> {
    let CacheEvent::Stored { parent: None, hashes, .. } = read else { return None };
    let fields = Fields(event);
    // Adapters and salts are in the hash too.
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

/// Where blocks are; nothing within where that is elsewhere.
fn tier(medium: Option<&Value<'_>>) -> Option<Option<Tier>> {
    let Some(medium) = medium else { return Some(Some(Tier::Gpu)) };
    Some(match medium.text()?.to_ascii_uppercase().as_str() {
        "GPU" => Some(Tier::Gpu),
        "CPU" | "CPU_PINNED" | "CPU_TIER1" | "HOST" => Some(Tier::Dram),
        "DISK" | "SSD" | "NVME" => Some(Tier::Ssd),
        "EXTERNAL" | "REMOTE" => None,
        _ => return None,
    })
}

fn hashes(value: &Value<'_>) -> Option<Vec<u64>> {
    value.array()?.iter().map(hash).collect()
}

/// A hash as 64 bits.
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
