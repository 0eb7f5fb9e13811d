//! The files in docs/deploy say what the program understands.

use crate::support::{Workplace, finish};

const FILES: [(&str, &str); 3] = [
    ("kvplane-control.service", include_str!("../../../../docs/deploy/kvplane-control.service")),
    ("kvplane-node.service", include_str!("../../../../docs/deploy/kvplane-node.service")),
    ("Containerfile", include_str!("../../../../docs/deploy/Containerfile")),
];

/// The command lines in a file: from a subcommand to the end of its line, which a backslash continues.
fn commands(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n#", " ").replace("\\\n", " ");
    let of = |line: &str| {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let at = words.iter().position(|word| word == "control" || word == "node")?;
        let runs = line.contains("ExecStart=") || line.contains("podman run");
        runs.then(|| words[at..].to_vec())
    };
    joined.lines().filter_map(of).collect()
}

#[test]
fn every_flag_in_the_files_exists() {
    let place = Workplace::new("deploy");
    let mut checked = 0;
    for (name, text) in FILES {
        for command in commands(text) {
            let help = finish(place.bare(&[&command[0], "--help"]), &[]).text();
            for flag in command.iter().filter(|word| word.starts_with("--")) {
                let known = help.split_whitespace().any(|word| word.trim_end_matches(',') == flag);
                assert!(known, "{name}: kvplane {} has no {flag}", command[0]);
                checked += 1;
            }
        }
    }
    assert!(checked > 20, "only {checked} flags were found");
}
