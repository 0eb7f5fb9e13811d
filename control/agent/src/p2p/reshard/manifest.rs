//! Placements from JSON, in the form of the placement manifests of `mooncake.reshard` (`weight_placement_to_json`).
//!
//! Required are `tensors` (`tensor_id`, `global_shape`, `dtype`) and `parts` (`participant_id`, `fragments` with
//! `tensor_id`, `global_offset`, `local_shape`). Known optional fields are checked, and others ignored, so that
//! manifests may be written by hand.

mod error;

use std::collections::BTreeMap;

use kvplane_cluster::reshard::{Dtype, Fragment, Part, Placement, Tensor, TensorBox};
use serde_json::{Map, Value};

use super::error::ReshardingError;
use crate::error::Error;
pub use error::ManifestError;

/// Only supported kind of resource.
const KIND: &str = "model_weight";

/// Parses a placement.
///
/// # Errors
/// When the text is no JSON or no such manifest, an element type is unknown, or fields contradict each other.
pub fn placement_from_json(text: &str) -> Result<Placement, Error> {
    Ok(read(text).map_err(ReshardingError::Manifest)?)
}

/// Parses a placement; the caller says which manifest an error is of.
///
/// # Errors
/// Those of [`placement_from_json`].
pub(super) fn read(text: &str) -> Result<Placement, ManifestError> {
    let value: Value = serde_json::from_str(text).map_err(ManifestError::Json)?;
    let manifest = value.as_object().ok_or(ManifestError::NoObject)?;
    if let Some(kind) = optional(manifest, "resource_kind", Value::as_str, "a text")?
        && kind != KIND
    {
        return Err(ManifestError::Resource { kind: kind.to_owned(), supported: KIND });
    }
    let word = |name| optional(manifest, name, Value::as_str, "a text").map(|word| word.unwrap_or("").to_owned());
    let model = format!("{}@{}", word("resource_id")?, word("revision")?);
    let tensors = list(manifest, "tensors")?;
    let tensors: Vec<Tensor> = each(tensors, "tensor", tensor)?;
    let by_name: BTreeMap<&str, usize> =
        tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.as_str(), at)).collect();
    let parts = each(list(manifest, "parts")?, "part", |entry| part(entry, &by_name, &tensors))?;
    Placement::new(model, tensors, parts).map_err(ManifestError::Placement)
}

fn tensor(entry: &Map<String, Value>) -> Result<Tensor, ManifestError> {
    let name = text_of(entry, "tensor_id")?;
    let of = |source| ManifestError::Named { name: name.to_owned(), source: Box::new(source) };
    let dtype = text_of(entry, "dtype").map_err(of)?;
    let dtype = Dtype::parse(dtype).ok_or_else(|| of(ManifestError::Dtype { dtype: dtype.to_owned() }))?;
    if let Some(bytes) = optional(entry, "itemsize", Value::as_u64, "a number").map_err(of)?
        && bytes != dtype.bytes()
    {
        return Err(of(ManifestError::ItemBytes { bytes, dtype }));
    }
    let layout = optional(entry, "layout_fingerprint", Value::as_str, "a text").map_err(of)?.unwrap_or("").to_owned();
    let shape = numbers(entry, "global_shape").map_err(of)?;
    if entry.contains_key("shard_dims")
        && let Some(dimension) =
            numbers(entry, "shard_dims").map_err(of)?.into_iter().find(|&one| one >= shape.len() as u64)
    {
        return Err(of(ManifestError::Dimension { dimension, dimensions: shape.len() }));
    }
    Ok(Tensor { name: name.to_owned(), shape, dtype, layout })
}

fn part(
    entry: &Map<String, Value>,
    by_name: &BTreeMap<&str, usize>,
    tensors: &[Tensor],
) -> Result<Part, ManifestError> {
    let participant = text_of(entry, "participant_id")?;
    let fragment = |entry: &Map<String, Value>| {
        let name = text_of(entry, "tensor_id")?;
        let tensor = *by_name.get(name).ok_or_else(|| ManifestError::UnknownTensor { name: name.to_owned() })?;
        let of = |source| ManifestError::Fragment { tensor: name.to_owned(), source: Box::new(source) };
        let (offset, shape) =
            (numbers(entry, "global_offset").map_err(of)?, numbers(entry, "local_shape").map_err(of)?);
        let area = TensorBox::new(offset, shape).map_err(|error| of(ManifestError::Box(error)))?;
        if let Some(stated) = optional(entry, "nbytes", Value::as_u64, "a number").map_err(of)? {
            let dtype = tensors[tensor].dtype;
            let bytes = area.elements().checked_mul(dtype.bytes());
            if bytes != Some(stated) {
                return Err(of(ManifestError::Bytes { stated, area, dtype, bytes }));
            }
        }
        Ok(Fragment { tensor, area })
    };
    let fragments = list(entry, "fragments").and_then(|fragments| each(fragments, "fragment", fragment));
    let fragments =
        fragments.map_err(|source| ManifestError::Named { name: participant.to_owned(), source: Box::new(source) })?;
    Ok(Part { participant: participant.to_owned(), fragments })
}

fn each<T>(
    entries: &[Value],
    what: &'static str,
    read: impl Fn(&Map<String, Value>) -> Result<T, ManifestError>,
) -> Result<Vec<T>, ManifestError> {
    let read = |(at, entry): (usize, &Value)| {
        let entry = entry.as_object().ok_or(ManifestError::EntryNotObject { what, at })?;
        read(entry).map_err(|source| ManifestError::Entry { what, at, source: Box::new(source) })
    };
    entries.iter().enumerate().map(read).collect()
}

fn list<'a>(entry: &'a Map<String, Value>, field: &'static str) -> Result<&'a [Value], ManifestError> {
    let found = entry.get(field).ok_or(ManifestError::Missing { field })?;
    found.as_array().map(Vec::as_slice).ok_or(ManifestError::NotList { field })
}

fn text_of<'a>(entry: &'a Map<String, Value>, field: &'static str) -> Result<&'a str, ManifestError> {
    match optional(entry, field, Value::as_str, "a text")? {
        Some(text) if !text.is_empty() => Ok(text),
        Some(_) => Err(ManifestError::Empty { field }),
        None => Err(ManifestError::Missing { field }),
    }
}

fn numbers(entry: &Map<String, Value>, field: &'static str) -> Result<Vec<u64>, ManifestError> {
    let number = |value: &Value| value.as_u64().ok_or_else(|| ManifestError::NotNumber { field, value: value.clone() });
    list(entry, field)?.iter().map(number).collect()
}

fn optional<'a, T>(
    entry: &'a Map<String, Value>,
    field: &'static str,
    read: impl Fn(&'a Value) -> Option<T>,
    kind: &'static str,
) -> Result<Option<T>, ManifestError> {
    match entry.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => read(value).map(Some).ok_or_else(|| ManifestError::Kind { field, value: value.clone(), kind }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Manifest with all fields that Mooncake writes.
    fn manifest() -> Value {
        let rank = |tp: u64| serde_json::json!({ "dp": 0, "tp": tp, "pp": 0, "ep": 0 });
        let part = |tp: u64| {
            serde_json::json!({
                "participant_id": format!("tp{tp}"), "rank": rank(tp),
                "fragments": [{
                    "placement_fragment_id": format!("f{tp}"), "tensor_id": "w", "global_offset": [4 * tp, 0],
                    "local_shape": [4, 16], "nbytes": 128, "rank": rank(tp), "aliases": [],
                }],
            })
        };
        serde_json::json!({
            "resource_kind": KIND, "resource_id": "m", "revision": "r1", "weight_generation": 0,
            "placement_set_id": "set", "placement_id": "one",
            "topology": { "tp_size": 2, "pp_size": 1, "ep_size": 1, "dp_size": 1, "topology_id": "t", "participants": [
                { "participant_id": "tp0", "rank": rank(0) }, { "participant_id": "tp1", "rank": rank(1) },
            ] },
            "tensors": [{
                "tensor_id": "w", "global_shape": [8, 16], "dtype": "float16", "itemsize": 2, "shard_dims": [0],
                "layout_fingerprint": "row-major", "layer_id": 0, "expert_id": null,
                "parallel_axes": [{ "semantics": "split", "kind": "tp", "dim": 0 }],
            }],
            "parts": [part(0), part(1)],
        })
    }

    #[test]
    fn a_manifest_assigns_fragments_to_participants() {
        let placement = placement_from_json(&manifest().to_string()).unwrap();
        assert_eq!((placement.model(), placement.tensors()[0].shape.as_slice()), ("m@r1", &[8, 16][..]));
        assert_eq!(placement.parts()[1].participant, "tp1");
        assert_eq!(placement.parts()[1].fragments[0].area.to_string(), "[4:8, 0:16]");
    }

    #[test]
    fn errors_in_a_manifest_are_named() {
        let wrong = |pointer: &str, value: Value, words: &[&str]| {
            let mut manifest = manifest();
            *manifest.pointer_mut(pointer).unwrap() = value;
            let error = placement_from_json(&manifest.to_string()).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        use serde_json::json;
        wrong("/resource_kind", json!("kv_cache"), &["\"kv_cache\""]);
        wrong("/tensors/0/dtype", json!("int3"), &["tensor 0", "\"w\"", "\"int3\" is unknown"]);
        wrong("/tensors/0/itemsize", json!(4), &["itemsize is 4", "F16 has 2"]);
        wrong("/tensors/0/global_shape", json!([8, 0]), &["a length of 0 in dimension 1"]);
        wrong("/tensors/0/global_shape", json!([8, -1]), &["global_shape has -1"]);
        wrong("/tensors/0/global_shape", json!([8]), &["a box of 2 dimensions, and the tensor has 1"]);
        wrong("/tensors/0/shard_dims", json!([2]), &["dimension 2"]);
        wrong("/parts/0/fragments/0/local_shape", json!([4, 17]), &["part 0", "fragment 0", "nbytes is 128"]);
        wrong("/parts/0/fragments/0/local_shape", json!([0, 16]), &["a length of 0"]);
        wrong("/parts/0/fragments/0/global_offset", json!([u64::MAX, 0]), &["beyond 2^64"]);
        wrong("/parts/0/fragments/0/global_offset", json!([6, 0]), &["[6:10, 0:16]", "not within its shape"]);
        wrong("/parts/0/fragments/0/global_offset", json!([2, 0]), &["\"tp0\"", "\"tp1\"", "overlap"]);
        wrong("/parts/0/fragments/0/tensor_id", json!("v"), &["\"v\" is not among the tensors"]);
        wrong("/parts/0/participant_id", json!("tp1"), &["participant \"tp1\" is there twice"]);
        wrong("/parts/0/participant_id", json!(1), &["participant_id is 1: it must be a text"]);
        wrong("/parts", json!({}), &["parts is not a list"]);
        assert!(placement_from_json("{").unwrap_err().to_string().contains("invalid JSON"));
        assert!(placement_from_json("{}").unwrap_err().to_string().contains("tensors is missing"));
    }
}
