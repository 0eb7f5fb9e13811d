//! Tests of the formats of classes: parsing, errors, and the engine's weights.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn class(name: &str, threads: u64, weight: f64) -> Class {
    Class { name: name.to_owned(), threads, slo_us: 0, weight, isolated_gb_s: None }
}

#[test]
fn the_short_form_and_json_say_the_same() {
    let short = parse("decode:1:500:4,prefill:3:0:1.5:2.25").unwrap();
    let json = json!([
        { "name": "decode", "threads": 1, "slo_us": 500, "weight": 4, "isolated_gbps": null },
        { "name": "prefill", "threads": 3, "slo_us": 0, "weight": 1.5, "isolated_gbps": 2.25 },
    ]);
    assert_eq!(parse_json(&json.to_string()).unwrap(), short);
    assert_eq!(short[1], Class { isolated_gb_s: Some(2.25), ..class("prefill", 3, 1.5) });
    assert_eq!((short[0].slo_us, ranges(&short)), (500, vec![0..1, 1..4]));
}

#[test]
fn errors_name_the_fault() {
    let cases = [
        ("", "\"\" is not name:threads"),
        ("a:1:2", "\"a:1:2\" is not name:threads"),
        ("a:1:2:3:4:5", "is not name:threads"),
        (":1:0:1", "no name"),
        ("a:0:0:1", "\"a\": threads is 0"),
        ("a:-1:0:1", "threads \"-1\""),
        ("a:99999999:0:1", "threads is 99999999"),
        ("a:1:x:1", "slo_us \"x\""),
        ("a:1:0:0", "weight is 0"),
        ("a:1:0:inf", "weight is inf"),
        ("a:1:0:NaN", "weight is NaN"),
        ("a:1:0:1:-2", "isolated_gbps is -2"),
        ("a:1:0:1,a:1:0:1", "two classes are named \"a\""),
    ];
    for (text, words) in cases {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(words), "{text:?}: {error}");
    }
    let cases = [
        ("{", "not JSON"),
        ("{}", "array"),
        ("[]", "array"),
        ("[1]", "entry 0: name"),
        (r#"[{"name":"a","threads":1.5,"slo_us":0,"weight":1}]"#, "entry 0: threads is 1.5"),
        (r#"[{"name":"a","threads":1,"weight":1}]"#, "entry 0: slo_us is missing"),
        (r#"[{"name":"a","threads":1,"slo_us":0}]"#, "entry 0: weight is missing"),
        (r#"[{"name":"a","threads":1,"slo_us":0,"weight":"1"}]"#, "weight is \"1\""),
    ];
    for (text, words) in cases {
        let error = parse_json(text).unwrap_err().to_string();
        assert!(error.contains(words), "{text:?}: {error}");
    }
}

#[test]
fn workloads_are_parsed() {
    let one = json!({
        "name": "kv", "threads": 2, "slo_us": 0, "weight": 1, "block_size": 4096, "batch_size": 8,
        "intent_type": "foreground_get", "deadline_us": 300,
    });
    let workloads = parse_workloads(&json!([one]).to_string()).unwrap();
    let expected = Workload {
        class: class("kv", 2, 1.0),
        block_bytes: 4096,
        batch: 8,
        deadline_us: 300,
        intent: Intent::ForegroundGet,
    };
    assert_eq!(workloads, [expected]);
    let with = |field: &str, value: Value| {
        let mut changed = one.clone();
        changed[field] = value;
        parse_workloads(&json!([changed]).to_string()).unwrap_err().to_string()
    };
    assert!(with("block_size", json!(0)).contains("block_size is 0"));
    assert!(with("batch_size", json!(-1)).contains("batch_size is -1"));
    assert!(with("block_size", json!(u64::MAX)).contains("exceed 64 bits of bytes"));
    assert!(with("deadline_us", json!("soon")).contains("deadline_us is \"soon\""));
    assert!(with("intent_type", json!("fun")).contains("\"fun\" is not one of unspec"));
}

#[test]
fn threads_have_to_add_up() {
    let classes = [class("a", 2, 1.0), class("b", 3, 1.0)];
    assert!(check_threads(&classes, 5).is_ok());
    let error = check_threads(&classes, 4).unwrap_err().to_string();
    assert!(error.contains("5 threads") && error.contains("has 4"), "{error}");
}

proptest! {
    #[test]
    fn weights_keep_their_proportions(weights in proptest::collection::vec(0.01f64..10.0, 1..8)) {
        let classes: Vec<_> = weights.iter().map(|&weight| class("x", 1, weight)).collect();
        let found = engine_weights(&classes);
        for (a, &weight_a) in weights.iter().enumerate() {
            for (b, &weight_b) in weights.iter().enumerate() {
                let (got, wanted) = (f64::from(found[a]) / f64::from(found[b]), weight_a / weight_b);
                prop_assert!((got / wanted - 1.0).abs() < 0.02, "{weights:?} became {found:?}");
            }
        }
    }

    #[test]
    fn arbitrary_text_does_not_panic(text in ".{0,60}") {
        let _ = (parse(&text), parse_json(&text), parse_workloads(&text));
    }
}
