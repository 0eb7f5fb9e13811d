//! `kvplane topology`: what this machine is, and where shards would sit.

use clap::Args;
use kvplane::{TransferEngine, TransferEngineConfig};
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
    /// Say by which ways the engine of this name is reached from here, and why.
    #[arg(long, value_name = "PEER", conflicts_with_all = ["shards", "synthetic"])]
    explain: Option<String>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Topology {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if let Some(peer) = &self.explain {
            return explain(peer, self.json);
        }
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

/// Asks as an engine of the same machine and user would.
fn explain(peer: &str, json: bool) -> Result<(), Failure> {
    let engine = TransferEngine::start(TransferEngineConfig::default())?;
    let choices = engine.explain(peer)?;
    if json {
        let choices: Vec<_> = choices
            .iter()
            .map(|one| serde_json::json!({ "transport": one.transport, "usable": one.usable, "reason": one.reason }))
            .collect();
        println!("{:#}", serde_json::json!({ "peer": peer, "transports": choices }));
        return Ok(());
    }
    println!("{peer}");
    let preferred = choices.iter().position(|one| one.usable);
    for (index, one) in choices.iter().enumerate() {
        let mark = match (one.usable, preferred == Some(index)) {
            (_, true) => "preferred",
            (true, false) => "possible",
            (false, false) => "no",
        };
        println!("  {:<9} {mark:<10} {}", one.transport, one.reason);
    }
    Ok(())
}
