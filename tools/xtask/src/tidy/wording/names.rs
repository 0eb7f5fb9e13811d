//! Rule: a type is named by a noun, not by a participle alone.
//!
//! `Held`, `Asked` or `Made` express that something happened and leave open to what: they cannot be searched for, and
//! two crates have each of them for different things. `HeldHandle` and `CommittedObject` are specific. Only names of
//! one word are checked; variants of enums and functions are exempt.

use crate::tidy::Violation;
use crate::tidy::sources::outline::Kind;
use crate::tidy::sources::tree::Tree;

/// Participles that do not end in `ed`.
const IRREGULAR: [&str; 44] = [
    "Begun", "Borne", "Bound", "Broken", "Brought", "Built", "Chosen", "Done", "Drawn", "Found", "Given", "Gone",
    "Grown", "Heard", "Held", "Hidden", "Kept", "Known", "Led", "Left", "Lent", "Lost", "Made", "Meant", "Met", "Ran",
    "Read", "Said", "Seen", "Sent", "Shown", "Sold", "Spent", "Spoken", "Stolen", "Taken", "Taught", "Thought", "Told",
    "Torn", "Woken", "Won", "Worn", "Written",
];

/// Checks every Rust source.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for file in tree.rust() {
        for definition in file.outline.definitions.iter().filter(|found| is_type(&found.kind)) {
            let (name, line) = (&definition.name, definition.line);
            if is_participle(name) {
                let message = format!("`{name}` is a participle alone; name the thing: docs/glossary.md");
                out.push(Violation::new(&file.path, line, message));
            }
        }
    }
}

const fn is_type(kind: &Kind) -> bool {
    !matches!(kind, Kind::Function | Kind::Constant)
}

/// True for one capitalised word that is a past participle.
fn is_participle(name: &str) -> bool {
    let is_one_word = name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().skip(1).all(|letter| letter.is_ascii_lowercase());
    // `Feed`, `Speed` and `Bed` are nouns.
    let is_regular = name.len() > 4 && name.ends_with("ed") && !name.ends_with("eed");
    is_one_word && (is_regular || IRREGULAR.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    #[test]
    fn participles_are_no_names_of_types() {
        let source = "struct Held;\npub(crate) enum Answered { Held, Lost }\ntrait Named {}\ntype Told = u8;\n";
        assert_eq!(places(check, &[("a.rs", source)]), ["a.rs:1", "a.rs:2", "a.rs:3", "a.rs:4"]);
    }

    #[test]
    fn nouns_variants_and_functions_are_fine() {
        let source = "struct HeldHandle;\nenum State { Held, Asked }\nstruct Feed;\nstruct Bed;\nfn held() {}\n\
                      // struct Made\nstruct Tiering;\n";
        assert!(places(check, &[("a.rs", source)]).is_empty());
    }
}
