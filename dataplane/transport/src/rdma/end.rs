//! The end of a connection: first the device lets go of everything, then the host is told.
//!
//! A queue pair that is to end goes to its error state: the device takes nothing more for it, from us or from the peer,
//! and gives back what it had as completions. When all are there the queue pair is destroyed, and only then are copies,
//! holds and the end itself reported. A device that does not answer any more is not waited for: destroying a queue pair
//! ends its requests too.

use kvplane_proto::Status as Outcome;

use super::Rdma;
use super::foreign::forget_spares;
use super::link::{Expect, Link, State, Work};
use crate::types::{CloseCause, ConnectionId, Event};

/// How long completions are waited for.
const DRAIN_NS: u64 = 1_000_000_000;
/// How long the device's word is waited for that the last receive was reported, when all else is over.
const LAST_RECEIVE_NS: u64 = 20_000_000;

impl Rdma {
    /// Ends a connection. [`Event::Gone`] follows when the device holds nothing of it any more.
    pub fn close(&mut self, id: ConnectionId, why: CloseCause) {
        let Some((link, _, _)) = self.parts(id) else { return };
        if link.state == State::Closing {
            return;
        }
        let connected = link.state == State::Open;
        link.state = State::Closing;
        link.why = Some(why);
        // Where the device refuses, the end of the queue pair is the end of all that was posted.
        let _ = link.queue_pair.fail();
        if connected {
            self.closing.push(id.index);
        } else {
            self.finish(id.index);
        }
    }

    /// Sends what is queued, then closes: for a refusal that the peer should read.
    pub fn close_after_sending(&mut self, id: ConnectionId, why: CloseCause) {
        let Some((link, _, _)) = self.parts(id) else { return };
        if link.state != State::Open || link.is_sent() && link.queue_pair.outstanding() == 0 {
            self.close(id, why);
        } else if link.closing_after_send.is_none() {
            link.closing_after_send = Some(why);
            self.mark_dirty(id.index);
        }
    }

    /// Ends what has been given back. Whether anything was.
    pub(super) fn see_off(&mut self) -> bool {
        let now_ns = self.now_ns;
        let closing = core::mem::take(&mut self.closing);
        let before = closing.len();
        for index in closing {
            let Some(link) = self.links[index as usize].as_deref_mut() else { continue };
            let since_ns = *link.closing_since_ns.get_or_insert(now_ns);
            let nic = &self.nics[link.nic as usize];
            let waited_ns = now_ns.saturating_sub(since_ns);
            // With the queue pair go its completions, among them those of receives that others wait for.
            let drained = link.queue_pair.outstanding() == 0
                && nic.emptied
                && (link.last_receive || waited_ns >= LAST_RECEIVE_NS);
            if drained || waited_ns >= DRAIN_NS || nic.failed.is_some() && link.queue_pair.outstanding() == 0 {
                self.finish(index);
            } else {
                self.closing.push(index);
            }
        }
        self.closing.len() != before
    }

    /// The queue pair is destroyed and everything that it held reported.
    pub(super) fn finish(&mut self, index: u32) {
        let Some(link) = self.links[index as usize].take() else { return };
        let id = ConnectionId { index, generation: self.generations[index as usize] };
        let nic = &mut self.nics[link.nic as usize];
        nic.links.remove(&link.queue_pair.qp_num());
        forget_spares(&mut nic.links, link.foreign.as_deref());
        nic.endpoints.remove(link.endpoint);
        nic.granted -= u32::from(link.grant);
        let Link { queue_pair, inbox, frames, lent, waiting, expect, why, .. } = *link;
        let copied = &mut self.books.copied;
        queue_pair.close(|retired| match Work::from_bits(retired.token) {
            Work::Slot(slot) => nic.free_slot(slot),
            Work::Copy(token) => copied.push(id, token, Err(Outcome::Unreachable)),
            _ => {}
        });
        for (_, receive) in inbox {
            nic.repost(receive);
        }
        if let Expect::Pull(pull) = expect
            && let Some((bounce, _)) = pull.bounce
        {
            nic.free_bounce(bounce);
        }
        let books = &mut self.books;
        for (_, lent) in lent {
            if let Some((bounce, _)) = lent.bounced {
                nic.free_bounce(bounce);
            }
            books.events.extend(lent.hold.map(Event::Sent));
        }
        books.events.extend(frames.iter().filter_map(|frame| frame.payload.as_ref()?.hold).map(Event::Sent));
        waiting.iter().for_each(|copy| books.copied.push(id, copy.token, Err(Outcome::Unreachable)));
        books.events.push_back(Event::Gone(id, why.unwrap_or(CloseCause::Closed)));
        self.wake_starved();
    }
}
