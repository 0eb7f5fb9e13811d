//! Child processes: other processes of kvplane that a command starts for itself.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::command::Failure;

/// Time limit for a child to be ready: a node touches every page of its pool first.
const READY: Duration = Duration::from_secs(60);

/// A child process of this program, which is killed when it is dropped.
pub(crate) struct ChildProcess(Child);

impl ChildProcess {
    /// Returns a command that starts this program.
    pub(crate) fn command() -> Result<Command, Failure> {
        Ok(Command::new(std::env::current_exe()?))
    }

    /// Starts a command of the program, named `name` in errors, and waits until it prints a line that `is_ready`;
    /// returns that line too. Every line that it ever prints is passed to `show`.
    pub(crate) fn start(
        name: &str,
        command: &mut Command,
        is_ready: impl Fn(&str) -> bool + Send + 'static,
        show: impl Fn(&str) + Send + 'static,
    ) -> Result<(Self, String), Failure> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or("the output of a child was to be a pipe")?;
        let child = Self(child);
        let (ready, wait) = mpsc::channel();
        // The thread lives as long as the output; reading it keeps the child from blocking on a full pipe.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                show(&line);
                if is_ready(&line) {
                    let _ = ready.send(line);
                }
            }
        });
        let line = wait.recv_timeout(READY).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => format!("kvplane {name} was not ready within {} s", READY.as_secs()),
            mpsc::RecvTimeoutError::Disconnected => {
                format!("kvplane {name} ended before it was ready: see its output above")
            }
        })?;
        Ok((child, line))
    }

    /// Returns the number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits until the process ends.
    pub(crate) fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.0.wait()
    }

    /// Kills the process, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        // Both calls are harmless if the process has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
