//! `cargo x setup`: finds system packages that the machine lacks, and installs them where that is allowed.
//!
//! Installs with apt-get, as root or through a sudo without a password, and announces that. On any other machine it
//! prints the packages and the command. It also reports restrictions of the kernel at run time, which are never a
//! failure. With nothing missing it prints one line and takes milliseconds.

pub mod machine;
pub mod packages;
pub mod targets;

use std::fs;
use std::process::{Command, Stdio};

use crate::process::{self, Failure};
use packages::{Group, Package};

/// Installs the missing packages of `groups`; no group at all means the build's.
pub fn run(groups: &[Group]) -> Result<(), Failure> {
    let groups = if groups.is_empty() { &[Group::Build] } else { groups };
    let wanted: Vec<&Package> = packages::ALL.iter().filter(|package| groups.contains(&package.group)).collect();
    let missing = packages::missing(&wanted);
    if !missing.is_empty() {
        install(&missing)?;
        let still = packages::missing(&missing);
        if !still.is_empty() {
            return Err(Failure::new(format!("still missing after the installation:\n{}", listed(&still))));
        }
    }
    let names: Vec<&str> = groups.iter().map(|group| group.name()).collect();
    let report = machine::Machine::read().report();
    eprintln!("setup: {} ready; {}", names.join(" and "), report.summary);
    for line in report.reduced {
        eprintln!("setup: note: {line}");
    }
    Ok(())
}

/// Installs Debian packages by name, for needs without a group that only Debian has under that name.
pub fn install_named(names: &[&str]) -> Result<(), Failure> {
    let missing: Vec<&str> = names.iter().copied().filter(|name| !packages::is_in_database(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let privilege = Privilege::find();
    if process::find_program("apt-get").is_none() || privilege == Privilege::None {
        return Err(Failure::new(format!("needs {}, which only root may install", missing.join(", "))));
    }
    eprintln!("setup: installing {} with apt-get", missing.join(", "));
    let arguments: Vec<&str> = ["install", "-y", "--no-install-recommends"].into_iter().chain(missing).collect();
    install_with_lists(privilege, &arguments)
}

/// Returns true if the effective user of this process is root.
#[must_use]
pub fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    machine::effective_user(&status) == Some(0)
}

fn listed(packages: &[&Package]) -> String {
    packages
        .iter()
        .map(|package| format!("  {:<10} {}", package.debian, package.purpose))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Way to root privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Privilege {
    Root,
    Sudo,
    None,
}

impl Privilege {
    fn find() -> Self {
        if is_root() {
            return Self::Root;
        }
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if sudo.status().is_ok_and(|status| status.success()) { Self::Sudo } else { Self::None }
    }
}

fn install(missing: &[&Package]) -> Result<(), Failure> {
    eprintln!("setup: missing:\n{}", listed(missing));
    let privilege = Privilege::find();
    if process::find_program("apt-get").is_none() || privilege == Privilege::None {
        return Err(Failure::new(advice(missing)));
    }
    eprintln!("setup: installing them with apt-get");
    install_with_lists(privilege, &install_arguments(missing))
}

fn install_with_lists(privilege: Privilege, arguments: &[&str]) -> Result<(), Failure> {
    let install = || process::run(&mut apt_get(privilege, arguments));
    let update = || process::run(&mut apt_get(privilege, &["update"]));
    if !has_package_lists() {
        update()?;
        return install();
    }
    // Existing package lists may be stale: the download then fails, and is retried after one update.
    install().or_else(|_| update().and_then(|()| install()))
}

fn install_arguments<'a>(missing: &[&'a Package]) -> Vec<&'a str> {
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(missing.iter().map(|package| package.debian));
    arguments
}

fn apt_get(privilege: Privilege, arguments: &[&str]) -> Command {
    let mut words = vec!["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=120"];
    if privilege == Privilege::Sudo {
        words.splice(0..0, ["sudo", "-n"]);
    }
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(arguments).stdin(Stdio::null());
    command
}

fn has_package_lists() -> bool {
    let Ok(entries) = fs::read_dir("/var/lib/apt/lists") else {
        return false;
    };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

/// Returns the command that installs the packages, for the machine's package manager.
fn advice(missing: &[&Package]) -> String {
    type Name = fn(&Package) -> &'static str;
    let managers: [(&str, &str, Name); 3] = [
        ("apt-get", "apt-get update && apt-get install -y --no-install-recommends", |package| package.debian),
        ("dnf", "dnf install -y", |package| package.fedora),
        ("pacman", "pacman -S --needed", |package| package.arch),
    ];
    let found = managers.iter().find(|(program, ..)| process::find_program(program).is_some());
    let Some((_, command, name)) = found else {
        return "no package manager known here; install the packages above, then run this again".to_string();
    };
    let mut names: Vec<&str> = missing.iter().map(|&package| name(package)).collect();
    names.dedup();
    format!("only root may install packages; as root run: {command} {}", names.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sudo_never_asks() {
        let command = apt_get(Privilege::Sudo, &["update"]);
        assert!(process::shown(&command).starts_with("sudo -n env DEBIAN_FRONTEND=noninteractive apt-get"));
        let command = apt_get(Privilege::Root, &["update"]);
        assert!(process::shown(&command).ends_with("apt-get -o DPkg::Lock::Timeout=120 update"));
    }

    #[test]
    fn only_what_is_missing_is_installed_and_nothing_it_recommends() {
        let missing: Vec<&Package> = packages::ALL.iter().filter(|package| package.group == Group::Bench).collect();
        assert_eq!(
            install_arguments(&missing),
            ["install", "-y", "--no-install-recommends", "iperf3", "perftest", "fio"]
        );
        assert!(listed(&missing).contains("iperf3"));
    }
}
