//! Sides of a run: their servers and their clients as processes.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::cells::Cell;
use super::options::Options;
use super::report::Figures;
use crate::Failure;
use crate::peer;
use crate::peers::meter::{Mark, Usage};
use crate::peers::process::{self, Process};

const PATIENCE: Duration = Duration::from_secs(120);

/// Store with one way to access it.
pub(crate) struct Side {
    pub(crate) name: &'static str,
    /// Name of its server, which several sides may share; empty if it needs none.
    pub(crate) server: &'static str,
    /// Script and its first arguments; empty if this program is the driver.
    script: &'static [&'static str],
    /// Transport argument of the client.
    way: &'static str,
}

const ALL: [Side; 7] = [
    Side { name: "ours tcp", server: "ours", script: &[], way: "tcp" },
    Side { name: "mooncake remote", server: "mooncake", script: &["mooncake_store.py"], way: "remote" },
    Side { name: "redis", server: "redis", script: &["text_stores.py", "redis"], way: "" },
    Side { name: "memcached", server: "memcached", script: &["text_stores.py", "memcached"], way: "" },
    Side { name: "ours shm", server: "ours", script: &[], way: "shm" },
    Side { name: "mooncake dummy", server: "mooncake", script: &["mooncake_store.py"], way: "dummy" },
    Side { name: "memcpy", server: "", script: &[], way: "memcpy" },
];

/// Returns the requested sides whose programs are installed; the others are reported.
pub(crate) fn of(options: &Options) -> Result<Vec<Side>, Failure> {
    let mut sides = Vec::from(ALL);
    sides.retain(|side| options.only.is_empty() || options.only.iter().any(|name| *name == side.name));
    if let Some(unknown) = options.only.iter().find(|name| ALL.iter().all(|side| side.name != name.as_str())) {
        return Err(format!("--only: {unknown:?} is not one of {:?}", super::NAMES).into());
    }
    sides.retain(|side| match missing(side.server, options) {
        Some(problem) => {
            println!("skipped: {}: {problem}", side.name);
            false
        }
        None => true,
    });
    Ok(sides)
}

fn missing(server: &str, options: &Options) -> Option<String> {
    let program = match server {
        "redis" => "redis-server",
        "memcached" => "memcached",
        "mooncake" => return (!options.python().exists()).then(|| format!("{:?} is not there", options.python())),
        _ => return None,
    };
    Command::new(program).arg("--version").output().err().map(|error| format!("{program}: {error}"))
}

impl Side {
    fn command(&self, options: &Options) -> Result<Command, Failure> {
        let Some((script, words)) = self.script.split_first() else {
            let mut command = process::tied(std::env::current_exe()?);
            command.arg(peer::ROLE);
            return Ok(command);
        };
        let system = PathBuf::from("python3");
        let python = if self.server == "mooncake" { options.python() } else { system };
        let mut command = process::tied(python);
        command.arg(options.scripts.join(script)).args(words);
        Ok(command)
    }
}

/// Running server.
pub(crate) struct Server {
    _process: Process,
    /// Line that it printed, which its clients get as an argument.
    pub(crate) said: String,
    /// Processes whose CPU time counts.
    pub(crate) pids: Vec<u32>,
}

impl Server {
    pub(crate) fn start(side: &Side, pool_bytes: u64, options: &Options) -> Result<Self, Failure> {
        let mut command = side.command(options)?;
        if side.script.is_empty() {
            command.args([super::ROLE_SERVER, &pool_bytes.to_string()]);
        } else {
            command.args(["serve", &pool_bytes.to_string()]).arg(&options.folder).stderr(Stdio::null());
        }
        let (process, ready) = ready(&mut command)?;
        println!("{}: {}", side.server, ready["version"].as_str().unwrap_or("unknown"));
        let said = ready["said"].as_str().unwrap_or_default().to_owned();
        Ok(Self { _process: process, said, pids: pids(&ready) })
    }
}

/// Clients of a side.
pub(crate) struct Clients {
    processes: Vec<Process>,
    pids: Vec<u32>,
    rounds: u32,
}

impl Clients {
    pub(crate) fn start(
        side: &Side,
        server: &str,
        options: &Options,
        count: u64,
        buffer_bytes: u64,
    ) -> Result<Self, Failure> {
        let mut clients = Self { processes: Vec::new(), pids: Vec::new(), rounds: (count * 1000) as u32 };
        for index in 0..count {
            let mut command = side.command(options)?;
            // Clients of the memcpy side share its memory.
            let (index, bytes) = (index.to_string(), buffer_bytes.to_string());
            let room = (super::cells::LEAST_POOL_BYTES / count).to_string();
            let server = if side.server.is_empty() { &room } else { server };
            if side.script.is_empty() {
                command.args([super::ROLE_CLIENT, side.way, server, &index, &bytes]);
            } else {
                command.args(["client", server, &index, &bytes]).stderr(Stdio::null());
                command.args(Some(side.way).filter(|way| !way.is_empty()));
            }
            let (process, ready) = ready(&mut command)?;
            clients.processes.push(process);
            clients.pids.extend(pids(&ready));
        }
        Ok(clients)
    }

    /// Returns a number that makes the keys of the next puts new.
    pub(crate) const fn next_round(&mut self) -> u32 {
        self.rounds += 1;
        self.rounds
    }

    /// Sends a command to every client, then reads all replies.
    pub(crate) fn ask(&mut self, line: &str) -> Result<Vec<Value>, Failure> {
        for process in &mut self.processes {
            process.say(line)?;
        }
        let answers: Vec<Result<Value, Failure>> =
            self.processes.iter_mut().map(|process| process.expect(PATIENCE, json)).collect();
        answers
            .into_iter()
            .map(|answer| match answer? {
                answer if answer["error"].is_string() => Err(answer["error"].to_string().into()),
                answer => Ok(answer),
            })
            .collect()
    }

    /// Like `ask`, for timed commands: the clients' calls together, from the first one's begin to the last one's end.
    pub(crate) fn timed(&mut self, line: &str, servers: &[u32], cell: Cell) -> Result<(Figures, Usage), Failure> {
        let watched: Vec<u32> = self.pids.iter().chain(servers).copied().collect();
        let mark = Mark::now(&watched);
        let answers = self.ask(line)?;
        let number = |answer: &Value, name: &str| answer[name].as_f64().unwrap_or(0.0);
        let all = |name: &'static str| answers.iter().map(move |answer| number(answer, name));
        let seconds = all("end").fold(0.0, f64::max) - all("begin").fold(f64::MAX, f64::min);
        let usage = mark.until_now(&watched);
        let calls: f64 = all("calls").sum();
        if calls < 1.0 || seconds <= 0.0 {
            return Err(format!("no figures in {answers:?}").into());
        }
        let gb_s = calls * (cell.size * cell.batch) as f64 / seconds / 1e9;
        let mean = |name| all(name).sum::<f64>() / answers.len() as f64;
        let figures = Figures { calls: calls as u64, seconds, gb_s, p50_us: mean("p50_us"), p99_us: mean("p99_us") };
        Ok((figures, usage))
    }
}

fn ready(command: &mut Command) -> Result<(Process, Value), Failure> {
    let mut process = Process::start(command)?;
    let ready = process.expect(PATIENCE, json)?;
    Ok((process, ready))
}

fn pids(ready: &Value) -> Vec<u32> {
    let pids = ready["pids"].as_array().into_iter().flatten();
    pids.filter_map(Value::as_u64).filter_map(|pid| u32::try_from(pid).ok()).collect()
}

fn json(line: &str) -> Option<Value> {
    if line.starts_with('{') { serde_json::from_str(line).ok() } else { None }
}
