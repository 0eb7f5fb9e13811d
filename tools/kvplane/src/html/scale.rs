//! Axes of charts: positions of values, and values of ticks.

/// Spacing of values along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisSpacing {
    /// Equal distances for equal differences; the axis starts at 0.
    Linear,
    /// Equal distances for equal ratios; values at and below 0 are left out.
    Logarithmic,
}

/// Unit of the values on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A plain number.
    Plain,
    /// A fraction from 0 to 1, shown in percent.
    Share,
    /// Bytes, shown with binary multiples, ticks at powers of two.
    Bytes,
    /// Nanoseconds, shown as ns, µs, ms or s.
    Nanoseconds,
}

/// Axis of a chart.
#[derive(Clone, Copy, Debug)]
pub struct Axis<'a> {
    /// Label of the axis, without the unit of the ticks.
    pub label: &'a str,
    /// Spacing of values.
    pub spacing: AxisSpacing,
    /// Unit of values.
    pub unit: Unit,
}

/// Axis with its range, which maps a value to 0..1 along it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    spacing: AxisSpacing,
    unit: Unit,
    low: f64,
    high: f64,
}

impl Scale {
    /// Creates a scale that covers all of `values` that the axis can show.
    pub(super) fn over(axis: &Axis<'_>, values: impl Iterator<Item = f64>) -> Self {
        let shown = values.filter(|value| shows(axis.spacing, *value));
        let (low, high) =
            shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = match axis.spacing {
            _ if low > high => (if axis.spacing == AxisSpacing::Linear { 0.0 } else { 0.1 }, 1.0),
            AxisSpacing::Linear => (low.min(0.0), if high > 0.0 { high } else { 1.0 }),
            // The range is widened so that a single value does not fill the whole axis.
            AxisSpacing::Logarithmic if low == high => (low / 2.0, high * 2.0),
            AxisSpacing::Logarithmic => (low, high),
        };
        let mut scale = Self { spacing: axis.spacing, unit: axis.unit, low, high };
        if axis.spacing == AxisSpacing::Linear {
            let step = scale.step();
            scale.high = (high / step).ceil() * step;
            scale.low = (low / step).floor() * step;
        }
        scale
    }

    /// Returns the position of `value`, 0 at the low end and 1 at the high end; `None` for a value that the axis cannot
    /// show.
    pub(super) fn position(&self, value: f64) -> Option<f64> {
        if !shows(self.spacing, value) {
            return None;
        }
        let position = match self.spacing {
            AxisSpacing::Linear => (value - self.low) / (self.high - self.low),
            // The difference of logarithms is used because a ratio of extreme values overflows.
            AxisSpacing::Logarithmic => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
        };
        Some(position.clamp(0.0, 1.0))
    }

    /// Returns the values of the ticks, ascending, at most about `most`.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        match self.spacing {
            AxisSpacing::Linear => {
                let step = self.step();
                let first = (self.low / step).round() as i64;
                let last = (self.high / step).round() as i64;
                (first..=last).map(|at| at as f64 * step).collect()
            }
            AxisSpacing::Logarithmic => self.powers(most),
        }
    }

    /// Returns a round step that divides the range in about five.
    fn step(&self) -> f64 {
        let raw = (self.high - self.low) / 5.0;
        let magnitude = 10f64.powf(raw.log10().floor());
        let digit = [1.0, 2.0, 2.5, 5.0].into_iter().find(|digit| raw <= digit * magnitude * 1.0001);
        digit.unwrap_or(10.0) * magnitude
    }

    fn powers(&self, most: usize) -> Vec<f64> {
        let base: f64 = if self.unit == Unit::Bytes { 2.0 } else { 10.0 };
        let first = (self.low.ln() / base.ln() - 1e-9).ceil() as i32;
        let last = (self.high.ln() / base.ln() + 1e-9).floor() as i32;
        if last - first < 2 && self.unit != Unit::Bytes {
            return self.within_decades(most);
        }
        let stride = ((last - first) as usize / most.max(1) + 1) as i32;
        (first..=last).filter(|power| (power - first) % stride == 0).map(|power| base.powi(power)).collect()
    }

    /// Returns 1, 2 and 5 of each decade, or 1 and 3 where those are too many: for a range with hardly a power of ten
    /// in it.
    fn within_decades(&self, most: usize) -> Vec<f64> {
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let of = |digits: &[f64]| -> Vec<f64> {
            let values = (first..=last).flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
            values.filter(|&value| value >= self.low * 0.999 && value <= self.high * 1.001).collect()
        };
        let fine = of(&[1.0, 2.0, 5.0]);
        if fine.len() < most { fine } else { of(&[1.0, 3.0]) }
    }

    /// Formats the label of a tick.
    pub(super) fn label(&self, value: f64) -> String {
        show(self.unit, value)
    }
}

/// Returns true if an axis of this spacing can show `value`.
fn shows(spacing: AxisSpacing, value: f64) -> bool {
    value.is_finite() && (spacing == AxisSpacing::Linear || value > 0.0)
}

/// Formats `value` with its unit and at most three significant digits.
#[must_use]
pub fn show(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Plain => plain(value),
        Unit::Share => format!("{} %", plain(value * 100.0)),
        Unit::Bytes => scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"]),
        Unit::Nanoseconds => scaled(value, 1000.0, &["ns", "µs", "ms", "s"]),
    }
}

fn scaled(value: f64, base: f64, names: &[&str]) -> String {
    let mut value = value;
    let mut name = 0;
    // 999.6 would be rounded to 1000 of this unit, which is 1 of the next.
    while value.abs() >= base - 0.5 && name + 1 < names.len() {
        value /= base;
        name += 1;
    }
    format!("{} {}", plain(value), names[name])
}

fn plain(value: f64) -> String {
    let size = value.abs();
    if size >= 10_000.0 {
        return scaled_plain(value);
    }
    let decimals = match size {
        0.0 => 0,
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.1 => 2,
        // Values of 0.001 and less get as many decimals as show two digits.
        size => (1 - size.log10().floor() as i32).clamp(2, 9) as usize,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn scaled_plain(value: f64) -> String {
    let (value, name) = if value.abs() < 1e6 { (value / 1e3, "k") } else { (value / 1e6, "M") };
    let text = format!("{value:.1}");
    format!("{}{name}", text.strip_suffix(".0").unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn axis(spacing: AxisSpacing, unit: Unit) -> Axis<'static> {
        Axis { label: "x", spacing, unit }
    }

    fn ticks(spacing: AxisSpacing, unit: Unit, values: &[f64]) -> Vec<String> {
        let scale = Scale::over(&axis(spacing, unit), values.iter().copied());
        scale.ticks(8).into_iter().map(|tick| scale.label(tick)).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(AxisSpacing::Linear, Unit::Share, &[0.1, 0.366]), ["0 %", "10 %", "20 %", "30 %", "40 %"]);
        assert_eq!(ticks(AxisSpacing::Linear, Unit::Plain, &[3.3]), ["0", "1", "2", "3", "4"]);
        assert_eq!(
            ticks(AxisSpacing::Logarithmic, Unit::Nanoseconds, &[800.0, 2e6]),
            ["1 µs", "10 µs", "100 µs", "1 ms"]
        );
        assert_eq!(ticks(AxisSpacing::Logarithmic, Unit::Bytes, &[4096.0, 16384.0]), ["4 KiB", "8 KiB", "16 KiB"]);
        assert_eq!(ticks(AxisSpacing::Logarithmic, Unit::Plain, &[2.0, 6.0]), ["2", "5"]);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(show(Unit::Nanoseconds, 999.7), "1 µs");
        assert_eq!(show(Unit::Nanoseconds, 12_345.0), "12.3 µs");
        assert_eq!(show(Unit::Bytes, 3.5 * 1024.0 * 1024.0 * 1024.0), "3.5 GiB");
        assert_eq!(show(Unit::Share, 0.0001), "0.01 %");
        assert_eq!((show(Unit::Plain, 12_031.0), show(Unit::Plain, 0.0)), ("12k".into(), "0".into()));
    }

    proptest! {
        #[test]
        fn any_values_have_a_few_finite_ticks(values in prop::collection::vec(any::<f64>(), 0..20), log: bool) {
            let spacing = if log { AxisSpacing::Logarithmic } else { AxisSpacing::Linear };
            let values: Vec<f64> = values.into_iter().map(|value| value % 1e15).collect();
            for unit in [Unit::Plain, Unit::Bytes, Unit::Nanoseconds] {
                let scale = Scale::over(&axis(spacing, unit), values.iter().copied());
                let ticks = scale.ticks(8);
                prop_assert!(ticks.len() <= 16, "{ticks:?}");
                for value in values.iter().chain(&ticks) {
                    if let Some(position) = scale.position(*value) {
                        prop_assert!((0.0..=1.0).contains(&position), "{value} at {position}");
                    }
                }
            }
        }
    }
}
