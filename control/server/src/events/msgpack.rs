//! Writer of MessagePack, limited to the types that events and answers use:
//! https://github.com/msgpack/msgpack/blob/master/spec.md

use serde_json::Value;

/// Buffer of an encoded value.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) out: Vec<u8>,
}

impl Writer {
    pub(crate) fn nil(&mut self) {
        self.out.push(0xc0);
    }

    pub(crate) fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.out.extend([0xcc, value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    pub(crate) fn text(&mut self, text: &str) {
        let bytes = text.len();
        match bytes {
            0..=31 => self.out.push(0xa0 | bytes as u8),
            32..=0xff => self.out.extend([0xd9, bytes as u8]),
            0x100..=0xffff => self.tagged(0xda, &(bytes as u16).to_be_bytes()),
            // No text here comes near that length.
            _ => self.tagged(0xdb, &(bytes as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Begins an array of `count` values, which follow.
    pub(crate) fn array(&mut self, count: u16) {
        match count {
            0..=15 => self.out.push(0x90 | count as u8),
            _ => self.tagged(0xdc, &count.to_be_bytes()),
        }
    }

    /// Begins a map of `count` keys, each followed by its value.
    pub(crate) fn map(&mut self, count: u16) {
        match count {
            0..=15 => self.out.push(0x80 | count as u8),
            _ => self.tagged(0xde, &count.to_be_bytes()),
        }
    }

    /// Writes a JSON value.
    pub(crate) fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.nil(),
            Value::Bool(is) => self.out.push(if *is { 0xc3 } else { 0xc2 }),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => self.uint(number),
                (None, Some(number)) => self.tagged(0xd3, &number.to_be_bytes()),
                (None, None) => self.tagged(0xcb, &number.as_f64().unwrap_or(f64::NAN).to_be_bytes()),
            },
            Value::String(text) => self.text(text),
            Value::Array(values) => {
                match u16::try_from(values.len()) {
                    Ok(count) => self.array(count),
                    // No answer has four billion values.
                    Err(_) => self.tagged(0xdd, &(values.len() as u32).to_be_bytes()),
                }
                values.iter().for_each(|value| self.value(value));
            }
            Value::Object(fields) => {
                match u16::try_from(fields.len()) {
                    Ok(count) => self.map(count),
                    Err(_) => self.tagged(0xdf, &(fields.len() as u32).to_be_bytes()),
                }
                for (name, value) in fields {
                    self.text(name);
                    self.value(value);
                }
            }
        }
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
        writer.out
    }

    #[test]
    fn every_size_has_its_tag() {
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
            assert_eq!(written(|writer| writer.uint(number)), expected, "{number}");
        }
        assert_eq!(written(|writer| writer.text("ab")), [0xa2, b'a', b'b']);
        assert_eq!(written(|writer| writer.text(&"a".repeat(32)))[..2], [0xd9, 32]);
        assert_eq!(written(|writer| writer.text(&"a".repeat(300)))[..3], [0xda, 1, 44]);
        assert_eq!(written(|writer| writer.text(&"a".repeat(70_000)))[..5], [0xdb, 0, 1, 17, 112]);
        assert_eq!(
            (written(|writer| writer.array(15)), written(|writer| writer.array(16))),
            (vec![0x9f], vec![0xdc, 0, 16])
        );
        assert_eq!(
            (written(|writer| writer.map(15)), written(|writer| writer.map(17))),
            (vec![0x8f], vec![0xde, 0, 17])
        );
        assert_eq!(written(Writer::nil), [0xc0]);
        let value = serde_json::json!({ "a": [true, false, null, -2, 0.5, "x"], "b": {} });
        let expected: &[&[u8]] = &[
            b"\x82\xa1a\x96\xc3\xc2\xc0\xd3\xff\xff\xff\xff\xff\xff\xff\xfe",
            b"\xcb\x3f\xe0\0\0\0\0\0\0\xa1x\xa1b\x80",
        ];
        assert_eq!(written(|writer| writer.value(&value)), expected.concat());
        let many = Value::Array(vec![Value::Null; 70_000]);
        assert_eq!(written(|writer| writer.value(&many))[..6], [0xdd, 0, 1, 17, 112, 0xc0]);
    }
}
