//! Machines described in a few lines, built as sysfs trees and read: what is found, planned and drawn of them.

mod tree;

use kvplane_topology::model::{LinkLayer, Machine, NodeKind, PortState};
use kvplane_topology::{PlanRequest, Sysfs, draw, plan, rail_matrix};
use tree::Tree;

const HGX: &str = include_str!("machines/hgx.txt");
const CXL: &str = include_str!("machines/cxl.txt");
const SMALL: &str = include_str!("machines/small.txt");
const HOLES: &str = include_str!("machines/holes.txt");

fn read(tree: &Tree) -> Machine {
    Sysfs::at(tree.sys(), tree.process()).read().unwrap()
}

#[test]
fn dump() {
    for text in [HGX, CXL, SMALL, HOLES] {
        let tree = Tree::build(text);
        let machine = read(&tree);
        let plan = plan(&machine, &PlanRequest::shards(12));
        let rails = rail_matrix(&machine);
        println!("{}", draw::text(&machine, &plan, &rails));
        println!("{}", draw::why(&plan, &rails));
        println!("{}", rails.to_mooncake());
        if let Ok(out) = std::env::var("DUMP") {
            std::fs::write(format!("{out}/{}.svg", machine.cores.len()), draw::svg(&machine, &plan, &rails)).unwrap();
            let status = std::process::Command::new("cp")
                .arg("-a")
                .arg(tree.base())
                .arg(format!("{out}/tree{}", machine.rdma_devices.len()))
                .status();
            assert!(status.unwrap().success());
        }
    }
}
