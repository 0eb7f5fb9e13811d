//! Plain transfers of files, as `s5cmd` makes them: several workers, each with several transfers in flight, over the
//! client of the store that the tier uses, and nothing else.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvplane::StorePlace;
use kvplane_objects::{Deadlines, StoreDriver};
use kvplane_shared::port::{Store, StorePort};
use kvplane_shared::{GetRange, OpId, Operation, Outcome};

use crate::Failure;
use crate::bed::CLUSTER;

/// Workers, each with a thread, and the most transfers in flight of each.
const WORKERS: usize = 4;
const IN_FLIGHT: usize = 4;
/// Above the deadlines of the driver.
const PATIENCE: Duration = Duration::from_secs(120);

/// File of the store, with its bytes.
type File = (String, Arc<Vec<u8>>);

/// Workers on a store.
pub(crate) struct Plain {
    ports: Vec<Box<dyn StorePort>>,
    woken: Receiver<()>,
}

impl Plain {
    /// Opens the store of the bed's cluster.
    pub(crate) fn open(place: &StorePlace) -> Result<Self, Failure> {
        let (wake, woken) = channel();
        let mut ports = Vec::new();
        for _ in 0..WORKERS {
            let wake = wake.clone();
            let driver = StoreDriver::open(place, CLUSTER, Deadlines::default())?;
            ports.push(driver.open(Box::new(move || {
                // The measurement may be over.
                let _ = wake.send(());
            })));
        }
        Ok(Self { ports, woken })
    }

    /// Returns the names of the packs in the store.
    pub(crate) fn packs(&mut self) -> Result<BTreeSet<String>, Failure> {
        let names = self.names()?.into_iter();
        Ok(names.filter(|name| name.rsplit('/').next().is_some_and(|last| last.starts_with("pack-"))).collect())
    }

    /// Reads files; returns GB/s.
    pub(crate) fn read(&mut self, names: &[String]) -> Result<f64, Failure> {
        let start = Instant::now();
        let files = self.fetch(names)?;
        Ok(rate(&files, start))
    }

    /// Writes the bytes of these files under other names; returns GB/s. The copies are removed again.
    pub(crate) fn write(&mut self, names: &[String]) -> Result<f64, Failure> {
        let copies: Vec<File> =
            self.fetch(names)?.into_iter().map(|(name, bytes)| (format!("copy/{name}"), bytes)).collect();
        let put = |(name, bytes): &File| Operation::Put { name: name.clone(), bytes: Arc::clone(bytes) };
        let start = Instant::now();
        self.run(copies.iter().map(put).collect())?;
        let rate = rate(&copies, start);
        self.run(copies.into_iter().map(|(name, _)| Operation::Delete { name }).collect())?;
        Ok(rate)
    }

    /// Removes everything.
    pub(crate) fn remove_all(&mut self) -> Result<(), Failure> {
        let names = self.names()?;
        self.run(names.into_iter().map(|name| Operation::Delete { name }).collect()).map(drop)
    }

    fn names(&mut self) -> Result<Vec<String>, Failure> {
        match self.run(vec![Operation::List { prefix: String::new() }])?.pop() {
            Some(Outcome::Listed(listed)) => Ok(listed.into_iter().map(|one| one.name).collect()),
            other => Err(format!("a list is due, not {other:?}").into()),
        }
    }

    fn fetch(&mut self, names: &[String]) -> Result<Vec<File>, Failure> {
        let get = |name: &String| Operation::Get { name: name.clone(), range: GetRange::Whole };
        let outcomes = self.run(names.iter().map(get).collect())?;
        let file = |(name, outcome): (&String, Outcome)| -> Result<File, Failure> {
            match outcome {
                Outcome::Bytes { bytes, .. } => Ok((name.clone(), Arc::new(bytes))),
                other => Err(format!("bytes are due, not {other:?}").into()),
            }
        };
        names.iter().zip(outcomes).map(file).collect()
    }

    /// Carries operations out; returns their outcomes in order.
    fn run(&mut self, operations: Vec<Operation>) -> Result<Vec<Outcome>, Failure> {
        let count = operations.len();
        let mut waiting: VecDeque<(OpId, Operation)> = (0..).map(OpId).zip(operations).collect();
        let (mut in_flight, mut outcomes) = ([0; WORKERS], BTreeMap::new());
        while outcomes.len() < count {
            for (port, in_flight) in self.ports.iter_mut().zip(&mut in_flight) {
                while let Some((id, result)) = port.poll() {
                    *in_flight -= 1;
                    outcomes.insert(id, result.map_err(|error| format!("a plain transfer: {error}"))?);
                }
                while *in_flight < IN_FLIGHT
                    && let Some((id, operation)) = waiting.pop_front()
                {
                    *in_flight += 1;
                    port.start(id, operation);
                }
            }
            if outcomes.len() < count {
                self.woken.recv_timeout(PATIENCE)?;
            }
        }
        Ok(outcomes.into_values().collect())
    }
}

fn rate(files: &[File], start: Instant) -> f64 {
    let bytes: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    bytes as f64 / 1e9 / start.elapsed().as_secs_f64()
}
