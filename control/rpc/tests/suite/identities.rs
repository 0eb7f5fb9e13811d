//! Tests of identities on disk and the local directory: private files stay private, stale files are reported as stale.

use crate::support;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvplane_rpc::{
    Authority, ClientConfig, ClusterName, Grant, Identity, IdentityError, LocalCluster, LocalError, Role,
    RuntimeDirectory, Scope,
};
use support::{Rig, Scratch, cluster, connect, run};

fn mode(path: &std::path::Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn chmod(path: &std::path::Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn local(authority: &Authority, control: SocketAddr) -> LocalCluster {
    let identities =
        [Role::Node, Role::Client, Role::Admin].map(|role| (role, authority.issue(role).unwrap())).to_vec();
    LocalCluster::new(cluster(), control, authority.trust().clone(), identities)
}

fn somewhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 9))
}

#[test]
fn cluster_names_are_checked() {
    for good in ["a", "dev", "rack-7", "0", &"x".repeat(40)] {
        assert_eq!(ClusterName::new(good).unwrap().as_str(), good);
    }
    for bad in ["", "-a", "a-", "A", "a.b", "a/b", "é", "..", &"x".repeat(41)] {
        assert!(matches!(ClusterName::new(bad), Err(IdentityError::ClusterName(_))), "{bad:?}");
    }
}

#[test]
fn a_certificate_names_its_only_tenant() {
    let authority = Authority::generate(&cluster()).unwrap();
    let tenant = |role, scope| {
        let identity = authority.grant(&Grant { scope, ..Grant::of(role) }).unwrap();
        identity.tenant(&cluster())
    };
    assert_eq!(tenant(Role::Client, Scope::Any), None);
    assert_eq!(tenant(Role::Admin, Scope::Any), None);
    assert_eq!(tenant(Role::Node, Scope::Node(7)), None);
    // Names of every length, since the byte before a name is its length and may look like a letter of it.
    for bytes in 1..=40 {
        for name in ["a".repeat(bytes), "7".repeat(bytes)] {
            assert_eq!(tenant(Role::Client, Scope::tenant(&name).unwrap()), Some(name));
        }
    }
    let other = ClusterName::new("elsewhere").unwrap();
    let acme = authority.grant(&Grant { scope: Scope::tenant("acme").unwrap(), ..Grant::of(Role::Client) }).unwrap();
    assert_eq!((acme.tenant(&cluster()), acme.tenant(&other)), (Some("acme".to_owned()), None));
}

#[test]
fn an_authority_outlives_its_process() {
    let scratch = Scratch::new();
    let first = Authority::load_or_generate(scratch.path(), &cluster()).unwrap();
    assert_eq!(mode(&scratch.path().join("ca.key")), 0o600);
    let second = Authority::load_or_generate(scratch.path(), &cluster()).unwrap();
    assert_eq!(first.trust(), second.trust());
    second.issue(Role::Node).unwrap().write(scratch.path(), "node").unwrap();
    assert_eq!(mode(&scratch.path().join("node.key")), 0o600);
    let read = Identity::read(scratch.path(), "node").unwrap();

    run(async {
        let mut rig = Rig::start().await;
        rig.server = support::serve(&first, somewhere_free(), &rig.service, support::limits()).await;
        let config = ClientConfig { identity: read, trust: first.trust().clone(), ..rig.config(Role::Node) };
        connect(&config).await.expect("what the second issued, the first accepts");
    });
}

fn somewhere_free() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

#[test]
fn an_authority_that_does_not_fit_its_key_or_cluster_is_refused() {
    let (one, two) = (Scratch::new(), Scratch::new());
    Authority::load_or_generate(one.path(), &cluster()).unwrap();
    Authority::load_or_generate(two.path(), &cluster()).unwrap();
    let refused = |directory: &std::path::Path, name: &ClusterName| {
        Authority::load_or_generate(directory, name).err().expect("refused").to_string()
    };
    let other = ClusterName::new("other").unwrap();
    let text = refused(one.path(), &other);
    assert!(text.contains("cluster other") && text.contains("ca.pem"), "{text}");
    fs::copy(two.path().join("ca.key"), one.path().join("ca.key")).unwrap();
    let text = refused(one.path(), &cluster());
    assert!(text.contains("ca.pem"), "{text}");
    fs::write(one.path().join("ca.key"), "rubbish").unwrap();
    let text = refused(one.path(), &cluster());
    assert!(text.contains("ca.key"), "{text}");
}

#[test]
fn a_key_that_others_may_read_is_refused() {
    let scratch = Scratch::new();
    Authority::load_or_generate(scratch.path(), &cluster()).unwrap();
    chmod(&scratch.path().join("ca.key"), 0o640);
    let error = Authority::load_or_generate(scratch.path(), &cluster()).err().expect("refused");
    let text = error.to_string();
    assert!(text.contains("640") && text.contains("chmod 600"), "{text}");
}

#[test]
fn published_identities_are_discovered_and_work() {
    let scratch = Scratch::new();
    let directory = RuntimeDirectory::at(scratch.path().join("run"));
    run(async {
        let rig = Rig::start().await;
        let published = local(&rig.authority, rig.server.address());
        let publication = directory.publish(&published).unwrap();
        assert_eq!(mode(directory.path()), 0o700);
        assert_eq!(mode(&directory.path().join("test.local")), 0o600);
        let found = directory.discover(&cluster()).unwrap();
        assert_eq!((&found.cluster, found.control), (&cluster(), rig.server.address()));
        for role in [Role::Node, Role::Client, Role::Admin] {
            let config = ClientConfig::local(&found, role, "test").expect("published");
            connect(&config).await.expect("no configuration needed");
            assert_eq!(rig.service.callers.lock().unwrap().last().unwrap().role, role);
        }
        assert!(found.identity(Role::Control).is_none(), "nobody else may be the control plane");

        let text = directory.publish(&published).unwrap_err().to_string();
        assert!(text.contains("already runs") && text.contains("test.lock"), "{text}");
        drop(publication);
        let error = directory.discover(&cluster()).unwrap_err();
        assert!(matches!(error, LocalError::NotPublished { .. }), "{error}");
        directory.publish(&published).expect("the name is free again");
    });
}

#[test]
fn publication_of_a_dead_process_is_stale() {
    let scratch = Scratch::new();
    let directory = RuntimeDirectory::at(scratch.path().join("run"));
    let authority = Authority::generate(&cluster()).unwrap();
    let published = local(&authority, somewhere());
    let publication = directory.publish(&published).unwrap();
    let file = directory.path().join("test.local");
    let text = fs::read(&file).unwrap();
    drop(publication);
    assert!(!directory.path().exists(), "publishing made it, and nothing was in it");
    kvplane_sys::private_files::private_directory(directory.path()).unwrap();
    fs::write(&file, text).unwrap();
    chmod(&file, 0o600);
    let error = directory.discover(&cluster()).unwrap_err();
    assert!(matches!(error, LocalError::Stale { .. }), "{error}");
    // A killed process leaves its lock file, too, unlocked.
    fs::write(directory.path().join("test.lock"), "").unwrap();
    let error = directory.discover(&cluster()).unwrap_err();
    assert!(matches!(error, LocalError::Stale { .. }), "{error}");
    assert!(error.to_string().contains("is gone"), "{error}");
    // The next publisher holds the lock already, and has not published its own file yet.
    let lock = fs::File::create(directory.path().join("test.lock")).unwrap();
    lock.lock().unwrap();
    let error = directory.discover(&cluster()).unwrap_err();
    assert!(matches!(error, LocalError::Stale { .. }), "{error}");
    drop(lock);
    directory.publish(&published).expect("a stale file is replaced");
    assert_eq!(fs::read_dir(directory.path()).expect("not made by publishing").count(), 0);
}

#[test]
fn publishers_in_turn_are_never_two_at_once() {
    let scratch = Scratch::new();
    let directory = RuntimeDirectory::at(scratch.path().join("run"));
    let authority = Authority::generate(&cluster()).unwrap();
    let published = local(&authority, somewhere());
    let (publishing, published_often) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    match directory.publish(&published) {
                        Ok(publication) => {
                            assert_eq!(publishing.fetch_add(1, Ordering::SeqCst), 0);
                            assert!(directory.discover(&cluster()).is_ok());
                            publishing.fetch_sub(1, Ordering::SeqCst);
                            published_often.fetch_add(1, Ordering::SeqCst);
                            drop(publication);
                        }
                        Err(LocalError::AlreadyPublished { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert!(published_often.into_inner() > 0);
}

#[test]
fn a_damaged_publication_is_named() {
    let scratch = Scratch::new();
    let directory = RuntimeDirectory::at(scratch.path().join("run"));
    let authority = Authority::generate(&cluster()).unwrap();
    let _publication = directory.publish(&local(&authority, somewhere())).unwrap();
    let file = directory.path().join("test.local");
    let good = fs::read_to_string(&file).unwrap();
    let cuts = [0, 5, 20, 40, good.len() / 2, good.len() - 60];
    for cut in cuts {
        fs::write(&file, &good[..cut]).unwrap();
        let error = directory.discover(&cluster()).unwrap_err();
        assert!(matches!(error, LocalError::Malformed { .. }), "cut at {cut}: {error}");
        assert!(error.to_string().contains("test.local"), "{error}");
    }
    fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
    assert!(matches!(directory.discover(&cluster()), Err(LocalError::File(_))));
}

#[test]
fn a_directory_that_others_may_enter_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.path().join("run");
    let directory = RuntimeDirectory::at(&path);
    let authority = Authority::generate(&cluster()).unwrap();
    let published = local(&authority, somewhere());
    let publication = directory.publish(&published).unwrap();
    for open in [0o750, 0o701] {
        chmod(&path, open);
        for error in [directory.publish(&published).unwrap_err(), directory.discover(&cluster()).unwrap_err()] {
            let text = error.to_string();
            let named = path.display().to_string();
            assert!(text.contains(&named) && text.contains("chmod 700"), "{text}");
        }
    }
    drop(publication);
    let link = scratch.path().join("link");
    symlink(&path, &link).unwrap();
    let text = RuntimeDirectory::at(&link).publish(&published).unwrap_err().to_string();
    assert!(text.contains("not a directory"), "{text}");
}
