//! Paired rounds and their summary.

/// Figures of one quantity, a value for each round.
pub(crate) struct Series {
    name: String,
    unit: &'static str,
    values: Vec<f64>,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, unit: &'static str) -> Self {
        Self { name: name.into(), unit, values: Vec::new() }
    }

    pub(crate) fn push(&mut self, value: f64) {
        self.values.push(value);
    }

    pub(crate) fn show(&self) {
        let (least, median, most) = spread(&self.values);
        println!("  {:44} {median:9.3} {}  ({least:.3} .. {most:.3})", self.name, self.unit);
    }

    /// Prints the ratios of this series to another, round by round.
    pub(crate) fn show_ratio(&self, other: &Self, wanted: &str) {
        let ratios: Vec<f64> = self.values.iter().zip(&other.values).map(|(ours, theirs)| ours / theirs).collect();
        let (least, median, most) = spread(&ratios);
        println!(
            "  {:44} {median:9.3}    ({least:.3} .. {most:.3})  wanted: {wanted}",
            format!("{} / {}", self.name, other.name)
        );
    }
}

/// Returns minimum, median and maximum.
pub(crate) fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(&least), Some(&most)) = (sorted.first(), sorted.last()) else { return (0.0, 0.0, 0.0) };
    (least, sorted[sorted.len() / 2], most)
}

/// Returns the median.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
