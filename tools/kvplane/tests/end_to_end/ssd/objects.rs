//! Tests of the SSD tier under a node: objects outlive a killed process, removed objects stay gone, and whatever
//! happens to the bytes on the device, no get returns wrong ones.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use kvplane::{Client, ClientConfig, PutAck, PutOptions, Status};
use kvplane_tools::pattern;

use crate::operation::counted::sum;
use crate::ssd::disks::{run, skipped};
use crate::support::{Process, Way, Workplace, http_get, text, wait_until};

/// Size of the device in these tests.
const SSD: &str = "128M";

/// Sizes of packed objects, extents, whole blocks and odd ends, with one and several checksums.
const SIZES: [usize; 8] = [1, 100, 4096, 20_000, 32 << 10, 100_001, 300_000, 1 << 20];

pub(crate) fn size_of(key: u64) -> usize {
    SIZES[key as usize % SIZES.len()]
}

pub(crate) fn value(key: u64) -> Vec<u8> {
    let mut bytes = vec![0; size_of(key)];
    pattern::fill(key, 0, &mut bytes);
    bytes
}

pub(crate) fn name(key: u64) -> String {
    format!("object-{key}")
}

pub(crate) struct Bed {
    pub(crate) place: Workplace,
    more: Vec<String>,
}

impl Bed {
    pub(crate) fn new(name: &str, more: &[&str]) -> Self {
        let place = Workplace::new(name);
        let ssd = format!("{}:{SSD}", text(&place.path("ssd")));
        Self::with(place, ssd, more)
    }

    /// Creates a bed over a device or file, without the control plane's state beside it.
    pub(crate) fn over(place: Workplace, ssd: &str, more: &[&str]) -> Self {
        let state = place.path("state");
        Self::with(place, ssd.to_owned(), &[more, &["--state", text(&state)]].concat())
    }

    fn with(place: Workplace, ssd: String, more: &[&str]) -> Self {
        let mut all = vec!["--ssd".to_owned(), ssd, "--metrics-port".to_owned(), "0".to_owned()];
        all.extend(more.iter().map(|word| (*word).to_owned()));
        Self { place, more: all }
    }

    /// Returns the arguments after `dev --pool 16M`.
    pub(crate) fn words(&self) -> Vec<&str> {
        ["--shards", "1"].into_iter().chain(self.more.iter().map(String::as_str)).collect()
    }

    pub(crate) fn start(&self) -> Process {
        self.place.dev("16M", &self.words())
    }

    pub(crate) fn client(&self, way: Way) -> Client {
        self.client_within(way, Duration::from_secs(5))
    }

    /// Connects a client with this deadline.
    pub(crate) fn client_within(&self, way: Way, deadline: Duration) -> Client {
        Client::connect(&ClientConfig { deadline, ..self.place.client_config(way) }).unwrap()
    }
}

pub(crate) fn counted(dev: &Process, family: &str) -> f64 {
    let address = dev.address("counters of the shards on http://");
    sum(&http_get(address, "/metrics").1, family, "shard")
}

pub(crate) fn recovered(dev: &Process) {
    let all = wait_until(|| (counted(dev, "kvplane_tier_recovered") == 1.0).then_some(()));
    assert!(all.is_some(), "recovery does not end: {:?}", dev.said());
}

/// Returns true if the object exists, and asserts that it has its own bytes.
pub(crate) fn is_there(client: &mut Client, key: u64) -> bool {
    let Some(got) = client.get(name(key).as_bytes()).unwrap() else { return false };
    assert_eq!(got.len(), size_of(key), "object {key}");
    pattern::check(key, 0, &got).unwrap_or_else(|mismatch| panic!("wrong bytes of object {key}: {mismatch}"));
    true
}

/// Under write-back a put is acknowledged in memory and written later; this one requests a higher level.
#[test]
fn a_put_chooses_its_acknowledgement() {
    let bed = Bed::new("chosen", &["--ssd-ack", "memory", "--ssd-write", "back"]);
    let mut dev = bed.start();
    let acks = [PutAck::Buffered, PutAck::Durable];
    for way in Way::BOTH {
        let mut client = bed.client(way);
        for (at, ack) in acks.into_iter().enumerate() {
            let (key, options) = (at as u64 * 2 + way as u64, PutOptions { ack: Some(ack), ..PutOptions::default() });
            client.put_with(name(key).as_bytes(), &value(key), &options).unwrap();
        }
    }
    let four = bed.place.file("four", &value(4));
    bed.place.run(&["ctl", "put", "--ack", "durable", "object-4", text(&four)]).well();
    assert_eq!(counted(&dev, "kvplane_tier_backlog_objects"), 0.0);
    dev.kill();
    let dev = bed.start();
    recovered(&dev);
    let mut client = bed.client(Way::Tcp);
    assert!((0..5).all(|key| is_there(&mut client, key)), "{:?}", dev.said());
    drop(dev);

    let plain = Workplace::new("chosen-none");
    let _dev = plain.dev("16M", &["--shards", "1"]);
    let mut client = Client::connect(&plain.client_config(Way::Tcp)).unwrap();
    for ack in acks {
        let options = PutOptions { ack: Some(ack), ..PutOptions::default() };
        let refused = client.put_with(b"key", b"value", &options).unwrap_err();
        assert_eq!(refused.status(), Some(Status::NoSsd), "{refused}");
        assert!(refused.to_string().contains("--ssd"), "{refused}");
    }
    let options = PutOptions { ack: Some(PutAck::Memory), ..PutOptions::default() };
    client.put_with(b"key", b"value", &options).unwrap();
}

/// Objects over shared memory arrive with their bytes: their key and tenant are written all the same.
#[test]
fn short_objects_of_shared_memory_keep_their_names_over_a_restart() {
    let bed = Bed::new("names", &["--ssd-ack", "buffered"]);
    let mut dev = bed.start();
    let put = |tenant: &str, bytes: usize| {
        let config = ClientConfig { tenant: tenant.to_owned(), ..bed.place.client_config(Way::Shm) };
        let mut client = Client::connect(&config).unwrap();
        for key in 0..40 {
            client.put(format!("{tenant}-{key}").as_bytes(), &vec![key; bytes + usize::from(key)]).unwrap();
        }
    };
    put("acme", 300);
    put("other", 5000);
    dev.kill();
    let dev = bed.start();
    recovered(&dev);
    for tenant in ["acme", "other"] {
        let config = ClientConfig { tenant: tenant.to_owned(), ..bed.place.client_config(Way::Tcp) };
        let mut client = Client::connect(&config).unwrap();
        let (mut names, mut next) = (Vec::new(), None);
        loop {
            let page = client.keys().list(next).unwrap();
            names.extend(page.keys.into_iter().map(|key| String::from_utf8(key.key).unwrap()));
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        names.sort_unstable();
        let mut expected: Vec<String> = (0..40).map(|key| format!("{tenant}-{key}")).collect();
        expected.sort_unstable();
        assert_eq!(names, expected, "{:?}", dev.said());
    }
}

#[test]
fn a_killed_node_has_its_objects_again_and_what_was_removed_stays_gone() {
    let bed = Bed::new("killed", &["--ssd-ack", "buffered"]);
    let mut dev = bed.start();
    for (part, way) in Way::BOTH.into_iter().enumerate() {
        let mut client = bed.client(way);
        for key in (part as u64..48).step_by(2) {
            client.put(name(key).as_bytes(), &value(key)).unwrap();
        }
        for key in (part as u64..48).step_by(10) {
            assert!(client.remove(name(key).as_bytes()).unwrap());
            assert!(!client.remove(name(key).as_bytes()).unwrap(), "once");
        }
    }
    dev.kill();
    for _ in 0..2 {
        let mut dev = bed.start();
        recovered(&dev);
        for way in Way::BOTH {
            let mut client = bed.client(way);
            for key in 0..48 {
                let removed = key % 10 < 2;
                assert_eq!(client.exists(name(key).as_bytes()).unwrap(), !removed, "object {key}");
                assert_eq!(client.size(name(key).as_bytes()).unwrap(), (!removed).then_some(size_of(key) as u64));
                assert_eq!(is_there(&mut client, key), !removed, "object {key} over {}", way.name());
            }
            let names: Vec<String> = (0..48).map(name).collect();
            let found = client.batch_exists(&names).unwrap();
            assert_eq!(found.iter().filter(|there| **there).count(), 38);
        }
        assert!(counted(&dev, "kvplane_tier_hits_total") >= 1.0);
        dev.kill();
    }
}

#[test]
fn damage_on_the_device_is_a_miss_and_never_wrong_bytes() {
    let bed = Bed::new("damage", &["--ssd-ack", "durable"]);
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    for key in 0..64 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    drop(client);
    dev.kill();
    flip(&bed.place.path("ssd"));
    let dev = bed.start();
    recovered(&dev);
    let mut lost = 0;
    for way in Way::BOTH {
        let mut client = bed.client(way);
        lost = (0..64).filter(|key| !is_there(&mut client, *key)).count();
    }
    assert!((1..64).contains(&lost), "{lost} of 64 are lost");
    dev.wait_for("records were not whole (");
    // Lost objects can be put again.
    let mut client = bed.client(Way::Shm);
    for key in 0..64 {
        if !is_there(&mut client, key) {
            client.put(name(key).as_bytes(), &value(key)).unwrap();
        }
        assert!(is_there(&mut client, key), "object {key}");
    }
}

/// Flips a bit in every 1.5 MiB or so of the written bytes, but not in the superblocks.
pub(crate) fn flip(path: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    let (mut at, mut block) = (1 << 20, vec![0; 4096]);
    while at + 4096 <= bytes {
        file.read_exact_at(&mut block, at).unwrap();
        if block.iter().any(|byte| *byte != 0) {
            block[(at / 4096 % 4096) as usize] ^= 0x10;
            file.write_all_at(&block, at).unwrap();
        }
        at += 1_572_864 + 4096;
    }
    file.sync_all().unwrap();
}

#[test]
fn much_more_than_memory_holds_is_served_by_every_policy() {
    for more in [
        ["--ssd-write", "through", "--ssd-promote", "1"],
        ["--ssd-write", "through", "--ssd-promote", "2"],
        ["--ssd-write", "back", "--ssd-promote", "1"],
    ] {
        let bed = Bed::new("much", &more);
        let mut dev = bed.start();
        // There is three times the memory, and less than the device.
        let keys: Vec<u64> = (0..256).collect();
        let way = |key: u64| Way::BOTH[key as usize % 2];
        let mut clients = Way::BOTH.map(|way| bed.client(way));
        for key in &keys {
            let client = &mut clients[usize::from(way(*key) == Way::Tcp)];
            // Memory that waits to be written makes puts wait, if they must be written.
            client.put(name(*key).as_bytes(), &value(*key)).unwrap();
            if more[1] == "through" && key % 8 == 7 {
                let idle = wait_until(|| (counted(&dev, "kvplane_tier_backlog_objects") == 0.0).then_some(()));
                assert!(idle.is_some(), "what waits is written");
            }
        }
        for client in &mut clients {
            let there = keys.iter().filter(|key| is_there(client, **key)).count();
            assert_eq!(there, keys.len(), "{more:?}");
        }
        assert!(counted(&dev, "kvplane_tier_hits_total") > 0.0);
        assert_eq!(counted(&dev, "kvplane_tier_misses_total"), 0.0);
        drop(clients);
        // A stopping node writes its backlog.
        assert!(dev.stop().success());
        let dev = bed.start();
        recovered(&dev);
        let mut client = bed.client(Way::Shm);
        assert_eq!(keys.iter().filter(|key| is_there(&mut client, **key)).count(), keys.len(), "{more:?}");
    }
}

#[test]
fn object_without_second_access_is_not_written_under_selective() {
    let bed = Bed::new("selective", &["--ssd-write", "selective"]);
    let dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    for key in 0..32 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    assert!(counted(&dev, "kvplane_tier_writes_total") <= 2.0, "all were put once");
    let written = wait_until(|| {
        // An object that finds no space in the backlog is considered again at its next access.
        (0..32).for_each(|key| assert!(is_there(&mut client, key)));
        (counted(&dev, "kvplane_tier_objects") >= 32.0).then_some(())
    });
    assert!(written.is_some(), "all were accessed again");
}

#[test]
fn exists_prefetches_with_ssd_prefetch_on_exists() {
    let bed = Bed::new("ahead", &["--ssd-ack", "buffered", "--ssd-prefetch", "40", "--ssd-prefetch-on-exists"]);
    let mut dev = bed.start();
    let mut client = bed.client(Way::Tcp);
    for key in 0..16 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    drop(client);
    dev.kill();
    let dev = bed.start();
    recovered(&dev);
    let mut client = bed.client(Way::Shm);
    let names: Vec<String> = (0..16).map(name).collect();
    assert!(client.batch_exists(&names).unwrap().into_iter().all(|there| there));
    let read = wait_until(|| (counted(&dev, "kvplane_shard_objects") == 16.0).then_some(()));
    assert!(read.is_some(), "all are in memory");
    assert!((0..16).all(|key| is_there(&mut client, key)));
    assert_eq!(counted(&dev, "kvplane_tier_prefetches_used_total"), 16.0);
    assert_eq!(counted(&dev, "kvplane_tier_hits_total"), 0.0, "nobody waited for the SSD");
}

#[test]
fn a_device_is_one_nodes_and_says_so() {
    let bed = Bed::new("owner", &[]);
    let ssd = bed.place.path("ssd");
    let path = text(&ssd);
    let mut dev = bed.start();
    let other = Workplace::new("stranger");
    let state = other.path("state");
    let words = ["dev", "--pool", "16M", "--state", text(&state), "--ssd", path];
    let try_it = |more: &[&str]| other.run(&[&words[..], more].concat());
    try_it(&["--shards", "1"]).failed(1, &["in use by another process"]);
    assert!(dev.stop().success());
    let said = ["belongs to a cluster of another name", "--cluster NAME", "it is not touched"];
    try_it(&["--shards", "1"]).failed(1, &said);
    let again = |more: &[&str]| bed.place.run(&[&["dev", "--pool", "16M", "--ssd", path], more].concat());
    again(&["--shards", "1", "--node-id", "9"]).failed(1, &["belongs to node 0x1, not to 0x9"]);
    again(&["--shards", "2"]).failed(1, &["as many shards and SSDs"]);
    // None of that changed the device.
    let mut dev = bed.start();
    assert!(dev.stop().success());
    std::fs::File::options().write(true).open(&ssd).and_then(|file| file.set_len(64 << 20)).unwrap();
    again(&["--shards", "1"]).failed(1, &["if it was truncated, its objects are lost", "remove the file"]);
}

#[test]
fn a_device_that_does_not_do_is_refused_in_words() {
    let place = Workplace::new("refused");
    let refused = |ssd: &str, words: &[&str]| {
        place.run(&["dev", "--pool", "16M", "--shards", "1", "--ssd", ssd]).failed(1, words);
    };
    refused(text(&place.directory), &["is a directory"]);
    refused(text(&place.path("none")), &["give a size"]);
    refused(&format!("{}:8M", text(&place.path("small"))), &["8388608 bytes are fewer than the"]);
    refused(&format!("{}:4000T", text(&place.path("huge"))), &[text(&place.path("huge"))]);
    let foreign = place.file("foreign", &value(7).repeat(32));
    refused(text(&foreign), &["holds something else, not a tier"]);
    let kept = std::fs::read(&foreign).unwrap();
    assert!(kept == value(7).repeat(32), "it is as it was");
    assert!(!place.path("small").exists() && !place.path("huge").exists(), "nothing is left behind");
    place.run(&["node", "--ssd", text(&foreign)]).failed(1, &["set the node's number"]);
    place.run(&["dev", "--ssd", "x:y"]).failed(2, &["K, M, G or T"]);
    refused(&format!("{}:18446744073709551615", text(&place.path("most"))), &["more than a file can have"]);
    let nowhere = place.path("nowhere").join("x");
    refused(&format!("{}:64M", text(&nowhere)), &["does not exist: create it", "nowhere"]);
    let left = std::fs::read_dir(&place.directory).unwrap().map(|entry| entry.unwrap().file_name());
    let states: Vec<_> = left.filter(|name| text(Path::new(name)).ends_with(".control")).collect();
    assert!(states.is_empty(), "nothing is left behind: {states:?}");
}

/// Foreign data on a disk is nowhere near the locations of superblocks; the second shard's part is blank.
#[test]
fn a_disk_with_foreign_data_is_refused_and_not_changed() {
    /// Offset and content.
    type Mark = (u64, &'static [u8]);
    const BYTES: u64 = 64 << 20;
    let place = Workplace::new("foreign");
    let marks: [(&str, &[Mark]); 5] = [
        ("partitions", &[(510, &[0x55, 0xaa]), (512, b"EFI PART"), (BYTES - 512, b"EFI PART")]),
        ("ext4", &[(1080, &[0x53, 0xef])]),
        ("swap", &[(4086, b"SWAPSPACE2")]),
        ("btrfs", &[(65_600, b"_BHRfS_M")]),
        ("raid", &[(BYTES - 8192, &[0xfc, 0x4e, 0x2b, 0xa9])]),
    ];
    for (what, marks) in marks {
        let path = place.path(what);
        let image = std::fs::File::create(&path).unwrap();
        image.set_len(BYTES).unwrap();
        marks.iter().for_each(|(at, mark)| image.write_all_at(mark, *at).unwrap());
        let before = std::fs::read(&path).unwrap();
        let says = format!("byte {} of it is not zero", marks[0].0);
        let words = ["dev", "--pool", "16M", "--shards", "2", "--ssd", text(&path)];
        place.run(&words).failed(1, &["holds something else, not a tier", &says, "blkdiscard -z"]);
        assert!(std::fs::read(&path).unwrap() == before, "{what} is as it was");
    }
}

/// In-memory file system without direct I/O, as tmpfs once was; unmounted on drop.
struct NoDirectIo(std::path::PathBuf);

impl NoDirectIo {
    fn mount(at: std::path::PathBuf) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        match run("mount", &["-t", "ramfs", "none", text(&at)]) {
            Ok(_) => Some(Self(at)),
            Err(why) => skipped("a file system without direct I/O", &why),
        }
    }
}

impl Drop for NoDirectIo {
    fn drop(&mut self) {
        let _ = run("umount", &["--lazy", text(&self.0)]);
    }
}

#[test]
fn a_file_system_without_direct_io_works_and_is_reported() {
    let place = Workplace::new("ramfs");
    let Some(mounted) = NoDirectIo::mount(place.path("mount")) else { return };
    let ssd = format!("{}:64M", text(&mounted.0.join("ssd")));
    let words = ["--shards", "1", "--metrics-port", "0", "--ssd", &ssd, "--ssd-ack", "buffered"];
    let mut dev = place.dev("16M", &words);
    assert!(dev.said().iter().any(|line| line.contains("goes through the page cache")), "{:?}", dev.said());
    let mut client = place.client(Way::Tcp);
    for key in 0..32 {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
        assert!(is_there(&mut client, key));
    }
    drop(client);
    dev.kill();
    let mut dev = place.dev("16M", &words);
    recovered(&dev);
    let mut client = place.client(Way::Shm);
    assert!((0..32).all(|key| is_there(&mut client, key)), "they outlive the process");
    drop(client);
    dev.kill();
}
