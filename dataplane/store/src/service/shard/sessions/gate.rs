//! Authentication by ticket: admission of connections, their rights, and the end of their tickets.
//!
//! A shard that requires tickets answers a greeting with a challenge, and welcomes the client once it proves a valid
//! ticket. Times are the control plane's ticket time, which the shard receives with the keys; no host clock is used
//! ([`HeardTime`]). While the control plane cannot be reached, that time soon stops, because holders that cannot reach
//! it either cannot renew their tickets. A holder proves each renewed ticket on the same connection.

use std::collections::BTreeSet;

use kvplane_proto::Status;
use kvplane_proto::message::Hello;
use kvplane_ticket::{
    Challenges, CheckedTicket, GRACE_S, HandshakeTranscript, HeardTime, Keys, Proof, ProofError, Rights, Role, Ticket,
    TicketKey,
};

use super::super::ownership::Ownership;
use super::pass::{ChallengedHello, Pass, ShownTicket};
use crate::service::types::Path;

const SECOND_NS: u64 = 1_000_000_000;

/// State of a shard that requires tickets.
pub(super) struct Gate {
    keys: Keys,
    challenges: Challenges,
    /// Ticket time of the control plane.
    time: HeardTime,
    /// Times at which tickets are to be checked for their end, by connection.
    ends: BTreeSet<(u64, u32)>,
}

/// Intended use of a ticket.
pub(super) struct TicketUse {
    pub(super) fetches: bool,
    pub(super) path: Path,
    /// Ticket that the connection has proved before.
    pub(super) had: Option<Ticket>,
}

impl Gate {
    /// Creates the state without keys: no client is admitted yet.
    pub(super) fn new(challenges: Challenges) -> Self {
        Self { keys: Keys::default(), challenges, time: HeardTime::default(), ends: BTreeSet::new() }
    }

    /// Installs the keys of the control plane, as of this ticket time in seconds.
    pub(super) fn learn_keys(&mut self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        let line = self.time.hear(seconds, self.keys.line_of(&keys), now_ns);
        self.keys.learn(keys, line, self.time.now(now_ns));
    }

    /// Returns the time at which the next ticket is to be checked for its end.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        Some(self.ends.first()?.0)
    }

    /// Draws a challenge for a client that greets; `None` while there is no key that its proof could be checked with.
    pub(super) fn challenge(&mut self, hello: &Hello) -> Option<ChallengedHello> {
        if self.keys.is_empty() {
            return None;
        }
        Some(ChallengedHello { hello: hello.clone(), challenge: self.challenges.draw() })
    }

    /// Checks the proof of a ticket, and that the ticket admits its holder now.
    pub(super) fn check(
        &self,
        shard: &Ownership,
        said: &HandshakeTranscript<'_>,
        proof: &Proof,
        wanted: &TicketUse,
        now_ns: u64,
    ) -> Result<CheckedTicket, Status> {
        let checked = self.keys.check(&shard.identity().cluster, said, proof).map_err(|why| match why {
            ProofError::NoKey(_) => Status::NoKey,
            ProofError::Malformed(_) | ProofError::Invalid => Status::Unauthorized,
        })?;
        check_ticket(shard, &checked, self.time.now(now_ns), wanted)?;
        Ok(checked)
    }

    /// Admits the holder of a ticket, or extends its stay. Returns the rights of its connection, which had those of
    /// `before`.
    pub(super) fn admit(&mut self, index: u32, before: &Pass, checked: &CheckedTicket, now_ns: u64) -> Pass {
        self.forget(index, before);
        let ticket = checked.ticket;
        let end = checked.end.saturating_add(GRACE_S);
        let look_ns = self.time_of(end, now_ns);
        self.ends.insert((look_ns, index));
        Pass { rights: ticket.rights, tenant: ticket.tenant, shown: Some(ShownTicket { ticket, end, look_ns }) }
    }

    /// Cancels the check of the ticket of a connection.
    pub(super) fn forget(&mut self, index: u32, pass: &Pass) {
        if let Some(shown) = pass.shown {
            self.ends.remove(&(shown.look_ns, index));
        }
    }

    /// Returns a connection whose ticket is to be checked for its end; see [`Self::has_ended`].
    pub(super) fn take_due(&mut self, now_ns: u64) -> Option<u32> {
        self.ends.first().filter(|(look_ns, _)| *look_ns <= now_ns)?;
        self.ends.pop_first().map(|(_, index)| index)
    }

    /// Returns true if the ticket of a connection has ended. Otherwise the next check is scheduled.
    pub(super) fn has_ended(&mut self, index: u32, pass: &mut Pass, now_ns: u64) -> bool {
        let Some(shown) = &mut pass.shown else { return false };
        if self.time.now(now_ns) >= shown.end {
            return true;
        }
        // Without news of the control plane, ticket time has stopped.
        shown.look_ns = self.time_of(shown.end, now_ns);
        self.ends.insert((shown.look_ns, index));
        false
    }

    /// Returns the time, in nanoseconds, at which ticket time reaches this second if it goes on.
    fn time_of(&self, seconds: u64, now_ns: u64) -> u64 {
        let left = seconds.saturating_sub(self.time.now(now_ns));
        now_ns.saturating_add(left.saturating_mul(SECOND_NS))
    }
}

/// Checks that a ticket admits its holder.
fn check_ticket(shard: &Ownership, checked: &CheckedTicket, now: u64, wanted: &TicketUse) -> Result<(), Status> {
    let ticket = &checked.ticket;
    // The start of its validity is not checked: a client that heard from the control plane later than this shard may
    // hold a ticket that begins in this shard's future.
    if now >= checked.end.saturating_add(GRACE_S) || shard.epoch().0 > ticket.epochs.1 {
        return Err(Status::TicketEnded);
    }
    if ticket.role == Role::Node && shard.is_over(ticket.holder, ticket.incarnation) {
        return Err(Status::Stale);
    }
    let all = Rights::READ.and(Rights::WRITE);
    let allowed = match (wanted.fetches, wanted.path) {
        (true, _) => ticket.rights.has(all.and(Rights::FETCH)) && ticket.tenant.is_none(),
        // A process that maps the pool can read and write all of it.
        (false, Path::Shared) => ticket.rights.has(all) && ticket.tenant.is_none(),
        (false, Path::Stream) => ticket.rights.has(Rights::READ),
    };
    // On a connection that is already in use, the handles that it holds belong to the former ticket's holder.
    let other =
        wanted.had.is_some_and(|had| (had.role, had.holder, had.tenant) != (ticket.role, ticket.holder, ticket.tenant));
    if allowed && !other { Ok(()) } else { Err(Status::Unauthorized) }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
    use kvplane_ticket::{Mint, Terms};

    use super::*;
    use crate::service::types::Identity;

    const NOW: u64 = 1_000;
    const LIFETIME: u64 = 600;
    const INDEX: u32 = 3;

    fn hello() -> Hello {
        Hello {
            version_min: 1,
            version_max: 1,
            cluster: "test".to_owned(),
            node: NodeId(1),
            incarnation: Incarnation(1),
            shard: ShardId(0),
            client: 9,
            connection: 1,
            lane: 0,
            fetches: false,
        }
    }

    #[test]
    fn a_ticket_ends_after_its_grace_period_by_the_ticket_time_that_was_heard() {
        let mut seed = 0u8;
        let draw = |out: &mut [u8]| {
            out.iter_mut().for_each(|byte| (seed, *byte) = (seed.wrapping_add(7), seed));
            Ok::<(), ()>(())
        };
        let mint = Mint::new("test", LIFETIME, 3_600, NOW, draw).expect("it draws");
        let mut gate = Gate::new(Challenges::new([5; 32]));
        assert!(gate.challenge(&hello()).is_none(), "there is no key");
        gate.learn_keys(mint.keys().cloned().collect(), NOW, 0);
        let challenged = gate.challenge(&hello()).expect("there is a key");
        let rights = Rights::READ.and(Rights::WRITE);
        let terms = Terms { role: Role::Client, rights, tenant: None, holder: 9, incarnation: 0, epochs: (0, 9) };
        let bytes = challenged.hello.encode();
        let said = HandshakeTranscript { challenge: &challenged.challenge, hello: &bytes };
        let proof = mint.issue(&terms, NOW).prove([1; 32], &said);
        let (node, incarnation, shard) = (NodeId(1), Incarnation(1), ShardId(0));
        let (cluster, segment_name) = ("test".to_owned(), String::new());
        let shard = Ownership::new(Identity { cluster, node, incarnation, shard, segment_name });
        let wanted = TicketUse { fetches: false, path: Path::Stream, had: None };
        let checked = gate.check(&shard, &said, &proof, &wanted, 0).expect("a good ticket");
        let foreign = TicketUse { fetches: true, ..wanted };
        assert_eq!(gate.check(&shard, &said, &proof, &foreign, 0).err(), Some(Status::Unauthorized));
        let mut pass = gate.admit(INDEX, &Pass::ALL, &checked, 0);
        let look_ns = gate.poll_timeout().expect("it is to be checked");
        assert_eq!(look_ns, (LIFETIME + GRACE_S) * SECOND_NS);
        assert_eq!((gate.take_due(look_ns - 1), gate.take_due(look_ns)), (None, Some(INDEX)));
        assert!(!gate.has_ended(INDEX, &mut pass, look_ns), "nothing was heard since");
        gate.learn_keys(mint.keys().cloned().collect(), NOW + LIFETIME + GRACE_S, look_ns);
        assert!(gate.has_ended(INDEX, &mut pass, look_ns));
        gate.forget(INDEX, &pass);
        assert_eq!(gate.poll_timeout(), None);
    }
}
