//! Writes to segments, between the arrival of their payloads and their answers.

use kvplane_proto::Status;

use super::segments::Segments;
use super::shard::Shard;
use super::shard::sessions::PendingPayload;
use super::types::PeerKey;

/// Write whose payload was received into memory of the host's own, and is not at its destination yet: see
/// [`Writes::detach`]. Its segments stay in use until [`Writes::complete`].
#[derive(Debug)]
#[must_use]
pub struct DetachedWrite {
    peer: PeerKey,
    pending: PendingPayload,
}

/// Writes of a service whose payloads arrive.
pub struct Writes<'a> {
    pub(super) shard: &'a mut Shard,
    pub(super) segments: &'a mut Segments,
}

impl Writes<'_> {
    /// Takes the write whose payload this peer has sent to memory of the host's own. The host moves it to its
    /// destination, and [`Self::complete`] then answers it; the peer may send other requests meanwhile. Returns `None`
    /// if the payload does not have the checksum that the peer stated: it is answered then.
    pub fn detach(self, peer: PeerKey, checksum: Option<u64>, now_ns: u64) -> Option<DetachedWrite> {
        let Self { shard, segments } = self;
        shard.tick(now_ns);
        let session = shard.sessions.get_mut(peer)?;
        let (arrived_ns, bytes) = (session.arrived_ns, session.payload_bytes);
        let pending = session.pending.take()?;
        shard.answers.outputs.received(arrived_ns, bytes, now_ns);
        if pending.is_good_write(checksum) {
            return Some(DetachedWrite { peer, pending });
        }
        let is_good = segments.finish_write(&mut shard.answers, peer, pending, checksum);
        shard.counters.corrupt += u64::from(!is_good);
        None
    }

    /// Ends a write that was taken from its connection, and answers it: with `Ok` if its payload is at its destination.
    pub fn complete(self, write: DetachedWrite, status: Status, now_ns: u64) {
        let Self { shard, segments } = self;
        shard.tick(now_ns);
        segments.answer_write(&mut shard.answers, write.peer, write.pending, status);
    }

    /// Refuses the write whose payload this peer is sending: the payload is discarded, and the write answered with this
    /// status when the payload was received.
    pub fn refuse(self, peer: PeerKey, status: Status) {
        let Shard { sessions, answers, .. } = self.shard;
        let Some(session) = sessions.get_mut(peer) else { return };
        if let Some(pending) = session.pending.take() {
            session.pending = Some(self.segments.refuse_write(answers, pending, status));
        }
    }
}
