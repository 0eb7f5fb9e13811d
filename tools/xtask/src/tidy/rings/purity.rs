//! Rule: the pure crates read no clock, start no thread, open nothing, and use no randomness of their own.
//!
//! Their inputs are arguments, which is why the simulator can run them unchanged and a seed reproduces a failure.
//! Clocks, threads and randomness are banned in their tests too, for the same reason; tests may read files, print and
//! hash. Names are found in imports and in written-out paths; a re-export under another name is not noticed.

use std::collections::BTreeMap;

use crate::tidy::Violation;
use crate::tidy::sources::outline::{Import, Mention};
use crate::tidy::sources::tree::{File, Tree};

/// Directories of the pure crates.
pub const PURE: [&str; 11] = [
    "dataplane/ticket",
    "dataplane/proto",
    "dataplane/client",
    "dataplane/collective",
    "dataplane/store",
    "dataplane/tier",
    "dataplane/shared",
    "control/cluster",
    "control/group",
    "control/conductor",
    "tools/sim",
];

/// Banned names that share a reason.
struct Ban {
    names: &'static [&'static str],
    in_tests_too: bool,
    instead: &'static str,
}

static BANS: [Ban; 7] = [
    Ban {
        names: &["Instant::now", "std::time::Instant", "SystemTime", "std::time::SystemTime"],
        in_tests_too: true,
        instead: "no clock here: take `now_ns: u64` as an argument",
    },
    Ban {
        names: &["std::thread", "thread::", "thread_local!"],
        in_tests_too: true,
        instead: "no threads here: the host that calls `handle` owns them",
    },
    Ban {
        names: &["rand::", "thread_rng", "getrandom::", "RandomState", "std::collections::hash_map::RandomState"],
        in_tests_too: true,
        instead: "no randomness of its own: take an `Rng` or a seed as an argument",
    },
    Ban {
        names: &["HashMap::new", "HashMap::with_capacity", "HashMap::from", "HashMap::default"],
        in_tests_too: false,
        instead: "its order differs from run to run: use BTreeMap or a seeded hasher",
    },
    Ban {
        names: &["HashSet::new", "HashSet::with_capacity", "HashSet::from", "HashSet::default"],
        in_tests_too: false,
        instead: "its order differs from run to run: use BTreeSet or a seeded hasher",
    },
    Ban {
        names: &[
            "std::fs",
            "fs::",
            "std::env",
            "env::",
            "std::process",
            "process::",
            "std::io::stdin",
            "std::io::stdout",
            "std::io::stderr",
            "std::net::TcpStream",
            "std::net::TcpListener",
            "std::net::UdpSocket",
            "TcpStream::",
            "TcpListener::",
            "UdpSocket::",
            "std::os::unix::net",
            "println!",
            "eprintln!",
            "print!",
            "eprint!",
        ],
        in_tests_too: false,
        instead: "no files, sockets, environment or printing here: return an output and let a driver do it",
    },
    Ban {
        names: &["std::sync::Mutex", "std::sync::RwLock", "std::sync::Condvar", "std::sync::mpsc", "Mutex::new"],
        in_tests_too: false,
        instead: "one owner per mutable thing: take `&mut self`, and let others send a message",
    },
];

/// Bans with their names, by the first word of the name: there are few of these and very many paths.
type Bans = BTreeMap<&'static str, Vec<(&'static Ban, &'static str)>>;

fn first_word(path: &str) -> &str {
    path.split_once("::").map_or(path, |(first, _)| first)
}

/// Checks the sources of the pure crates.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let mut bans: Bans = BTreeMap::new();
    for ban in &BANS {
        for &name in ban.names {
            bans.entry(first_word(name)).or_default().push((ban, name));
        }
    }
    for directory in PURE {
        for file in tree.below(directory).filter(|file| file.is_rust()) {
            check_file(file, &bans, out);
        }
    }
}

fn check_file(file: &File, bans: &Bans, out: &mut Vec<Violation>) {
    let mut report = |ban: &Ban, name: &str, line: usize, in_test: bool| {
        if ban.in_tests_too || !(in_test || file.is_test()) {
            out.push(Violation::new(&file.path, line, format!("`{name}` in a pure crate; {}", ban.instead)));
        }
    };
    for import in &file.outline.imports {
        let bans = bans.get(first_word(&import.path)).into_iter().flatten();
        for (ban, name) in bans.filter(|(_, name)| brings_in(import, name)) {
            report(ban, name, import.line, import.in_test);
        }
    }
    for mention in &file.outline.mentions {
        let bans = bans.get(first_word(&mention.path)).into_iter().flatten();
        for (ban, name) in bans.filter(|(_, name)| begins_with(mention, name)) {
            report(ban, name, mention.line, mention.in_test);
        }
    }
}

/// Returns true if an import brings in the item `name`, an item below it, or everything beside it.
fn brings_in(import: &Import, name: &str) -> bool {
    let mut wanted = name.split("::").filter(|word| !word.is_empty());
    for have in import.path.split("::") {
        match wanted.next() {
            None => return true,
            Some(_) if have == "*" => return true,
            Some(want) if want != have => return false,
            Some(_) => {}
        }
    }
    wanted.next().is_none()
}

/// Returns true if a path equals `name` or continues it; a name that ends with `::` has to be continued.
fn begins_with(mention: &Mention, name: &str) -> bool {
    match mention.path.strip_prefix(name) {
        Some(rest) => name.ends_with("::") || rest.is_empty() || rest.starts_with("::"),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    fn lines(source: &str) -> Vec<String> {
        let path = "dataplane/store/src/a.rs";
        let places = places(check, &[(path, source)]);
        places.iter().map(|place| place.rsplit(':').next().unwrap_or("").to_string()).collect()
    }

    #[test]
    fn passed_in_values_are_clean() {
        let source = "use std::collections::BTreeMap;\nuse std::time::Duration;\nuse std::net::SocketAddr;\n\
                      /// Like `Instant::now()`.\nfn a(now_ns: u64) { let s = \"std::fs\"; self.process(x);
                      /// crate::env::x(); }\n\
                      struct M { map: HashMap<u64, u64, Seeded> }\n";
        assert_eq!(lines(source), Vec::<String>::new());
    }

    #[test]
    fn each_kind_is_found_written_out() {
        let cases = [
            "fn a() { std::time::Instant::now(); }",
            "fn a() -> SystemTime { }",
            "fn a() { thread::sleep(x); }",
            "fn a() { rand::random(); }",
            "fn a() { HashMap::new(); }",
            "fn a() { HashSet::with_capacity(1); }",
            "fn a() { std::fs::read(x); }",
            "fn a() { println!(x); }",
            "fn a() { let m: std::sync::Mutex<u8>; }",
        ];
        for case in cases {
            assert_eq!(lines(case), ["1"], "{case}");
        }
    }

    #[test]
    fn imports_are_found_in_groups_and_globs() {
        assert_eq!(lines("use std::{\n    env,\n    time::{Duration, Instant},\n};\n"), ["2", "3"]);
        assert!(!lines("use std::time::*;\n").is_empty());
        assert_eq!(lines("use std::sync::{Arc, Mutex};\n"), ["1"]);
    }

    #[test]
    fn tests_may_read_files_but_no_clock() {
        let source = "#[cfg(test)]\nmod tests {\n    fn a() { std::fs::read(x); HashMap::new(); println!(x); }\n    \
                      fn b() { Instant::now(); }\n}\n";
        assert_eq!(lines(source), ["4"]);
    }

    #[test]
    fn other_crates_may() {
        let source = "fn a() { Instant::now(); }\n";
        assert_eq!(places(check, &[("dataplane/engine/src/a.rs", source)]), Vec::<String>::new());
    }
}
