//! Tests of descriptors: a stock engine's bytes, our key, refusals, and arbitrary bytes.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::*;

const LIMIT: usize = 1 << 20;

/// Descriptor that a stock engine, version 0.3.13, published over TCP.
const STOCK: &str = include_str!("../../tests/stock_tcp.json");

fn decode(text: &str) -> Result<Descriptor, DescriptorError> {
    Descriptor::decode(text.as_bytes(), LIMIT)
}

fn native(buffers: usize) -> Native {
    Native {
        tcp: Some("127.0.0.1:7000".parse().expect("an address")),
        shm: "/run/kvplane/7.sock".to_owned(),
        host: "3d1a2a54".to_owned(),
        pid: 77,
        incarnation: u64::MAX,
        rails: None,
        regions: (0..buffers as u64).map(|index| index << 32 | 1).collect(),
        other: Map::new(),
    }
}

#[test]
fn a_stock_descriptor_is_read_and_written_byte_for_byte() {
    let descriptor = decode(STOCK).expect("a stock descriptor");
    assert_eq!(descriptor.buffers, [Buffer::new("127.0.0.1:15958", 139_984_059_224_080, 8_388_608)]);
    assert_eq!((descriptor.tcp_data_port, descriptor.tcp_proto_version), (15_699, 2));
    assert!(descriptor.protocol.includes("tcp") && !descriptor.protocol.includes("rdma"));
    assert_eq!(descriptor.encode(LIMIT).expect("a good one"), STOCK.trim_end());
}

#[test]
fn our_key_travels_beside_the_stock_ones() {
    let mut descriptor = decode(STOCK).expect("a stock descriptor");
    descriptor.native = Some(native(1));
    let text = descriptor.encode(LIMIT).expect("a good one");
    let key = include_str!("../../tests/native_key.json").trim_end();
    assert!(text.contains(key), "{text}");
    assert_eq!(decode(&text).expect("our own"), descriptor);
    let newer = text.replace(r#""version":1"#, r#""version":2"#);
    assert_eq!(decode(&newer).expect("a newer peer is a stock peer").native, None);
    let extended = text.replace(r#""version":1"#, r#""version":1,"tracks":[1,2]"#);
    let read = decode(&extended).expect("unknown keys are kept").native.expect("the key");
    assert_eq!(read.other.get("tracks"), Some(&json!([1, 2])));
}

#[test]
fn keys_of_other_transports_are_kept() {
    let text = r#"{"buffers":[{"addr":1,"length":2,"name":"cpu:0","rkey":[7],"lkey":[8],"protocol":"rdma"}],
        "protocol":["tcp","rdma"],"devices":[{"name":"mlx5_0","lid":0,"gid":"fe:80"}],
        "priority_matrix":{"cpu:0":[["mlx5_0"],[]]}}"#;
    let descriptor = decode(text).expect("several transports");
    assert!(descriptor.protocol.includes("rdma") && descriptor.protocol.includes("tcp"));
    assert_eq!(descriptor.buffers[0].other.get("rkey"), Some(&json!([7])));
    assert_eq!(descriptor.other.len(), 2);
    let again = decode(&descriptor.encode(LIMIT).expect("written")).expect("read");
    assert_eq!(again, descriptor);
}

#[test]
fn invalid_descriptors_are_refused_with_the_key() {
    let cases = [
        (r#"{"protocol":"tcp","buffers":[{"addr":0,"length":1,"name":"a"}]}"#, "buffers[0].addr is 0"),
        (r#"{"protocol":"tcp","buffers":[{"addr":1,"length":0,"name":"a"}]}"#, "buffers[0].length is 0"),
        (r#"{"protocol":"tcp","buffers":[{"addr":1,"length":1,"name":""}]}"#, "buffers[0].name has 0 bytes"),
        (r#"{"protocol":"nvmeof","buffers":[{"file_path":"/a","length":1}]}"#, "buffers[0].addr is missing"),
        (r#"{"protocol":"tcp","buffers":[{"addr":18446744073709551615,"length":1,"name":"a"}]}"#, "beyond the last"),
        (r#"{"protocol":"tcp","tcp_data_port":70000}"#, "line 1 column 39"),
        (r#"{"protocol":"tcp","kvplane":{"tcp":"","incarnation":1}}"#, "kvplane.version is missing"),
        (r#"{"protocol":"tcp","kvplane":7}"#, "kvplane.version is missing"),
        (r#"{"protocol":"tcp","kvplane":{"version":1,"tcp":"here","incarnation":1}}"#, "not ip:port"),
        (r#"{"protocol":"tcp","kvplane":{"version":1,"tcp":"","incarnation":1,"regions":[1]}}"#, "1 entries for 0"),
        (r#"{"protocol":[]}"#, "protocol names no transport"),
        (r#"{"buffers":[]}"#, "missing field `protocol`"),
        ("[1]", "line 1"),
        ("", "line 1 column 0"),
    ];
    for (text, expected) in cases {
        let error = decode(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let error = Descriptor::decode(&[b' '; 11], 10).expect_err("too long");
    assert_eq!(error, DescriptorError::TooLong { bytes: 11, limit: 10 });
    let deep = format!(r#"{{"protocol":"tcp","x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(decode(&deep), Err(DescriptorError::Json { .. })), "depth is limited");
}

#[test]
fn invalid_descriptors_are_not_encoded() {
    let mut descriptor = Descriptor::tcp("127.0.0.1:1", "127.0.0.1", 2);
    descriptor.buffers.push(Buffer::new("cpu:0", 4096, 0));
    assert!(descriptor.encode(LIMIT).is_err());
    descriptor.buffers[0].length = 1;
    let bytes = descriptor.encode(LIMIT).expect("a good one").len();
    assert!(descriptor.encode(bytes - 1).is_err());
    descriptor.buffers = vec![Buffer::new("cpu:0", 4096, 1); MAX_BUFFERS + 1];
    let error = descriptor.encode(usize::MAX).expect_err("too many");
    assert!(error.to_string().contains("buffers has 65537 entries"), "{error}");
}

#[test]
fn moments_are_written_as_stock_engines_do() {
    let cases = [
        (0, "1970-01-01 00:00:00.000000"),
        (951_782_399_999_999, "2000-02-28 23:59:59.999999"),
        (951_782_400_000_000, "2000-02-29 00:00:00.000000"),
        (1_795_197_810_794_847, "2026-11-20 18:03:30.794847"),
        (4_107_542_400_000_001, "2100-03-01 00:00:00.000001"),
    ];
    for (micros, expected) in cases {
        assert_eq!(timestamp(Duration::from_micros(micros)), expected);
    }
}

prop_compose! {
    fn any_buffer()(
        name in "[a-z0-9:.*é\"\\\\]{1,20}",
        address in 1..u64::MAX / 2,
        length in 1..u64::MAX / 2,
        rkey in proptest::option::of(any::<u32>()),
    ) -> Buffer {
        let mut buffer = Buffer::new(&name, address, length);
        if let Some(rkey) = rkey {
            buffer.other.insert("rkey".to_owned(), json!([rkey]));
        }
        buffer
    }
}

prop_compose! {
    fn any_descriptor()(
        name in "\\PC{0,30}",
        host in "[a-z0-9.:]{0,30}",
        port in any::<u16>(),
        version in any::<u32>(),
        buffers in vec(any_buffer(), 0..8),
        ours in any::<bool>(),
    ) -> Descriptor {
        let mut descriptor = Descriptor::tcp(&name, &host, port);
        descriptor.tcp_proto_version = version;
        descriptor.native = ours.then(|| native(buffers.len()));
        descriptor.buffers = buffers;
        descriptor
    }
}

proptest! {
    #[test]
    fn encoded_descriptor_decodes_to_itself(descriptor in any_descriptor()) {
        let text = descriptor.encode(LIMIT).expect("a good one");
        prop_assert_eq!(decode(&text).expect("our own"), descriptor);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..200)) {
        let _ = Descriptor::decode(&bytes, LIMIT);
    }

    #[test]
    fn a_damaged_descriptor_is_read_or_refused(descriptor in any_descriptor(), at in any::<prop::sample::Index>(),
        byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = descriptor.encode(LIMIT).expect("a good one").into_bytes();
        let _ = Descriptor::decode(&bytes[..cut.index(bytes.len())], LIMIT);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(read) = Descriptor::decode(&bytes, LIMIT) {
            let text = read.encode(LIMIT).expect("what was read can be written");
            prop_assert_eq!(decode(&text).expect("our own"), read);
        }
    }
}

#[test]
fn rails_survive_encoding_and_inconsistent_ones_are_refused() {
    use super::rails::{NativeDevice, NativePlace, NativeRails};
    let device = |name: &str| NativeDevice { name: name.to_owned() };
    let place = NativePlace { name: "cpu:0".to_owned(), tiers: vec![0, 1], same_node: vec![Some(true), None] };
    let devices = vec![device("mlx5_0"), device("mlx5_1")];
    let rails = NativeRails { devices, places: vec![place], buffers: vec![1, 0] };
    assert!(rails.check(2).is_ok() && NativeRails::default().check(2).is_ok());
    let text = serde_json::to_string(&rails).unwrap();
    assert_eq!(serde_json::from_str::<NativeRails>(&text).unwrap(), rails);
    let refused = |change: fn(&mut NativeRails)| {
        let mut changed = rails.clone();
        change(&mut changed);
        assert!(changed.check(2).is_err(), "{changed:?}");
    };
    refused(|rails| rails.buffers[0] = 2);
    refused(|rails| rails.buffers.truncate(1));
    refused(|rails| rails.places[0].tiers.truncate(1));
    refused(|rails| rails.devices[0].name.clear());
    refused(|rails| rails.devices = vec![rails.devices[0].clone(); 65]);
}
