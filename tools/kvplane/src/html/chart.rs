//! Line chart as one `<figure>`: title, legend, and an SVG that scales with the page.
//!
//! The drawing is 480 by 300 units and the style sheet enlarges its text where the page is narrow, so that it is
//! legible at the width of a phone as well as in half a desktop window. Points closer together than the eye can tell
//! are dropped, so a chart's size is bounded by its width, not by the data.

use std::fmt::Write as _;

use kvplane_topology::draw::escape;

use super::scale::{Axis, Scale, show};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 52.0;
/// Number of colours in the style sheet; further series start again with the first.
const COLORS: usize = 8;
/// Points that are closer than this are drawn as one, in drawing units.
const MERGE: f64 = 0.4;
/// Series with at most this many points show them as dots.
const DOTTED: usize = 24;

/// Line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points, x ascending. Values that an axis cannot show are skipped.
    pub points: Vec<(f64, f64)>,
    /// Index of the colour, from 0; lines that belong together share one.
    pub color: usize,
    /// Draw a dashed line: a model or a bound, not a measurement.
    pub dashed: bool,
}

/// Line chart.
#[derive(Clone, Debug)]
pub struct Chart<'a> {
    /// Identifier that is unique on the page, of letters, digits and dashes.
    pub id: &'a str,
    /// Title above the chart.
    pub title: &'a str,
    /// Description in a sentence, for readers who cannot see the chart.
    pub description: &'a str,
    /// Horizontal axis.
    pub x: Axis<'a>,
    /// Vertical axis.
    pub y: Axis<'a>,
    /// Lines of the chart.
    pub series: &'a [Series],
}

impl Chart<'_> {
    /// Renders the chart as an HTML figure.
    #[must_use]
    pub fn to_html(&self) -> String {
        let mut out = String::new();
        let (id, title) = (escape(self.id), escape(self.title));
        let _ = write!(out, "<figure><figcaption>{title}</figcaption>{}", self.legend());
        let _ = write!(
            out,
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
             <title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{}{}</desc>",
            escape(self.description),
            escape(&self.last_values()),
        );
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        if points().next().is_none() {
            let _ = write!(out, "<text x=\"{}\" y=\"{}\" class=\"mid\">no data</text>", WIDTH / 2.0, HEIGHT / 2.0);
        } else {
            let x = Scale::over(&self.x, points().map(|point| point.0));
            let y = Scale::over(&self.y, points().map(|point| point.1));
            self.axes(&mut out, &x, &y);
            for series in self.series {
                line(&mut out, series, &x, &y);
            }
        }
        out.push_str("</svg></figure>\n");
        out
    }

    fn legend(&self) -> String {
        let mut out = String::from("<ul class=\"legend\">");
        for series in self.series {
            let dash = if series.dashed { " dashed" } else { "" };
            let _ = write!(
                out,
                "<li><span class=\"key c{}{dash}\"></span>{}</li>",
                series.color % COLORS,
                escape(&series.name)
            );
        }
        out.push_str("</ul>");
        out
    }

    /// Describes the end of each line in words.
    fn last_values(&self) -> String {
        let mut words = String::new();
        for series in self.series {
            if let Some(&(x, y)) = series.points.last() {
                let _ = write!(words, " {}: {} at {}.", series.name, show(self.y.unit, y), show(self.x.unit, x));
            }
        }
        words
    }

    fn axes(&self, out: &mut String, x: &Scale, y: &Scale) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for tick in y.ticks(7) {
            let Some(position) = y.position(tick) else { continue };
            let at = bottom - position * (bottom - TOP);
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" class=\"end\">{}</text>",
                LEFT - 6.0,
                at + 5.0,
                escape(&y.label(tick))
            );
        }
        for tick in x.ticks(6) {
            let Some(position) = x.position(tick) else { continue };
            let at = LEFT + position * (right - LEFT);
            // A centered label at the right edge would be cut off.
            let class = if at > right - 20.0 { "end" } else { "mid" };
            let text_at = if at > right - 20.0 { WIDTH - 2.0 } else { at };
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{at:.1} {TOP}V{bottom}\"/>\
                 <text x=\"{text_at:.1}\" y=\"{:.1}\" class=\"{class}\">{}</text>",
                bottom + 20.0,
                escape(&x.label(tick))
            );
        }
        let _ = write!(
            out,
            "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" class=\"mid name\">{}</text>\
             <text x=\"4\" y=\"18\" class=\"name\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 8.0,
            escape(self.x.label),
            escape(self.y.label)
        );
    }
}

/// Draws the path of one series, and its dots if they are few.
fn line(out: &mut String, series: &Series, x: &Scale, y: &Scale) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let place = |&(px, py): &(f64, f64)| {
        Some((LEFT + x.position(px)? * (right - LEFT), bottom - y.position(py)? * (bottom - TOP)))
    };
    let mut placed: Vec<(f64, f64)> = Vec::new();
    for point in series.points.iter().filter_map(place) {
        let near = |last: &(f64, f64)| (last.0 - point.0).abs() < MERGE && (last.1 - point.1).abs() < MERGE;
        if !placed.last().is_some_and(near) {
            placed.push(point);
        }
    }
    let color = series.color % COLORS;
    let dash = if series.dashed { " dashed" } else { "" };
    if placed.len() > 1 {
        let _ = write!(out, "<path class=\"line s{color}{dash}\" d=\"");
        for (at, (px, py)) in placed.iter().enumerate() {
            let _ = write!(out, "{}{px:.1} {py:.1}", if at == 0 { "M" } else { "L" });
        }
        out.push_str("\"/>");
    }
    if placed.len() <= DOTTED {
        for (px, py) in &placed {
            let _ = write!(out, "<circle class=\"dot f{color}\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"3\"/>");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scale::{AxisSpacing, Unit};
    use super::super::well_formed;
    use super::*;

    fn chart(series: &[Series]) -> String {
        let axis = |label, spacing, unit| Axis { label, spacing, unit };
        Chart {
            id: "c",
            title: "a < b & \"c\"",
            description: "About <it>.",
            x: axis("x <s>", AxisSpacing::Logarithmic, Unit::Nanoseconds),
            y: axis("y", AxisSpacing::Linear, Unit::Share),
            series,
        }
        .to_html()
    }

    fn series(points: Vec<(f64, f64)>) -> Series {
        Series { name: "<b>".into(), points, color: 9, dashed: true }
    }

    #[test]
    fn it_is_well_formed_whatever_the_data() {
        let odd = [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e-300, 1.0, 1e300];
        let points = odd.iter().flat_map(|&x| odd.map(|y| (x, y))).filter(|p| p.0 < 1e299 && p.1 < 1e299);
        for points in [vec![], vec![(1.0, 1.0)], vec![(0.0, 0.0)], points.collect()] {
            let html = chart(&[series(points)]);
            well_formed::check(html.trim());
            assert!(html.contains("aria-labelledby=\"c-t c-d\"") && html.contains("<title id=\"c-t\">a &lt; b"));
        }
        assert!(chart(&[]).contains("no data"));
    }

    #[test]
    fn dense_data_does_not_grow_the_drawing() {
        let dense = |count: u32| {
            chart(&[series((1..count).map(|at| (f64::from(at), f64::from(at) / f64::from(count))).collect())]).len()
        };
        assert!(dense(1_000_000) < 40_000, "{}", dense(1_000_000));
    }
}
