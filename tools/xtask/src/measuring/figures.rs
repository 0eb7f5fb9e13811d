//! `cargo x figures`: renders docs/performance.md from docs/results/figures.toml.
//!
//! The file holds the introduction and the method of the page, a `[[machine]]` for each machine, and a `[[figure]]` for
//! each kind of measurement, with date, machine and command. Figures of one section stand together, and the page has
//! them in the order of the file. A target that is missed needs a note with the cause.

mod entry;
mod error;
mod page;

use std::collections::BTreeSet;
use std::fs;

use toml::de::{DeTable, DeValue};

use entry::Entry;
use error::{Fault, SourceError};

use crate::process::Failure;
use crate::tidy::Violation;
use crate::tidy::documents::links::slug;
use crate::tidy::sources::tree::Tree;
use crate::workspace::Workspace;

/// Source of the page.
const SOURCE: &str = "docs/results/figures.toml";
/// The rendered page.
const PAGE: &str = "docs/performance.md";

/// Renders the page.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let source = workspace.root.join(SOURCE);
    let text = fs::read_to_string(&source).map_err(|error| Failure::new(format!("{SOURCE}: {error}")))?;
    let results = Results::parse(&text).map_err(|problem| Failure::new(format!("{SOURCE}: {problem}")))?;
    fs::write(workspace.root.join(PAGE), results.render()).map_err(|error| Failure::new(format!("{PAGE}: {error}")))?;
    println!("{PAGE}: {} figures", results.figures.len());
    Ok(())
}

/// Checks that the page is what its source says: the next rendering would lose what was written to the page.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let text = |path: &str| tree.file(path).map(|file| file.text.as_str()).unwrap_or_default();
    let wanted = match Results::parse(text(SOURCE)) {
        Ok(results) => results.render(),
        Err(problem) => return out.push(Violation::new(SOURCE, 1, problem.to_string())),
    };
    let found = text(PAGE);
    if found != wanted {
        let same = found.lines().zip(wanted.lines()).take_while(|(found, wanted)| found == wanted).count();
        let what = format!("is not what {SOURCE} says; write it there and run `cargo x figures`");
        out.push(Violation::new(PAGE, same + 1, what));
    }
}

/// Contents of the source.
struct Results {
    introduction: String,
    method: String,
    machines: Vec<Machine>,
    figures: Vec<Figure>,
}

struct Machine {
    id: String,
    processor: String,
    memory: String,
    kernel: String,
    compiler: String,
    notes: String,
}

/// The latest measurement of one kind.
struct Figure {
    section: String,
    title: String,
    /// Sentence that says what is compared with what.
    what: String,
    outcome: Outcome,
    target: Option<Target>,
    /// `YYYY-MM-DD`.
    date: String,
    /// Identity of a [`Machine`].
    machine: String,
    command: String,
    /// Conditions, and the cause of a miss.
    note: Option<String>,
}

enum Outcome {
    Value(String),
    Table { columns: Vec<String>, rows: Vec<Vec<String>> },
}

struct Target {
    text: String,
    /// None where the figure decides nothing about its target.
    is_met: Option<bool>,
}

impl Results {
    /// Reads the source. The error names the figure and the key.
    fn parse(text: &str) -> Result<Self, SourceError> {
        let root = DeTable::parse(text).map_err(SourceError::Syntax)?.into_inner();
        let root = Entry { name: "the file".to_string(), table: &root };
        root.check_keys(&["introduction", "method", "machine", "figure"])?;
        let machines = root.entries("machine")?.iter().map(Machine::parse).collect::<Result<Vec<_>, _>>()?;
        let ids: BTreeSet<&str> = machines.iter().map(|machine| machine.id.as_str()).collect();
        let mut figures: Vec<Figure> = Vec::new();
        let mut names: BTreeSet<String> = BTreeSet::new();
        let mut headings: BTreeSet<String> = BTreeSet::new();
        for entry in root.entries("figure")? {
            let figure = Figure::parse(&entry)?;
            if !ids.contains(figure.machine.as_str()) {
                return Err(entry.error(Fault::NoMachine(figure.machine)));
            }
            if !names.insert(entry.text("id")?) || !headings.insert(slug(&figure.title)) {
                return Err(entry.error(Fault::Twice));
            }
            let is_next = figures.last().is_none_or(|last| last.section != figure.section);
            if is_next && !headings.insert(slug(&figure.section)) {
                return Err(entry.error(Fault::Section(figure.section)));
            }
            figures.push(figure);
        }
        Ok(Self { introduction: root.text("introduction")?, method: root.text("method")?, machines, figures })
    }
}

impl Machine {
    fn parse(entry: &Entry<'_>) -> Result<Self, SourceError> {
        entry.check_keys(&["id", "processor", "memory", "kernel", "compiler", "notes"])?;
        Ok(Self {
            id: entry.text("id")?,
            processor: entry.text("processor")?,
            memory: entry.text("memory")?,
            kernel: entry.text("kernel")?,
            compiler: entry.text("compiler")?,
            notes: entry.text("notes")?,
        })
    }
}

impl Figure {
    fn parse(entry: &Entry<'_>) -> Result<Self, SourceError> {
        const KEYS: [&str; 13] = [
            "id", "section", "title", "what", "value", "columns", "rows", "target", "met", "date", "machine",
            "command", "note",
        ];
        entry.check_keys(&KEYS)?;
        let figure = Self {
            section: entry.text("section")?,
            title: entry.text("title")?,
            what: entry.text("what")?,
            outcome: Outcome::parse(entry)?,
            target: Target::parse(entry)?,
            date: entry.text("date")?,
            machine: entry.text("machine")?,
            command: entry.text("command")?,
            note: entry.optional_text("note")?,
        };
        if !is_date(&figure.date) {
            return Err(entry.error(Fault::NotDate(figure.date)));
        }
        let is_missed = figure.target.as_ref().is_some_and(|target| target.is_met == Some(false));
        if is_missed && figure.note.is_none() {
            return Err(entry.error(Fault::NoCause));
        }
        Ok(figure)
    }
}

impl Outcome {
    fn parse(entry: &Entry<'_>) -> Result<Self, SourceError> {
        if let Some(value) = entry.optional_text("value")? {
            let is_alone = ["columns", "rows"].iter().all(|key| entry.table.get(*key).is_none());
            return if is_alone { Ok(Self::Value(value)) } else { Err(entry.error(Fault::ValueAndRows)) };
        }
        let columns = entry.list("columns", Entry::cell)?;
        let rows = entry.list("rows", |value| {
            let cells = value.as_array().ok_or(Fault::NotRow)?;
            cells.iter().map(|cell| Entry::cell(cell.get_ref())).collect::<Result<Vec<String>, _>>()
        })?;
        if let Some(row) = rows.iter().find(|row| row.len() != columns.len()) {
            return Err(entry.error(Fault::Cells { row: row.clone(), columns: columns.len() }));
        }
        Ok(Self::Table { columns, rows })
    }
}

impl Target {
    fn parse(entry: &Entry<'_>) -> Result<Option<Self>, SourceError> {
        let is_met = match entry.table.get("met").map(|value| value.get_ref()) {
            None => None,
            Some(DeValue::Boolean(is_met)) => Some(*is_met),
            Some(_) => return Err(entry.error(Fault::NotMet)),
        };
        match entry.optional_text("target")? {
            Some(text) => Ok(Some(Self { text, is_met })),
            None if is_met.is_some() => Err(entry.error(Fault::NoTarget)),
            None => Ok(None),
        }
    }
}

fn is_date(text: &str) -> bool {
    let is_digits = |part: &str, count: usize| part.len() == count && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> = text.split('-').collect();
    parts.len() == 3 && is_digits(parts[0], 4) && is_digits(parts[1], 2) && is_digits(parts[2], 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing;

    const SOURCE_TEXT: &str = r#"
introduction = "Figures."
method = "Turns.\n\n* One\n  and more.\n* Two."
[[machine]]
id = "small"
processor = "Two cores"
memory = "24 GiB"
kernel = "Linux"
compiler = "Rust"
notes = "Quiet."
[[figure]]
id = "first"
section = "Transfers"
title = "A stream, 1 MiB"
what = "Ours beside theirs."
columns = ["side", "GB/s"]
rows = [["ours", "1.0"], ["theirs", ""]]
target = "at least 1"
met = false
date = "2026-11-20"
machine = "small"
command = "cargo x bench a"
note = "Two cores do all of it."
[[figure]]
id = "second"
section = "Transfers"
title = "Idle"
what = "Share of a core."
value = "0.4 %"
date = "2026-11-20"
machine = "small"
command = "cargo x bench idle"
"#;

    const RENDERED: &str = "# Performance

Figures.

## Method

Turns.

* One and more.
* Two.

## Machines

| machine | processor | memory | kernel | compiler | notes |
|---|---|---|---|---|---|
| `small` | Two cores | 24 GiB | Linux | Rust | Quiet. |

## Missed targets

Of 2 figures, 0 meet their target and 1 miss it, in whole or in part; the others have no target. The cause of a miss
stands with the figure.

| missed | target |
|---|---|
| [A stream, 1 MiB](#a-stream-1-mib) | at least 1 |

## Transfers

### A stream, 1 MiB

Ours beside theirs.

| side | GB/s |
|---|---|
| ours | 1.0 |
| theirs | |

* Target: at least 1: **missed**.
* Measured 2026-11-20 on [`small`](#machines): `cargo x bench a`

Two cores do all of it.

### Idle

Share of a core.

**0.4 %**

* Measured 2026-11-20 on [`small`](#machines): `cargo x bench idle`
";

    #[test]
    fn a_page_that_was_edited_is_found() {
        let found = |source: &str, page: &str| testing::found(check, &[(SOURCE, source), (PAGE, page)]);
        assert!(found(SOURCE_TEXT, RENDERED).is_empty());
        let edited = RENDERED.replace("Share of a core.", "Share of two cores.");
        let violations = found(SOURCE_TEXT, &edited);
        let line = 1 + RENDERED.lines().take_while(|line| *line != "Share of a core.").count();
        assert_eq!(violations.iter().map(|found| (&*found.path, found.line)).collect::<Vec<_>>(), [(PAGE, line)]);
        assert_eq!(found("no source", RENDERED)[0].path, SOURCE);
    }

    #[test]
    fn a_source_is_rendered() {
        let results = Results::parse(SOURCE_TEXT).unwrap();
        let rendered = results.render();
        assert_eq!(rendered, RENDERED, "{rendered}");
    }

    #[test]
    fn a_figure_has_date_machine_and_command_and_a_miss_its_cause() {
        let lines = ["date = \"2026-11-20\"", "machine = \"small\"", "command = \"cargo x bench a\"", "note = "];
        for line in lines {
            let at = SOURCE_TEXT.find(line).unwrap();
            let end = at + SOURCE_TEXT[at..].find('\n').unwrap();
            let without = format!("{}{}", &SOURCE_TEXT[..at], &SOURCE_TEXT[end..]);
            let problem = Results::parse(&without).err().unwrap().to_string();
            let key = line.split(' ').next().unwrap();
            assert!(problem.contains("figure `first`") && problem.contains(key), "{line}: {problem}");
        }
    }

    #[test]
    fn malformed_figures_are_refused() {
        for (there, instead, wanted) in [
            ("id = \"second\"", "id = \"first\"", "another figure"),
            ("title = \"Idle\"", "title = \"A stream 1 MiB\"", "another figure"),
            ("machine = \"small\"", "machine = \"large\"", "no machine `large`"),
            ("2026-11-20", "yesterday", "is no date"),
            ("[\"ours\", \"1.0\"]", "[\"ours\"]", "1 cells for 2 columns"),
            ("\"1.0\"", "1.0", "a cell is a string"),
            ("target = \"at least 1\"\n", "", "`met` without a target"),
            ("note = ", "notes = ", "unknown key `notes`"),
            ("value = \"0.4 %\"\n", "", "no list `columns`"),
        ] {
            let problem = Results::parse(&SOURCE_TEXT.replacen(there, instead, 1)).err().unwrap().to_string();
            assert!(problem.contains(wanted), "{instead}: {problem}");
        }
        let second = &SOURCE_TEXT[SOURCE_TEXT.rfind("[[figure]]").unwrap()..];
        let other = second.replace("second", "third").replace("Idle", "Other").replace("Transfers", "Others");
        let last = second.replace("second", "fourth").replace("Idle", "Last");
        let problem = Results::parse(&format!("{SOURCE_TEXT}{other}{last}")).err().unwrap().to_string();
        assert!(problem.contains("has figures elsewhere"), "{problem}");
    }
}
