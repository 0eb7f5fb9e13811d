//! Explanation of the path to a peer: every transport, probed where that is cheap, and the transport that is chosen for
//! each kind of memory.
//!
//! Settings are evaluated like an initiator does; the rest is probed: connections to the peer's socket and port, and
//! the kernel's permission to copy between the processes. The result holds for this process: another one may have other
//! rights.

use std::fmt;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use kvplane_client::Transport;
use kvplane_engine::{CrossError, Probe, probe};
use kvplane_mooncake::descriptor::{RDMA, TCP};
use kvplane_mooncake::{Descriptor, Native, Protocol};

use crate::config::TransferEngineConfig;
use crate::directory::Directory;
use crate::directory::paths::is_here;
use crate::driver::initiators::Initiators;
use crate::error::Error;
use crate::metrics::{Metrics, RailSnapshot};
use crate::rails::near::Theirs;
use crate::rails::rdma::RdmaUse;
use crate::rails::{MemoryRails, rank};
use crate::segment::{BufferInfo, SegmentHandle};
use crate::segments::file_name::is_file;
use crate::segments::{DESCRIBE, Segments};

/// Deadline of a connection probe.
const CONNECT: Duration = Duration::from_secs(2);

/// All transports, in order of preference.
const PREFERRED: [Transport; 8] = [
    Transport::Local,
    Transport::Shm,
    Transport::Cma,
    Transport::Rdma,
    Transport::Tcp,
    Transport::MooncakeRdma,
    Transport::Mooncake,
    Transport::File,
];

/// Role of a transport for a kind of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Use {
    /// Chosen.
    Chosen,
    /// Used when the transports before it fail.
    Fallback,
    /// Unusable, for this reason.
    No(String),
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::Fallback => f.write_str("used when those before it fail"),
            Self::No(why) => write!(f, "no: {why}"),
        }
    }
}

/// Transport, and its role for a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TransportChoice {
    /// Name of the transport.
    pub transport: &'static str,
    /// True if transfers can use it, for one kind of memory at least.
    pub usable: bool,
    /// Reason why it is usable or not.
    pub reason: String,
    /// Role for memory of the peer that can be mapped: memory that its owner allocated as shared.
    pub mapped: Use,
    /// Role for any other memory of the peer: arbitrary pointers.
    pub pointers: Use,
}

/// All transports to a peer, in order of preference.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Explanation {
    /// Transports.
    pub choices: Vec<TransportChoice>,
    /// Ranking of the rails for each pair of memory locations, where RDMA is usable.
    pub rails: Vec<MemoryRails>,
}

impl Explanation {
    /// Returns the transport chosen for memory that can be mapped; `None` when the peer is unreachable.
    #[must_use]
    pub fn for_mapped(&self) -> Option<&'static str> {
        self.choices.iter().find(|one| one.mapped == Use::Chosen).map(|one| one.transport)
    }

    /// Returns the transport chosen for any other memory.
    #[must_use]
    pub fn for_pointers(&self) -> Option<&'static str> {
        self.choices.iter().find(|one| one.pointers == Use::Chosen).map(|one| one.transport)
    }

    /// Builds an explanation from the probed transports, each with its description or the obstacle. All others are
    /// unusable because of the kind of peer, `peer`.
    pub(crate) fn new(peer: &str, found: &[(Transport, Result<String, String>)]) -> Self {
        let (mut mapped, mut pointers) = (false, false);
        let explain = |(transport, result): (Transport, Result<String, String>)| {
            let reason = result.clone().unwrap_or_else(|why| why);
            let used = |taken: &mut bool, obstacle: Option<&str>| match (&result, obstacle) {
                (Err(why), _) => Use::No(why.clone()),
                (Ok(_), Some(obstacle)) => Use::No(obstacle.to_owned()),
                (Ok(_), None) if core::mem::replace(taken, true) => Use::Fallback,
                (Ok(_), None) => Use::Chosen,
            };
            let unmapped = (transport == Transport::Shm).then_some("only memory allocated as shared can be mapped");
            let (mapped, pointers) = (used(&mut mapped, None), used(&mut pointers, unmapped));
            TransportChoice { transport: transport.name(), usable: result.is_ok(), reason, mapped, pointers }
        };
        let result_of = |transport: Transport| {
            let known = found.iter().find(|(other, _)| *other == transport).map(|(_, result)| result.clone());
            (transport, known.unwrap_or_else(|| Err(peer.to_owned())))
        };
        Self { choices: PREFERRED.into_iter().map(result_of).map(explain).collect(), rails: Vec::new() }
    }
}

/// Parts of an engine that decide how a peer is reached, to explain it.
pub(crate) struct Explainer<'a> {
    pub(crate) config: &'a TransferEngineConfig,
    pub(crate) directory: &'a Directory,
    pub(crate) segments: &'a Segments,
    pub(crate) initiators: &'a Initiators,
}

impl Explainer<'_> {
    /// Explains the paths to the engine, or the file, of this name: see
    /// [`TransferEngine::explain`](crate::TransferEngine::explain).
    pub(crate) fn explain(&self, name: &str) -> Result<Explanation, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            let how = self.segments.explain_file(name)?;
            return Ok(Explanation::new("it is a file", &[(Transport::File, Ok(how))]));
        }
        if name == self.directory.name() {
            let how = "bytes are copied within the process, by the calling thread".to_owned();
            return Ok(Explanation::new("it is this engine", &[(Transport::Local, Ok(how))]));
        }
        let descriptor = self.directory.find(name, DESCRIBE)?;
        let Some(native) = self.directory.paths().native_of(&descriptor) else {
            let why = match descriptor.native {
                None => "it is a stock Mooncake engine, which speaks its own protocol only",
                Some(_) => "the native protocol is switched off here (native)",
            };
            let rdma = self.stock_rdma(&descriptor);
            let tcp = match rdma {
                Ok(_) => Err("it is reached over RDMA".to_owned()),
                Err(_) => self.stock(&descriptor),
            };
            return Ok(Explanation::new(why, &[(Transport::MooncakeRdma, rdma), (Transport::Mooncake, tcp)]));
        };
        let opened = self.segments.open_no_cache(name);
        let buffers = match &opened {
            Ok(handle) => self.segments.info(*handle)?.buffers,
            Err(_) => Vec::new(),
        };
        let asked = opened.is_ok();
        let unavailable = |ways: &[Transport]| asked.then(|| self.unavailable(name, ways)).flatten();
        let unavailable = [unavailable(&[Transport::Shm, Transport::Cma]), unavailable(&[Transport::Rdma])];
        if let Ok(handle) = opened
            && handle != SegmentHandle::LOCAL
        {
            self.segments.close(handle)?;
        }
        let refused = opened.err().map(|error| error.to_string());
        let reason = |unavailable| refused.as_deref().or(unavailable);
        let (shm, cma) = self.same_host(native, &buffers, reason(unavailable[0].as_deref()));
        let rdma = self.devices(native, reason(unavailable[1].as_deref()));
        let tcp = self.stream(native, refused.as_deref());
        let own = "it speaks the native protocol, which has checksums and retries".to_owned();
        let ways = [
            (Transport::Local, Err("it is another engine".to_owned())),
            (Transport::Shm, shm),
            (Transport::Cma, cma),
            (Transport::Rdma, rdma),
            (Transport::Tcp, tcp),
            (Transport::MooncakeRdma, Err(own.clone())),
            (Transport::Mooncake, Err(own)),
        ];
        let rails = if ways[3].1.is_ok() { self.ranked_rails(&descriptor) } else { Vec::new() };
        Ok(Explanation { rails, ..Explanation::new("it is an engine, not a file", &ways) })
    }

    /// Returns the rails to the peer of this descriptor for every pair of locations.
    fn ranked_rails(&self, descriptor: &Descriptor) -> Vec<MemoryRails> {
        rank(self.directory.publication().near(), &self.initiators.devices(), &Theirs::of(descriptor))
    }

    /// Returns the reason why these transports do not lead to a peer that was just opened, if so.
    fn unavailable(&self, name: &str, ways: &[Transport]) -> Option<String> {
        let wanted = |rail: &RailSnapshot| ways.contains(&rail.transport) && rail.peer == name;
        let mut metrics = Metrics::default();
        self.initiators.add_to(&mut metrics, self.directory.name());
        let mut rails = metrics.rails.into_iter().filter(wanted);
        let why = rails.find_map(|rail| rail.reason)?;
        Some(format!("it does not lead to the peer from here: {why}"))
    }

    /// Returns the reason why there is no socket for shared memory, if so.
    fn no_socket(&self, native: &Native) -> Option<String> {
        if !self.config.shared_memory {
            Some("shared memory is switched off here (shared_memory)".to_owned())
        } else if !is_here(native) {
            Some("it runs on another host".to_owned())
        } else if native.shm.is_empty() {
            Some("shared memory is switched off there".to_owned())
        } else if !Path::new(&native.shm).exists() {
            Some(format!("its socket {} is not visible from here, as in another container", native.shm))
        } else {
            None
        }
    }

    /// Probes shared-memory mapping and CMA.
    fn same_host(
        &self,
        native: &Native,
        buffers: &[BufferInfo],
        refused: Option<&str>,
    ) -> (Result<String, String>, Result<String, String>) {
        let off = |on: bool, what: &str| if on { Ok(()) } else { Err(format!("it is switched off here ({what})")) };
        let (mapping, cma) = (off(self.config.mapping, "mapping"), off(self.config.cma, "cma"));
        let found = match self.no_socket(native).or_else(|| refused.map(str::to_owned)) {
            Some(why) => Err(why),
            None => probe(&native.shm).map_err(|error| error.to_string()),
        };
        let found = match found {
            Ok(found) => found,
            Err(why) => return (Err(why.clone()), Err(why)),
        };
        let mappable = buffers.iter().filter(|buffer| buffer.shareable).count();
        let all = buffers.len();
        let count = match (mappable, all) {
            (_, 0) => "it has registered no memory yet".to_owned(),
            _ => format!("{mappable} of its {all} buffers can be mapped"),
        };
        let shm = mapping.map(|()| format!("on the same host, process {}; {count}", native.pid));
        (shm, cma.and_then(|()| permitted(&found)))
    }

    /// Probes the native protocol over RDMA.
    fn devices(&self, native: &Native, refused: Option<&str>) -> Result<String, String> {
        let names = self.config.rdma.usable()?;
        native.tcp.ok_or("the peer listens on no TCP port, which RDMA needs for its setup")?;
        match refused {
            Some(why) => Err(why.to_owned()),
            None => {
                let lanes = self.config.lanes;
                Ok(format!("from {names}, where the peer has devices too; {lanes} connections of each"))
            }
        }
    }

    /// Probes the native protocol over TCP.
    fn stream(&self, native: &Native, refused: Option<&str>) -> Result<String, String> {
        if self.config.rdma.mode == RdmaUse::Require {
            return Err("RDMA is required here (rdma)".to_owned());
        }
        let shared = self.no_socket(native).is_none() && (self.config.mapping || self.config.cma);
        if !self.config.tcp && (shared || self.config.rdma.usable().is_ok()) {
            return Err("it is switched off here (tcp)".to_owned());
        }
        let address = native.tcp.ok_or("the peer listens on no port")?;
        if let Some(why) = refused {
            return Err(why.to_owned());
        }
        connect(address)?;
        let lanes = self.config.lanes;
        let anyway = if self.config.tcp { "" } else { "switched off here (tcp), but there is no other way: " };
        Ok(format!("{anyway}at {address}, {lanes} connections for each initiator"))
    }

    /// Probes RDMA access to a stock engine's memory.
    fn stock_rdma(&self, descriptor: &Descriptor) -> Result<String, String> {
        if !descriptor.protocol.includes(RDMA) {
            return Err(format!("it offers {:?} and no RDMA", descriptor.protocol));
        }
        let names = self.config.rdma.usable()?;
        let said = descriptor.rdma().map_err(|error| error.to_string())?;
        let theirs: Vec<&str> = said.devices.iter().map(|device| device.name.as_str()).collect();
        Ok(format!("from {names} to its {}; {} connections of each", theirs.join(", "), self.config.lanes))
    }

    /// Probes the TCP protocol of stock engines.
    fn stock(&self, descriptor: &Descriptor) -> Result<String, String> {
        if descriptor.tcp_data_port == 0 {
            return Err(format!("it offers {:?} and no TCP", descriptor.protocol));
        }
        // Treated as a stock TCP engine even where it offers more.
        let protocol = Protocol::One(TCP.to_owned());
        let plain = Descriptor { native: None, protocol, ..descriptor.clone() };
        let address = self.directory.paths().address_of(&plain, DESCRIBE).map_err(|error| error.to_string())?.tcp;
        connect(address)?;
        Ok(format!("data protocol version {} at {address}", descriptor.tcp_proto_version))
    }
}

fn connect(address: SocketAddr) -> Result<(), String> {
    match TcpStream::connect_timeout(&address, CONNECT) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{address} does not answer: {error}")),
    }
}

/// Returns the result of the kernel's trial copy.
fn permitted(found: &Probe) -> Result<String, String> {
    let pid = found.pid;
    match &found.cma {
        Ok(()) => Ok(format!("on the same host; a trial copy from and to process {pid} succeeded")),
        Err(_) if pid <= 0 => Err("its process is not visible from here: another pid namespace?".to_owned()),
        Err(error @ CrossError::Denied) => {
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            Err(match scope.trim() {
                "" | "0" => format!("process {pid}: {error}"),
                scope => format!("process {pid}: {error}; kernel.yama.ptrace_scope is {scope}"),
            })
        }
        Err(error) => Err(format!("process {pid}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_open_transport_is_chosen_and_every_other_has_a_reason() {
        let ok = |text: &str| Ok(text.to_owned());
        let no = |text: &str| Err(text.to_owned());
        let uses = |found: &Explanation, transport: &str| {
            let choice = found.choices.iter().find(|one| one.transport == transport).unwrap();
            (choice.usable, choice.mapped.to_string(), choice.pointers.to_string())
        };
        let names = ["local", "shm", "cma", "rdma", "tcp", "mooncake-rdma", "mooncake", "file"];
        let ways = [(Transport::Tcp, ok("port")), (Transport::Shm, ok("mapped")), (Transport::Cma, ok("tried"))];
        let all = Explanation::new("a peer", &ways);
        assert_eq!(all.choices.iter().map(|one| one.transport).collect::<Vec<_>>(), names);
        assert_eq!((all.for_mapped(), all.for_pointers()), (Some("shm"), Some("cma")));
        let later = "used when those before it fail".to_owned();
        let never = "no: only memory allocated as shared can be mapped".to_owned();
        assert_eq!(uses(&all, "shm"), (true, "chosen".to_owned(), never));
        assert_eq!(uses(&all, "cma"), (true, later.clone(), "chosen".to_owned()));
        assert_eq!(uses(&all, "tcp"), (true, later.clone(), later));
        assert_eq!(uses(&all, "file"), (false, "no: a peer".to_owned(), "no: a peer".to_owned()));
        let denied = Explanation::new("", &[(Transport::Shm, ok("")), (Transport::Cma, no("x")), ways[0].clone()]);
        assert_eq!((denied.for_mapped(), denied.for_pointers()), (Some("shm"), Some("tcp")));
        assert_eq!(uses(&denied, "cma").2, "no: x");
        let none = Explanation::new("", &[(Transport::Shm, ok(""))]);
        assert_eq!((none.for_mapped(), none.for_pointers()), (Some("shm"), None));
    }

    #[test]
    fn kernel_errors_are_passed_on() {
        let found = |pid, cma| permitted(&Probe { pid, cma });
        assert!(found(7, Ok(())).unwrap().contains("process 7"));
        assert!(found(7, Err(CrossError::Denied)).unwrap_err().contains("ptrace permission"));
        assert!(found(7, Err(CrossError::Gone)).unwrap_err().contains("gone"));
        assert!(found(0, Err(CrossError::Gone)).unwrap_err().contains("not visible"));
    }
}
