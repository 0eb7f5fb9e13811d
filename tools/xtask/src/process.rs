//! Child processes: shown with a leading `+`, run in the foreground, with their exit status passed on.

use std::env;
use std::fmt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

/// Failure of a command, with its exit status.
#[derive(Debug)]
pub struct Failure {
    /// Problem and next step, for the developer.
    pub message: String,
    /// Exit status of `cargo x`, never 0.
    pub status: u8,
}

impl Failure {
    /// Creates a failure with exit status 1.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: 1 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Formats a command line as typed in a shell, environment first.
#[must_use]
pub fn shown(command: &Command) -> String {
    let quoted = |word: &std::ffi::OsStr| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    let variables = command
        .get_envs()
        .filter_map(|(name, value)| value.map(|value| format!("{}={}", name.to_string_lossy(), quoted(value))));
    let words = std::iter::once(command.get_program()).chain(command.get_args()).map(quoted);
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// Shows and runs `command` to its end.
pub fn run(command: &mut Command) -> Result<(), Failure> {
    eprintln!("+ {}", shown(command));
    let status = command.status().map_err(|error| not_started(command, &error))?;
    check(command, status)
}

/// Shows `command` and becomes it, so that signals and the exit status are the program's own. Returns only if that
/// fails, with the reason.
#[must_use]
pub fn become_program(command: &mut Command) -> Failure {
    eprintln!("+ {}", shown(command));
    let error = command.exec();
    not_started(command, &error)
}

/// Turns an exit status into a result; a signal becomes 128 plus its number, as shells report it.
pub fn check(command: &Command, status: ExitStatus) -> Result<(), Failure> {
    if status.success() {
        return Ok(());
    }
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    let status = code.and_then(|code| u8::try_from(code).ok()).filter(|&code| code != 0).unwrap_or(1);
    let message = format!("exit status {status} from: {}", shown(command));
    Err(Failure { message, status })
}

/// Returns the failure of a program that did not start.
#[must_use]
pub fn not_started(command: &Command, error: &std::io::Error) -> Failure {
    Failure { message: format!("cannot run `{}`: {error}", shown(command)), status: 127 }
}

/// Finds `program` in `$PATH`, without starting a shell.
#[must_use]
pub fn find_program(program: &str) -> Option<PathBuf> {
    find_programs(program).into_iter().next()
}

/// Returns all programs of this name in `$PATH`, in its order.
#[must_use]
pub fn find_programs(program: &str) -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|directory| directory.join(program)).filter(|found| is_executable(found)).collect()
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_statuses_and_signals_are_handed_on() {
        let status_of = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            run(&mut command).map_err(|failure| failure.status)
        };
        assert_eq!(status_of("exit 0"), Ok(()));
        assert_eq!(status_of("exit 7"), Err(7));
        assert_eq!(status_of("kill -9 $$"), Err(137));
        let missing = run(&mut Command::new("no-such-program-at-all")).unwrap_err();
        assert_eq!(missing.status, 127);
        assert!(missing.message.contains("no-such-program-at-all"));
    }

    #[test]
    fn commands_are_shown_as_typed() {
        let mut command = Command::new("cargo");
        command.env("SEEDS", "200").args(["test", "-E", "package(a)", "it's"]);
        assert_eq!(shown(&command), r"SEEDS=200 cargo test -E 'package(a)' 'it'\''s'");
    }

    #[test]
    fn programs_are_found_in_the_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-at-all").is_none());
    }
}
