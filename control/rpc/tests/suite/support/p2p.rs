//! Messages of the P2P store, for tests of their encoding.

use kvplane_rpc::codec::{decode, encode};
use kvplane_rpc::p2p::*;

use super::Show;

fn spec() -> ObjectSpec {
    ObjectSpec { sizes: vec![5, 0], shard_bytes: 4, hashes: vec![1 << 100, 2], about: vec![3] }
}

pub(crate) fn show_all(show: Show<'_>) {
    let [tenant, name, segment, host, rack] = ["t", "n/m", "s:1", "h", "r"].map(str::to_owned);
    let (t, n) = (tenant.clone(), name.clone());
    show("PublishObject", encode(&PublishObject { tenant: t, name: n, version: Some(7), spec: spec() }));
    let (t, n) = (tenant.clone(), name.clone());
    show("FindObject", encode(&FindObject { tenant: t, name: n, version: None }));
    let hold = HoldObject {
        tenant: tenant.clone(),
        name: name.clone(),
        version: 7,
        digest: 1 << 90,
        hold: Hold {
            client: 1,
            segment: segment.clone(),
            addresses: vec![4096, 0],
            origin: true,
            have: vec![(0, 1)],
            want: vec![(1, 2)],
            place: PeerLocation { host, rack },
            upload_bytes_per_second: 8,
            download_bytes_per_second: 9,
        },
    };
    show("HoldObject", encode(&hold));
    let failed = vec![FetchFailure { shard: 4, source: 5, corrupt: true }];
    show("ReportObject", encode(&ReportObject { client: 1, member: 2, got: vec![(3, 1)], failed }));
    show("RenewObjects", encode(&RenewObjects { client: 1 }));
    show("ReleaseObject", encode(&ReleaseObject { client: 1, member: 2, wait: true }));
    let after = Some(("a".to_owned(), 3));
    show("ListObjects", encode(&ListObjects { tenant: tenant.clone(), prefix: "p".to_owned(), after, limit: 4 }));
    show("DescribeObject", encode(&DescribeObject { tenant, name: name.clone(), version: Some(7) }));
    show("GetPeerKeys", encode(&GetPeerKeys { client: 1, tenant: "t".to_owned() }));
    show("WatchFetches", encode(&WatchFetches { client: 1 }));
    let [t, n, host, rack] = ["t", "n", "h", "r"].map(str::to_owned);
    show(
        "LocateObject",
        encode(&LocateObject {
            client: 1,
            tenant: t,
            name: n,
            version: 7,
            buffer: 2,
            near: PeerLocation { host, rack },
        }),
    );
    let job = "j".to_owned();
    let join = JoinRanks { client: 1, member: 2, join: RankJoin { job, rank: 3, ranks: 4, board: 4096 }, half: 1 };
    show("JoinRanks", encode(&join));
    let failed = vec![FetchFailure { shard: 4, source: 5, corrupt: false }];
    show("WantShards", encode(&WantShards { client: 1, member: 2, want: vec![(3, 1)], failed }));
    show("ObjectPublished", encode(&ObjectPublished { version: 7 }));
    show("ObjectFound", encode(&ObjectFound { version: 7, spec: spec() }));
    show("ObjectHeld", encode(&ObjectHeld { member: 2, lease_ns: 3 }));
    show("ObjectsRenewed", encode(&ObjectsRenewed { members: vec![2] }));
    show("ObjectReleased", encode(&ObjectReleased { readers: 3 }));
    let summary = ObjectSummary { name, version: 7, total_bytes: 5, shard_bytes: 4, shards: 2, members: 1 };
    show("ObjectList", encode(&ObjectList { objects: vec![summary], more: true }));
    let excluded = "x".to_owned();
    let member = ObjectMember { member: 2, segment: segment.clone(), origin: true, have: 3, need: 4, excluded };
    show("ObjectMembers", encode(&ObjectMembers { members: vec![member], lost: 1 }));
    let place = ObjectPlace { member: 2, segment: segment.clone(), address: 3, distance: 1 };
    show("ObjectPlaces", encode(&ObjectPlaces { places: vec![place] }));
    let parent = RankParent { member: 2, segment: segment.as_str().into(), addresses: vec![4096], board: Some(8192) };
    show("RanksJoined", encode(&RanksJoined { parent: Some(parent) }));
    let order = FetchOrder { member: 2, shard: 3, source: 4, segment: segment.into(), address: 5 };
    show("FetchOrders", encode(&FetchOrders { orders: vec![order] }));
}

pub(crate) fn decode_as_all(frame: &[u8]) {
    let _ = decode::<PublishObject>(frame);
    let _ = decode::<FindObject>(frame);
    let _ = decode::<HoldObject>(frame);
    let _ = decode::<GetPeerKeys>(frame);
    let _ = decode::<ReportObject>(frame);
    let _ = decode::<RenewObjects>(frame);
    let _ = decode::<ReleaseObject>(frame);
    let _ = decode::<ListObjects>(frame);
    let _ = decode::<DescribeObject>(frame);
    let _ = decode::<WatchFetches>(frame);
    let _ = decode::<LocateObject>(frame);
    let _ = decode::<JoinRanks>(frame);
    let _ = decode::<WantShards>(frame);
    let _ = decode::<RanksJoined>(frame);
    let _ = decode::<ObjectPlaces>(frame);
    let _ = decode::<ObjectPublished>(frame);
    let _ = decode::<ObjectFound>(frame);
    let _ = decode::<ObjectHeld>(frame);
    let _ = decode::<ObjectsRenewed>(frame);
    let _ = decode::<ObjectReleased>(frame);
    let _ = decode::<ObjectList>(frame);
    let _ = decode::<ObjectMembers>(frame);
    let _ = decode::<FetchOrders>(frame);
}
