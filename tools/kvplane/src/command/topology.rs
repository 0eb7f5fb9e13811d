//! `kvplane topology`: what this machine is, and where shards would sit.

use clap::Args;
use kvplane::{Explanation, TransferEngine, TransferEngineConfig};
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
    let found = engine.explain(peer)?;
    if json {
        println!("{:#}", as_json(peer, &found));
    } else {
        print!("{}", as_text(peer, &found));
    }
    Ok(())
}

fn as_json(peer: &str, found: &Explanation) -> serde_json::Value {
    let choices: Vec<_> = found
        .choices
        .iter()
        .map(|one| {
            serde_json::json!({
                "transport": one.transport,
                "usable": one.usable,
                "reason": one.reason,
                "mapped": one.mapped.to_string(),
                "pointers": one.pointers.to_string(),
            })
        })
        .collect();
    let chosen = serde_json::json!({ "mapped": found.for_mapped(), "pointers": found.for_pointers() });
    serde_json::json!({ "peer": peer, "chosen": chosen, "transports": choices })
}

fn as_text(peer: &str, found: &Explanation) -> String {
    let chosen = |transport: Option<&'static str>| transport.unwrap_or("no way");
    let mut text = format!(
        "{peer}\n  memory that can be mapped   {}\n  any other memory            {}\n\n",
        chosen(found.for_mapped()),
        chosen(found.for_pointers())
    );
    for one in &found.choices {
        let mark = if one.usable { "yes" } else { "no" };
        text.push_str(&format!("  {:<9} {mark:<4} {}\n", one.transport, one.reason));
        if one.usable {
            text.push_str(&format!("{:17}mapped memory: {}; any other: {}\n", "", one.mapped, one.pointers));
        }
    }
    text
}
