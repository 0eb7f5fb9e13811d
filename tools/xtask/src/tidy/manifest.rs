//! The little of a `Cargo.toml` that the rules ask for: the package's name and its dependencies.
//!
//! Reads section headers and keys line by line, which is how cargo's own commands write them. Not a TOML parser:
//! multi-line values are looked at line by line too.

use super::tree::{File, Tree};

/// One dependency, of any kind.
#[derive(Debug, PartialEq, Eq)]
pub struct Dependency {
    /// The package's name, also where it is renamed.
    pub name: String,
    /// Line in the manifest.
    pub line: usize,
}

/// The manifest of one crate of ours.
#[derive(Debug)]
pub struct Manifest<'a> {
    /// The package's name.
    pub name: String,
    /// Directory from the root, without `/` at its end; empty for the root itself.
    pub directory: &'a str,
    /// The manifest's path.
    pub path: &'a str,
    /// Normal, development and build dependencies, of every target.
    pub dependencies: Vec<Dependency>,
}

/// The manifests of every package in the tree, by path.
#[must_use]
pub fn all(tree: &Tree) -> Vec<Manifest<'_>> {
    tree.files.iter().filter_map(parse).collect()
}

fn parse(file: &File) -> Option<Manifest<'_>> {
    let directory = file.path.strip_suffix("Cargo.toml")?;
    let directory = directory.strip_suffix('/').unwrap_or(directory);
    let mut name = None;
    let mut dependencies = Vec::new();
    let mut section = String::new();
    for (index, line) in file.text.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']').to_string();
            // `[dependencies.name]` is a dependency by itself.
            if let Some((kind, package)) = section.rsplit_once('.')
                && is_dependencies(kind)
            {
                dependencies.push(Dependency { name: unquoted(package), line: index + 1 });
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            continue;
        };
        if line.starts_with('#') {
            continue;
        }
        let (key, value) = (key.trim(), value.trim());
        if section == "package" && key == "name" {
            name = Some(unquoted(value));
        } else if is_dependencies(&section) {
            let key = key.split('.').next().unwrap_or(key);
            let name = renamed(value).unwrap_or_else(|| unquoted(key));
            dependencies.push(Dependency { name, line: index + 1 });
        }
    }
    Some(Manifest { name: name?, directory, path: &file.path, dependencies })
}

fn is_dependencies(section: &str) -> bool {
    let last = section.rsplit('.').next().unwrap_or(section);
    // `[workspace.dependencies]` only names versions.
    matches!(last, "dependencies" | "dev-dependencies" | "build-dependencies") && section != "workspace.dependencies"
}

fn unquoted(text: &str) -> String {
    text.trim_matches(['"', '\''].as_slice()).to_string()
}

/// The package behind a renamed dependency, `{ package = "name", ... }`.
fn renamed(value: &str) -> Option<String> {
    let (_, behind) = value.strip_prefix('{')?.split_once("package")?;
    behind.trim_start().strip_prefix('=')?.split('"').nth(1).map(str::to_string)
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
