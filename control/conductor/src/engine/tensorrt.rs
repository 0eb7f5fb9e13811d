//! Decoder of the cache events of TensorRT-LLM, as its `KVCacheEventSerializer` writes them: a map with `data`, which
//! is `stored`, `removed`, `updated` or `created`. Cache level 0 is the GPU, others are memory of the host.

use super::msgpack::Value;
use super::tokens::BlockInputs;
use super::{DecodedEvent, hash, hashes, removed};
use crate::conductor::{BlockChange, StoredTokens};
use crate::index::BlockTier;

/// Decodes the data of an event; `None` if it cannot be decoded.
pub(super) fn read_event(data: &Value<'_>, block_tokens: u32) -> Option<DecodedEvent> {
    match field(data, "type")?.text()? {
        "stored" => {
            let parent = match field(data, "parent_hash") {
                Some(parent) => Some(hash(parent)?),
                None => None,
            };
            read_stored(parent, field(data, "blocks")?.array()?, block_tokens)
        }
        "removed" => Some(DecodedEvent::change(removed(None, hashes(field(data, "block_hashes")?)?))),
        "updated" => {
            let moved = hash(field(data, "block_hash")?)?;
            let Some(level) = field(data, "cache_level") else { return Some(DecodedEvent::Changes(Vec::new())) };
            let (from, to) = (tier(field(level, "old_value")?)?, tier(field(level, "new_value")?)?);
            Some(DecodedEvent::change(BlockChange::Moved { from, to, hashes: vec![moved] }))
        }
        // The sizes of the caches.
        "created" => Some(DecodedEvent::Changes(Vec::new())),
        _ => None,
    }
}

/// Decodes stored blocks: one change for each stretch of blocks in one tier.
fn read_stored(mut parent: Option<u64>, blocks: &[Value<'_>], block_tokens: u32) -> Option<DecodedEvent> {
    let mut changes: Vec<StoredTokens> = Vec::new();
    for block in blocks {
        let name = hash(field(block, "block_hash")?)?;
        let tier = field(block, "cache_level").map_or(Some(BlockTier::Gpu), tier)?;
        let (content, tokens) = content_of(block)?;
        if tokens == 0 || tokens > block_tokens as usize {
            return Some(DecodedEvent::Foreign);
        }
        let part_tokens = if tokens < block_tokens as usize { tokens as u32 } else { 0 };
        match changes.last_mut().filter(|last| last.tier == tier && last.part_tokens == 0) {
            Some(last) => {
                last.hashes.push(name);
                last.contents.push(content);
                last.part_tokens = part_tokens;
            }
            None => {
                let (hashes, contents) = (vec![name], vec![content]);
                changes.push(StoredTokens { tier, parent, hashes, contents, part_tokens });
            }
        }
        parent = Some(name);
    }
    Some(DecodedEvent::Changes(changes.into_iter().map(BlockChange::StoredTokens).collect()))
}

/// Returns the content of a block, and the number of its tokens.
fn content_of(block: &Value<'_>) -> Option<(u64, usize)> {
    let mut inputs = BlockInputs::default();
    if let Some(adapter) = field(block, "lora_id") {
        inputs.push_value(adapter);
    }
    let mut tokens = Vec::new();
    for token in field(block, "tokens")?.array()? {
        let (Value::Int(id), Some(Value::Int(extra))) = (field(token, "token_id")?, token.get("token_extra_id")) else {
            return None;
        };
        tokens.push(u32::try_from(*id).ok()?);
        if *extra != 0 {
            // Placeholders of pictures have the same tokens.
            inputs.push_value(&Value::Int(tokens.len() as i128));
            inputs.push_value(&Value::Int(*extra));
        }
    }
    Some((inputs.content(&tokens), tokens.len()))
}

fn field<'a, 'b>(map: &'b Value<'a>, name: &str) -> Option<&'b Value<'a>> {
    map.get(name).filter(|value| **value != Value::Nil)
}

fn tier(level: &Value<'_>) -> Option<BlockTier> {
    match level {
        Value::Int(0) => Some(BlockTier::Gpu),
        Value::Int(1..) => Some(BlockTier::Dram),
        _ => None,
    }
}
