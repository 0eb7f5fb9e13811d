//! The libraries that an ELF binary needs to start, read from its dynamic section.
//!
//! Just enough of the format (64-bit, little-endian) to answer that one question, so that the check runs where no
//! binutils are installed. Bytes that are not such a file give an error and never a panic.

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const PROGRAM_HEADER_BYTES: usize = 56;
const DYNAMIC_ENTRY_BYTES: usize = 16;
const MAX_NAME_BYTES: usize = 4096;

/// One segment of the file that is mapped, or the one that holds the dynamic section.
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    file_bytes: u64,
}

/// The `DT_NEEDED` names in order; empty for a static binary.
pub fn needed_libraries(file: &[u8]) -> Result<Vec<String>, String> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return Err("not a 64-bit little-endian ELF file".to_string());
    }
    let truncated = || "truncated or damaged ELF file".to_string();
    let segments = segments(file).ok_or_else(truncated)?;
    let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
        return Ok(Vec::new());
    };
    let entries = entries(file, dynamic).ok_or_else(truncated)?;
    let table = entries.iter().find(|(tag, _)| *tag == DT_STRTAB).map(|(_, address)| *address);
    let names = entries.iter().filter(|(tag, _)| *tag == DT_NEEDED).map(|(_, offset)| {
        let address = table?.checked_add(*offset)?;
        name_at(file, file_offset(&segments, address)?)
    });
    names.collect::<Option<Vec<String>>>().ok_or_else(truncated)
}

fn segments(file: &[u8]) -> Option<Vec<Segment>> {
    let table = usize::try_from(read(file, 0x20, 8)?).ok()?;
    let stride = usize::try_from(read(file, 0x36, 2)?).ok()?;
    let count = usize::try_from(read(file, 0x38, 2)?).ok()?;
    if stride < PROGRAM_HEADER_BYTES {
        return None;
    }
    let segment = |index: usize| {
        let at = table.checked_add(index * stride)?;
        Some(Segment {
            kind: u32::try_from(read(file, at, 4)?).ok()?,
            offset: read(file, at.checked_add(8)?, 8)?,
            address: read(file, at.checked_add(16)?, 8)?,
            file_bytes: read(file, at.checked_add(32)?, 8)?,
        })
    };
    (0..count).map(segment).collect()
}

fn entries(file: &[u8], dynamic: &Segment) -> Option<Vec<(u64, u64)>> {
    let start = usize::try_from(dynamic.offset).ok()?;
    let end = start.checked_add(usize::try_from(dynamic.file_bytes).ok()?)?;
    let mut entries = Vec::new();
    for entry in file.get(start..end)?.chunks_exact(DYNAMIC_ENTRY_BYTES) {
        let tag = read(entry, 0, 8)?;
        if tag == DT_NULL {
            break;
        }
        entries.push((tag, read(entry, 8, 8)?));
    }
    Some(entries)
}

/// Where in the file the mapped `address` comes from.
fn file_offset(segments: &[Segment], address: u64) -> Option<usize> {
    let holds = |segment: &&Segment| {
        let within = address.checked_sub(segment.address);
        segment.kind == PT_LOAD && within.is_some_and(|within| within < segment.file_bytes)
    };
    let segment = segments.iter().find(holds)?;
    usize::try_from(segment.offset.checked_add(address - segment.address)?).ok()
}

fn name_at(file: &[u8], start: usize) -> Option<String> {
    let bytes = file.get(start..)?;
    let end = bytes.iter().take(MAX_NAME_BYTES).position(|&byte| byte == 0)?;
    String::from_utf8(bytes[..end].to_vec()).ok()
}

/// A little-endian number of `count` bytes, at most 8.
fn read(bytes: &[u8], at: usize, count: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(count)?)?;
    Some(part.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn this_program() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn this_program_needs_the_c_library() {
        let needed = needed_libraries(&this_program()).unwrap();
        assert!(needed.iter().any(|name| name.starts_with("libc.so")), "{needed:?}");
    }

    #[test]
    fn damaged_files_are_errors() {
        assert!(needed_libraries(b"#!/bin/sh\n").is_err());
        let mut file = this_program();
        for length in 6..200 {
            assert!(needed_libraries(&file[..length]).is_err(), "cut at {length}");
        }
        for at in 0..200 {
            file[at] ^= 0xff;
            // Any answer will do, as long as there is one.
            let _ = needed_libraries(&file);
            file[at] ^= 0xff;
        }
    }
}
