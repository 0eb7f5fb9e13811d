//! Decoder of the keys under which connectors store blocks in a shared store: model, ranks, hash.
//!
//! `[PREFIX@]MODEL@tp_rank:N[@pcpN][@dcpN][@pp_rank:N][@group:N]@HASH`, and Ascend's
//! `MODEL@pcpN@dcpN@head_or_tp_rank:N@pp_rank:N@HASH[@LAYER]`. A block is one object per rank; the object of rank 0
//! represents all of them, because a connector writes them together.

/// Block of a model, decoded from its key in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockKey {
    /// Model, without a prefix.
    pub model: String,
    /// Last 64 bits of its hash.
    pub hash: u64,
}

/// Minimum number of digits of a hash: a shorter one may be any name.
const DIGITS: usize = 16;

/// Decodes a key; `None` if it is not the key of a block, or of another rank, group or layer than the first.
#[must_use]
pub fn read_key(key: &str) -> Option<BlockKey> {
    let parts: Vec<&str> = key.split('@').collect();
    let rank = parts.iter().position(|part| is_rank(part))?;
    let model = parts[..rank].last().filter(|model| !model.is_empty())?;
    let mut hash = None;
    for part in &parts[rank..] {
        if is_rank(part) || part.starts_with("group:") {
            let digits = part.trim_start_matches(|letter: char| !letter.is_ascii_digit());
            if digits != "0" && !is_size(part) {
                return None;
            }
        } else if hash.is_none() {
            hash = Some(read_hash(part)?);
        } else if *part != "0" {
            return None;
        }
    }
    Some(BlockKey { model: (*model).to_owned(), hash: hash? })
}

/// Returns true if a part of a key is a rank or a position in a group of ranks.
fn is_rank(part: &str) -> bool {
    ["tp_rank:", "pp_rank:", "head_or_tp_rank:"].iter().any(|name| part.starts_with(name)) || is_size(part)
}

/// Returns true if a part of a key is a position in a context-parallel group.
fn is_size(part: &str) -> bool {
    let digits = part.strip_prefix("pcp").or_else(|| part.strip_prefix("dcp"));
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn read_hash(part: &str) -> Option<u64> {
    let whole = part.len() >= DIGITS && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    whole.then(|| u64::from_str_radix(&part[part.len() - DIGITS..], 16).ok()).flatten()
}
