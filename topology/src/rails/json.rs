//! Matrices as JSON: Mooncake's read and written, TENT's topology read.
//!
//! Mooncake: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`, for each location the preferred devices and the others. TENT: lists
//! of `nics` and `mems`; each of the latter ranks the former by index in `device_list`.

use super::given::{GivenMatrix, GivenRow, MAX_MATRIX_BYTES, MatrixError};
use super::{RailMatrix, natural_key};
use crate::json;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// TENT's tiers, nearest first.
const RANKS: [&str; 3] = ["rank0", "rank1", "rank2"];

impl GivenMatrix {
    /// Parses either form; an object with the member `mems` is TENT's.
    ///
    /// # Errors
    ///
    /// [`MatrixError`] names the part with another shape.
    pub fn parse(text: &str) -> Result<Self, MatrixError> {
        if text.len() > MAX_MATRIX_BYTES {
            return Err(MatrixError::TooLarge { bytes: text.len() });
        }
        let value: Value =
            serde_json::from_str(text).map_err(|error| MatrixError::NotJson { message: error.to_string() })?;
        let Value::Object(object) = value else {
            return Err(shape("the whole text", "an object of locations"));
        };
        let mut rows = match object.get("mems") {
            Some(mems) => tent_rows(&object, mems)?,
            None => object.iter().map(|(location, value)| mooncake_row(location, value)).collect::<Result<_, _>>()?,
        };
        rows.sort_by_cached_key(|row| natural_key(&row.location));
        Ok(Self { rows })
    }
}

fn shape(place: impl Into<String>, expected: &'static str) -> MatrixError {
    MatrixError::Shape { place: place.into().chars().take(64).collect(), expected }
}

fn mooncake_row(location: &str, value: &Value) -> Result<GivenRow, MatrixError> {
    const EXPECTED: &str = "an array of exactly two arrays of device names, [[preferred], [others]]";
    let wrong = || shape(location, EXPECTED);
    let pair = value.as_array().filter(|pair| pair.len() == 2).ok_or_else(wrong)?;
    let names = |value: &Value| -> Option<Vec<String>> {
        value.as_array()?.iter().map(|name| name.as_str().map(str::to_owned)).collect()
    };
    let tiers = pair.iter().map(names).collect::<Option<_>>().ok_or_else(wrong)?;
    Ok(GivenRow { location: location.to_owned(), tiers })
}

fn tent_rows(object: &Map<String, Value>, mems: &Value) -> Result<Vec<GivenRow>, MatrixError> {
    let nics = object.get("nics").and_then(Value::as_array).ok_or_else(|| shape("nics", "an array of devices"))?;
    let name_of = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_owned);
    let nics: Vec<String> = nics
        .iter()
        .map(name_of)
        .collect::<Option<_>>()
        .ok_or_else(|| shape("nics", "an array of objects with a name"))?;
    let mems = mems.as_array().ok_or_else(|| shape("mems", "an array of memory locations"))?;
    mems.iter().map(|mem| tent_row(mem, &nics)).collect()
}

fn tent_row(mem: &Value, nics: &[String]) -> Result<GivenRow, MatrixError> {
    const EXPECTED: &str = "an object with ranks of indices into nics, such as {\"rank0\": [0], \"rank1\": []}";
    let location = mem.get("name").and_then(Value::as_str).ok_or_else(|| shape("mems", "objects with a name"))?;
    let wrong = || shape(location, EXPECTED);
    let ranks = mem.get("device_list").and_then(Value::as_object).ok_or_else(wrong)?;
    if ranks.keys().any(|key| !RANKS.contains(&key.as_str())) {
        return Err(wrong());
    }
    let device = |index: &Value| nics.get(usize::try_from(index.as_u64()?).ok()?).cloned();
    let tier = |rank: &&str| match ranks.get(*rank) {
        None => Some(Vec::new()),
        Some(list) => list.as_array()?.iter().map(device).collect(),
    };
    let tiers = RANKS.iter().map(tier).collect::<Option<_>>().ok_or_else(wrong)?;
    Ok(GivenRow { location: location.to_owned(), tiers })
}

impl RailMatrix {
    /// Formats the matrix for Mooncake: the first tier is preferred, the others follow in order. One line without a
    /// line feed.
    #[must_use]
    pub fn to_mooncake(&self) -> String {
        let mut rows: BTreeMap<String, [Vec<String>; 2]> = BTreeMap::new();
        for row in &self.rows {
            let mut tiers = row.tiers.iter().map(|tier| tier.rails.clone());
            let preferred = tiers.next().unwrap_or_default();
            rows.insert(row.location.mooncake_name(), [preferred, tiers.flatten().collect()]);
        }
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort_by_cached_key(|(name, _)| natural_key(name));
        json::text(&MooncakeRows(rows))
    }
}

/// Rows of a matrix for Mooncake, as an object with its members in this order.
struct MooncakeRows(Vec<(String, [Vec<String>; 2])>);

impl Serialize for MooncakeRows {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, tiers)| (name, tiers)))
    }
}
