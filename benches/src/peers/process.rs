//! Child processes with a deadline on every reply, halted while others are measured.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::Failure;

/// Returns a command whose process ends with this one, also when this one is killed: process groups of their own get no
/// Ctrl-C. Without util-linux's `setpriv`, processes that do not watch their input would stay.
pub(crate) fn tied(program: impl AsRef<OsStr>) -> Command {
    let mut probe = Command::new("setpriv");
    probe.args(["--pdeathsig", "KILL", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
    if !probe.status().is_ok_and(|status| status.success()) {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Process in a group of its own; dropping it ends the whole group.
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Result<Self, Failure> {
        let shown = format!("{command:?}");
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{shown}: {error}"))?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            // The thread ends with the process's output.
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, lines })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that `wanted` converts to a value.
    pub(crate) fn expect<T>(&mut self, patience: Duration, wanted: impl Fn(&str) -> Option<T>) -> Result<T, Failure> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(found) = wanted(&line) {
                        return Ok(found);
                    }
                }
                Err(error) => return Err(format!("process {}: no answer: {error}", self.pid()).into()),
            }
        }
    }

    pub(crate) fn say(&mut self, line: &str) -> Result<(), Failure> {
        let stdin = self.stdin.as_mut().ok_or("its input is closed")?;
        writeln!(stdin, "{line}")?;
        Ok(stdin.flush()?)
    }

    /// Halts the group, so that spinning threads leave the cores to others.
    pub(crate) fn halt(&self) -> Result<(), Failure> {
        self.signal("STOP")
    }

    pub(crate) fn resume(&self) -> Result<(), Failure> {
        self.signal("CONT")
    }

    fn signal(&self, name: &str) -> Result<(), Failure> {
        // The shell's own kill is used because the standard library has no safe call for signals.
        let script = format!("kill -s {name} -- -{}", self.pid());
        let status = Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).status()?;
        if status.success() { Ok(()) } else { Err(format!("`{script}` failed").into()) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // Both calls are harmless if they have ended by themselves.
        let _ = self.signal("KILL");
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a program to its end and returns its output; kills it after `patience`.
pub(crate) fn output(child: &mut Child, patience: Duration) -> Result<String, Failure> {
    let stdout = child.stdout.take().ok_or("the program's output was to be a pipe")?;
    let (sender, received) = channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let outcome = BufReader::new(stdout).read_to_string(&mut text);
        let _ = sender.send(outcome.map(|_| text));
    });
    match received.recv_timeout(patience) {
        Ok(text) => Ok(text?),
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(format!("no end after {} s", patience.as_secs()).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_halted_process_answers_when_it_continues() {
        let mut process = Process::start(&mut tied("cat")).unwrap();
        process.halt().unwrap();
        process.say("hello").unwrap();
        process.resume().unwrap();
        let line = process.expect(Duration::from_secs(10), |line| Some(line.to_owned())).unwrap();
        assert_eq!(line, "hello");
    }

    #[test]
    fn a_program_without_end_is_ended() {
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::piped()).spawn().unwrap();
        assert!(output(&mut child, Duration::from_millis(50)).is_err());
    }
}
