//! Names, handshakes and notices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_transfer::{
    Notice, NoticeTargets, Opcode, SegmentHandle, SubmitOptions, TaskState, TransferEngine, TransferEngineConfig,
};

use kvplane_mooncake::{Caller, Daemon, DaemonConfig, NoticeLimits, PublishedEngine};

use crate::rig::{PATIENCE, Side, Way, check, fill, pair};

fn notice(name: &str, message: &str) -> Notice {
    Notice { name: name.to_owned(), message: message.to_owned() }
}

fn wait_for_notices(engine: &TransferEngine, count: usize) -> Vec<Notice> {
    let start = Instant::now();
    let mut notices = Vec::new();
    while notices.len() < count {
        assert!(start.elapsed() < PATIENCE, "notices do not arrive: {notices:?}");
        notices.extend(engine.take_notices());
        std::thread::sleep(Duration::from_millis(1));
    }
    notices
}

#[test]
fn notices_arrive_once_and_in_order() {
    let (a, b, peer) = pair(Way::network(), 1 << 20);
    a.engine.notify(peer, &notice("first", "straight")).unwrap();
    a.engine.notify(SegmentHandle::LOCAL, &notice("own", "to ourselves")).unwrap();
    assert_eq!(a.engine.take_notices(), [notice("own", "to ourselves")]);
    let write = a.request(Opcode::Write, 0, (peer, b.region.address()), 1 << 20);
    for number in 0..20 {
        let options = SubmitOptions { notice: Some(notice("done", &number.to_string())), ..SubmitOptions::default() };
        // A request of 0 bytes is a notice only.
        let length = if number % 2 == 0 { 1 << 20 } else { 0 };
        let request = kvplane_transfer::TransferRequest { length, ..write };
        assert_eq!(a.engine.submit(&[request], &options).unwrap().wait().state, TaskState::Completed);
    }
    let notices = wait_for_notices(&b.engine, 21);
    assert_eq!(notices[0], notice("first", "straight"));
    for (number, found) in notices[1..].iter().enumerate() {
        assert_eq!(*found, notice("done", &number.to_string()));
    }
    assert!(b.engine.take_notices().is_empty());
}

#[test]
fn a_notice_to_all_goes_once_to_the_owner_of_each_segment() {
    let (a, b, to_b) = pair(Way::network(), 8192);
    let c = Side::new(Way::network().config(), 8192);
    let to_c = a.engine.open_segment(c.engine.name()).unwrap();
    let write = |to: SegmentHandle, side: &Side| a.request(Opcode::Write, 0, (to, side.region.address()), 4096);
    let requests = [
        write(to_b, &b),
        write(to_c, &c),
        write(to_b, &b),
        a.request(Opcode::Write, 0, (SegmentHandle::LOCAL, a.region.address() + 4096), 4096),
    ];
    let submit = |number: &str, notice_to| {
        let notice = Some(notice("done", number));
        let batch = a.engine.submit(&requests, &SubmitOptions { notice, notice_to, ..SubmitOptions::default() });
        assert_eq!(batch.unwrap().wait().state, TaskState::Completed);
    };
    submit("1", NoticeTargets::All);
    submit("2", NoticeTargets::First);
    assert_eq!(wait_for_notices(&b.engine, 2), [notice("done", "1"), notice("done", "2")]);
    assert_eq!(wait_for_notices(&c.engine, 1), [notice("done", "1")]);
    assert_eq!(wait_for_notices(&a.engine, 1), [notice("done", "1")]);
    // Notices to one peer are sent in order: nothing else came before these.
    a.engine.notify(to_c, &notice("after", "")).unwrap();
    a.engine.notify(SegmentHandle::LOCAL, &notice("after", "")).unwrap();
    assert_eq!(wait_for_notices(&c.engine, 1), [notice("after", "")]);
    assert_eq!(a.engine.take_notices(), [notice("after", "")]);
}

#[test]
fn a_batch_that_failed_sends_no_notice() {
    let (a, b, peer) = pair(Way::network(), 1 << 20);
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), 1 << 20);
    let options =
        SubmitOptions { notice: Some(notice("never", "")), deadline: Some(Duration::ZERO), ..SubmitOptions::default() };
    assert_eq!(a.engine.submit(&[read], &options).unwrap().wait().state, TaskState::Timeout);
    a.engine.notify(peer, &notice("after", "")).unwrap();
    assert_eq!(wait_for_notices(&b.engine, 1), [notice("after", "")]);
}

#[test]
fn a_probe_finds_living_engines() {
    let (a, b, _) = pair(Way::network(), 4096);
    let name = b.engine.name().to_owned();
    assert_eq!(name, b.engine.directory().address().to_string());
    a.engine.directory().probe(&name).unwrap();
    drop(b);
    assert_eq!(a.engine.directory().probe(&name).unwrap_err().code(), -102);
}

#[test]
fn ports_beyond_loopback_must_be_allowed() {
    let open = TransferEngineConfig { listen: ([0, 0, 0, 0], 0).into(), ..Way::Tcp.config() };
    assert_eq!(TransferEngine::start(open.clone()).unwrap_err().code(), -1);
    let open = TransferEngineConfig { open_to_network: true, ..open };
    assert_eq!(TransferEngine::start(open.clone()).unwrap_err().code(), -1);
    let engine = TransferEngine::start(TransferEngineConfig { announce: Some([127, 0, 0, 1].into()), ..open }).unwrap();
    let a = Side::new(Way::Tcp.config(), 4096);
    a.engine.open_segment(engine.name()).unwrap();
    let wrong = TransferEngineConfig { metadata: "carrier-pigeon://".to_owned(), ..Way::Tcp.config() };
    assert_eq!(TransferEngine::start(wrong).unwrap_err().code(), -1);
}

/// Reaches an engine whose descriptor lacks the native key, like a stock engine.
#[test]
fn an_engine_without_a_native_descriptor_is_reached_as_a_stock_one() {
    let (a, b, _) = pair(Way::Tcp, 1 << 20);
    let mut descriptor = Caller::default().descriptor(b.engine.name(), "{}").unwrap();
    assert_eq!(descriptor.buffers[0].address, b.region.address());
    for version in [1, 2] {
        let listening = Daemon::listen(DaemonConfig { ports: 0..=0, ..DaemonConfig::default() }).unwrap();
        let name = listening.address().to_string();
        (descriptor.name, descriptor.native, descriptor.tcp_proto_version) = (name.clone(), None, version);
        let published = PublishedEngine::new(&descriptor, 1 << 20, NoticeLimits::default()).unwrap();
        let _daemon = listening.serve(Arc::new(published)).unwrap();
        let peer = a.engine.open_segment(&name).unwrap();
        fill(&a.region, 0, 300_000, u64::from(version));
        let run = |opcode, local| {
            let request = a.request(opcode, local, (peer, b.region.address() + 5), 300_000);
            a.engine.submit(&[request], &SubmitOptions::default()).unwrap().wait().state
        };
        assert_eq!(run(Opcode::Write, 0), TaskState::Completed, "version {version}");
        assert_eq!(run(Opcode::Read, 400_000), TaskState::Completed, "version {version}");
        check(&a.region, 400_000, 300_000, u64::from(version));
        let found = a.engine.explain(&name).unwrap();
        let open: Vec<&str> = found.choices.iter().filter(|one| one.usable).map(|one| one.transport).collect();
        assert_eq!(
            (open, found.for_mapped(), found.for_pointers()),
            (vec!["mooncake"], Some("mooncake"), Some("mooncake"))
        );
    }
}
