//! Tests of links of processes to their world: founding, kills of a process and of the control plane, joiners, ends.

mod fake;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake::{LinkedProcess, PATIENCE};
use kvplane::group_membership::*;
use kvplane::rpc::groups::{UnregisterProcess, WorldName};
use kvplane::rpc::{CallError, RefusalCode, Role, RuntimeDirectory};
use kvplane::{Control, ControlLink, Error, GroupLinkError};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvplane-groups-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn control(&self) -> Control {
        Control::Local { cluster: "test".to_owned(), runtime_directory: Some(self.runtime()) }
    }

    fn runtime(&self) -> PathBuf {
        self.0.join("run")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const PART: &str = "KVPLANE_TEST_GROUPS_PART";
const PLACE: &str = "KVPLANE_TEST_GROUPS_PLACE";

/// A child process, which is killed with SIGKILL.
struct ChildProcess(Child);

impl ChildProcess {
    /// Starts this program as a control plane, or as the process of rank 2 of three.
    fn start(part: &str, scratch: &Scratch) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["--exact", "child", "--nocapture"])
            .envs([(PART, Path::new(part)), (PLACE, scratch.0.as_path())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"), "the {part} ends early");
        Self(child)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the child process of one. Without its variable it does nothing.
#[test]
fn child() {
    let (Ok(part), Some(place)) = (std::env::var(PART), std::env::var_os(PLACE)) else { return };
    let scratch = std::mem::ManuallyDrop::new(Scratch(place.into()));
    let (_control, _process);
    if part == "control" {
        let mut config = ControlConfig::new("test");
        config.state_directory = Some(scratch.0.join("state"));
        config.cluster.adoption_wait_ns = Some(0);
        config.publish = Some(RuntimeDirectory::at(scratch.runtime()));
        _control = ControlServer::start(config).expect("a control plane");
    } else {
        _process = LinkedProcess::attached(&scratch.control(), 2, 1, 3);
    }
    println!("\nready");
    std::io::stdout().flush().expect("the parent reads");
    // The parent kills this process; if the parent has died, the pipe closes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn control_plane(scratch: &Scratch) -> ControlHandle {
    let mut config = ControlConfig::new("test");
    config.publish = Some(RuntimeDirectory::at(scratch.runtime()));
    ControlServer::start(config).expect("a control plane")
}

fn refusal(error: &Error) -> Option<RefusalCode> {
    match error {
        Error::Call(error) => error.refusal(),
        _ => None,
    }
}

#[test]
fn a_killed_process_is_left_out_and_its_successor_is_activated() {
    let scratch = Scratch::new("kill");
    let _plane = control_plane(&scratch);
    let control = scratch.control();
    let killed = ChildProcess::start("process", &scratch);
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 3), LinkedProcess::attached(&control, 1, 1, 3));
    let survivors = [&zero, &one];
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 1);
    }
    drop(killed);
    let at = Instant::now();
    for process in survivors {
        process.find_refused(&[2]);
    }
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 2);
    }
    println!("killed: the survivors have a view after {} ms", at.elapsed().as_millis());

    for process in survivors {
        process.find_refused(&[]);
    }
    let two = LinkedProcess::attached(&control, 2, 2, 3);
    let group = zero.fake.seen().group.expect("attached");
    let ranks = [GroupRank(2)].into_iter().collect();
    let id = zero.link.propose(group, Change::Activate(ranks), PATIENCE).expect("a good proposal");
    for process in [&zero, &one, &two] {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 3);
    }
    let outcome = zero.fake.wait_for("the outcome", |seen| {
        let outcomes = &seen.status.groups.first()?.outcomes;
        outcomes.iter().find(|(of, _)| *of == id).map(|(_, outcome)| *outcome)
    });
    assert_eq!(outcome, Outcome::Applied { epoch: 3, dropped: RankSet::EMPTY });

    // An end in order needs no silence: nobody finds that it refuses connections.
    two.link.close(PATIENCE).expect("the control plane answers");
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 4);
    }
    // Neither does a member that leaves its group alone.
    one.link.detach(group, PATIENCE).expect("a member");
    assert_eq!(zero.fake.wait_for_view(&[0]), 5);
    assert!(one.fake.seen().end.is_none());
}

#[test]
fn groups_go_on_over_a_kill_of_the_control_plane() {
    let scratch = Scratch::new("control");
    let plane = ChildProcess::start("control", &scratch);
    let control = scratch.control();
    let killed = ChildProcess::start("process", &scratch);
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 3), LinkedProcess::attached(&control, 1, 1, 3));
    let survivors = [&zero, &one];
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 1);
    }
    drop(plane);
    // The process dies while the control plane is away.
    drop(killed);
    for process in survivors {
        process.find_refused(&[2]);
    }
    let error = zero.link.detach(GroupId(1), Duration::from_millis(200)).expect_err("nobody answers");
    assert!(error.is_control_away(), "{error}");

    let _plane = ChildProcess::start("control", &scratch);
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 2);
    }
    let error = zero.link.detach(GroupId(1), PATIENCE).expect_err("no such group");
    assert_eq!(refusal(&error), Some(RefusalCode::NotFound), "{error}");
}

#[test]
fn a_control_plane_that_lost_its_state_gets_the_processes_registered_again() {
    let scratch = Scratch::new("lost");
    let plane = control_plane(&scratch);
    let control = scratch.control();
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 2), LinkedProcess::attached(&control, 1, 1, 2));
    let processes = [&zero, &one];
    for process in processes {
        process.fake.wait_for_view(&[0, 1]);
    }
    drop(plane);
    let _plane = control_plane(&scratch);
    for process in processes {
        process.fake.wait_for("a status without the group", |seen| {
            (seen.status.groups.is_empty() && seen.status.peers.len() == 2).then_some(())
        });
        process.attach(2);
    }
    for process in processes {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 1);
    }
}

#[test]
fn a_rank_has_one_process_and_one_that_was_declared_dead_learns_it() {
    let scratch = Scratch::new("ends");
    let _plane = control_plane(&scratch);
    let control = scratch.control();
    let first = LinkedProcess::begin(&control, 0, 1, PATIENCE).expect("a free rank");
    let error =
        LinkedProcess::begin(&control, 0, 2, Duration::from_millis(100)).map(drop).expect_err("the rank is taken");
    assert_eq!(refusal(&error), Some(RefusalCode::AlreadyExists), "{error}");
    assert!(matches!(&error, Error::Call(CallError::Refused(refusal)) if refusal.reason.contains("rank 0")), "{error}");

    // As if its silence had lasted too long. The world lasts, as it has another process.
    let other = LinkedProcess::begin(&control, 1, 1, PATIENCE).expect("a free rank");
    let operator = ControlLink::to(&control, Role::Client).expect("a link");
    let (tenant, world) = (String::new(), "job".to_owned());
    let process = first.link.process();
    operator.call(UnregisterProcess { world: WorldName { tenant, world }, process }).expect("it ends");
    let end = first.fake.wait_for("the end", |seen| seen.end.clone());
    assert_eq!(end, GroupLinkError::Ended { process });
    let error = first.link.detach(GroupId(1), PATIENCE).expect_err("it is not part of its world");
    assert!(matches!(&error, Error::Group(GroupLinkError::Ended { .. })), "{error}");
    other.fake.wait_for("a world of one", |seen| (seen.status.peers.len() == 1).then_some(()));
    // Another incarnation has the rank now, and waits for nobody.
    LinkedProcess::begin(&control, 0, 2, Duration::from_secs(5)).expect("a free rank");
}
