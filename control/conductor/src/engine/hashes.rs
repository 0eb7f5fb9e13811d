//! Block hashes of vLLM (`sha256_cbor`): SHA-256 (FIPS 180-4) over canonical CBOR of the previous hash, the tokens, and
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

/// Returns the first 32 bits of the fractional parts of the square or cube roots of the first `N` primes.
const fn constants<const N: usize>(cube: bool) -> [u32; N] {
    let mut found = [0; N];
    let (mut prime, mut at) = (2u128, 0);
    while at < N {
        let mut divisor = 2;
        while divisor * divisor <= prime && !prime.is_multiple_of(divisor) {
            divisor += 1;
        }
        if divisor * divisor > prime {
            // Root, times 2^32, rounded down, by bisection.
            let (mut low, mut high) = (0u128, 1u128 << 37);
            while high - low > 1 {
                let middle = u128::midpoint(low, high);
                let small = if cube { middle * middle * middle <= prime << 96 } else { middle * middle <= prime << 64 };
                if small {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            found[at] = low as u32;
            at += 1;
        }
        prime += 1;
    }
    found
}

const ROUNDS: [u32; 64] = constants(true);
const START: [u32; 8] = constants(false);

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut state = START;
    let mut chunks = bytes.chunks_exact(64);
    for chunk in &mut chunks {
        compress(&mut state, chunk);
    }
    let rest = chunks.remainder();
    let mut last = [0; 128];
    last[..rest.len()].copy_from_slice(rest);
    last[rest.len()] = 0x80;
    let end = if rest.len() < 56 { 64 } else { 128 };
    last[end - 8..end].copy_from_slice(&(bytes.len() as u64 * 8).to_be_bytes());
    last[..end].chunks_exact(64).for_each(|chunk| compress(&mut state, chunk));
    let mut digest = [0; 32];
    for (out, word) in digest.chunks_exact_mut(4).zip(state) {
        out.copy_from_slice(&word.to_be_bytes());
    }
    digest
}

fn compress(state: &mut [u32; 8], chunk: &[u8]) {
    let mut words = [0u32; 64];
    for (word, bytes) in words.iter_mut().zip(chunk.chunks_exact(4)) {
        *word = bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
    }
    for at in 16..64 {
        let (early, late) = (words[at - 15], words[at - 2]);
        let small = early.rotate_right(7) ^ early.rotate_right(18) ^ (early >> 3);
        let large = late.rotate_right(17) ^ late.rotate_right(19) ^ (late >> 10);
        words[at] = words[at - 16].wrapping_add(small).wrapping_add(words[at - 7]).wrapping_add(large);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (word, round) in words.iter().zip(ROUNDS) {
        let mixed = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let chosen = (e & f) ^ (!e & g);
        let first = h.wrapping_add(mixed).wrapping_add(chosen).wrapping_add(round).wrapping_add(*word);
        let mixed = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = mixed.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, more) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Checks the vectors of FIPS 180-4.
    #[test]
    fn sha256_matches_the_test_vectors() {
        let long = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        for (text, digest) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (long, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        ] {
            assert_eq!(hex(&sha256(text.as_bytes())), digest, "{text:?}");
        }
    }

    /// Checks hashes that vLLM computes for these tokens.
    #[test]
    fn blocks_have_the_hashes_of_vllm() {
        let tokens: Vec<u32> = (1..=9).collect();
        let expected = vec![2_164_874_634_404_590_027, 17_270_480_062_156_288_726];
        assert_eq!(vllm(&tokens, 4, "0", "", ""), expected);
        assert_eq!(vllm(&tokens[..7], 4, "0", "", ""), expected[..1]);
        for other in [vllm(&tokens, 4, "1", "", ""), vllm(&tokens, 4, "0", "l", ""), vllm(&tokens, 4, "0", "", "s")] {
            assert!(other[0] != expected[0] && other[1] != expected[1]);
        }
        assert_eq!(vllm(&tokens, 0, "0", "", "").len(), 9);
    }
}
