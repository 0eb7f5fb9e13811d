//! CPU cost of an idle `kvplane dev`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::Failure;
use crate::bed::Directory;

const WATCHED: Duration = Duration::from_secs(20);

pub(crate) fn run() -> Result<(), Failure> {
    println!("idle: CPU time of `kvplane dev` without clients over {} s", WATCHED.as_secs());
    let binary = std::env::current_exe()?.with_file_name("kvplane");
    let directory = Directory::new()?;
    let mut child = Command::new(&binary)
        .args(["dev", "--cluster", "idle", "--pool", "256M", "--runtime-directory", directory.text()])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}; build it first", binary.display()))?;
    let outcome = watch(&mut child);
    let _ = child.kill();
    let _ = child.wait();
    let share = outcome?;
    println!("  {:44} {:9.3} %  wanted: under 2", "of one core", share * 100.0);
    Ok(())
}

fn watch(child: &mut std::process::Child) -> Result<f64, Failure> {
    let stdout = child.stdout.take().ok_or("the node's output was to be a pipe")?;
    let ready = BufReader::new(stdout).lines().map_while(Result::ok).any(|line| line.starts_with("ready"));
    if !ready {
        return Err("kvplane dev ended before it was ready".into());
    }
    std::thread::sleep(Duration::from_secs(2));
    let (before_s, start) = (cpu_s(child.id())?, Instant::now());
    std::thread::sleep(WATCHED);
    Ok((cpu_s(child.id())? - before_s) / start.elapsed().as_secs_f64())
}

/// Returns the CPU seconds of a process from its threads' schedstat, which counts in nanoseconds.
fn cpu_s(pid: u32) -> Result<f64, Failure> {
    let mut ns = 0.0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        ns += text.split_ascii_whitespace().next().unwrap_or("0").parse::<f64>()?;
    }
    Ok(ns / 1e9)
}
