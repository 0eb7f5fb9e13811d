//! Reader of macro inputs, which treats them as the code that they look like.
//!
//! A parser cannot know the grammar of a macro, so `syn` leaves its input as tokens. Rules that look for names need to
//! see into `assert!(..)` and `proptest! { .. }` too, and paths, definitions and functions are recognized by a few
//! tokens.

use proc_macro2::{Delimiter, Ident, Spacing, TokenStream, TokenTree};

use super::{Kind, line};

/// Content of a macro's input.
#[derive(Debug, Default)]
pub(super) struct Input {
    /// Paths and their lines; those of macros end with `!`.
    pub(super) paths: Vec<(String, usize)>,
    /// Types and traits.
    pub(super) definitions: Vec<(Ident, Kind)>,
    /// Functions with a body: name, first line, last line.
    pub(super) functions: Vec<(String, usize, usize)>,
}

/// Reads the input of a macro.
pub(super) fn read(tokens: TokenStream) -> Input {
    let mut input = Input::default();
    read_into(tokens, &mut input);
    input
}

fn read_into(tokens: TokenStream, input: &mut Input) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Group(group) => read_into(group.stream(), input),
            TokenTree::Ident(word) => {
                if let Some(TokenTree::Ident(name)) = tokens.get(at + 1) {
                    read_definition(word, name, &tokens[at..], input);
                }
                let (path, length) = path_at(&tokens[at..]);
                input.paths.push((path, line(word.span())));
                at += length;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
}

fn read_definition(keyword: &Ident, name: &Ident, rest: &[TokenTree], input: &mut Input) {
    let kind = match keyword.to_string().as_str() {
        // Fields are not counted here.
        "struct" | "union" => Kind::Struct { fields: 0 },
        "enum" => Kind::Enum,
        "trait" => Kind::Trait,
        "type" => Kind::Alias(String::new()),
        "fn" => {
            if let Some(last) = body_end(rest) {
                input.functions.push((name.to_string(), line(keyword.span()), last));
            }
            return;
        }
        _ => return,
    };
    input.definitions.push((name.clone(), kind));
}

/// Returns the last line of a function whose tokens begin the slice, if it has a body.
fn body_end(rest: &[TokenTree]) -> Option<usize> {
    for token in rest {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                return Some(line(group.span_close()));
            }
            TokenTree::Punct(punctuation) if punctuation.as_char() == ';' => return None,
            _ => {}
        }
    }
    None
}

/// Returns the path that begins the tokens, and the number of its tokens.
fn path_at(tokens: &[TokenTree]) -> (String, usize) {
    let mut path = String::new();
    let mut at = 0;
    while let Some(TokenTree::Ident(word)) = tokens.get(at) {
        path += &word.to_string();
        at += 1;
        if is_punctuation(tokens.get(at), '!') && !is_punctuation(tokens.get(at + 1), '=') {
            path.push('!');
            break;
        }
        let separator = is_joint(tokens.get(at)) && is_punctuation(tokens.get(at + 1), ':');
        if !separator || !matches!(tokens.get(at + 2), Some(TokenTree::Ident(_))) {
            break;
        }
        path += "::";
        at += 2;
    }
    (path, at)
}

fn is_punctuation(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punctuation)) if punctuation.as_char() == wanted)
}

fn is_joint(token: Option<&TokenTree>) -> bool {
    matches!(token, Some(TokenTree::Punct(colon)) if colon.as_char() == ':' && colon.spacing() == Spacing::Joint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(source: &str) -> Vec<String> {
        read(source.parse().unwrap()).paths.into_iter().map(|(path, _)| path).collect()
    }

    #[test]
    fn paths_are_read_whole_and_in_groups() {
        assert_eq!(paths("std::fs::read(a), b::<C>::d"), ["std::fs::read", "a", "b", "C", "d"]);
        assert_eq!(paths("f(dbg!(x)) != y, a: b::c"), ["f", "dbg!", "x", "y", "a", "b::c"]);
        assert_eq!(paths("\"std::fs\" 'x' 1 /* a::b */"), Vec::<String>::new());
    }

    #[test]
    fn definitions_and_functions_are_known_by_their_keywords() {
        let input = read("#[test]\nfn a(x in 0..9) {\n}\nstruct B; enum C {} fn d(); fn $e() {}".parse().unwrap());
        assert_eq!(input.functions, [("a".to_string(), 2, 3)]);
        let names: Vec<String> = input.definitions.iter().map(|(name, _)| name.to_string()).collect();
        assert_eq!(names, ["B", "C"]);
    }
}
