//! Rule: modules of one folder do not depend on each other in a circle.
//!
//! A dependency counts for the module that *defines* the item which another module names, in a `use` or by a
//! written-out path. Names are followed through re-exports, so a front that re-exports items below it makes no circle,
//! and re-exporting alone is no dependency. Every folder is checked by itself. Its modules are its nodes, each with
//! everything below it, and so is the folder's own file (`mod.rs`, `x.rs` of `x/`, `lib.rs`). There is an edge from one
//! node to another when
//!
//! * something in the first names an item that the second defines, or the second as a module; or
//! * something in a module names an item of the folder's own file that *does* something: a function, or a type with
//!   inherent methods. Plain data there (constants, traits, types without methods) may be used by all.
//!
//! The second condition keeps components below a shell from depending on the shell: it depends on them, so they must
//! not depend on it. Calls of methods are not seen, as they need types. The location of a type's impls is the matter of
//! another rule.
//!
//! Each knot of nodes is reported once, with a shortest circle through it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::tidy::Violation;
use crate::tidy::sources::crates::{Crate, ItemPath, Module, lies_in};
use crate::tidy::sources::outline::Kind;
use crate::tidy::sources::tree::Tree;

/// Folders of the crates whose modules must lie in layers.
const CRATES: [&str; 5] =
    ["dataplane/store", "dataplane/tier", "dataplane/engine", "dataplane/client", "dataplane/proto"];

/// Name of the folder's own file as a node.
const OWN_FILE: &str = "its own file";

/// Place where a node names an item of another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Evidence<'a> {
    path: &'a str,
    line: usize,
    named: String,
}

/// Nodes of a folder that each node depends on, with the first place of each dependency.
type Edges<'a> = BTreeMap<String, BTreeMap<String, Evidence<'a>>>;

/// Checks every folder of these crates.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for found in Crate::all(tree).iter().filter(|found| CRATES.contains(&found.directory)) {
        for (folder, edges) in folders(found) {
            let mut knotted: BTreeSet<&String> = BTreeSet::new();
            for node in edges.keys() {
                if knotted.contains(node) {
                    continue;
                }
                if let Some(circle) = circle_through(node, &edges) {
                    let knot = knot_of(node, &edges);
                    out.push(described(&found.name, &folder, &circle, knot.len(), &edges));
                    knotted.extend(knot);
                }
            }
        }
    }
}

/// Returns the edges within each folder of the crate, by the folder's module.
fn folders<'a>(found: &Crate<'a>) -> BTreeMap<String, Edges<'a>> {
    let busy = types_with_methods(found);
    let mut folders: BTreeMap<String, Edges<'a>> = BTreeMap::new();
    for (from, evidence, place) in references(found) {
        let to = found.file_module(&place.module);
        if to == from || (lies_in(from, to) && !does_something(found, &place, &busy)) {
            continue;
        }
        let folder = common(from, to);
        let (from, to) = (node(from, folder), node(to, folder));
        let edge = folders.entry(folder.to_string()).or_default().entry(from.to_string()).or_default();
        let first = edge.entry(to.to_string()).or_insert_with(|| evidence.clone());
        if evidence < *first {
            *first = evidence;
        }
    }
    folders
}

/// Returns the types of the crate with inherent methods.
fn types_with_methods(found: &Crate<'_>) -> BTreeSet<ItemPath> {
    let mut types = BTreeSet::new();
    for (module, file) in found.files() {
        let blocks = file.outline.impls.iter().filter(|block| !block.in_test && !block.of_trait && block.methods > 0);
        types.extend(blocks.filter_map(|block| found.resolve_type(module, &block.scope, &block.target)));
    }
    types
}

fn does_something(found: &Crate<'_>, place: &ItemPath, busy: &BTreeSet<ItemPath>) -> bool {
    let is_function = found.definition(place).is_some_and(|definition| definition.kind == Kind::Function);
    is_function || busy.contains(place)
}

/// Returns every place where a file's module names an item of its crate: the module, the evidence, and the item.
fn references<'c, 'a>(found: &'c Crate<'a>) -> Vec<(&'c str, Evidence<'a>, ItemPath)> {
    let mut references = Vec::new();
    for (module, file) in found.files() {
        let outline = &file.outline;
        let mentions = || outline.mentions.iter().filter(|mention| !mention.in_test);
        let used: BTreeSet<&str> = mentions().filter_map(|mention| mention.path.split("::").next()).collect();
        let mut seen: BTreeSet<(&str, &str)> = BTreeSet::new();
        let mut add = |scope: &str, path: &str, line: usize| {
            let place = found.resolve(module, scope, path.strip_suffix("::*").unwrap_or(path));
            let evidence = Evidence { path: &file.path, line, named: path.to_string() };
            references.extend(place.map(|place| (module, evidence, place)));
        };
        for import in outline.imports.iter().filter(|import| !import.in_test) {
            // An item that is only re-exported is not used here.
            if !import.is_public || used.contains(import.name.as_str()) {
                add(&import.scope, &import.path, import.line);
            }
        }
        for mention in mentions() {
            // A single word is known by its import, which is seen already, unless a glob brought it in.
            let by_glob = || found.scope(module, &mention.scope).is_some_and(Module::has_globs);
            if (mention.path.contains("::") || by_glob()) && seen.insert((&mention.scope, &mention.path)) {
                add(&mention.scope, &mention.path, mention.line);
            }
        }
    }
    references
}

/// Returns the innermost module that contains both.
fn common<'m>(one: &'m str, other: &str) -> &'m str {
    let mut folder = one;
    while !lies_in(other, folder) {
        folder = folder.rsplit_once("::").map_or("", |(around, _)| around);
    }
    folder
}

/// Returns the node of the folder that the module belongs to.
fn node<'m>(module: &'m str, folder: &str) -> &'m str {
    let rest = module[folder.len()..].trim_start_matches("::");
    if rest.is_empty() { OWN_FILE } else { rest.split("::").next().unwrap_or(rest) }
}

/// Returns a shortest path along the edges from `node` back to it, with `node` at both ends.
fn circle_through<'e>(node: &'e String, edges: &'e Edges<'_>) -> Option<Vec<&'e String>> {
    let mut came_from: BTreeMap<&String, &String> = BTreeMap::new();
    let mut pending = VecDeque::from([node]);
    while let Some(at) = pending.pop_front() {
        for next in edges.get(at).into_iter().flat_map(BTreeMap::keys) {
            if next == node {
                let mut circle = vec![node, at];
                while let Some(before) = came_from.get(circle[circle.len() - 1]) {
                    circle.push(before);
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(next) {
                came_from.insert(next, at);
                pending.push_back(next);
            }
        }
    }
    None
}

/// Returns all nodes that lie on a circle with `node`.
fn knot_of<'e>(node: &'e String, edges: &'e Edges<'_>) -> BTreeSet<&'e String> {
    let reached = |from: &'e String| {
        let mut reached = BTreeSet::new();
        let mut pending = vec![from];
        while let Some(at) = pending.pop() {
            let next = edges.get(at).into_iter().flat_map(BTreeMap::keys);
            pending.extend(next.filter(|next| reached.insert(*next)));
        }
        reached
    };
    reached(node).into_iter().filter(|other| reached(other).contains(node)).collect()
}

fn described(name: &str, folder: &str, circle: &[&String], size: usize, edges: &Edges<'_>) -> Violation {
    let folder = if folder.is_empty() { name.to_string() } else { format!("{name}::{folder}") };
    let steps: Vec<&Evidence<'_>> = circle.windows(2).map(|pair| &edges[pair[0]][pair[1]]).collect();
    let ways: Vec<String> = circle
        .windows(2)
        .zip(&steps)
        .map(|(pair, step)| format!("{} names `{}` of {} ({}:{})", pair[0], step.named, pair[1], step.path, step.line))
        .collect();
    let message = format!(
        "{size} modules of {folder} know each other in a circle: {}; give what both need a module below both, or hand \
         it over as an argument",
        ways.join(", ")
    );
    Violation::new(steps[0].path, steps[0].line, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::{found, places};

    const MANIFEST: (&str, &str) = ("dataplane/tier/Cargo.toml", "[package]\nname = \"kvplane-tier\"\n");

    /// Returns the places of circles in a crate whose `src` has these files.
    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let paths: Vec<String> = files.iter().map(|(path, _)| format!("dataplane/tier/src/{path}")).collect();
        let mut tree = vec![MANIFEST];
        tree.extend(paths.iter().zip(files).map(|(path, (_, text))| (path.as_str(), *text)));
        let places = places(check, &tree);
        places.iter().map(|place| place.trim_start_matches("dataplane/tier/src/").to_string()).collect()
    }

    #[test]
    fn siblings_in_a_circle_fail() {
        let x = ("x.rs", "use super::y::Y;\npub struct X;\n");
        let root = ("lib.rs", "mod x;\nmod y;\nmod z;\n");
        assert!(circles(&[root, x, ("y.rs", "pub struct Y;\n")]).is_empty());
        assert_eq!(circles(&[root, x, ("y.rs", "pub struct Y;\nuse crate::x::X;\n")]), ["x.rs:1"]);
        assert_eq!(circles(&[root, x, ("y.rs", "pub struct Y;\nfn f() { super::x::X; }\n")]), ["x.rs:1"]);
        let y = ("y.rs", "use super::z;\npub struct Y(z::Z);\n");
        assert_eq!(circles(&[root, x, y, ("z.rs", "use super::x::X;\npub struct Z;\n")]), ["x.rs:1"]);
    }

    #[test]
    fn circles_within_and_between_folders_are_seen() {
        let root = ("lib.rs", "mod x;\nmod y;\n");
        let files = [
            root,
            ("x/mod.rs", "mod a;\nmod b;\n"),
            ("x/a.rs", "use super::b::B;\npub struct A;\n"),
            ("x/b.rs", "use super::a::A;\npub struct B;\n"),
            ("y.rs", ""),
        ];
        assert_eq!(circles(&files), ["x/a.rs:1"]);
        let files = [
            root,
            ("x/mod.rs", "pub mod a;\npub mod b;\n"),
            ("x/a.rs", "use crate::y::Y;\n"),
            ("x/b.rs", "pub struct B;\n"),
            ("y.rs", "use super::x::b::B;\npub struct Y;\n"),
        ];
        assert_eq!(circles(&files), ["x/a.rs:1"]);
    }

    #[test]
    fn names_are_followed_through_fronts() {
        let root = ("lib.rs", "mod x;\nmod y;\npub use x::X;\npub use y::Y;\n");
        let x = ("x.rs", "use super::Y;\npub struct X;\n");
        assert!(circles(&[root, x, ("y.rs", "pub struct Y;\n")]).is_empty());
        assert_eq!(circles(&[root, x, ("y.rs", "use crate::X;\npub struct Y;\n")]), ["x.rs:1"]);
        assert_eq!(circles(&[root, x, ("y.rs", "use crate::*;\npub struct Y(X);\n")]), ["x.rs:1"]);
    }

    #[test]
    fn components_do_not_know_the_shell() {
        let component = ("x.rs", "use super::Shell;\npub struct X;\n");
        let shell = "mod x;\nuse x::X;\npub struct Shell { x: X }\nimpl Shell { fn f(&mut self) {} }\n";
        assert_eq!(circles(&[("lib.rs", shell), component]), ["lib.rs:2"]);
        let reexporting = shell.replace("use x::X;", "pub use x::X;");
        assert_eq!(circles(&[("lib.rs", &reexporting), component]), ["lib.rs:2"]);
        let function = ("x.rs", "pub struct X;\nfn f() { super::help() }\n");
        assert_eq!(circles(&[("lib.rs", "mod x;\nfn help() { x::X; }\n"), function]), ["lib.rs:2"]);
        // A shell that its modules only extend depends on none of them.
        let extended = ("lib.rs", "mod x;\npub struct Shell;\n");
        assert!(circles(&[extended, ("x.rs", "use super::Shell;\nimpl Shell { fn f(&self) {} }\n")]).is_empty());
    }

    #[test]
    fn plain_data_of_the_front_is_everybodys() {
        let root = "mod x;\nuse x::X;\npub struct Data { x: X }\npub const A: u8 = 1;\nimpl Default for Data {}\n";
        assert!(circles(&[("lib.rs", root), ("x.rs", "use super::{A, Data};\npub struct X;\n")]).is_empty());
    }

    #[test]
    fn tests_and_other_crates_may() {
        let root = ("lib.rs", "mod x;\nmod y;\n");
        let x = ("x.rs", "use super::y::Y;\npub struct X;\n");
        let y = ("y.rs", "pub struct Y;\n#[cfg(test)]\nmod tests { use crate::x::X; }\n");
        assert!(circles(&[root, x, y]).is_empty());
        let files = [
            ("control/rpc/Cargo.toml", "[package]\nname = \"kvplane-rpc\"\n"),
            ("control/rpc/src/lib.rs", "mod x;\nmod y;\n"),
            ("control/rpc/src/x.rs", "use super::y::Y;\npub struct X;\n"),
            ("control/rpc/src/y.rs", "use super::x::X;\npub struct Y;\n"),
        ];
        assert!(places(check, &files).is_empty());
    }

    #[test]
    fn a_knot_is_described_once() {
        let lib = ("dataplane/tier/src/lib.rs", "mod x;\nmod y;\nmod z;\n");
        let x = ("dataplane/tier/src/x.rs", "use super::y::Y;\nuse super::z::Z;\npub struct X;\n");
        let y = ("dataplane/tier/src/y.rs", "use super::x::X;\npub struct Y;\n");
        let z = ("dataplane/tier/src/z.rs", "use super::x::X;\npub struct Z;\n");
        let found = found(check, &[MANIFEST, lib, x, y, z]);
        assert_eq!(found.len(), 1);
        let message = &found[0].message;
        assert!(
            message.starts_with("3 modules of kvplane-tier know each other in a circle: x names `super::y::Y` of y")
        );
        assert!(message.contains("y names `super::x::X` of x (dataplane/tier/src/y.rs:1)"), "{message}");
    }
}
