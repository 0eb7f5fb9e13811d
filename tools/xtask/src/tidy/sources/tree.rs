//! Source tree in memory: all text files that belong to it.
//!
//! The list of files comes from git, so that ignored scratch files are left out; without a repository the directories
//! are walked. Files that are not UTF-8 are skipped. Rust sources are parsed on all cores, which is most of the time
//! that the rules take.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::cores;
use super::outline::{Outline, SyntaxError};

/// Text file.
#[derive(Debug)]
pub struct File {
    /// Path from the root, with `/`.
    pub path: String,
    /// Content on disk.
    pub text: String,
    /// Outline of a Rust source; empty for other files, and for sources that cannot be parsed.
    pub outline: Outline,
    /// Error of parsing the source, if it cannot be parsed.
    pub fault: Option<SyntaxError>,
}

impl File {
    /// Returns true for a Rust source file.
    #[must_use]
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Returns true for a dated record, which is not rewritten: a decision, or a page of the archive.
    #[must_use]
    pub fn is_dated_record(&self) -> bool {
        self.path.starts_with("docs/adr/") || self.path.starts_with("docs/archive/")
    }

    /// Returns true if the location marks the whole file as test code: in a `tests` or `benches` directory, or named
    /// `tests.rs`.
    #[must_use]
    pub fn is_test(&self) -> bool {
        let mut parts: Vec<&str> = self.path.split('/').collect();
        let name = parts.pop().unwrap_or_default();
        name.ends_with("tests.rs") || parts.iter().any(|part| matches!(*part, "tests" | "benches"))
    }

    /// Returns the lines of a page outside its blocks of code, with their numbers from 1.
    pub fn prose_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_code = false;
        (1..).zip(self.text.lines()).filter(move |(_, line)| {
            is_code ^= line.trim_start().starts_with("```");
            !is_code
        })
    }
}

/// Error of a file or directory that cannot be read.
#[derive(Debug)]
pub struct ReadError {
    /// Path of the file or directory.
    pub path: PathBuf,
    /// Error of the file system.
    pub source: io::Error,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.source)
    }
}

impl std::error::Error for ReadError {}

/// All text files, sorted by path.
#[derive(Debug)]
pub struct Tree {
    /// The files.
    pub files: Vec<File>,
}

impl Tree {
    /// Builds a tree of files given in memory.
    #[must_use]
    pub fn of(files: &[(&str, &str)]) -> Self {
        Self::parsed(files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect())
    }

    /// Reads the tree below `root`.
    pub fn read(root: &Path) -> Result<Self, ReadError> {
        let paths = match listed_by_git(root) {
            Some(paths) => paths,
            None => walk(root)?,
        };
        let mut files = Vec::new();
        for path in paths {
            let full = root.join(&path);
            // Listed but deleted in the working tree, or a link: no file of the tree.
            if !fs::symlink_metadata(&full).is_ok_and(|metadata| metadata.is_file()) {
                continue;
            }
            let bytes = fs::read(&full).map_err(|source| ReadError { path: full, source })?;
            if let Ok(text) = String::from_utf8(bytes) {
                files.push((path, text));
            }
        }
        Ok(Self::parsed(files))
    }

    /// Builds the tree of these paths and texts.
    fn parsed(mut sources: Vec<(String, String)>) -> Self {
        sources.sort();
        let outlines = cores::map(&sources, |(path, text)| outlined(path, text));
        let files = sources.into_iter().zip(outlines);
        let files = files.map(|((path, text), outlined)| {
            let (outline, fault) = match outlined {
                Ok(outline) => (outline, None),
                Err(fault) => (Outline::default(), Some(fault)),
            };
            File { path, text, outline, fault }
        });
        Self { files: files.collect() }
    }

    /// Returns the file at exactly `path`.
    #[must_use]
    pub fn file(&self, path: &str) -> Option<&File> {
        self.files.binary_search_by(|file| file.path.as_str().cmp(path)).ok().map(|index| &self.files[index])
    }

    /// Returns the Rust sources.
    pub fn rust(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_rust())
    }

    /// Returns the files below `directory`, which has no `/` at its end.
    pub fn below<'a>(&'a self, directory: &'a str) -> impl Iterator<Item = &'a File> {
        let within = move |file: &&File| file.path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'));
        self.files.iter().filter(within)
    }
}

fn outlined(path: &str, text: &str) -> Result<Outline, SyntaxError> {
    if path.ends_with(".rs") { Outline::of(text) } else { Ok(Outline::default()) }
}

fn listed_by_git(root: &Path) -> Option<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let output = git.stderr(Stdio::null()).output().ok()?;
    // An empty list means a tree that an enclosing repository ignores.
    if !output.status.success() || output.stdout.is_empty() {
        return None;
    }
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.split('\0').filter(|path| !path.is_empty()).map(str::to_string).collect())
}

fn walk(root: &Path) -> Result<Vec<String>, ReadError> {
    let mut paths = Vec::new();
    let mut pending = vec![String::new()];
    while let Some(directory) = pending.pop() {
        let full = root.join(&directory);
        let entries = fs::read_dir(&full).map_err(|source| ReadError { path: full, source })?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if directory.is_empty() { name.clone() } else { format!("{directory}/{name}") };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && !matches!(name.as_str(), ".git" | "target") => pending.push(path),
                Ok(kind) if kind.is_file() => paths.push(path),
                _ => {}
            }
        }
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_path_and_directory() {
        let tree = Tree::of(&[("b/c.rs", ""), ("a.md", ""), ("bc/d.rs", "")]);
        assert!(tree.file("b/c.rs").is_some() && tree.file("b").is_none());
        assert_eq!(tree.below("b").map(|file| file.path.as_str()).collect::<Vec<_>>(), ["b/c.rs"]);
        assert_eq!(tree.rust().count(), 2);
    }

    #[test]
    fn test_files_are_known_by_their_place() {
        for path in ["a/src/x/tests.rs", "a/tests/y.rs", "tests/src/lib.rs", "a/src/map_tests.rs"] {
            assert!(Tree::of(&[(path, "")]).files[0].is_test(), "{path}");
        }
        assert!(!Tree::of(&[("tools/testing.rs", "")]).files[0].is_test());
    }

    #[test]
    fn a_directory_is_walked_without_git() {
        let root = std::env::temp_dir().join(format!("xtask-tree-{}", std::process::id()));
        fs::create_dir_all(root.join("src/target")).unwrap();
        fs::write(root.join("src/a.rs"), "fn a() {}\n").unwrap();
        fs::write(root.join("src/b.bin"), [0xff, 0xfe]).unwrap();
        fs::write(root.join("src/target/c.rs"), "").unwrap();
        let mut paths = walk(&root).unwrap();
        let tree = Tree::read(&root);
        fs::remove_dir_all(&root).unwrap();
        paths.sort();
        assert_eq!(paths, ["src/a.rs", "src/b.bin"]);
        assert_eq!(tree.unwrap().files.len(), 1);
    }
}
