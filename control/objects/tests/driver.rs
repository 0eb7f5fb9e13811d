//! The driver over a directory, and over an S3 service that also denies, throttles, truncates, corrupts and hangs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvplane_fake_s3::{FakeS3, Trouble};
use kvplane_objects::{Deadlines, StoreDriver, StorePlace};
use kvplane_proto::checksum::payload_checksum;
use kvplane_shared::port::{Store, StorePort};
use kvplane_shared::{GetRange, OpId, Operation, Outcome, StoreError};

const DEADLINES: Deadlines = Deadlines { short: Duration::from_secs(4), long: Duration::from_secs(8) };

struct Bed {
    port: Box<dyn StorePort>,
    woken: Receiver<()>,
    last: u64,
}

impl Bed {
    fn new(place: &StorePlace, deadlines: Deadlines) -> Self {
        let driver = StoreDriver::open(place, "cluster", deadlines).expect("a place");
        let (wake, woken) = channel();
        let port = driver.open(Box::new(move || wake.send(()).expect("the test waits")));
        Self { port, woken, last: 0 }
    }

    fn run(&mut self, operation: Operation) -> Result<Outcome, StoreError> {
        self.last += 1;
        self.port.start(OpId(self.last), operation);
        self.woken.recv_timeout(Duration::from_secs(60)).expect("every operation ends");
        assert!(self.port.is_ready());
        let (id, result) = self.port.poll().expect("a result with each wake-up");
        assert_eq!((id, self.port.is_ready()), (OpId(self.last), false));
        result
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Result<Outcome, StoreError> {
        self.run(Operation::Put { name: name.to_owned(), bytes: Arc::new(bytes.to_vec()) })
    }

    fn get(&mut self, name: &str, range: GetRange) -> Result<Vec<u8>, StoreError> {
        match self.run(Operation::Get { name: name.to_owned(), range })? {
            Outcome::Bytes { bytes, checksum } => {
                let GetRange::Bounded { checked, .. } = range else { return Ok(bytes) };
                assert_eq!(checksum, payload_checksum(&bytes[..checked as usize]));
                Ok(bytes)
            }
            other => panic!("{other:?}"),
        }
    }

    fn names(&mut self, prefix: &str) -> Vec<String> {
        match self.run(Operation::List { prefix: prefix.to_owned() }) {
            Ok(Outcome::Listed(listed)) => {
                assert!(listed.iter().all(|one| one.bytes > 0 && one.written_ms > 1_600_000_000_000));
                let mut names: Vec<String> = listed.into_iter().map(|one| one.name).collect();
                names.sort_unstable();
                names
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs all operations.
fn works(bed: &mut Bed) {
    assert_eq!(bed.get("a/one", GetRange::Whole), Err(StoreError::NotFound));
    assert_eq!(bed.names(""), Vec::<String>::new());
    let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
    assert_eq!(bed.put("a/one", &bytes), Ok(Outcome::Done));
    assert_eq!(bed.get("a/one", GetRange::Whole).as_ref(), Ok(&bytes));
    assert_eq!(bed.get("a/one", GetRange::Suffix { bytes: 7 }), Ok(bytes[bytes.len() - 7..].to_vec()));
    assert_eq!(bed.get("a/one", GetRange::Suffix { bytes: 1 << 20 }).as_ref(), Ok(&bytes));
    let range = GetRange::Bounded { offset: 5, bytes: 1000, checked: 900 };
    assert_eq!(bed.get("a/one", range), Ok(bytes[5..1005].to_vec()));
    let beyond = GetRange::Bounded { offset: 99_000, bytes: 2000, checked: 0 };
    assert_eq!(bed.get("a/one", beyond), Err(StoreError::Short { expected: 2000, found: 1000 }));
    for offset in [100_000, 1 << 40] {
        let past = GetRange::Bounded { offset, bytes: 10, checked: 10 };
        assert_eq!(bed.get("a/one", past), Err(StoreError::Short { expected: 10, found: 0 }), "the object is shorter");
    }
    assert_eq!(bed.put("a/one", b""), Ok(Outcome::Done));
    assert_eq!(bed.get("a/one", range), Err(StoreError::Short { expected: 1000, found: 0 }), "it is empty");
    assert_eq!(bed.get("a/one", GetRange::Suffix { bytes: 7 }), Ok(Vec::new()));
    assert_eq!(bed.get("a/one", GetRange::Whole), Ok(Vec::new()));
    let none = GetRange::Bounded { offset: 5, bytes: 10, checked: 10 };
    assert_eq!(bed.get("a/none", none), Err(StoreError::NotFound), "there is none");
    assert_eq!(bed.put("a/one", b"shorter"), Ok(Outcome::Done));
    assert_eq!(bed.get("a/one", GetRange::Whole), Ok(b"shorter".to_vec()));
    // More than a page of a list.
    let mut all: Vec<String> = (0..120).map(|number| format!("a/pack-{number:04}")).collect();
    all.iter().for_each(|name| assert_eq!(bed.put(name, b"x"), Ok(Outcome::Done)));
    assert_eq!(bed.put("ab/other", b"x"), Ok(Outcome::Done));
    all.insert(0, "a/one".to_owned());
    assert_eq!(bed.names("a"), all);
    assert_eq!(bed.names("").len(), all.len() + 1);
    assert!(matches!(bed.run(Operation::Stat { name: "a/one".to_owned() }), Ok(Outcome::Written { at_ms: 1.. })));
    for _ in 0..2 {
        assert_eq!(bed.run(Operation::Delete { name: "a/one".to_owned() }), Ok(Outcome::Done), "also if it is gone");
    }
    assert_eq!(bed.get("a/one", GetRange::Whole), Err(StoreError::NotFound));
}

fn directory(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kvplane-objects-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a directory");
    path
}

#[test]
fn a_directory_is_a_store() {
    let path = directory("store");
    works(&mut Bed::new(&StorePlace::Directory(path.clone()), DEADLINES));
    let mut other = Bed::new(&StorePlace::Directory(path.clone()), DEADLINES);
    assert_eq!(other.names("ab"), ["ab/other"], "another node sees it");
    std::fs::remove_dir_all(path).expect("the test's own");
}

fn mounted(path: &Path, options: &str) -> bool {
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(path).output();
    mount.is_ok_and(|done| done.status.success())
}

#[test]
fn the_driver_tells_a_full_file_system_from_a_read_only_one() {
    let path = directory("mounted");
    if !mounted(&path, "size=256k") {
        println!("skipped: this host mounts no file system for the test");
        return;
    }
    let mut bed = Bed::new(&StorePlace::Directory(path.clone()), DEADLINES);
    assert_eq!(bed.put("a/one", &[1; 1000]), Ok(Outcome::Done));
    let full = bed.put("a/two", &vec![1; 1 << 20]);
    assert!(matches!(full, Err(StoreError::NoSpace { .. })), "{full:?}");
    let run = |program: &str, words: &[&str]| {
        let done = Command::new(program).args(words).arg(&path).status().expect("it runs");
        assert!(done.success());
    };
    run("mount", &["-o", "remount,ro"]);
    let refused = bed.put("a/three", &[1; 1000]);
    assert!(matches!(refused, Err(StoreError::ReadOnly { .. })), "{refused:?}");
    assert_eq!(bed.get("a/one", GetRange::Whole), Ok(vec![1; 1000]));
    run("umount", &["-l"]);
}

fn is_absent<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Absent { .. }))
}

#[test]
fn a_directory_that_is_missing_is_never_created() {
    let path = directory("missing");
    let marker = path.join(".kvplane-shared-tier");
    let place = StorePlace::Directory(path.clone());
    let mut bed = Bed::new(&place, DEADLINES);
    assert_eq!(bed.put("a/one", b"x"), Ok(Outcome::Done));
    // Its file system is gone: there is a mount point, or not even that.
    let aside = path.with_extension("aside");
    let _ = std::fs::remove_dir_all(&aside);
    std::fs::rename(&path, &aside).expect("the test's own");
    let fails = |bed: &mut Bed| {
        assert!(is_absent(&bed.put("a/two", b"x")) && is_absent(&bed.get("a/one", GetRange::Whole)));
        let names = [Operation::List { prefix: String::new() }, Operation::Delete { name: "a/one".to_owned() }];
        names.into_iter().for_each(|operation| assert!(is_absent(&bed.run(operation))));
    };
    fails(&mut bed);
    assert!(!path.exists(), "no directory is created");
    let refused = StoreDriver::open(&place, "cluster", DEADLINES).expect_err("there is no directory").to_string();
    assert!(refused.starts_with("there is no directory") && !path.exists(), "{refused}");
    std::fs::create_dir(&path).expect("a mount point");
    fails(&mut bed);
    assert_eq!(std::fs::read_dir(&path).expect("a directory").count(), 0, "nothing below the mount point");
    // Another one is mounted there.
    std::fs::write(&marker, "kvplane shared tier 0").expect("the test's own");
    fails(&mut bed);
    std::fs::remove_dir_all(&path).expect("the test's own");
    std::fs::rename(&aside, &path).expect("the test's own");
    assert_eq!(bed.get("a/one", GetRange::Whole), Ok(b"x".to_vec()), "it is back");
    std::fs::remove_dir_all(&path).expect("the test's own");
}

/// Sets the environment of this process, as the tests of S3 in it share one service.
fn service() -> &'static FakeS3 {
    static SERVICE: std::sync::OnceLock<FakeS3> = std::sync::OnceLock::new();
    SERVICE.get_or_init(FakeS3::start)
}

/// Runs this test program again with the service's environment: a process cannot set its own safely.
fn with_environment(test: &str) -> bool {
    if std::env::var_os("AWS_ENDPOINT").is_some() {
        return true;
    }
    let service = service();
    let program = std::env::current_exe().expect("this program");
    for trouble in ["none", "deny", "throttle", "truncate", "corrupt", "absent", "hang"] {
        let mut child = Command::new(&program);
        child.args(["--exact", test, "--nocapture"]).envs(service.environment()).env("TROUBLE", trouble);
        service.set_trouble(Trouble::None);
        if trouble != "none" {
            let mut bed = child;
            bed.env("PREPARE", "1");
            assert!(bed.status().expect("it runs").success(), "{trouble}: preparation");
            service.set_trouble(match trouble {
                "deny" => Trouble::Deny,
                "throttle" => Trouble::Throttle,
                "truncate" => Trouble::Truncate,
                "corrupt" => Trouble::Corrupt,
                "absent" => Trouble::NoBucket,
                _ => Trouble::Hang,
            });
            bed.env_remove("PREPARE");
            child = bed;
        }
        assert!(child.status().expect("it runs").success(), "{trouble}");
    }
    false
}

#[test]
fn a_bucket_is_a_store_and_the_driver_tells_its_troubles_apart() {
    if !with_environment("a_bucket_is_a_store_and_the_driver_tells_its_troubles_apart") {
        return;
    }
    let trouble = std::env::var("TROUBLE").expect("set by the test");
    let deadlines = Deadlines { short: Duration::from_secs(2), long: Duration::from_secs(2) };
    let deadlines = if trouble == "hang" { deadlines } else { DEADLINES };
    let place = format!("s3://bucket/{trouble}").parse().expect("a place");
    let mut bed = Bed::new(&place, deadlines);
    let range = GetRange::Bounded { offset: 10, bytes: 100, checked: 100 };
    if std::env::var_os("PREPARE").is_some() {
        assert_eq!(bed.put("a", &[7; 1000]), Ok(Outcome::Done));
        return;
    }
    match trouble.as_str() {
        "none" => works(&mut bed),
        "deny" => {
            assert!(matches!(bed.put("a", b"x"), Err(StoreError::Denied { .. })));
            assert!(matches!(bed.get("a", range), Err(StoreError::Denied { .. })));
        }
        "throttle" => {
            let put = bed.put("a", b"x");
            assert!(matches!(put, Err(StoreError::Throttled { .. })), "{put:?}");
        }
        // Nothing is known of the objects.
        "absent" => {
            assert!(is_absent(&bed.put("a", b"x")) && is_absent(&bed.get("a", range)));
            let names = [Operation::List { prefix: String::new() }, Operation::Delete { name: "a".to_owned() }];
            names.into_iter().for_each(|operation| assert!(is_absent(&bed.run(operation))));
        }
        // The length of the answer is that of its body, or the rest never comes.
        "truncate" => {
            let found = bed.get("a", range);
            assert!(found.is_err(), "{found:?}");
        }
        // The checksum is that of the bytes that came: the shard compares it.
        "corrupt" => assert_ne!(bed.get("a", range), Ok(vec![7; 100])),
        _ => {
            assert_eq!(bed.get("a", range), Err(StoreError::Deadline { waited_ms: 2000 }));
            assert_eq!(bed.put("a", b"x"), Err(StoreError::Deadline { waited_ms: 2000 }));
        }
    }
}
