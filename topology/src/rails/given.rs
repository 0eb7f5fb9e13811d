//! A given rail matrix: Mooncake's two tiers or TENT's three, checked against the machine.
//!
//! No entry is ignored silently. An unknown name, or a rail that cannot be used, is an error that lists the known
//! names: a matrix written for another machine, or for this one before a NIC was removed, must stop the start.

use super::{Location, Nearness, Rail, RailMatrix, Row, Tier};
use std::fmt;

/// Most bytes of a matrix; that of a large machine has a few thousand.
pub const MAX_MATRIX_BYTES: usize = 1 << 20;
/// Location that stands for every location without a row of its own.
pub(super) const ANY: &str = "*";

/// One row of a given matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenRow {
    /// Name of the location.
    pub location: String,
    /// Device names by tier, nearest first; a tier may be empty.
    pub tiers: Vec<Vec<String>>,
}

/// A given matrix, before it is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GivenMatrix {
    /// Rows in the order of their names.
    pub rows: Vec<GivenRow>,
}

/// Error of a given matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum MatrixError {
    /// The text is longer than [`MAX_MATRIX_BYTES`].
    TooLarge { bytes: usize },
    /// The text is not JSON.
    NotJson {
        /// The error and its position.
        message: String,
    },
    /// The JSON has another shape.
    Shape {
        /// Name of the location or member in question.
        place: String,
        /// Description of the expected shape.
        expected: &'static str,
    },
    /// A row for a location that the machine does not have.
    UnknownLocation {
        location: String,
        /// The machine's locations.
        known: Vec<String>,
    },
    /// A row names an RDMA device that the machine does not have.
    UnknownNic {
        location: String,
        nic: String,
        /// The machine's RDMA devices.
        known: Vec<String>,
    },
    /// A row names an RDMA device that cannot be used.
    UnusableNic {
        location: String,
        nic: String,
        /// The reason, and a remedy.
        reason: String,
    },
    /// A row names an RDMA device twice.
    Repeated { location: String, nic: String },
    /// Two rows are for one location.
    TwoRows { location: String },
    /// The matrix has no row, or a row without any device.
    Empty {
        /// Name of the row; empty for the matrix as a whole.
        location: String,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        match self {
            Self::TooLarge { bytes } => {
                write!(f, "the matrix has {bytes} bytes, and at most {MAX_MATRIX_BYTES} are read")
            }
            Self::NotJson { message } => write!(f, "the matrix is not JSON: {message}"),
            Self::Shape { place, expected } => write!(f, "{place:?} in the matrix is not {expected}"),
            Self::UnknownLocation { location, known } => write!(
                f,
                "the matrix has a row for {location:?}, which this machine does not have; its locations are: {}",
                list(known)
            ),
            Self::UnknownNic { location, nic, known } => write!(
                f,
                "row {location:?} of the matrix names the RDMA device {nic:?}, which this machine lacks; it has: {}",
                list(known)
            ),
            Self::UnusableNic { location, nic, reason } => {
                write!(
                    f,
                    "row {location:?} of the matrix names the RDMA device {nic:?}, which cannot be used: {reason}"
                )
            }
            Self::Repeated { location, nic } => {
                write!(
                    f,
                    "row {location:?} of the matrix names the RDMA device {nic:?} twice; each belongs in one tier"
                )
            }
            Self::TwoRows { location } => write!(f, "the matrix has two rows for {location}; remove one"),
            Self::Empty { location } if location.is_empty() => {
                write!(f, "the matrix has no rows; write for example {{\"cpu:0\": [[\"mlx5_0\"], []]}}")
            }
            Self::Empty { location } => write!(f, "row {location:?} of the matrix names no RDMA device"),
        }
    }
}

impl std::error::Error for MatrixError {}

impl RailMatrix {
    /// Returns the same rails in the tiers of `given`. Locations without a row in it keep their computed tiers, or take
    /// those of the row `*`.
    ///
    /// # Errors
    ///
    /// [`MatrixError`] names the first row that does not fit this machine.
    pub fn with_given(&self, given: &GivenMatrix) -> Result<Self, MatrixError> {
        if given.rows.is_empty() {
            return Err(MatrixError::Empty { location: String::new() });
        }
        let mut matrix = self.clone();
        let mut set: Vec<Location> = Vec::new();
        for row in given.rows.iter().filter(|row| row.location != ANY) {
            let tiers = self.tiers_of(row)?;
            let found = matrix.rows.iter_mut().find(|one| one.location.is_named(&row.location));
            let Some(found) = found else {
                let known = self.rows.iter().map(|row| row.location.to_string()).collect();
                return Err(MatrixError::UnknownLocation { location: row.location.clone(), known });
            };
            if set.contains(&found.location) {
                return Err(MatrixError::TwoRows { location: found.location.to_string() });
            }
            set.push(found.location);
            found.tiers = tiers;
        }
        if let Some(any) = given.rows.iter().find(|row| row.location == ANY) {
            let tiers = self.tiers_of(any)?;
            for row in matrix.rows.iter_mut().filter(|row| !set.contains(&row.location)) {
                row.tiers.clone_from(&tiers);
            }
        }
        Ok(matrix)
    }

    fn tiers_of(&self, row: &GivenRow) -> Result<Vec<Tier>, MatrixError> {
        let mut seen: Vec<&str> = Vec::new();
        for nic in row.tiers.iter().flatten() {
            self.check_nic(&row.location, nic)?;
            if seen.contains(&nic.as_str()) {
                return Err(MatrixError::Repeated { location: row.location.clone(), nic: nic.clone() });
            }
            seen.push(nic);
        }
        // On a machine without rails, rows can only be empty.
        if seen.is_empty() && !self.rails.is_empty() {
            return Err(MatrixError::Empty { location: row.location.clone() });
        }
        let kept = row.tiers.iter().enumerate().filter(|(_, rails)| !rails.is_empty());
        let tier = |(index, rails): (usize, &Vec<String>)| Tier {
            nearness: Nearness::Given,
            distance: None,
            slow: false,
            rails: rails.clone(),
            reason: format!("tier {} of row {:?} in the matrix that was given", index + 1, row.location),
        };
        Ok(kept.map(tier).collect())
    }

    fn check_nic(&self, location: &str, nic: &str) -> Result<(), MatrixError> {
        if self.rail(nic).is_some() {
            return Ok(());
        }
        let (location, nic) = (location.to_owned(), nic.to_owned());
        if let Some(excluded) = self.excluded.iter().find(|excluded| excluded.name == nic) {
            return Err(MatrixError::UnusableNic { location, nic, reason: excluded.reason.clone() });
        }
        let usable = self.rails.iter().map(|Rail { name, .. }| name.clone());
        let unusable = self.excluded.iter().map(|excluded| format!("{} (not usable)", excluded.name));
        Err(MatrixError::UnknownNic { location, nic, known: usable.chain(unusable).collect() })
    }

    /// Returns the rows whose first tier differs between this matrix and `given`, one sentence each.
    #[must_use]
    pub fn differences(&self, given: &Self) -> Vec<String> {
        let mut out = Vec::new();
        for (ours, theirs) in self.rows.iter().zip(&given.rows) {
            let first = |row: &Row| {
                row.tiers.first().map_or(Vec::new(), |tier| {
                    let mut rails = tier.rails.clone();
                    rails.sort_by_cached_key(|rail| super::natural_key(rail));
                    rails
                })
            };
            let (mine, given) = (first(ours), first(theirs));
            if mine != given {
                out.push(format!(
                    "{}: the matrix prefers {}; nearest here is {}.",
                    ours.location,
                    if given.is_empty() { "nothing".to_owned() } else { given.join(", ") },
                    if mine.is_empty() { "nothing".to_owned() } else { mine.join(", ") },
                ));
            }
        }
        out
    }
}
