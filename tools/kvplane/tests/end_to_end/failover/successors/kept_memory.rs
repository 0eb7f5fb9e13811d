//! Tests of memory that outlives the process (`--keep-memory`): restarts in order keep every object, and whatever else
//! happened to a node or to its files starts it empty, with the reason, and never with a wrong byte.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvplane::{Client, ClientConfig, PutOptions};

use crate::support::{Process, Way, Workplace, health, http_get, text, wait_until};

/// Beginning of the line that names the address of a node's metrics.
pub(super) const COUNTERS: &str = "counters of the shards on http://";

/// Memory of a node: a directory, which is removed with the test, or memfds.
pub(super) struct Memory(Option<PathBuf>);

impl Memory {
    pub(super) fn new(place: &Workplace) -> Self {
        let name = place.directory.file_name().unwrap();
        Self(Some(PathBuf::from("/dev/shm").join(name)))
    }

    /// Memory that ends with the last process that has it.
    pub(super) const fn of_processes() -> Self {
        Self(None)
    }

    pub(super) const fn is_kept(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the directory.
    pub(super) fn path(&self) -> &Path {
        self.0.as_ref().expect("a directory")
    }

    /// Returns the flags of a node with this memory.
    pub(super) fn flags(&self) -> Vec<&str> {
        self.0.iter().flat_map(|path| ["--keep-memory", text(path)]).collect()
    }

    fn image(&self) -> PathBuf {
        self.path().join("shard-0.image")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.0.as_ref().map(std::fs::remove_dir_all);
    }
}

pub(super) fn control(place: &Workplace) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state), "--listen", "127.0.0.1:0"]));
    control.wait_for("metrics on");
    control
}

pub(super) fn arguments<'a>(memory: &'a Memory, more: &[&'a str]) -> Vec<&'a str> {
    [&["--pool", "32M", "--shards", "1", "--metrics-port", "0"], &memory.flags()[..], more].concat()
}

pub(super) fn node(place: &Workplace, memory: &Memory, more: &[&str]) -> Process {
    let node = place.node(7, &arguments(memory, more));
    node.wait_for(if memory.is_kept() { "memory is kept in" } else { "without --keep-memory it" });
    node.wait_for(COUNTERS);
    node
}

fn metric(node: &Process, name: &str) -> u64 {
    let name = format!("{name}{{shard=\"0\"}} ");
    let metrics = http_get(node.address(COUNTERS), "/metrics").1;
    metrics.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |value| value.parse().unwrap())
}

/// Returns the bytes of an object, which follow from its number.
pub(super) fn value(at: usize) -> Vec<u8> {
    (0..100 + at * 37 % 20_000).map(|byte| (byte * 7 + at * 13) as u8).collect()
}

pub(super) fn put_all(client: &mut Client, name: &str, count: usize) {
    for at in 0..count {
        client.put(format!("{name}-{at}").as_bytes(), &value(at)).unwrap();
    }
}

/// Returns the number of objects that are there; each with all of its bytes.
pub(super) fn found(client: &mut Client, name: &str, count: usize) -> usize {
    let there = (0..count).filter(|at| match client.get(format!("{name}-{at}").as_bytes()).unwrap() {
        Some(bytes) => {
            assert!(bytes == value(*at), "{name}-{at} has other bytes");
            true
        }
        None => false,
    });
    there.count()
}

pub(super) const OBJECTS: usize = 300;

/// Starts a control plane and a node with this memory, with objects that two clients have put, one over each way.
pub(super) fn with_objects(place: &Workplace, memory: &Memory) -> (Process, Process, [Client; 2]) {
    let control = control(place);
    let node = node(place, memory, &[]);
    let mut clients = Way::BOTH.map(|way| place.client(way));
    for (client, way) in clients.iter_mut().zip(Way::BOTH) {
        put_all(client, way.name(), OBJECTS);
    }
    (control, node, clients)
}

#[test]
fn objects_in_memory_outlive_restarts_in_order() {
    let place = Workplace::new("kept");
    let memory = Memory::new(&place);
    let (_control, mut server, mut clients) = with_objects(&place, &memory);
    let pinned = PutOptions { hard_pin: true, ..PutOptions::default() };
    clients[0].put_with(b"pinned", b"never evicted", &pinned).unwrap();
    clients[1].remove(b"tcp-0").unwrap();
    clients[1].upsert(b"tcp-1", b"replaced").unwrap();
    let (objects, bytes) = (metric(&server, "kvplane_shard_objects"), metric(&server, "kvplane_shard_object_bytes"));
    assert_eq!(objects as usize, 2 * OBJECTS);
    for round in 0..3 {
        assert!(server.stop().success(), "{:?}", server.said());
        server = node(&place, &memory, &[]);
        let kept = ["kvplane_kept_memory_objects", "kvplane_kept_memory_bytes"].map(|name| metric(&server, name));
        assert_eq!(kept, [objects, bytes], "{round}: {:?}", server.said());
        let lost =
            ["kvplane_kept_memory_dropped", "kvplane_kept_memory_withheld_bytes", "kvplane_kept_memory_discarded"];
        assert_eq!(lost.map(|name| metric(&server, name)), [0; 3], "{:?}", server.said());
        // Clients that were connected before, and new ones, over both transports.
        let mut new = Way::BOTH.map(|way| place.client(way));
        for client in clients.iter_mut().chain(&mut new) {
            assert_eq!(found(client, "shm", OBJECTS), OBJECTS);
            assert_eq!(
                (2..OBJECTS)
                    .filter(|at| {
                        client.get(format!("tcp-{at}").as_bytes()).unwrap().is_some_and(|bytes| bytes == value(*at))
                    })
                    .count(),
                OBJECTS - 2
            );
            assert_eq!(client.get(b"tcp-0").unwrap(), None, "it was removed");
            assert_eq!(client.get(b"tcp-1").unwrap().as_deref(), Some(&b"replaced"[..]));
            assert_eq!(client.get(b"pinned").unwrap().as_deref(), Some(&b"never evicted"[..]));
        }
        assert_eq!(metric(&server, "kvplane_kept_memory_damaged_total"), 0);
        assert!(metric(&server, "kvplane_kept_memory_checked_total") >= objects - 1);
    }
    // Keys are kept, and so is what is pinned: memory fills with other objects, and it stays.
    let keys = place.run(&["ctl", "keys"]).text();
    assert!(keys.contains("shm-7") && keys.contains("pinned") && !keys.contains("tcp-0\n"), "{keys}");
    for at in 0..1200 {
        clients[1].put(format!("more-{at}").as_bytes(), &vec![1; 40_000]).unwrap();
    }
    assert_eq!(clients[1].get(b"pinned").unwrap().as_deref(), Some(&b"never evicted"[..]));
    assert!(place.run(&["ctl", "size", "more-0"]).status.code() != Some(0), "others were evicted");
}

/// A node that is killed leaves no image: it starts empty, and says so.
#[test]
fn a_killed_node_starts_empty_and_says_why() {
    let place = Workplace::new("kept-killed");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    let mut server = node(&place, &memory, &[]);
    assert_eq!(found(&mut client, "before", 50), 50);
    server.kill();
    let server = node(&place, &memory, &[]);
    server.wait_for("the former process was killed, or crashed");
    assert_eq!(metric(&server, "kvplane_kept_memory_discarded"), 1);
    assert_eq!(found(&mut client, "before", 50), 0);
    put_all(&mut client, "after", 50);
    assert_eq!(found(&mut client, "after", 50), 50);
}

#[test]
fn a_damaged_image_is_not_used_and_damaged_bytes_are_not_served() {
    let place = Workplace::new("kept-damaged");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    let flip = |path: PathBuf, at: u64| {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    };
    let cut = |bytes: u64| std::fs::File::options().write(true).open(memory.image()).unwrap().set_len(bytes).unwrap();
    let harms: [(&dyn Fn(), &str); 6] = [
        (&|| flip(memory.image(), 60), "the header of the image is damaged"),
        (&|| flip(memory.image(), 4096 + 500), "its checksum does not match"),
        (&|| cut(4096 + 960), "its checksum does not match"),
        // The phase of an image that is being written.
        (&|| flip_to(&memory.image(), 12, &[2, 0, 0, 0]), "ended while it wrote the image"),
        (&|| flip_to(&memory.image(), 8, &[9, 0, 0, 0]), "format version 9, this program knows 2"),
        (&|| flip_to(&memory.image(), 0, b"nonsense"), "there is no image"),
    ];
    for (harm, said) in harms {
        put_all(&mut client, "before", 50);
        assert!(server.stop().success());
        harm();
        server = node(&place, &memory, &[]);
        server.wait_for(said);
        assert_eq!(found(&mut client, "before", 50), 0, "{said}");
    }
    // Bytes of objects: whatever is read is right, and what is not is gone.
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    (0..8192).step_by(256).for_each(|at| flip(memory.path().join("shard-0.pool"), at));
    server = node(&place, &memory, &[]);
    let tails = metric(&server, "kvplane_kept_memory_damaged_total");
    assert_eq!(metric(&server, "kvplane_kept_memory_objects") + tails, 50, "tails are checked at the start");
    let whole = found(&mut client, "before", 50);
    assert!(whole < 50 - tails as usize, "no byte of any object was changed");
    let damaged = metric(&server, "kvplane_kept_memory_damaged_total") as usize;
    assert_eq!(whole + damaged, 50);
    server.wait_for("objects of the former process were damaged in memory after it had ended");
    put_all(&mut client, "before", 50);
    assert_eq!(found(&mut client, "before", 50), 50);
}

fn flip_to(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn memory_of_others_is_refused_and_not_touched() {
    let place = Workplace::new("kept-others");
    let (memory, _plane) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    let with = arguments(&memory, &[]);
    // Two processes that claim one memory.
    let other = [&["node", "--node-id", "8"], &with[..]].concat();
    place.run(&other).failed(1, &["another process uses the memory", text(memory.path())]);
    assert!(server.stop().success());
    // Another node, a node without a number, and another cluster.
    place.run(&other).failed(1, &["has the memory of node 7", "name another directory"]);
    place.run(&[&["node"], &with[..]].concat()).failed(1, &["set the node's number"]);
    let elsewhere = Workplace::new("kept-elsewhere");
    let _elsewhere = control(&elsewhere);
    elsewhere.run(&[&["node", "--node-id", "7"], &with[..]].concat()).failed(1, &["cluster \"kept-others\""]);
    // A directory on a disk, or of others.
    let open = place.path("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let keep = ["node", "--node-id", "8", "--keep-memory", text(&open)];
    place.run(&keep).failed(1, &["is not private", "chmod 700"]);
    // None of these has changed anything.
    let server = node(&place, &memory, &[]);
    assert_eq!(metric(&server, "kvplane_kept_memory_objects"), 50);
    assert_eq!(found(&mut client, "before", 50), 50);
}

#[test]
fn memory_of_another_shape_or_cluster_state_is_discarded() {
    let place = Workplace::new("kept-shape");
    let (memory, mut plane) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    let larger = ["--pool", "40M", "--shards", "2", "--metrics-port", "0", "--keep-memory", text(memory.path())];
    let mut server = place.node(7, &larger);
    server.wait_for("the node has another number of shards: 2, and 1 before");
    assert_eq!(found(&mut client, "before", 50), 0);
    assert!(memory.path().join("shard-1.pool").exists());
    assert!(server.stop().success());
    let mut server = node(&place, &memory, &[]);
    server.wait_for("the node has another number of shards: 1, and 2 before");
    assert!(!memory.path().join("shard-1.pool").exists(), "it is not needed any more");
    // An SSD is added: the pool is what it was, in larger units.
    assert!(server.stop().success());
    let ssd = format!("{}:64M", text(&place.path("ssd")));
    let mut server = node(&place, &memory, &["--ssd", &ssd]);
    server.wait_for("memory is allocated in other units: 4096 bytes, and 256 before");
    assert!(server.stop().success());
    let mut server = node(&place, &memory, &[]);
    server.wait_for("memory is allocated in other units: 256 bytes, and 4096 before");
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    // A control plane that lost its state: nobody knows what was changed meanwhile.
    assert!(plane.stop().success());
    std::fs::remove_dir_all(place.path("state")).unwrap();
    let _plane = control(&place);
    let server = node(&place, &memory, &[]);
    server.wait_for("it was written under another cluster state");
    let mut client = place.client(Way::Tcp);
    assert_eq!(found(&mut client, "before", 50), 0);
}

/// A run without the memory, or one that is killed, makes the image before it worthless.
#[test]
fn an_image_counts_once_and_for_the_next_run_only() {
    let place = Workplace::new("kept-once");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    let mut without = place.node(7, &["--pool", "32M", "--shards", "1"]);
    client.upsert(b"before-7", b"newer").unwrap();
    assert!(without.stop().success());
    let server = node(&place, &memory, &[]);
    server.wait_for("the node ran without it");
    assert_eq!(client.get(b"before-7").unwrap(), None);
    assert_eq!(found(&mut client, "before", 50), 0);
}

/// A copy of the directory that is put back: its objects were replaced or removed since.
#[test]
fn a_directory_that_was_copied_before_is_not_served() {
    let place = Workplace::new("kept-copied");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let files = ["shard-0.pool", "shard-0.image"].map(|name| memory.path().join(name));
    let mut server = node(&place, &memory, &[]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 50);
    assert!(server.stop().success());
    let copies = files.clone().map(|path| std::fs::read(path).unwrap());
    let mut server = node(&place, &memory, &[]);
    assert_eq!(found(&mut client, "before", 50), 50);
    client.upsert(b"before-7", b"newer").unwrap();
    client.remove(b"before-8").unwrap();
    assert!(server.stop().success());
    files.iter().zip(copies).for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let mut server = node(&place, &memory, &[]);
    server.wait_for("its files were copied or restored");
    assert_eq!(found(&mut client, "before", 50), 0);
    // What this process leaves counts again; a pool without an image does not, and the log says so.
    put_all(&mut client, "after", 50);
    assert!(server.stop().success());
    let mut server = node(&place, &memory, &[]);
    assert_eq!(found(&mut client, "after", 50), 50);
    assert!(server.stop().success());
    std::fs::remove_file(&files[1]).unwrap();
    let server = node(&place, &memory, &[]);
    server.wait_for("there is no image of the memory");
    assert_eq!(found(&mut client, "after", 50), 0);
}

/// Restarts in a row, while clients put, replace, remove and get: nothing that was acknowledged is lost, and no byte is
/// wrong. `KVPLANE_RESTARTS` sets their number.
#[test]
fn restarts_under_load_lose_nothing() {
    let restarts = std::env::var("KVPLANE_RESTARTS").map_or(4, |text| text.parse().expect("a number"));
    let place = Workplace::new("kept-load");
    let (memory, control) = (Memory::new(&place), control(&place));
    let larger = ["--pool", "256M", "--shards", "1", "--metrics-port", "0", "--keep-memory", text(memory.path())];
    let start = || {
        let server = place.node(7, &larger);
        server.wait_for(COUNTERS);
        server
    };
    let mut server = start();
    let (stop, puts, gets) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (slowest, mut pauses) = (AtomicU64::new(0), Vec::new());
    std::thread::scope(|scope| {
        for (number, way) in [Way::Shm, Way::Tcp, Way::Shm, Way::Tcp].into_iter().enumerate() {
            // Longer than any restart takes on a busy machine.
            let config = ClientConfig { deadline: Duration::from_secs(100), ..place.client_config(way) };
            let (stop, puts, gets, slowest) = (&stop, &puts, &gets, &slowest);
            scope.spawn(move || {
                let mut client = Client::connect(&config).unwrap();
                let mut versions = vec![0usize; 200];
                let mut step = 0usize;
                while !stop.load(Ordering::Relaxed) {
                    step += 1;
                    let begun = Instant::now();
                    let at = step * 7919 % versions.len();
                    let key = format!("client-{number}-{at}");
                    if step.is_multiple_of(13) && versions[at] > 0 {
                        client.remove(key.as_bytes()).unwrap();
                        versions[at] = 0;
                    } else {
                        versions[at] = step;
                        client.upsert(key.as_bytes(), &value(step)).unwrap();
                    }
                    puts.fetch_add(1, Ordering::Relaxed);
                    let at = step * 104_729 % versions.len();
                    let bytes = client.get(format!("client-{number}-{at}").as_bytes()).unwrap();
                    assert!(
                        bytes == (versions[at] > 0).then(|| value(versions[at])),
                        "client-{number}-{at} by {way:?}"
                    );
                    gets.fetch_add(1, Ordering::Relaxed);
                    slowest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::Relaxed);
                }
                for (at, version) in versions.iter().enumerate() {
                    let bytes = client.get(format!("client-{number}-{at}").as_bytes()).unwrap();
                    assert!(bytes == (*version > 0).then(|| value(*version)), "client-{number}-{at} at the end");
                }
            });
        }
        for round in 0..restarts {
            let before = puts.load(Ordering::Relaxed);
            let worked = wait_until(|| (puts.load(Ordering::Relaxed) > before + 200).then_some(()));
            assert_eq!(worked, Some(()), "clients do not go on after restart {round}: {:?}", server.said());
            let begun = Instant::now();
            assert!(server.stop().success(), "{:?}", server.said());
            server = start();
            pauses.push(begun.elapsed().as_millis());
            let lost = ["kvplane_kept_memory_dropped", "kvplane_kept_memory_discarded"];
            assert_eq!(lost.map(|name| metric(&server, name)), [0; 2], "restart {round}: {:?}", server.said());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(metric(&server, "kvplane_kept_memory_damaged_total"), 0);
    pauses.sort_unstable();
    println!(
        "{restarts} restarts: {} puts, {} gets; from the signal to the start median {} ms, most {} ms; slowest put and \
         get together {} ms",
        puts.into_inner(),
        gets.into_inner(),
        pauses[pauses.len() / 2],
        pauses[pauses.len() - 1],
        slowest.into_inner()
    );
    drop(control);
}

/// With an SSD besides, memory serves what it had, and the SSD what memory had evicted.
#[test]
fn memory_is_kept_above_an_ssd() {
    let place = Workplace::new("kept-ssd");
    let (memory, _control) = (Memory::new(&place), control(&place));
    let ssd = format!("{}:512M", text(&place.path("ssd")));
    let mut server = node(&place, &memory, &["--ssd", &ssd, "--ssd-ack", "buffered"]);
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", 4000);
    client.remove(b"before-0").unwrap();
    let in_memory = metric(&server, "kvplane_shard_objects");
    assert!(in_memory < 4000, "some are on the SSD only");
    assert_eq!(found(&mut client, "before", 4000), 3999);
    for _ in 0..2 {
        assert!(server.stop().success());
        server = node(&place, &memory, &["--ssd", &ssd, "--ssd-ack", "buffered"]);
        assert!(metric(&server, "kvplane_kept_memory_objects") > 0, "{:?}", server.said());
        wait_until(|| (metric(&server, "kvplane_tier_recovered") == 1).then_some(())).expect("it is recovered");
        assert_eq!(found(&mut client, "before", 4000), 3999);
    }
    // A run with the SSD and without the memory.
    assert!(server.stop().success());
    let mut without = place.node(7, &["--pool", "32M", "--shards", "1", "--ssd", &ssd, "--ssd-ack", "buffered"]);
    client.upsert(b"before-7", &value(77)).unwrap();
    assert!(without.stop().success());
    let server = node(&place, &memory, &["--ssd", &ssd, "--ssd-ack", "buffered"]);
    server.wait_for("the node ran without it");
    wait_until(|| (metric(&server, "kvplane_tier_recovered") == 1).then_some(())).expect("it is recovered");
    assert_eq!(client.get(b"before-7").unwrap(), Some(value(77)));
}

/// Of two nodes, one restarts: the objects of its slots are there again, unless it stayed away for so long that the
/// other one got them. Whatever is there is right.
#[test]
fn a_node_of_two_keeps_its_memory() {
    let place = Workplace::new("kept-two");
    let (memory, plane) = (Memory::new(&place), control(&place));
    let mut server = node(&place, &memory, &[]);
    let _other = place.node(8, &["--pool", "32M", "--shards", "1"]);
    let settled = wait_until(|| (health(plane.http())["members"] == 2).then_some(()));
    assert_eq!(settled, Some(()));
    let mut client = place.client(Way::Tcp);
    put_all(&mut client, "before", OBJECTS);
    assert!(server.stop().success());
    let server = node(&place, &memory, &[]);
    let there = found(&mut client, "before", OBJECTS);
    let expelled = http_get(plane.http(), "/metrics")
        .1
        .lines()
        .any(|line| line.strip_prefix("kvplane_cluster_expulsions_total ").is_some_and(|count| count != "0"));
    assert!(expelled || there == OBJECTS, "{there} of {OBJECTS}: {:?}", server.said());
}
