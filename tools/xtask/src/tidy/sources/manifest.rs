//! Content of a `Cargo.toml` that rules use: the package's name and its dependencies.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::tree::{File, Tree};

/// Dependency of any kind.
#[derive(Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Name of the package, also if it is renamed.
    pub name: String,
    /// Line in the manifest.
    pub line: usize,
}

/// Manifest of one crate of the workspace.
#[derive(Debug)]
pub struct Manifest<'a> {
    /// Name of the package.
    pub name: String,
    /// Directory from the root, without `/` at its end; empty for the root itself.
    pub directory: &'a str,
    /// Path of the manifest.
    pub path: &'a str,
    /// Normal, development and build dependencies, of every target.
    pub dependencies: Vec<Dependency>,
}

/// Returns the manifests of all packages in the tree, by path.
#[must_use]
pub fn all(tree: &Tree) -> Vec<Manifest<'_>> {
    tree.files.iter().filter_map(parse).collect()
}

/// Tables that hold dependencies.
const KINDS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Parses the manifest in `file`; `None` for other files, for workspaces without a package, and for manifests that
/// cargo refuses too.
fn parse(file: &File) -> Option<Manifest<'_>> {
    let directory = file.path.strip_suffix("Cargo.toml")?;
    let directory = directory.strip_suffix('/').unwrap_or(directory);
    let root = DeTable::parse(&file.text).ok()?.into_inner();
    let name = root.get("package")?.get_ref().get("name")?.get_ref().as_str()?.to_string();
    let mut dependencies = Vec::new();
    add_dependencies(&file.text, &root, &mut dependencies);
    for target in
        root.get("target").and_then(|targets| targets.get_ref().as_table()).into_iter().flat_map(DeTable::values)
    {
        if let Some(target) = target.get_ref().as_table() {
            add_dependencies(&file.text, target, &mut dependencies);
        }
    }
    dependencies.sort_by_key(|dependency| dependency.line);
    Some(Manifest { name, directory, path: &file.path, dependencies })
}

fn add_dependencies(text: &str, within: &DeTable<'_>, out: &mut Vec<Dependency>) {
    for table in KINDS.iter().filter_map(|kind| within.get(*kind)?.get_ref().as_table()) {
        for (key, value) in table {
            let name = renamed(value).unwrap_or(key.get_ref()).to_string();
            out.push(Dependency { name, line: text[..key.span().start].matches('\n').count() + 1 });
        }
    }
}

/// Returns the package behind a renamed dependency, `{ package = "name", ... }`.
fn renamed<'a>(value: &'a Spanned<DeValue<'_>>) -> Option<&'a str> {
    value.get_ref().get("package")?.get_ref().as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_dependency_is_seen() {
        let text = "[package]\nname = \"a\"\n[dependencies]\nb.workspace = true\n# c = 1\nd = \"1\"\n\
                    e = { version = \"1\", package = \"real-e\" }\n[dev-dependencies]\nf = \"1\"\n\
                    [target.'cfg(unix)'.dependencies]\ng = \"1\"\n[dependencies.h]\nversion = \"1\"\n\
                    [features]\ni = []\n";
        let tree = Tree::of(&[("x/Cargo.toml", text), ("Cargo.toml", "[workspace.dependencies]\nz = \"1\"\n")]);
        let manifests = all(&tree);
        assert_eq!(manifests.len(), 1);
        assert_eq!((manifests[0].name.as_str(), manifests[0].directory), ("a", "x"));
        let names: Vec<&str> = manifests[0].dependencies.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["b", "d", "real-e", "f", "g", "h"]);
        assert_eq!(manifests[0].dependencies[0].line, 4);
    }
}
