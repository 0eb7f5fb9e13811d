//! Locations of objects: a key's digest names its slot, the slot its owners, and the owners are asked by orders.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::StatusCode;
use kvplane_proto::Digest;
use kvplane_rpc::message::{KeyFound, OBJECTS_PER_ORDER};
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::{INTERNAL, INVALID_PARAMS, OBJECT_NOT_FOUND, failure, ok};
use crate::cluster::ClusterHost;
use crate::http::Answer;

/// Longest wait for an owner's answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Known replicas of an object.
#[derive(Default)]
struct ObjectFacts {
    /// Nodes that hold the object, with its location there.
    copies: Vec<(u64, KeyFound)>,
    /// Reason for which an owner gave no answer.
    trouble: Option<String>,
}

async fn ask(cluster: &ClusterHost, digests: &[Digest]) -> Vec<ObjectFacts> {
    let mut known: Vec<ObjectFacts> = digests.iter().map(|_| ObjectFacts::default()).collect();
    let mut by_node: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (at, digest) in digests.iter().enumerate() {
        match cluster.lock().map(|mut hosted| hosted.owners(*digest)) {
            Ok(owners) if owners.is_empty() => known[at].trouble = Some("no node is in the map".to_owned()),
            Ok(owners) => owners.into_iter().for_each(|node| by_node.entry(node).or_default().push(at)),
            Err(refusal) => known[at].trouble = Some(refusal.reason),
        }
    }
    let mut waiting = Vec::new();
    for (node, at) in by_node {
        let asked = at.iter().map(|at| digests[*at].0).collect();
        match cluster.lock().and_then(|mut hosted| hosted.nodes.follow.find(node, asked)) {
            Ok(answer) => waiting.push((node, at, answer)),
            Err(refusal) => at.iter().for_each(|at| known[*at].trouble = Some(refusal.reason.clone())),
        }
    }
    for (node, at, answer) in waiting {
        match timeout(PATIENCE, answer).await {
            Ok(Ok(found)) => {
                for (at, found) in at.into_iter().zip(found).filter(|(_, found)| !found.address.is_empty()) {
                    known[at].copies.push((node, found));
                }
            }
            _ => {
                let reason = format!("node {node} did not answer within {} s", PATIENCE.as_secs());
                at.iter().for_each(|at| known[*at].trouble = Some(reason.clone()));
            }
        }
    }
    known
}

fn digest(tenant: &str, key: &str) -> Digest {
    Digest::of(tenant.as_bytes(), key.as_bytes())
}

fn memory(known: &ObjectFacts) -> Vec<Value> {
    let copies = known.copies.iter().filter_map(|(_, found)| Some((found.memory?, &found.address)));
    copies
        .map(|((offset, bytes), address)| {
            json!({ "size_": bytes, "buffer_address_": offset, "transport_endpoint_": address, "protocol_": "tcp" })
        })
        .collect()
}

fn ssd(known: &ObjectFacts) -> Vec<Value> {
    let copies = known.copies.iter().filter_map(|(node, found)| Some((node, found.ssd?, &found.address)));
    copies
        .map(|(node, bytes, address)| {
            json!({ "client_id": node.to_string(), "object_size": bytes, "transport_endpoint": address })
        })
        .collect()
}

/// Answers for one key: its replicas in memory.
pub(super) async fn one(cluster: &ClusterHost, tenant: &str, key: &str) -> Answer {
    let known = ask(cluster, &[digest(tenant, key)]).await.pop().unwrap_or_default();
    match (known.copies.is_empty(), &known.trouble) {
        (false, _) => ok(&json!({ "success": true, "data": memory(&known) })),
        (true, None) => failure(StatusCode::NOT_FOUND, OBJECT_NOT_FOUND, "OBJECT_NOT_FOUND"),
        (true, Some(trouble)) => failure(StatusCode::INTERNAL_SERVER_ERROR, INTERNAL, trouble),
    }
}

/// Answers for several keys, separated by commas: their replicas in memory and on SSDs.
pub(super) async fn several(cluster: &ClusterHost, tenant: &str, keys: &str) -> Answer {
    let keys: Vec<&str> = keys.split(',').filter(|key| !key.is_empty()).collect();
    if keys.is_empty() || keys.len() > OBJECTS_PER_ORDER {
        let reason = format!("{} keys in one query: give 1 to {OBJECTS_PER_ORDER}", keys.len());
        return failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, &reason);
    }
    let digests: Vec<Digest> = keys.iter().map(|key| digest(tenant, key)).collect();
    let mut data = Map::new();
    for (key, known) in keys.iter().zip(ask(cluster, &digests).await) {
        let value = match (known.copies.is_empty(), &known.trouble) {
            (false, _) => json!({ "ok": true, "values": memory(&known), "local_disk_values": ssd(&known) }),
            (true, None) => json!({ "ok": false, "error": "OBJECT_NOT_FOUND" }),
            (true, Some(trouble)) => json!({ "ok": false, "error": trouble }),
        };
        data.insert((*key).to_owned(), value);
    }
    ok(&json!({ "success": true, "data": data }))
}
