//! `kvplane topology`: what this machine is, and where shards would sit.

use clap::Args;
use kvplane_topology::{Sysfs, draw, plan, synthetic};

use super::Failure;

/// What this machine is, and where shards would sit.
#[derive(Args)]
pub(crate) struct Topology {
    /// Plan for this many shards instead of what suits the machine.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    shards: Option<u16>,
    /// Draw an imagined machine, such as "numa:2 core:4 pu:2".
    #[arg(long)]
    synthetic: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Topology {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let machine = match &self.synthetic {
            Some(text) => synthetic::parse(text)?,
            None => Sysfs::system().read()?,
        };
        let plan = plan(&machine, self.shards.map(usize::from));
        if self.json {
            println!("{}", draw::json(&machine, &plan));
        } else {
            print!("{}", draw::text(&machine, &plan));
        }
        Ok(())
    }
}
