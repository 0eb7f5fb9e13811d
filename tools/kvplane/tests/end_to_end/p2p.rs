//! `kvplane p2p`: directories go from process to process, also when the one that brought them is killed.

use std::fs;
use std::path::Path;

use crate::support::{Process, Workplace, finish, text, wait_until};

/// Files whose bytes say where they belong; one of them is empty, and none a multiple of a shard.
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
        assert!(!other.join(format!("{name}.part")).exists());
    }
}

fn put(place: &Workplace, directory: &Path) -> Process {
    let put = ["p2p", "put", "a/model", text(directory), "--shard", "64KiB", "--no-shared-memory", "--host", "source"];
    let process = Process::start(place.command(&put));
    process.wait_for("serves");
    process
}

#[test]
fn a_directory_goes_on_from_those_who_have_it() {
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
    // The one that brought it is killed; what it sent on is enough.
    origin.kill();
    let second = place.path("second");
    let get = ["p2p", "get", "a/model", text(&second), "--no-shared-memory", "--host", "second"];
    let found = finish(place.command(&get), &[]).text();
    assert!(found.contains("4 files"), "{found}");
    same(&source, &second);
    // Broken and missing parts are fetched again, and nothing else.
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
fn what_cannot_be_put_or_got_is_said() {
    let place = Workplace::new("p2p-wrong");
    let _dev = place.dev("16M", &[]);
    let missing = place.path("missing");
    finish(place.command(&["p2p", "put", "a", text(&missing)]), &[]).failed(1, &["missing", "No such file"]);
    finish(place.command(&["p2p", "get", "nobody's", text(&missing)]), &[]).failed(1, &["nobody has an object"]);
    finish(place.command(&["p2p", "put", "", text(&place.file("f", b"x"))]), &[]).failed(1, &["a name of 0 bytes"]);
    let far = ["p2p", "get", "a", text(&missing), "--listen", "0.0.0.0:0"];
    finish(place.command(&far), &[]).failed(1, &["makes no tickets"]);
}

/// One of four ranks, which goes on serving.
fn rank(place: &Workplace, rank: u32, patience: &str) -> (Process, std::path::PathBuf) {
    let directory = place.path(&format!("rank{rank}"));
    let (number, host) = (rank.to_string(), format!("h{rank}"));
    let get = ["p2p", "get", "a/model", text(&directory), "--rank", &number, "--ranks", "4", "--job", "load"];
    let how = ["--patience", patience, "--no-shared-memory", "--host", &host, "--seed", "600"];
    (Process::start(place.command(&[&get[..], &how].concat())), directory)
}

#[test]
fn four_ranks_have_it_all() {
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

/// Rank 1 is killed when it is known and has nothing yet, as it waits for rank 3; or it is not there at all. The others
/// wait for it, and then fetch elsewhere what it was to send.
#[test]
fn a_rank_that_is_killed_or_missing_is_done_without() {
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
