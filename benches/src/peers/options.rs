//! Command line of `kvplane-bench peers`: that of `cargo x peers` after its installation.

use std::path::PathBuf;

use super::cells::{SCATTER, parse_size};
use crate::Failure;

/// Options of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// Folder of the installed peers and of the result rows.
    pub(crate) folder: PathBuf,
    /// Folder of the peers' drivers.
    pub(crate) scripts: PathBuf,
    pub(crate) quick: bool,
    /// Peers to run; all if empty.
    pub(crate) only: Vec<String>,
    /// Sides of kvplane to run, as `tcp`, `tcp-parked`, `shm`; all if empty.
    pub(crate) ours: Vec<String>,
    pub(crate) sizes: Vec<u64>,
    batches: Vec<u64>,
    pub(crate) rounds: usize,
    /// Seconds for each side, cell and round.
    pub(crate) seconds: f64,
    /// Number of retries of a figure with foreign load beside it; the quietest is kept.
    pub(crate) retries: usize,
    pub(crate) markdown: Option<PathBuf>,
}

impl Options {
    /// Returns the batches of one block size: the scatter case belongs to one of them.
    pub(crate) fn batches_of(&self, block_bytes: u64) -> Vec<u64> {
        let scatter = (block_bytes == SCATTER.0 && self.batches.len() > 1).then_some(SCATTER.1);
        self.batches.iter().copied().chain(scatter).collect()
    }
}

const USAGE: &str = "\
    peers: our transfer engine beside those of others, same sizes, same run, in turns
  --folder DIR       where the peers are installed, and the rows go (target/peers)
  --scripts DIR      the scripts that drive them (benches/peers)
  --only NAMES       these sides alone, comma separated;  --ours NAMES  these ways of ours alone
  --sizes LIST       block sizes;  --batches LIST  batches
  --rounds N, --seconds S, --retries N   how often, how long, and how often noisy figures are taken again
  --quick            fewer sizes, shorter;  --markdown FILE  the tables for docs/performance.md";

/// Parses the words. The error names the invalid word.
pub(crate) fn parse(words: &[String]) -> Result<Options, Failure> {
    let mut options = Options {
        folder: PathBuf::from("target/peers"),
        scripts: PathBuf::from("benches/peers"),
        quick: words.iter().any(|word| word == "--quick"),
        only: Vec::new(),
        ours: Vec::new(),
        sizes: Vec::new(),
        batches: vec![1, 16, 128],
        rounds: 0,
        seconds: 0.0,
        retries: 0,
        markdown: None,
    };
    let mut words = words.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "--quick" => continue,
            "--help" | "-h" => return Err(USAGE.into()),
            _ => {}
        }
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, value),
            None => (word, words.next().ok_or_else(|| format!("{word} takes a value"))?),
        };
        let wrong = || format!("{name} {value:?} makes no sense");
        let list = || value.split(',').map(str::to_owned).collect();
        match name {
            "--folder" => options.folder = value.into(),
            "--scripts" => options.scripts = value.into(),
            "--only" => options.only = list(),
            "--ours" => options.ours = list(),
            "--markdown" => options.markdown = Some(value.into()),
            "--sizes" => options.sizes = value.split(',').map(parse_size).collect::<Option<_>>().ok_or_else(wrong)?,
            "--batches" => {
                options.batches = value.split(',').map(parse_size).collect::<Option<_>>().ok_or_else(wrong)?;
            }
            "--retries" => options.retries = value.parse().ok().filter(|count| *count <= 100).ok_or_else(wrong)?,
            "--rounds" => options.rounds = value.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)?,
            "--seconds" => {
                options.seconds =
                    value.parse().ok().filter(|seconds| (0.02..=60.0).contains(seconds)).ok_or_else(wrong)?;
            }
            _ => return Err(format!("unknown flag {name}").into()),
        }
    }
    if options.rounds == 0 {
        options.rounds = if options.quick { 2 } else { 3 };
    }
    if options.seconds == 0.0 {
        options.seconds = if options.quick { 0.2 } else { 0.4 };
    }
    if options.sizes.is_empty() {
        let sizes: &[u64] = if options.quick { &[12, 16, 20, 24] } else { &[12, 16, 20, 24, 26] };
        options.sizes = sizes.iter().map(|shift| 1 << shift).collect();
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, Failure> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn words_are_taken_in_both_forms() {
        let options = parsed("--quick --only=mooncake,ucx --sizes 4K,1M --batches=1,16 --rounds 5").unwrap();
        assert_eq!((options.only.len(), options.rounds, options.quick), (2, 5, true));
        assert_eq!(options.batches_of(4096), [1, 16, 1024]);
        assert_eq!(options.batches_of(1 << 20), [1, 16]);
        assert_eq!(parsed("").unwrap().sizes.last(), Some(&(64 << 20)));
    }

    #[test]
    fn invalid_words_are_named() {
        for (line, word) in [("--fast", "--fast"), ("--sizes 4Q", "4Q"), ("--rounds 0", "0"), ("--fast 1", "--fast")] {
            assert!(parsed(line).unwrap_err().to_string().contains(word), "{line}");
        }
    }
}
