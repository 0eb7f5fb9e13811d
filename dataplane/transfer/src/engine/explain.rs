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
use std::sync::Arc;
use std::time::Duration;

use kvplane_client::Transport;
use kvplane_engine::{CrossError, DeviceRegistration, Probe, probe};
use kvplane_mooncake::descriptor::{RDMA, TCP};
use kvplane_mooncake::{Descriptor, Native, Protocol};

use crate::config::TransferEngineConfig;
use crate::directory::Directory;
use crate::directory::paths::is_here;
use crate::driver::initiators::Initiators;
use crate::engine::obstacle::Obstacle;
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
    /// Registrations of this engine's device memory with its RDMA devices, where RDMA is usable.
    pub registrations: Vec<DeviceRegistration>,
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
    pub(crate) fn new(peer: &'static str, found: &[(Transport, Result<String, Obstacle>)]) -> Self {
        let (mut mapped, mut pointers) = (false, false);
        let explain = |transport: Transport| {
            let known = found.iter().find(|(other, _)| *other == transport);
            let (usable, reason) = match known {
                Some((_, Ok(how))) => (true, how.clone()),
                Some((_, Err(why))) => (false, why.to_string()),
                None => (false, Obstacle::Peer { kind: peer }.to_string()),
            };
            let used = |taken: &mut bool, obstacle: Option<&str>| match obstacle {
                _ if !usable => Use::No(reason.clone()),
                Some(obstacle) => Use::No(obstacle.to_owned()),
                None if core::mem::replace(taken, true) => Use::Fallback,
                None => Use::Chosen,
            };
            let unmapped = (transport == Transport::Shm).then_some("only memory allocated as shared can be mapped");
            let (mapped, pointers) = (used(&mut mapped, None), used(&mut pointers, unmapped));
            TransportChoice { transport: transport.name(), usable, reason, mapped, pointers }
        };
        Self { choices: PREFERRED.into_iter().map(explain).collect(), rails: Vec::new(), registrations: Vec::new() }
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
                Ok(_) => Err(Obstacle::Peer { kind: "it is reached over RDMA" }),
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
        let host = unavailable(&[Transport::Shm, Transport::Cma]).map(Arc::new);
        let rdma = unavailable(&[Transport::Rdma]).map(Arc::new);
        if let Ok(handle) = opened
            && handle != SegmentHandle::LOCAL
        {
            self.segments.close(handle)?;
        }
        let refused = opened.err().map(|error| Arc::new(Obstacle::NotOpened(error)));
        let (shm, cma) = self.same_host(native, &buffers, refused.as_ref().or(host.as_ref()));
        let rdma = self.devices(native, refused.as_ref().or(rdma.as_ref()));
        let tcp = self.stream(native, refused.as_ref());
        let own = || Err(Obstacle::Peer { kind: "it speaks the native protocol, which has checksums and retries" });
        let ways = [
            (Transport::Local, Err(Obstacle::Peer { kind: "it is another engine" })),
            (Transport::Shm, shm),
            (Transport::Cma, cma),
            (Transport::Rdma, rdma),
            (Transport::Tcp, tcp),
            (Transport::MooncakeRdma, own()),
            (Transport::Mooncake, own()),
        ];
        let explanation = Explanation::new("it is an engine, not a file", &ways);
        if ways[3].1.is_err() {
            return Ok(explanation);
        }
        let (rails, registrations) = (self.ranked_rails(&descriptor), self.initiators.device_registrations());
        Ok(Explanation { rails, registrations, ..explanation })
    }

    /// Returns the rails to the peer of this descriptor for every pair of locations.
    fn ranked_rails(&self, descriptor: &Descriptor) -> Vec<MemoryRails> {
        rank(self.directory.publication().near(), &self.initiators.devices(), &Theirs::of(descriptor))
    }

    /// Returns the reason why these transports do not lead to a peer that was just opened, if so.
    fn unavailable(&self, name: &str, ways: &[Transport]) -> Option<Obstacle> {
        let wanted = |rail: &RailSnapshot| ways.contains(&rail.transport) && rail.peer == name;
        let mut metrics = Metrics::default();
        self.initiators.add_to(&mut metrics, self.directory.name());
        let mut rails = metrics.rails.into_iter().filter(wanted);
        rails.find_map(|rail| rail.reason).map(|why| Obstacle::Unreachable { why })
    }

    /// Returns the reason why there is no socket for shared memory, if so.
    fn no_socket(&self, native: &Native) -> Option<Obstacle> {
        if !self.config.shared_memory {
            Some(Obstacle::NoSharedMemory)
        } else if !is_here(native) {
            Some(Obstacle::OtherHost)
        } else if native.shm.is_empty() {
            Some(Obstacle::NoSharedMemoryThere)
        } else if !Path::new(&native.shm).exists() {
            Some(Obstacle::HiddenSocket { path: native.shm.clone() })
        } else {
            None
        }
    }

    /// Probes shared-memory mapping and CMA.
    fn same_host(
        &self,
        native: &Native,
        buffers: &[BufferInfo],
        refused: Option<&Arc<Obstacle>>,
    ) -> (Result<String, Obstacle>, Result<String, Obstacle>) {
        let off = |on: bool, setting| if on { Ok(()) } else { Err(Obstacle::Off { setting }) };
        let (mapping, cma) = (off(self.config.mapping, "mapping"), off(self.config.cma, "cma"));
        let found = match (self.no_socket(native), refused) {
            (Some(why), _) => Err(Arc::new(why)),
            (None, Some(why)) => Err(Arc::clone(why)),
            (None, None) => probe(&native.shm).map_err(|source| Arc::new(Obstacle::Socket { source })),
        };
        let found = match found {
            Ok(found) => found,
            Err(why) => return (Err(Obstacle::Common(Arc::clone(&why))), Err(Obstacle::Common(why))),
        };
        let mappable = buffers.iter().filter(|buffer| buffer.shareable).count();
        let all = buffers.len();
        let count = match (mappable, all) {
            (_, 0) => "it has registered no memory yet".to_owned(),
            _ => format!("{mappable} of its {all} buffers can be mapped"),
        };
        let shm = mapping.map(|()| format!("on the same host, process {}; {count}", native.pid));
        (shm, cma.and_then(|()| permitted(found)))
    }

    /// Probes the native protocol over RDMA.
    fn devices(&self, native: &Native, refused: Option<&Arc<Obstacle>>) -> Result<String, Obstacle> {
        let names = self.config.rdma.usable().map_err(Obstacle::Rdma)?;
        native.tcp.ok_or(Obstacle::NoSetupPort)?;
        match refused {
            Some(why) => Err(Obstacle::Common(Arc::clone(why))),
            None => {
                let lanes = self.config.lanes;
                Ok(format!("from {names}, where the peer has devices too; {lanes} connections of each"))
            }
        }
    }

    /// Probes the native protocol over TCP.
    fn stream(&self, native: &Native, refused: Option<&Arc<Obstacle>>) -> Result<String, Obstacle> {
        if self.config.rdma.mode == RdmaUse::Require {
            return Err(Obstacle::RdmaRequired);
        }
        let shared = self.no_socket(native).is_none() && (self.config.mapping || self.config.cma);
        if !self.config.tcp && (shared || self.config.rdma.usable().is_ok()) {
            return Err(Obstacle::Off { setting: "tcp" });
        }
        let address = native.tcp.ok_or(Obstacle::NoPort)?;
        if let Some(why) = refused {
            return Err(Obstacle::Common(Arc::clone(why)));
        }
        connect(address)?;
        let lanes = self.config.lanes;
        let anyway = if self.config.tcp { "" } else { "switched off here (tcp), but there is no other way: " };
        Ok(format!("{anyway}at {address}, {lanes} connections for each initiator"))
    }

    /// Probes RDMA access to a stock engine's memory.
    fn stock_rdma(&self, descriptor: &Descriptor) -> Result<String, Obstacle> {
        if !descriptor.protocol.includes(RDMA) {
            return Err(Obstacle::NotOffered { offered: descriptor.protocol.clone(), missing: "RDMA" });
        }
        let names = self.config.rdma.usable().map_err(Obstacle::Rdma)?;
        let said = descriptor.rdma().map_err(Obstacle::Descriptor)?;
        let theirs: Vec<&str> = said.devices.iter().map(|device| device.name.as_str()).collect();
        Ok(format!("from {names} to its {}; {} connections of each", theirs.join(", "), self.config.lanes))
    }

    /// Probes the TCP protocol of stock engines.
    fn stock(&self, descriptor: &Descriptor) -> Result<String, Obstacle> {
        if descriptor.tcp_data_port == 0 {
            return Err(Obstacle::NotOffered { offered: descriptor.protocol.clone(), missing: "TCP" });
        }
        // Treated as a stock TCP engine even where it offers more.
        let protocol = Protocol::One(TCP.to_owned());
        let plain = Descriptor { native: None, protocol, ..descriptor.clone() };
        let address = self.directory.paths().address_of(&plain, DESCRIBE).map_err(Obstacle::NoAddress)?.tcp;
        connect(address)?;
        Ok(format!("data protocol version {} at {address}", descriptor.tcp_proto_version))
    }
}

fn connect(address: SocketAddr) -> Result<(), Obstacle> {
    match TcpStream::connect_timeout(&address, CONNECT) {
        Ok(_) => Ok(()),
        Err(source) => Err(Obstacle::NoAnswer { address, source }),
    }
}

/// Returns the result of the kernel's trial copy.
fn permitted(found: Probe) -> Result<String, Obstacle> {
    let pid = found.pid;
    match found.cma {
        Ok(()) => Ok(format!("on the same host; a trial copy from and to process {pid} succeeded")),
        Err(_) if pid <= 0 => Err(Obstacle::HiddenProcess),
        Err(source @ CrossError::Denied) => {
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            let ptrace_scope = Some(scope.trim().to_owned()).filter(|scope| !matches!(scope.as_str(), "" | "0"));
            Err(Obstacle::NotCopied { pid, source, ptrace_scope })
        }
        Err(source) => Err(Obstacle::NotCopied { pid, source, ptrace_scope: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_open_transport_is_chosen_and_every_other_has_a_reason() {
        let ok = |text: &str| Ok(text.to_owned());
        let no = |kind| Err(Obstacle::Peer { kind });
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
        let denied =
            Explanation::new("", &[(Transport::Shm, ok("")), (Transport::Cma, no("x")), (Transport::Tcp, ok("port"))]);
        assert_eq!((denied.for_mapped(), denied.for_pointers()), (Some("shm"), Some("tcp")));
        assert_eq!(uses(&denied, "cma").2, "no: x");
        let none = Explanation::new("", &[(Transport::Shm, ok(""))]);
        assert_eq!((none.for_mapped(), none.for_pointers()), (Some("shm"), None));
    }

    #[test]
    fn kernel_errors_are_passed_on() {
        let found = |pid, cma| permitted(Probe { pid, cma });
        assert!(found(7, Ok(())).unwrap().contains("process 7"));
        assert!(found(7, Err(CrossError::Denied)).unwrap_err().to_string().contains("ptrace permission"));
        assert!(found(7, Err(CrossError::Gone)).unwrap_err().to_string().contains("gone"));
        assert!(found(0, Err(CrossError::Gone)).unwrap_err().to_string().contains("not visible"));
    }
}
