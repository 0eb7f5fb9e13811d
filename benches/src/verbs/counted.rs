//! Instructions and cache misses of a slice, counted by cachegrind.

use std::env;
use std::io::ErrorKind;
use std::process::Command;

use crate::Failure;

/// First word of the role of the counted process.
pub(crate) const ROLE: &str = "verbs-slices";
/// Totals that cachegrind counted of one run.
struct Totals {
    instructions: u64,
    data_accesses: u64,
    data_misses: u64,
}

/// Counts a run of this number of slices and one of twice as many, and prints the difference per slice.
pub(super) fn show(way: &str, slices: u64, wanted: &str) -> Result<(), Failure> {
    let (Some(short), Some(long)) = (totals(way, slices)?, totals(way, 2 * slices)?) else {
        println!("  {:44} skipped: valgrind is not installed", "instructions");
        return Ok(());
    };
    let each = |long: u64, short: u64| long.saturating_sub(short) as f64 / slices as f64;
    let instructions = each(long.instructions, short.instructions);
    println!("  {:44} {instructions:9.1} a slice  {wanted}", "instructions, from submit to completion");
    let accesses = each(long.data_accesses, short.data_accesses);
    println!("  {:44} {accesses:9.1} a slice", "loads and stores");
    let misses = each(long.data_misses, short.data_misses);
    println!("  {:44} {misses:9.2} a slice  (of a simulated first-level cache)", "cache lines fetched");
    println!("  {:44} totals of {slices} and {} slices under cachegrind, subtracted", "", 2 * slices);
    Ok(())
}

/// Runs this program under cachegrind; `None` without valgrind.
fn totals(way: &str, slices: u64) -> Result<Option<Totals>, Failure> {
    let output = Command::new("valgrind")
        .args(["--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null"])
        .arg(env::current_exe()?)
        .args([ROLE, way, &slices.to_string()])
        .output();
    let output = match output {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        output => output?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("valgrind ended with {}: {said}", output.status).into());
    }
    let (instructions, data_accesses) = (counted(&said, "I", "refs:"), counted(&said, "D", "refs:"));
    match (instructions, data_accesses, counted(&said, "D1", "misses:")) {
        (Some(instructions), Some(data_accesses), Some(data_misses)) => {
            Ok(Some(Totals { instructions, data_accesses, data_misses }))
        }
        _ => Err(format!("no totals in what valgrind says: {said}").into()),
    }
}

/// Parses the first number of a line such as `==7== D1  misses:   1,234  (...)`.
fn counted(said: &str, cache: &str, what: &str) -> Option<u64> {
    said.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        (words.next() == Some(cache) && words.next() == Some(what))
            .then(|| words.next()?.replace(',', "").parse().ok())
            .flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn totals_are_parsed() {
        let said = "==7== I   refs:      1,299,440\n==7== I1  misses:        2,330\n\
            ==7== D   refs:        399,014  (299,332 rd + 99,682 wr)\n==7== D1  misses:       10,205  (7 rd + 8 wr)\n";
        assert_eq!(counted(said, "I", "refs:"), Some(1_299_440));
        assert_eq!(counted(said, "D", "refs:"), Some(399_014));
        assert_eq!(counted(said, "D1", "misses:"), Some(10_205));
        assert_eq!(counted(said, "LL", "refs:"), None);
    }
}
