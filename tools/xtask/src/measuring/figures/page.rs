//! Renders the page of figures: Markdown, filled to a width.

use std::fmt::Write;

use super::{Figure, Machine, Outcome, Results, Target};
use crate::tidy::documents::links::slug;

const WIDTH_CHARS: usize = 120;

impl Results {
    /// The page.
    pub(super) fn render(&self) -> String {
        let mut page = format!("# Performance\n\n{}\n## Method\n\n{}", wrap(&self.introduction), wrap(&self.method));
        page += "\n## Machines\n\n";
        page += &header(&["machine", "processor", "memory", "kernel", "compiler", "notes"]);
        for Machine { id, processor, memory, kernel, compiler, notes } in &self.machines {
            page += &row(&[&format!("`{id}`"), processor, memory, kernel, compiler, notes]);
        }
        self.render_targets(&mut page);
        let mut section = "";
        for figure in &self.figures {
            if section != figure.section {
                section = &figure.section;
                write!(page, "\n## {section}\n").unwrap();
            }
            figure.render(&mut page);
        }
        page
    }

    /// The list of missed targets.
    fn render_targets(&self, page: &mut String) {
        let with_outcome = |is_met| {
            let has = move |figure: &&Figure| figure.target.as_ref().is_some_and(|target| target.is_met == is_met);
            self.figures.iter().filter(has)
        };
        let (met, undecided) = (with_outcome(Some(true)).count(), with_outcome(None).count());
        let missed: Vec<&Figure> = with_outcome(Some(false)).collect();
        let undecided = match undecided {
            0 => String::new(),
            count => format!("; {count} cannot be judged by the latest measurement"),
        };
        *page += "\n## Missed targets\n\n";
        *page += &wrap(&format!(
            "Of {} figures, {met} meet their target and {} miss it, in whole or in part{undecided}; the others have \
             no target. The cause of a miss stands with the figure.",
            self.figures.len(),
            missed.len(),
        ));
        page.push('\n');
        *page += &header(&["missed", "target"]);
        for figure in missed {
            let link = format!("[{}](#{})", figure.title, slug(&figure.title));
            *page += &row(&[link.as_str(), figure.target.as_ref().map_or("", |target| target.text.as_str())]);
        }
    }
}

impl Figure {
    fn render(&self, page: &mut String) {
        write!(page, "\n### {}\n\n{}\n", self.title, wrap(&self.what)).unwrap();
        match &self.outcome {
            Outcome::Value(value) => *page += &wrap(&format!("**{value}**")),
            Outcome::Table { columns, rows } => {
                *page += &header(columns);
                rows.iter().for_each(|cells| *page += &row(cells));
            }
        }
        page.push('\n');
        if let Some(Target { text, is_met }) = &self.target {
            let outcome = match is_met {
                Some(true) => ": met",
                Some(false) => ": **missed**",
                None => "",
            };
            *page += &wrap(&format!("* Target: {text}{outcome}."));
        }
        *page += &wrap(&format!("* Measured {} on [`{}`](#machines): `{}`", self.date, self.machine, self.command));
        if let Some(note) = &self.note {
            write!(page, "\n{}", wrap(note)).unwrap();
        }
    }
}

/// A row of a table, with its line end.
fn row(cells: &[impl AsRef<str>]) -> String {
    let mut out = String::from("|");
    for cell in cells.iter().map(|cell| cell.as_ref().replace('\n', " ")) {
        out += &if cell.is_empty() { " |".to_string() } else { format!(" {cell} |") };
    }
    out + "\n"
}

/// The names of a table's columns and the line below them.
fn header(columns: &[impl AsRef<str>]) -> String {
    format!("{}|{}\n", row(columns), "---|".repeat(columns.len()))
}

/// Paragraphs and items (`* `) of a text, filled to the page's width.
fn wrap(text: &str) -> String {
    let mut out = String::new();
    for paragraph in text.split("\n\n") {
        if !out.is_empty() {
            out.push('\n');
        }
        let mut block: Vec<&str> = Vec::new();
        for line in paragraph.lines().map(str::trim) {
            if line.starts_with("* ") && !block.is_empty() {
                out += &fill(&block.join(" "));
                block.clear();
            }
            block.push(line);
        }
        out += &fill(&block.join(" "));
    }
    out
}

/// A paragraph or an item, filled; code in backticks is not broken.
fn fill(text: &str) -> String {
    let indent = if text.starts_with("* ") { "  " } else { "" };
    let (mut out, mut width) = (String::new(), 0);
    for word in words(text) {
        let length = word.chars().count();
        if width > 0 && width + 1 + length > WIDTH_CHARS {
            out.push('\n');
            out += indent;
            width = indent.len();
        } else if width > 0 {
            out.push(' ');
            width += 1;
        }
        out += word;
        width += length;
    }
    out + "\n"
}

/// Words of a text; a blank in backticks ends none.
fn words(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let is_end = |c: char| {
        is_code ^= c == '`';
        c == ' ' && !is_code
    };
    text.split(is_end).filter(|word| !word.is_empty()).collect()
}
