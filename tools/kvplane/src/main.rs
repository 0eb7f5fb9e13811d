//! The `kvplane` binary: every process and tool of the system, one subcommand each.
//!
//! An error is one line on stderr that says what, which number or file, and what to do; the exit status is then 1,
//! and 2 for a command line that makes no sense.

mod command;

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
    // As `tebench`, the binary is that tool.
    let mut words: Vec<std::ffi::OsString> = std::env::args_os().collect();
    let called_tebench =
        words.first().is_some_and(|name| std::path::Path::new(name).file_stem().is_some_and(|stem| stem == "tebench"));
    if called_tebench {
        words.insert(1, "tebench".into());
    }
    if words.get(1).is_some_and(|word| word == "tebench") {
        words.iter_mut().for_each(double_dash);
    }
    match Arguments::parse_from(words).command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Mooncake's tools take `-flag` for `--flag`.
fn double_dash(word: &mut std::ffi::OsString) {
    let Some(text) = word.to_str() else { return };
    let single =
        text.strip_prefix('-').filter(|rest| rest.len() > 1 && rest.starts_with(|c: char| c.is_ascii_lowercase()));
    if let Some(rest) = single {
        *word = format!("--{rest}").into();
    }
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
