//! Authentication by ticket: admission of connections, their rights, and the end of their tickets.
//!
//! A shard that requires tickets answers a greeting with a challenge, and welcomes the client once it proves a valid
//! ticket. Times are the control plane's ticket time, which the shard receives with the keys; no host clock is used
//! ([`HeardTime`]). While the control plane cannot be reached, that time soon stops, because holders that cannot reach
//! it either cannot renew their tickets. A holder proves each renewed ticket on the same connection.

use std::collections::BTreeSet;

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Hello, Kind, Operation};
use kvplane_ticket::{
    Challenge, Challenges, CheckedTicket, Disbelief, GRACE_S, HandshakeTranscript, HeardTime, Keys, Proof, Rights,
    Role, Ticket, TicketKey,
};

use super::super::answers::Answers;
use super::super::ownership::Ownership;
use super::super::timing::Outputs;
use super::Sessions;
use super::session::{Greeting, PendingPayload};
use crate::service::types::{CloseReason, Path, PeerKey};

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

/// Greeting of a connection that was challenged.
pub(super) struct ChallengedHello {
    hello: Hello,
    challenge: Challenge,
}

/// Rights of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct Pass {
    rights: Rights,
    /// Only tenant whose objects the connection may use; `None` for all.
    pub(in crate::service) tenant: Option<u32>,
    ticket: Option<ShownTicket>,
}

/// Ticket of a connection.
#[derive(Clone, Copy, Debug)]
struct ShownTicket {
    ticket: Ticket,
    /// End of the ticket, grace included, in seconds of ticket time as known here.
    end: u64,
    /// Time of the next check, in nanoseconds.
    look_ns: u64,
}

impl Pass {
    /// Rights of connections that need no ticket.
    pub(super) const ALL: Self =
        Self { rights: Rights::READ.and(Rights::WRITE).and(Rights::FETCH), tenant: None, ticket: None };
}

impl Sessions {
    /// Requires tickets from now on, and challenges clients with these challenges.
    pub(in crate::service) fn want_tickets(&mut self, challenges: Challenges) {
        self.gate = Some(Box::new(Gate {
            keys: Keys::default(),
            challenges,
            time: HeardTime::default(),
            ends: BTreeSet::new(),
        }));
    }

    /// Installs the keys of the control plane, as of this ticket time in seconds.
    pub(in crate::service) fn learn_keys(&mut self, keys: Vec<TicketKey>, seconds: u64, now_ns: u64) {
        let Some(gate) = &mut self.gate else { return };
        let line = gate.time.hear(seconds, gate.keys.line_of(&keys), now_ns);
        gate.keys.learn(keys, line, gate.time.now(now_ns));
    }

    /// Returns true if a connection was welcomed; the shard keeps no state for it before.
    pub(in crate::service) fn is_welcome(&self, peer: PeerKey) -> bool {
        self.get(peer).is_some_and(|session| session.greeted)
    }

    /// Returns true if connections need tickets.
    pub(in crate::service) const fn needs_tickets(&self) -> bool {
        self.gate.is_some()
    }

    /// Returns true if an RDMA connection may be negotiated on this connection.
    pub(in crate::service) fn may_carry(&self, peer: PeerKey) -> bool {
        self.gate.is_none() || self.is_welcome(peer)
    }

    pub(super) fn gate_timeout(&self) -> Option<u64> {
        Some(self.gate.as_ref()?.ends.first()?.0)
    }

    /// Challenges a client that greets, if tickets are required; false if they are not.
    pub(super) fn challenge(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        header: &Header,
        hello: &Hello,
    ) -> Result<bool, CloseReason> {
        let Some(gate) = &mut self.gate else { return Ok(false) };
        let session = super::find(&mut self.sessions, peer);
        if session.challenged.is_some() {
            return Err(CloseReason::Malformed("a second hello"));
        }
        if gate.keys.is_empty() {
            self.counters.strangers += 1;
            answers.answer(peer, Operation::Hello, header, Status::NoKey);
            return Err(CloseReason::Refused(Status::NoKey));
        }
        let challenge = gate.challenges.draw();
        session.challenged = Some(Box::new(ChallengedHello { hello: hello.clone(), challenge }));
        let header = Header::reply(Kind::Reply(Operation::Hello), header.request, Status::Prove);
        answers.body(peer, header, 1, |body| body.extend_from_slice(&challenge));
        Ok(true)
    }

    /// Handles the proof of a ticket: the first, or that of a renewed one.
    pub(in crate::service) fn prove(
        &mut self,
        answers: &mut Answers,
        shard: &Ownership,
        peer: PeerKey,
        now_ns: u64,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let proof = Proof::decode(body).ok_or(CloseReason::Malformed("a malformed proof"))?;
        let session = self.get(peer).expect("a session that was just looked up");
        let (Some(gate), Some(challenged)) = (&self.gate, &session.challenged) else {
            return Err(CloseReason::Malformed("a proof without a challenge"));
        };
        let hello = challenged.hello.encode();
        let said = HandshakeTranscript { challenge: &challenged.challenge, hello: &hello };
        let checked = gate.keys.check(&shard.identity().cluster, &said, &proof).map_err(|why| match why {
            Disbelief::NoKey(_) => Status::NoKey,
            Disbelief::Torn(_) | Disbelief::Wrong => Status::Unauthorized,
        });
        let had = session.pass.ticket.map(|shown| shown.ticket);
        let wanted = TicketUse { fetches: challenged.hello.fetches, path: session.path, had };
        let checked = checked.and_then(|checked| {
            check_ticket(shard, &checked, gate.time.now(now_ns), &wanted)?;
            Ok(checked)
        });
        let checked = match checked {
            Ok(checked) => checked,
            Err(status) => {
                self.counters.strangers += 1;
                let greeted = self.is_welcome(peer);
                answers.answer(peer, Operation::Prove, header, status);
                // A peer that was admitted before stays for as long as its former ticket is valid.
                return if greeted && status == Status::NoKey { Ok(()) } else { Err(CloseReason::Refused(status)) };
            }
        };
        let welcome = self.welcome(shard);
        let answer = checked.answer(&proof.own, &said, &welcome);
        let greeting = Greeting::of(&challenged.hello);
        self.admit(peer, greeting, &checked, now_ns);
        answers.items(peer, Operation::Prove, header.request, 1, |body| {
            body.extend_from_slice(&welcome);
            body.extend_from_slice(&answer);
        });
        Ok(())
    }

    /// Admits the holder of a ticket, or extends its stay.
    fn admit(&mut self, peer: PeerKey, greeting: Greeting, checked: &CheckedTicket, now_ns: u64) {
        let (ticket, Some(gate)) = (checked.ticket, &mut self.gate) else { return };
        let session = super::find(&mut self.sessions, peer);
        let end = checked.end.saturating_add(GRACE_S);
        let left = end.saturating_sub(gate.time.now(now_ns));
        let look_ns = now_ns.saturating_add(left.saturating_mul(SECOND_NS));
        if let Some(before) = session.pass.ticket {
            gate.ends.remove(&(before.look_ns, peer.index));
        }
        gate.ends.insert((look_ns, peer.index));
        let shown = ShownTicket { ticket, end, look_ns };
        session.pass = Pass { rights: ticket.rights, tenant: ticket.tenant, ticket: Some(shown) };
        if !session.greeted {
            self.greet(peer, greeting);
        }
    }

    /// Cancels the check of a ticket whose connection ends.
    pub(super) fn forget_ticket(&mut self, index: u32, pass: &Pass) {
        if let (Some(gate), Some(shown)) = (&mut self.gate, pass.ticket) {
            gate.ends.remove(&(shown.look_ns, index));
        }
    }

    /// Closes the connections whose tickets have ended without being renewed.
    pub(in crate::service) fn end_tickets(&mut self, outputs: &mut Outputs, now_ns: u64) {
        while let Some(gate) = &mut self.gate
            && let Some(&(look_ns, index)) = gate.ends.first()
            && look_ns <= now_ns
        {
            gate.ends.pop_first();
            let now = gate.time.now(now_ns);
            let session = self.sessions.get_mut(index as usize).and_then(Option::as_mut);
            let Some(session) = session.filter(|session| !session.closing) else { continue };
            let peer = PeerKey { index, generation: session.generation };
            let Some(shown) = &mut session.pass.ticket else { continue };
            if now < shown.end {
                // Without news of the control plane, ticket time has stopped.
                shown.look_ns = now_ns.saturating_add((shown.end - now).saturating_mul(SECOND_NS));
                gate.ends.insert((shown.look_ns, index));
                continue;
            }
            self.counters.tickets_ended += 1;
            self.close(outputs, peer, CloseReason::TicketEnded);
        }
    }

    /// Closes the connections of nodes' incarnations that have ended by the newest map.
    pub(in crate::service) fn end_former_incarnations(&mut self, outputs: &mut Outputs, shard: &Ownership) {
        let over = self.select(|session| {
            let ticket = session.pass.ticket.map(|shown| shown.ticket).filter(|ticket| ticket.role == Role::Node);
            ticket.is_some_and(|ticket| shard.is_over(ticket.holder, ticket.incarnation))
        });
        over.into_iter().for_each(|peer| self.close(outputs, peer, CloseReason::Refused(Status::Stale)));
    }

    /// Returns true if a connection has the right to an operation; a request without that right is answered here.
    pub(in crate::service) fn may_change(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        operation: Operation,
        header: &Header,
    ) -> bool {
        let changes = matches!(
            operation,
            Operation::Put
                | Operation::Remove
                | Operation::RemoveCopy
                | Operation::Write
                | Operation::WriteMany
                | Operation::Reserve
                | Operation::Commit
                | Operation::Begin
                | Operation::Fill
                | Operation::Seal
                | Operation::Discard
        );
        let session = super::find(&mut self.sessions, peer);
        if !changes || session.pass.rights.has(Rights::WRITE) {
            return true;
        }
        self.counters.unauthorized += 1;
        let status = Status::Unauthorized;
        if header.payload_bytes > 0 {
            session.pending = Some(PendingPayload::Refused { request: header.request, operation, status, argument: 0 });
        } else {
            answers.answer(peer, operation, header, status);
        }
        false
    }
}

/// Intended use of a ticket.
struct TicketUse {
    fetches: bool,
    path: Path,
    had: Option<Ticket>,
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
