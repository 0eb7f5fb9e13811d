//! The machines that the hardware tests run in, and which tests each of them runs.

/// One start of the virtual machine.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it has, as options of the script.
    pub options: &'static [&'static str],
    /// What runs in it.
    pub jobs: &'static [Job],
    /// It may take this long: six times and more what it takes on a host of two cores with nothing else to do, which is
    /// three times what it takes beside builds. A program of it that takes two fifths of that is ended.
    pub limit_s: u32,
    /// Whether the short suite has it.
    pub short: bool,
}

/// One run of a test program.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// The package.
    pub package: &'static str,
    /// One test target of it, `lib`, or all of them.
    pub target: Option<&'static str>,
    /// Only tests with this in their name, or a flag of test programs, such as `--ignored`.
    pub filter: Option<&'static str>,
    /// Whether RDMA takes the place of TCP: `KVPLANE_TEST_TRANSPORT=rdma`. Fails where no packets of it were sent.
    pub over_rdma: bool,
}

/// Tests of one package.
pub const fn job(package: &'static str, target: Option<&'static str>, filter: Option<&'static str>) -> Job {
    Job { package, target, filter, over_rdma: false }
}

/// The same tests over RDMA.
const fn over_rdma(package: &'static str, target: &'static str, filter: Option<&'static str>) -> Job {
    Job { package, target: Some(target), filter, over_rdma: true }
}

/// All of them, in the order in which they run.
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
            // What it does with drives, `disks` does.
            job("kvplane-tools", Some("end_to_end"), Some("rig::shards_run")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::topology_draws")),
            job("kvplane-sys", Some("suite"), Some("verbs::")),
        ],
        limit_s: 600,
        short: true,
    },
    Machine {
        name: "disks",
        options: &["--nvme", "2:64", "--modprobe", "dm-flakey"],
        jobs: &[
            job("kvplane-transport", Some("lib"), Some("nvme")),
            job("kvplane-tools", Some("end_to_end"), Some("rig::objects_on_a_drive")),
            job("kvplane-tools", Some("end_to_end"), Some("ssd_faults::a_mapped_device")),
        ],
        limit_s: 600,
        short: true,
    },
    Machine {
        name: "nvme-tcp",
        options: &["--nvme", "1:64", "--nvmet", "tcp"],
        jobs: &[job("kvplane", Some("rig"), Some("drives::"))],
        limit_s: 240,
        short: true,
    },
    Machine {
        name: "nvme-rdma",
        options: &["--rxe", "2", "--nvme", "1:64", "--nvmet", "rdma"],
        jobs: &[job("kvplane", Some("rig"), Some("drives::"))],
        limit_s: 240,
        short: true,
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
    },
    Machine {
        name: "over-rdma",
        options: &["--rxe", "4", "--mem", "3072"],
        jobs: &[
            job("kvplane", Some("rig"), Some("--ignored")),
            over_rdma("kvplane-transfer", "suite", None),
            over_rdma("kvplane-engine", "suite", Some("roundtrip::")),
        ],
        limit_s: 1200,
        short: false,
    },
    Machine {
        name: "over-rdma-store",
        options: &["--rxe", "4", "--mem", "3072"],
        jobs: &[
            over_rdma("kvplane-tests", "public_api", None),
            over_rdma("kvplane-tools", "end_to_end", Some("replays::")),
            over_rdma("kvplane-tools", "end_to_end", Some("restarts::")),
            over_rdma("kvplane-tools", "end_to_end", Some("kills::")),
            over_rdma("kvplane-tools", "end_to_end", Some("ssd::")),
            over_rdma("kvplane-tools", "end_to_end", Some("shards_are_scraped")),
        ],
        limit_s: 1800,
        short: false,
    },
    Machine {
        name: "whole",
        options: &["--rxe", "2", "--hugepages", "64", "--mem", "3072"],
        jobs: &[
            job("kvplane-sys", None, None),
            job("kvplane-transport", None, None),
            job("kvplane-engine", None, None),
            job("kvplane-transfer", Some("suite"), None),
        ],
        limit_s: 1200,
        short: false,
    },
];
