//! `kvplane ctl hot`: lists the objects with the most gets in the whole cluster, and resolves digests in reports to
//! names of objects.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use clap::Args;
use kvplane::ControlLink;
use kvplane::rpc::message::{HotList, HotShard, ListHot, ObjectFigures};
use serde_json::{Value, json};

use super::{Failure, size};

/// List the hottest objects.
#[derive(Args)]
pub(crate) struct Hot {
    /// Number of the only node to query. Default: all nodes.
    #[arg(long)]
    node: Option<u64>,
    /// Most objects to list.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Hot object at one shard.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Row {
    digest: u128,
    node: u64,
    shard: u16,
    gets_per_s: f64,
    bytes_per_s: f64,
}

/// Tenants and keys of objects by digest, as far as nodes have reported them.
#[derive(Default)]
pub(super) struct Names(BTreeMap<u128, (String, String)>);

impl Names {
    /// Collects the names in a report.
    pub(super) fn of(list: &HotList) -> Self {
        let all = list.nodes.iter().flat_map(|(_, shards)| shards).flat_map(|shard| &shard.names);
        Self(all.map(|one| (one.digest, shown(one))).collect())
    }

    /// Returns tenant and key; `None` for an object of which only the digest is known.
    pub(super) fn name(&self, digest: u128) -> Option<(&str, &str)> {
        self.0.get(&digest).map(|(tenant, key)| (&tenant[..], &key[..]))
    }

    /// Formats an object for the operator.
    pub(super) fn object(&self, digest: u128) -> String {
        match self.name(digest) {
            Some((tenant, key)) => format!("{key} of tenant {tenant} ({digest:032x})"),
            None => format!("{digest:032x}"),
        }
    }
}

/// Formats tenant and key as text, with escapes for bytes that are not text.
fn shown(one: &ObjectFigures) -> (String, String) {
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => bytes.escape_ascii().to_string(),
    };
    let tenant = if one.tenant.is_empty() { "default".to_owned() } else { text(&one.tenant) };
    (tenant, text(&one.key))
}

/// Returns the hottest objects first. An object that two nodes serve has a row for each: it has a replica.
fn rows(list: &HotList, limit: usize) -> Vec<Row> {
    let of_shard = |node: u64, shard: &HotShard| {
        let (number, seconds) = (shard.shard, shard.over_ns.max(1) as f64 / 1e9);
        let row = move |one: &kvplane::rpc::message::HotFigures| Row {
            digest: one.digest,
            node,
            shard: number,
            gets_per_s: one.gets as f64 / seconds,
            bytes_per_s: one.bytes as f64 / seconds,
        };
        shard.hot.iter().map(row).collect::<Vec<_>>()
    };
    let shards = list.nodes.iter().flat_map(|(node, shards)| shards.iter().map(|shard| (*node, shard)));
    let mut rows: Vec<Row> = shards.flat_map(|(node, shard)| of_shard(node, shard)).collect();
    // Thousandths keep the order of the rates.
    rows.sort_by_key(|row| (Reverse((row.gets_per_s * 1e3) as u64), row.digest, row.node));
    rows.truncate(limit);
    rows
}

impl Hot {
    pub(crate) fn run(&self, link: &ControlLink) -> Result<(), Failure> {
        let list = link.call(ListHot { node: self.node })?;
        let rows = rows(&list, usize::try_from(self.limit).unwrap_or(usize::MAX));
        let names = Names::of(&list);
        if self.json {
            let objects: Vec<Value> = rows.iter().map(|row| as_json(row, &names)).collect();
            println!("{:#}", json!({ "objects": objects }));
            return Ok(());
        }
        if rows.is_empty() {
            println!("no gets lately");
            return Ok(());
        }
        println!("{:>10}  {:>12}  {:>20} {:>5}  object", "gets/s", "bytes/s", "node", "shard");
        for row in &rows {
            let (gets, bytes) = (row.gets_per_s, size::show(row.bytes_per_s as u64));
            println!("{gets:>10.1}  {bytes:>12}  {:>20} {:>5}  {}", row.node, row.shard, names.object(row.digest));
        }
        Ok(())
    }
}

fn as_json(row: &Row, names: &Names) -> Value {
    let name = names.name(row.digest);
    json!({
        "digest": format!("{:032x}", row.digest),
        "tenant": name.map(|(tenant, _)| tenant),
        "key": name.map(|(_, key)| key),
        "node": row.node,
        "shard": row.shard,
        "gets_per_s": row.gets_per_s,
        "bytes_per_s": row.bytes_per_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane::rpc::message::HotFigures;

    #[test]
    fn the_hottest_objects_of_all_nodes_are_first_with_their_names() {
        let hot = |digest, gets| HotFigures { digest, gets, bytes: gets * 100 };
        let names = vec![ObjectFigures { digest: 1, tenant: b"acme".to_vec(), key: b"a\x01".to_vec() }];
        let one = HotShard { shard: 0, over_ns: 2_000_000_000, hot: vec![hot(1, 30), hot(2, 10)], names };
        let other = HotShard { shard: 1, over_ns: 1_000_000_000, hot: vec![hot(3, 12)], names: Vec::new() };
        let list = HotList { nodes: vec![(7, vec![one, other])] };
        let found: Vec<(u128, f64, f64)> =
            rows(&list, 2).iter().map(|row| (row.digest, row.gets_per_s, row.bytes_per_s)).collect();
        assert_eq!(found, [(1, 15.0, 1500.0), (3, 12.0, 1200.0)]);
        let names = Names::of(&list);
        assert_eq!(names.name(1), Some(("acme", "a\\x01")));
        assert!(names.object(1).starts_with("a\\x01 of tenant acme (") && names.object(3).ends_with('3'));
    }
}
