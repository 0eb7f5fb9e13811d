//! Tests of `kvplane topology`: every format for this machine and for a saved one, and matrices that fit and that do
//! not.

use serde_json::Value;

use crate::support::{Outcome, Workplace, finish, text};
use crate::tree::Tree;

const HGX: &str = include_str!("../../../../../topology/tests/suite/saved/machines/hgx.txt");
const MATRIX: &str = include_str!("../../../../../topology/tests/suite/saved/golden/hgx.mooncake.json");
const CXL: &str = include_str!("../../../../../topology/tests/suite/saved/machines/cxl.txt");
const XML: &str = include_str!("../../../../../topology/tests/suite/saved/machines/cxl.hwloc.xml");

fn topology(place: &Workplace, arguments: &[&str]) -> Outcome {
    finish(place.bare(&[&["topology"], arguments].concat()), b"")
}

#[test]
fn this_machine_is_shown_in_every_form() {
    let place = Workplace::new("here");
    let drawn = topology(&place, &["--why"]).text();
    assert!(drawn.contains("reasons for the placement of shards"), "{drawn}");
    let json: Value = serde_json::from_slice(&topology(&place, &["--json"]).well()).unwrap();
    assert!(json["machine"]["cores"].as_array().is_some_and(|cores| !cores.is_empty()), "{json}");
    assert!(json["plan"]["shards"][0]["reason"].is_string(), "{json}");
    let picture = topology(&place, &["--format", "svg"]).text();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    let matrix: Value = serde_json::from_slice(&topology(&place, &["--format", "mooncake"]).well()).unwrap();
    assert!(matrix["cpu:0"].as_array().is_some_and(|tiers| tiers.len() == 2), "{matrix}");
    let one = topology(&place, &["--synthetic", "numa:2 core:4", "--cpus", "5", "--shards", "1"]).text();
    assert!(one.contains("1 shard, not pinned; housekeeping on CPU 5"), "{one}");
}

#[test]
fn devices_are_those_that_their_drivers_report() {
    let place = Workplace::new("devices");
    let none = topology(&place, &["--devices"]).text();
    assert!(none.contains("cuda: no devices: the driver of cuda devices cannot be loaded"), "{none}");
    let fake = kvplane_fake_devices::directory().unwrap();
    let mut command = place.bare(&["topology", "--devices", "--json"]);
    command.env("LD_LIBRARY_PATH", &fake);
    let families: Value = serde_json::from_slice(&finish(command, b"").well()).unwrap();
    let locations: Vec<&str> = families
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|family| family["devices"].as_array().into_iter().flatten())
        .filter_map(|device| device["location"].as_str())
        .collect();
    assert!(["cuda:0", "hip:1", "npu:1"].iter().all(|id| locations.contains(id)), "{families}");
    let mut command = place.bare(&["topology", "--devices"]);
    command.env("LD_LIBRARY_PATH", &fake);
    let text = finish(command, b"").text();
    assert!(text.contains("cuda:0: ") && text.contains("copy engines"), "{text}");
}

#[test]
fn a_saved_machine_is_drawn_and_its_matrix_checked() {
    let place = Workplace::new("saved");
    let tree = Tree::build(HGX);
    let root = tree.sys();
    let saved = |arguments: &[&str]| topology(&place, &[&["--sysfs", text(&root)], arguments].concat());
    let drawn = saved(&["--shards", "12"]).text();
    assert!(drawn.contains("cuda:7 3 d21") && drawn.contains("mlx5_11 is left out"), "{drawn}");
    let ours: Value = serde_json::from_slice(&saved(&["--format", "mooncake"]).well()).unwrap();
    assert_eq!(ours, serde_json::from_str::<Value>(MATRIX).unwrap());

    let fits = place.file("fits.json", MATRIX.as_bytes());
    let drawn = saved(&["--matrix", text(&fits)]).text();
    assert!(drawn.contains("prefers the nearest rails everywhere"), "{drawn}");
    let far = place.file("far.json", br#"{"cpu:0": [["mlx5_4"], []]}"#);
    let drawn = saved(&["--matrix", text(&far)]).text();
    assert!(drawn.contains("cpu:0: the matrix prefers mlx5_4; nearest here is mlx5_0"), "{drawn}");
    for (name, matrix, words) in [
        (
            "gone",
            r#"{"cpu:0": [["mlx5_12"], []]}"#,
            ["\"mlx5_12\", which this machine lacks", "mlx5_10, mlx5_11 (not usable)"],
        ),
        ("down", r#"{"cpu:0": [["mlx5_11"], []]}"#, ["no active port", "cable"]),
        ("where", r#"{"cuda:8": [["mlx5_0"], []]}"#, ["\"cuda:8\"", "cuda:7"]),
        ("shape", r#"{"cpu:0": [["mlx5_0"]]}"#, ["\"cpu:0\"", "exactly two arrays"]),
    ] {
        let file = place.file(name, matrix.as_bytes());
        saved(&["--matrix", text(&file)]).failed(1, &[&[text(&file)][..], &words[..]].concat());
    }
    saved(&["--matrix", "/nowhere/matrix.json"]).failed(1, &["cannot read /nowhere/matrix.json"]);
}

#[test]
fn hwlocs_file_gives_the_same_machine_as_sysfs() {
    let place = Workplace::new("hwloc");
    let tree = Tree::build(CXL);
    let (root, xml) = (tree.sys(), place.file("machine.xml", XML.as_bytes()));
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_slice(&topology(&place, &[arguments, &["--json"]].concat()).well()).unwrap()
    };
    let sysfs = json(&["--sysfs", text(&root)]);
    assert_eq!(json(&["--sysfs", text(&root), "--hwloc-xml", text(&xml)]), sysfs);
    let alone = json(&["--hwloc-xml", text(&xml)]);
    assert_eq!(alone["machine"]["cores"], sysfs["machine"]["cores"]);
    assert_eq!(alone["rails"]["rows"][0]["tiers"][0]["rails"], sysfs["rails"]["rows"][0]["tiers"][0]["rails"]);
    topology(&place, &["--hwloc-xml", text(&root)]).failed(1, &["cannot read"]);
    topology(&place, &["--sysfs", text(&xml)]).failed(1, &["is not a sysfs tree"]);
    let other = place.file("other.xml", b"<system version=\"1\"/>");
    topology(&place, &["--hwloc-xml", text(&other)]).failed(1, &["lstopo --of xml"]);
}
