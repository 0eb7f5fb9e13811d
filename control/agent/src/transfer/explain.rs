//! Why a peer is reached the way it is.

use std::path::Path;

use kvplane_mooncake::descriptor::TCP;
use kvplane_mooncake::{Descriptor, Native};

use super::TransferEngine;
use super::directory::is_here;
use super::file_name::is_file;
use super::open::DESCRIBE;
use super::rdma::RdmaUse;
use super::segment::{BufferInfo, SegmentHandle};
use crate::error::Error;

/// A way to a peer, and whether it is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TransportChoice {
    /// Its name.
    pub transport: &'static str,
    /// Whether transfers can take it. Of several, the first is preferred.
    pub usable: bool,
    /// Why, or why not.
    pub reason: String,
}

impl TransportChoice {
    pub(super) fn yes(transport: &'static str, reason: impl Into<String>) -> Self {
        Self { transport, usable: true, reason: reason.into() }
    }

    pub(super) fn no(transport: &'static str, reason: impl Into<String>) -> Self {
        Self { transport, usable: false, reason: reason.into() }
    }
}

impl TransferEngine {
    /// Every way to the engine of this name, the preferred one first among those that are open. Asks the peer for its
    /// descriptor, and opens its segment. For the name of a file it says how it would be read and written.
    ///
    /// # Errors
    /// When nobody answers under this name, or there is no such file.
    pub fn explain(&self, name: &str) -> Result<Vec<TransportChoice>, Error> {
        let name = name.trim_start_matches('/');
        if is_file(name) {
            return self.explain_file(name);
        }
        if name == self.name() {
            return Ok(vec![TransportChoice::yes("local", "it is this engine: bytes are copied within the process")]);
        }
        let descriptor = self.directory.find(name, DESCRIBE)?;
        let local = TransportChoice::no("local", "it is another engine");
        let Some(native) = self.directory.native_of(&descriptor) else {
            let why = match descriptor.native {
                None => "it is a stock Mooncake engine, which speaks its own protocol only",
                Some(_) => "our own protocol is switched off here",
            };
            let no = |transport| TransportChoice::no(transport, why);
            return Ok(vec![local, no("shm"), no("cma"), no("rdma"), no("tcp"), stock(&descriptor)]);
        };
        let opened = self.open_segment_no_cache(name);
        let buffers = match &opened {
            Ok(handle) => self.segment_info(*handle)?.buffers,
            Err(_) => Vec::new(),
        };
        if let Ok(handle) = opened
            && handle != SegmentHandle::LOCAL
        {
            self.close_segment(handle)?;
        }
        let unanswered = opened.err().map(|error| error.to_string());
        let mut choices = vec![local];
        choices.extend(self.same_host(native, &buffers));
        choices.push(self.config.rdma.explain(&self.config, native.tcp.is_some()));
        choices.push(match (&unanswered, native.tcp) {
            _ if self.config.rdma.mode == RdmaUse::Require => TransportChoice::no("tcp", "RDMA is required here"),
            _ if !self.config.tcp => TransportChoice::no("tcp", "it is switched off here"),
            (_, None) => TransportChoice::no("tcp", "the peer listens on no port"),
            (Some(why), Some(_)) => TransportChoice::no("tcp", why.clone()),
            (None, Some(address)) => {
                let lanes = self.config.lanes;
                TransportChoice::yes("tcp", format!("at {address}, {lanes} connections for each initiator"))
            }
        });
        choices.push(TransportChoice::no("mooncake", "it speaks our own protocol, which checks and retries"));
        Ok(choices)
    }

    fn same_host(&self, native: &Native, buffers: &[BufferInfo]) -> Vec<TransportChoice> {
        let why = if !self.config.shared_memory {
            Some("shared memory is switched off here".to_owned())
        } else if !is_here(native) {
            Some("it runs on another host".to_owned())
        } else if native.shm.is_empty() {
            Some("shared memory is switched off there".to_owned())
        } else if !Path::new(&native.shm).exists() {
            Some(format!("its socket {} is not to be seen from here", native.shm))
        } else {
            None
        };
        if let Some(why) = why {
            return vec![TransportChoice::no("shm", why.clone()), TransportChoice::no("cma", why)];
        }
        let mappable = buffers.iter().filter(|buffer| buffer.shareable).count();
        let shm = match (mappable, buffers.len()) {
            (_, 0) => TransportChoice::yes("shm", "on the same host; it has registered no memory yet"),
            (0, all) => TransportChoice::no("shm", format!("none of its {all} buffers can be mapped")),
            (some, all) => TransportChoice::yes("shm", format!("on the same host; {some} of {all} buffers are mapped")),
        };
        let rest = buffers.len() - mappable;
        let cma = format!("on the same host, process {}; for the {rest} buffers that cannot be mapped", native.pid);
        vec![shm, TransportChoice::yes("cma", cma)]
    }
}

fn stock(descriptor: &Descriptor) -> TransportChoice {
    if !descriptor.protocol.includes(TCP) || descriptor.tcp_data_port == 0 {
        return TransportChoice::no("mooncake", format!("it offers {:?} and no TCP", descriptor.protocol));
    }
    let (host, port) = (&descriptor.tcp_data_host, descriptor.tcp_data_port);
    let at = if host.is_empty() { &descriptor.name } else { host };
    let version = descriptor.tcp_proto_version;
    TransportChoice::yes("mooncake", format!("data protocol version {version} at {at}, port {port}"))
}
