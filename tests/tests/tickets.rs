//! Tests of a cluster whose shards require tickets: clients and nodes have them without settings, keys change while
//! they work, and without a control plane operations continue.

mod bed;

use std::time::{Duration, Instant};

use bed::{Bed, value};
use kvplane::rpc::Role;
use kvplane::rpc::message::RotateTickets;
use kvplane::{Client, ControlLink, Node, NodeConfig};
use kvplane_server::TicketConfig;

const BYTES: usize = 4096;

/// Returns a configuration of tickets that expire soon.
fn short() -> TicketConfig {
    TicketConfig { lifetime_s: 3, ..TicketConfig::default() }
}

fn guarded(nodes: u64) -> Bed {
    Bed::start_with(nodes, 16 << 20, |config| config.tickets = Some(short()))
}

fn round_trip(client: &mut Client, number: u32) {
    let (key, bytes) = (format!("key-{number}"), value(number, BYTES));
    client.put(key.as_bytes(), &bytes).expect("a put");
    assert_eq!(client.get(key.as_bytes()).expect("a get"), Some(bytes), "{key}");
}

fn counted(bed: &Bed, of: impl Fn(&kvplane::ShardSnapshot) -> u64) -> u64 {
    let snapshots = bed.nodes.iter().flat_map(|node| node.snapshots().expect("it answers"));
    snapshots.map(|shard| of(&shard)).sum()
}

#[test]
fn tickets_need_no_settings() {
    let bed = guarded(2);
    for shared_memory in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared_memory)).expect("a client");
        (0..50).for_each(|number| round_trip(&mut client, number));
    }
    assert_eq!(counted(&bed, |shard| shard.service.unauthorized), 0);
    assert!(counted(&bed, |shard| shard.service.greeted) > 0);
}

#[test]
fn keys_change_and_tickets_are_renewed_while_clients_work() {
    let bed = guarded(2);
    let operator = ControlLink::to(&bed.control_name(), Role::Admin).expect("an operator");
    let mut client = Client::connect(&bed.client_config(false)).expect("a client");
    let (start, mut number) = (Instant::now(), 0);
    // The loop runs for twice a ticket's lifetime.
    while start.elapsed() < Duration::from_secs(6) {
        if number % 100 == 0 {
            operator.call(RotateTickets).expect("a new key");
        }
        round_trip(&mut client, number);
        number += 1;
        std::thread::sleep(Duration::from_millis(5));
    }
    // Another client connects, with a ticket under the newest key.
    round_trip(&mut Client::connect(&bed.client_config(false)).expect("a client"), 1_000_000);
    assert_eq!(counted(&bed, |shard| shard.service.tickets_ended), 0);
}

#[test]
fn data_operations_continue_without_the_control_plane() {
    let mut bed = guarded(1);
    let mut clients: Vec<Client> =
        (0..2).map(|_| Client::connect(&bed.client_config(false)).expect("a client")).collect();
    round_trip(&mut clients[0], 1);
    drop(bed.control.take());
    let start = Instant::now();
    let mut number = 2;
    while start.elapsed() < Duration::from_secs(5) {
        round_trip(&mut clients[0], number);
        number += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    // A new connection with an expired ticket works too: no control plane could renew it.
    round_trip(&mut clients[1], 1_000_000);
}

#[test]
fn data_ports_are_beyond_loopback_only_with_tickets() {
    let open = Bed::start(0, 0);
    let start = |bed: &Bed, listen: [u8; 4]| {
        let config = NodeConfig { listen: listen.into(), ..bed.node_config(1, 16 << 20) };
        Node::start(&config).map(drop).expect_err("a refusal").to_string()
    };
    let said = start(&open, [192, 0, 2, 1]);
    assert!(said.contains("without authentication") && said.contains("tickets"), "{said}");
    let guarded = guarded(0);
    let said = start(&guarded, [0, 0, 0, 0]);
    assert!(said.contains("name the address"), "{said}");
    // No host has this address: the bind is tried, and the system refuses it.
    let said = start(&guarded, [192, 0, 2, 1]);
    assert!(!said.contains("without authentication"), "{said}");
}
