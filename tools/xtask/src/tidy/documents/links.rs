//! Rule: links in pages lead to files and headings that exist, and every page can be reached from the README.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::Violation;
use crate::tidy::sources::tree::{File, Tree};

const START: &str = "README.md";

/// Checks every page.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let pages: BTreeMap<&str, &File> =
        tree.files.iter().filter(|file| file.path.ends_with(".md")).map(|file| (file.path.as_str(), file)).collect();
    let folders: BTreeSet<&str> = tree.files.iter().flat_map(|file| above(&file.path)).collect();
    let mut leads: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (path, file) in &pages {
        for (line, target) in targets(file) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (to, anchor) = target.split_once('#').map_or((target, None), |(to, anchor)| (to, Some(anchor)));
            let to = if to.is_empty() { (*path).to_owned() } else { joined(path, to) };
            let exists = tree.file(&to).is_some() || folders.contains(to.trim_end_matches('/'));
            if !exists {
                out.push(Violation::new(path, line, format!("{target} does not exist; remove or fix the link")));
                continue;
            }
            let has = |anchor: &str| pages.get(to.as_str()).is_none_or(|page| anchors(page).contains(anchor));
            if anchor.is_some_and(|anchor| !has(anchor)) {
                out.push(Violation::new(path, line, format!("{target}: the page has no such heading")));
            }
            leads.entry(path).or_default().insert(to);
        }
    }
    if !pages.contains_key(START) {
        return;
    }
    let mut seen = BTreeSet::from([START.to_owned()]);
    let mut next = vec![START.to_owned()];
    while let Some(path) = next.pop() {
        for to in leads.get(path.as_str()).into_iter().flatten() {
            if seen.insert(to.clone()) {
                next.push(to.clone());
            }
        }
    }
    for path in pages.keys().filter(|path| !seen.contains(**path)) {
        out.push(Violation::new(path, 1, format!("cannot be reached by links from {START}")));
    }
}

/// Returns the folders above a file.
fn above(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

/// Returns a link's path, from the root of the tree.
fn joined(page: &str, to: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in to.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns the targets of links with their lines, outside code.
fn targets(page: &File) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in page.prose_lines() {
        let links = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        found.extend(links.filter(|target| !target.is_empty() && !target.contains(' ')).map(|target| (number, target)));
    }
    found
}

/// Returns the anchors of a page's headings, as GitHub generates them.
fn anchors(page: &File) -> BTreeSet<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for (_, line) in page.prose_lines() {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let slug = slug(heading);
        let count = counts.entry(slug.clone()).or_default();
        found.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    found
}

/// The anchor of a heading that no other heading of its page has.
#[must_use]
pub fn slug(heading: &str) -> String {
    let kept = |c: char| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    heading.trim().chars().filter_map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::found;

    #[test]
    fn links_lead_somewhere_and_every_page_is_reached() {
        let files = [
            ("README.md", "[a](docs/a.md#its-heading-twice) [gone](docs/b.md) [web](https://x.y/z)\n"),
            ("docs/a.md", "# A\n## Its heading, `twice`!\n[up](../src) [no](#nowhere)\n```\n[code](gone)\n```\n"),
            ("docs/lost.md", "# Lost\n"),
            ("src/lib.rs", "//! A file.\n"),
        ];
        let found: Vec<String> =
            found(check, &files).into_iter().map(|found| format!("{} {}", found.path, found.message)).collect();
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].contains("README.md docs/b.md does not exist"), "{found:?}");
        assert!(found[1].contains("docs/a.md #nowhere"), "{found:?}");
        assert!(found[2].contains("docs/lost.md cannot be reached"), "{found:?}");
    }
}
