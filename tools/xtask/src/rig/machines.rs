//! Virtual machines of the hardware tests, with the tests that run in each.

/// Virtual machine, started once.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Name on the command line.
    pub name: &'static str,
    /// Hardware of the machine, as options of the script.
    pub options: &'static [&'static str],
    /// Tests that run in the machine.
    pub jobs: &'static [Job],
    /// Time limit in seconds: at least six times the time on an idle host of two cores, which is three times the time
    /// beside builds. A program that takes two fifths of it is ended.
    pub limit_s: u32,
    /// Part of the short suite.
    pub short: bool,
    /// Tests of a program run one after the other: each starts processes, whose deadlines are those of a real machine.
    pub alone: bool,
}

/// Run of a test program.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Package of the tests.
    pub package: &'static str,
    /// Test target of the package, `lib`, or `None` for all targets.
    pub target: Option<&'static str>,
    /// Filter on the tests' names, or a flag of test programs, such as `--ignored`.
    pub filter: Option<&'static str>,
    /// RDMA replaces TCP: `KVPLANE_TEST_TRANSPORT=rdma`. The run fails if no RDMA packets were sent.
    pub over_rdma: bool,
    /// Each test has a process of its own, as those need that count what fake drivers of devices hold in their process,
    /// or lose a device for good.
    pub apart: bool,
}

/// Creates the job of a package's tests.
pub const fn job(package: &'static str, target: Option<&'static str>, filter: Option<&'static str>) -> Job {
    Job { package, target, filter, over_rdma: false, apart: false }
}

/// Creates the job of the same tests over RDMA.
const fn over_rdma(package: &'static str, target: &'static str, filter: Option<&'static str>) -> Job {
    Job { package, target: Some(target), filter, over_rdma: true, apart: false }
}

/// Creates the same job with a process for each test.
const fn apart(job: Job) -> Job {
    Job { apart: true, ..job }
}

/// All machines, in the order in which they run.
pub const ALL: [Machine; 8] = [
    Machine {
        name: "hardware",
        options: &[
            "--cpus",
            "4",
            "--numa",
            "2",
            "--mem",
            "2560",
            "--rxe",
            "4",
            "--nvme",
            "2:64",
            "--cxl",
            "256",
            "--hugepages",
            "32",
        ],
        jobs: &[
            job("kvplane", Some("rig"), None),
            // The tests of drives run in `disks`.
            job("kvplane-tools", Some("end_to_end"), Some("rig::shards_run")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::topology_draws")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::cxl_memory")),
            job("kvplane-sys", Some("suite"), Some("verbs::")),
        ],
        limit_s: 600,
        short: true,
        alone: false,
    },
    Machine {
        name: "disks",
        options: &["--nvme", "2:64", "--modprobe", "dm-flakey"],
        jobs: &[
            job("kvplane-transport", Some("lib"), Some("nvme")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::objects_on_a_drive")),
            job("kvplane-tools", Some("end_to_end"), Some("ssd::faults::a_mapped_device")),
        ],
        limit_s: 600,
        short: true,
        alone: false,
    },
    Machine {
        name: "nvme-tcp",
        options: &["--nvme", "1:64", "--nvmet", "tcp"],
        jobs: &[job("kvplane", Some("rig"), Some("drives::"))],
        limit_s: 240,
        short: true,
        alone: false,
    },
    Machine {
        name: "nvme-rdma",
        options: &["--rxe", "2", "--nvme", "1:64", "--nvmet", "rdma"],
        jobs: &[job("kvplane", Some("rig"), Some("drives::"))],
        limit_s: 240,
        short: true,
        alone: false,
    },
    Machine {
        name: "pci-nics",
        options: &["--cpus", "4", "--numa", "2", "--rxe", "4", "--nic", "igb", "--nvme", "2:64", "--hmat"],
        jobs: &[
            job("kvplane", Some("rig"), Some("near::")),
            job("kvplane", Some("rig"), Some("memory::")),
            job("kvplane", Some("rig"), Some("drives::")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::")),
            job("kvplane-topology", None, None),
        ],
        limit_s: 900,
        short: false,
        alone: false,
    },
    Machine {
        name: "over-rdma",
        options: &["--rxe", "4", "--mem", "3072"],
        jobs: &[
            job("kvplane", Some("rig"), Some("--ignored")),
            apart(over_rdma("kvplane-transfer", "suite", None)),
            over_rdma("kvplane-engine", "suite", Some("roundtrip::")),
        ],
        limit_s: 1800,
        short: false,
        alone: false,
    },
    Machine {
        name: "over-rdma-store",
        options: &["--rxe", "4", "--mem", "3072"],
        jobs: &[
            over_rdma("kvplane-tests", "public_api", None),
            over_rdma("kvplane-tools", "end_to_end", Some("replays::")),
            over_rdma("kvplane-tools", "end_to_end", Some("restarts::")),
            over_rdma("kvplane-tools", "end_to_end", Some("kills::")),
            over_rdma("kvplane-tools", "end_to_end", Some("ssd::objects::")),
            over_rdma("kvplane-tools", "end_to_end", Some("shards_export_metrics")),
            over_rdma("kvplane-tools", "end_to_end", Some("failover::replicas::")),
            over_rdma("kvplane-tools", "end_to_end", Some("moves::")),
            over_rdma("kvplane-tools", "end_to_end", Some("put_sessions::")),
            over_rdma("kvplane-tools", "end_to_end", Some("stripes::")),
            over_rdma("kvplane-tools", "end_to_end", Some("places::")),
            over_rdma("kvplane-tools", "end_to_end", Some("tenants::")),
        ],
        limit_s: 3600,
        short: false,
        alone: true,
    },
    Machine {
        name: "whole",
        options: &["--rxe", "2", "--hugepages", "64", "--mem", "3072"],
        jobs: &[
            apart(job("kvplane-sys", None, None)),
            job("kvplane-transport", None, None),
            job("kvplane-engine", None, None),
            apart(job("kvplane-transfer", Some("suite"), None)),
        ],
        limit_s: 3600,
        short: false,
        alone: false,
    },
];
