//! `kvplane collectives`: one rank that runs collectives with the others of its world, measures and verifies them.
//!
//! Start it once for each rank, on any hosts. The ranks run the same operations of each size in turn, and rank 0 prints
//! a line for each: the bytes, the median time of an operation, and the bus bandwidth as NVIDIA's nccl-tests define it.
//! With `--until-killed` they run until they are stopped, and go on without ranks that die.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use kvplane::group::{
    Change, Collective, DataType, FailureMode, GroupError, GroupProcess, GroupProcessConfig, GroupRank, GroupSpec,
    Operation, ProcessGroup, RankSet, Reduction, WorldRank,
};
use kvplane::{IoBuf, Region, RegionOptions};

use super::Failure;
use super::size;
use super::tebench::values;
use super::which::Which;

/// Operations of each size that are not measured.
const WARM_UP: usize = 2;
/// Deadline of the start of all ranks.
const FOUNDING: Duration = Duration::from_secs(60);
/// Time that a size is measured for, at most.
const LONGEST: Duration = Duration::from_secs(1);
const FEWEST: usize = 3;
const MOST: usize = 500;
/// Values repeat after so many elements, so that sums of small integers are exact in each type.
const PERIOD: u64 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum OperationChoice {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Barrier,
}

/// Arguments of the command.
#[derive(Args)]
pub(crate) struct Collectives {
    /// Name of the world: the same for all ranks, and for no other job.
    #[arg(long)]
    world: String,
    /// Rank of this process.
    #[arg(long)]
    rank: u8,
    /// Number of ranks.
    #[arg(long)]
    ranks: u8,
    /// Operation.
    #[arg(long, value_enum, default_value = "all-reduce")]
    operation: OperationChoice,
    /// Type of the elements: u8, i8, i16, i32, i64, f16, bf16, f32 or f64.
    #[arg(long, default_value = "f32")]
    data_type: DataType,
    /// Sizes of a rank's buffer, separated by commas.
    #[arg(long, value_delimiter = ',', value_parser = size::parse, default_value = "4,4K,64K,1M,16M")]
    sizes: Vec<u64>,
    /// Seconds in which an operation has to end; a rank that is alive and slow is waited for until then.
    #[arg(long, default_value_t = 10.0, value_parser = values::seconds)]
    deadline: f64,
    /// Verify all elements of each result, not only of the first and the last operation of a size.
    #[arg(long)]
    verify: bool,
    /// Run operations of the first size until the process is stopped, and print a line for each second and each view:
    /// the number of operations, the time of the last one, the epoch of the view, and its ranks.
    #[arg(long)]
    until_killed: bool,
    /// Join a world whose other ranks run already, in place of a rank that died.
    #[arg(long, requires = "until_killed")]
    joining: bool,
    /// Address that ranks on other hosts connect to.
    #[arg(long)]
    host: Option<IpAddr>,
    /// Use TCP between the ranks of a host, too.
    #[arg(long)]
    no_shared_memory: bool,
    /// Cluster of the control plane.
    #[arg(long, default_value = "dev")]
    cluster: String,
    /// Runtime directory of the control plane on this host, if not the user's.
    #[arg(long)]
    runtime_directory: Option<PathBuf>,
    #[command(flatten)]
    which: Which,
}

/// A result that is not what the ranks' buffers make of it.
#[derive(Debug)]
struct WrongResult {
    operation: OperationChoice,
    bytes: u64,
    byte: u64,
    epoch: u64,
}

impl std::fmt::Display for WrongResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { operation, bytes, byte, epoch } = self;
        write!(f, "{operation:?} of {bytes} bytes in epoch {epoch}: byte {byte} of the result is wrong")
    }
}

impl std::error::Error for WrongResult {}

/// Buffers of an operation of a size, and what is expected.
struct Case {
    operation: Operation,
    choice: OperationChoice,
    source: Option<IoBuf>,
    target: Option<IoBuf>,
}

impl Collectives {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let control = self.which.control(&self.cluster, self.runtime_directory.clone());
        let mut config = GroupProcessConfig::new(control, self.world.clone(), self.rank);
        if let Some(host) = self.host {
            config.listen = host;
        }
        config.shared_memory = !self.no_shared_memory;
        let process = GroupProcess::join(config)?;
        let group = process.attach(GroupSpec {
            name: "all".to_owned(),
            order: (0..self.ranks).map(WorldRank).collect(),
            max_size: self.ranks,
            failure_mode: FailureMode::Automatic,
            is_joining: self.joining,
        })?;
        let deadline = Duration::try_from_secs_f64(self.deadline)?;
        // The other ranks may start later than this one: that is not the operations' time.
        group.await_epoch(1, FOUNDING)?;
        if self.until_killed {
            return self.run_until_killed(&group, deadline);
        }
        if self.rank == 0 {
            println!("{:>12} {:>12} {:>12} {:>6}", "bytes", "time (us)", "bus GB/s", "ranks");
        }
        for bytes in &self.sizes {
            let case = self.case(&group, *bytes)?;
            let (time, participants) = self.measure(&group, &case, deadline)?;
            if self.rank == 0 {
                let rate = bus_factor(self.operation, participants) * *bytes as f64 / time.as_secs_f64() / 1e9;
                println!("{bytes:>12} {:>12.1} {rate:>12.3} {participants:>6}", time.as_secs_f64() * 1e6);
            }
        }
        process.close()?;
        Ok(())
    }

    /// Makes the buffers for a size, rounded down to whole elements.
    fn case(&self, group: &ProcessGroup, bytes: u64) -> Result<Case, Failure> {
        let count = bytes / self.data_type.bytes() as u64;
        let places = group.size() as u8;
        let each = count / u64::from(places);
        let (collective, count) = match self.operation {
            OperationChoice::AllReduce => (Collective::AllReduce { reduction: Reduction::Sum }, count),
            OperationChoice::AllGather => (Collective::AllGather, each),
            OperationChoice::ReduceScatter => (Collective::ReduceScatter { reduction: Reduction::Sum }, each),
            OperationChoice::AllToAll => {
                let counts = vec![each; usize::from(places)];
                (Collective::AllToAll { sources: counts.clone(), targets: counts }, 0)
            }
            OperationChoice::Broadcast => (Collective::Broadcast { root: GroupRank(0) }, count),
            OperationChoice::Barrier => (Collective::Barrier, 0),
        };
        let operation = Operation { collective, data_type: self.data_type, count, places };
        let (source, target) = operation.buffer_bytes(group.rank());
        let source = memory(source)?;
        let target = if operation.is_in_place() { source.clone() } else { memory(target)? };
        Ok(Case { operation, choice: self.operation, source, target })
    }

    /// Runs an operation once. Returns its time, and the participants, after verifying the result if `verifies`.
    fn once(
        &self,
        group: &ProcessGroup,
        case: &Case,
        deadline: Duration,
        verifies: bool,
    ) -> Result<(Duration, u64, RankSet<GroupRank>), Failure> {
        if verifies {
            case.fill(group.rank());
        }
        let start = Instant::now();
        let work = group.submit(case.operation.clone(), case.source.clone(), case.target.clone(), deadline)?;
        let completion = work.wait(Duration::MAX).ok_or("an operation did not end by its deadline")??;
        let time = start.elapsed();
        if verifies {
            case.verify(group.rank(), completion.participants, completion.epoch)?;
        }
        Ok((time, completion.epoch, completion.participants))
    }

    fn measure(&self, group: &ProcessGroup, case: &Case, deadline: Duration) -> Result<(Duration, usize), Failure> {
        let mut warm = Duration::ZERO;
        for _ in 0..WARM_UP {
            warm = self.once(group, case, deadline, true)?.0;
        }
        let times = self.agree(group, warm, deadline)?;
        let mut found = Vec::new();
        let mut participants = 0;
        for at in 0..times {
            let (time, _, ranks) = self.once(group, case, deadline, self.verify || at + 1 == times)?;
            found.push(time);
            participants = ranks.len();
        }
        found.sort_unstable();
        Ok((found[found.len() / 2], participants))
    }

    /// Number of measured operations, which the ranks take from rank 0.
    fn agree(&self, group: &ProcessGroup, warm: Duration, deadline: Duration) -> Result<usize, Failure> {
        let times = (LONGEST.as_secs_f64() / warm.as_secs_f64().max(1e-9)) as usize;
        let number = IoBuf::whole(Region::allocate(&RegionOptions::new("number", 8))?);
        number.copy_in(&(times.clamp(FEWEST, MOST) as u64).to_le_bytes());
        let collective = Collective::Broadcast { root: GroupRank(0) };
        let operation = Operation { collective, data_type: DataType::I64, count: 1, places: group.size() as u8 };
        let work = group.submit(operation, Some(number.clone()), Some(number.clone()), deadline)?;
        work.wait(Duration::MAX).ok_or("an operation did not end by its deadline")??;
        let mut bytes = [0; 8];
        number.copy_out(&mut bytes);
        Ok(u64::from_le_bytes(bytes) as usize)
    }

    fn run_until_killed(&self, group: &ProcessGroup, deadline: Duration) -> Result<(), Failure> {
        let bytes = self.sizes.first().copied().unwrap_or(4);
        if self.joining {
            group.join(Duration::from_secs(60))?;
        }
        let case = self.case(group, bytes)?;
        let (mut operations, mut second) = (0u64, Instant::now());
        let mut last = 0;
        loop {
            let (time, epoch, ranks) = match self.once(group, &case, deadline, true) {
                Ok(found) => found,
                // A rank that is alive was too slow: all end the operation, and go on with the next one.
                Err(error) if is_deadline(&error) => {
                    println!("deadline: {error}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            operations += 1;
            if epoch != last || second.elapsed() >= Duration::from_secs(1) {
                let names: Vec<_> = ranks.iter().map(|rank| rank.0.to_string()).collect();
                let (ms, names) = (time.as_secs_f64() * 1e3, names.join(","));
                println!("{operations} operations, the last in {ms:.3} ms, epoch {epoch}, ranks {names}");
                (last, second) = (epoch, Instant::now());
            }
            self.activate_joiners(group)?;
        }
    }

    /// Lets ranks take part that wait for it.
    fn activate_joiners(&self, group: &ProcessGroup) -> Result<(), Failure> {
        use kvplane::group::MemberState;
        let members = group.members();
        let waits = |(at, (state, _)): (usize, &(MemberState, _))| {
            (*state == MemberState::AwaitingActivation).then_some(GroupRank(at as u8))
        };
        let waiting: RankSet<GroupRank> = members.iter().enumerate().filter_map(waits).collect();
        // The first participant speaks for all.
        if !waiting.is_empty() && group.participants().iter().next() == Some(group.rank()) {
            let outcome = group.propose(Change::Activate(waiting), Duration::from_secs(20))?;
            println!("activation of {waiting:?}: {outcome}");
        }
        Ok(())
    }
}

fn is_deadline(error: &Failure) -> bool {
    use kvplane::group::Failure as Ended;
    let ended = error.downcast_ref::<GroupError>();
    matches!(
        ended,
        Some(GroupError::Failed(Ended::Deadline { .. } | Ended::OthersDeadline { .. } | Ended::EndedElsewhere))
    )
}

fn memory(bytes: u64) -> Result<Option<IoBuf>, Failure> {
    if bytes == 0 {
        return Ok(None);
    }
    Ok(Some(IoBuf::whole(Region::allocate(&RegionOptions::new("collectives", bytes as usize))?)))
}

/// Bytes that cross the slowest link, relative to the buffer's.
fn bus_factor(operation: OperationChoice, ranks: usize) -> f64 {
    let share = (ranks as f64 - 1.0) / ranks as f64;
    match operation {
        OperationChoice::AllReduce => 2.0 * share,
        OperationChoice::AllGather | OperationChoice::ReduceScatter | OperationChoice::AllToAll => share,
        OperationChoice::Broadcast => 1.0,
        OperationChoice::Barrier => 0.0,
    }
}

/// Small number of a rank at a place.
fn number(rank: GroupRank, at: u64) -> u32 {
    // Sums over 64 ranks are below 128, which is exact in each type.
    (u64::from(rank.0 % 2) + at % PERIOD % 2) as u32 % 2
}

impl Case {
    /// Writes the rank's numbers into the source.
    fn fill(&self, rank: GroupRank) {
        let Some(source) = &self.source else { return };
        self.write(source, |at| number(rank, at));
    }

    fn write(&self, buffer: &IoBuf, value: impl Fn(u64) -> u32) {
        let element = self.operation.data_type.bytes();
        buffer.region().fill_with(buffer.offset(), buffer.bytes(), &mut |from, chunk| {
            for (at, bytes) in chunk.chunks_mut(element).enumerate() {
                let encoded = self.operation.data_type.encode(value(from / element as u64 + at as u64));
                bytes.copy_from_slice(&encoded[..bytes.len()]);
            }
        });
    }

    /// Compares the target with what the participants' sources make of it.
    fn verify(&self, rank: GroupRank, ranks: RankSet<GroupRank>, epoch: u64) -> Result<(), WrongResult> {
        let Some(target) = &self.target else { return Ok(()) };
        let operation = &self.operation;
        let element = operation.data_type.bytes() as u64;
        let each = match self.choice {
            OperationChoice::AllToAll => target.bytes() as u64 / element / u64::from(operation.places),
            _ => operation.count,
        };
        let sum = |at: u64| ranks.iter().map(|rank| number(rank, at)).sum::<u32>();
        let part_of = |at: u64| GroupRank((at / each.max(1)) as u8);
        // `None` where a rank takes no part, whose part stays as it was.
        let expected = |at: u64| match self.choice {
            OperationChoice::AllReduce => Some(sum(at)),
            OperationChoice::ReduceScatter => Some(sum(u64::from(rank.0) * each + at)),
            OperationChoice::Broadcast => Some(number(GroupRank(0), at)),
            OperationChoice::AllGather => ranks.contains(part_of(at)).then(|| number(part_of(at), at % each)),
            OperationChoice::AllToAll => {
                ranks.contains(part_of(at)).then(|| number(part_of(at), u64::from(rank.0) * each + at % each))
            }
            OperationChoice::Barrier => None,
        };
        let mut wrong = None;
        target.region().read_with(target.offset(), target.bytes(), &mut |from, chunk| {
            for (index, bytes) in chunk.chunks(element as usize).enumerate() {
                let at = from / element + index as u64;
                let Some(value) = expected(at) else { continue };
                let encoded = operation.data_type.encode(value);
                if wrong.is_none() && *bytes != encoded[..bytes.len()] {
                    wrong = Some(at * element);
                }
            }
        });
        match wrong {
            None => Ok(()),
            Some(byte) => Err(WrongResult { operation: self.choice, bytes: target.bytes() as u64, byte, epoch }),
        }
    }
}
