//! The `kvplane` binary: every process and tool of the system, one subcommand each.
//!
//! An error is one line on stderr that says what, which number or file, and what to do; the exit status is then 1,
//! and 2 for a command line that makes no sense.

mod command;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use command::Command;

/// The KV-cache dataplane for LLM serving.
#[derive(Parser)]
#[command(name = "kvplane", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    end_quietly_on_closed_pipe();
    let mut words: Vec<OsString> = std::env::args_os().collect();
    // Under the name of one of Mooncake's tools, the binary is that tool.
    let called = words.first().and_then(|name| Path::new(name).file_stem()).map(OsStr::to_owned);
    if let Some(tool) = called.filter(|name| TOOLS.iter().any(|tool| *name == **tool)) {
        words.insert(1, tool);
    }
    if words.get(1).is_some_and(|word| TOOLS.iter().any(|tool| *word == **tool)) {
        words.iter_mut().skip(2).for_each(gnu_style);
    }
    match Arguments::parse_from(words).command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Mooncake's tools that the binary stands in for.
const TOOLS: [&str; 2] = ["tebench", "transfer_engine_bench"];

/// Their flags that `no` may stand before.
const SWITCHES: [&str; 7] =
    ["auto_discovery", "check_consistency", "checksum", "deadline_bw_arbitration", "init_mem", "notifi", "use_vram"];

/// They take `-flag` for `--flag`, and `--noflag` for `--flag=false`.
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

/// `kvplane ctl status | head` is no bug of anybody's: when nobody reads on, the process ends as if by SIGPIPE.
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
