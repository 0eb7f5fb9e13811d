//! Reasons why a manifest is refused.

use std::error::Error;
use std::fmt;

use kvplane_cluster::reshard::{BoxError, Dtype, ReshardError, TensorBox};
use serde_json::Value;

/// Reason why a placement manifest is refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum ManifestError {
    /// The text is no JSON.
    Json(serde_json::Error),
    /// The JSON is no object.
    NoObject,
    /// The manifest is of another kind of resource.
    Resource {
        /// Kind that the manifest has.
        kind: String,
        /// Only supported kind.
        supported: &'static str,
    },
    /// A required field is missing.
    Missing {
        /// Name of the field.
        field: &'static str,
    },
    /// A field is an empty text.
    Empty {
        /// Name of the field.
        field: &'static str,
    },
    /// A field is no list.
    NotList {
        /// Name of the field.
        field: &'static str,
    },
    /// A field has a value of another kind.
    Kind {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: Value,
        /// Kind that is needed.
        kind: &'static str,
    },
    /// A list has a value that is no number of 64 bits.
    NotNumber {
        /// Name of the field.
        field: &'static str,
        /// Value in the list.
        value: Value,
    },
    /// An entry of a list is no object.
    EntryNotObject {
        /// Kind of the entry: tensor, part or fragment.
        what: &'static str,
        /// Index of the entry in its list.
        at: usize,
    },
    /// An entry of a list is refused.
    Entry {
        /// Kind of the entry: tensor, part or fragment.
        what: &'static str,
        /// Index of the entry in its list.
        at: usize,
        /// Reason.
        source: Box<Self>,
    },
    /// The tensor or participant of this name is refused.
    Named {
        /// Name of the tensor or participant.
        name: String,
        /// Reason.
        source: Box<Self>,
    },
    /// A fragment of this tensor is refused.
    Fragment {
        /// Name of the tensor.
        tensor: String,
        /// Reason.
        source: Box<Self>,
    },
    /// The type of the elements is unknown.
    Dtype {
        /// Name of the type.
        dtype: String,
    },
    /// The stated length of an element is not that of its type.
    ItemBytes {
        /// Stated length.
        bytes: u64,
        /// Type of the elements.
        dtype: Dtype,
    },
    /// The tensor has no such dimension.
    Dimension {
        /// Index of the dimension.
        dimension: u64,
        /// Number of dimensions of the tensor.
        dimensions: usize,
    },
    /// The manifest has no such tensor.
    UnknownTensor {
        /// Name of the tensor.
        name: String,
    },
    /// Offset and lengths of a fragment contradict each other.
    Box(BoxError),
    /// The stated length of a fragment is not that of its box.
    Bytes {
        /// Stated length.
        stated: u64,
        /// Box of the fragment.
        area: TensorBox,
        /// Type of the elements.
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
