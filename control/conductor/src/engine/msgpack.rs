//! MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md): a reader for untrusted input, whose depth and
//! counts are bounded by the available bytes, and a writer.

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

/// Values being encoded, one behind the other.
#[derive(Debug, Default)]
pub struct Writer {
    out: Vec<u8>,
}

impl Writer {
    /// Writes nil.
    pub fn nil(&mut self) {
        self.out.push(0xc0);
    }

    /// Writes a boolean.
    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { 0xc3 } else { 0xc2 });
    }

    /// Writes a number that is not negative, in the shortest form.
    pub fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.out.extend([0xcc, value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    /// Writes a number; a negative one takes nine bytes.
    pub fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.uint(value),
            Err(_) => self.tagged(0xd3, &value.to_be_bytes()),
        }
    }

    /// Writes a floating-point number.
    pub fn float(&mut self, value: f64) {
        self.tagged(0xcb, &value.to_be_bytes());
    }

    /// Writes a text of less than 4 GiB.
    pub fn text(&mut self, text: &str) {
        let bytes = text.len();
        match bytes {
            0..=31 => self.out.push(0xa0 | bytes as u8),
            32..=0xff => self.out.extend([0xd9, bytes as u8]),
            0x100..=0xffff => self.tagged(0xda, &(bytes as u16).to_be_bytes()),
            _ => self.tagged(0xdb, &(bytes as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Begins an array of `count` values, which follow.
    pub fn array(&mut self, count: u32) {
        match count {
            0..=15 => self.out.push(0x90 | count as u8),
            16..=0xffff => self.tagged(0xdc, &(count as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &count.to_be_bytes()),
        }
    }

    /// Begins a map of `count` keys, each followed by its value.
    pub fn map(&mut self, count: u32) {
        match count {
            0..=15 => self.out.push(0x80 | count as u8),
            16..=0xffff => self.tagged(0xde, &(count as u16).to_be_bytes()),
            _ => self.tagged(0xdf, &count.to_be_bytes()),
        }
    }

    /// Returns the encoded values.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.out
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.out.push(tag);
        self.out.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::default();
        write(&mut writer);
        writer.finish()
    }

    #[test]
    fn every_size_has_its_tag_and_is_read_back() {
        let numbers: [(u64, &[u8]); 7] = [
            (0, &[0]),
            (127, &[0x7f]),
            (128, &[0xcc, 0x80]),
            (256, &[0xcd, 1, 0]),
            (65_536, &[0xce, 0, 1, 0, 0]),
            (1 << 32, &[0xcf, 0, 0, 0, 1, 0, 0, 0, 0]),
            (u64::MAX, &[0xcf, 255, 255, 255, 255, 255, 255, 255, 255]),
        ];
        for (number, expected) in numbers {
            let bytes = written(|writer| writer.uint(number));
            assert_eq!((&*bytes, Value::read(&bytes)), (expected, Some(Value::Int(number.into()))), "{number}");
        }
        let texts: [(usize, &[u8]); 4] =
            [(2, &[0xa2]), (32, &[0xd9, 32]), (300, &[0xda, 1, 44]), (70_000, &[0xdb, 0, 1, 17, 112])];
        for (length, head) in texts {
            let text = "a".repeat(length);
            let bytes = written(|writer| writer.text(&text));
            assert!(bytes.starts_with(head), "{length}");
            assert_eq!(Value::read(&bytes), Some(Value::Text(text.as_bytes())));
        }
        let counts: [(u32, &[u8], &[u8]); 3] = [
            (15, &[0x9f], &[0x8f]),
            (16, &[0xdc, 0, 16], &[0xde, 0, 16]),
            (70_000, &[0xdd, 0, 1, 17, 112], &[0xdf, 0, 1, 17, 112]),
        ];
        for (count, array, map) in counts {
            let of_nil = |begin: fn(&mut Writer, u32), values| {
                written(|writer| {
                    begin(writer, count);
                    (0..values).for_each(|_| writer.nil());
                })
            };
            let (values, entries) = (of_nil(Writer::array, count), of_nil(Writer::map, 2 * count));
            assert!(values.starts_with(array) && entries.starts_with(map), "{count}");
            let nil = vec![Value::Nil; count as usize];
            assert_eq!(Value::read(&entries), Some(Value::Map(nil.iter().cloned().zip(nil.clone()).collect())));
            assert_eq!(Value::read(&values), Some(Value::Array(nil)));
        }
        assert_eq!(written(|writer| writer.int(-2)), b"\xd3\xff\xff\xff\xff\xff\xff\xff\xfe");
        assert_eq!(written(|writer| writer.int(2)), [2]);
        assert_eq!(written(|writer| writer.float(0.5)), b"\xcb\x3f\xe0\0\0\0\0\0\0");
        let bools = written(|writer| [true, false].into_iter().for_each(|value| writer.bool(value)));
        assert_eq!(bools, [0xc3, 0xc2]);
    }
}
