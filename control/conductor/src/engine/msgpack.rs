//! MessagePack decoder for untrusted input: depth and counts are bounded by the available bytes.

/// Maximum depth of nested values.
const DEPTH: usize = 8;

/// Decoded value, borrowing from the input.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// Nil.
    Nil,
    /// Boolean.
    Bool(bool),
    /// Integer, signed or not.
    Int(i128),
    /// Floating-point number.
    Float(f64),
    /// Text, which may not be UTF-8.
    Text(&'a [u8]),
    /// Binary data.
    Bytes(&'a [u8]),
    /// Array.
    Array(Vec<Self>),
    /// Map.
    Map(Vec<(Self, Self)>),
    /// Extension type.
    Other,
}

impl<'a> Value<'a> {
    /// Decodes one value, which must be the whole input; `None` if the input is not MessagePack.
    #[must_use]
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let mut reader = Reader { rest: bytes };
        let value = reader.value(DEPTH)?;
        reader.rest.is_empty().then_some(value)
    }

    /// Returns the value of a key of a map.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Self::Map(entries) = self else { return None };
        entries.iter().find(|(key, _)| *key == Value::Text(name.as_bytes())).map(|(_, value)| value)
    }

    /// Returns the value as text.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// Returns the value as an array.
    #[must_use]
    pub fn array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(values) => Some(values),
            _ => None,
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some(taken)
    }

    fn number(&mut self, bytes: usize) -> Option<u64> {
        Some(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn signed(&mut self, bytes: usize) -> Option<i128> {
        let shift = 64 - 8 * bytes as u32;
        Some(i128::from((self.number(bytes)? << shift) as i64 >> shift))
    }

    fn length(&mut self, bytes: usize) -> Option<usize> {
        usize::try_from(self.number(bytes)?).ok()
    }

    fn value(&mut self, depth: usize) -> Option<Value<'a>> {
        let tag = *self.take(1)?.first()?;
        Some(match tag {
            0x00..=0x7f => Value::Int(i128::from(tag)),
            0x80..=0x8f => self.map(usize::from(tag & 15), depth)?,
            0x90..=0x9f => self.array(usize::from(tag & 15), depth)?,
            0xa0..=0xbf => Value::Text(self.take(usize::from(tag & 31))?),
            0xc0 => Value::Nil,
            0xc2 | 0xc3 => Value::Bool(tag == 0xc3),
            0xc4..=0xc6 => {
                let length = self.length(1 << (tag - 0xc4))?;
                Value::Bytes(self.take(length)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (tag - 0xc7))?;
                self.take(length.checked_add(1)?)?;
                Value::Other
            }
            0xca => Value::Float(f64::from(f32::from_bits(self.number(4)? as u32))),
            0xcb => Value::Float(f64::from_bits(self.number(8)?)),
            0xcc..=0xcf => Value::Int(i128::from(self.number(1 << (tag - 0xcc))?)),
            0xd0..=0xd3 => Value::Int(self.signed(1 << (tag - 0xd0))?),
            0xd4..=0xd8 => {
                self.take(1 + (1 << (tag - 0xd4)))?;
                Value::Other
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (tag - 0xd9))?;
                Value::Text(self.take(length)?)
            }
            0xdc | 0xdd => {
                let count = self.length(if tag == 0xdc { 2 } else { 4 })?;
                self.array(count, depth)?
            }
            0xde | 0xdf => {
                let count = self.length(if tag == 0xde { 2 } else { 4 })?;
                self.map(count, depth)?
            }
            0xe0..=0xff => Value::Int(i128::from(tag as i8)),
            0xc1 => return None,
        })
    }

    fn array(&mut self, count: usize, depth: usize) -> Option<Value<'a>> {
        // Each value takes at least one byte.
        if depth == 0 || count > self.rest.len() {
            return None;
        }
        let mut values = Vec::with_capacity(count);
        for _ in 0..count {
            values.push(self.value(depth - 1)?);
        }
        Some(Value::Array(values))
    }

    fn map(&mut self, count: usize, depth: usize) -> Option<Value<'a>> {
        if depth == 0 || count > self.rest.len() / 2 {
            return None;
        }
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            entries.push((self.value(depth - 1)?, self.value(depth - 1)?));
        }
        Some(Value::Map(entries))
    }
}
