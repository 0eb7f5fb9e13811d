//! Golden frames of the messages about SSD tiers.

use kvplane_rpc::codec::encode;
use kvplane_rpc::message::*;

use super::Show;

fn tier_shard() -> TierShard {
    TierShard { shard: 1, device: "d".to_owned(), live_bytes: 7, ..TierShard::default() }
}

pub(crate) fn show_requests(show: Show<'_>) {
    let report = ReportTiers { node: 7, incarnation: 2, carried_out: 3, shards: vec![tier_shard()] };
    show("ReportTiers", encode(&report));
    show("ListTiers", encode(&ListTiers { node: Some(7) }));
    show("OrderTiers", encode(&OrderTiers { node: None, action: TierAction::Verify { bytes_per_s: 9 } }));
}

pub(crate) fn show_replies(show: Show<'_>) {
    let order = TierOrder { number: 4, action: TierAction::Reclaim { free_percent: 20 } };
    show("TierOrders", encode(&TierOrders { orders: vec![order] }));
    let node = TierNode { node: 7, incarnation: 2, age_ns: 5, carried_out: 3, shards: vec![tier_shard()] };
    show("TierList", encode(&TierList { nodes: vec![node] }));
    show("TiersOrdered", encode(&TiersOrdered { orders: vec![(7, 4)] }));
}
