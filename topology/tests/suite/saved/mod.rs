//! Machines described in a few lines, built as sysfs trees and read: tests of what is found, planned and drawn.

mod found;
mod golden;
mod matrix;
mod properties;
mod sources;
mod tree;

use kvplane_topology::{Machine, Sysfs};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use tree::Tree;

const HGX: &str = include_str!("machines/hgx.txt");
const CXL: &str = include_str!("machines/cxl.txt");
const SMALL: &str = include_str!("machines/small.txt");
const HOLES: &str = include_str!("machines/holes.txt");

/// Returns the machine of a description; each is built once, as a large one has thousands of files.
fn machine(text: &str) -> Machine {
    static READ: Mutex<BTreeMap<String, Machine>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let of_tree = || {
        let tree = Tree::build(text);
        Sysfs::at(tree.sys(), tree.process()).read().unwrap()
    };
    read.entry(text.to_owned()).or_insert_with(of_tree).clone()
}
