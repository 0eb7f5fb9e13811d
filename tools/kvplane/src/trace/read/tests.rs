//! Tests of the reader on good, bad and arbitrary input.

use proptest::prelude::*;

use super::*;

const GOOD: &str = r#"{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 41]}"#;

fn read(text: &[u8]) -> Result<Trace, TraceError> {
    collect(text, Path::new("some/trace.jsonl"))
}

/// Returns the line and the fault of a trace that must not parse.
fn fault(text: &[u8]) -> (u64, LineFault) {
    match read(text) {
        Err(TraceError::Line { line, fault, .. }) => (line, fault),
        other => panic!("expected a fault, got {other:?}"),
    }
}

#[test]
fn a_good_line_is_a_request() {
    let trace = read(format!("{GOOD}\n").as_bytes()).unwrap();
    let expected = Request { timestamp_ms: 3000, input_tokens: 600, output_tokens: 7, blocks: vec![0, 41] };
    assert_eq!(trace.requests, [expected]);
    // The last line may lack its line feed when it is complete.
    assert_eq!(read(GOOD.as_bytes()).unwrap().requests, trace.requests);
}

#[test]
fn a_torn_line_names_its_line_and_file() {
    let text = format!("{GOOD}\n{GOOD}\n{}", &GOOD[..50]);
    assert_eq!(fault(text.as_bytes()), (3, LineFault::Torn { bytes: 50 }));
    let words = read(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(words, "trace some/trace.jsonl, line 3: the line is torn: its JSON stops after 50 bytes");
}

#[test]
fn an_empty_line_is_a_missing_request() {
    assert_eq!(fault(format!("{GOOD}\n\n{GOOD}\n").as_bytes()), (2, LineFault::Blank));
    assert!(matches!(read(b""), Err(TraceError::Empty { .. })));
}

#[test]
fn fields_are_checked() {
    let says = |text: &str| read(text.as_bytes()).unwrap_err().to_string();
    assert!(says(&GOOD.replace("output_length", "other")).contains("missing field `output_length`"));
    assert!(says(&GOOD.replace("600", "-1")).contains("line 1: column"));
    assert!(!says(&GOOD.replace("600", "-1")).contains("at line"));
    assert!(says(&GOOD.replace("600", "99999999999")).contains("invalid value"));
    assert!(says(&GOOD.replace("600", "0")).contains("input_length is 0"));
    assert!(says(&GOOD.replace("41", "4.5")).contains("line 1"));
    assert_eq!(
        fault(GOOD.replace("600", "1025").as_bytes()).1,
        LineFault::WrongBlocks { found: 2, expected: 3, input_tokens: 1025 }
    );
    let words = fault(b"{\"timestamp\": oops}").1;
    assert!(matches!(words, LineFault::Malformed { column: 15, .. }), "{words:?}");
}

#[test]
fn lines_and_ids_have_limits() {
    let padded = |bytes: usize| format!("{GOOD}{}\n{GOOD}\n", " ".repeat(bytes - GOOD.len()));
    assert_eq!(read(padded(MAX_LINE_BYTES).as_bytes()).unwrap().requests.len(), 2);
    assert_eq!(fault(padded(MAX_LINE_BYTES + 1).as_bytes()), (1, LineFault::TooLong));
    let ids = vec!["1"; MAX_BLOCKS_PER_REQUEST + 1].join(",");
    let line = GOOD.replace("0, 41", &ids);
    assert_eq!(fault(line.as_bytes()).1, LineFault::TooManyBlocks { found: MAX_BLOCKS_PER_REQUEST + 1 });
}

#[test]
fn steps_back_in_time_are_counted() {
    let late = GOOD.replace("3000", "2999");
    let trace = read(format!("{GOOD}\n{late}\n{late}\n{GOOD}\n").as_bytes()).unwrap();
    assert_eq!((trace.requests.len(), trace.unordered), (4, 1));
}

#[test]
fn the_iterator_ends_after_an_error() {
    let text = format!("{GOOD}\n{{\n{GOOD}\n");
    let mut lines = Lines::new(text.as_bytes(), Path::new("x"));
    assert!(lines.next().unwrap().is_ok());
    assert!(lines.next().unwrap().is_err());
    assert_eq!(lines.line(), 2);
    assert!(lines.next().is_none());
}

#[test]
fn a_missing_file_is_named() {
    let words = load(Path::new("/nowhere/at/all.jsonl")).unwrap_err().to_string();
    assert!(words.starts_with("cannot open trace /nowhere/at/all.jsonl: "), "{words}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&bytes);
    }

    #[test]
    fn every_cut_of_a_line_is_an_error(cut in 1usize..GOOD.len()) {
        prop_assert_eq!(fault(&GOOD.as_bytes()[..cut]), (1, LineFault::Torn { bytes: cut }));
    }
}
