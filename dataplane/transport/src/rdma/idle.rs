//! Idle connections: whether their peers are still there, and whether they are on the right device.
//!
//! A device notices that its peer is gone when it sends something. So a connection on which nothing happens writes
//! nothing, zero bytes, now and then: the peer's device acknowledges that by itself, without its process, its memory
//! or a credit. Where it does not, the connection ends as with any other request.
//!
//! A connection that a peer was given on a device that only stands in for a preferred one ends when it is idle and a
//! preferred one works again: the peer connects anew.

use super::link::State;
use super::links::Links;
use super::nic::Nic;
use crate::types::CloseCause;

/// How often connections are looked at.
const LOOK_NS: u64 = 1_000_000_000;

/// Looks after idle connections, once in a while.
pub(super) struct IdleWatch {
    /// An idle connection's peer is asked for a sign of life after so long, and again after as long.
    keepalive_ns: u64,
    /// When they are looked at again.
    look_ns: u64,
}

impl IdleWatch {
    pub(super) const fn new(keepalive_ns: u64) -> Self {
        Self { keepalive_ns, look_ns: 0 }
    }

    /// Looks after them, if it is time; of the devices, so many of the first are preferred.
    pub(super) fn look(&mut self, links: &mut Links, preferred: usize, now_ns: u64) {
        if now_ns < self.look_ns {
            return;
        }
        self.look_ns = now_ns.saturating_add(LOOK_NS.min(self.keepalive_ns));
        let works = |nic: &Nic| nic.failed.is_none() && nic.port.is_some();
        let preferred = preferred.min(links.nics.len());
        let back = links.nics[..preferred].iter().any(works);
        for index in 0..links.table.positions() {
            let Some(link) = links.table.at_mut(index).filter(|link| link.state == State::Open) else { continue };
            let Some(since_ns) = link.look_at_idle(now_ns) else { continue };
            let stands_in = !link.asks && link.nic as usize >= preferred && preferred > 0;
            let id = links.table.id_at(index);
            if back && stands_in {
                links.close(id, CloseCause::Closed);
            } else if now_ns.saturating_sub(since_ns) >= self.keepalive_ns
                && let Some((link, _, books)) = links.parts(id)
            {
                match link.probe(now_ns) {
                    Ok(()) => books.counters.keepalives += 1,
                    Err(why) => links.close(id, CloseCause::Rdma(why)),
                }
            }
        }
    }
}
