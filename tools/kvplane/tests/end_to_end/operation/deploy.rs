//! Tests of the files in docs/deploy: their flags exist, systemd accepts the units, and their commands run where they
//! may write, keep their SSD over a stop, and end in time.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::security::certificates::{authority, cert, issue};
use crate::support::{Outcome, Process, Workplace, finish, text};

const CONTROL: &str = include_str!("../../../../../docs/deploy/kvplane-control.service");
const NODE: &str = include_str!("../../../../../docs/deploy/kvplane-node.service");
const README: &str = include_str!("../../../../../docs/deploy/README.md");
const FILES: [(&str, &str); 3] = [
    ("kvplane-control.service", CONTROL),
    ("kvplane-node.service", NODE),
    ("Containerfile", include_str!("../../../../../docs/deploy/Containerfile")),
];
/// Path of the program in the units.
const INSTALLED: &str = "/usr/local/bin/kvplane";

/// Returns the command lines in a file: from a subcommand to the end of its line, which a backslash continues.
fn commands(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n#", " ").replace("\\\n", " ");
    let of = |line: &str| {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let at = words.iter().position(|word| word == "control" || word == "node")?;
        let runs = line.contains("ExecStart=") || line.contains("podman run");
        runs.then(|| words[at..].to_vec())
    };
    joined.lines().filter_map(of).collect()
}

/// Returns the flags that the pages give for `MORE`, each once.
fn more() -> Vec<String> {
    let lines = NODE.lines().chain(README.lines()).filter_map(|line| line.split("MORE=\"").nth(1)?.split('"').next());
    let mut flags: Vec<String> =
        lines.flat_map(str::split_whitespace).filter(|word| word.starts_with("--")).map(str::to_owned).collect();
    flags.sort();
    flags.dedup();
    flags
}

#[test]
fn every_flag_in_the_files_exists() {
    let place = Workplace::new("deploy");
    let mut checked = 0;
    let mut all: Vec<(&str, Vec<String>)> =
        FILES.into_iter().flat_map(|(name, text)| commands(text).into_iter().map(move |words| (name, words))).collect();
    all.push(("MORE", [vec!["node".to_owned()], more()].concat()));
    for (name, command) in all {
        let help = finish(place.bare(&[&command[0], "--help"]), &[]).text();
        for flag in command.iter().filter(|word| word.starts_with("--")) {
            let known = help.split_whitespace().any(|word| word.trim_end_matches(',') == flag);
            assert!(known, "{name}: kvplane {} has no {flag}", command[0]);
            checked += 1;
        }
    }
    assert!(checked > 20, "only {checked} flags were found");
}

/// Returns the values of a setting of a unit, in order.
fn settings<'a>(unit: &'a str, name: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('=')).collect()
}

/// A reload of the node's unit is an upgrade, by a command that exists, and a successor may become the main process.
#[test]
fn a_reload_of_the_nodes_unit_is_an_upgrade() {
    assert_eq!((settings(NODE, "Type"), settings(NODE, "NotifyAccess")), (vec!["notify"], vec!["all"]));
    let place = Workplace::new("reload");
    let directory = settings(NODE, "ExecStart").concat().split(" --runtime-directory ").nth(1).map(str::to_owned);
    let directory = directory.and_then(|rest| rest.split(' ').next().map(str::to_owned)).expect("a directory");
    let reload = settings(NODE, "ExecReload").concat();
    assert!(reload.starts_with(INSTALLED) && reload.contains(&directory), "{reload}");
    let variables = [
        ("${CLUSTER}", place.cluster.clone()),
        ("${NODE}", "7".to_owned()),
        (&directory, text(&place.runtime()).to_owned()),
    ];
    let reload = variables.iter().fold(reload, |reload, (name, value)| reload.replace(name, value));
    let words: Vec<&str> = reload.split_whitespace().skip(1).collect();
    finish(place.bare(&words), &[]).failed(1, &["node 7 does not run on this host"]);
}

/// A stop of a node with an SSD drains nothing, and the unit may write to the SSD's file.
#[test]
fn the_nodes_unit_may_write_the_ssd_and_keeps_it_over_a_stop() {
    assert_eq!(settings(NODE, "ProtectSystem"), ["strict"]);
    let [directory] = settings(NODE, "StateDirectory")[..] else { panic!("the unit has no StateDirectory") };
    let start = settings(NODE, "ExecStart").concat();
    assert!(!start.contains("--drain"), "a drain gives away what an SSD has: {start}");
    assert!(start.contains("--wait-control"), "the control plane may start after the node: {start}");
    let writable = format!("--ssd /var/lib/{directory}/");
    for (name, text) in [("the unit", NODE), ("the README", README)] {
        assert!(text.contains(&writable), "{name} says {writable}");
    }
    // The stop timeout is longer than the drain that the pages mention.
    let drain: u64 = README.split("MORE=\"--drain ").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
    let stop: u64 = settings(NODE, "TimeoutStopSec").concat().parse().unwrap();
    assert!(stop >= drain + 20, "TimeoutStopSec={stop} and --drain {drain}");
}

#[test]
fn systemd_understands_the_units() {
    let known = Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if known.is_err() {
        println!("skipped: no systemd-analyze here, which looks at the units");
        return;
    }
    let place = Workplace::new("units");
    for (name, unit) in [("kvplane-control.service", CONTROL), ("kvplane-node.service", NODE)] {
        // systemd-analyze requires the program to exist.
        let unit = unit.replace(INSTALLED, env!("CARGO_BIN_EXE_kvplane"));
        let file = place.file(name, unit.as_bytes());
        let mut command = Command::new("systemd-analyze");
        command.args(["verify", "--man=no", text(&file)]);
        let Outcome { status, stderr, .. } = finish(command, &[]);
        // Only messages about this unit count; other units of this machine may have problems of their own.
        let ours: Vec<&str> = stderr.lines().filter(|line| line.contains(name)).collect();
        assert!(ours.is_empty(), "{name}: {ours:?}");
        assert!(status.success() || !stderr.contains("kvplane"), "{name}: {stderr}");
    }
}

/// Host as the units see one, below a directory: certificates, state and sockets.
struct Laid {
    place: Workplace,
    root: PathBuf,
}

impl Laid {
    fn out() -> Self {
        let place = Workplace::new("laid");
        let root = place.path("r");
        for directory in ["", "etc", "var", "run"] {
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(root.join(directory)).unwrap();
        }
        cert(&place, &["init", "--authority", &authority(&place)]).well();
        issue(&place, "r/etc/control", "control", &[]);
        issue(&place, "r/etc/node", "node", &["--node-id", "7"]);
        issue(&place, "people", "admin", &[]);
        issue(&place, "people", "client", &[]);
        Self { place, root }
    }

    /// Translates a path of the units to one below the directory.
    fn moved(&self, word: &str) -> String {
        let root = text(&self.root);
        let places = [("/etc/kvplane", "etc"), ("/var/lib", "var"), ("/run", "run")];
        let at = places.into_iter().find_map(|(from, to)| Some(format!("{root}/{to}{}", word.strip_prefix(from)?)));
        at.unwrap_or_else(|| word.to_owned())
    }

    /// Returns the command of a unit, with these variables, as systemd would start it: it may write below its state and
    /// its runtime directory only. The second value is true if that sandbox is available.
    fn command(&self, unit: &str, variables: &BTreeMap<&str, String>) -> (Command, bool) {
        let start = settings(unit, "ExecStart").concat();
        let words = start.split_whitespace().skip(1).flat_map(|word| match word.strip_prefix('$') {
            // A variable in braces is one word, another is split.
            Some(name) if name.starts_with('{') => vec![variables[name.trim_matches(['{', '}'])].clone()],
            Some(name) => variables[name].split_whitespace().map(str::to_owned).collect(),
            None => vec![word.to_owned()],
        });
        // Ports are replaced by free ones, because other tests run at the same time.
        let free = |word: String| match word.as_str() {
            "127.0.0.1:7401" => "127.0.0.1:0".to_owned(),
            "7411" => "0".to_owned(),
            _ => word,
        };
        let words: Vec<String> = words.map(|word| self.moved(&free(word))).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let plain = self.place.bare(&words);
        let made = |setting: &str, below: &str| -> Vec<PathBuf> {
            settings(unit, setting).into_iter().map(|name| self.root.join(below).join(name)).collect()
        };
        let writable = [made("StateDirectory", "var"), made("RuntimeDirectory", "run")].concat();
        for directory in &writable {
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(directory).unwrap();
        }
        match strict(&plain, &self.place.directory, &writable) {
            Some(command) => (command, true),
            None => (plain, false),
        }
    }

    fn ctl(&self, control: &str, arguments: &[&str]) -> Outcome {
        let identity = self.place.path("people");
        let whom = ["--control", control, "--identity", text(&identity)];
        finish(self.place.bare(&[&["ctl", "--cluster", &self.place.cluster][..], arguments, &whom].concat()), &[])
    }
}

/// Wraps a command like `ProtectSystem=strict`: the file system below this directory is read-only, except for the
/// listed paths. `None` without mount namespaces.
fn strict(command: &Command, below: &Path, writable: &[PathBuf]) -> Option<Command> {
    let mut script = r#"below="$0"; mount --bind "$below" "$below" || exit 99; "#.to_owned();
    for directory in writable {
        let directory = text(directory);
        script += &format!("mount --bind '{directory}' '{directory}' || exit 99; ");
    }
    script += r#"mount -o remount,bind,ro "$below" || exit 99; "#;
    script += r#"if : 2>/dev/null >"$below/no"; then exit 98; fi; exec "$@""#;
    let under = |program: &std::ffi::OsStr| {
        let mut under = Command::new("unshare");
        under.args(["--map-root-user", "--mount", "sh", "-c", &script]).arg(below).arg(program);
        under
    };
    let works = under(std::ffi::OsStr::new("true")).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    let mut confined = under(command.get_program());
    confined.args(command.get_args()).stdin(Stdio::null());
    confined.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    works.then_some(confined)
}

/// The commands of the units, with an SSD as in the README, in their sandbox: the node serves, a stop keeps the objects
/// on the SSD, and a restart recovers them.
#[test]
fn the_units_commands_run_in_their_sandbox_and_an_ssd_outlives_a_stop() {
    let laid = Laid::out();
    let cluster = || ("CLUSTER", laid.place.cluster.clone());
    let variables = BTreeMap::from([cluster(), ("LISTEN", "127.0.0.1:0".to_owned())]);
    let (command, confined) = laid.command(CONTROL, &variables);
    if !confined {
        println!("skipped: the sandbox of the units: no mount namespaces here (unshare --map-root-user --mount)");
    }
    let mut plane = Process::start(command);
    plane.wait_for("(QUIC)");
    let control = plane.quic().to_string();
    let ssd = format!("--ssd {}:64M --ssd-ack buffered", ssd_in_the_readme());
    let mut variables = BTreeMap::from([cluster(), ("CONTROL", control.clone()), ("NODE", "7".to_owned())]);
    variables.extend([("LISTEN", "127.0.0.1".to_owned()), ("PORT", "0".to_owned())]);
    variables.extend([("POOL", "16M".to_owned()), ("MORE", ssd)]);
    let file = laid.place.file("value", &[7; 5000]);
    let mut node = Process::start(laid.command(NODE, &variables).0);
    node.wait_for("node 7 with");
    for key in 0..8 {
        laid.ctl(&control, &["put", &format!("key-{key}"), text(&file)]).well();
    }
    assert!(node.stop().success(), "{:?}", node.said());
    let again = Process::start(laid.command(NODE, &variables).0);
    again.wait_for("node 7 with");
    for key in 0..8 {
        let got = laid.ctl(&control, &["get", &format!("key-{key}")]).well();
        assert!(got == [7; 5000], "key-{key} after a stop and a start");
    }
    assert!(plane.stop().success(), "{:?}", plane.said());
}

/// Returns the file that the README gives to an SSD.
fn ssd_in_the_readme() -> String {
    let line =
        README.lines().find_map(|line| line.trim().strip_prefix("MORE=\"--ssd ")).expect("the README has an SSD");
    line.split(':').next().unwrap().to_owned()
}
