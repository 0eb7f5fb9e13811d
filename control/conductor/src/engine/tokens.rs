//! Token hashes: kvplane's own rolling hashes of a prompt's blocks, over the tokens and the further inputs of a block,
//! such as LoRA adapter and cache salt. Engines of any hash scheme and seed that publish tokens share them.
//!
//! The hash of a block is that of its parent's hash and of its content; its content is a digest of the inputs and the
//! tokens. A partial block has a content of its own, as it has fewer tokens.

use kvplane_proto::Digest;

use super::msgpack::Value;

/// Parent of the first block of every prompt.
pub const ROOT: u64 = 0x6b76_706c_616e_6520;

/// Returns the token hash of a block behind `parent`; [`ROOT`] precedes the first block. Never 0.
#[must_use]
pub fn token_hash(parent: u64, content: u64) -> u64 {
    Digest::of(&parent.to_le_bytes(), &content.to_le_bytes()).low().max(1)
}

/// Further inputs of a block's hash besides its tokens, encoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockInputs {
    bytes: Vec<u8>,
}

impl BlockInputs {
    /// Appends a name, such as that of a LoRA adapter, or a cache salt.
    pub fn push_text(&mut self, text: &str) {
        self.push(b's', text.as_bytes());
    }

    /// Appends a value of an event.
    pub fn push_value(&mut self, value: &Value<'_>) {
        match value {
            Value::Nil => self.push(b'n', &[]),
            Value::Bool(is) => self.push(b'b', &[u8::from(*is)]),
            Value::Int(number) => self.push(b'i', &number.to_le_bytes()),
            Value::Float(number) => self.push(b'f', &number.to_le_bytes()),
            // Engines encode the same name as either.
            Value::Text(bytes) | Value::Bytes(bytes) => self.push(b's', bytes),
            Value::Array(values) => {
                self.push(b'a', &(values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| self.push_value(value));
            }
            Value::Map(entries) => {
                self.push(b'm', &(entries.len() as u64).to_le_bytes());
                for (name, value) in entries {
                    self.push_value(name);
                    self.push_value(value);
                }
            }
            Value::Other => self.push(b'o', &[]),
        }
    }

    fn push(&mut self, kind: u8, bytes: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the content of a block with these inputs.
    #[must_use]
    pub fn content(&self, tokens: &[u32]) -> u64 {
        let mut bytes = Vec::with_capacity(tokens.len() * 4);
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        Digest::of(&self.bytes, &bytes).low()
    }
}

/// Prompt in tokens, to be found by its token hashes.
#[derive(Clone, Debug)]
pub struct TokenPrompt<'a> {
    tokens: &'a [u32],
    block_tokens: usize,
    /// Inputs of the first block, and of all later ones.
    inputs: [BlockInputs; 2],
    hashes: Vec<u64>,
}

impl<'a> TokenPrompt<'a> {
    /// Hashes the full blocks of a prompt. `lora` is an input of every block, `salt` of the first; empty for none.
    #[must_use]
    pub fn new(tokens: &'a [u32], block_tokens: usize, lora: &str, salt: &str) -> Self {
        let block_tokens = block_tokens.max(1);
        let mut inputs = [BlockInputs::default(), BlockInputs::default()];
        if !lora.is_empty() {
            inputs.iter_mut().for_each(|inputs| inputs.push_text(lora));
        }
        if !salt.is_empty() {
            inputs[0].push_text(salt);
        }
        let mut parent = ROOT;
        let hashes = tokens.chunks_exact(block_tokens).enumerate().map(|(at, block)| {
            parent = token_hash(parent, inputs[at.min(1)].content(block));
            parent
        });
        let hashes = hashes.collect();
        Self { tokens, block_tokens, inputs, hashes }
    }

    /// Returns the token hashes of its full blocks.
    #[must_use]
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Returns the maximum number of tokens of a partial block behind its first `blocks` blocks.
    #[must_use]
    pub fn most_part_tokens(&self, blocks: usize) -> usize {
        let rest = self.tokens.len().saturating_sub(blocks.saturating_mul(self.block_tokens));
        rest.min(self.block_tokens - 1)
    }

    /// Returns the token hash of a partial block of `tokens` tokens behind its first `blocks` blocks; none if the
    /// prompt is shorter.
    #[must_use]
    pub fn part_hash(&self, blocks: usize, tokens: usize) -> Option<u64> {
        let start = blocks.checked_mul(self.block_tokens)?;
        let part = self.tokens.get(start..start.checked_add(tokens)?)?;
        let parent = match blocks.checked_sub(1) {
            Some(last) => *self.hashes.get(last)?,
            None => ROOT,
        };
        Some(token_hash(parent, self.inputs[blocks.min(1)].content(part)))
    }
}
