//! Element types of tensors, of which only the name and the size matter: bytes are copied unchanged.

use std::fmt;

/// Known types: the name in safetensors, other names in use, and bytes of one element.
const KNOWN: [(&str, &[&str], u64); 16] = [
    ("BOOL", &["bool"], 1),
    ("U8", &["uint8", "byte"], 1),
    ("I8", &["int8", "char"], 1),
    ("F8_E4M3", &["float8_e4m3fn", "float8_e4m3", "fp8_e4m3", "fp8"], 1),
    ("F8_E5M2", &["float8_e5m2", "fp8_e5m2"], 1),
    ("F8_E8M0", &["float8_e8m0fnu"], 1),
    ("U16", &["uint16"], 2),
    ("I16", &["int16", "short"], 2),
    ("F16", &["float16", "half", "fp16"], 2),
    ("BF16", &["bfloat16"], 2),
    ("U32", &["uint32"], 4),
    ("I32", &["int32", "int"], 4),
    ("F32", &["float32", "float", "fp32"], 4),
    ("U64", &["uint64"], 8),
    ("I64", &["int64", "long"], 8),
    ("F64", &["float64", "double", "fp64"], 8),
];

/// Type of a tensor's elements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dtype(usize);

impl Dtype {
    /// Parses the name of a type in safetensors, PyTorch (with or without `torch.`) or NumPy, in any case.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        let is = |known: &str| known.eq_ignore_ascii_case(name);
        KNOWN.iter().position(|&(first, others, _)| is(first) || others.iter().copied().any(is)).map(Self)
    }

    /// Returns its name in safetensors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        KNOWN[self.0].0
    }

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        KNOWN[self.0].2
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
