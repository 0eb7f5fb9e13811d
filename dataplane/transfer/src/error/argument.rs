//! Errors of arguments and settings.

use core::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use kvplane_mooncake::{ConnectionError, MalformedMatrix};
use kvplane_proto::message::SegmentError;
use kvplane_sys::device::DeviceId;
use kvplane_topology::rails::{MAX_MATRIX_BYTES, MatrixError};
use kvplane_topology::sysfs::SysfsError;

use crate::rails::rdma::DevicesError;
use crate::size::ParseBytesError;

/// Argument of a call, or setting of an engine, that is invalid.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ArgumentError {
    /// Memory of 0 bytes cannot be registered.
    EmptyMemory { address: u64 },
    /// The memory ends beyond the address space.
    MemoryTooLong { address: u64, bytes: u64 },
    /// The ranges of a request end beyond 2^64 bytes.
    RangesTooLong { request: usize },
    /// A request would write to memory that is read-only.
    ReadOnlyMemory { request: usize },
    /// A request would write to a file that was opened to be read only.
    ReadOnlyFile { request: usize, name: String },
    /// A request copies between devices of two vendors.
    TwoVendors { request: usize, to: &'static str, from: &'static str },
    /// The memory of a request was freed while it was registered.
    FreedMemory { request: usize, address: u64, bytes: u64 },
    /// Two requests read into the same memory.
    Overlap { first: usize, second: usize },
    /// The segment is not open, or was closed.
    SegmentNotOpen { handle: u32 },
    /// The segment is memory, not a file; `None` for the engine's own segment.
    NotFile { handle: Option<u32> },
    /// A file cannot receive a notice.
    NoticeToFile { name: String },
    /// The name of a file segment is malformed.
    FileName { name: String, why: FileNameError },
    /// File segments are switched off here.
    FilesOff { name: String },
    /// The file is open under another name, and both would write.
    FileOpenTwice { path: PathBuf, other: String },
    /// The location names neither a node nor a device.
    Location { location: String },
    /// The memory is elsewhere: on `actual`, or on the host for `None`.
    WrongLocation { location: String, address: u64, actual: Option<DeviceId> },
    /// The description of a peer's segment is malformed.
    Description { name: String, why: SegmentError },
    /// A segment of that name is found by a handshake, which has no authentication.
    NeedsHandshake { name: String, scheme: &'static str },
    /// The name belongs to a living engine.
    NameTaken { name: String, holder: String },
    /// The address of the metadata store is invalid.
    Metadata(ConnectionError),
    /// A session opens no files.
    FileInSession { name: String },
    /// The peer of a session does not speak the native protocol.
    ForeignInSession { name: String },
    /// The segment has no region of this number.
    NoRegion { region: usize, regions: usize },
    /// The data port would be open without authentication.
    OpenPort { listen: SocketAddr },
    /// The address cannot be announced to peers.
    NotAnnounced { listen: SocketAddr },
    /// The settings allow no path to any peer.
    NoPath,
    /// The number of initiators is out of range.
    Initiators { initiators: usize, most: usize },
    /// No batch could be in flight.
    NoBatches,
    /// The machine cannot be discovered, for which a rail matrix is given.
    Machine(SysfsError),
    /// The rail matrix is malformed or does not fit the machine; `None` for one that is given as text.
    RailMatrix { path: Option<PathBuf>, why: MatrixError },
    /// The file of the rail matrix cannot be read.
    RailMatrixFile { path: PathBuf, why: std::io::Error },
    /// The file of the rail matrix is too long.
    RailMatrixTooLong { path: PathBuf, bytes: u64 },
    /// RDMA is required, and there is no usable device.
    RdmaRequired(DevicesError),
    /// Named RDMA devices cannot be used.
    RdmaDevices { devices: Vec<String>, why: DevicesError },
    /// RDMA is to be announced, and there is no usable device.
    RdmaUnusable(DevicesError),
    /// Stock engines are not served here.
    NoStockPeers,
    /// The matrix for stock engines is malformed.
    StockMatrix(MalformedMatrix),
    /// The matrix for stock engines names a device that is not in use.
    StockMatrixDevice { device: String, devices: Vec<String> },
}

impl fmt::Display for ArgumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyMemory { address } => write!(f, "memory of 0 bytes at {address:#x} cannot be registered"),
            Self::MemoryTooLong { address, bytes } => {
                write!(f, "memory of {bytes} bytes at {address:#x} ends beyond the address space")
            }
            Self::RangesTooLong { request } => write!(f, "the ranges of request {request} end beyond 2^64 bytes"),
            Self::ReadOnlyMemory { request } => write!(f, "request {request} writes to memory that is read-only"),
            Self::ReadOnlyFile { request, name } => {
                write!(f, "request {request} writes to {name}, which was opened to be read only")
            }
            Self::TwoVendors { request, to, from } => write!(
                f,
                "request {request} copies between devices of two vendors ({to} and {from}), which have no common \
                 driver: copy through memory of the host"
            ),
            Self::FreedMemory { request, address, bytes } => write!(
                f,
                "request {request}: {bytes} bytes at {address:#x} were freed while they were registered: unregister \
                 memory before it is freed"
            ),
            Self::Overlap { first, second } => {
                write!(f, "requests {first} and {second} read into overlapping memory")
            }
            Self::SegmentNotOpen { handle } => write!(f, "segment {handle} is not open"),
            Self::NotFile { handle: Some(handle) } => write!(f, "segment {handle} is memory, not a file"),
            Self::NotFile { handle: None } => f.write_str("the local segment is memory, not a file"),
            Self::NoticeToFile { name } => write!(f, "{name} is a file, which cannot receive a notice"),
            Self::FileName { name, why } => write!(f, "the name {name:?}: {why}"),
            Self::FilesOff { name } => write!(f, "{name:?}: file segments are switched off here"),
            Self::FileOpenTwice { path, other } => write!(
                f,
                "{} is open as {other} already: writes of two segments to one block could get lost; close that \
                 segment, or add ?readonly",
                path.display()
            ),
            Self::Location { location } => {
                write!(f, "the location {location:?} is neither * nor cpu:N, cuda:N, hip:N or npu:N")
            }
            Self::WrongLocation { location, address, actual: None } => write!(
                f,
                "the location is {location}, but {address:#x} is memory of the host: register it as * or cpu:N"
            ),
            Self::WrongLocation { location, address, actual: Some(id) } => {
                write!(f, "the location is {location}, but {address:#x} is memory of {id}: register it as * or {id}")
            }
            Self::Description { name, why } => write!(f, "the description of segment {name} is malformed: {why}"),
            Self::NeedsHandshake { name, scheme } => write!(
                f,
                "segment {name:?} needs a handshake, which has no authentication: use a name that begins with \
                 {scheme:?}"
            ),
            Self::NameTaken { name, holder } => write!(
                f,
                "the name {name} belongs to a living engine at {holder}: use another name, or stop that engine first"
            ),
            Self::Metadata(why) => write!(f, "{why}"),
            Self::FileInSession { name } => write!(f, "{name} is a file: the engine opens it, not a session"),
            Self::ForeignInSession { name } => {
                write!(f, "{name} does not speak the native protocol, which a session needs")
            }
            Self::NoRegion { region, regions } => write!(f, "region {region} of a segment of {regions}"),
            Self::OpenPort { listen } => write!(
                f,
                "a data port on {listen} would be open without authentication: use a loopback address, or allow \
                 access from the network (open_to_network)"
            ),
            Self::NotAnnounced { listen } => write!(f, "{listen} cannot be announced to peers: set `announce`"),
            Self::NoPath => f.write_str("neither TCP nor shared memory (mapping, cma) is allowed: no path to any peer"),
            Self::Initiators { initiators, most } => write!(f, "{initiators} initiators: give from 1 to {most}"),
            Self::NoBatches => f.write_str("0 batches in flight: give at least 1"),
            Self::Machine(why) => write!(f, "{why}"),
            Self::RailMatrix { path: None, why } => write!(f, "the rail matrix: {why}"),
            Self::RailMatrix { path: Some(path), why } => write!(f, "{}: {why}", path.display()),
            Self::RailMatrixFile { path, why } => {
                write!(f, "cannot read the rail matrix {}: {why}", path.display())
            }
            Self::RailMatrixTooLong { path, bytes } => write!(
                f,
                "cannot read the rail matrix {}: it has {bytes} bytes, and at most {MAX_MATRIX_BYTES} are read",
                path.display()
            ),
            Self::RdmaRequired(why) => write!(f, "RDMA is required: {why}"),
            Self::RdmaDevices { devices, why } => write!(f, "the RDMA devices {}: {why}", devices.join(", ")),
            Self::RdmaUnusable(why) => write!(f, "RDMA cannot be used: {why}"),
            Self::NoStockPeers => f.write_str("stock engines are not served here (stock_peers)"),
            Self::StockMatrix(why) => write!(f, "{why}"),
            Self::StockMatrixDevice { device, devices } => {
                write!(f, "the matrix names {device}, but the devices in use are {}", devices.join(", "))
            }
        }
    }
}

impl std::error::Error for ArgumentError {}

/// Error of the name of a file segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum FileNameError {
    /// It has another scheme.
    Scheme,
    /// It names a host.
    Host,
    /// A `%` without digits.
    Percent,
    /// The path contains a byte of 0.
    Zero,
    /// The path is not absolute.
    Relative,
    /// The length of a new file is no size.
    Size(ParseBytesError),
    /// A new file has no bytes.
    Empty,
    /// The option does not exist.
    Option { option: String },
    /// A new file is to be read only.
    ReadOnly,
}

impl fmt::Display for FileNameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheme => f.write_str("it does not begin with file:"),
            Self::Host => f.write_str("it names a host; files of this host are named file:///path"),
            Self::Percent => f.write_str("a % is not followed by two hexadecimal digits; a % itself is written %25"),
            Self::Zero => f.write_str("a path cannot contain %00"),
            Self::Relative => f.write_str("the path is not absolute: begin it with /"),
            Self::Size(why) => write!(f, "create=: {why}"),
            Self::Empty => f.write_str("create= takes the length of a new file, at least 1 byte"),
            Self::Option { option } => {
                write!(f, "the option {option:?} is unknown; there are create=SIZE, readonly and buffered")
            }
            Self::ReadOnly => f.write_str("a new file that is read-only stays empty: leave out create or readonly"),
        }
    }
}

impl std::error::Error for FileNameError {}
