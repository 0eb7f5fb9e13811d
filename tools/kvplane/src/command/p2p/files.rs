//! Files as the buffers of an object: mapped or read into memory, or written from memory as shards arrive.
//!
//! A file that is being fetched has a temporary name of its object and version, and is renamed once it is complete.

use std::collections::BTreeSet;
use std::fs::{self, File, FileType};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvplane::{Object, Region, RegionOptions, ShardPlace, lost_pages};
use kvplane_cluster::p2p::MAX_ABOUT_BYTES;

use super::super::Failure;
use super::names::{is_part, places, printable};
use super::{destination, say};

/// Bytes that are copied between a file and memory at a time.
const CHUNK: usize = 1 << 20;
/// Consequence of a served file that has shrunk, and the operator's next step.
const SHORTENED: &str = "this process ends, and peers fetch from the other members; put the file again when no process \
                         writes to it, or with --copy";
/// Most files of an object, with those that are empty.
pub(super) const FILES: usize = 16_384;

/// File with the memory of its bytes; `None` for an empty file.
struct One {
    name: String,
    path: PathBuf,
    /// Path of the partial file until it is complete.
    part: PathBuf,
    bytes: u64,
    region: Option<Arc<Region>>,
    /// Device and inode of the mapped file; `None` if the bytes were read into memory.
    inode: Option<(u64, u64)>,
}

/// Files of an object, in its order.
pub(super) struct Files {
    files: Vec<One>,
    /// Lock against other processes that write the same files.
    lock: Option<File>,
}

pub(super) fn at<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> Failure {
    move |error| format!("{}: {error}", printable(&path.display().to_string())).into()
}

/// Registers the message that the process prints if it dies of an access to a part of a mapped file that is gone.
fn explain_end(region: &Arc<Region>, path: &Path) -> std::io::Result<()> {
    let path = printable(&path.display().to_string());
    let words = format!("kvplane: {path}: shrank while it was served, or cannot be read: {SHORTENED}\n");
    lost_pages::explain(Arc::clone(region), words)
}

fn allocate(name: &str, bytes: u64) -> Result<Option<Arc<Region>>, Failure> {
    if bytes == 0 {
        return Ok(None);
    }
    let length = usize::try_from(bytes).map_err(|_| format!("{name}: {bytes} bytes do not fit this machine"))?;
    // The file's name may be longer than the kernel allows for a memory name.
    let options = RegionOptions { shared: true, ..RegionOptions::new("p2p-file", length) };
    Ok(Some(Region::allocate(&options).map_err(at(Path::new(name)))?))
}

impl Files {
    /// Maps a file, or all files below a directory, in order of their names; or reads them into memory that other
    /// processes of the host can map.
    pub(super) fn read(path: &Path, copy: bool) -> Result<Self, Failure> {
        let mut files = Self { files: found(path)?, lock: None };
        // Checked before anything is read: the names may exceed the limit.
        files.about()?;
        for One { name, path, bytes, region, inode, .. } in &mut files.files {
            let file = File::open(&path).map_err(at(path))?;
            let found = file.metadata().map_err(at(path))?;
            (*bytes, *inode) = (found.len(), (!copy).then_some((found.dev(), found.ino())));
            let length = usize::try_from(*bytes).map_err(at(path))?;
            *region = match length {
                0 => None,
                _ if copy => allocate(name, *bytes)?,
                _ => Some(Region::map_file(&file, length).map_err(at(path))?),
            };
            match region {
                Some(region) if copy => fill(region, &file).map_err(at(path))?,
                Some(region) => explain_end(region, path).map_err(at(path))?,
                None => {}
            }
        }
        Ok(files)
    }

    /// Opens the files of an object below a directory, which is locked until [`Self::finish`]; reads the parts that
    /// exist already.
    pub(super) fn open(directory: &Path, object: &Object) -> Result<Self, Failure> {
        let list = named_files(object)?;
        let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
        let places = places(&object.name, object.version, &names)?;
        let lock = Some(destination::lock(directory)?);
        let mut files = Vec::with_capacity(list.len());
        for ((name, bytes), place) in list.into_iter().zip(places) {
            let (path, part) = (directory.join(place.path), directory.join(place.part));
            let region = allocate(&name, bytes)?;
            files.push(One { name, path, part, bytes, region, inode: None });
        }
        files.iter().try_for_each(One::check)?;
        files.iter().try_for_each(One::prepare)?;
        Ok(Self { files, lock })
    }

    /// Returns the object's metadata: the names and lengths of its files.
    pub(super) fn about(&self) -> Result<Vec<u8>, Failure> {
        let list: Vec<serde_json::Value> =
            self.files.iter().map(|file| serde_json::json!({ "path": file.name, "bytes": file.bytes })).collect();
        let about = serde_json::to_vec(&serde_json::json!({ "files": list }))?;
        if about.len() > MAX_ABOUT_BYTES {
            let (count, bytes) = (list.len(), about.len());
            let text = format!(
                "the names of {count} files take {bytes} bytes, the limit of an object is {MAX_ABOUT_BYTES}: \
                 put fewer files at a time, or pack them into one"
            );
            return Err(text.into());
        }
        Ok(about)
    }

    /// Fails if a mapped file has shrunk, which this check may notice before an access to the lost part.
    pub(super) fn check_lengths(&self) -> Result<(), Failure> {
        for One { path, bytes, inode, .. } in &self.files {
            let Ok(now) = fs::metadata(path) else { continue };
            // A file that was removed or replaced is still mapped, and complete.
            if *inode == Some((now.dev(), now.ino())) && now.len() < *bytes {
                let (bytes, now) = (*bytes, now.len());
                return Err(at(path)(format!("has {now} bytes now and had {bytes} when it was put: {SHORTENED}")));
            }
        }
        Ok(())
    }

    /// Returns the object's buffers.
    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.files.iter().filter_map(|file| file.region.clone()).collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// Writes an arrived shard.
    pub(super) fn write(&self, place: ShardPlace) -> Result<(), Failure> {
        let mut filled = self.files.iter().filter_map(|file| Some((file, file.region.as_ref()?)));
        let Some((file, region)) = filled.nth(place.buffer) else { return Ok(()) };
        let path = &file.part;
        let out = File::options().write(true).open(path).map_err(at(path))?;
        write_region(&out, 0, region, place.offset as usize, place.bytes as usize).map_err(at(path))
    }

    /// Renames all files to their final names, and reports foreign files in the directory.
    pub(super) fn finish(&mut self, directory: &Path, object: &Object) -> Result<(), Failure> {
        for One { path, part, .. } in &self.files {
            File::open(part).and_then(|part| part.sync_all()).map_err(at(part))?;
            fs::rename(part, path).map_err(at(path))?;
        }
        let files: BTreeSet<&Path> = self.files.iter().map(|file| file.path.as_path()).collect();
        destination::say_what_else(directory, &files, &object.name, object.version);
        self.lock = None;
        Ok(())
    }
}

impl One {
    /// Checks that the file can get its final name, which would otherwise fail only after the whole fetch.
    fn check(&self) -> Result<(), Failure> {
        match fs::symlink_metadata(&self.path) {
            Ok(there) if there.is_dir() => {
                Err(at(&self.path)("a directory has the name of the file: move it, or get into another directory"))
            }
            Err(error) if error.kind() != ErrorKind::NotFound => Err(at(&self.path)(error)),
            _ => Ok(()),
        }
    }

    /// Creates the partial file from the bytes that exist already.
    fn prepare(&self) -> Result<(), Failure> {
        if let Some(parent) = self.path.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        let path = &self.part;
        // An existing file of this name is a start too; it stays until the new one is complete.
        if !path.exists() && self.path.is_file() {
            fs::copy(&self.path, path).map_err(at(path))?;
        }
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(at(path))?;
        if file.metadata().map_err(at(path))?.len() > 0
            && let Some(region) = &self.region
        {
            file.set_len(self.bytes).map_err(at(path))?;
            fill(region, &file).map_err(at(path))?;
        }
        file.set_len(self.bytes).map_err(at(path))
    }
}

/// Returns the names and lengths of an object's files; those that are not empty are its buffers.
pub(super) fn named_files(object: &Object) -> Result<Vec<(String, u64)>, Failure> {
    let about: serde_json::Value = serde_json::from_slice(&object.about)
        .map_err(|error| format!("object {:?} is not a set of files: {error}", object.name))?;
    let list = about["files"].as_array().ok_or_else(|| format!("object {:?} names no files", object.name))?;
    let mut files = Vec::with_capacity(list.len());
    for entry in list {
        let (name, bytes) = (entry["path"].as_str(), entry["bytes"].as_u64());
        let (Some(name), Some(bytes)) = (name, bytes) else {
            return Err(format!("object {:?} has a file {entry}: a path and bytes are needed", object.name).into());
        };
        files.push((name.to_owned(), bytes));
    }
    let sizes: Vec<u64> = files.iter().map(|&(_, bytes)| bytes).filter(|&bytes| bytes > 0).collect();
    if sizes != object.layout.sizes() {
        return Err(format!("object {:?} has buffers that do not match its files", object.name).into());
    }
    Ok(files)
}

/// Writes a part of a region to the same offset of a file, after a head of `after` bytes.
pub(super) fn write_region(
    file: &File,
    after: u64,
    region: &Region,
    offset: usize,
    bytes: usize,
) -> std::io::Result<()> {
    let mut failure = None;
    region.read_with(offset, bytes, &mut |within, part| {
        if let (None, Err(error)) = (&failure, file.write_all_at(part, after + offset as u64 + within)) {
            failure = Some(error);
        }
    });
    failure.map_or(Ok(()), Err)
}

/// Reads a file into memory of the same length.
fn fill(region: &Region, file: &File) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK.min(region.bytes())];
    for offset in (0..region.bytes()).step_by(chunk.len().max(1)) {
        let length = chunk.len().min(region.bytes() - offset);
        file.read_exact_at(&mut chunk[..length], offset as u64)?;
        region.copy_in(offset, &chunk[..length]);
    }
    Ok(())
}

fn text(path: &Path) -> Result<String, Failure> {
    let text = path.to_str().ok_or_else(|| format!("{}: the name is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

/// Lists a file, or the files below a directory in order of their names.
fn found(path: &Path) -> Result<Vec<One>, Failure> {
    let mut below = Below { root: path, files: Vec::new(), left_out: Vec::new(), parts: Vec::new() };
    let kind = fs::metadata(path).map_err(at(path))?.file_type();
    if kind.is_dir() {
        below.collect(path)?;
        below.files.sort();
        below.say_left_out();
    } else if kind.is_file() {
        let name = path.file_name().ok_or_else(|| format!("{}: the path has no file name", path.display()))?;
        if is_part(name) {
            let text = "a partial file of an interrupted get or reshard, whose missing parts are unknown: run that \
                        again, or rename it";
            return Err(at(path)(text));
        }
        below.files.push((text(Path::new(name))?, path.to_owned()));
    } else {
        return Err(at(path)(format!("is {}: give a file or a directory", name_of(kind))));
    }
    let one = |(name, path): (String, PathBuf)| {
        let bytes = fs::metadata(&path).map_err(at(&path))?.len();
        Ok(One { name, path, part: PathBuf::new(), bytes, region: None, inode: None })
    };
    below.files.into_iter().map(one).collect()
}

/// Returns the kind of a file-system entry that is not a file.
fn name_of(kind: FileType) -> &'static str {
    match kind {
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ if kind.is_block_device() || kind.is_char_device() => "a device",
        _ if kind.is_symlink() => "a link to no file",
        _ => "not a file",
    }
}

/// Contents of a directory tree.
struct Below<'a> {
    root: &'a Path,
    /// Files, with their names relative to the root.
    files: Vec<(String, PathBuf)>,
    /// Entries that are neither files nor directories, with their kinds.
    left_out: Vec<(PathBuf, &'static str)>,
    /// Partial files of interrupted gets.
    parts: Vec<PathBuf>,
}

impl Below<'_> {
    /// Collects a directory; links to files are followed, links to directories are not.
    fn collect(&mut self, directory: &Path) -> Result<(), Failure> {
        for entry in fs::read_dir(directory).map_err(at(directory))? {
            let entry = entry.map_err(at(directory))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(at(&path))?;
            if kind.is_dir() {
                self.collect(&path)?;
            } else if is_part(&entry.file_name()) {
                self.parts.push(path);
            } else if path.is_file() {
                if self.files.len() >= FILES {
                    return Err(at(self.root)(format!("more than {FILES} files: put a part of them")));
                }
                self.files.push((text(path.strip_prefix(self.root)?)?, path));
            } else {
                self.left_out.push((path, name_of(kind)));
            }
        }
        Ok(())
    }

    fn say_left_out(&self) {
        if let Some((path, kind)) = self.left_out.iter().min() {
            let (count, path) = (self.left_out.len(), path.strip_prefix(self.root).unwrap_or(path));
            let text = format!("left out entries that are not files: {count}, such as {path:?}, {kind}");
            say(&at(self.root)(text).to_string());
        }
        if let Some(path) = self.parts.iter().min() {
            let (count, path) = (self.parts.len(), path.strip_prefix(self.root).unwrap_or(path));
            let text = format!("left out partial files of interrupted gets or reshards: {count}, such as {path:?}");
            say(&at(self.root)(text).to_string());
        }
    }
}
