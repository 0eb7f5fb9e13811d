//! Tests of invalid, expired and foreign certificates, and of authorities that are replaced under load.

use crate::support;

use std::time::{Duration, SystemTime};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_rpc::message::*;
use kvplane_rpc::{
    Authority, Client, ClientConfig, ConnectError, Event, Grant, Identity, RefusalCode, Rejection, Role, Scope,
};
use support::{Rig, Scratch, cluster, connect, run};

const DAY: Duration = Duration::from_secs(86_400);

fn message(result: Result<Client, ConnectError>) -> String {
    result.expect_err("it must be refused").to_string()
}

fn with(rig: &Rig, identity: Identity) -> ClientConfig {
    ClientConfig { identity, ..rig.config(Role::Client) }
}

fn valid(role: Role, from: SystemTime, to: SystemTime) -> Grant {
    Grant { valid: Some((from, to)), ..Grant::of(role) }
}

#[test]
fn a_certificate_is_valid_only_between_its_dates() {
    run(async {
        let rig = Rig::start().await;
        let now = SystemTime::now();
        let good = rig.authority.grant(&Grant::of(Role::Node).lasting(now, DAY)).unwrap();
        connect(&with(&rig, good)).await.expect("in its time");
        for (from, to) in [(now - 2 * DAY, now - DAY), (now + DAY, now + 2 * DAY)] {
            let identity = rig.authority.grant(&valid(Role::Node, from, to)).unwrap();
            let text = message(connect(&with(&rig, identity)).await);
            assert!(text.contains("not valid any more, or not yet") && text.contains("ctl cert"), "{text}");
        }
        rig.service.until(Event::Rejected(Rejection::Certificate)).await;
    });
}

#[test]
fn a_certificate_that_expires_closes_its_connection() {
    run(async {
        let rig = Rig::start().await;
        let now = SystemTime::now();
        let short = rig.authority.grant(&valid(Role::Client, now - DAY, now + Duration::from_secs(2))).unwrap();
        let client = connect(&with(&rig, short)).await.expect("it counts still");
        let list = || ListSegments { after: None, limit: 1 };
        // The first recheck is a fifth of a second after the expiry, by the limits of the tests.
        let error = loop {
            match client.call(&list()).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("not valid any more"), "{error}");
        // Nor does it count on later connections, as those of a session that is resumed.
        for _ in 0..20 {
            let error = client.call(&list()).await.expect_err("it has expired").to_string();
            assert!(error.contains("not valid any more"), "{error}");
        }
    });
}

#[test]
fn a_self_signed_certificate_is_rejected() {
    run(async {
        let rig = Rig::start().await;
        let key = rcgen::KeyPair::generate().unwrap();
        let names = vec!["node.test.kvplane".to_owned(), "*.node.test.kvplane".to_owned()];
        let certificate = rcgen::CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
        let identity = Identity::from_pem(&certificate.pem(), &key.serialize_pem(), "self-made").unwrap();
        let text = message(connect(&with(&rig, identity)).await);
        assert!(text.contains("not from its authority"), "{text}");
        rig.service.until(Event::Rejected(Rejection::Certificate)).await;
    });
}

#[test]
fn a_certificate_for_another_cluster_of_the_same_key_names_no_role() {
    run(async {
        let rig = Rig::start().await;
        // The key of one authority under the name of another cluster.
        let scratch = Scratch::new();
        Authority::load_or_generate(scratch.path(), &cluster()).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["node.other.kvplane".to_owned()]).unwrap();
        let signing =
            rcgen::KeyPair::from_pem(&std::fs::read_to_string(scratch.path().join("ca.key")).unwrap()).unwrap();
        let mut issuing = rcgen::CertificateParams::default();
        issuing.distinguished_name.push(rcgen::DnType::CommonName, "kvplane test authority");
        let issuer = rcgen::Issuer::new(issuing, signing);
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let identity = Identity::from_pem(&certificate.pem(), &key.serialize_pem(), "another cluster's").unwrap();
        let authority = Authority::load(scratch.path(), &cluster()).unwrap();
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let server = support::serve(&authority, at, &rig.service, support::limits()).await;
        let config =
            ClientConfig { address: server.address(), trust: authority.trust().clone(), ..with(&rig, identity) };
        let text = message(connect(&config).await);
        assert!(text.contains("names no role in cluster test"), "{text}");
    });
}

fn member(node: u64) -> Member {
    let address = "127.0.0.1:9".parse().unwrap();
    Member {
        node: NodeId(node),
        incarnation: Incarnation(1),
        weight: 1,
        failure_domain: "a".to_owned(),
        host: "h".to_owned(),
        shards: vec![ShardAddress { tcp: address, shm: None }],
    }
}

#[test]
fn a_node_speaks_for_itself_only() {
    run(async {
        let rig = Rig::start().await;
        let seven = Grant { scope: Scope::Node(7), ..Grant::of(Role::Node) };
        let client = connect(&with(&rig, rig.authority.grant(&seven).unwrap())).await.unwrap();
        let join = |node| Join { member: member(node), capacity_bytes: 1, version: "test".to_owned() };
        client.call(&join(7)).await.expect("itself");
        let refused = client.call(&join(8)).await.expect_err("another");
        assert_eq!(refused.refusal(), Some(RefusalCode::NotPermitted));
        assert!(refused.to_string().contains("may not speak for node 8, as join does"), "{refused}");
        let load = Load::default();
        let beat = client.call(&Heartbeat { node: 8, incarnation: 1, load }).await.expect_err("another");
        assert_eq!(beat.refusal(), Some(RefusalCode::NotPermitted));
        let leave = client.call(&Leave { node: 70, incarnation: Some(1) }).await.expect_err("another");
        assert_eq!(leave.refusal(), Some(RefusalCode::NotPermitted));
        let mut orders = client.stream(&WatchOrders { node: 8, incarnation: 1 }).await.unwrap();
        assert_eq!(orders.next().await.expect_err("another").refusal(), Some(RefusalCode::NotPermitted));
        // An operator may remove every node, and a certificate for all nodes is valid for each one.
        rig.client(Role::Admin).await.call(&Leave { node: 8, incarnation: None }).await.expect("an operator");
        rig.client(Role::Node).await.call(&join(8)).await.expect("all nodes");
    });
}

#[test]
fn an_invalid_grant_is_rejected() {
    let authority = Authority::generate(&cluster()).unwrap();
    for (role, scope) in [
        (Role::Client, Scope::Node(1)),
        (Role::Node, Scope::Tenant("acme".to_owned())),
        (Role::Admin, Scope::Node(1)),
        (Role::Client, Scope::Tenant("two.labels".to_owned())),
        (Role::Client, Scope::Tenant("*".to_owned())),
        (Role::Client, Scope::Tenant(String::new())),
    ] {
        assert!(authority.grant(&Grant { role, scope: scope.clone(), valid: None }).is_err(), "{role} {scope}");
    }
}

#[test]
fn an_authority_is_rotated_under_load() {
    run(async {
        let scratch = Scratch::new();
        let old = Authority::load_or_generate(scratch.path(), &cluster()).unwrap();
        let mut rig = Rig::start().await;
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        rig.server = support::serve(&old, at, &rig.service, support::limits()).await;
        let config = |authority: &Authority| ClientConfig {
            address: rig.server.address(),
            trust: authority.trust().clone(),
            identity: authority.issue(Role::Client).unwrap(),
            ..rig.config(Role::Client)
        };
        let early = config(&old);
        let stays = connect(&early).await.expect("the old authority");

        let new = Authority::rotate(scratch.path(), &cluster()).unwrap();
        assert_eq!(new.trust().authorities(), 2);
        let text = Authority::rotate(scratch.path(), &cluster()).err().expect("one at a time").to_string();
        assert!(text.contains("retire"), "{text}");
        // The server trusts both and still presents a certificate of the old authority: clients of both connect.
        rig.server.renew(&old.issue(Role::Control).unwrap(), new.trust()).unwrap();
        connect(&early).await.expect("the old authority is trusted still");
        connect(&config(&new)).await.expect("and the new one by now");

        // Now the server presents a certificate of the new authority, and the old one is not trusted any more.
        let alone = Authority::retire(scratch.path(), &cluster()).unwrap();
        assert_eq!(alone.trust().authorities(), 1);
        rig.server.renew(&alone.issue(Role::Control).unwrap(), alone.trust()).unwrap();
        let late = config(&alone);
        connect(&late).await.expect("the new authority");
        let both = ClientConfig { trust: new.trust().clone(), ..early.clone() };
        let text = message(connect(&both).await);
        assert!(text.contains("not from its authority"), "{text}");
        // Earlier connections are verified again, too.
        while stays.call(&ListSegments { after: None, limit: 1 }).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        connect(&late).await.expect("others are not touched");
    });
}
