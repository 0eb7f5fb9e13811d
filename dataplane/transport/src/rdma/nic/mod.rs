//! An open device and the state that all its connections share: completions, receives, registered memory.

mod arena;
mod completions;
mod device_memory;
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
pub(super) use device_memory::{DeviceRegions, ExportedMemory, PieceSizes};
pub use device_memory::{ObstacleKind, RegistrationObstacle, RegistrationPath};
pub(super) use endpoints::{EndpointId, Endpoints};
pub(super) use memory::{MemoryTable, access};
pub(super) use receives::Receives;

/// Limit of scatter/gather entries of one request.
pub(super) const PIECES: usize = 8;
/// Signalling period: at least every n-th request is signalled; the last of each flush always is.
const SIGNAL_EVERY: u32 = 32;
/// Inline sizes in bytes, tried in this order.
const INLINE_BYTES: [u32; 3] = [220, 60, 0];

/// An open device.
pub(super) struct Nic {
    pub(super) context: Arc<Context>,
    pub(super) domain: ProtectionDomain,
    pub(super) completions: Completions,
    pub(super) receives: Receives,
    pub(super) arena: Arena,
    /// Registered memory.
    pub(super) memory: MemoryTable,
    /// Largest pieces in which it may accept memory of devices.
    pub(super) piece_sizes: PieceSizes,
    pub(super) endpoints: Endpoints,
    /// Links by queue pair number.
    pub(super) links: MixedMap<u32, u32>,
    /// Active port and its addresses, the best first; `None` while it is down.
    pub(super) port: Option<(PortAttributes, Vec<GidEntry>)>,
    /// Reason why the device is unusable, if it has failed.
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
            piece_sizes: PieceSizes::default(),
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

    /// Registers the completion channel and the asynchronous events with the poller.
    pub(super) fn watch(&self, poller: &Poller, index: u32) -> std::io::Result<()> {
        let token = |source| Token { source, index, generation: 0 }.to_bits();
        let channel = self.completions.channel().as_fd();
        poller.add(channel, token(Source::RdmaCompletions), kvplane_sys::Interest::Readable)?;
        poller.add(self.context.as_fd(), token(Source::RdmaEvents), kvplane_sys::Interest::Readable)
    }

    /// Queries whether the port is active, and its addresses.
    pub(super) fn look_at_port(&mut self) {
        let port = self.context.active_port();
        self.port = port.and_then(|port| self.context.gids(port.port).map(|gids| (port, gids))).ok();
    }

    /// Returns the reason why no connection can be made over this device, if there is one.
    pub(super) fn obstacle(&self) -> Option<String> {
        match (&self.failed, &self.port) {
            (Some(why), _) => Some(why.clone()),
            (None, None) => Some(match self.context.active_port().and_then(|port| self.context.gids(port.port)) {
                Err(error) => error.to_string(),
                Ok(_) => format!("the port of {} has just become active: retry", self.context.name()),
            }),
            (None, Some(_)) => None,
        }
    }

    /// Returns the next asynchronous event, or `None`. A failed query marks the device as failed.
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

    /// Posts all free receives, with one call.
    pub(super) fn post_receives(&mut self) {
        if let Err(error) = self.receives.post(&self.arena) {
            self.failed.get_or_insert_with(|| format!("{}: {error}", self.context.name()));
        }
    }

    /// Returns the close cause of a connection after an error of the device.
    pub(super) fn gone(&self, error: &impl std::fmt::Display) -> CloseCause {
        CloseCause::Rdma(format!("{}: {error}", self.context.name()))
    }

    /// Creates a queue pair with the largest inline size that the device supports.
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
