//! Network namespaces, where available: each lives as long as an idle process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Process that keeps a network namespace alive.
pub(crate) struct Space(Child);

impl Drop for Space {
    fn drop(&mut self) {
        // Both calls are harmless if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the same command on a seemingly different host: it reads this boot id, so that it shares memory with no
/// other process. `None` without mount namespaces.
pub(crate) fn on_another_host(command: &Command, boot_id: &Path) -> Option<Command> {
    let script = r#"mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;
    let other = |program: &OsStr| {
        let mut other = Command::new("unshare");
        other.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(boot_id).arg(program);
        other
    };
    let works = other(OsStr::new("true")).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    let mut elsewhere = other(command.get_program());
    elsewhere.args(command.get_args()).stdin(Stdio::null());
    elsewhere.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    works.then_some(elsewhere)
}

impl Space {
    /// Creates a namespace of its own user, configured by this script; `None` if that is not possible.
    pub(crate) fn fresh(script: &str) -> Option<Self> {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net"]);
        Self::new(command, script)
    }

    /// Runs a script in the fresh namespace that a command creates, and keeps it alive.
    pub(crate) fn new(mut command: Command, script: &str) -> Option<Self> {
        let script = format!("{script} && echo there && exec sleep 3600");
        command.args(["sh", "-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let out = child.stdout.take().expect("it is piped");
        let space = Self(child);
        let there = BufReader::new(out).lines().map_while(Result::ok).any(|line| line == "there");
        there.then_some(space)
    }

    /// Returns the process that keeps it alive.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Returns the command prefix that enters it.
    pub(crate) fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--preserve-credentials", "--user", "--net", "--target", &self.pid().to_string(), "--"]);
        command
    }

    /// Returns the same command inside the namespace.
    pub(crate) fn inside(&self, command: &Command) -> Command {
        let mut inside = self.enter();
        inside.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside
    }
}
