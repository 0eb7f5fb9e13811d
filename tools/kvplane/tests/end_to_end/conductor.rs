//! What operators tell the Conductor from the command line.

use kvplane::rpc::Role;
use kvplane::rpc::conductor::{InstancePart, RegisterInstance};
use kvplane::{Control, ControlLink};

use crate::support::Workplace;

#[test]
fn operators_see_instances_take_them_out_and_choose_the_policy() {
    let place = Workplace::new("desk");
    let _dev = place.dev("16M", &["--shards", "1", "--conductor", "--conductor-policy", "load-balance"]);
    let control = Control::Local { cluster: place.cluster.clone(), runtime_directory: Some(place.runtime()) };
    let link = ControlLink::to(&control, Role::Client).unwrap();
    for instance in ["first", "second"] {
        let register = RegisterInstance {
            instance: instance.to_owned(),
            life: 1,
            tenant: String::new(),
            model: "m".to_owned(),
            block_tokens: 16,
            token_bytes: 0,
            part: InstancePart::Mixed,
            capacity_tokens: 1_000_000,
            report_ns: 0,
            address: String::new(),
            events: None,
        };
        link.call(register).unwrap();
    }
    let ctl = |words: &[&str]| place.run(&[&["ctl", "conductor"], words].concat());
    let said = ctl(&["show"]).text();
    assert!(said.starts_with("requests are placed by load-balance\n"), "{said}");
    assert!(said.lines().any(|line| line.starts_with("first ") && line.contains(" takes ")), "{said}");
    let said = ctl(&["hold", "first"]).text();
    assert!(said.contains("instance first gets no new requests; 0 are booked there"), "{said}");
    let said = ctl(&["policy", "kvplane", "--promise-ttft-ms", "1500"]).text();
    assert!(said.contains("requests are placed by kvplane"), "{said}");
    let shown: serde_json::Value = serde_json::from_str(&ctl(&["show", "--json"]).text()).unwrap();
    assert_eq!((&shown["policy"], &shown["promise_ttft_ms"]), (&"kvplane".into(), &1500.into()), "{shown}");
    let states: Vec<&str> =
        shown["instances"].as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["held", "takes"]);
    ctl(&["release", "first"]).well();
    assert!(!ctl(&["show"]).text().contains(" held "));
    ctl(&["hold", "third"]).failed(1, &["third"]);
    ctl(&["policy", "best"]).failed(2, &["round-robin", "algorithm-1"]);
    ctl(&["policy", "kvplane", "--promise-ttft-ms", "0"]).failed(2, &["promise-ttft-ms"]);

    let none = Workplace::new("no-desk");
    let _dev = none.dev("16M", &["--shards", "1"]);
    none.run(&["ctl", "conductor", "show"]).failed(1, &["--conductor"]);
}
