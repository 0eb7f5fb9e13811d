//! Test programs of a build, from cargo's JSON messages.
//!
//! One line is one message, which is searched as text: the few fields that count are strings without escapes, unless a
//! path has quotes or backslashes, and such a program is reported as missing rather than taken for another.

use std::path::{Path, PathBuf};

/// Test program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Name of the package.
    pub package: String,
    /// Name of the test target; `lib` for the tests inside a library, `bin` for those inside a program.
    pub target: String,
    /// Path of the program.
    pub path: PathBuf,
    /// Directory of the package, in which cargo runs tests.
    pub directory: PathBuf,
}

/// Parses one line of cargo's output; `None` for everything but test programs.
#[must_use]
pub fn read(line: &str) -> Option<Binary> {
    let (_, profile) = line.split_once(r#""profile":{"#)?;
    if !line.contains(r#""reason":"compiler-artifact""#) || !profile.split('}').next()?.contains(r#""test":true"#) {
        return None;
    }
    let path = string(line, r#""executable":"#)?;
    let manifest = string(line, r#""manifest_path":"#)?;
    let (_, target) = line.split_once(r#""target":{"#)?;
    let kind = string(target, r#""kind":["#)?;
    let target = match kind {
        "lib" | "bin" => kind,
        _ => string(target, r#""name":"#)?,
    };
    let package = package(string(line, r#""package_id":"#)?)?;
    let directory = Path::new(manifest).parent()?.to_path_buf();
    Some(Binary { package: package.to_string(), target: target.to_string(), path: path.into(), directory })
}

/// Returns the string right behind `key`.
fn string<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(key)?;
    let (value, _) = rest.strip_prefix('"')?.split_once('"')?;
    (!value.contains('\\')).then_some(value)
}

/// Returns the name in `path+file:///somewhere/name#0.1.0` or `path+file:///somewhere/else#name@0.1.0`.
fn package(id: &str) -> Option<&str> {
    let (source, version) = id.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => source.rsplit('/').next(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = concat!(
        r#"{"reason":"compiler-artifact","package_id":"path+file:///src/control/agent#kvplane@0.1.0","#,
        r#""manifest_path":"/src/control/agent/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"#,
        r#""name":"rig","src_path":"/src/x.rs","edition":"2024","doc":false,"doctest":false,"test":true},"#,
        r#""profile":{"opt_level":"1","debuginfo":1,"overflow_checks":true,"test":true},"#,
        r#""features":[],"filenames":["/t/rig-1"],"executable":"/t/rig-1","fresh":true}"#,
    );

    #[test]
    fn a_test_program_is_read() {
        let found = read(LINE).unwrap();
        assert_eq!((found.package.as_str(), found.target.as_str()), ("kvplane", "rig"));
        assert_eq!((found.path, found.directory), ("/t/rig-1".into(), "/src/control/agent".into()));
        let lib = LINE.replace(r#""kind":["test"]"#, r#""kind":["lib"]"#);
        assert_eq!(read(&lib).unwrap().target, "lib");
        let plain = LINE.replace("#kvplane@", "#");
        assert_eq!(read(&plain).unwrap().package, "agent");
    }

    #[test]
    fn other_messages_are_ignored() {
        let no_program = LINE.replace(r#""executable":"/t/rig-1""#, r#""executable":null"#);
        let no_test = LINE.replace(r#"checks":true,"test":true"#, r#"checks":true,"test":false"#);
        let escaped = LINE.replace("/t/rig-1", r"/t/a\\b");
        for line in ["", "{}", "{\"reason\":\"build-finished\"}", &no_program, &escaped] {
            assert_eq!(read(line), None, "{line}");
        }
        // The target's own `test` means that it could be a test, the profile's that it is one.
        assert_eq!(read(&no_test), None);
        for end in 0..LINE.len() {
            let _ = read(&LINE[..end]);
        }
    }
}
