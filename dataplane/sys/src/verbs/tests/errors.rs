//! Error texts: the cause, the numbers, and the next step.

use super::super::error::VerbsError;
use super::super::{Refusal, memlock_limit_bytes};
use std::io;

#[test]
fn an_operator_learns_what_to_do() {
    let text = VerbsError::Memlock { bytes: 1 << 30, limit_bytes: Some(8 << 20) }.to_string();
    for part in ["1073741824", "8388608", "ulimit -l", "LimitMEMLOCK="] {
        assert!(text.contains(part), "{text}");
    }
    let text = VerbsError::Memlock { bytes: 1 << 30, limit_bytes: None }.to_string();
    assert!(!text.contains("ulimit"), "raising what is not limited does not help: {text}");
    let path = "/dev/infiniband/uverbs0".to_owned();
    let text = VerbsError::NoPermission { device: "mlx5_0".to_owned(), path }.to_string();
    assert!(text.contains("/dev/infiniband/uverbs0") && text.contains("group"), "{text}");
    let text = VerbsError::NoKernelSupport { source: io::Error::from_raw_os_error(libc::ENOSYS) }.to_string();
    assert!(text.contains("ib_uverbs"), "{text}");
    let text = VerbsError::NoGid { device: "mlx5_0".to_owned(), port: 1 }.to_string();
    assert!(text.contains("IP address"), "{text}");
    let text = VerbsError::UnknownDevice { name: "mlx5_9".to_owned(), known: Vec::new() }.to_string();
    assert!(text.contains("nor any other"), "{text}");
    assert!(Refusal::BatchFull.to_string().contains("flush"));
}

#[test]
fn the_limit_on_locked_memory_is_a_multiple_of_a_page_or_none() {
    assert!(memlock_limit_bytes().is_none_or(|bytes| bytes % 1024 == 0));
}
