//! `kvplane-gpu`: devices of this machine, and rates of their memory beside those of plain copies.
//!
//! `cargo x test --gpu` runs it, and the suites of device memory. Without `KVPLANE_GPU` it runs over the drivers for
//! tests, where its figures say nothing and its checks of every byte the same.

#![forbid(unsafe_code)]

mod cards;
mod copies;
mod peer;
mod pool;
mod rates;
mod table;

use std::process::ExitCode;

use kvplane::device::DeviceId;

/// Error of any step, which ends the program.
type Error = Box<dyn std::error::Error>;

const USAGE: &str = "\
usage: kvplane-gpu cards            the devices that drivers answer for, and why others do not
       kvplane-gpu rates [--quick]  rates of device memory to the pool and back, to a process, and of plain copies";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["cards"] => {
            print!("{}", cards::find());
            Ok(())
        }
        ["rates"] => rates::run(&rates::SIZES),
        ["rates", "--quick"] => rates::run(&rates::QUICK),
        ["peer", card, bytes] => match (DeviceId::parse(card), bytes.parse()) {
            (Some(id), Ok(bytes)) => peer::serve(id, bytes),
            _ => Err(USAGE.into()),
        },
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvplane-gpu: {error}");
            ExitCode::FAILURE
        }
    }
}
