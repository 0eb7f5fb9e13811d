//! Tests of Mooncake's tools by their names and flags, of its protocol with kvplane's engine, and of forced transports.

use std::process::Command;

use serde_json::Value;

use crate::support::{Outcome, Process, Workplace, finish, text};
use crate::transfers::measurements::{measured, target, tebench};

/// Three blocks of an odd size at an odd offset.
const ODD: [&str; 5] = [
    "--target_offset=777",
    "--start_block_size=12345",
    "--max_block_size=12345",
    "--start_batch_size=3",
    "--max_batch_size=3",
];

#[test]
fn either_protocol_finds_what_the_other_wrote() {
    let place = Workplace::new("protocols");
    let (_target, address) = target(&place);
    let (ours, theirs) = (["--backend=tent", "--xport_type=tcp"], ["--backend=mooncake", "--xport_type=tcp"]);
    for (writer, reader) in [(ours, theirs), (theirs, ours)] {
        // Each protocol finds the bytes of the other, not its own.
        for (backend, work) in
            [(reader, "--check_consistency"), (writer, "--op_type=write_seed"), (reader, "--op_type=read_verify")]
        {
            let json = measured(&place, &address, &[&ODD[..], &backend, &[work]].concat());
            let transport = if backend == theirs { "mooncake" } else { "tcp" };
            assert_eq!(json["transports"][0]["transport"], transport, "{json}");
            assert!(json["cases"][0]["batches"].as_u64() > Some(0), "{json}");
        }
    }
    let spoiled = measured(&place, &address, &[&ODD[..], &theirs, &["--check_consistency"]].concat());
    assert_eq!(spoiled["transports"].as_array().map(Vec::len), Some(1), "{spoiled}");
    let wrong = tebench(&place, &address, &[&ODD[..], &theirs, &["--op_type=read_verify"]].concat());
    // The corrupting bytes are random: the first of them may be right by chance, a whole run of them may not.
    wrong.failed(1, &["inconsistent data detected in round 1: byte "]);
    let place = wrong.stderr.split("byte ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    assert!(place.is_some_and(|byte| (777..777 + 16).contains(&byte)), "{}", wrong.stderr);
}

#[test]
fn a_requested_transport_is_used() {
    let place = Workplace::new("ways");
    let (_target, address) = target(&place);
    let seed = ["--op_type=write_seed"];
    let own = measured(&place, "local", &[&seed[..], &["--xport_type=local"]].concat());
    assert_eq!(own["transports"][0]["transport"], "local", "{own}");
    assert_eq!(own["transports"].as_array().map(Vec::len), Some(1), "{own}");
    assert!(own["transports"][0]["p50_us"].as_f64() > Some(0.0), "{own}");
    for api in ["--api=session", "--api=engine"] {
        let json = measured(&place, &address, &[api, "--tent_transport_hint=shm", "--op_type=read_verify"]);
        assert_eq!(json["transports"][0]["transport"], "shm", "{json}");
    }
    let outcome = tebench(&place, &address, &["--xport_type=cma", "--op_type=read_verify", "--json=-"]);
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if !outcome.status.success() && !["", "0"].contains(&scope.trim()) {
        println!("skipped: tebench over cma: ptrace_scope is {}: {}", scope.trim(), outcome.stderr);
        return;
    }
    let json: Value = serde_json::from_str(&outcome.text()).unwrap();
    assert_eq!(json["transports"][0]["transport"], "cma", "{json}");
    assert_eq!(json["transports"].as_array().map(Vec::len), Some(1), "{json}");
}

#[test]
fn types_of_memory_are_buffers_that_threads_use_in_turn() {
    let place = Workplace::new("kinds");
    let target = Process::start(place.bare(&["tebench", "--total_buffer_size=1M", "--seg_type_mix=dram,DRAM"]));
    let address = target.address("--target_seg_name=").to_string();
    let threads = ["--start_num_threads=2", "--max_num_threads=2"];
    let seed = ["--op_type=read_verify", "--backend=mooncake"];
    let json = measured(&place, &address, &[&threads[..], &seed].concat());
    assert!(json["cases"][0]["batches"].as_u64() > Some(1), "{json}");
}

#[test]
fn memory_of_gpus_is_measured_and_every_byte_verified() {
    let place = Workplace::new("vram");
    let drivers = kvplane_fake_devices::directory().unwrap();
    let tebench = |arguments: &[&str]| {
        let mut command = place.bare(&[&["tebench", "--total_buffer_size=1M"], arguments].concat());
        command.env("LD_LIBRARY_PATH", &drivers);
        command
    };
    let target = Process::start(tebench(&["--seg_type=VRAM", "--local_gpu_id=-1"]));
    let address = target.address("--target_seg_name=").to_string();
    let run = |target: &str, more: &[&str]| {
        let flags = ["--target_seg_name", target, "--duration=0.2", "--warm_up=0.05", "--json=-"];
        let sizes = ["--start_block_size=4096", "--max_block_size=65536", "--start_batch_size=3", "--max_batch_size=3"];
        finish(tebench(&[&flags, &sizes[..], more].concat()), &[])
    };
    for more in [
        &["--seg_type=VRAM", "--check_consistency", "--start_num_threads=3", "--max_num_threads=3"][..],
        &["--seg_type=VRAM", "--local_gpu_id=1", "--op_type=write_seed"],
        &["--seg_type_mix=dram,vram", "--target_gpu_id=-1", "--op_type=write_seed", "--max_num_threads=4"],
        &["--op_type=read_verify"],
        &["--seg_type=VRAM", "--local_gpu_id=-1", "--target_gpu_id=-1", "--op_type=read_verify", "--max_num_threads=2"],
    ] {
        let json: Value = serde_json::from_str(&run(&address, more).text()).unwrap();
        assert!(json["cases"][0]["batches"].as_u64() > Some(0), "{more:?}: {json}");
    }
    let own = ["--seg_type=VRAM", "--local_gpu_id=-1", "--target_gpu_id=1", "--check_consistency"];
    let json: Value = serde_json::from_str(&run("local", &own).text()).unwrap();
    assert!(json["cases"][0]["batches"].as_u64() > Some(0), "{json}");
    for target in ["local", &address] {
        run(target, &["--target_gpu_id=2"]).failed(1, &["no memory on GPU 2", "--target_gpu_id"]);
    }
    run(&address, &["--seg_type=VRAM", "--local_gpu_id=5"]).failed(1, &["GPU 5 is not available: 2 are visible"]);
    run(&address, &["--seg_type=VRAM", "--api=session"]).failed(1, &["--api session", "DRAM"]);
    run("file:///dev/null", &["--seg_type=VRAM"]).failed(1, &["memory of a GPU", "file:///path"]);
    let none = finish(place.bare(&["tebench", "--seg_type=VRAM", "--target_seg_name=local"]), &[]);
    none.failed(1, &["VRAM is not available", "libcuda.so.1", "use DRAM"]);
}

#[test]
fn segments_are_found_in_a_metadata_store() {
    let place = Workplace::new("metadata");
    let dev = place.dev("8M", &["--shards", "1", "--mooncake-metadata"]);
    let store = format!("http://{}/metadata", dev.http());
    let store = ["--metadata_type=http", "--metadata_url_list", store.as_str()];
    let serve = [&["tebench", "--total_buffer_size=4M", "--seg_name=kv-1"], &store[..]].concat();
    let mut target = Process::start(place.bare(&serve));
    target.wait_for("--target_seg_name=kv-1 ");
    for backend in ["--backend=kvplane", "--backend=mooncake"] {
        let json = measured(&place, "kv-1", &[&store[..], &[backend, "--op_type=read_verify"]].concat());
        assert!(json["cases"][0]["batches"].as_u64() > Some(0), "{json}");
    }
    tebench(&place, "kv-2", &store).failed(1, &["kv-2"]);
    // A living engine keeps its name, and is found after another has tried to take it; a dead one's name is free.
    finish(place.bare(&serve), &[]).failed(1, &["kv-1", "living engine at 127.0.0.1:"]);
    measured(&place, "kv-1", &store);
    target.kill();
    let mut next = Process::start(place.bare(&serve));
    next.wait_for("--target_seg_name=kv-1 ");
    measured(&place, "kv-1", &store);
    assert!(next.stop().success());
    tebench(&place, "kv-1", &store).failed(1, &["kv-1"]);
}

/// Returns the binary under another name.
fn named(place: &Workplace, name: &str, arguments: &[&str]) -> Command {
    let path = place.path(name);
    if !path.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvplane"), &path).unwrap();
    }
    let mut command = Command::new(path);
    command.args(arguments).env("XDG_RUNTIME_DIR", &place.directory);
    command
}

#[test]
fn the_binary_is_the_tool_whose_name_it_has() {
    let place = Workplace::new("names");
    let target = Process::start(named(&place, "transfer_engine_bench", &["-mode=target", "--buffer_size", "4M"]));
    let address = target.address("-segment_id=").to_string();
    let run = |arguments: &[&str]| -> Outcome {
        let flags = ["-segment_id", &address, "-buffer_size=4M", "-duration=0.3", "-block_size=4096", "-batch_size=8"];
        finish(named(&place, "transfer_engine_bench", &[&flags[..], arguments].concat()), &[])
    };
    for more in
        [&["-operation=write", "-noinit_mem", "-backend=mooncake"][..], &["--protocol", "tcp", "-backend=classic"]]
    {
        let said = run(&[&["-threads=2", "-report_unit=MiB", "-report_precision", "4"], more].concat()).text();
        let mut lines: Vec<&str> = said.lines().collect();
        let last = lines.pop().unwrap();
        lines.sort_unstable();
        assert_eq!(lines, ["Worker 0 stopped!", "Worker 1 stopped!"], "{said}");
        let (head, rate) = last.split_once(", throughput ").unwrap();
        assert!(head.starts_with("Test completed: duration 0.") && head.contains(", batch count "), "{last}");
        let number = rate.strip_suffix(" MiB/s").unwrap();
        assert!(number.split_once('.').unwrap().1.len() == 4 && number.parse::<f64>().unwrap() > 0.0, "{last}");
    }
    run(&["-threads=2", "-block_size=1M"]).failed(1, &["2 threads with 8 blocks of 1048576 bytes", "4194304"]);
    // A target beyond loopback needs the flag; an initiator is known by an address and opens no port.
    let open = ["-mode=target", "-buffer_size=1M", "-local_server_name=192.0.2.7:0"];
    finish(named(&place, "transfer_engine_bench", &open), &[]).failed(1, &["192.0.2.7", "--open_to_network"]);
    run(&["-threads=1", "-local_server_name=192.0.2.7"]).well();
    run(&["-use_vram"]).failed(1, &["--use_vram", "GPU memory"]);
    run(&["-protocol=efa"]).failed(2, &["efa is not available"]);
    run(&["-report_unit=TB"]).failed(2, &["\"TB\" is not one of GB"]);
    finish(named(&place, "transfer_engine_bench", &[]), &[]).failed(1, &["--segment_id is missing"]);

    let arguments = [&format!("-target_seg_name={address}"), "-total_buffer_size=1M", "-duration=0.1", "-warm_up=0"];
    let sizes = ["-start_block_size=4096", "-max_block_size=4096", "-nocheck_consistency", "-local_gpu_id=-1"];
    let said = finish(named(&place, "tebench", &[&arguments[..], &sizes].concat()), &[]).text();
    assert!(said.starts_with("BlkSize (B)   Batch") && text(&place.path("tebench")).ends_with("tebench"), "{said}");
}

#[test]
fn the_tool_is_known_through_any_link_and_by_its_own_file() {
    let place = Workplace::new("links");
    let there = |name: &str| place.path(name);
    std::fs::create_dir(there("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvplane"), there("bin/tebench")).unwrap();
    std::os::unix::fs::symlink("bin/tebench", there("measure")).unwrap();
    std::fs::hard_link(env!("CARGO_BIN_EXE_kvplane"), there("tebench"))
        .or_else(|_| std::fs::copy(env!("CARGO_BIN_EXE_kvplane"), there("tebench")).map(|_| ()))
        .unwrap();
    std::os::unix::fs::symlink("tebench", there("copied")).unwrap();
    let usage = |program: &str, path: Option<std::path::PathBuf>| {
        let mut command = Command::new(program);
        command.current_dir(&place.directory).args(["-op_type=erase"]);
        path.into_iter().for_each(|path| _ = command.env("PATH", path));
        finish(command, &[])
    };
    for program in ["./tebench", "./bin/tebench", "bin/tebench", "./measure", "./copied"] {
        usage(program, None).failed(2, &["erase", "--op_type"]);
    }
    usage("tebench", Some(there("bin"))).failed(2, &["erase", "--op_type"]);
    // The help shows commands that can be typed, whatever the binary's name.
    let mut help = Command::new(there("measure"));
    help.arg("--help");
    assert!(finish(help, &[]).text().contains("Usage: kvplane tebench [OPTIONS]"));
}

#[test]
fn a_run_without_figures_shows_no_table_and_does_not_pass() {
    let place = Workplace::new("figures");
    let nobody = tebench(&place, "127.0.0.1:1", &[]);
    nobody.failed(1, &["127.0.0.1:1"]);
    assert_eq!(String::from_utf8(nobody.stdout).unwrap(), "");
    let json = place.path("none.json");
    let sizes = ["--total_buffer_size=1M", "--start_block_size=2M", "--max_block_size=4M"];
    let (address, output) = ("--target_seg_name=127.0.0.1:1", format!("--json={}", text(&json)));
    let skipped = finish(place.bare(&[&["tebench", address, &output], &sizes[..]].concat()), &[]);
    assert_eq!((skipped.status.code(), skipped.stdout.len(), json.exists()), (Some(3), 0, false), "{}", skipped.stderr);
    let lines: Vec<&str> = skipped.stderr.lines().collect();
    assert!(lines.len() == 3 && lines[0].contains("block 2097152 B") && lines[1].contains("skipped"), "{lines:?}");
    assert!(lines[2].contains("all 2 cases were skipped") && lines[2].contains("--total_buffer_size"), "{lines:?}");
}

#[test]
fn a_target_whose_output_is_no_terminal_writes_no_escapes() {
    let place = Workplace::new("escapes");
    let target = Process::start(place.bare(&["tebench", "--total_buffer_size=1M"]));
    target.wait_for("Press Ctrl-C to terminate");
    let said = target.said().concat();
    assert!(said.contains("To start initiators, run") && !said.contains('\x1b'), "{said:?}");
}
