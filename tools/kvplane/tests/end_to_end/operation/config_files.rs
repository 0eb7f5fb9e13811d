//! Tests of settings in files: they act like flags, and errors name their line.

use crate::support::{Process, Workplace, finish};

/// Runs `kvplane dev` with this file and these arguments, which must not start.
fn refused(content: &str, more: &[&str], words: &[&str]) {
    let place = Workplace::new("refused");
    let file = place.file("settings.toml", content.as_bytes());
    let arguments = [&["dev", "--config", file.to_str().unwrap()], more].concat();
    finish(place.command(&arguments), &[]).failed(2, words);
}

#[test]
fn a_file_sets_flags_and_the_command_line_overrides_it() {
    let place = Workplace::new("by-file");
    let file = place.file(
        "settings.toml",
        br#"
            # Numbers, texts, lists and tables of commands.
            shards = 2
            pool = "24M"
            http = "127.0.0.1:0"
            strict-tenants = true
            [dev]
            node-id = 5
            [node]
            pool = "1T"
            no-such-setting-of-another-command = 1
            [control]
        "#,
    );
    let config = ["--config", file.to_str().unwrap()];
    let dev = Process::start(place.command(&[&["dev"], &config[..]].concat()));
    dev.wait_for("ready:");
    dev.wait_for("node 5 with 24");
    let status = place.run(&["ctl", "shards"]).text();
    assert!(status.contains("shard 1") || status.lines().filter(|line| line.contains(" 5 ")).count() > 0, "{status}");
    let no_tenant = place.run(&["ctl", "--tenant", "nobody", "put", "a", file.to_str().unwrap()]);
    assert!(!no_tenant.status.success(), "only tenants that were set may put: {no_tenant:?}");
    drop(dev);
    let dev = Process::start(place.command(&[&["dev", "--node-id=6", "--pool", "16M"], &config[..]].concat()));
    dev.wait_for("ready:");
    dev.wait_for("node 6 with 16");
}

#[test]
fn errors_in_a_file_name_the_line() {
    refused(
        "\n\npol = \"1G\"\n",
        &[],
        &["settings.toml:3:", "\"pol\" is not a setting of kvplane dev", "did you mean \"pool\"?"],
    );
    refused("node_id = 1", &[], &["settings.toml:1:", "did you mean \"node-id\"?"]);
    refused("config = \"x\"", &[], &["settings.toml:1:", "not a setting"]);
    refused("zzz = 1", &[], &["settings.toml:1:", "--help lists"]);
    refused("[dev]\nsharts = 1", &[], &["settings.toml:2:", "did you mean \"shards\"?"]);
    refused("[nodes]\nshards = 1", &[], &["settings.toml:1:", "not a command that takes settings"]);
    refused("shards = true", &[], &["settings.toml:1:", "shards has to be a text or a number"]);
    refused("strict-tenants = 1", &[], &["settings.toml:1:", "strict-tenants has to be true or false"]);
    refused("a = 1\nshards 2", &[], &["settings.toml:2:"]);
    refused("pool = \"1G\"\nshards = 0\n", &[], &["settings.toml:2: invalid setting", "--shards"]);
    // The flag overrides the file's value, so the error must not name the file.
    refused("shards = 3", &["--shards", "x"], &["invalid value 'x'"]);
    let place = Workplace::new("none");
    finish(place.command(&["dev", "--config", "/nonexistent.toml"]), &[]).failed(2, &["/nonexistent.toml", "read"]);
}
