//! Idle connections: whether their peers are still there, and whether they are on the right device.
//!
//! A device notices that its peer is gone when it sends something. So a connection on which nothing happens writes
//! nothing, zero bytes, now and then: the peer's device acknowledges that by itself, without its process, its memory
//! or a credit. Where it does not, the connection ends as with any other request.
//!
//! A connection that a peer was given on a device that only stands in for a preferred one ends when it is idle and a
//! preferred one works again: the peer connects anew.

use kvplane_sys::verbs::{Operation, Payload, Remote, Request};

use super::Rdma;
use super::link::{State, Work};
use crate::types::{CloseCause, ConnectionId};

/// How often connections are looked at.
const LOOK_NS: u64 = 1_000_000_000;

impl Rdma {
    /// Gives peers that connect one of the first so many devices, as long as one of those reaches them. 0: any.
    pub const fn prefer(&mut self, devices: usize) {
        self.preferred = devices;
    }

    /// Looks after idle connections, once in a while.
    pub(super) fn look_after_idle(&mut self) {
        let now_ns = self.now_ns;
        if now_ns < self.look_ns {
            return;
        }
        self.look_ns = now_ns.saturating_add(LOOK_NS.min(self.options.keepalive_ns));
        let works = |nic: &super::nic::Nic| nic.failed.is_none() && nic.port.is_some();
        let preferred = self.preferred.min(self.nics.len());
        let back = self.nics[..preferred].iter().any(works);
        for index in 0..self.links.len() {
            let Some(link) = self.links[index].as_deref_mut().filter(|link| link.state == State::Open) else {
                continue;
            };
            if !link.is_idle() {
                link.idle_since_ns = None;
                continue;
            }
            let id = ConnectionId { index: index as u32, generation: self.generations[index] };
            let since_ns = *link.idle_since_ns.get_or_insert(now_ns);
            if back && !link.asks && link.nic as usize >= preferred && preferred > 0 {
                self.close(id, CloseCause::Closed);
            } else if now_ns.saturating_sub(since_ns) >= self.options.keepalive_ns {
                link.idle_since_ns = Some(now_ns);
                let nothing = Operation::Write { to: Remote { address: 0, key: 0 } };
                let request = Request::new(Work::Nothing.to_bits(), nothing, Payload::Pieces(&[]));
                let queue_pair = &mut link.queue_pair;
                let sent = queue_pair.push(&request).map_err(|refusal| refusal.to_string());
                // Not by way of a flush: that would count as use, and keep it from being given up for another.
                let sent = sent.and_then(|()| queue_pair.flush(true).map_err(|error| error.to_string()));
                match sent {
                    Ok(_) => self.books.counters.keepalives += 1,
                    Err(why) => self.close(id, CloseCause::Rdma(why)),
                }
            }
        }
    }
}
