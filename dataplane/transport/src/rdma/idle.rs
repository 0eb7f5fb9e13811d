//! Idle connections: keepalive, and return to preferred devices.
//!
//! A device detects a dead peer only when it sends. An idle connection therefore posts a zero-byte write now and then:
//! the peer's device acknowledges it without involving its process, memory or a credit. If it does not, the connection
//! fails as with any other request.
//!
//! A connection that a peer made to a device that only stands in for a preferred one is closed when it is idle and a
//! preferred device works again: the peer reconnects.

use super::link::State;
use super::links::Links;
use super::nic::Nic;
use crate::types::CloseCause;

/// Period of the check, in nanoseconds.
const LOOK_NS: u64 = 1_000_000_000;

/// Periodic check of idle connections.
pub(super) struct IdleWatch {
    /// Idle time after which a keepalive probe is sent, and its period after that, in nanoseconds.
    keepalive_ns: u64,
    /// Time of the next check, in nanoseconds.
    look_ns: u64,
}

impl IdleWatch {
    pub(super) const fn new(keepalive_ns: u64) -> Self {
        Self { keepalive_ns, look_ns: 0 }
    }

    /// Checks idle connections if it is time. The first `preferred` devices are preferred.
    #[inline]
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
                    Err(why) => links.close(id, why),
                }
            }
        }
    }
}
