//! The program over the drivers for tests: its checks of every byte are the same as on a machine's own.

use std::process::{Command, Output};

fn program(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvplane-gpu"));
    command.args(arguments).output().expect("the program starts")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn devices_are_listed_by_name() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvplane-gpu"));
    command.arg("cards").env_remove("KVPLANE_GPU");
    let listed = text(&command.output().expect("the program starts"));
    assert_eq!(listed.lines().filter(|line| line.starts_with("card: ")).count(), 6, "{listed}");
    assert!(listed.contains("card: cuda:0: ") && listed.contains("card: hip:1: "), "{listed}");
}

#[test]
fn a_machine_without_a_driver_is_skipped_with_the_reason() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvplane-gpu"));
    command.args(["rates", "--quick"]).env("KVPLANE_GPU", "1").env("CUDA_VISIBLE_DEVICES", "");
    let output = text(&command.output().expect("the program starts"));
    if output.contains("card: ") || output.contains("| bytes |") {
        println!("skipped: this machine has a device");
        return;
    }
    assert!(output.contains("skipped: cuda: "), "{output}");
}

#[test]
fn rates_of_every_device_are_measured_and_their_bytes_compared() {
    let table = text(&program(&["rates", "--quick"]));
    let rows = table.lines().filter(|line| line.starts_with("| 65536 |") || line.starts_with("| 3149824 |")).count();
    assert_eq!((rows, table.matches("over the driver for tests").count()), (12, 6), "{table}");
    assert!(!program(&["rates", "--fast"]).status.success());
}
