//! Rules: limits on the fields, functions and impl files of one type.
//!
//! * A struct that has methods with `&mut self`, of its own or of a trait, has at most 15 fields.
//! * Any other struct is a record, and has at most 30.
//! * A type has at most 40 inherent functions, summed over its impls within its crate.
//! * The inherent impls of a type are in at most three files.
//!
//! Types are distinguished by the modules that define them, also where an impl names them through imports and aliases.
//! Tests are left out, and so is the output of macros.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::Violation;
use crate::tidy::sources::crates::{Crate, ItemPath};
use crate::tidy::sources::outline::Kind;
use crate::tidy::sources::tree::Tree;

const MOST_FIELDS: usize = 15;
const MOST_FIELDS_OF_RECORD: usize = 30;
const MOST_METHODS: usize = 40;
const MOST_FILES: usize = 3;

/// Counts of one type in a crate.
#[derive(Debug, Default)]
struct Tally<'a> {
    name: String,
    /// Path of its definition, or of its first impl if the definition is not seen.
    path: &'a str,
    line: usize,
    fields: usize,
    has_mutating: bool,
    methods: usize,
    files: BTreeSet<&'a str>,
}

/// Checks the numbers of fields.
pub fn check_fields(tree: &Tree, out: &mut Vec<Violation>) {
    for tally in tallies(tree) {
        let Tally { name, fields, .. } = &tally;
        if tally.has_mutating && *fields > MOST_FIELDS {
            let message = format!(
                "`{name}` changes itself and has {fields} fields, over {MOST_FIELDS}; cut out what \
                                   changes together as components that own it"
            );
            out.push(Violation::new(tally.path, tally.line, message));
        } else if *fields > MOST_FIELDS_OF_RECORD {
            let message = format!(
                "record `{name}` has {fields} fields, over {MOST_FIELDS_OF_RECORD}; nest those that \
                                   belong together"
            );
            out.push(Violation::new(tally.path, tally.line, message));
        }
    }
}

/// Checks the numbers of methods.
pub fn check_methods(tree: &Tree, out: &mut Vec<Violation>) {
    for tally in tallies(tree).iter().filter(|tally| tally.methods > MOST_METHODS) {
        let Tally { name, methods, .. } = tally;
        let message = format!(
            "`{name}` has {methods} methods, over {MOST_METHODS}; give those that need only a part of \
                               it to a type for that part"
        );
        out.push(Violation::new(tally.path, tally.line, message));
    }
}

/// Checks the numbers of files with impls.
pub fn check_impl_files(tree: &Tree, out: &mut Vec<Violation>) {
    for tally in tallies(tree).iter().filter(|tally| tally.files.len() > MOST_FILES) {
        let (name, files) = (&tally.name, tally.files.len());
        let message = format!(
            "the impls of `{name}` are in {files} files, over {MOST_FILES}; a type that is cut by \
                               length still lets all of them touch every field"
        );
        out.push(Violation::new(tally.path, tally.line, message));
    }
}

fn tallies(tree: &Tree) -> Vec<Tally<'_>> {
    Crate::all(tree).iter().flat_map(|found| tallies_of(found)).collect()
}

fn tallies_of<'a>(found: &Crate<'a>) -> Vec<Tally<'a>> {
    let mut tallies: BTreeMap<ItemPath, Tally<'a>> = BTreeMap::new();
    for (module, file) in found.files() {
        for definition in file.outline.definitions.iter().filter(|found| !found.in_test) {
            let fields = match definition.kind {
                Kind::Struct { fields } => fields,
                Kind::Enum | Kind::Trait => 0,
                _ => continue,
            };
            let place = found.resolve(module, &definition.scope, &definition.name);
            let place = place.unwrap_or_else(|| unseen(module, &definition.name));
            let (name, path, line) = (definition.name.clone(), file.path.as_str(), definition.line);
            tallies.insert(place, Tally { name, path, line, fields, ..Tally::default() });
        }
    }
    for (module, file) in found.files() {
        for block in file.outline.impls.iter().filter(|block| !block.in_test) {
            let place = found.resolve_type(module, &block.scope, &block.target);
            let place = place.unwrap_or_else(|| unseen(module, &block.target));
            let tally = tallies.entry(place).or_insert_with(|| Tally {
                name: block.target.clone(),
                path: &file.path,
                line: block.line,
                ..Tally::default()
            });
            tally.has_mutating |= block.has_mutating;
            if !block.of_trait {
                tally.methods += block.methods;
                tally.files.insert(&file.path);
            }
        }
    }
    tallies.into_values().collect()
}

/// Returns the place of a type whose definition is not seen: a macro or another crate defines it.
fn unseen(module: &str, name: &str) -> ItemPath {
    ItemPath { module: module.to_string(), item: Some(name.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::{found, places};

    const MANIFEST: (&str, &str) = ("a/Cargo.toml", "[package]\nname = \"a\"\n");

    fn with_fields(name: &str, count: usize) -> String {
        let fields: String = (0..count).map(|index| format!("    f{index}: u8,\n")).collect();
        format!("struct {name} {{\n{fields}}}\n")
    }

    fn with_methods(name: &str, from: usize, count: usize) -> String {
        let methods: String = (from..from + count).map(|index| format!("    fn m{index}() {{}}\n")).collect();
        format!("impl {name} {{\n{methods}}}\n")
    }

    fn in_lib(source: &str) -> [(&str, &str); 2] {
        [MANIFEST, ("a/src/lib.rs", source)]
    }

    #[test]
    fn types_that_change_themselves_have_few_fields() {
        let record = with_fields("A", 16);
        assert!(places(check_fields, &in_lib(&record)).is_empty());
        for impls in [
            "impl A { fn a(&mut self) {} }",
            "impl<'a> Drop for A<'a> { fn drop(&mut self) {} }",
            "impl Future for A { fn poll(self: Pin<&mut Self>) {} }",
        ] {
            let sixteen = format!("{record}{impls}\n");
            assert_eq!(places(check_fields, &in_lib(&sixteen)), ["a/src/lib.rs:1"], "{impls}");
            let fifteen = with_fields("A", 15) + impls;
            assert!(places(check_fields, &in_lib(&fifteen)).is_empty(), "{impls}");
        }
        for impls in ["impl A { fn a(mut self, b: &mut B) -> Self {} }", "impl A { #[cfg(test)] fn a(&mut self) {} }"] {
            assert!(places(check_fields, &in_lib(&format!("{record}{impls}\n"))).is_empty(), "{impls}");
        }
    }

    #[test]
    fn records_have_more_and_not_endlessly_many() {
        assert!(places(check_fields, &in_lib(&with_fields("A", 30))).is_empty());
        assert_eq!(places(check_fields, &in_lib(&with_fields("A", 31))), ["a/src/lib.rs:1"]);
        let for_tests = with_fields("A", 30).replace('}', "    #[cfg(test)]\n    extra: u8,\n}");
        assert!(places(check_fields, &in_lib(&for_tests)).is_empty());
        let test = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", with_fields("A", 31));
        assert!(places(check_fields, &in_lib(&test)).is_empty());
    }

    #[test]
    fn methods_are_summed_over_the_impls_of_one_type() {
        let root = format!("mod x;\nmod y;\nstruct A;\n{}", with_methods("A", 0, 20));
        let elsewhere = format!("use super::A as B;\n{}", with_methods("B<'_>", 20, 21));
        let other = format!("struct A;\n{}", with_methods("A", 0, 40));
        let files = [MANIFEST, ("a/src/lib.rs", &root), ("a/src/x.rs", &elsewhere), ("a/src/y.rs", &other)];
        assert_eq!(places(check_methods, &files), ["a/src/lib.rs:3"]);
        assert!(found(check_methods, &files)[0].message.contains("41 methods"));
    }

    #[test]
    fn methods_of_traits_and_tests_are_not_counted() {
        let source = format!(
            "struct A;\n{}{}#[cfg(test)]\n{}",
            with_methods("A", 0, 40),
            with_methods("T for A", 0, 40),
            with_methods("A", 40, 40)
        );
        assert!(places(check_methods, &in_lib(&source)).is_empty());
    }

    #[test]
    fn impls_lie_in_few_files() {
        let block = "use super::A;\nimpl A { fn a() {} }\n";
        let mut files = vec![MANIFEST, ("a/src/lib.rs", "struct A;\nimpl A {}\n")];
        files.extend([("a/src/x.rs", block), ("a/src/y.rs", block)]);
        files.push(("a/src/z.rs", "use super::A;\nimpl Drop for A { fn drop(&mut self) {} }\n"));
        assert!(places(check_impl_files, &files).is_empty());
        files.push(("a/src/w.rs", block));
        assert_eq!(places(check_impl_files, &files), ["a/src/lib.rs:1"]);
    }
}
