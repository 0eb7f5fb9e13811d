//! Structs of TENT's interface, laid out as in the header.

use std::ffi::{c_char, c_int, c_void};

use super::error::TentError;

/// Length of a location, including the final zero.
pub(super) const LOCATION_BYTES: usize = 64;
/// Length of a path of shared memory, including the final zero.
const SHM_PATH_BYTES: usize = 256;
/// Length of a notification's name, including the final zero.
pub(super) const NAME_BYTES: usize = 256;
/// Length of a notification's text, including the final zero.
pub(super) const MESSAGE_BYTES: usize = 4096;

/// Transfer request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// 0 to read, 1 to write.
    pub(super) opcode: c_int,
    /// Local address.
    pub(super) source: *mut c_void,
    /// Segment.
    pub(super) target_id: u64,
    /// Address in the segment.
    pub(super) target_offset: u64,
    /// Length in bytes.
    pub(super) length: u64,
    /// Priority class: 0, 1 or 2, the most urgent first.
    pub(super) priority: c_int,
    /// Number of the only transport to use; 0 for any.
    pub(super) transport_hint: c_int,
}

/// State of a transfer, or of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    /// Number of a `TaskState`.
    pub(super) status: c_int,
    /// Bytes that were moved.
    pub(super) transferred_bytes: u64,
}

/// Buffer of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferInfo {
    /// Address.
    pub(super) base: u64,
    /// Length in bytes.
    pub(super) length: u64,
    /// Location.
    pub(super) location: [c_char; LOCATION_BYTES],
}

/// Description of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentInfo {
    /// 0 for memory, 1 for a file.
    pub(super) kind: c_int,
    /// Number of buffers.
    pub(super) num_buffers: c_int,
    /// Buffers.
    pub(super) buffers: *mut BufferInfo,
}

/// Received notification.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotifiRecord {
    /// Always 0: notifications name no sender.
    pub(super) handle: u64,
    /// Name.
    pub(super) name: [c_char; NAME_BYTES],
    /// Text.
    pub(super) msg: [c_char; MESSAGE_BYTES],
}

/// Received notifications.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotifiInfo {
    /// Number of records.
    pub(super) num_records: c_int,
    /// Records.
    pub(super) records: *mut NotifiRecord,
}

/// Options of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryOptions {
    /// Location; empty to detect it.
    pub(super) location: [c_char; LOCATION_BYTES],
    /// Number of a permission.
    pub(super) permission: c_int,
    /// Number of the transport to use it with; 0 for any.
    pub(super) transport_type: c_int,
    /// Path of shared memory.
    pub(super) shm_path: [c_char; SHM_PATH_BYTES],
    /// Offset in the shared memory.
    pub(super) shm_offset: usize,
    /// Not 0 to hide it.
    pub(super) internal: c_int,
}

// Layout of the header on 64-bit machines.
const _: () = assert!(size_of::<Request>() == 48);
const _: () = assert!(size_of::<Status>() == 16);
const _: () = assert!(size_of::<BufferInfo>() == 80);
const _: () = assert!(size_of::<SegmentInfo>() == 16);
const _: () = assert!(size_of::<NotifiRecord>() == 4360);
const _: () = assert!(size_of::<NotifiInfo>() == 16);
const _: () = assert!(size_of::<MemoryOptions>() == 344);

/// Returns the text of an array of a struct.
///
/// # Errors
/// When it has no final zero, or is not UTF-8.
pub(super) fn text_of(chars: &[c_char], what: &'static str) -> Result<String, TentError> {
    let bytes: Vec<u8> = chars.iter().map(|&char| char as u8).take_while(|&byte| byte != 0).collect();
    if bytes.len() == chars.len() {
        return Err(TentError::Text { what, most: chars.len() - 1 });
    }
    String::from_utf8(bytes).map_err(|_| TentError::Text { what, most: chars.len() - 1 })
}

/// Writes a text and a final zero; returns false when it was cut to fit.
pub(super) fn put_text(out: &mut [c_char], text: &str) -> bool {
    let fits = text.floor_char_boundary(out.len() - 1);
    for (place, byte) in out.iter_mut().zip(text[..fits].bytes().chain([0])) {
        *place = byte as c_char;
    }
    fits == text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_structs_end_within_them() {
        let mut chars = [b'x' as c_char; 4];
        assert!(text_of(&chars, "the text").is_err());
        assert!(put_text(&mut chars, "abc") && chars.map(|char| char as u8) == *b"abc\0");
        assert_eq!(text_of(&chars, "the text").expect("it ends"), "abc");
        assert!(!put_text(&mut chars, "abcd"));
        assert!(!put_text(&mut chars, "ab\u{e9}"), "no half of a character");
        assert_eq!(text_of(&chars, "the text").expect("it ends"), "ab");
        chars[0] = 0xffu8 as c_char;
        assert!(text_of(&chars, "the text").is_err());
    }
}
