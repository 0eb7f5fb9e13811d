//! Removal of sockets that dead processes left behind in a directory, by the next process that starts to serve from it.
//!
//! A process that ends in good order removes its own; one that is killed cannot.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane_sys::unix;

/// Least age of a socket to be removed: a newer one may be about to listen.
const AGE: Duration = Duration::from_secs(10);
/// Names that are visited in one sweep, which bounds the time of a start, whatever else is in the directory.
const NAMES: usize = 4096;

/// Endings of the names of sockets.
const ENDINGS: [&str; 2] = ["shm", "handover"];

/// Removes the sockets in this directory, by the endings of their names, whose processes are gone. Failures leave a
/// socket behind.
pub fn sweep(directory: &Path) {
    sweep_older(directory, AGE);
}

fn sweep_older(directory: &Path, age: Duration) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let sockets = entries.take(NAMES).flatten().map(|entry| entry.path());
    let is_ours = |path: &PathBuf| path.extension().is_some_and(|ending| ENDINGS.iter().any(|ours| ending == *ours));
    let sockets: Vec<PathBuf> = sockets.filter(is_ours).collect();
    let bound = if sockets.is_empty() { HashSet::new() } else { bound() };
    for path in sockets {
        // These are alive for certain, and are not connected to.
        if bound.contains(&path) {
            continue;
        }
        let Some(identity) = identity_of_old(&path, age) else { continue };
        // The name may belong to another socket by now.
        if unix::is_abandoned(&path) && identity_of_old(&path, age) == Some(identity) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Returns the identity of a socket file that has at least this age.
fn identity_of_old(path: &Path, age: Duration) -> Option<(u64, u64, i64)> {
    let found = fs::symlink_metadata(path).ok()?;
    let old = found.file_type().is_socket() && found.modified().ok()?.elapsed().is_ok_and(|since| since >= age);
    old.then(|| (found.dev(), found.ino(), found.ctime_nsec()))
}

/// Returns the paths that sockets of this network namespace are bound to.
fn bound() -> HashSet<PathBuf> {
    let text = fs::read("/proc/net/unix").unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_old_sockets_of_dead_processes_go() {
        let directory = std::env::temp_dir().join(format!("kvplane-sockets-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        let living = UnixListener::bind(path("living.shm")).unwrap();
        for name in ["dead.shm", "dead.handover", "foreign.sock"] {
            drop(UnixListener::bind(path(name)).unwrap());
        }
        fs::write(path("file.shm"), "no socket").unwrap();
        std::os::unix::fs::symlink(path("foreign.sock"), path("link.shm")).unwrap();
        let all = ["dead.handover", "dead.shm", "file.shm", "foreign.sock", "link.shm", "living.shm"];
        let names = || {
            let mut names: Vec<String> =
                fs::read_dir(&directory).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        sweep(&directory);
        assert_eq!(names(), all, "all are young");
        sweep_older(&directory, Duration::ZERO);
        assert_eq!(names(), all[2..]);
        // The sweep has not connected to living sockets.
        living.set_nonblocking(true).unwrap();
        assert_eq!(living.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        assert!(!unix::is_abandoned(&path("living.shm")) && unix::is_abandoned(&path("foreign.sock")));
        assert!(!unix::is_abandoned(&path("nothing")) && !unix::is_abandoned(Path::new(&"x".repeat(200))));
        sweep(&path("no such directory"));
        fs::remove_dir_all(&directory).unwrap();
    }
}
