//! Command line of `kvplane-bench stores`: that of `cargo x stores` after its installation.

use std::path::PathBuf;

use super::cells::parse_size;
use crate::Failure;

/// Options of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// Folder of the wheel, the result rows and the servers' logs.
    pub(crate) folder: PathBuf,
    /// Folder of the drivers.
    pub(crate) scripts: PathBuf,
    /// Sides to run; all if empty.
    pub(crate) only: Vec<String>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) batches: Vec<u64>,
    pub(crate) clients: Vec<u64>,
    pub(crate) rounds: usize,
    /// Seconds for each side, cell, operation and round.
    pub(crate) seconds: f64,
    /// Memory of each store; `None` derives it from the sizes.
    pub(crate) pool_bytes: Option<u64>,
    pub(crate) markdown: Option<PathBuf>,
}

impl Options {
    /// Returns the Python that has the wheel.
    pub(crate) fn python(&self) -> PathBuf {
        self.folder.join("mc/bin/python")
    }
}

const USAGE: &str = "\
    stores: our store beside those of others, same sizes, same run, in turns
  --folder DIR       where the wheel is installed, and the rows go (target/peers)
  --scripts DIR      the scripts that drive the others (benches/peers)
  --only NAMES       these sides alone, comma separated: \"ours tcp,redis\"
  --sizes LIST, --batches LIST, --clients LIST   what is measured
  --rounds N, --seconds S   how often, and how long each
  --pool SIZE        memory of each store;  --markdown FILE  the tables for docs/performance.md";

/// Parses the words. The error names the invalid word.
pub(crate) fn parse(words: &[String]) -> Result<Options, Failure> {
    let mut options = Options {
        folder: PathBuf::from("target/peers"),
        scripts: PathBuf::from("benches/peers"),
        only: Vec::new(),
        sizes: vec![4 << 10, 64 << 10, 1 << 20, 16 << 20],
        batches: vec![1, 16, 128],
        clients: vec![1, 4],
        rounds: 3,
        seconds: 0.3,
        pool_bytes: None,
        markdown: None,
    };
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if matches!(word, "--help" | "-h") {
            return Err(USAGE.into());
        }
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value),
            None => (word, words.next().ok_or_else(|| format!("{word} takes a value"))?),
        };
        let wrong = || format!("{name} {value:?} makes no sense");
        let numbers = || value.split(',').map(parse_size).collect::<Option<Vec<u64>>>().ok_or_else(wrong);
        match name {
            "--folder" => options.folder = value.into(),
            "--scripts" => options.scripts = value.into(),
            "--only" => options.only = value.split(',').map(str::to_owned).collect(),
            "--markdown" => options.markdown = Some(value.into()),
            "--sizes" => {
                options.sizes = numbers()?;
                if options.sizes.iter().any(|size| !size.is_power_of_two() || !(8..=64 << 20).contains(size)) {
                    return Err("--sizes takes powers of two from 8 to 64M".into());
                }
            }
            "--batches" => options.batches = numbers()?,
            "--clients" => options.clients = numbers()?,
            "--pool" => options.pool_bytes = Some(parse_size(value).ok_or_else(wrong)?),
            "--rounds" => options.rounds = value.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)?,
            "--seconds" => {
                options.seconds =
                    value.parse().ok().filter(|seconds| (0.02..=60.0).contains(seconds)).ok_or_else(wrong)?;
            }
            _ => return Err(format!("unknown flag {name}").into()),
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_parsed_and_invalid_ones_are_named() {
        let parsed = |line: &str| parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let options = parsed("--sizes 4K,1M --clients=2 --rounds 5").unwrap();
        assert_eq!((options.sizes, options.clients, options.rounds), (vec![4096, 1 << 20], vec![2], 5));
        for (line, word) in [("--fast 1", "--fast"), ("--sizes 5K", "powers"), ("--rounds 0", "--rounds")] {
            assert!(parsed(line).unwrap_err().to_string().contains(word), "{line}");
        }
    }
}
