//! Tests of the rail matrix of known machines, and of Mooncake's and TENT's matrices against them.

use super::{CXL, HGX, HOLES, SMALL, machine};
use kvplane_topology::rails::{GivenMatrix, MAX_MATRIX_BYTES, MatrixError, Nearness};
use kvplane_topology::{RailMatrix, rail_matrix};
use serde_json::Value;

/// The expected matrix, written by hand from the description of the machine.
const HGX_BY_HAND: &str = include_str!("golden/hgx.mooncake.json");

fn given(matrix: &RailMatrix, text: &str) -> Result<RailMatrix, MatrixError> {
    matrix.with_given(&GivenMatrix::parse(text)?)
}

#[test]
fn the_matrix_is_what_one_would_write_by_hand() {
    let matrix = rail_matrix(&machine(HGX));
    let ours: Value = serde_json::from_str(&matrix.to_mooncake()).unwrap();
    let by_hand: Value = serde_json::from_str(HGX_BY_HAND).unwrap();
    assert_eq!(ours, by_hand);
    let fitted = given(&matrix, HGX_BY_HAND).unwrap();
    assert_eq!(matrix.differences(&fitted), Vec::<String>::new());
}

#[test]
fn tiers_say_how_near_and_why() {
    let matrix = rail_matrix(&machine(HGX));
    let row = matrix.row("cuda:6").unwrap();
    let near: Vec<Nearness> = row.tiers.iter().map(|tier| tier.nearness).collect();
    assert_eq!(near, [Nearness::SameSwitch, Nearness::SameNode, Nearness::OtherNode, Nearness::OtherNode]);
    assert_eq!(row.tiers.iter().map(|tier| tier.slow).collect::<Vec<_>>(), [false, false, false, true]);
    assert_eq!(row.tiers[2].distance, Some(21));
    assert!(row.tiers[0].reason.contains("PCI switch"), "{}", row.tiers[0].reason);
    assert!(row.tiers[3].reason.contains("slower than 200 Gb/s"), "{}", row.tiers[3].reason);
    assert_eq!(matrix.row("gpu:6").unwrap(), row, "a GPU can be named without its vendor");
    let spare = &matrix.excluded[0];
    assert_eq!(spare.name, "mlx5_11");
    assert!(spare.reason.contains("port 1 is down (Disabled)") && spare.reason.contains("cable"), "{}", spare.reason);
}

#[test]
fn memory_behind_cxl_takes_the_nearest_node() {
    let matrix = rail_matrix(&machine(CXL));
    let row = matrix.row("cxl:2").unwrap();
    assert_eq!(matrix.row("cpu:2").unwrap(), row, "Mooncake's name for it");
    let tiers: Vec<(&str, Option<u32>)> =
        row.tiers.iter().map(|tier| (tier.rails[0].as_str(), tier.distance)).collect();
    assert_eq!(tiers, [("mlx5_0", Some(20)), ("mlx5_1", Some(31)), ("rxe0", Some(31)), ("rxe1", None)]);
    assert!(matrix.notes.iter().any(|note| note.contains("differ in speed")), "{:?}", matrix.notes);
    assert!(matrix.notes.iter().any(|note| note.contains("differ in active MTU")), "{:?}", matrix.notes);
    let error = matrix.row("cuda:0").unwrap_err().to_string();
    assert!(error.contains("\"cuda:0\"") && error.contains("cpu:0, cpu:1, cxl:2"), "{error}");
}

#[test]
fn mixed_speeds_are_noted_and_slow_rails_rank_last() {
    let machine = machine(CXL);
    let matrix = rail_matrix(&machine);
    let note = matrix.notes.iter().find(|note| note.starts_with("Rails differ in speed (")).unwrap();
    assert!(note.contains("mlx5_0") && note.contains("rxe0") && note.ends_with("shares follow the speed."), "{note}");
    for row in &matrix.rows {
        let slow: Vec<bool> = row.tiers.iter().map(|tier| tier.slow).collect();
        assert_eq!(slow, [false, false, true, true], "{}: behind all others, near ones too", row.location);
        let held = row.tiers.iter().filter(|tier| tier.slow);
        assert!(held.clone().all(|tier| tier.rails.iter().all(|rail| rail.starts_with("rxe"))), "{}", row.location);
        assert!(held.clone().all(|tier| tier.reason.contains("held back, because slower than 100 Gb/s")));
    }
    // Rails of one speed cause no note.
    let alike = rail_matrix(&super::machine(HOLES));
    assert!(!alike.notes.iter().any(|note| note.contains("differ in speed")), "{:?}", alike.notes);
}

#[test]
fn gpus_of_virtual_machines_are_no_locations() {
    let matrix = rail_matrix(&machine(HOLES));
    let names: Vec<String> = matrix.rows.iter().map(|row| row.location.to_string()).collect();
    assert_eq!(names, ["cpu:0", "cpu:1", "cpu:2", "cuda:0"]);
    assert!(matrix.notes.iter().any(|note| note.contains("0000:85:00.0") && note.contains("vfio-pci")));
    assert_eq!(matrix.row("cuda:0").unwrap().tiers[0].nearness, Nearness::SameRootComplex);
}

#[test]
fn a_machine_without_rails_has_an_empty_matrix() {
    let matrix = rail_matrix(&machine(SMALL));
    assert_eq!(matrix.to_mooncake(), r#"{"cpu:0":[[],[]]}"#);
    assert!(matrix.notes[0].contains("no RDMA device"), "{:?}", matrix.notes);
    assert!(given(&matrix, &matrix.to_mooncake()).is_ok());
}

#[test]
fn a_given_matrix_sets_the_tiers_it_names() {
    let matrix = rail_matrix(&machine(CXL));
    let fitted = given(&matrix, r#"{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cpu:2": [[], ["rxe0"]]}"#).unwrap();
    let tiers = |location: &str| {
        let row = fitted.row(location).unwrap();
        row.tiers.iter().map(|tier| tier.rails.clone()).collect::<Vec<_>>()
    };
    assert_eq!(tiers("cpu:0"), [["mlx5_1"], ["mlx5_0"]]);
    assert_eq!(tiers("cxl:2"), [["rxe0"]]);
    assert_eq!(fitted.row("cpu:1"), matrix.row("cpu:1"), "not named, so kept");
    assert_eq!(
        matrix.differences(&fitted),
        [
            "cpu:0: the matrix prefers mlx5_1; nearest here is mlx5_0.",
            "cxl:2: the matrix prefers rxe0; nearest here is mlx5_0."
        ]
    );
    let any = given(&matrix, r#"{"*": [["mlx5_0", "mlx5_1"], []], "cpu:1": [["mlx5_1"], []]}"#).unwrap();
    assert_eq!(any.row("cxl:2").unwrap().tiers[0].rails, ["mlx5_0", "mlx5_1"]);
    assert_eq!(any.row("cpu:1").unwrap().tiers[0].rails, ["mlx5_1"]);
}

#[test]
fn a_topology_of_tent_is_read_in_three_tiers() {
    let matrix = rail_matrix(&machine(CXL));
    let text = r#"{"nics": [{"name": "mlx5_0", "pci_bus_id": "0000:11:00.0", "type": "rdma", "numa_node": 0},
                           {"name": "mlx5_1", "numa_node": 1}, {"name": "rxe0"}, {"name": "eth7"}],
                  "mems": [{"name": "cpu:0", "type": "host", "device_list": {"rank0": [0], "rank1": [1], "rank2": [2]}},
                           {"name": "cpu:1", "device_list": {"rank0": [1], "rank2": [0]}}]}"#;
    let fitted = given(&matrix, text).unwrap();
    let row = fitted.row("cpu:0").unwrap();
    assert_eq!(row.tiers.iter().map(|tier| tier.rails[0].as_str()).collect::<Vec<_>>(), ["mlx5_0", "mlx5_1", "rxe0"]);
    assert_eq!(fitted.row("cpu:1").unwrap().tiers.len(), 2);
    for wrong in [
        r#"{"mems": []}"#,
        r#"{"nics": [{}], "mems": []}"#,
        r#"{"nics": [], "mems": [{"name": "cpu:0"}]}"#,
        r#"{"nics": [], "mems": [{"name": "cpu:0", "device_list": {"rank0": [0]}}]}"#,
        r#"{"nics": [{"name": "mlx5_0"}], "mems": [{"name": "cpu:0", "device_list": {"rank7": [0]}}]}"#,
        r#"{"nics": [{"name": "mlx5_0"}], "mems": [{"name": "cpu:0", "device_list": {"rank0": [-1]}}]}"#,
    ] {
        assert!(matches!(GivenMatrix::parse(wrong), Err(MatrixError::Shape { .. })), "{wrong}");
    }
}

#[test]
fn given_matrix_that_does_not_fit_is_refused_with_the_rails_found() {
    let matrix = rail_matrix(&machine(HGX));
    let refused = |text: &str| given(&matrix, text).unwrap_err();
    let gone = refused(r#"{"cpu:0": [["mlx5_0", "mlx5_12"], []]}"#).to_string();
    assert!(gone.contains("row \"cpu:0\"") && gone.contains("\"mlx5_12\", which this machine lacks"), "{gone}");
    assert!(gone.contains("mlx5_9, mlx5_10, mlx5_11 (not usable)"), "{gone}");
    let down = refused(r#"{"cpu:0": [["mlx5_11"], []]}"#).to_string();
    assert!(down.contains("cannot be used: no active port"), "{down}");
    let nowhere = refused(r#"{"cuda:8": [["mlx5_0"], []]}"#).to_string();
    assert!(nowhere.contains("\"cuda:8\"") && nowhere.contains("cuda:7"), "{nowhere}");
    assert!(matches!(refused(r#"{"cpu:0": [["mlx5_0"], ["mlx5_0"]]}"#), MatrixError::Repeated { .. }));
    assert!(matches!(refused(r#"{"cpu:0": [[], []]}"#), MatrixError::Empty { .. }));
    assert!(matches!(
        refused(r#"{"cuda:0": [["mlx5_0"], []], "gpu:0": [["mlx5_0"], []]}"#),
        MatrixError::TwoRows { .. }
    ));
    assert!(matches!(refused("{}"), MatrixError::Empty { .. }));
    for shape in [
        "[]",
        "3",
        r#"{"cpu:0": []}"#,
        r#"{"cpu:0": [["a"]]}"#,
        r#"{"cpu:0": [["a"], ["b"], []]}"#,
        r#"{"cpu:0": [["a"], [3]]}"#,
        r#"{"cpu:0": {"a": []}}"#,
    ] {
        assert!(matches!(refused(shape), MatrixError::Shape { .. }), "{shape}");
    }
    assert!(matches!(refused("{\"cpu:0\": "), MatrixError::NotJson { .. }));
    assert!(matches!(refused(&" ".repeat(MAX_MATRIX_BYTES + 1)), MatrixError::TooLarge { .. }));
}
