//! Header of safetensors files, which gives the offsets of tensors: eight bytes of length, a table in JSON, then the
//! tensors' bytes.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

/// Bytes of the length field that a file begins with.
pub(super) const LENGTH_BYTES: u64 = 8;
/// Longest table that readers of the format accept, in bytes.
const TABLE_BYTES: u64 = 100_000_000;
/// Only name in the table that is not a tensor's.
const METADATA: &str = "__metadata__";

/// Error of a header that cannot be read.
#[derive(Debug)]
pub(super) enum HeaderError {
    /// The table is longer than readers accept, or than the file.
    TableBytes { bytes: u64, file_bytes: u64 },
    /// The table is no JSON object.
    Table(serde_json::Error),
    /// The entry of a tensor is incomplete.
    Entry { tensor: String },
    /// The bytes of a tensor are not within the file.
    Offsets { tensor: String, from: u64, to: u64, file_bytes: u64 },
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TableBytes { bytes, file_bytes } => {
                write!(f, "not a safetensors file: a table of {bytes} bytes in a file of {file_bytes}")
            }
            Self::Table(error) => write!(f, "not a safetensors file: invalid table: {error}"),
            Self::Entry { tensor } => {
                write!(f, "tensor {tensor:?}: a dtype, a shape and two data_offsets are needed")
            }
            Self::Offsets { tensor, from, to, file_bytes } => {
                write!(f, "tensor {tensor:?}: data_offsets {from} to {to} in a file of {file_bytes} bytes")
            }
        }
    }
}

impl std::error::Error for HeaderError {}

/// Tensor of a file.
pub(super) struct Entry {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Offset of its bytes in the file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Returns the length of a file's table, from its first eight bytes.
pub(super) fn table_bytes(first: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    let bytes = u64::from_le_bytes(first);
    if bytes == 0 || bytes > TABLE_BYTES || bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
        return Err(HeaderError::TableBytes { bytes, file_bytes });
    }
    Ok(bytes)
}

/// Parses the tensors of a file by name, from its table.
pub(super) fn entries(table: &[u8], file_bytes: u64) -> Result<BTreeMap<String, Entry>, HeaderError> {
    let begin = LENGTH_BYTES + table.len() as u64;
    let table: Map<String, Value> = serde_json::from_slice(table).map_err(HeaderError::Table)?;
    let tensors = table.into_iter().filter(|(name, _)| name != METADATA);
    let entry = |(name, value): (String, Value)| {
        let numbers = |value: &Value| value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
        let dtype = value["dtype"].as_str().map(str::to_owned);
        let (shape, offsets) = (numbers(&value["shape"]), numbers(&value["data_offsets"]));
        let (Some(dtype), Some(shape), Some([from, to])) = (dtype, shape, offsets.as_deref()) else {
            return Err(HeaderError::Entry { tensor: name });
        };
        let end = to.checked_add(begin).filter(|&end| end <= file_bytes);
        let (Some(bytes), Some(_)) = (to.checked_sub(*from), end) else {
            return Err(HeaderError::Offsets { tensor: name, from: *from, to: *to, file_bytes });
        };
        Ok((name, Entry { dtype, shape, offset: begin + from, bytes }))
    };
    tensors.map(entry).collect()
}

/// Builds the header of a file whose tensors lie one directly after the other: name, type, shape and bytes of each.
pub(super) fn head<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a str, &'a [u64], u64)>,
) -> Result<Vec<u8>, serde_json::Error> {
    let (mut table, mut end) = (Map::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [end, end + bytes];
        table.insert(name.to_owned(), serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        end += bytes;
    }
    let mut text = serde_json::to_vec(&table)?;
    // Tensors begin at multiples of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_header_is_read_and_malformed_ones_are_refused() {
        let tensors = [("a", "F32", &[2u64, 3][..], 24), ("b", "U8", &[5][..], 5)];
        let head = head(tensors.into_iter()).unwrap();
        let file = head.len() as u64 + 29;
        let bytes = table_bytes(head[..8].try_into().unwrap(), file).unwrap();
        assert_eq!(bytes as usize, head.len() - 8);
        let found = entries(&head[8..], file).unwrap();
        assert_eq!((found["b"].offset, found["b"].bytes), (head.len() as u64 + 24, 5));
        assert_eq!((found["a"].dtype.as_str(), found["a"].shape.as_slice()), ("F32", &[2, 3][..]));
        // Truncated headers, and tables that make no sense.
        assert!(entries(&head[8..], file - 1).is_err());
        assert!(table_bytes([255; 8], file).is_err() && table_bytes([0; 8], file).is_err());
        assert!(entries(b"[]", file).is_err());
        assert!(entries(br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, file).is_err());
    }
}
