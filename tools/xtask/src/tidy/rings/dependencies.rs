//! Rule: dependencies run one way, and each major external crate has one home.
//!
//! The rings are a table of edges: each crate with those that it may depend on. An edge that is not in it fails, so the
//! architecture changes only by changing this file. All kinds of dependencies count; `tests` and `benches` may use
//! anything.

use crate::tidy::Violation;
use crate::tidy::sources::manifest::{self, Dependency, Manifest};
use crate::tidy::sources::tree::Tree;

/// Allowed dependencies of a crate of the workspace.
enum Uses {
    /// Any crate of the workspace and any external crate.
    Anything,
    /// Any crate of the workspace.
    Ours,
    /// These crates of the workspace.
    Only(&'static [&'static str]),
}

/// Packages of the workspace with their allowed dependencies, from the inner ring outwards.
const EDGES: [(&str, Uses); 40] = [
    ("xtask", Uses::Only(&[])),
    ("kvplane-topology", Uses::Only(&[])),
    ("kvplane-ticket", Uses::Only(&[])),
    ("kvplane-tls", Uses::Only(&[])),
    ("kvplane-proto", Uses::Only(&[])),
    ("kvplane-client", Uses::Only(&["kvplane-proto", "kvplane-ticket"])),
    // Drivers and devices for the tests of kvplane-sys and of the crates above it. The devices depend on its feature
    // `verbs-provider`, and its tests on the devices.
    ("kvplane-fake-devices", Uses::Only(&[])),
    ("kvplane-fake-cuda", Uses::Only(&["kvplane-fake-devices"])),
    ("kvplane-fake-hip", Uses::Only(&["kvplane-fake-devices"])),
    ("kvplane-fake-npu", Uses::Only(&["kvplane-fake-devices"])),
    ("kvplane-soft-verbs", Uses::Only(&["kvplane-sys"])),
    (
        "kvplane-sys",
        Uses::Only(&[
            "kvplane-fake-devices",
            "kvplane-fake-cuda",
            "kvplane-fake-hip",
            "kvplane-fake-npu",
            "kvplane-soft-verbs",
        ]),
    ),
    ("kvplane-store", Uses::Only(&["kvplane-proto", "kvplane-shared", "kvplane-ticket", "kvplane-tier"])),
    ("kvplane-tier", Uses::Only(&["kvplane-proto"])),
    ("kvplane-shared", Uses::Only(&["kvplane-proto", "kvplane-tier"])),
    ("kvplane-cluster", Uses::Only(&["kvplane-proto"])),
    ("kvplane-conductor", Uses::Only(&["kvplane-proto"])),
    ("kvplane-group", Uses::Only(&["kvplane-proto"])),
    ("kvplane-collective", Uses::Only(&["kvplane-group", "kvplane-proto"])),
    ("kvplane-sim", Uses::Only(&["kvplane-proto", "kvplane-store", "kvplane-conductor"])),
    (
        "kvplane-transport",
        Uses::Only(&["kvplane-proto", "kvplane-soft-verbs", "kvplane-sys", "kvplane-tier", "kvplane-tls"]),
    ),
    (
        "kvplane-engine",
        Uses::Only(&[
            "kvplane-client",
            "kvplane-proto",
            "kvplane-shared",
            "kvplane-store",
            "kvplane-ticket",
            "kvplane-tier",
            "kvplane-soft-verbs",
            "kvplane-sys",
            "kvplane-tls",
            "kvplane-transport",
            "kvplane-topology",
        ]),
    ),
    ("kvplane-mooncake", Uses::Only(&["kvplane-etcd", "kvplane-proto", "kvplane-sys"])),
    (
        "kvplane-transfer",
        Uses::Only(&[
            "kvplane-fake-cuda",
            "kvplane-fake-devices",
            "kvplane-fake-hip",
            "kvplane-fake-npu",
            "kvplane-soft-verbs",
            "kvplane-client",
            "kvplane-engine",
            "kvplane-mooncake",
            "kvplane-proto",
            "kvplane-store",
            "kvplane-sys",
            "kvplane-ticket",
            "kvplane-topology",
            "kvplane-transport",
        ]),
    ),
    (
        "kvplane-mesh",
        Uses::Only(&["kvplane-proto", "kvplane-soft-verbs", "kvplane-sys", "kvplane-tls", "kvplane-transport"]),
    ),
    (
        "kvplane-rpc",
        Uses::Only(&[
            "kvplane-proto",
            "kvplane-cluster",
            "kvplane-conductor",
            "kvplane-group",
            "kvplane-sys",
            "kvplane-ticket",
        ]),
    ),
    // Libraries, independent of the control plane: client of HTTP and etcd; HTTP server.
    ("kvplane-etcd", Uses::Only(&["kvplane-sys"])),
    ("kvplane-http", Uses::Only(&[])),
    // An S3 service for tests, and the driver that is tested with it.
    ("kvplane-fake-s3", Uses::Only(&[])),
    ("kvplane-objects", Uses::Only(&["kvplane-fake-s3", "kvplane-proto", "kvplane-shared", "kvplane-sys"])),
    (
        "kvplane-server",
        Uses::Only(&[
            "kvplane-proto",
            "kvplane-cluster",
            "kvplane-conductor",
            "kvplane-group",
            "kvplane-rpc",
            "kvplane-etcd",
            "kvplane-http",
            "kvplane-mooncake",
            "kvplane-sys",
            "kvplane-ticket",
        ]),
    ),
    (
        "kvplane",
        Uses::Only(&[
            "kvplane-client",
            "kvplane-proto",
            "kvplane-store",
            "kvplane-ticket",
            "kvplane-tier",
            "kvplane-sys",
            "kvplane-tls",
            "kvplane-transport",
            "kvplane-engine",
            "kvplane-topology",
            "kvplane-cluster",
            "kvplane-collective",
            "kvplane-conductor",
            "kvplane-group",
            "kvplane-mesh",
            "kvplane-transfer",
            "kvplane-http",
            "kvplane-objects",
            "kvplane-rpc",
        ]),
    ),
    (
        "kvplane-capi",
        Uses::Only(&["kvplane", "kvplane-fake-devices", "kvplane-fake-cuda", "kvplane-fake-hip", "kvplane-fake-npu"]),
    ),
    ("kvplane-python", Uses::Only(&["kvplane"])),
    ("kvplane-tools", Uses::Ours),
    ("kvplane-simulator", Uses::Ours),
    ("kvplane-tests", Uses::Anything),
    ("kvplane-gpu", Uses::Anything),
    ("kvplane-benches", Uses::Anything),
    ("kvplane-bench-conductor", Uses::Anything),
];

/// External crates that only these packages of the workspace may depend on.
const HOMES: [(&str, &[&str]); 34] = [
    // The pure crates derive the layout of their types in messages; frames and limits are the first's.
    (
        "bincode",
        &["kvplane-rpc", "kvplane-cluster", "kvplane-conductor", "kvplane-group", "kvplane-proto", "kvplane-ticket"],
    ),
    ("clap", &["kvplane-tools", "kvplane-simulator"]),
    ("core_affinity", &["kvplane-sys"]),
    ("crc-fast", &["kvplane-proto"]),
    ("half", &["kvplane-collective"]),
    ("http-body-util", &["kvplane-http", "kvplane-server"]),
    ("hyper", &["kvplane-http", "kvplane-server"]),
    ("hyper-util", &["kvplane-http"]),
    ("indicatif", &["kvplane-tools"]),
    ("io-uring", &["kvplane-sys"]),
    ("libc", &["kvplane-sys", "kvplane-fake-devices", "kvplane-soft-verbs"]),
    ("loom", &["kvplane-sys"]),
    ("metrics", &["kvplane-server"]),
    ("metrics-exporter-prometheus", &["kvplane-server"]),
    ("object", &["xtask"]),
    ("object_store", &["kvplane-objects"]),
    ("proc-macro2", &["xtask"]),
    ("pyo3", &["kvplane-python"]),
    ("quinn", &["kvplane-rpc", "kvplane-server", "kvplane", "kvplane-tools"]),
    ("quinn-proto", &["kvplane-rpc"]),
    // The last three use it in their tests only.
    ("rcgen", &["kvplane-rpc", "kvplane-tls", "kvplane-transport", "kvplane-mesh"]),
    ("redb", &["kvplane-server"]),
    ("regex", &["kvplane"]),
    // Only for its feature that leaves the provider of cryptography to rustls.
    ("reqwest", &["kvplane-objects"]),
    // The second passes it to quinn, which takes ring's keys for stateless resets; the third hashes tokens as vLLM
    // does.
    ("ring", &["kvplane-ticket", "kvplane-rpc", "kvplane-conductor"]),
    ("roxmltree", &["kvplane-topology"]),
    ("rustls", &["kvplane-rpc", "kvplane-etcd", "kvplane-objects", "kvplane-tls"]),
    ("syn", &["xtask"]),
    ("tokio", &["kvplane-http", "kvplane-objects", "kvplane-rpc", "kvplane-server", "kvplane", "kvplane-tools"]),
    ("toml", &["kvplane-tools", "xtask"]),
    ("tracing", &["kvplane-engine", "kvplane-transfer", "kvplane-server", "kvplane", "kvplane-tools"]),
    ("tracing-subscriber", &["kvplane-tools"]),
    ("ureq", &["kvplane-etcd"]),
    ("xxhash-rust", &["kvplane-proto"]),
];

/// Checks all manifests.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for manifest in manifest::all(tree) {
        let Some((_, uses)) = EDGES.iter().find(|(name, _)| *name == manifest.name) else {
            let message = format!(
                "crate `{}` has no place yet; give it one in the table of tools/xtask/src/tidy/rings/dependencies.rs",
                manifest.name
            );
            out.push(Violation::new(manifest.path, 1, message));
            continue;
        };
        for dependency in &manifest.dependencies {
            if let Some(message) = objection(&manifest, uses, dependency) {
                out.push(Violation::new(manifest.path, dependency.line, message));
            }
        }
    }
}

fn objection(manifest: &Manifest<'_>, uses: &Uses, dependency: &Dependency) -> Option<String> {
    let name = dependency.name.as_str();
    if matches!(uses, Uses::Anything) {
        return None;
    }
    if EDGES.iter().any(|(ours, _)| *ours == name) {
        return match uses {
            Uses::Only(allowed) if !allowed.contains(&name) => Some(format!(
                "`{}` may not depend on `{name}`: dependencies run from the outer rings to the inner; pass the \
                 request as an output and the result as an input, or move the code",
                manifest.name
            )),
            _ => None,
        };
    }
    let (_, homes) = HOMES.iter().find(|(external, _)| *external == name)?;
    (!homes.contains(&manifest.name.as_str())).then(|| {
        format!("`{name}` is used only in {}; call what that crate offers, or extend it there", homes.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    fn manifest(name: &str, dependencies: &str) -> String {
        format!("[package]\nname = \"{name}\"\n[dependencies]\n{dependencies}\n")
    }

    #[test]
    fn inward_edges_pass() {
        let engine = manifest("kvplane-engine", "kvplane-sys.workspace = true\nkvplane-store.workspace = true");
        let tools = manifest("kvplane-tools", "kvplane-server.workspace = true\nclap.workspace = true\nserde = \"1\"");
        let sys = "[package]\nname = \"kvplane-sys\"\n[dev-dependencies]\nkvplane-soft-verbs.workspace = true\n";
        let tests = manifest("kvplane-tests", "redb = \"4\"\nkvplane-store.workspace = true");
        let files = [
            ("a/Cargo.toml", engine.as_str()),
            ("b/Cargo.toml", &tools),
            ("c/Cargo.toml", &tests),
            ("d/Cargo.toml", sys),
        ];
        assert_eq!(places(check, &files), Vec::<String>::new());
    }

    #[test]
    fn outward_edges_fail() {
        let store = manifest("kvplane-store", "kvplane-proto.workspace = true\nkvplane-sys.workspace = true");
        assert_eq!(places(check, &[("a/Cargo.toml", &store)]), ["a/Cargo.toml:5"]);
        let proto = "[package]\nname = \"kvplane-proto\"\n[dev-dependencies]\nkvplane-store = \"1\"\n";
        assert_eq!(places(check, &[("a/Cargo.toml", proto)]), ["a/Cargo.toml:4"]);
    }

    #[test]
    fn external_crates_stay_at_home() {
        let engine = manifest("kvplane-engine", "slab.workspace = true\ntokio.workspace = true\nlibc = \"0.2\"");
        assert_eq!(places(check, &[("a/Cargo.toml", &engine)]), ["a/Cargo.toml:5", "a/Cargo.toml:6"]);
    }

    #[test]
    fn a_new_crate_must_be_given_a_place() {
        assert_eq!(places(check, &[("a/Cargo.toml", &manifest("kvplane-new", ""))]), ["a/Cargo.toml:1"]);
    }
}
