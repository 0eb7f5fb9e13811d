//! `kvplane p2p reshard`: fetches a checkpoint that one parallel layout wrote, in the layout of another.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvplane::reshard::{Copy, Dtype, Placement};
use kvplane::{
    Object, P2pStore, PartSource, ReadBytes, ReadOptions, Region, RegionOptions, Resharding, placement_from_json,
};

use super::super::process::durations;
use super::super::{Failure, size};
use super::destination::Out;
use super::files::{at, named_files, write_region};
use super::progress::Bar;
use super::{destination, safetensors};

/// Longest manifest that is read, in bytes.
const MANIFEST_BYTES: u64 = 1 << 30;

#[derive(Args)]
pub(super) struct Reshard {
    /// Name of the object with a file for each rank, PARTICIPANT.safetensors or another ending; or name prefix of
    /// objects with one file each, NAME/PARTICIPANT.
    name: String,
    /// Directory for the files: PARTICIPANT.safetensors for each rank that is fetched.
    directory: PathBuf,
    /// Manifest of the layout that the checkpoint was written under, as JSON. Ranks are identified by participant_id.
    #[arg(long, value_name = "MANIFEST")]
    source: PathBuf,
    /// Manifest of the layout to fetch, as JSON.
    #[arg(long, value_name = "MANIFEST")]
    target: PathBuf,
    /// Rank of the target layout to fetch; may be repeated. Default: all ranks, one after the other.
    #[arg(long, value_name = "NAME")]
    participant: Vec<String>,
    /// Version of the objects. Default: the newest of each.
    #[arg(long)]
    version: Option<u64>,
    /// Write the fragments to PARTICIPANT.bin without a header, one directly after the other in the manifest's order.
    /// Source files that are not .safetensors are read in this format.
    #[arg(long)]
    packed: bool,
    /// Time limit of each rank, in seconds. Parts that no member holds are waited for until then, as their writer may
    /// be restarting. Default: one hour, of which at most 3 seconds for parts that no member holds.
    #[arg(long, value_parser = durations::seconds())]
    deadline: Option<u64>,
}

fn manifest(path: &Path) -> Result<Placement, Failure> {
    let bytes = fs::metadata(path).map_err(at(path))?.len();
    if bytes > MANIFEST_BYTES {
        return Err(
            format!("{}: {bytes} bytes are too many for a manifest: at most {MANIFEST_BYTES}", path.display()).into()
        );
    }
    let text = fs::read_to_string(path).map_err(at(path))?;
    placement_from_json(&text).map_err(at(path))
}

impl Reshard {
    pub(super) fn run(self, store: &P2pStore) -> Result<(), Failure> {
        let (source, target) = (manifest(&self.source)?, manifest(&self.target)?);
        let all = || target.parts().iter().map(|part| part.participant.clone()).collect();
        let wanted: Vec<String> = if self.participant.is_empty() { all() } else { self.participant.clone() };
        // Several reshards may run at the same time, each into files of its own, but not while a get writes to the
        // directory.
        let _directory = destination::share(&self.directory)?;
        let mut finder = Finder { store, command: &self, source: &source, found: BTreeMap::new() };
        for participant in &wanted {
            let mut components = Path::new(participant).components();
            if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
                return Err(format!("participant {participant:?} cannot be the name of a file").into());
            }
            let resharding = Resharding::new(&source, &target, participant)?;
            for part in resharding.plan().sources() {
                finder.find(part)?;
            }
            self.pull(store, &target, &resharding, &finder.found)?;
        }
        Ok(())
    }

    fn pull(
        &self,
        store: &P2pStore,
        target: &Placement,
        resharding: &Resharding<'_>,
        from: &BTreeMap<usize, PartSource>,
    ) -> Result<(), Failure> {
        let participant = &target.parts()[resharding.part()].participant;
        let (to, bytes) = target.packed(resharding.part())?;
        let path = self.directory.join(format!("{participant}.{}", if self.packed { "bin" } else { "safetensors" }));
        let head = if self.packed { Vec::new() } else { head(target, resharding.part())? };
        // Created before anything is read: another process that fetches the same rank is noticed now.
        let out = Out::create(path.clone())?;
        let memory = match usize::try_from(bytes)? {
            0 => None,
            // The rank's name may be longer than the kernel allows for a memory name.
            length => {
                Some(Region::allocate(&RegionOptions { shared: true, ..RegionOptions::new("p2p-rank", length) })?)
            }
        };
        let mut read = ReadBytes::default();
        if let Some(memory) = &memory {
            let bar = Bar::new(bytes)?;
            let each = |bytes| bar.inc(bytes);
            let options = ReadOptions { deadline: self.deadline.map(Duration::from_secs), each: Some(&each) };
            read = store.reshard(resharding, from, memory, &to, &options)?;
            bar.clear();
        }
        write(out, &head, memory.as_deref())?;
        let sources = resharding.plan().sources().len();
        println!(
            "has {participant:?}: {} from {sources} ranks, {} of them checked by hash, in {}",
            size::show(bytes),
            size::show(read.checked),
            path.display()
        );
        Ok(())
    }
}

/// Builds the header of a rank's safetensors file.
fn head(target: &Placement, part: usize) -> Result<Vec<u8>, Failure> {
    let part = &target.parts()[part];
    let name = |tensor: usize| &target.tensors()[tensor].name;
    let mut tensors: Vec<usize> = part.fragments.iter().map(|fragment| fragment.tensor).collect();
    tensors.sort_unstable();
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0] == pair[1]) {
        let text = format!(
            "{:?} has several boxes of {:?}, but a safetensors file has one tensor of a name: use --packed",
            part.participant,
            name(pair[0])
        );
        return Err(text.into());
    }
    let entries = part.fragments.iter().map(|fragment| {
        let tensor = &target.tensors()[fragment.tensor];
        (tensor.name.as_str(), tensor.dtype.name(), fragment.area.shape(), target.bytes(fragment))
    });
    Ok(safetensors::head(entries)?)
}

/// Writes the file under a temporary name and renames it: a file under the final name is complete.
fn write(out: Out, head: &[u8], memory: Option<&Region>) -> Result<(), Failure> {
    out.file.write_all_at(head, 0).map_err(at(out.part()))?;
    if let Some(memory) = memory {
        write_region(&out.file, head.len() as u64, memory, 0, memory.bytes()).map_err(at(out.part()))?;
    }
    out.finish()
}

/// Finds the bytes of the source's ranks, once for each rank.
struct Finder<'a> {
    store: &'a P2pStore,
    command: &'a Reshard,
    source: &'a Placement,
    found: BTreeMap<usize, PartSource>,
}

impl Finder<'_> {
    fn find(&mut self, part: usize) -> Result<(), Failure> {
        if self.found.contains_key(&part) {
            return Ok(());
        }
        let participant = &self.source.parts()[part].participant;
        let (object, buffer, file) = self.file_of(participant)?;
        let offsets = if file.ends_with(".safetensors") {
            let named = |why: String| Failure::from(format!("{file:?} of {:?}: {why}", object.name));
            self.tensors_in(&object, buffer)
                .and_then(|entries| offsets_in(self.source, part, &entries).map_err(Failure::from))
                .map_err(|why| named(why.to_string()))?
        } else {
            let (offsets, bytes) = self.source.packed(part)?;
            let size = object.layout.sizes()[buffer];
            if size != bytes {
                let text = format!("{file:?} of {:?} has {size} bytes, but {participant:?} has {bytes}", object.name);
                return Err(text.into());
            }
            offsets
        };
        self.found.insert(part, PartSource { object, buffer, offsets });
        Ok(())
    }

    /// Returns the object, buffer and file with the bytes of a rank.
    fn file_of(&self, participant: &str) -> Result<(Object, usize, String), Failure> {
        let (name, version) = (&self.command.name, self.command.version);
        let whole = self.store.find(name, version);
        if let Ok(object) = &whole {
            let files = named_files(object)?;
            let filled = files.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(file, _)| file).enumerate();
            let is = |file: &str| file == participant || Path::new(file).with_extension("") == Path::new(participant);
            if let Some((buffer, file)) = filled.into_iter().find(|(_, file)| is(file)) {
                return Ok((object.clone(), buffer, file));
            }
        }
        let alone = format!("{name}/{participant}");
        let object = self.store.find(&alone, version).map_err(|error| match whole {
            Ok(_) => format!("object {name:?} has no file {participant:?}, and {error}"),
            Err(whole) => format!("{whole}, and {error}"),
        })?;
        let filled: Vec<String> =
            named_files(&object)?.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(file, _)| file).collect();
        match <[String; 1]>::try_from(filled) {
            Ok([file]) => Ok((object, 0, file)),
            Err(files) => Err(format!("object {alone:?} has {} files: it must have one", files.len()).into()),
        }
    }

    fn tensors_in(&self, object: &Object, buffer: usize) -> Result<BTreeMap<String, safetensors::Entry>, Failure> {
        let size = object.layout.sizes()[buffer];
        let mut first = [0; safetensors::LENGTH_BYTES as usize];
        self.read(object, buffer, 0, &mut first)?;
        let mut table = vec![0; usize::try_from(safetensors::table_bytes(first, size)?)?];
        self.read(object, buffer, safetensors::LENGTH_BYTES, &mut table)?;
        Ok(safetensors::entries(&table, size)?)
    }

    fn read(&self, object: &Object, buffer: usize, source_offset: u64, out: &mut [u8]) -> Result<(), Failure> {
        let memory = Region::allocate(&RegionOptions::new("table", out.len()))?;
        let copy = Copy { source_offset, target_offset: 0, bytes: out.len() as u64 };
        let options = ReadOptions { deadline: self.command.deadline.map(Duration::from_secs), each: None };
        self.store.read_ranges(object, buffer, &[copy], &Arc::clone(&memory), &options)?;
        memory.copy_out(0, out);
        Ok(())
    }
}

/// Reason why a safetensors file does not have the tensors of a manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
enum TensorError {
    /// The file lacks a tensor.
    Missing { tensor: String },
    /// The file has a tensor of another type, shape or length.
    Differs { tensor: String, dtype: String, shape: Vec<u64>, bytes: u64, wanted: Dtype, wanted_shape: Vec<u64> },
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { tensor } => write!(f, "it has no tensor {tensor:?}, which the manifest names"),
            Self::Differs { tensor, dtype, shape, bytes, wanted, wanted_shape } => write!(
                f,
                "its tensor {tensor:?} is {dtype} {shape:?} of {bytes} bytes, but {wanted} {wanted_shape:?} in the \
                 manifest"
            ),
        }
    }
}

impl std::error::Error for TensorError {}

/// Returns the offsets of a part's fragments in a safetensors file: each is the tensor of its name.
fn offsets_in(
    source: &Placement,
    part: usize,
    entries: &BTreeMap<String, safetensors::Entry>,
) -> Result<Vec<u64>, TensorError> {
    let mut offsets = Vec::new();
    for fragment in &source.parts()[part].fragments {
        let tensor = &source.tensors()[fragment.tensor];
        let name = &tensor.name;
        let entry = entries.get(name).ok_or_else(|| TensorError::Missing { tensor: name.clone() })?;
        let (shape, bytes) = (fragment.area.shape(), source.bytes(fragment));
        if entry.shape != shape || Dtype::parse(&entry.dtype) != Some(tensor.dtype) || entry.bytes != bytes {
            return Err(TensorError::Differs {
                tensor: name.clone(),
                dtype: entry.dtype.clone(),
                shape: entry.shape.clone(),
                bytes: entry.bytes,
                wanted: tensor.dtype,
                wanted_shape: shape.to_vec(),
            });
        }
        offsets.push(entry.offset);
    }
    Ok(offsets)
}
