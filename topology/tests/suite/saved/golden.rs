//! Golden drawings of each machine, complete, so that a change of any choice shows. `WRITE_GOLDEN=1` rewrites the
//! files.

use super::{CXL, HGX, HOLES, SMALL, machine};
use kvplane_topology::{PlanRequest, draw, plan, rail_matrix};
use std::path::Path;

fn compare(name: &str, drawn: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/saved/golden").join(name);
    if std::env::var_os("WRITE_GOLDEN").is_some() {
        std::fs::write(&path, drawn).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (expected, drawn)) in expected.lines().zip(drawn.lines()).enumerate() {
        assert_eq!(drawn, expected, "line {} of {name}", number + 1);
    }
    assert_eq!(drawn.lines().count(), expected.lines().count(), "lines of {name}");
}

fn check(name: &str, description: &str, request: &PlanRequest) {
    let machine = machine(description);
    let (plan, rails) = (plan(&machine, request), rail_matrix(&machine));
    let text = draw::text(&machine, &plan, &rails) + &draw::why(&plan, &rails);
    compare(name, &text);
    // The other forms hold the same contents; here only that they can be parsed.
    let json: serde_json::Value = serde_json::from_str(&draw::json(&machine, &plan, &rails)).unwrap();
    assert_eq!(json["plan"]["shards"].as_array().map(Vec::len), Some(plan.shards.len()));
    assert_eq!(json["rails"]["rails"].as_array().map(Vec::len), Some(rails.rails.len()));
    let svg = draw::svg(&machine, &plan, &rails);
    let picture = roxmltree::Document::parse(&svg).unwrap();
    let texts: Vec<&str> = picture.descendants().filter_map(|node| node.text()).collect();
    for rail in &rails.rails {
        assert!(texts.contains(&rail.name.as_str()), "{} in the picture", rail.name);
    }
}

#[test]
fn a_server_of_eight_gpus() {
    check("hgx.txt", HGX, &PlanRequest::shards(12));
}

#[test]
fn two_sockets_and_cxl() {
    check("cxl.txt", CXL, &PlanRequest::default());
}

#[test]
fn a_small_virtual_machine() {
    check("small.txt", SMALL, &PlanRequest::default());
}

#[test]
fn a_machine_with_files_missing() {
    check("holes.txt", HOLES, &PlanRequest::default());
}
