//! Names of an object's files: their paths, the names of partial files, and their display.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use kvplane_proto::digest::ContentHash;

/// Longest name of a file on the file systems of Linux, in bytes.
const NAME_BYTES: usize = 255;
/// Bytes of a file's name that its partial file's name contains: enough to recognize it, and never too long.
const KNOWN_BY: usize = 64;

/// Digits of the hash in the name of a partial file.
const HASH_DIGITS: usize = 32;

/// Error of an object whose names cannot be files of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NamesError {
    object: String,
    version: u64,
    fault: NameFault,
}

/// Reason why a name cannot be a file.
#[derive(Clone, PartialEq, Eq, Debug)]
enum NameFault {
    /// The name leads out of the directory, or to no file in it.
    NotBelow { name: String },
    /// A part of the path is longer than file systems allow.
    TooLong { part: OsString },
    /// Two files have the same path.
    Twice { path: PathBuf },
    /// The file has the path of the partial file of another one.
    IsPart { file: PathBuf, of: PathBuf },
    /// The file is at the path of the directory of another one.
    IsDirectory { file: PathBuf, of: PathBuf },
}

impl fmt::Display for NamesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { object, version, fault } = self;
        write!(f, "object {object:?} version {version} cannot be files: {fault}")
    }
}

impl std::error::Error for NamesError {}

impl fmt::Display for NameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBelow { name } => write!(f, "{name:?} is not below a directory"),
            Self::TooLong { part } => {
                write!(f, "{part:?} has {} bytes: a file's name has at most {NAME_BYTES}", part.len())
            }
            Self::Twice { path } => write!(f, "{path:?} is named twice"),
            Self::IsPart { file, of } => write!(f, "{file:?} is the name of the partial file of {of:?}"),
            Self::IsDirectory { file, of } => {
                write!(f, "{file:?} is to be a file, and also the directory of {of:?}")
            }
        }
    }
}

/// Path of a file, below the directory that an object is fetched into.
#[derive(Debug)]
pub(super) struct TargetPath {
    pub(super) path: PathBuf,
    /// Path of the partial file until it is complete.
    pub(super) part: PathBuf,
}

/// Escapes control characters, which could move a cursor or start a line on a terminal or in a log.
pub(super) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() {
            true => shown.extend(letter.escape_default()),
            false => shown.push(letter),
        }
    }
    shown
}

/// Returns the paths of an object's files.
///
/// # Errors
/// Fails if a file is not below the directory, or if two files would be written to the same path; the error names them.
pub(super) fn places(object: &str, version: u64, names: &[&str]) -> Result<Vec<TargetPath>, NamesError> {
    let refused = |fault| NamesError { object: object.to_owned(), version, fault };
    let mut places = Vec::with_capacity(names.len());
    for name in names {
        let path = below(name).map_err(refused)?;
        let part = path.with_file_name(part_name(object, version, &path));
        places.push(TargetPath { path, part });
    }
    apart(&places).map_err(refused)?;
    Ok(places)
}

/// Returns the path of a file relative to the directory.
fn below(name: &str) -> Result<PathBuf, NameFault> {
    let path = Path::new(name);
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    if name.is_empty() || name.contains('\0') || !is_below {
        return Err(NameFault::NotBelow { name: name.to_owned() });
    }
    if let Some(long) = path.iter().find(|part| part.len() > NAME_BYTES) {
        return Err(NameFault::TooLong { part: long.to_owned() });
    }
    // Normalizes the path, as by removing trailing slashes, so that equal paths compare equal.
    Ok(path.components().collect())
}

/// Returns the partial file's name, unique for an object, version and file, so that versions never mix.
pub(super) fn part_name(object: &str, version: u64, path: &Path) -> String {
    let mut hash = ContentHash::default();
    hash.update(&version.to_le_bytes());
    hash.update(&(object.len() as u64).to_le_bytes());
    hash.update(object.as_bytes());
    hash.update(path.as_os_str().as_encoded_bytes());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let known_by = &name[..name.floor_char_boundary(KNOWN_BY)];
    format!(".{known_by}.kvplane-{:032x}.part", hash.finish())
}

/// Returns true if a file name is that of a partial file, left by an interrupted get or reshard.
pub(super) fn is_part(name: &OsStr) -> bool {
    let within = name.as_encoded_bytes().strip_prefix(b".").and_then(|name| name.strip_suffix(b".part"));
    let Some((known_by, hash)) = within.and_then(|name| name.split_at_checked(name.len().checked_sub(HASH_DIGITS)?))
    else {
        return false;
    };
    known_by.ends_with(b".kvplane-") && hash.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Checks that no two files, complete or partial, have the same path.
fn apart(places: &[TargetPath]) -> Result<(), NameFault> {
    let mut taken: BTreeMap<&Path, &Path> = BTreeMap::new();
    for place in places {
        if taken.insert(&place.path, &place.path).is_some() {
            return Err(NameFault::Twice { path: place.path.clone() });
        }
    }
    for place in places {
        if let Some(other) = taken.insert(&place.part, &place.path) {
            return Err(NameFault::IsPart { file: other.to_owned(), of: place.path.clone() });
        }
    }
    for place in places {
        if let Some(file) = place.path.ancestors().skip(1).find_map(|above| taken.get(above)) {
            return Err(NameFault::IsDirectory { file: file.to_path_buf(), of: place.path.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(names: &[&str]) -> String {
        places("a", 1, names).unwrap_err().to_string()
    }

    #[test]
    fn files_have_places_of_their_own() {
        let found = places("a", 1, &["x", "x.part", "d/x", "d/y"]).unwrap();
        assert_eq!(found[2].path, Path::new("d/x"));
        assert!(found[2].part.starts_with("d"));
        // The name is the same when a get is resumed, and differs for other versions and objects.
        assert_eq!(found[0].part, places("a", 1, &["x"]).unwrap()[0].part);
        assert_ne!(found[0].part, places("a", 2, &["x"]).unwrap()[0].part);
        assert_ne!(found[0].part, places("b", 1, &["x"]).unwrap()[0].part);
        // Names of partial files of other programs.
        let part = found[0].part.to_str().unwrap();
        assert!(refusal(&["x", part]).contains("name of the partial file"), "{}", refusal(&["x", part]));
        assert!(refusal(&["x", &format!("{part}/y")]).contains("also the directory"));
    }

    #[test]
    fn partial_files_are_known_by_their_names() {
        let long = "n".repeat(255);
        for name in ["x", "x.part", ".x", "d/e", &long] {
            let place = &places("a", 1, &[name]).unwrap()[0];
            assert!(is_part(place.part.file_name().unwrap()), "{place:?}");
            assert!(!is_part(place.path.file_name().unwrap()), "{place:?}");
        }
        for name in ["", ".", ".part", ".x.kvplane-.part", ".x.kvplane-0123456789abcdef.part"] {
            assert!(!is_part(OsStr::new(name)), "{name:?}");
        }
    }

    #[test]
    fn conflicting_names_are_refused() {
        for outside in ["../x", "/x", "d/../../x", "./x", "", "a\0b"] {
            assert!(refusal(&[outside]).contains("not below"), "{outside:?}");
        }
        assert!(refusal(&["x", "y", "x"]).contains("\"x\" is named twice"));
        assert!(refusal(&["d/x", "d//x/"]).contains("named twice"));
        assert!(refusal(&["d/e/x", "d"]).contains("\"d\" is to be a file, and also the directory of \"d/e/x\""));
    }

    #[test]
    fn long_names_fit() {
        // Each letter has two bytes: the cut is not within one.
        let long = format!("x{}", "\u{e4}".repeat(127));
        let part = &places("a", 1, &[&long]).unwrap()[0].part;
        assert!(part.as_os_str().len() <= NAME_BYTES && part.to_str().unwrap().starts_with(".x\u{e4}"));
        assert!(refusal(&[&format!("d/x{long}/y")]).contains("has 256 bytes"));
    }

    #[test]
    fn controls_are_shown_as_text() {
        assert_eq!(printable("a\n\u{1b}[31m\u{e4}\u{9b}"), "a\\n\\u{1b}[31m\u{e4}\\u{9b}");
    }
}
