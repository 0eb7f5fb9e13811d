//! Tests of `kvplane p2p`: directories spread from process to process, also after their origin is killed.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{Process, Workplace, finish, text, wait_until};

/// Writes files whose bytes identify their location; one of them is empty, and none a multiple of a shard.
fn fill(directory: &Path) {
    for (name, bytes) in
        [("config.json", 20), ("layers/0.safetensors", 3_000_001), ("layers/1.safetensors", 70_000), ("none", 0)]
    {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let content: Vec<u8> = (0..bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(path, content).unwrap();
    }
}

fn same(one: &Path, other: &Path) {
    for name in ["config.json", "layers/0.safetensors", "layers/1.safetensors", "none"] {
        assert_eq!(fs::read(one.join(name)).unwrap(), fs::read(other.join(name)).unwrap(), "{name}");
    }
    assert_eq!(names(other), ["config.json", "layers", "none"], "no partial files");
    assert_eq!(names(&other.join("layers")), ["0.safetensors", "1.safetensors"]);
}

/// Lists the names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn put(place: &Workplace, directory: &Path) -> Process {
    let put = ["p2p", "put", "a/model", text(directory), "--shard", "64KiB", "--no-shared-memory", "--host", "source"];
    let process = Process::start(place.command(&put));
    process.wait_for("serves");
    process
}

#[test]
fn a_directory_spreads_from_its_members() {
    let place = Workplace::new("p2p");
    let _dev = place.dev("16M", &[]);
    let source = place.path("source");
    fill(&source);
    let mut origin = put(&place, &source);
    let first = place.path("first");
    let get = ["p2p", "get", "a/model", text(&first), "--no-shared-memory", "--host", "first", "--seed", "600"];
    let mut seed = Process::start(place.command(&get));
    assert!(seed.wait_for("has \"a/model\"").contains("version 1"));
    same(&source, &first);
    let listed = finish(place.command(&["p2p", "ls", "a/", "--long"]), &[]).text();
    assert!(listed.contains("a/model@1") && listed.contains("49 of 49 shards"), "{listed}");
    // The origin is killed; the parts that it sent are enough.
    origin.kill();
    let second = place.path("second");
    let get = ["p2p", "get", "a/model", text(&second), "--no-shared-memory", "--host", "second"];
    let found = finish(place.command(&get), &[]).text();
    assert!(found.contains("4 files"), "{found}");
    same(&source, &second);
    // Corrupt and missing parts are fetched again, and nothing else.
    let broken = second.join("layers/0.safetensors");
    let mut content = fs::read(&broken).unwrap();
    content[70_000] ^= 1;
    fs::write(&broken, content).unwrap();
    let found = finish(place.command(&get), &[]).text();
    assert!(found.contains("64 KiB of it fetched"), "{found}");
    same(&source, &second);
    assert!(seed.stop().success());
    let gone = wait_until(|| {
        let listed = finish(place.command(&["p2p", "ls", "--json"]), &[]).text();
        (!listed.contains("a/model") || listed.contains("\"members\":0")).then_some(())
    });
    assert!(gone.is_some(), "nobody holds it any more");
}

#[test]
fn errors_of_put_and_get_give_the_reason() {
    let place = Workplace::new("p2p-wrong");
    let _dev = place.dev("16M", &[]);
    let missing = place.path("missing");
    finish(place.command(&["p2p", "put", "a", text(&missing)]), &[]).failed(1, &["missing", "No such file"]);
    finish(place.command(&["p2p", "get", "nobody's", text(&missing)]), &[]).failed(1, &["no member has an object"]);
    finish(place.command(&["p2p", "put", "", text(&place.file("f", b"x"))]), &[]).failed(1, &["a name of 0 bytes"]);
    let far = ["p2p", "get", "a", text(&missing), "--listen", "0.0.0.0:0"];
    finish(place.command(&far), &[]).failed(1, &["issues no tickets"]);
    // Opening a pipe would block until a writer opens it.
    let pipe = place.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    finish(place.command(&["p2p", "put", "a", text(&pipe)]), &[]).failed(1, &["pipe: is a pipe: give a file"]);
    finish(place.command(&["p2p", "put", "a", "/dev/null"]), &[]).failed(1, &["/dev/null: is a device: give a file"]);
    let many = place.path("many");
    fs::create_dir(&many).unwrap();
    (0..1_500).for_each(|number| fs::write(many.join(format!("{number:0>80}")), "").unwrap());
    let said =
        ["the names of 1500 files take", "the limit of an object is 131072", "put fewer files at a time, or pack them"];
    finish(place.command(&["p2p", "put", "a", text(&many)]), &[]).failed(1, &said);
}

/// A long get locks its directory, and ends at once when the directory is removed and cannot be written.
#[test]
fn a_get_locks_its_directory_and_ends_when_it_cannot_write() {
    let place = Workplace::new("p2p-lock");
    let _dev = place.dev("16M", &[]);
    let source = place.path("source");
    fill(&source);
    let _origin = put(&place, &source);
    let (slow, other) = (place.path("slow"), place.path("other"));
    let get = ["p2p", "get", "a/model", text(&slow), "--no-shared-memory", "--host", "slow"];
    // The download takes a minute and a half.
    let mut first = Process::start(place.command(&[&get[..], &["--download", "32KiB"]].concat()));
    // The last file to be created is the last of the object.
    wait_until(|| names(&slow).iter().any(|name| name.starts_with(".none")).then_some(())).unwrap();
    finish(place.command(&get), &[]).failed(1, &["slow: ", "process", "fetches into it: wait until it has ended"]);
    let get = ["p2p", "get", "a/model", text(&other), "--no-shared-memory", "--host", "other"];
    finish(place.command(&get), &[]).well();
    same(&source, &other);
    // The other file in the directory belongs to no object.
    fs::write(slow.join("mine"), "x").unwrap();
    let put = ["p2p", "put", "partial", text(&slow), "--no-shared-memory"];
    let partial = Process::start(place.command(&put));
    partial.wait_for("slow: left out partial files of interrupted gets or reshards: 4, such as \".config.json");
    partial.wait_for("1 B in 1 files");
    let part = slow.join(names(&slow).into_iter().find(|name| name.starts_with(".none")).unwrap());
    let one = ["p2p", "put", "partial", text(&part), "--no-shared-memory"];
    finish(place.command(&one), &[]).failed(1, &["of an interrupted get", "run that again, or rename it"]);
    let since = Instant::now();
    fs::remove_dir_all(&slow).unwrap();
    first.wait_for("No such file or directory (os error 2): the fetch was stopped");
    assert!(!first.ended().success());
    assert!(since.elapsed() < Duration::from_secs(30), "it did not go on to the end: {:?}", since.elapsed());
}

/// A file that shrinks while it is served ends the serving process, with its name: lengths are checked at intervals. A
/// file that was removed, or replaced by another one, is still served.
#[test]
fn a_file_that_shrinks_is_named() {
    let place = Workplace::new("p2p-shorter");
    let _dev = place.dev("16M", &[]);
    let source = place.path("source");
    fill(&source);
    let mut origin = put(&place, &source);
    fs::rename(source.join("layers/0.safetensors"), place.path("former")).unwrap();
    fs::write(source.join("layers/0.safetensors"), "short").unwrap();
    fs::remove_file(source.join("config.json")).unwrap();
    let copy = place.path("copy");
    let get = ["p2p", "get", "a/model", text(&copy), "--no-shared-memory", "--host", "copy"];
    finish(place.command(&get), &[]).well();
    fs::File::options().write(true).open(source.join("layers/1.safetensors")).unwrap().set_len(10_000).unwrap();
    origin.wait_for("1.safetensors: has 10000 bytes now and had 70000 when it was put: this process ends");
    assert!(!origin.ended().success());
}

/// Long names, names that resemble partial files, entries that are not files, and names with terminal escapes.
#[test]
fn names_of_all_kinds_arrive_and_are_shown() {
    let place = Workplace::new("p2p-names");
    let _dev = place.dev("16M", &[]);
    let (source, copy) = (place.path("source"), place.path("copy"));
    let long = "n".repeat(255);
    fs::create_dir(&source).unwrap();
    for name in ["x", "x.part", &long] {
        fs::write(source.join(name), name).unwrap();
    }
    std::os::unix::fs::symlink("nowhere", source.join("link")).unwrap();
    let name = "red\u{1b}[31m\n";
    let put = ["p2p", "put", name, text(&source), "--no-shared-memory", "--host", "source"];
    let former = Process::start(place.command(&put));
    former.wait_for("left out entries that are not files: 1, such as \"link\", a link to no file");
    former.wait_for("version 1: 262 B in 3 files");
    let get = ["p2p", "get", name, text(&copy), "--no-shared-memory", "--host", "copy"];
    let found = finish(place.command(&get), &[]);
    assert!(found.stderr.starts_with("fetched 262 B of 262 B in "), "{}", found.stderr);
    assert_eq!(found.stderr.lines().count(), 1, "{}", found.stderr);
    found.well();
    for name in ["x", "x.part", &long] {
        assert_eq!(fs::read_to_string(copy.join(name)).unwrap(), name);
    }
    assert_eq!(names(&copy).len(), 3, "no partial files");
    // The next version has one file less, which stays in the destination of the former one.
    fs::remove_file(source.join("x.part")).unwrap();
    let latter = Process::start(place.command(&put));
    latter.wait_for("version 2: 256 B in 2 files");
    let found = finish(place.command(&get), &[]);
    let stays = "copy: files that do not belong to \"red\\u{1b}[31m\\n\" version 2 stay: 1, such as \"x.part\"";
    assert!(found.stderr.contains(stays), "{}", found.stderr);
    found.well();
    assert!(copy.join("x.part").exists());
    let listed = finish(place.command(&["p2p", "ls", "red"]), &[]).text();
    assert!(listed.contains("red\\u{1b}[31m\\n@2") && listed.lines().count() == 2, "{listed}");
}

/// Starts one of four ranks, which then seeds the object.
fn rank(place: &Workplace, rank: u32, patience: &str) -> (Process, std::path::PathBuf) {
    let directory = place.path(&format!("rank{rank}"));
    let (number, host) = (rank.to_string(), format!("h{rank}"));
    let get = ["p2p", "get", "a/model", text(&directory), "--rank", &number, "--ranks", "4", "--job", "load"];
    let how = ["--patience", patience, "--no-shared-memory", "--host", &host, "--seed", "600"];
    (Process::start(place.command(&[&get[..], &how].concat())), directory)
}

#[test]
fn four_ranks_fetch_the_whole_object() {
    let place = Workplace::new("p2p-ranks");
    let _dev = place.dev("16M", &[]);
    let source = place.path("source");
    fill(&source);
    let _origin = put(&place, &source);
    let ranks: Vec<_> = (0..4).map(|number| rank(&place, number, "60")).collect();
    for (process, directory) in &ranks {
        process.wait_for("has \"a/model\"");
        same(&source, directory);
    }
    let nowhere = place.path("wrong");
    let wrong = ["p2p", "get", "a/model", text(&nowhere), "--rank", "4"];
    finish(place.command(&[&wrong[..], &["--ranks", "4"]].concat()), &[]).failed(1, &["rank 4 of 4"]);
    finish(place.command(&wrong), &[]).failed(2, &["--ranks"]);
}

/// Rank 1 is killed when it is known and has nothing yet, as it waits for rank 3; or it never starts. The others wait
/// for it, and then fetch its part elsewhere.
#[test]
fn ranks_continue_without_a_killed_or_missing_rank() {
    for killed in [true, false] {
        let place = Workplace::new("p2p-rank-gone");
        let _dev = place.dev("16M", &[]);
        let source = place.path("source");
        fill(&source);
        let _origin = put(&place, &source);
        if killed {
            let (mut gone, _) = rank(&place, 1, "60");
            let listed = || finish(place.command(&["p2p", "ls", "--json"]), &[]).text().contains("\"members\":2");
            assert!(wait_until(|| listed().then_some(())).is_some(), "it is a member");
            gone.kill();
        }
        let ranks: Vec<_> = [0, 2, 3].map(|number| rank(&place, number, "0.5")).into_iter().collect();
        for (process, directory) in &ranks {
            process.wait_for("has \"a/model\"");
            same(&source, directory);
        }
    }
}
