//! Gateway of a real etcd: ranges, pages, transactions, unreachable endpoints, TLS.

mod launch;

use std::path::PathBuf;
use std::process::Command;

use kvplane_etcd::{Certificates, Compare, Gateway, Http, Operation, Outcome, Range};
use launch::{Etcd, soon};

/// Directory that is removed at the end of the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvp-etcd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn all<'a>(limit: u32, revision: i64) -> Range<'a> {
    Range { from: b"k", to: b"l", limit, revision }
}

#[test]
fn ranges_come_in_pages_of_one_revision_and_transactions_are_all_or_nothing() {
    let directory = Directory::new("plain");
    let Some(etcd) = Etcd::start(&directory.0.join("data"), &[]) else { return };
    let dead = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let gateway = Gateway::new(vec![dead, format!("http://{}", etcd.address())], Http::kept(1 << 20, None));
    // Keys that are not text, and empty values.
    let key = |n: u8| [b"k", &[n, 0xff][..]].concat();
    for n in 0..10 {
        gateway.put(&key(n), &vec![n; usize::from(n)], soon()).unwrap();
    }
    let page = gateway.range(&all(4, 0), soon()).unwrap();
    assert_eq!((page.entries.len(), page.more), (4, true));
    assert_eq!((page.entries[3].key.clone(), page.entries[3].value.clone()), (key(3), vec![3; 3]));
    gateway.put(&key(7), b"later", soon()).unwrap();
    let rest = Range { from: &key(4), ..all(100, page.revision) };
    let rest = gateway.range(&rest, soon()).unwrap();
    assert_eq!((rest.entries.len(), rest.more), (6, false));
    assert_eq!(rest.entries[3].value, vec![7; 7], "as of the first page's revision");

    let seven = gateway.range(&Range { from: &key(7), to: &[], limit: 0, revision: 0 }, soon()).unwrap();
    let modified = seven.entries[0].modified;
    let change = [Operation::Put(b"kk", b"v"), Operation::Delete(b"kx"), Operation::DeleteRange(&key(0), &key(3))];
    let refused =
        [Compare::Absent(&key(7)), Compare::Value(&key(7), b"other"), Compare::Modified(&key(7), modified - 1)];
    for compare in refused {
        let outcome = gateway.transact(&[compare], &change, &[&key(7)], soon()).unwrap();
        assert!(matches!(&outcome, Outcome::Refused(found) if found[0].value == b"later"), "{outcome:?}");
    }
    let holds = [Compare::Absent(b"kk"), Compare::Value(&key(7), b"later"), Compare::Modified(&key(7), modified)];
    assert_eq!(gateway.transact(&holds, &change, &[], soon()).unwrap(), Outcome::Done);
    assert_eq!(gateway.range(&all(0, 0), soon()).unwrap().entries.len(), 8);
    assert!(gateway.remove(b"kk", soon()).unwrap() && !gateway.remove(b"kk", soon()).unwrap());
}

#[test]
fn tls_authenticates_both_sides() {
    let directory = Directory::new("tls");
    let certificates = directory.0.join("certificates");
    std::fs::create_dir_all(&certificates).unwrap();
    let openssl = |name: &str, more: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        command.args(["-days", "2", "-subj", &format!("/CN={name}")]).args(more);
        command.args(["-keyout", &format!("{name}.key"), "-out", &format!("{name}.pem")]).current_dir(&certificates);
        command.output().is_ok_and(|output| output.status.success())
    };
    let leaf = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"];
    let leaf = [&leaf[..], &["-addext", "subjectAltName=IP:127.0.0.1"]].concat();
    if !(openssl("ca", &[]) && openssl("server", &leaf) && openssl("client", &leaf)) {
        println!("skipped: openssl is not installed");
        return;
    }
    let Some(etcd) = Etcd::start_with(&directory.0.join("data"), &[], Some(certificates.clone())) else { return };
    etcd.gateway().put(b"k", b"secret", soon()).unwrap();
    let url = format!("https://{}", etcd.address());
    // Without a client certificate, the connection is rejected.
    std::fs::remove_file(certificates.join("client.pem")).unwrap();
    let stranger = Certificates::read(&certificates).unwrap();
    let stranger = Gateway::new(vec![url], Http::kept(1 << 20, Some(stranger)));
    stranger.range(&all(0, 0), soon()).expect_err("a client without a certificate is accepted");
    // Plain text is rejected, and so is a malformed certificate file.
    let plain = Gateway::new(vec![format!("http://{}", etcd.address())], Http::kept(1 << 20, None));
    plain.range(&all(0, 0), soon()).expect_err("plain text is accepted");
    std::fs::write(certificates.join("ca.pem"), "junk").unwrap();
    let error = Certificates::read(&certificates).expect_err("junk").to_string();
    assert!(error.contains("ca.pem"), "{error}");
}
