//! Metrics and explanations of an engine's transports: the chosen transport and the reason, counters, and the
//! Prometheus text.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvplane_transfer::error::ArgumentError;
use kvplane_transfer::{
    Error, Metrics, Opcode, RailCounts, RdmaConfig, RdmaUse, Region, RegisterOptions, SegmentHandle, SubmitOptions,
    TaskState, TransferEngine, TransferEngineConfig, Use,
};

use crate::network::{self, End};
use crate::rig::{Side, Way, check, fill, pair, private_region, region};

const BYTES: usize = 1 << 20;

/// Settings with both transports of one host and TCP, unless changed.
fn config(change: impl FnOnce(&mut TransferEngineConfig)) -> TransferEngineConfig {
    let mut config = TransferEngineConfig { tcp: true, ..Way::Shm.config() };
    change(&mut config);
    config
}

/// Creates an engine with memory that can be mapped, and memory that cannot.
fn both(config: TransferEngineConfig) -> (Side, Arc<Region>) {
    let side = Side::new(config, BYTES);
    let private = private_region(BYTES);
    side.engine.register(Arc::clone(&private), &RegisterOptions::default()).unwrap();
    (side, private)
}

/// Returns true if the kernel copies between this process and itself; reports it otherwise.
pub(crate) fn kernel_copies() -> bool {
    let (a, b) = (Side::new(config(|_| ()), 4096), Side::new(config(|_| ()), 4096));
    let found = a.engine.explain(b.engine.name()).unwrap();
    let cma = found.choices.iter().find(|one| one.transport == "cma").unwrap();
    if !cma.usable {
        println!("skipped: copies by the kernel between processes: {}", cma.reason);
    }
    cma.usable
}

/// Returns operations, bytes and counted times by transport.
fn by_transport(metrics: &Metrics) -> BTreeMap<&'static str, RailCounts> {
    let mut all: BTreeMap<&'static str, RailCounts> = BTreeMap::new();
    for rail in metrics.rails.iter().filter(|rail| rail.bytes > 0) {
        let sum = all.entry(rail.transport.name()).or_default();
        sum.operations += rail.operations;
        sum.bytes += rail.bytes;
        sum.queue.merge(&rail.queue);
        sum.service.merge(&rail.service);
    }
    all
}

fn move_all(side: &Side, opcode: Opcode, target: SegmentHandle, theirs: u64) {
    let request = side.request(opcode, 0, (target, theirs), BYTES);
    let done = side.engine.submit(&[request], &SubmitOptions::default()).unwrap().wait();
    assert_eq!(done.state, TaskState::Completed);
}

#[test]
fn every_transport_is_counted_under_its_own_name() {
    let cma = kernel_copies();
    let (a, (b, private)) = (Side::new(config(|_| ()), BYTES), both(config(|_| ())));
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    fill(&a.region, 0, BYTES, 1);
    move_all(&a, Opcode::Write, peer, b.region.address());
    move_all(&a, Opcode::Write, peer, private.address());
    check(&private, 0, BYTES, 1);
    let second = region(BYTES);
    a.engine.register(Arc::clone(&second), &RegisterOptions::default()).unwrap();
    move_all(&a, Opcode::Write, SegmentHandle::LOCAL, second.address());
    move_all(&a, Opcode::Read, SegmentHandle::LOCAL, second.address());
    let metrics = a.engine.metrics();
    let counted = by_transport(&metrics);
    let bytes: Vec<_> = counted.iter().map(|(name, counts)| (*name, counts.bytes)).collect();
    let one = BYTES as u64;
    assert_eq!(bytes, [(if cma { "cma" } else { "tcp" }, one), ("local", 2 * one), ("shm", one)].map(|x| x).to_vec());
    for (name, counts) in &counted {
        assert_eq!((counts.service.count(), counts.queue.count()), (counts.operations, counts.operations), "{name}");
        // A megabyte takes longer than the clock's resolution, by any transport.
        assert!(counts.service.sum_ns() > 1000, "{name}: {} ns", counts.service.sum_ns());
    }
    for rail in metrics.rails.iter().filter(|rail| rail.bytes > 0) {
        let whose = if rail.transport.name() == "local" { a.engine.name() } else { b.engine.name() };
        assert_eq!(rail.peer, whose);
    }
    assert_eq!(metrics.in_flight, 0);
}

#[test]
fn devices_are_explained_and_counted_under_their_own_name() {
    let (a, b, peer) = pair(Way::Rdma, BYTES);
    let found = a.engine.explain(b.engine.name()).unwrap();
    assert_eq!((found.for_mapped(), found.for_pointers()), (Some("rdma"), Some("rdma")), "{found:#?}");
    let open: Vec<&str> = found.choices.iter().filter(|one| one.usable).map(|one| one.transport).collect();
    assert_eq!(open, ["rdma"], "{found:#?}");
    fill(&a.region, 0, BYTES, 1);
    move_all(&a, Opcode::Write, peer, b.region.address());
    check(&b.region, 0, BYTES, 1);
    let metrics = a.engine.metrics();
    assert!(metrics.rails.iter().all(|rail| rail.bytes == 0 || rail.peer == b.engine.name()), "{metrics:?}");
    let bytes: Vec<_> = by_transport(&metrics).into_iter().map(|(name, counts)| (name, counts.bytes)).collect();
    assert_eq!(bytes, [("rdma", BYTES as u64)]);
    assert!(
        a.engine.metrics_text().contains(&format!("transport=\"rdma\",rail=\"{}\"", network::devices(End::Asks)[0]))
    );
    // A peer without devices reports that when asked, and is reached by another transport.
    let auto = RdmaConfig { mode: RdmaUse::Auto, ..Way::Rdma.config().rdma };
    let auto = Side::new(TransferEngineConfig { tcp: true, rdma: auto, ..Way::Rdma.config() }, BYTES);
    let plain = Side::new(Way::Tcp.config(), BYTES);
    let found = auto.engine.explain(plain.engine.name()).unwrap();
    assert_eq!((found.for_mapped(), found.for_pointers()), (Some("tcp"), Some("tcp")), "{found:#?}");
    let rdma = found.choices.iter().find(|one| one.transport == "rdma").unwrap();
    assert!(rdma.reason.contains("the peer has no RDMA device"), "{rdma:?}");
}

#[test]
fn files_and_stock_peers_are_counted_under_their_own_names() {
    let (a, b) = (Side::new(config(|config| config.native = false), BYTES), Side::new(config(|_| ()), BYTES));
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    move_all(&a, Opcode::Read, peer, b.region.address());
    let path = std::env::temp_dir().join(format!("kvplane-counted-{}", std::process::id()));
    let name = format!("file://{}?create={BYTES}&buffered", path.display());
    let file = a.engine.open_segment(&name).unwrap();
    let write = a.request(Opcode::Write, 0, (file, 0), BYTES);
    let done = a.engine.submit(&[write], &SubmitOptions::default()).unwrap().wait();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(done.state, TaskState::Completed);
    let bytes: Vec<_> =
        by_transport(&a.engine.metrics()).into_iter().map(|(name, counts)| (name, counts.bytes)).collect();
    assert_eq!(bytes, [("file", BYTES as u64), ("mooncake", BYTES as u64)]);
}

#[test]
fn a_slow_transfer_reports_its_transport_and_stage_times() {
    let a = Side::new(config(|config| config.slow = Duration::ZERO), BYTES);
    let b = Side::new(config(|_| ()), BYTES);
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    move_all(&a, Opcode::Write, peer, b.region.address());
    let second = region(BYTES);
    a.engine.register(Arc::clone(&second), &RegisterOptions::default()).unwrap();
    move_all(&a, Opcode::Write, SegmentHandle::LOCAL, second.address());
    let slow = a.engine.metrics().slow;
    for (name, peer) in [("shm", b.engine.name()), ("local", a.engine.name())] {
        let found = slow.iter().find(|one| one.transport.name() == name && one.bytes > 0);
        let found = found.unwrap_or_else(|| panic!("no slow one by {name}: {slow:?}"));
        assert_eq!((found.peer.as_str(), found.attempts, found.earlier_ns), (peer, 0, 0));
        assert!(found.service_ns > 1000, "{found:?}");
    }
}

/// Transports chosen for memory that can be mapped and for any other, by the settings of the initiator.
#[test]
fn the_explained_transport_is_used_and_the_others_have_a_reason() {
    let cma = kernel_copies();
    let pointers = if cma { "cma" } else { "tcp" };
    /// Settings to change, the transport chosen for either kind of memory, and words of the reasons against others.
    type Case = (fn(&mut TransferEngineConfig), &'static str, &'static str, &'static [(&'static str, &'static str)]);
    let cases: [Case; 6] = [
        (
            |_| (),
            "shm",
            pointers,
            &[("local", "another engine"), ("mooncake", "the native protocol"), ("file", "not a file")],
        ),
        (|config| config.mapping = false, pointers, pointers, &[("shm", "(mapping)")]),
        (|config| config.cma = false, "shm", "tcp", &[("cma", "(cma)")]),
        (
            |config| config.shared_memory = false,
            "tcp",
            "tcp",
            &[("shm", "(shared_memory)"), ("cma", "(shared_memory)")],
        ),
        (|config| config.native = false, "mooncake", "mooncake", &[("shm", "(native)"), ("tcp", "(native)")]),
        (
            |config| (config.mapping, config.cma) = (false, false),
            "tcp",
            "tcp",
            &[("shm", "(mapping)"), ("cma", "(cma)")],
        ),
    ];
    let (b, private) = both(config(|_| ()));
    for (number, (change, mapped, other, reasons)) in cases.into_iter().enumerate() {
        let a = Side::new(config(change), BYTES);
        let found = a.engine.explain(b.engine.name()).unwrap();
        assert_eq!(
            (found.for_mapped(), found.for_pointers()),
            (Some(mapped), Some(other)),
            "case {number}: {found:#?}"
        );
        for (transport, part) in reasons {
            let choice = found.choices.iter().find(|one| one.transport == *transport).unwrap();
            assert!(!choice.usable && choice.reason.contains(part), "case {number}: {choice:?}");
            assert_eq!(
                (&choice.mapped, &choice.pointers),
                (&Use::No(choice.reason.clone()), &Use::No(choice.reason.clone()))
            );
        }
        let peer = a.engine.open_segment(b.engine.name()).unwrap();
        move_all(&a, Opcode::Write, peer, b.region.address());
        let taken: Vec<&str> = by_transport(&a.engine.metrics()).into_keys().collect();
        assert_eq!(taken, [mapped], "case {number}");
        move_all(&a, Opcode::Write, peer, private.address());
        assert!(by_transport(&a.engine.metrics()).contains_key(other), "case {number}");
    }
    let own = b.engine.explain(b.engine.name()).unwrap();
    assert_eq!((own.for_mapped(), own.for_pointers()), (Some("local"), Some("local")));
}

#[test]
fn settings_of_the_peer_and_unusable_paths_are_explained() {
    let a = Side::new(config(|config| config.tcp = false), BYTES);
    let alone = Side::new(config(|config| config.shared_memory = false), BYTES);
    let found = a.engine.explain(alone.engine.name()).unwrap();
    assert_eq!(found.for_pointers(), Some("tcp"), "{found:#?}");
    let reason = |transport: &str| &found.choices.iter().find(|one| one.transport == transport).unwrap().reason;
    assert!(reason("shm").contains("switched off there"), "{found:#?}");
    assert!(reason("tcp").contains("no other way"), "{found:#?}");
    let b = Side::new(config(|_| ()), BYTES);
    let found = a.engine.explain(b.engine.name()).unwrap();
    let tcp = found.choices.iter().find(|one| one.transport == "tcp").unwrap();
    assert!(!tcp.usable && tcp.reason.contains("(tcp)"), "{found:#?}");
    // Engines of another cluster are rejected by the serving side.
    let stranger = Side::new(config(|config| config.cluster = "another".to_owned()), BYTES);
    let found = stranger.engine.explain(b.engine.name()).unwrap();
    assert_eq!((found.for_mapped(), found.for_pointers()), (None, None), "{found:#?}");
    assert!(found.choices.iter().all(|one| !one.usable && !one.reason.is_empty()), "{found:#?}");
    let none = config(|config| (config.tcp, config.mapping, config.cma) = (false, false, false));
    assert!(matches!(TransferEngine::start(none), Err(Error::Argument(ArgumentError::NoPath))));
}

/// Returns the samples of the text by series.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(' ').unwrap()).map(|(series, value)| (series, value.parse().unwrap())).collect()
}

#[test]
fn the_text_for_scrapers_says_what_was_counted_and_only_grows() {
    let (a, b) = (Side::new(Way::Tcp.config(), BYTES), Side::new(Way::Tcp.config(), BYTES));
    let nothing = a.engine.metrics_text();
    assert!(!samples(&nothing).keys().any(|series| series.starts_with("kvplane_transfer_bytes_total")), "{nothing}");
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    move_all(&a, Opcode::Write, peer, b.region.address());
    let text = a.engine.metrics_text();
    let found = samples(&text);
    let name = b.engine.name();
    let series = |family: &str, more: &str| format!("{family}{{peer=\"{name}\",transport=\"tcp\",rail=\"0\"{more}}}");
    assert_eq!(found[&*series("kvplane_transfer_bytes_total", "")], BYTES as f64, "{text}");
    let operations = found[&*series("kvplane_transfer_operations_total", "")];
    assert!(operations >= 16.0, "{text}");
    for family in ["kvplane_transfer_service_seconds", "kvplane_transfer_queue_seconds"] {
        assert_eq!(found[&*series(&format!("{family}_bucket"), ",le=\"+Inf\"")], operations, "{text}");
        assert_eq!(found[&*series(&format!("{family}_count"), "")], operations, "{text}");
    }
    assert!(found[&*series("kvplane_transfer_service_seconds_sum", "")] > 0.0, "{text}");
    assert_eq!(found["kvplane_transfer_batches_in_flight"], 0.0);
    let theirs = b.engine.metrics_text();
    let served = samples(&theirs)["kvplane_transfer_served_bytes_total{operation=\"write\"}"];
    assert_eq!(served, BYTES as f64, "{theirs}");
    // The counters of a peer that is gone are kept.
    a.engine.close_segment(peer).unwrap();
    let after = a.engine.metrics_text();
    let after = samples(&after);
    let bytes = |(series, value): (&&str, &f64)| series.starts_with("kvplane_transfer_bytes_total").then_some(*value);
    assert_eq!(after.iter().filter_map(bytes).sum::<f64>(), BYTES as f64, "{after:?}");
    assert_eq!(after[&*series("kvplane_transfer_bytes_total", "")], BYTES as f64);
}
