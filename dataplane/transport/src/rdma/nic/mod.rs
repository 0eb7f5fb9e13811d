//! An open device with what all its connections share: completions, receives, registered memory.

mod arena;
mod completions;
mod endpoints;
mod memory;
mod receives;

use std::os::fd::AsFd;
use std::sync::Arc;

use kvplane_sys::Poller;
use kvplane_sys::verbs::{
    AsyncEvent, Context, Device, GidEntry, PortAttributes, ProtectionDomain, QueuePair, QueuePairOptions, VerbsError,
};

use super::mixing::MixedMap;
use super::options::RdmaOptions;
use crate::token::{Source, Token};
use crate::types::CloseCause;
pub(super) use arena::{Arena, BOUNCE_BYTES};
pub(super) use completions::{Completions, POLLED};
pub(super) use endpoints::{EndpointId, Endpoints};
pub(super) use memory::{MemoryTable, access};
pub(super) use receives::Receives;

/// Pieces of memory of one request.
pub(super) const PIECES: usize = 8;
/// At the latest every so many requests one is announced by the device; the last of each flush is.
const SIGNAL_EVERY: u32 = 32;
/// Bytes that a request may carry inline: what is tried, in order.
const INLINE_BYTES: [u32; 3] = [220, 60, 0];

/// An open device.
pub(super) struct Nic {
    pub(super) context: Arc<Context>,
    pub(super) domain: ProtectionDomain,
    pub(super) completions: Completions,
    pub(super) receives: Receives,
    pub(super) arena: Arena,
    /// The memory of the host that is registered with it.
    pub(super) memory: MemoryTable,
    pub(super) endpoints: Endpoints,
    /// Links by the numbers of their queue pairs.
    pub(super) links: MixedMap<u32, u32>,
    /// The active port, and its addresses, the best first; none while it is down.
    pub(super) port: Option<(PortAttributes, Vec<GidEntry>)>,
    /// Why nothing works on it any more.
    pub(super) failed: Option<String>,
}

impl Nic {
    pub(super) fn open(device: &Device, options: &RdmaOptions) -> Result<Self, VerbsError> {
        let context = device.open()?;
        let domain = ProtectionDomain::new(&context)?;
        let limits = context.limits();
        let receives = options.receives.min(limits.shared_depth);
        let completions = receives.saturating_add(options.endpoints.saturating_mul(options.send_depth));
        let completions = completions.min(limits.completion_entries);
        let endpoints = completions.saturating_sub(receives) / options.send_depth.max(1);
        let mut nic = Self {
            endpoints: Endpoints::new(endpoints.min(limits.queue_pairs) as usize),
            memory: MemoryTable::new(&domain, options.regions),
            completions: Completions::new(&context, completions)?,
            receives: Receives::new(&domain, receives)?,
            arena: Arena::open(&domain, context.name(), receives, options)?,
            links: MixedMap::default(),
            port: None,
            failed: None,
            context,
            domain,
        };
        nic.look_at_port();
        nic.post_receives();
        Ok(nic)
    }

    /// Lets the poller tell of completions and events.
    pub(super) fn watch(&self, poller: &Poller, index: u32) -> std::io::Result<()> {
        let token = |source| Token { source, index, generation: 0 }.to_bits();
        let channel = self.completions.channel().as_fd();
        poller.add(channel, token(Source::RdmaCompletions), kvplane_sys::Interest::Readable)?;
        poller.add(self.context.as_fd(), token(Source::RdmaEvents), kvplane_sys::Interest::Readable)
    }

    /// Finds out whether the port is up, and how it is reached.
    pub(super) fn look_at_port(&mut self) {
        let port = self.context.active_port();
        self.port = port.and_then(|port| self.context.gids(port.port).map(|gids| (port, gids))).ok();
    }

    /// Why no connection can be made here, if none can.
    pub(super) fn obstacle(&self) -> Option<String> {
        match (&self.failed, &self.port) {
            (Some(why), _) => Some(why.clone()),
            (None, None) => Some(match self.context.active_port().and_then(|port| self.context.gids(port.port)) {
                Err(error) => error.to_string(),
                Ok(_) => format!("{} has just come back", self.context.name()),
            }),
            (None, Some(_)) => None,
        }
    }

    /// The next event; none when there is none, and an end of the device when it cannot be asked.
    pub(super) fn next_event(&mut self) -> Option<AsyncEvent> {
        if self.failed.is_some() {
            return None;
        }
        match self.context.next_event() {
            Ok(event) => event,
            Err(error) => {
                self.failed = Some(error.to_string());
                Some(AsyncEvent::DeviceFatal)
            }
        }
    }

    /// Posts all receives that are free, with one call.
    pub(super) fn post_receives(&mut self) {
        if let Err(error) = self.receives.post(&self.arena) {
            self.failed.get_or_insert_with(|| format!("{}: {error}", self.context.name()));
        }
    }

    /// Why a connection ends when the device refused something.
    pub(super) fn gone(&self, error: &impl std::fmt::Display) -> CloseCause {
        CloseCause::Rdma(format!("{}: {error}", self.context.name()))
    }

    /// A queue pair with as much room for inline bytes as the device gives.
    pub(super) fn queue_pair(&self, send_depth: u32) -> Result<QueuePair, VerbsError> {
        let pieces = self.context.limits().pieces.min(PIECES as u32);
        let mut result = Err(VerbsError::NotOffered { device: String::new(), what: "a queue pair" });
        for inline_bytes in INLINE_BYTES {
            let options = QueuePairOptions {
                send_depth,
                send_pieces: pieces,
                receive_depth: 0,
                receive_pieces: 1,
                inline_bytes,
                batch: send_depth,
                signal_every: SIGNAL_EVERY,
            };
            let (completions, receives) = (self.completions.queue(), self.receives.queue());
            result = QueuePair::new(&self.domain, completions, Some(receives), &options);
            if result.is_ok() {
                break;
            }
        }
        result
    }
}
