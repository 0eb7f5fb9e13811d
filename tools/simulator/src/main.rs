//! The `kvplane-sim` binary: placement policies of the Conductor and of other schedulers on a simulated cluster.
//!
//! An error is one line on stderr, and the exit status is then 1; 2 for an invalid command line.

#![forbid(unsafe_code)]

mod command;
mod comparison;
mod fairness;
mod figures;
mod long_prompts;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Simulate a cluster that the Conductor schedules, without a cluster.
#[derive(Parser)]
#[command(name = "kvplane-sim", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate a cluster on a trace: the Conductor's placement policies and those of other schedulers, beside bounds
    /// that no scheduler beats.
    Policies(command::Policies),
    /// Simulate tenants of one model, of which one sends many times its share.
    Fairness(fairness::Fairness),
    /// Simulate pipeline groups that prefill long prompts, alone and among the requests of a trace.
    LongPrompts(long_prompts::LongPrompts),
    /// Reproduce figures of Mooncake's papers with the simulator.
    Figures(command::Figures),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Policies(policies) => policies.run(),
        Command::Fairness(fairness) => fairness.run(),
        Command::LongPrompts(long_prompts) => long_prompts.run(),
        Command::Figures(figures) => figures.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane-sim: {error}");
            ExitCode::FAILURE
        }
    }
}
