//! Block hashes of vLLM (`sha256_cbor`): SHA-256 over canonical CBOR of the previous hash, the tokens, and
//! further inputs of the block. For requests that contain tokens instead of hashes.

/// Maximum number of tokens to be hashed in one call.
pub const MAX_TOKENS: usize = 2 << 20;

/// Returns the hashes of the full blocks of a prompt, the last 64 bits of each. `seed` is the engines'
/// `PYTHONHASHSEED`; `lora` and `salt` are empty for none.
#[must_use]
pub fn vllm(tokens: &[u32], block_tokens: usize, seed: &str, lora: &str, salt: &str) -> Vec<u64> {
    let mut cbor = Vec::with_capacity(64 + block_tokens * 5);
    text(&mut cbor, seed);
    let mut parent = sha256(&cbor);
    let blocks = tokens.chunks_exact(block_tokens.max(1)).take(MAX_TOKENS);
    let hashes = blocks.enumerate().map(|(at, block)| {
        cbor.clear();
        head(&mut cbor, 4, 3);
        head(&mut cbor, 2, 32);
        cbor.extend_from_slice(&parent);
        head(&mut cbor, 4, block.len() as u64);
        block.iter().for_each(|token| head(&mut cbor, 0, u64::from(*token)));
        let extra = [(lora, true), (salt, at == 0)];
        let extra = extra.iter().filter(|(name, here)| *here && !name.is_empty());
        match extra.clone().count() {
            0 => cbor.push(0xf6),
            count => {
                head(&mut cbor, 4, count as u64);
                extra.for_each(|(name, _)| text(&mut cbor, name));
            }
        }
        parent = sha256(&cbor);
        parent[24..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    });
    hashes.collect()
}

/// Appends the head of a CBOR item: its kind and its number, in the shortest form.
fn head(out: &mut Vec<u8>, kind: u8, number: u64) {
    let kind = kind << 5;
    match number {
        0..=23 => out.push(kind | number as u8),
        24..=0xff => out.extend([kind | 24, number as u8]),
        0x100..=0xffff => {
            out.push(kind | 25);
            out.extend_from_slice(&(number as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(kind | 26);
            out.extend_from_slice(&(number as u32).to_be_bytes());
        }
        _ => {
            out.push(kind | 27);
            out.extend_from_slice(&number.to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    head(out, 3, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref());
    digest
}
