//! Rule: metrics and flags of `kvplane` that pages name are in the generated reference (docs/reference).

use std::collections::BTreeSet;

use crate::tidy::Violation;
use crate::tidy::sources::tree::Tree;

const METRICS: &str = "docs/reference/metrics.md";
const FLAGS: &str = "docs/reference/flags.md";

/// Checks every page except dated records and the reference itself.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let (Some(metrics), Some(flags)) = (tree.file(METRICS), tree.file(FLAGS)) else { return };
    let flags: BTreeSet<&str> = words(&flags.text).filter(|word| word.starts_with("--")).collect();
    let metrics: BTreeSet<&str> = words(&metrics.text).filter(|word| word.starts_with("kvplane_")).collect();
    let pages = tree.files.iter().filter(|file| {
        file.path.ends_with(".md") && !file.path.starts_with("docs/reference/") && !file.is_dated_record()
    });
    for page in pages {
        for (index, line) in page.text.lines().enumerate() {
            for name in words(line).filter(|word| has_family(word) && !is_known(&metrics, word)) {
                let message = format!("the metric `{name}` does not exist; see {METRICS}");
                out.push(Violation::new(&page.path, index + 1, message));
            }
            for command in commands(line) {
                for flag in
                    words(command).filter(|word| word.starts_with("--") && *word != "--help" && !flags.contains(word))
                {
                    let message = format!("`kvplane` has no flag `{flag}`; see {FLAGS}");
                    out.push(Violation::new(&page.path, index + 1, message));
                }
            }
        }
    }
}

/// Returns the words of letters, digits, `_` and `-`.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-').filter(|word| !word.is_empty())
}

/// Returns true for a metric's name, of the families that the reference lists.
fn has_family(word: &str) -> bool {
    [
        "kvplane_shard_",
        "kvplane_tier_",
        "kvplane_shared_",
        "kvplane_cluster_",
        "kvplane_control_",
        "kvplane_conductor_",
        "kvplane_transfer_",
    ]
    .iter()
    .any(|family| word.starts_with(family) && word.len() > family.len())
}

/// Returns true for a metric, a series of a histogram, or a prefix that ends in `_`.
fn is_known(metrics: &BTreeSet<&str>, word: &str) -> bool {
    let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word);
    metrics.contains(word)
        || metrics.contains(family)
        || word.ends_with('_') && metrics.iter().any(|metric| metric.starts_with(word))
}

/// Returns the command lines of `kvplane` in a line: code spans, and lines of blocks, that begin with it.
fn commands(line: &str) -> impl Iterator<Item = &str> {
    let is_one = |text: &&str| text.trim_start().starts_with("kvplane ");
    let block = Some(line).filter(is_one).map(|line| line.split('#').next().unwrap_or(line));
    line.split('`').skip(1).step_by(2).filter(is_one).chain(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::found;

    #[test]
    fn names_in_pages_are_those_of_the_reference() {
        let page = "`kvplane_tier_reads`, `kvplane_tier_`, `kvplane_shard_seconds_bucket`, not kvplane_tier_lost.\n\
            `kvplane node --pool 1G --gone`\nkvplane dev --pool 1G # --comment\n`cargo x --else`\n";
        let files = [
            (METRICS, "| `kvplane_tier_reads` |\n| `kvplane_shard_seconds` |\n"),
            (FLAGS, "| `--pool BYTES` |\n"),
            ("docs/a.md", page),
        ];
        let found: Vec<String> = found(check, &files)
            .into_iter()
            .map(|found| format!("{}:{} {}", found.path, found.line, found.message))
            .collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("docs/a.md:1 the metric `kvplane_tier_lost`"), "{found:?}");
        assert!(found[1].contains("docs/a.md:2 `kvplane` has no flag `--gone`"), "{found:?}");
    }
}
