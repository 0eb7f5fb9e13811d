//! Outline of a Rust source, as far as rules need it: modules, definitions, impls, functions, imports, and paths.
//!
//! A source is parsed with `syn` and walked once. Syntax trees cannot leave the thread that parsed them, so the facts
//! that rules need become plain data here. `syn` leaves the input of macros as tokens; [`macros`] reads it as the code
//! that it looks like.

mod attributes;
mod macros;
mod reader;

use std::fmt;

use proc_macro2::{Span, TokenStream, TokenTree};

/// Outline of one Rust source.
///
/// Scopes are paths from the file's own module, joined with `::`, and empty for that module itself. The body of a
/// function is a scope too, called `fn name`, which can be no name of a module.
#[derive(Debug, Default)]
pub struct Outline {
    /// The source has `#![forbid(unsafe_code)]`.
    pub forbids_unsafe: bool,
    /// Lines of the keyword `unsafe`.
    pub unsafe_lines: Vec<usize>,
    /// Modules that lie in files of their own.
    pub modules: Vec<ModuleDeclaration>,
    /// Types, traits, functions and constants, including those in inputs of macros.
    pub definitions: Vec<Definition>,
    /// Words in the inputs of macros that stand among items: such a macro may define any of them.
    pub macro_words: Vec<MacroWord>,
    /// Blocks of methods.
    pub impls: Vec<ImplBlock>,
    /// Functions and methods, with bodies and without.
    pub functions: Vec<Function>,
    /// Names that `use` imports, groups spelled out.
    pub imports: Vec<Import>,
    /// Paths that are written out in code, except those of `use`.
    pub mentions: Vec<Mention>,
    /// Calls of functions outside tests, except in inputs of macros.
    pub calls: Vec<Call>,
    /// Lines outside tests of results whose errors are texts: `Result<_, String>`, or a trait's `type Err = String`.
    pub text_errors: Vec<usize>,
}

/// Declaration `mod name;`.
#[derive(Debug)]
pub struct ModuleDeclaration {
    /// Module that contains the declaration, and the declared name.
    pub path: String,
    /// The module exists only in tests.
    pub in_test: bool,
}

/// Kind of a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A struct or union; fields that exist only in tests are not counted.
    Struct {
        /// Number of fields.
        fields: usize,
    },
    /// An enum.
    Enum,
    /// A trait.
    Trait,
    /// An alias of this type; empty if that is not a plain path.
    Alias(String),
    /// A type of a trait or of its implementation.
    AssociatedType,
    /// A function that is no method.
    Function,
    /// A constant or a static.
    Constant,
}

/// Named item.
#[derive(Debug)]
pub struct Definition {
    /// Scope that contains the item.
    pub scope: String,
    /// Name of the item.
    pub name: String,
    /// Line of the name.
    pub line: usize,
    /// Kind of the item.
    pub kind: Kind,
    /// The item exists only in tests.
    pub in_test: bool,
}

/// Word in the input of a macro that stands among items.
#[derive(Debug)]
pub struct MacroWord {
    /// Scope that contains the macro call.
    pub scope: String,
    /// The word, which is not a keyword and not a part of a path.
    pub word: String,
}

/// Block `impl Type { .. }` or `impl Trait for Type { .. }`.
#[derive(Debug)]
pub struct ImplBlock {
    /// Scope that contains the block.
    pub scope: String,
    /// Path of the type without generics and references.
    pub target: String,
    /// The block implements a trait.
    pub of_trait: bool,
    /// Number of functions in the block.
    pub methods: usize,
    /// A function of the block takes `&mut self`.
    pub has_mutating: bool,
    /// Line of `impl`.
    pub line: usize,
    /// The block exists only in tests.
    pub in_test: bool,
}

/// Function or method.
#[derive(Debug)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// Last part of the name of the type or trait that it belongs to.
    pub owner: Option<String>,
    /// Line of `fn`.
    pub first_line: usize,
    /// Line of the closing brace; that of `fn` for functions without a body.
    pub last_line: usize,
    /// A parameter is destructured in the signature.
    pub takes_apart: bool,
    /// The function exists only in tests.
    pub in_test: bool,
}

impl Function {
    /// Returns the number of lines, without attributes and comments above the function.
    #[must_use]
    pub const fn lines(&self) -> usize {
        self.last_line - self.first_line + 1
    }
}

/// Name imported by a `use`.
#[derive(Debug)]
pub struct Import {
    /// Scope that contains the import.
    pub scope: String,
    /// Path of the import, without `self` at the end; that of a glob ends with `*`.
    pub path: String,
    /// Name in this scope; `*` for a glob.
    pub name: String,
    /// Other modules may import the name from here.
    pub is_public: bool,
    /// Line of the last part of the path.
    pub line: usize,
    /// The import exists only in tests.
    pub in_test: bool,
}

/// Path in code, or macro that is called.
#[derive(Debug)]
pub struct Mention {
    /// Scope that contains the path.
    pub scope: String,
    /// The path without generics; that of a macro ends with `!`.
    pub path: String,
    /// Line on which the path begins.
    pub line: usize,
    /// The path exists only in tests.
    pub in_test: bool,
}

/// Call of a function or method, or a path to a function that is passed on.
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the function, without its path.
    pub name: String,
    /// Line of the name.
    pub line: usize,
}

/// Error of a source that is not valid Rust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntaxError {
    /// Line at which it is not.
    pub line: usize,
    /// Message of the parser, whose own error cannot leave its thread.
    pub reason: String,
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for SyntaxError {}

impl Outline {
    /// Returns the outline of the source `text`.
    pub fn of(text: &str) -> Result<Self, SyntaxError> {
        let fault = |error: syn::Error| SyntaxError { line: error.span().start().line, reason: error.to_string() };
        let tokens: TokenStream = text.parse().map_err(|error| fault(syn::Error::from(error)))?;
        let unsafe_lines = if text.contains("unsafe") { lines_of(tokens.clone(), "unsafe") } else { Vec::new() };
        let file: syn::File = syn::parse2(tokens).map_err(fault)?;
        let forbids_unsafe = file.attrs.iter().any(|attribute| attributes::lists(attribute, "forbid", "unsafe_code"));
        let outline = reader::read(&file, Self { forbids_unsafe, unsafe_lines, ..Self::default() });
        // Otherwise this thread would keep every source in memory because of its positions.
        proc_macro2::extra::invalidate_current_thread_spans();
        Ok(outline)
    }
}

/// Returns the lines of this word, at any depth.
fn lines_of(tokens: TokenStream, word: &str) -> Vec<usize> {
    let in_token = |token: TokenTree| match token {
        TokenTree::Group(group) => lines_of(group.stream(), word),
        TokenTree::Ident(found) if found == word => vec![line(found.span())],
        _ => Vec::new(),
    };
    tokens.into_iter().flat_map(in_token).collect()
}

fn line(span: Span) -> usize {
    span.start().line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Outline {
        Outline::of(text).unwrap()
    }

    #[test]
    fn functions_are_measured_to_their_closing_brace() {
        let outline = of("fn a(x: [u8; 2]) -> u8 {\n  if x { \"}\" }\n}\ntrait T { fn b(&self); }\ntype F = fn(u8);\n\
                          impl S<u8> {\n  fn c() {\n    fn d() {}\n  }\n}\nproptest! {\n  fn e(x in 0..9) {\n  }\n}\n");
        let functions = outline.functions.iter();
        let found: Vec<_> =
            functions.map(|found| (found.name.as_str(), found.owner.as_deref(), found.lines())).collect();
        let expected = [("a", None, 3), ("b", Some("T"), 1), ("c", Some("S"), 3), ("d", None, 1), ("e", None, 2)];
        assert_eq!(found, expected);
    }

    #[test]
    fn test_only_items_are_marked() {
        let outline =
            of("fn a() {}\n#[cfg(all(test, unix))]\n#[allow(x)]\nmod tests { fn b() { std::fs::read(); } }\n\
                          #[cfg(not(test))]\nfn c() {}\n#[test]\nfn d() {}\nimpl S {\n  #[cfg(test)]\n  fn e() {}\n}\n\
                          #[cfg(test)]\nmod rig;\nmod kept;\n");
        let functions = outline.functions.iter().filter(|found| found.in_test);
        assert_eq!(functions.map(|found| found.name.as_str()).collect::<Vec<_>>(), ["b", "d", "e"]);
        let modules: Vec<_> = outline.modules.iter().map(|found| (found.path.as_str(), found.in_test)).collect();
        assert_eq!(modules, [("rig", true), ("kept", false)]);
        assert!(outline.mentions[0].in_test && outline.mentions[0].scope == "tests::fn b");
    }

    #[test]
    fn imports_are_spelled_out() {
        let outline = of("use std::{fs, io::{self, Read as R}, net::*};\npub(crate) use a::b;\nuse c as d;\n\
                          fn f() -> impl X + use<'a> { use self::e; }\n");
        let imports = outline.imports.iter().map(|found| format!("{} {}", found.path, found.name));
        let expected = ["std::fs fs", "std::io io", "std::io::Read R", "std::net::* *", "a::b b", "c d", "self::e e"];
        assert_eq!(imports.collect::<Vec<_>>(), expected);
        assert!(outline.imports[4].is_public && !outline.imports[5].is_public);
        assert_eq!(outline.imports[6].scope, "fn f");
    }

    #[test]
    fn paths_are_found_wherever_code_is() {
        let outline = of(
            "fn f(a: b::C<D>) -> <e::F as g::H>::I {\n  j::k::<L>(m!(n::o));\n}\n#[p::q]\nstruct S(pub(in r) s::T);",
        );
        let paths: Vec<&str> = outline.mentions.iter().map(|found| found.path.as_str()).collect();
        for path in ["b::C", "D", "e::F", "g::H::I", "j::k", "L", "m!", "n::o", "s::T"] {
            assert!(paths.contains(&path), "{path} in {paths:?}");
        }
        assert!(!paths.iter().any(|path| path.starts_with('p') || *path == "r"), "{paths:?}");
    }

    #[test]
    fn calls_are_found_by_the_names_of_their_functions() {
        let outline = of("fn a(x: B) {\n  x.c()?.d::<E>(f(g));\n  H::i(J::k);\n  let l = x.m;\n}\n\
                          const N: O = O { p: |q| q.r() };\n#[cfg(test)]\nfn s() { t(); }\n");
        let calls = outline.calls.iter().map(|call| (call.name.as_str(), call.line));
        let mut found: Vec<_> = calls.collect();
        found.sort_unstable();
        assert_eq!(found, [("c", 2), ("d", 2), ("f", 2), ("i", 3), ("k", 3), ("r", 6)]);
    }

    #[test]
    fn results_with_texts_as_errors_are_found() {
        for source in [
            "fn f() -> Result<(), String> {}",
            "fn f(a: &dyn Fn() -> Option<io::Result<u8, std::string::String>>) {}",
            "fn f() -> Result<(), &'static str> {}",
            "struct S { a: Sender<Result<(), String>> }",
            "type R<T> = Result<T, String>;",
            "fn f() { g(|| Ok::<_, String>(1)); }",
            "impl FromStr for S { type Err = String; }",
            "impl TryFrom<u8> for S { type Error = &'static str; }",
        ] {
            assert_eq!(of(source).text_errors, [1], "{source}");
        }
        for source in [
            "fn f() -> Result<String, E> {}",
            "fn f() -> Result<(), Vec<String>> {}",
            "fn f() -> io::Result<String> {}",
            "fn f() -> Pair<(), String> {}",
            "impl T for S { type Output = String; }",
            "#[cfg(test)]\nfn f() -> Result<(), String> {}",
        ] {
            assert!(of(source).text_errors.is_empty(), "{source}");
        }
    }

    #[test]
    fn blocks_know_their_types() {
        let outline =
            of("impl<'a> super::A<'a> { fn f(&mut self) {} }\nimpl T for &mut B { fn f(&self) {} }\nimpl C {}\n");
        let blocks = outline.impls.iter();
        let found: Vec<_> = blocks.map(|block| (block.target.as_str(), block.of_trait, block.has_mutating)).collect();
        assert_eq!(found, [("super::A", false, true), ("B", true, false), ("C", false, false)]);
    }

    #[test]
    fn words_of_the_language_are_found_in_macros_and_not_in_strings() {
        let outline = of("#![forbid(unsafe_code)]\n// unsafe\nfn a() { m!(unsafe { b(\"unsafe\") });\n unsafe {} }\n");
        assert_eq!(outline.unsafe_lines, [3, 4]);
        assert!(outline.forbids_unsafe);
        assert!(!of("// #![forbid(unsafe_code)]\n#![deny(unsafe_code)]\n").forbids_unsafe);
    }

    #[test]
    fn an_invalid_source_is_an_error_with_its_line() {
        for (text, line) in [("fn a() {}\nfn b( {}\n", "line 2"), ("\n\"open", "line 2"), ("fn a() { 1 + }", "line 1")]
        {
            let fault = Outline::of(text).unwrap_err().to_string();
            assert!(fault.starts_with(line), "{fault}");
        }
    }
}
