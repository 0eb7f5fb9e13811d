//! Shapes and text of an SVG, escaped; sizes in pixels.

use crate::draw::escape;

/// Width of the drawing.
pub(super) const WIDTH: u32 = 1_280;

const STYLE: &str = "\
text{font-family:'Inter','Segoe UI',system-ui,'DejaVu Sans',sans-serif;fill:#1f2937}\
.title{font-size:22px;font-weight:600}\
.heading{font-size:15px;font-weight:600}\
.small{font-size:12px;fill:#4b5563}\
.tiny{font-size:10px;fill:#4b5563}\
.label{font-size:12px;font-weight:600}\
.core{font-size:9.5px;text-anchor:middle}\
.oncore{font-size:9.5px;text-anchor:middle;fill:#ffffff;font-weight:600}\
.cell{font-size:12px;text-anchor:middle}\
.head{font-size:12px;font-weight:600;text-anchor:middle}\
.subhead{font-size:10px;text-anchor:middle;fill:#6b7280}\
.right{font-size:12px;font-weight:600;text-anchor:end}\
.panel{fill:#f8fafc;stroke:#cbd5e1}\
.complex{fill:#ffffff;stroke:#94a3b8}\
.switch{fill:#eef2f7;stroke:#94a3b8;stroke-dasharray:4 3}\
.shard{fill:#2563eb;stroke:#1d4ed8}\
.housekeeping{fill:#cbd5e1;stroke:#94a3b8}\
.free{fill:#ffffff;stroke:#94a3b8}\
.denied{fill:#ffffff;stroke:#cbd5e1;stroke-dasharray:2 2}\
.gpu{fill:#dcfce7;stroke:#16a34a}\
.nic{fill:#dbeafe;stroke:#2563eb}\
.nicoff{fill:#f3f4f6;stroke:#9ca3af;stroke-dasharray:3 2}\
.drive{fill:#fef3c7;stroke:#d97706}\
.near0{fill:#15803d}.near1{fill:#4ade80}.near2{fill:#bbf7d0}.near3{fill:#e5e7eb}.near4{fill:#fed7aa}\
.near5{fill:#bfdbfe}.held{fill:#fecaca}.none{fill:#ffffff;stroke:#e5e7eb}\
.light{font-size:12px;text-anchor:middle;fill:#ffffff;font-weight:600}";

/// A rectangle in the drawing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rect {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// A drawing under construction, or a part of one that is placed later.
#[derive(Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Adds a box with rounded corners.
    pub(super) fn rect(&mut self, rect: &Rect, class: &str, title: &str) {
        let Rect { x, y, width, height } = rect;
        let open =
            format!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"4\" class=\"{class}\"");
        self.body.push_str(&open);
        if title.is_empty() {
            self.body.push_str("/>\n");
        } else {
            self.body.push_str(&format!("><title>{}</title></rect>\n", escape(title)));
        }
    }

    pub(super) fn text(&mut self, x: u32, y: u32, class: &str, text: &str) {
        self.body.push_str(&format!("<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{}</text>\n", escape(text)));
    }

    /// Adds text broken into lines of `width`; returns the position of the last line.
    pub(super) fn paragraph(&mut self, x: u32, y: u32, width: u32, class: &str, text: &str) -> u32 {
        // An average letter of the small size is seven pixels wide.
        let letters = (width / 7) as usize;
        let mut lines: Vec<String> = vec![String::new()];
        for word in text.split_whitespace() {
            let last = lines.last_mut().map_or(0, |line| line.chars().count());
            if last > 0 && last + 1 + word.chars().count() > letters {
                lines.push(String::new());
            }
            if let Some(line) = lines.last_mut() {
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
        }
        let mut at = y;
        for (index, line) in lines.iter().enumerate() {
            at = y + 16 * index as u32;
            self.text(x, at, class, line);
        }
        at
    }

    /// Adds a part at a position.
    pub(super) fn place(&mut self, part: &Self, x: u32, y: u32) {
        self.body.push_str(&format!("<g transform=\"translate({x} {y})\">\n{}</g>\n", part.body));
    }

    pub(super) fn finish(self, height: u32) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\">\n<style>{STYLE}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Truncates a text to `letters` characters, with a mark.
pub(super) fn fit(text: &str, letters: usize) -> String {
    if text.chars().count() <= letters {
        return text.to_owned();
    }
    text.chars().take(letters.saturating_sub(1)).chain(['…']).collect()
}
