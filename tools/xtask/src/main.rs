//! `cargo x`: parses the command line and runs one command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use xtask::cli::{self, Task};
use xtask::measuring::{bench, figures, lines, peers};
use xtask::nightly::{self, aarch64, deny, loom, miri, mutations, seeds};
use xtask::process::Failure;
use xtask::testing::{self, reference};
use xtask::workspace::Workspace;
use xtask::{ci, demo, python, rig, setup, tidy};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match cli::parse(&arguments) {
        Ok(task) => dispatch(task),
        Err(problem) => {
            eprintln!("cargo x: {problem}\n\n{}", cli::USAGE);
            return ExitCode::from(cli::USAGE_STATUS);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("cargo x: {failure}");
            ExitCode::from(failure.status)
        }
    }
}

fn dispatch(task: Task) -> Result<(), Failure> {
    let workspace = Workspace::find()?;
    match task {
        Task::Help => {
            println!("{}", cli::USAGE);
            Ok(())
        }
        Task::Setup(groups) => setup::run(&groups).and_then(|()| rig::prepare_where_asked(&workspace, &groups)),
        Task::Demo(arguments) => demo::run(&workspace, &arguments),
        Task::Test(arguments) => testing::run(&workspace, &arguments),
        Task::Seeds(arguments) => seeds::run(&workspace, &arguments),
        Task::Nightly(arguments) => nightly::run(&workspace, &arguments),
        Task::Deny => deny::run(&workspace),
        Task::Loom => loom::run(&workspace),
        Task::Miri => miri::run(&workspace),
        Task::Reference => reference::run(&workspace),
        Task::Lines(folder) => lines::run(&workspace, folder.as_deref()),
        Task::Figures => figures::run(&workspace),
        Task::Mutations(arguments) => mutations::run(&workspace, &arguments),
        Task::Kills(arguments) => seeds::kills(&workspace, &arguments),
        Task::Cluster(arguments) => seeds::cluster(&workspace, &arguments),
        Task::Silence(arguments) => seeds::silence(&workspace, &arguments),
        Task::Repairs(arguments) => seeds::repairs(&workspace, &arguments),
        Task::Networks(arguments) => seeds::networks(&workspace, &arguments),
        Task::Upgrades(arguments) => seeds::upgrades(&workspace, &arguments),
        Task::Fuzz(arguments) => seeds::fuzz(&workspace, &arguments),
        Task::Tidy { write_map: false } => tidy::run(&workspace),
        Task::Tidy { write_map: true } => tidy::write_map(&workspace),
        Task::Ci(steps) => ci::run(&workspace, &steps),
        Task::Bench(arguments) => bench::run(&workspace, &arguments),
        Task::Peers(arguments) => peers::run(&workspace, &arguments),
        Task::Stores(arguments) => peers::stores(&workspace, &arguments),
        Task::Interop(arguments) => peers::interop(&workspace, &arguments),
        Task::Wheel(target) => python::wheel(&workspace, target),
        Task::Aarch64(filters) => aarch64::run(&workspace, &filters),
        Task::Python(arguments) => python::test(&workspace, &arguments),
        Task::Rig(arguments) => Err(rig::run(&workspace, &arguments)),
    }
}
