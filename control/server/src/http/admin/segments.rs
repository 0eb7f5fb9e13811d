//! Segments, in Mooncake's form. A node's pool is one segment, over all its shards.

use hyper::StatusCode;
use kvplane_rpc::message::{Segment, SegmentOwner};
use serde_json::{Value, json};

use super::{SEGMENT_NOT_FOUND, failure, ok, text};
use crate::cluster::view::View;
use crate::http::Answer;

/// Returns the bytes in use of a segment's memory, if its owner reports them; clients do not.
pub(crate) fn used_bytes(view: &View, segment: &Segment) -> u64 {
    let SegmentOwner::Node { node, incarnation } = segment.owner else { return 0 };
    let of = view.shards.iter().filter(|one| one.node == node.0 && one.incarnation == incarnation.0);
    of.flat_map(|one| &one.shards).map(|shard| shard.pool.used_bytes).sum()
}

/// Returns Mooncake's name and number of the state of a segment's owner.
fn state(view: &View, segment: &Segment) -> (&'static str, u8) {
    let SegmentOwner::Node { node, incarnation } = segment.owner else { return ("OK", 1) };
    let owner = view.members.iter().find(|member| member.node == node.0 && member.incarnation == incarnation.0);
    match owner.map(|member| member.state.as_str()) {
        Some("active" | "suspect") => ("OK", 1),
        Some("joining") | None => ("UNDEFINED", 0),
        Some("draining") if used_bytes(view, segment) > 0 => ("DRAINING", 2),
        Some("draining") => ("DRAINED", 3),
        Some(_) => ("UNMOUNTING", 5),
    }
}

/// Returns the segment of a name, or the answer that there is none.
pub(super) fn find<'a>(view: &'a View, name: &str) -> Result<&'a Segment, Answer> {
    let found = view.segments.iter().find(|segment| segment.name == name);
    found.ok_or_else(|| {
        failure(
            StatusCode::NOT_FOUND,
            SEGMENT_NOT_FOUND,
            &format!("there is no segment {name:?}: see /get_all_segments"),
        )
    })
}

/// Answers with used bytes and capacity, as text.
pub(super) fn used(view: &View, name: &str) -> Answer {
    match find(view, name) {
        Ok(segment) => {
            let used = used_bytes(view, segment);
            text(format!("{name}\nUsed(bytes): {used}\nCapacity(bytes) : {}\n", segment.bytes))
        }
        Err(answer) => answer,
    }
}

pub(super) fn status(view: &View, name: &str) -> Answer {
    match find(view, name) {
        Ok(segment) => {
            let (name_of, number) = state(view, segment);
            ok(&json!({ "success": true, "segment": name, "status": number, "status_name": name_of }))
        }
        Err(answer) => answer,
    }
}

/// Returns all segments with their details.
pub(super) fn detail(view: &View) -> Value {
    let segments: Vec<Value> = view
        .segments
        .iter()
        .map(|segment| {
            let used = used_bytes(view, segment);
            let percent = if segment.bytes == 0 { 0.0 } else { used as f64 * 100.0 / segment.bytes as f64 };
            let (owner, incarnation) = match segment.owner {
                SegmentOwner::Node { node, incarnation } => (node.0, incarnation.0),
                SegmentOwner::Client { client } => (client.0, 0),
            };
            json!({
                "segment_name": segment.name,
                "segment_id": format!("{owner:016x}-{incarnation:016x}"),
                "client_id": owner.to_string(),
                // Buffer addresses are offsets from here.
                "base_address": "0x0",
                "size_bytes": segment.bytes,
                "size_human": format!("{} GiB", segment.bytes as f64 / f64::from(1 << 30)),
                "te_endpoint": segment.address.to_string(),
                "protocol": "tcp",
                "status": state(view, segment).0,
                "allocator_used_bytes": used,
                "allocator_capacity_bytes": segment.bytes,
                "allocator_usage_percent": percent,
            })
        })
        .collect();
    json!({ "total_segments": segments.len(), "segments": segments })
}
