//! The `kvplane` binary: every process and tool of the system is one of its subcommands.
//!
//! An error is one line on stderr that names the failure, the number or file, and the next step. The exit status is
//! then 1; 2 for an invalid command line; 3 for a benchmark that had nothing to run.

#![forbid(unsafe_code)]

mod command;
mod config_file;
mod reference;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use command::{Command, NothingRun};

/// KV-cache dataplane for LLM serving.
#[derive(Parser)]
#[command(name = "kvplane", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    end_quietly_on_closed_pipe();
    let mut words: Vec<OsString> = std::env::args_os().collect();
    // Called by the name of one of Mooncake's tools, the binary acts as that tool.
    if let Some(tool) = words.first().and_then(|name| tool_called(name)) {
        // Usage lines then show a command that can be typed.
        words[0] = "kvplane".into();
        words.insert(1, tool.into());
    }
    if words.get(1).is_some_and(|word| TOOLS.iter().any(|tool| *word == **tool)) {
        words.iter_mut().skip(2).for_each(gnu_style);
    }
    let from_file = match config_file::merge(&mut words, &Arguments::command()) {
        Ok(from_file) => from_file,
        Err(error) => {
            eprintln!("kvplane: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let arguments = Arguments::try_parse_from(words).unwrap_or_else(|error| {
        if let Some(place) = from_file.place(&error) {
            eprintln!("kvplane: {place}: invalid setting:");
        }
        error.exit()
    });
    match arguments.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane: {error}");
            if error.is::<NothingRun>() { ExitCode::from(NOTHING_RUN) } else { ExitCode::FAILURE }
        }
    }
}

/// Exit status for an invalid command line or file of settings.
const USAGE: u8 = 2;

/// Exit status of a benchmark none of whose cases could run.
const NOTHING_RUN: u8 = 3;

/// Mooncake's tools that the binary replaces.
const TOOLS: [&str; 2] = ["tebench", "transfer_engine_bench"];

/// Most symbolic links that are followed from a name to the binary: the kernel's limit.
const LINKS_MOST: usize = 40;

/// Returns the tool that a program name means: by itself, by a link on its way to the binary, or by the binary's own
/// file.
fn tool_called(name: &OsStr) -> Option<&'static str> {
    let mut path = PathBuf::from(name);
    if !name.as_encoded_bytes().contains(&b'/') {
        let directories = std::env::var_os("PATH").unwrap_or_default();
        let found =
            std::env::split_paths(&directories).map(|directory| directory.join(name)).find(|path| path.exists());
        path = found.unwrap_or(path);
    }
    for _ in 0..LINKS_MOST {
        if let Some(tool) = tool_named(&path) {
            return Some(tool);
        }
        let Ok(next) = std::fs::read_link(&path) else { break };
        path = path.parent().map_or_else(|| next.clone(), |directory| directory.join(&next));
    }
    std::env::current_exe().ok().and_then(|path| tool_named(&path))
}

fn tool_named(path: &Path) -> Option<&'static str> {
    let stem = path.file_stem()?;
    TOOLS.into_iter().find(|tool| *stem == **tool)
}

/// Flags of these tools that `no` may negate.
const SWITCHES: [&str; 7] =
    ["auto_discovery", "check_consistency", "checksum", "deadline_bw_arbitration", "init_mem", "notifi", "use_vram"];

/// Rewrites `-flag` to `--flag`, and `--noflag` to `--flag=false`, both of which the tools take.
fn gnu_style(word: &mut OsString) {
    let Some(text) = word.to_str() else { return };
    let flag = text.strip_prefix("--").or_else(|| text.strip_prefix('-')).unwrap_or_default();
    if flag.len() < 2 || !flag.starts_with(|c: char| c.is_ascii_lowercase()) {
        return;
    }
    *word = match flag.strip_prefix("no").filter(|switch| SWITCHES.contains(switch)) {
        Some(switch) => format!("--{switch}=false").into(),
        None => format!("--{flag}").into(),
    };
}

/// Ends the process as if by SIGPIPE when its output is closed, as in `kvplane ctl status | head`: that is no error.
fn end_quietly_on_closed_pipe() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if text.starts_with("failed printing to std") && text.contains("Broken pipe") {
            std::process::exit(141);
        }
        report(panic);
    }));
}
