//! Command line of `cargo x`, parsed by hand: a command, then its arguments.
//!
//! `demo`, `test`, `seeds`, `nightly`, `mutations`, `kills`, `cluster`, `silence`, `repairs`, `networks`, `upgrades`,
//! `fuzz`, `bench`, `peers`, `stores`, `interop`, `python`, `aarch64` and `rig` pass their arguments on untouched, and
//! the callee checks them. For the other commands an unknown word is an error with the usage text and exit status 2.

use std::fmt;

use crate::ci::Step;
use crate::setup::packages::Group;
use crate::setup::targets::Target;

/// Exit status for an invalid command line, as in other Unix tools.
pub const USAGE_STATUS: u8 = 2;

/// Text that `cargo x help` prints.
pub const USAGE: &str = "\
usage: cargo x COMMAND [...]

  setup [GROUP...]     find and install missing system packages; groups: build (default), test,
                       bench, rig, python, cross
  demo [--trace FILE] [...]
                       build release, replay a trace against a live node, write a report to target/demo/;
                       arguments are passed to `kvplane demo`
  test [...]           all tests and doc tests; arguments are passed to the test runner (a filter, flags)
  test [--busy LOOPS] [--times COUNT] [...]
                       the same beside LOOPS busy threads a core, and each test COUNT times
  test --rig [--short] [FILTER...]
                       the tests that need hardware, in virtual machines that have it; --short runs few of them
  test --gpu           the suites of device memory on the GPUs of this machine, and their rates; without one, says so
  rig [OPTION...] -- COMMAND [...]
                       run a command in a virtual machine with soft-RoCE, NVMe, NUMA and CXL: see `cargo x rig --help`
  tidy [--write-map]   check the source tree; --write-map regenerates the code map in docs/architecture.md
  lines [FOLDER]       lines of Rust of the product, of tooling and of tests, here or in another checkout
  ci [STEP...]         all checks that a change must pass, or the steps named:
                       fmt, tidy, clippy, unit, test, release, linkage, interop, python, rig
  quick                what is to pass before each commit: fmt, tidy, clippy, unit tests
  seeds [--tier] [COUNT] [--from SEED]
                       seeds of the World (simulation), on all cores; --tier: with shards on faulty disks
  seeds --nightly [COUNT] [--from SEED]
                       100,000 seeds, or COUNT, distributed over all kinds of simulations
  nightly [COUNT] [--from SEED]
                       the nightly checks: deny, loom, miri, aarch64, seeds --nightly, cluster, silence,
                       networks, upgrades, mutations
  loom                 models of the queues between threads and processes: every order of their accesses
  miri                 unit tests of crates without I/O in an interpreter that finds undefined behaviour, if it is
                       installed
  deny                 licences, origins, versions and known faults of dependencies, if cargo-deny is installed
  mutations [NAME...]  plant bugs in a copy of the product, one at a time, each of which the World must find within
                       2,000 seeds; all of them, or those whose names contain one of NAME; takes hours
  kills [--power | --full] [COUNT]
                       kill -9 of a node with an SSD, COUNT times (200), with every object read back each time; with
                       --power the SSD loses power too, with --full it has no space for all objects
  cluster [COUNT]      five nodes in network namespaces, killed one after the other under load (5): bytes, losses, time
                       to recovery, and the slowest operations on the others
  silence [ROUNDS]     a node stopped, killed, or disconnected in both directions or in one, ROUNDS times each (10),
                       with SSDs and without: the times of gets, queries and puts before, during and after; and a rank
                       of a process group: the sum that it interrupts
  repairs [MIB]        MIB MiB (64) of objects in a cluster of four nodes: GB/s and time to full copies after the loss
                       of a node, with two and three replicas, and of a scrub that repairs damaged records
  networks [ROUNDS]    five nodes on an emulated network that delays, loses, reorders, duplicates and damages packets,
                       collapses, resets connections or leaves them half open, ROUNDS times each (5), under load
  upgrades [COUNT] [--kills COUNT] [--objects COUNT] [--revision REVISION] [--dev]
                       a node upgraded COUNT times in a row (50) under load, with --objects idle objects (10,000)
                       besides, and nodes with replicas: bytes, losses, pauses; then --kills upgrades (50) with kill -9
                       of either process at any moment; --revision: every other upgrade is to the program of that
                       revision, and back; --dev: development builds
  fuzz [SECONDS]       broken frames for every port of real processes, for SECONDS (3600)
  bench [--rig] [...]  build release and run the benchmarks; arguments are passed to `kvplane-bench`; with --rig
                       in a virtual machine with RDMA devices, as `perftest` needs it; `conductor-index TRACE [ROUNDS]`
                       benchmarks the prefix index beside those of other projects
  peers [...]          install other transfer engines into a folder and benchmark kvplane beside them, in a network
                       namespace of its own: [--folder DIR] [--install-only] [--only mooncake,nixl,ucx,gloo,iperf3,raw]
                       [--ours tcp,tcp-parked,shm,...] [--quick] [--sizes 4K,1M,...] [--batches 1,16,...]
                       [--rounds N] [--seconds S] [--retries N] [--markdown FILE]
  stores [...]         install stock Mooncake, redis and memcached and benchmark the store beside them, in a network
                       namespace of its own: [--folder DIR] [--install-only] [--only 'ours tcp,redis,...']
                       [--sizes 4K,1M,...] [--batches 1,16,...] [--clients 1,4] [--rounds N] [--seconds S]
                       [--pool SIZE] [--markdown FILE]
  interop [--rdma] [SEED]
                       a stock Mooncake wheel and kvplane's read and write each other's segments, every byte compared;
                       --rdma: over RDMA in a virtual machine
  reference            regenerate docs/reference/: every flag, metric and message
  figures              render docs/performance.md from docs/results/figures.toml
  wheel [--target TARGET]
                       pack the Python packages: target/wheels/kvplane-*.whl and kvplane_mooncake-*.whl; for another
                       processor (aarch64-unknown-linux-gnu, x86_64-unknown-linux-gnu) into target/TARGET/wheels
  aarch64 [FILTER...]  the tests of proto, store, tier and cluster for aarch64, on an emulated processor
  python [--debug] [--nightly] [--gpu] [TEST...]
                       test them against a live cluster, all or by name (test_store); --debug: development build;
                       --nightly: search for leaks over 100,000 calls; --gpu: device pointers are of this machine's GPU
  python [--debug] --upstream DIR [FILE...]
                       run Mooncake's own client tests of the checkout in DIR against kvplane
  python [--debug] --torch DIR [NAME...]
                       install torch without a GPU's libraries in target/torch (or $KVPLANE_TORCH), and run there the
                       tests of mooncake.pg, and Mooncake's tests of process groups on CPUs of the checkout in DIR
  help                 this text";

/// Parsed command.
#[derive(Debug, PartialEq, Eq)]
pub enum Task {
    /// Print the usage text.
    Help,
    /// Install the packages of the groups.
    Setup(Vec<Group>),
    /// Run the demo with these arguments.
    Demo(Vec<String>),
    /// Run the tests with these arguments.
    Test(Vec<String>),
    /// Run seeds of the simulation with these arguments.
    Seeds(Vec<String>),
    /// Run the nightly checks with these arguments.
    Nightly(Vec<String>),
    /// Check the dependencies.
    Deny,
    /// Run the models of the queues.
    Loom,
    /// Run unit tests in Miri.
    Miri,
    /// Plant bugs in the product, all or those with these names, and have the simulation find them.
    Mutations(Vec<String>),
    /// Kill nodes with an SSD, with these arguments.
    Kills(Vec<String>),
    /// Kill nodes of a cluster under load.
    Cluster(Vec<String>),
    /// Measure repairs.
    Repairs(Vec<String>),
    /// Stop, kill and disconnect nodes of a cluster.
    Silence(Vec<String>),
    /// Impair an emulated network.
    Networks(Vec<String>),
    /// Upgrade a node under load, with these arguments.
    Upgrades(Vec<String>),
    /// Send broken frames to real processes.
    Fuzz(Vec<String>),
    /// Check the source tree, or rewrite its code map.
    Tidy {
        /// Regenerate the code map instead of checking.
        write_map: bool,
    },
    /// Run these steps, all of them if the list is empty.
    Ci(Vec<Step>),
    /// Run the benchmarks with these arguments.
    Bench(Vec<String>),
    /// Benchmark beside other transfer engines with these arguments.
    Peers(Vec<String>),
    /// Benchmark the store beside others with these arguments.
    Stores(Vec<String>),
    /// Exchange bytes with a stock Mooncake with these arguments.
    Interop(Vec<String>),
    /// Run a command in a virtual machine with these arguments.
    Rig(Vec<String>),
    /// Write the reference pages anew.
    Reference,
    /// Render the page of figures.
    Figures,
    /// Counts lines, here or in another checkout.
    Lines(Option<String>),
    /// Pack the Python packages, for this machine's processor or another.
    Wheel(Option<Target>),
    /// Run the tests of the pure crates on an emulated processor, all or those that these words name.
    Aarch64(Vec<String>),
    /// Test the Python packages with these arguments.
    Python(Vec<String>),
}

/// Error of the arguments after `cargo x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UsageError {
    /// There is no argument.
    NoCommand,
    /// No command has this name.
    UnknownCommand(String),
    /// The command does not know a word.
    UnknownWord {
        /// The command.
        command: String,
        /// The word.
        word: String,
    },
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCommand => f.write_str("no command given"),
            Self::UnknownCommand(command) => write!(f, "unknown command `{command}`"),
            Self::UnknownWord { command, word } => write!(f, "`{word}` is unknown to `cargo x {command}`"),
        }
    }
}

impl std::error::Error for UsageError {}

/// Parses the arguments after `cargo x`. The error names the unknown word.
pub fn parse(arguments: &[String]) -> Result<Task, UsageError> {
    let Some((command, rest)) = arguments.split_first() else {
        return Err(UsageError::NoCommand);
    };
    let asks_help = rest.iter().any(|word| word == "-h" || word == "--help");
    match command.as_str() {
        "demo" => Ok(Task::Demo(rest.to_vec())),
        "test" => Ok(Task::Test(rest.to_vec())),
        "bench" => Ok(Task::Bench(rest.to_vec())),
        "seeds" if !asks_help => Ok(Task::Seeds(rest.to_vec())),
        "mutations" if !asks_help => Ok(Task::Mutations(rest.to_vec())),
        "nightly" if !asks_help => Ok(Task::Nightly(rest.to_vec())),
        "kills" if !asks_help => Ok(Task::Kills(rest.to_vec())),
        "cluster" if !asks_help => Ok(Task::Cluster(rest.to_vec())),
        "silence" if !asks_help => Ok(Task::Silence(rest.to_vec())),
        "repairs" if !asks_help => Ok(Task::Repairs(rest.to_vec())),
        "networks" if !asks_help => Ok(Task::Networks(rest.to_vec())),
        "upgrades" if !asks_help => Ok(Task::Upgrades(rest.to_vec())),
        "fuzz" if !asks_help => Ok(Task::Fuzz(rest.to_vec())),
        "rig" => Ok(Task::Rig(rest.to_vec())),
        "seeds" | "nightly" | "deny" | "loom" | "miri" | "mutations" | "kills" | "cluster" | "silence" | "repairs"
        | "networks" | "upgrades" | "fuzz" | "setup" | "tidy" | "ci" | "quick" | "peers" | "stores" | "interop"
        | "wheel" | "python" | "reference" | "figures" | "lines"
            if asks_help =>
        {
            Ok(Task::Help)
        }
        "peers" => Ok(Task::Peers(rest.to_vec())),
        "stores" => Ok(Task::Stores(rest.to_vec())),
        "interop" => Ok(Task::Interop(rest.to_vec())),
        "wheel" => match rest {
            [] => Ok(Task::Wheel(None)),
            [flag, target, ..] if flag == "--target" && Target::parse(target).is_some() => {
                each(&rest[2..], "wheel", |_| None::<()>).map(|_| Task::Wheel(Target::parse(target)))
            }
            [flag, word, ..] if flag == "--target" => {
                Err(UsageError::UnknownWord { command: "wheel".to_owned(), word: word.clone() })
            }
            [word, ..] => Err(UsageError::UnknownWord { command: "wheel".to_owned(), word: word.clone() }),
        },
        "aarch64" => Ok(Task::Aarch64(rest.to_vec())),
        "reference" => each(rest, "reference", |_| None::<()>).map(|_| Task::Reference),
        "figures" => each(rest, "figures", |_| None::<()>).map(|_| Task::Figures),
        "lines" => match rest {
            [] => Ok(Task::Lines(None)),
            [folder] => Ok(Task::Lines(Some(folder.clone()))),
            [_, word, ..] => Err(UsageError::UnknownWord { command: "lines".to_owned(), word: word.clone() }),
        },
        "deny" => each(rest, "deny", |_| None::<()>).map(|_| Task::Deny),
        "loom" => each(rest, "loom", |_| None::<()>).map(|_| Task::Loom),
        "miri" => each(rest, "miri", |_| None::<()>).map(|_| Task::Miri),
        "python" => Ok(Task::Python(rest.to_vec())),
        "setup" => Ok(Task::Setup(each(rest, "setup", Group::parse)?)),
        "ci" => Ok(Task::Ci(each(rest, "ci", Step::parse)?)),
        "quick" => each(rest, "quick", |_| None::<()>).map(|_| Task::Ci(Step::QUICK.to_vec())),
        "tidy" => {
            each(rest, "tidy", |word| (word == "--write-map").then_some(()))?;
            Ok(Task::Tidy { write_map: !rest.is_empty() })
        }
        "help" | "-h" | "--help" => Ok(Task::Help),
        other => Err(UsageError::UnknownCommand(other.to_string())),
    }
}

fn each<T>(words: &[String], command: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, UsageError> {
    let unknown = |word: &String| UsageError::UnknownWord { command: command.to_string(), word: word.clone() };
    words.iter().map(|word| parse(word).ok_or_else(|| unknown(word))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measuring::peers::install::Peer;

    fn parsed(line: &str) -> Result<Task, UsageError> {
        let words: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        parse(&words)
    }

    #[test]
    fn commands_parse_their_arguments() {
        assert_eq!(parsed("setup bench"), Ok(Task::Setup(vec![Group::Bench])));
        assert_eq!(parsed("tidy"), Ok(Task::Tidy { write_map: false }));
        assert_eq!(parsed("tidy --write-map"), Ok(Task::Tidy { write_map: true }));
        assert_eq!(parsed("ci fmt test"), Ok(Task::Ci(vec![Step::Fmt, Step::Test])));
        let passed_on = vec!["--trace".to_string(), "x.jsonl".to_string()];
        assert_eq!(parsed("demo --trace x.jsonl"), Ok(Task::Demo(passed_on)));
        assert_eq!(parsed("test --help"), Ok(Task::Test(vec!["--help".to_string()])));
        assert_eq!(parsed("ci --help"), Ok(Task::Help));
        assert_eq!(parsed("peers --help"), Ok(Task::Help));
        assert_eq!(parsed("peers --quick"), Ok(Task::Peers(vec!["--quick".to_string()])));
        assert_eq!(parsed("stores --rounds 2"), Ok(Task::Stores(vec!["--rounds".to_string(), "2".to_string()])));
        assert_eq!(parsed("kills 5000"), Ok(Task::Kills(vec!["5000".to_string()])));
        let passed_on = vec!["5".to_string(), "--kills".to_string(), "0".to_string()];
        assert_eq!(parsed("upgrades 5 --kills 0"), Ok(Task::Upgrades(passed_on)));
        assert_eq!(parsed("fuzz 60"), Ok(Task::Fuzz(vec!["60".to_string()])));
        assert_eq!(parsed("seeds --help"), Ok(Task::Help));
        assert_eq!(parsed("nightly 5000"), Ok(Task::Nightly(vec!["5000".to_string()])));
        assert_eq!(parsed("deny"), Ok(Task::Deny));
        assert_eq!((parsed("loom"), parsed("miri")), (Ok(Task::Loom), Ok(Task::Miri)));
        assert_eq!(parsed("reference"), Ok(Task::Reference));
        assert_eq!(parsed("figures"), Ok(Task::Figures));
        assert_eq!(parsed("interop 7"), Ok(Task::Interop(vec!["7".to_string()])));
        let passed_on = ["--rxe", "2", "--", "true"].map(str::to_string).to_vec();
        assert_eq!(parsed("rig --rxe 2 -- true"), Ok(Task::Rig(passed_on)));
        assert_eq!(parsed("wheel"), Ok(Task::Wheel(None)));
        let arm = "aarch64-unknown-linux-gnu";
        assert_eq!(parsed(&format!("wheel --target {arm}")), Ok(Task::Wheel(Some(Target::Aarch64))));
        assert_eq!(parsed("python test_store"), Ok(Task::Python(vec!["test_store".to_string()])));
        assert_eq!(parsed("rig --help"), Ok(Task::Rig(vec!["--help".to_string()])));
    }

    #[test]
    fn unknown_words_are_named() {
        assert_eq!(parsed("").unwrap_err().to_string(), "no command given");
        assert_eq!(parsed("dmeo").unwrap_err().to_string(), "unknown command `dmeo`");
        for line in ["tidy --fix", "deny --fix", "ci lint", "setup gpu", "wheel --target arm", "wheel arm"] {
            let word = line.split_whitespace().last().unwrap();
            assert!(parsed(line).unwrap_err().to_string().contains(&format!("`{word}`")), "{line}");
        }
    }

    #[test]
    fn the_usage_names_every_step_group_and_peer() {
        for peer in Peer::ALL {
            assert!(USAGE.contains(peer.name()), "{}", peer.name());
        }
        for step in Step::ALL {
            assert!(USAGE.contains(step.name()), "{}", step.name());
        }
        for group in Group::ALL {
            assert!(USAGE.contains(group.name()), "{}", group.name());
        }
    }
}
