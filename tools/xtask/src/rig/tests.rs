//! Tests of the script itself, with stand-ins for QEMU and tools: its errors, and the results that it passes on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// Stand-in for QEMU: writes the result of a guest as given by `--append`: the status, `hang`, or nothing at all.
const FAKE_QEMU: &str = r#"#!/bin/bash
for word; do
  case $word in
    --version) echo "QEMU emulator, not quite"; exit ;;
    file,id=*,path=*) path=${word#*path=}; id=${word#file,id=}; declare "${id%%,*}=${path%%,*}" ;;
    file:*) console=${word#file:} ;;
    console=*) asked=${word##* } ;;
  esac
done
echo "it has begun" >>"$console"
case $asked in
  hang) echo "RIG: ready" >>"$console"; exec sleep 100 ;;
  stuck) exec sleep 100 ;;
  clock) echo "RIG: a clock that runs at 9 % of the host's" >>"$console"; exit 0 ;;
  die) exit 1 ;;
  late) echo "RIG: ready" >>"$console"; exit 1 ;;
esac
printf 'to stdout' >"$out"; printf 'to stderr' >"$err"; echo "$asked" >"$rc"
"#;

/// Cache that looks prepared, and stand-ins for programs that a host may lack.
struct Bed(PathBuf);

impl Bed {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("rig-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let bed = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(bed.0.join("bpo/lib/modules/6.0")).unwrap();
        fs::create_dir_all(bed.0.join("bin")).unwrap();
        for (name, text) in [("bpo/version", "6.0\n"), ("bpo/busybox", ""), ("bpo/vmlinux", "")] {
            fs::write(bed.0.join(name), text).unwrap();
        }
        bed.program("modprobe", "#!/bin/sh\n");
        bed.program("cpio", "#!/bin/sh\nexec cat\n");
        bed.program("qemu", FAKE_QEMU);
        bed
    }

    fn program(&self, name: &str, text: &str) {
        let path = self.0.join("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = script(&Workspace::find().unwrap(), arguments);
        let path = format!("{}:{}", self.0.join("bin").display(), std::env::var("PATH").unwrap());
        command.env("PATH", path).env("RIG_CACHE", &self.0).env("RIG_QEMU", self.0.join("bin/qemu"));
        command.env("RIG_TMP", &self.0).env_remove("RIG_KERNEL").current_dir(&self.0);
        command
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        told(&self.command(arguments).output().unwrap())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn told(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn without_root() -> bool {
    if !setup::is_root() {
        println!("skipped: the virtual machine needs root, and this is another user");
    }
    !setup::is_root()
}

#[test]
fn invalid_arguments_are_refused_with_the_reason() {
    let bed = Bed::new();
    for (line, words) in [
        ("", "no command was given"),
        ("--", "no command was given"),
        ("--rxe 2", "no command was given"),
        ("--gpu 1 -- true", "unknown option --gpu"),
        ("true", "behind --"),
        ("--rxe", "--rxe takes a value"),
        ("--rxe -- true", "--rxe takes a value"),
        ("--cpus two -- true", "--cpus takes a number, not \"two\""),
        ("--cpus 0x2 -- true", "takes a number"),
        ("--cpus -1 -- true", "takes a number"),
        ("--cpus 65 -- true", "--cpus takes 1 to 64, not 65"),
        ("--numa 0 -- true", "--numa takes 1 to 8"),
        ("--timeout 0 -- true", "--timeout takes 1"),
        ("--boot 0 -- true", "--boot takes 1"),
        ("--nvme 1:x -- true", "takes a number"),
        ("--nvme 1: -- true", "takes a number"),
        ("--cxl 100 -- true", "multiple of 256"),
        ("--nic wifi -- true", "veth virtio e1000e igb"),
        ("--kernel 2.4 -- true", "bpo stable new"),
        ("--nvmet fc --nvme 1 -- true", "tcp rdma loop"),
        ("--nvmet tcp -- true", "no drive to export"),
        ("--nvmet rdma --nvme 1 -- true", "--rxe 2"),
        ("--hmat -- true", "--numa 2"),
        ("--kernel stable --cxl 256 -- true", "CXL"),
        ("--share /no/such/place -- true", "no directory /no/such/place"),
        ("--share / -- true", "cannot be the share"),
        ("--setup /no/such/file -- true", "no file /no/such/file"),
        ("--env a-b -- true", "name of a variable"),
    ] {
        let (status, said) = bed.run(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(status, Some(2), "{line}: {said}");
        assert!(said.starts_with("rig: ") && said.contains(words) && said.lines().count() == 1, "{line}: {said}");
    }
}

#[test]
fn the_help_names_every_option() {
    let output = Bed::new().command(&["--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && !help.contains("set -euo"), "{help}");
    let source = fs::read_to_string(Workspace::find().unwrap().root.join("tools/rig/rig.sh")).unwrap();
    let options = source.split("while (($#))").nth(1).unwrap().split("esac").nth(1).unwrap();
    let named = options.lines().filter_map(|line| line.trim().strip_prefix("--")?.split([')', ' ']).next());
    let named: Vec<&str> = named.collect();
    assert!(named.len() > 15, "{named:?}");
    for option in named {
        assert!(help.contains(&format!("--{option} ")), "{option} in {help}");
    }
}

#[test]
fn output_and_exit_status_are_the_commands() {
    if without_root() {
        return;
    }
    let bed = Bed::new();
    for status in [0, 1, 7, 125, 255] {
        let output = bed.command(&["--append", &status.to_string(), "--", "true"]).output().unwrap();
        assert_eq!(told(&output), (Some(status), "to stderr".to_string()));
        assert_eq!(output.stdout, b"to stdout");
    }
}

#[test]
fn a_hung_or_dead_machine_differs_from_a_failed_command() {
    if without_root() {
        return;
    }
    let bed = Bed::new();
    let run = |what: &str| bed.run(&["--timeout", "1", "--append", what, "--", "true"]);
    let (status, said) = run("hang");
    assert_eq!(status, Some(i32::from(TIMEOUT)), "{said}");
    assert!(said.starts_with("rig: the time of 1 s was over (--timeout)") && said.contains("it has begun"), "{said}");
    let (status, said) = bed.run(&["--boot", "1", "--append", "stuck", "--", "true"]);
    assert_eq!(status, Some(i32::from(BROKEN)), "{said}");
    assert!(said.contains("not ready after 1 s, try 3 of 3") && said.contains("it has begun"), "{said}");
    let (status, said) = run("clock");
    assert_eq!(status, Some(i32::from(BROKEN)), "{said}");
    assert!(said.contains("the machine has a clock that runs at 9 % of the host's, try 3 of 3"), "{said}");
    let (status, said) = run("die");
    assert_eq!(status, Some(i32::from(BROKEN)), "{said}");
    assert!(said.contains("try 3 of 3") && said.contains("it has begun"), "{said}");
    let (status, said) = run("late");
    assert_eq!(status, Some(i32::from(BROKEN)), "{said}");
    assert!(!said.contains("try ") && said.contains("died without a result"), "{said}");
    let left: Vec<_> = fs::read_dir(&bed.0).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left.len(), 2, "only bpo and bin are left: {left:?}");
}

#[test]
fn missing_tools_are_named() {
    if without_root() {
        return;
    }
    let bed = Bed::new();
    let mut command = bed.command(&["--", "true"]);
    let (status, said) = told(&command.env("RIG_QEMU", "/no/such/qemu").output().unwrap());
    assert_eq!(status, Some(i32::from(BROKEN)));
    assert!(said.contains("RIG_QEMU names /no/such/qemu"), "{said}");
    // The host has no apt-get, only the tools that the script needs before it looks for that.
    for tool in ["bash", "dirname", "realpath", "uname", "cat"] {
        std::os::unix::fs::symlink(process::find_program(tool).unwrap(), bed.0.join("bin").join(tool)).unwrap();
    }
    let mut command = bed.command(&["--kernel", "new", "--", "true"]);
    let (status, said) = told(&command.env("PATH", bed.0.join("bin")).output().unwrap());
    assert_eq!(status, Some(i32::from(BROKEN)));
    assert!(said.contains("apt-get and dpkg-deb, which this host does not have"), "{said}");
    let mut command = bed.command(&["--", "true"]);
    let (_, said) = told(&command.env("PATH", bed.0.join("bin")).env_remove("RIG_QEMU").output().unwrap());
    assert!(said.contains("apt-get and dpkg-deb"), "{said}");
}

#[test]
fn other_users_than_root_are_refused_with_the_reason() {
    let bed = Bed::new();
    let inner = bed.command(&["--", "true"]);
    let mut command = inner;
    if setup::is_root() {
        let nobody = |words: &[&str]| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).args(words);
            command
        };
        // The source tree may be readable for root only.
        let path = command.get_args().next().unwrap().to_str().unwrap();
        if !nobody(&["test", "-r", path]).status().is_ok_and(|status| status.success()) {
            println!("skipped: others than root cannot read this source tree");
            return;
        }
        command = nobody(&["bash", path, "--", "true"]);
    }
    let (status, said) = told(&command.current_dir("/tmp").output().unwrap());
    assert_eq!(status, Some(i32::from(BROKEN)), "{said}");
    assert!(said.contains("needs root"), "{said}");
}

#[test]
fn the_reason_of_a_refused_preparation_is_its_last_word() {
    let refused = |text: &str| {
        let mut command = Command::new("sh");
        refused_to_prepare(command.args(["-c", text])).map_err(|failure| (failure.status, failure.message))
    };
    assert_eq!(refused("echo 'rig: ready' >&2"), Ok(()));
    let found = refused("echo 'rig: installing x' >&2; echo noise >&2; echo 'rig: no mirror' >&2; exit 125");
    assert_eq!(found, Err((BROKEN, "no mirror".to_string())));
    assert!(refused("exit 3").unwrap_err().1.contains("exit status 3"));
}
