//! `cargo x deny`: checks licences, origins, versions and known faults of the dependencies with cargo-deny.
//!
//! The rules are in `deny.toml`. The check fetches nothing: known faults are looked up in the copy of the database that
//! `cargo deny fetch` leaves. A missing program or database is skipped, with a line that reports it.

use std::env;
use std::path::PathBuf;

use crate::process::{self, Failure};
use crate::workspace::Workspace;

const NOT_INSTALLED: &str = "skipped: cargo-deny is not installed; `cargo install cargo-deny --locked` does it";
const NO_DATABASE: &str = "skipped: known faults: there is no database of them; `cargo deny fetch` fetches it";

/// Checks that need only the lock file and the crates.
const CHECKS: [&str; 3] = ["licenses", "bans", "sources"];
/// Check that needs the database.
const ADVISORIES: &str = "advisories";

/// Checks the dependencies, as far as the installed tools allow.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    if process::find_program("cargo-deny").is_none() {
        println!("{NOT_INSTALLED}");
        return Ok(());
    }
    let has_database = database().is_some_and(|folder| has_folder(&folder));
    if !has_database {
        println!("{NO_DATABASE}");
    }
    process::run(&mut workspace.cargo(&words(has_database)))
}

fn words(has_database: bool) -> Vec<&'static str> {
    let mut words = vec!["deny", "--offline", "check", "--hide-inclusion-graph"];
    words.extend(CHECKS);
    words.extend(has_database.then_some(ADVISORIES));
    words
}

/// Returns the directory in which cargo-deny keeps databases.
fn database() -> Option<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    Some(home?.join("advisory-dbs"))
}

fn has_folder(folder: &PathBuf) -> bool {
    std::fs::read_dir(folder).is_ok_and(|entries| entries.flatten().any(|entry| entry.path().is_dir()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_faults_are_looked_up_where_there_is_a_database() {
        assert!(words(true).ends_with(&["licenses", "bans", "sources", "advisories"]));
        assert!(words(false).ends_with(&["licenses", "bans", "sources"]));
        assert!(words(true).starts_with(&["deny", "--offline", "check"]));
    }

    #[test]
    fn a_folder_without_folders_is_no_database() {
        let folder = env::temp_dir().join(format!("xtask-deny-{}", std::process::id()));
        assert!(!has_folder(&folder));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("db.lock"), "").unwrap();
        assert!(!has_folder(&folder));
        std::fs::create_dir(folder.join("advisory-db-1")).unwrap();
        assert!(has_folder(&folder));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
