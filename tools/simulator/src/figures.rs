//! Figures and tables of Mooncake's papers, reproduced by the simulator.
//!
//! Each line has the paper's value (FAST'25, decoded from its drawings, or the arXiv version for early rejection), the
//! simulator's, and the difference; each figure explains its differences in a sentence. No parameter is tuned to match:
//! the cost of a prefill is the fit to Figure 14, decodes follow Figure 14 too, and everything else is as described in
//! the paper.

mod caches;
mod clusters;
pub(crate) mod report;

use kvplane_tools::trace::Request;
use serde::Serialize;

/// Compared value.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Line {
    /// Description of the value.
    pub(crate) label: String,
    /// Value of the paper, if it has one.
    pub(crate) paper: Option<f64>,
    /// Value of the simulator.
    pub(crate) ours: Option<f64>,
}

impl Line {
    fn new(label: impl Into<String>, paper: f64, ours: f64) -> Self {
        Self { label: label.into(), paper: Some(paper), ours: Some(ours) }
    }

    fn extra(label: impl Into<String>, ours: f64) -> Self {
        Self { label: label.into(), paper: None, ours: Some(ours) }
    }

    /// Returns the simulator's value minus the paper's.
    #[must_use]
    pub(crate) fn difference(&self) -> Option<f64> {
        Some(self.ours? - self.paper?)
    }
}

/// Line of a plot.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Curve {
    /// Name in the legend.
    pub(crate) name: String,
    /// Points of the line.
    pub(crate) points: Vec<(f64, f64)>,
    /// The line is taken from the paper.
    pub(crate) paper: bool,
}

/// Figure or table of a paper.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    /// Name in the paper.
    pub(crate) name: &'static str,
    /// Title, with units.
    pub(crate) title: &'static str,
    /// Compared values.
    pub(crate) lines: Vec<Line>,
    /// Explanation of the differences.
    pub(crate) why: &'static str,
    /// Axes of the plot: label and true for a logarithmic scale, then the vertical label. Unused without curves.
    pub(crate) axes: (&'static str, bool, &'static str),
    /// Lines of the plot.
    pub(crate) curves: Vec<Curve>,
}

/// Traces that figures are computed from; a figure whose trace is missing is left out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traces<'a> {
    /// Mooncake's conversation trace.
    pub(crate) conversation: Option<&'a [Request]>,
    /// Mooncake's synthetic trace.
    pub(crate) synthetic: Option<&'a [Request]>,
}

impl<'a> Traces<'a> {
    /// Returns name, requests and column in the tables of each available trace.
    fn each(&self) -> impl Iterator<Item = (&'static str, &'a [Request], usize)> {
        let all = [("conversation", self.conversation, 0), ("synthetic", self.synthetic, 1)];
        all.into_iter().filter_map(|(name, trace, at)| Some((name, trace?, at)))
    }
}

/// Computes all figures, one after the other, and passes each to `done`.
pub(crate) fn all(traces: Traces<'_>, mut done: impl FnMut(Figure)) {
    let makers: [fn(Traces<'_>) -> Option<Figure>; 9] = [
        caches::table_2,
        clusters::figure_5,
        caches::figure_8,
        caches::figure_9,
        clusters::figure_10,
        clusters::figure_11,
        clusters::figure_13,
        clusters::figure_15,
        clusters::early_rejection,
    ];
    makers.into_iter().filter_map(|make| make(traces)).for_each(&mut done);
}

#[cfg(test)]
mod tests {
    use kvplane_tools::trace::generate::{Shape, generate};

    use super::*;

    #[test]
    fn figures_come_in_all_forms() {
        let trace = generate(Shape::Conversation, 150, 3).unwrap();
        let traces = Traces { conversation: Some(&trace.requests), synthetic: Some(&trace.requests) };
        let mut figures = Vec::new();
        all(traces, |figure| figures.push(figure));
        assert_eq!(figures.len(), 9);
        for figure in &figures {
            assert!(!figure.lines.is_empty() && !figure.why.is_empty(), "{}", figure.name);
            assert!(figure.lines.iter().all(|line| line.ours.is_some_and(f64::is_finite)), "{figure:?}");
        }
        let text = report::to_text(&figures);
        assert!(text.contains("Figure 5") && text.contains("19.650"), "{text}");
        assert!(report::to_markdown(&figures).contains("| random | 19.650 |"));
        assert_eq!(report::to_json(&figures)["figures"][0]["name"], "Table 2");
        assert!(report::page(&figures).finish().contains("<svg"));
    }
}
