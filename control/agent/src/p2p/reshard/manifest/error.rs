//! Reasons why a manifest is refused.

use std::error::Error;
use std::fmt;

use kvplane_cluster::reshard::{BoxError, Dtype, ReshardError, TensorBox};
use serde_json::Value;

/// Reason why a placement manifest is refused.
#[derive(Debug)]
pub(super) enum ManifestError {
    /// The text is no JSON.
    Json(serde_json::Error),
    /// The JSON is no object.
    NoObject,
    /// The manifest is of another kind of resource.
    Resource { kind: String, supported: &'static str },
    /// A required field is missing.
    Missing { field: &'static str },
    /// A field is an empty text.
    Empty { field: &'static str },
    /// A field is no list.
    NotList { field: &'static str },
    /// A field has a value of another kind.
    Kind { field: &'static str, value: Value, kind: &'static str },
    /// A list has a value that is no number of 64 bits.
    NotNumber { field: &'static str, value: Value },
    /// An entry of a list is no object.
    EntryNotObject { what: &'static str, at: usize },
    /// An entry of a list is refused.
    Entry { what: &'static str, at: usize, source: Box<Self> },
    /// The tensor or participant of this name is refused.
    Named { name: String, source: Box<Self> },
    /// A fragment of this tensor is refused.
    Fragment { tensor: String, source: Box<Self> },
    /// The type of the elements is unknown.
    Dtype { dtype: String },
    /// The stated length of an element is not that of its type.
    ItemBytes { bytes: u64, dtype: Dtype },
    /// The tensor has no such dimension.
    Dimension { dimension: u64, dimensions: usize },
    /// The manifest has no such tensor.
    UnknownTensor { name: String },
    /// Offset and lengths of a fragment contradict each other.
    Box(BoxError),
    /// The stated length of a fragment is not that of its box.
    Bytes {
        stated: u64,
        area: TensorBox,
        dtype: Dtype,
        /// Length of the box; `None` beyond 64 bits.
        bytes: Option<u64>,
    },
    /// The tensors and parts contradict each other.
    Placement(ReshardError),
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => write!(f, "invalid JSON: {error}"),
            Self::NoObject => f.write_str("no object"),
            Self::Resource { kind, supported } => {
                write!(f, "resource_kind is {kind:?}: only {supported:?} is supported")
            }
            Self::Missing { field } => write!(f, "{field} is missing"),
            Self::Empty { field } => write!(f, "{field} is empty"),
            Self::NotList { field } => write!(f, "{field} is not a list"),
            Self::Kind { field, value, kind } => write!(f, "{field} is {value}: it must be {kind}"),
            Self::NotNumber { field, value } => {
                write!(f, "{field} has {value}: numbers are from 0 to 2^64 - 1")
            }
            Self::EntryNotObject { what, at } => write!(f, "{what} {at} is not an object"),
            Self::Entry { what, at, source } => write!(f, "{what} {at}: {source}"),
            Self::Named { name, source } => write!(f, "{name:?}: {source}"),
            Self::Fragment { tensor, source } => write!(f, "of {tensor:?}: {source}"),
            Self::Dtype { dtype } => {
                write!(f, "dtype {dtype:?} is unknown: use names of safetensors, PyTorch or NumPy, such as bfloat16")
            }
            Self::ItemBytes { bytes, dtype } => {
                write!(f, "itemsize is {bytes}, but an element of {dtype} has {} bytes", dtype.bytes())
            }
            Self::Dimension { dimension, dimensions } => {
                write!(f, "shard_dims names dimension {dimension}, but there are {dimensions}")
            }
            Self::UnknownTensor { name } => write!(f, "tensor {name:?} is not among the tensors"),
            Self::Box(error) => write!(f, "{error}"),
            Self::Bytes { stated, area, dtype, bytes } => {
                write!(f, "nbytes is {stated}, but {area} of {dtype} has {} bytes", bytes.unwrap_or(u64::MAX))
            }
            Self::Placement(error) => write!(f, "{error}"),
        }
    }
}

impl Error for ManifestError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Json(error) => Some(error),
            Self::Entry { source, .. } | Self::Named { source, .. } | Self::Fragment { source, .. } => Some(source),
            Self::Box(error) => Some(error),
            Self::Placement(error) => Some(error),
            _ => None,
        }
    }
}
