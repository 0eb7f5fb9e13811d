//! Checks of the shipped binary: it needs none of the libraries that it opens at run time to start, and contains no
//! devices of tests.
//!
//! Libraries are read from the file itself, so that the check runs on machines without binutils.

use std::fmt;

use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64, PT_DYNAMIC};
use object::read::elf::{FileHeader, ProgramHeader};

use crate::process::Failure;
use crate::workspace::Workspace;

/// Profile of the binary whose linkage is checked: the shipped one, without its optimisations.
pub const PROFILE: &str = "linkage";

/// Libraries that the binary opens at run time if they exist, and must never need to start.
const OPTIONAL_LIBRARIES: [&str; 8] =
    ["libibverbs", "librdmacm", "libhwloc", "libcuda", "libamdhip64", "libhsa-runtime64", "libascendcl", "libudev"];

/// Texts of symbols and source paths in a binary that contains the software RDMA devices or the drivers for tests: the
/// crates kvplane-soft-verbs and kvplane-fake-devices.
const TEST_DEVICES: [&str; 4] =
    ["18kvplane_soft_verbs", "tests/soft-verbs/", "20kvplane_fake_devices", "tests/fake-devices/"];

/// Text of the symbols of the module that uses devices. A binary without it has no symbols to look at.
const DEVICES: &str = "11kvplane_sys5verbs";

/// Checks the binary that is built with [`PROFILE`].
pub fn check(workspace: &Workspace) -> Result<(), Failure> {
    let path = workspace.target().join(PROFILE).join("kvplane");
    let shown = path.display();
    let bytes = std::fs::read(&path).map_err(|error| Failure::new(format!("{shown}: {error}")))?;
    let needed = needed_libraries(&bytes).map_err(|error| Failure::new(format!("{shown}: {error}")))?;
    if let Some(library) = forbidden(&needed) {
        let message = format!("{shown} does not start without {library}; open it at run time instead of linking it");
        return Err(Failure::new(message));
    }
    eprintln!("linkage: {shown} needs only {}", needed.join(", "));
    no_test_devices(&bytes).map_err(|error| Failure::new(format!("{shown} {error}")))?;
    eprintln!("linkage: {shown} contains no devices of tests");
    Ok(())
}

/// Reason why a binary is not known to be without the devices of tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DevicesError {
    /// The binary contains them.
    Included {
        /// The text that shows it.
        text: &'static str,
    },
    /// The binary has no symbols of the module that uses devices.
    NoSymbols,
}

impl fmt::Display for DevicesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Included { text } => write!(
                f,
                "contains devices of tests (`{text}`): see with `cargo tree -p kvplane-tools -e normal -i \
                 kvplane-soft-verbs`, or `-i kvplane-fake-devices`, which crate depends on them, and make that a \
                 dev-dependency"
            ),
            Self::NoSymbols => {
                write!(f, "has no symbol with `{DEVICES}`, so that nothing can be said about what it contains")
            }
        }
    }
}

impl std::error::Error for DevicesError {}

fn no_test_devices(file: &[u8]) -> Result<(), DevicesError> {
    // The standard library's search is fast in a development build too, in which `windows` would take 20 seconds.
    let content = String::from_utf8_lossy(file);
    if let Some(text) = TEST_DEVICES.iter().find(|text| content.contains(**text)) {
        return Err(DevicesError::Included { text });
    }
    if !content.contains(DEVICES) {
        return Err(DevicesError::NoSymbols);
    }
    Ok(())
}

fn forbidden(needed: &[String]) -> Option<&String> {
    needed.iter().find(|library| OPTIONAL_LIBRARIES.iter().any(|optional| library.starts_with(optional)))
}

/// Reason why the libraries that a file needs cannot be read.
#[derive(Debug)]
pub enum LinkageError {
    /// The file is no ELF file of 64 bits, or damaged.
    Format(object::Error),
    /// The file has no section table.
    Stripped,
}

impl fmt::Display for LinkageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(error) => error.fmt(f),
            Self::Stripped => {
                f.write_str("its section table is stripped, so the libraries that it needs cannot be read")
            }
        }
    }
}

impl std::error::Error for LinkageError {}

/// Returns the `DT_NEEDED` names of a 64-bit file in order; empty for a static one.
pub fn needed_libraries(file: &[u8]) -> Result<Vec<String>, LinkageError> {
    let (is_stripped, needed) = read(file).map_err(LinkageError::Format)?;
    if is_stripped {
        return Err(LinkageError::Stripped);
    }
    Ok(needed)
}

/// Returns true if the file is linked dynamically but has no section of its dynamic table, and the names of its
/// libraries.
fn read(file: &[u8]) -> object::Result<(bool, Vec<String>)> {
    let header = FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    let is_dynamic = header.program_headers(endian, file)?.iter().any(|part| part.p_type(endian) == PT_DYNAMIC);
    let table = header.sections(endian, file)?.dynamic_table(endian, file)?;
    let needed = table.iter().filter(|entry| entry.tag == DT_NEEDED);
    let names = needed.map(|entry| Ok(String::from_utf8_lossy(table.string(entry)?).into_owned()));
    Ok((is_dynamic && table.is_empty(), names.collect::<object::Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn this_program() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    #[test]
    fn optional_libraries_are_refused_in_any_version() {
        let needed = |names: &[&str]| names.iter().map(|&name| name.to_string()).collect::<Vec<_>>();
        assert_eq!(forbidden(&needed(&["libc.so.6", "libgcc_s.so.1"])), None);
        assert!(forbidden(&needed(&["libc.so.6", "libibverbs.so.1"])).is_some());
    }

    #[test]
    fn devices_of_tests_are_found_by_symbols_and_by_paths() {
        let product = b"_ZN11kvplane_sys5verbs6device6Device4open17h0E".as_slice();
        assert_eq!(no_test_devices(product), Ok(()));
        for found in ["_ZN18kvplane_soft_verbs3rim9FUNCTIONS17h0E", "tests/fake-devices/src/state.rs"] {
            let file = [product, found.as_bytes()].concat();
            assert!(no_test_devices(&file).unwrap_err().to_string().contains("kvplane-soft-verbs"), "{found}");
        }
        assert!(no_test_devices(b"\x7fELF without symbols").unwrap_err().to_string().contains("no symbol"));
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
        let mut stripped = file.clone();
        // Offset and size of the section table.
        stripped[0x28..0x30].fill(0);
        stripped[0x3c..0x40].fill(0);
        assert!(needed_libraries(&stripped).unwrap_err().to_string().contains("stripped"));
        for length in 6..200 {
            assert!(needed_libraries(&file[..length]).is_err(), "cut at {length}");
        }
        for at in 0..200 {
            file[at] ^= 0xff;
            // Any result is valid, as long as the function returns.
            let _ = needed_libraries(&file);
            file[at] ^= 0xff;
        }
    }
}
