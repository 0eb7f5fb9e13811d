//! Modules of each crate, and resolution of paths in them.
//!
//! Tests are left out: files in folders of tests, and modules under `#[cfg(test)]`. Names are followed through `use`,
//! re-exports and globs to the module that defines them. A macro among items is assumed to define the words of its
//! input that other modules import from there. Types are not known, so the targets of method calls are not seen.

use std::collections::{BTreeMap, BTreeSet};

use super::manifest;
use super::outline::{Definition, Import, Kind};
use super::tree::{File, Tree};

/// Bound on the steps of resolving a path, more than any real path takes: two globs that import each other never end.
const MOST_STEPS: usize = 32;

/// Crate of the workspace without its tests.
#[derive(Debug)]
pub struct Crate<'a> {
    /// Name of the package.
    pub name: String,
    /// Folder of the crate, from the root.
    pub directory: &'a str,
    /// Modules and bodies of functions, by path from the crate's root, which has the empty path.
    pub modules: BTreeMap<String, Module<'a>>,
}

/// Module, or body of a function.
#[derive(Debug)]
pub struct Module<'a> {
    /// File that contains the module.
    pub file: &'a File,
    /// The file is this module itself, not one around it.
    pub owns_file: bool,
    definitions: BTreeMap<&'a str, &'a Definition>,
    imports: BTreeMap<&'a str, &'a Import>,
    globs: Vec<&'a Import>,
    macro_words: BTreeSet<&'a str>,
}

impl<'a> Module<'a> {
    const fn new(file: &'a File, owns_file: bool) -> Self {
        Self {
            file,
            owns_file,
            definitions: BTreeMap::new(),
            imports: BTreeMap::new(),
            globs: Vec::new(),
            macro_words: BTreeSet::new(),
        }
    }

    /// Returns true if names reach it by `use path::*`.
    #[must_use]
    pub fn has_globs(&self) -> bool {
        !self.globs.is_empty()
    }

    /// Returns its definition of that name.
    #[must_use]
    pub fn definition(&self, name: &str) -> Option<&'a Definition> {
        self.definitions.get(name).copied()
    }
}

/// Target of a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ItemPath {
    /// Module that the path names, or that defines the item.
    pub module: String,
    /// Item that the path names; `None` for a module.
    pub item: Option<String>,
}

/// Returns the path of the module around this one.
#[must_use]
pub fn parent(module: &str) -> Option<&str> {
    if module.is_empty() { None } else { Some(module.rsplit_once("::").map_or("", |(parent, _)| parent)) }
}

fn below(module: &str, name: &str) -> String {
    match (module, name) {
        ("", _) => name.to_string(),
        (_, "") => module.to_string(),
        _ => format!("{module}::{name}"),
    }
}

/// Returns true for the body of a function, which sees the names of the modules around it.
fn is_body(module: &str) -> bool {
    module.rsplit("::").next().is_some_and(|last| last.starts_with("fn "))
}

impl<'a> Crate<'a> {
    /// Returns every crate in the tree that has sources outside tests.
    #[must_use]
    pub fn all(tree: &'a Tree) -> Vec<Self> {
        let manifests = manifest::all(tree);
        let crates = manifests.iter().map(|manifest| Self::of(tree, &manifest.name, manifest.directory));
        crates.filter(|found| !found.modules.is_empty()).collect()
    }

    fn of(tree: &'a Tree, name: &str, directory: &'a str) -> Self {
        let sources = tree.below(directory).filter(|file| file.is_rust() && !file.is_test());
        let has_library = tree.file(&format!("{directory}/src/lib.rs")).is_some();
        let files: Vec<(String, &File)> =
            sources.filter_map(|file| Some((module_of(&file.path, directory, has_library)?, file))).collect();
        let declarations = files.iter().flat_map(|(module, file)| {
            let tests = file.outline.modules.iter().filter(|declared| declared.in_test);
            tests.map(|declared| below(module, &declared.path))
        });
        let tests: Vec<String> = declarations.collect();
        let mut found = Self { name: name.to_string(), directory, modules: BTreeMap::new() };
        for (module, file) in files {
            if !tests.iter().any(|test| lies_in(&module, test)) {
                found.add(&module, file);
            }
        }
        found
    }

    fn add(&mut self, path: &str, file: &'a File) {
        self.module(path, "", file).owns_file = true;
        let outline = &file.outline;
        for definition in outline.definitions.iter().filter(|found| !found.in_test) {
            if definition.kind != Kind::AssociatedType {
                let module = self.module(path, &definition.scope, file);
                module.definitions.entry(&definition.name).or_insert(definition);
            }
        }
        for import in outline.imports.iter().filter(|found| !found.in_test) {
            let module = self.module(path, &import.scope, file);
            if import.name == "*" {
                module.globs.push(import);
            } else {
                module.imports.insert(&import.name, import);
            }
        }
        for found in &outline.macro_words {
            self.module(path, &found.scope, file).macro_words.insert(&found.word);
        }
    }

    fn module(&mut self, path: &str, scope: &str, file: &'a File) -> &mut Module<'a> {
        self.modules.entry(below(path, scope)).or_insert_with(|| Module::new(file, false))
    }

    /// Returns the crate's files with the paths of their modules.
    pub fn files(&self) -> impl Iterator<Item = (&str, &'a File)> {
        let files = self.modules.iter().filter(|(_, module)| module.owns_file);
        files.map(|(path, module)| (path.as_str(), module.file))
    }

    /// Returns the scope of this path within `module`.
    #[must_use]
    pub fn scope(&self, module: &str, scope: &str) -> Option<&Module<'a>> {
        self.modules.get(&below(module, scope))
    }

    /// Returns the module whose file contains `module`.
    #[must_use]
    pub fn file_module<'m>(&self, mut module: &'m str) -> &'m str {
        while !self.modules.get(module).is_some_and(|found| found.owns_file) {
            let Some(around) = parent(module) else { break };
            module = around;
        }
        module
    }

    /// Resolves `path`, written in a scope of `module`, to an item of this crate; `None` for items of other crates.
    #[must_use]
    pub fn resolve(&self, module: &str, scope: &str, path: &str) -> Option<ItemPath> {
        let parts: Vec<&str> = path.split("::").collect();
        self.find(&below(module, scope), &parts, MOST_STEPS)
    }

    /// Resolves a path of a type like [`Self::resolve`], and follows its aliases.
    #[must_use]
    pub fn resolve_type(&self, module: &str, scope: &str, path: &str) -> Option<ItemPath> {
        let mut place = self.resolve(module, scope, path)?;
        for _ in 0..MOST_STEPS {
            let Some(Kind::Alias(target)) = self.definition(&place).map(|found| &found.kind) else { break };
            let Some(further) = self.resolve(&place.module, "", target) else { break };
            place = further;
        }
        Some(place)
    }

    /// Returns the definition of the place's item in its module.
    #[must_use]
    pub fn definition(&self, place: &ItemPath) -> Option<&'a Definition> {
        self.modules.get(&place.module)?.definition(place.item.as_deref()?)
    }

    /// Resolves a path that begins in `from` with any valid first word.
    fn find(&self, from: &str, parts: &[&str], steps: usize) -> Option<ItemPath> {
        let (first, rest) = parts.split_first()?;
        if *first == "crate" || *first == self.name.replace('-', "_") {
            return self.descend("", rest, steps);
        }
        let mut scope = from;
        loop {
            let found = self.descend(scope, parts, steps);
            if found.is_some() || !is_body(scope) {
                return found;
            }
            scope = parent(scope)?;
        }
    }

    /// Resolves the rest of a path in `module`.
    fn descend(&self, module: &str, parts: &[&str], steps: usize) -> Option<ItemPath> {
        let steps = steps.checked_sub(1)?;
        let Some((first, rest)) = parts.split_first() else {
            return Some(ItemPath { module: module.to_string(), item: None });
        };
        match *first {
            "self" => return self.descend(self.around_bodies(module), rest, steps),
            "super" => return self.descend(parent(self.around_bodies(module))?, rest, steps),
            _ => {}
        }
        let child = below(module, first);
        if self.modules.contains_key(&child) {
            return self.descend(&child, rest, steps);
        }
        let here = self.modules.get(module)?;
        if here.definitions.contains_key(first) {
            return Some(ItemPath { module: module.to_string(), item: Some((*first).to_string()) });
        }
        if let Some(import) = here.imports.get(first) {
            let path: Vec<&str> = import.path.split("::").chain(rest.iter().copied()).collect();
            return self.find(module, &path, steps);
        }
        let by_glob = here.globs.iter().find_map(|glob| {
            let path: Vec<&str> = glob.path.split("::").filter(|part| *part != "*").collect();
            let place = self.find(module, &path, steps)?;
            if place.item.is_none() { self.descend(&place.module, parts, steps) } else { None }
        });
        let by_macro = || ItemPath { module: module.to_string(), item: Some((*first).to_string()) };
        by_glob.or_else(|| here.macro_words.contains(first).then(by_macro))
    }

    fn around_bodies<'m>(&self, mut module: &'m str) -> &'m str {
        while is_body(module)
            && let Some(around) = parent(module)
        {
            module = around;
        }
        module
    }
}

/// Returns true if `module` is `other` or lies below it.
#[must_use]
pub fn lies_in(module: &str, other: &str) -> bool {
    module.strip_prefix(other).is_some_and(|rest| other.is_empty() || rest.is_empty() || rest.starts_with("::"))
}

/// Returns the module of the file at `path`, of the crate in `directory`; `None` for files outside its `src`.
fn module_of(path: &str, directory: &str, has_library: bool) -> Option<String> {
    let path = path.strip_prefix(directory)?.strip_prefix("/src/")?.strip_suffix(".rs")?;
    let module = match path {
        "lib" => "",
        "main" if !has_library => "",
        _ => path.strip_suffix("/mod").unwrap_or(path),
    };
    Some(module.replace('/', "::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: (&str, &str) = ("a/Cargo.toml", "[package]\nname = \"a-b\"\n");

    fn place(files: &[(&str, &str)], module: &str, scope: &str, path: &str) -> Option<String> {
        let tree = Tree::of(&[&[MANIFEST], files].concat());
        let crates = Crate::all(&tree);
        let place = crates[0].resolve_type(module, scope, path)?;
        Some(match place.item {
            Some(item) => format!("{} {item}", place.module),
            None => place.module,
        })
    }

    #[test]
    fn names_are_followed_to_the_module_that_defines_them() {
        let files = [
            ("a/src/lib.rs", "mod x;\nmod y;\npub use x::deep::Thing as Renamed;\ntype Alias = Renamed<u8>;\n"),
            ("a/src/x.rs", "pub mod deep;\npub use deep::*;\n"),
            ("a/src/x/deep.rs", "pub struct Thing;\npub enum Choice { One }\nids! { /// One.\n Number: u64 }\n"),
            (
                "a/src/y/mod.rs",
                "use super::x;\nuse crate::Alias;\nfn f() { use std::fs; use crate::x::Choice; }\nmod z { fn f() {} }",
            ),
        ];
        let cases = [
            ("y", "", "x::Thing", Some("x::deep Thing")),
            ("y", "", "Alias", Some("x::deep Thing")),
            ("y", "", "super::Renamed", Some("x::deep Thing")),
            ("y", "", "crate::x::deep", Some("x::deep")),
            ("y", "", "a_b::x::Choice::One", Some("x::deep Choice")),
            ("y", "fn f", "Choice::One", Some("x::deep Choice")),
            ("y", "fn f", "x::Thing", Some("x::deep Thing")),
            ("y", "", "x::Number", Some("x::deep Number")),
            ("y", "", "x::Other", None),
            ("y", "", "Choice", None),
            ("y", "fn f", "fs::File", None),
            ("x::deep", "", "super::super::y::z", Some("y::z")),
            ("y", "z", "super::Alias", Some("x::deep Thing")),
        ];
        for (module, scope, path, expected) in cases {
            assert_eq!(place(&files, module, scope, path).as_deref(), expected, "{path} in {module} {scope}");
        }
    }

    #[test]
    fn circles_of_names_end() {
        let files = [
            ("a/src/lib.rs", "mod x;\nmod y;\ntype A = B;\ntype B = A;\n"),
            ("a/src/x.rs", "pub use super::y::*;\npub use super::y::Thing;\n"),
            ("a/src/y.rs", "pub use super::x::*;\npub use super::x::Thing;\n"),
        ];
        assert_eq!(place(&files, "x", "", "Thing"), None);
        assert_eq!(place(&files, "x", "", "Other"), None);
        assert!(place(&files, "", "", "A").is_some());
    }

    #[test]
    fn tests_are_left_out() {
        let files = [
            ("a/src/lib.rs", "#[cfg(test)]\nmod rig;\nmod kept;\n#[cfg(test)]\nmod tests { struct T; }\n"),
            ("a/src/rig.rs", ""),
            ("a/src/rig/deep.rs", ""),
            ("a/src/rigid.rs", ""),
            ("a/src/kept.rs", ""),
            ("a/src/kept/tests.rs", ""),
            ("a/tests/all.rs", ""),
        ];
        let tree = Tree::of(&[&[MANIFEST], &files[..]].concat());
        let crates = Crate::all(&tree);
        assert_eq!(crates[0].files().map(|(path, _)| path).collect::<Vec<_>>(), ["", "kept", "rigid"]);
        assert_eq!(crates[0].file_module("kept::inner::fn f"), "kept");
    }
}
