//! Files as the buffers of an object: mapped or read into memory, or written from it as shards arrive.
//!
//! A file that is being fetched is there under its name with `.part` at the end, and renamed when all is there.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use kvplane::{Object, Region, RegionOptions, ShardPlace};

use super::super::Failure;

/// Bytes moved between a file and memory at a time.
const CHUNK: usize = 1 << 20;
/// Files of one object, with those that are empty.
const FILES: usize = 16_384;

/// One file: where it is, and the memory with its bytes; none where it is empty.
struct One {
    name: String,
    path: PathBuf,
    bytes: u64,
    region: Option<Arc<Region>>,
}

/// The files of an object, in its order.
pub(super) struct Files {
    files: Vec<One>,
}

pub(super) fn at<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> Failure {
    move |error| format!("{}: {error}", path.display()).into()
}

fn allocate(name: &str, bytes: u64) -> Result<Option<Arc<Region>>, Failure> {
    if bytes == 0 {
        return Ok(None);
    }
    let length = usize::try_from(bytes).map_err(|_| format!("{name}: {bytes} bytes do not fit this machine"))?;
    let options = RegionOptions { shared: true, ..RegionOptions::new(name, length) };
    Ok(Some(Region::allocate(&options)?))
}

impl Files {
    /// Maps a file, or all files below a directory, in order of their names; or reads them into memory, which others of
    /// this host can map.
    pub(super) fn read(path: &Path, copy: bool) -> Result<Self, Failure> {
        let mut found = Vec::new();
        if path.is_dir() {
            collect(path, path, &mut found)?;
            found.sort();
        } else {
            let name = path.file_name().ok_or_else(|| format!("{}: no name of a file", path.display()))?;
            found.push((text(Path::new(name))?, path.to_owned()));
        }
        let mut files = Vec::with_capacity(found.len());
        for (name, path) in found {
            let file = File::open(&path).map_err(at(&path))?;
            let bytes = file.metadata().map_err(at(&path))?.len();
            let length = usize::try_from(bytes).map_err(at(&path))?;
            let region = match length {
                0 => None,
                _ if copy => allocate(&name, bytes)?,
                _ => Some(Region::map_file(&file, length).map_err(at(&path))?),
            };
            if let (true, Some(region)) = (copy, &region) {
                fill(region, &file).map_err(at(&path))?;
            }
            files.push(One { name, path, bytes, region });
        }
        Ok(Self { files })
    }

    /// The files of an object, below a directory; what is there of them already is read.
    pub(super) fn open(directory: &Path, object: &Object) -> Result<Self, Failure> {
        let list = named_files(object)?;
        let mut files = Vec::with_capacity(list.len());
        for (name, bytes) in list {
            let safe = Path::new(&name).components().all(|part| matches!(part, Component::Normal(_)));
            if !safe || name.is_empty() {
                return Err(
                    format!("object {:?} has a file {name:?}, which is not below a directory", object.name).into()
                );
            }
            let path = directory.join(&name);
            let region = allocate(&name, bytes)?;
            files.push(One { name, path, bytes, region });
        }
        let files = Self { files };
        files.files.iter().try_for_each(One::prepare)?;
        Ok(files)
    }

    /// What an object says of its files.
    pub(super) fn about(&self) -> Result<Vec<u8>, Failure> {
        let list: Vec<serde_json::Value> =
            self.files.iter().map(|file| serde_json::json!({ "path": file.name, "bytes": file.bytes })).collect();
        Ok(serde_json::to_vec(&serde_json::json!({ "files": list }))?)
    }

    /// The buffers.
    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.files.iter().filter_map(|file| file.region.clone()).collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// Writes what has arrived.
    pub(super) fn write(&self, place: ShardPlace) -> Result<(), Failure> {
        let mut filled = self.files.iter().filter_map(|file| Some((file, file.region.as_ref()?)));
        let Some((file, region)) = filled.nth(place.buffer) else { return Ok(()) };
        let path = file.part();
        let out = File::options().write(true).open(&path).map_err(at(&path))?;
        write_region(&out, 0, region, place.offset as usize, place.bytes as usize).map_err(at(&path))
    }

    /// Gives all files their names.
    pub(super) fn finish(&self) -> Result<(), Failure> {
        for file in &self.files {
            let part = file.part();
            File::open(&part).and_then(|part| part.sync_all()).map_err(at(&part))?;
            fs::rename(&part, &file.path).map_err(at(&file.path))?;
        }
        Ok(())
    }
}

impl One {
    fn part(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".part");
        name.into()
    }

    /// Makes the file that is written to, of what there is.
    fn prepare(&self) -> Result<(), Failure> {
        if let Some(parent) = self.path.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        let path = self.part();
        // A file that is there already is as good a beginning; it stays until all is there.
        if !path.exists() && self.path.is_file() {
            fs::copy(&self.path, &path).map_err(at(&path))?;
        }
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(at(&path))?;
        if file.metadata().map_err(at(&path))?.len() > 0
            && let Some(region) = &self.region
        {
            file.set_len(self.bytes).map_err(at(&path))?;
            fill(region, &file).map_err(at(&path))?;
        }
        file.set_len(self.bytes).map_err(at(&path))
    }
}

/// The files that an object has, and how long they are; those that are not empty are its buffers.
pub(super) fn named_files(object: &Object) -> Result<Vec<(String, u64)>, Failure> {
    let about: serde_json::Value = serde_json::from_slice(&object.about)
        .map_err(|error| format!("object {:?} is no set of files: {error}", object.name))?;
    let list = about["files"].as_array().ok_or_else(|| format!("object {:?} names no files", object.name))?;
    let mut files = Vec::with_capacity(list.len());
    for entry in list {
        let (name, bytes) = (entry["path"].as_str(), entry["bytes"].as_u64());
        let (Some(name), Some(bytes)) = (name, bytes) else {
            return Err(format!("object {:?} says {entry} of a file: a path and bytes are needed", object.name).into());
        };
        files.push((name.to_owned(), bytes));
    }
    let sizes: Vec<u64> = files.iter().map(|&(_, bytes)| bytes).filter(|&bytes| bytes > 0).collect();
    if sizes != object.layout.sizes() {
        return Err(format!("object {:?} names other files than it has bytes of", object.name).into());
    }
    Ok(files)
}

/// Writes a part of a region to the same place of a file, after what the file begins with.
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

/// Reads a file into memory of its length.
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
    let text = path.to_str().ok_or_else(|| format!("{}: the name is no text", path.display()))?;
    Ok(text.to_owned())
}

/// All files below, with their names from there on. Links are followed to files, not to directories.
fn collect(root: &Path, directory: &Path, found: &mut Vec<(String, PathBuf)>) -> Result<(), Failure> {
    for entry in fs::read_dir(directory).map_err(at(directory))? {
        let entry = entry.map_err(at(directory))?;
        let path = entry.path();
        if entry.file_type().map_err(at(&path))?.is_dir() {
            collect(root, &path, found)?;
        } else if path.is_file() {
            if found.len() >= FILES {
                return Err(format!("{}: more than {FILES} files: put parts of it", root.display()).into());
            }
            found.push((text(path.strip_prefix(root)?)?, path));
        }
    }
    Ok(())
}
