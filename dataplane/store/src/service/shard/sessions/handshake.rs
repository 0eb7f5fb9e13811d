//! Handshakes: a client states its identity and the shard that it wants, and is welcomed, challenged or refused.

use kvplane_proto::Status;
use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::message::{Hello, IdItem, Kind, Operation, Welcome};
use kvplane_ticket::{CheckedTicket, HandshakeTranscript, Proof};

use super::super::answers::{Answers, items_of};
use super::super::ownership::Ownership;
use super::Sessions;
use super::gate::TicketUse;
use super::session::Greeting;
use crate::service::types::{CloseReason, PeerKey};

impl Sessions {
    /// Answers a greeting with a welcome, with a challenge where tickets are required, or with the reason for a
    /// refusal.
    pub(in crate::service) fn hello(
        &mut self,
        answers: &mut Answers,
        shard: &Ownership,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let hello = Hello::decode(body).map_err(|_| CloseReason::Malformed("a malformed hello"))?;
        if self.find(peer).greeted {
            return Err(CloseReason::Malformed("a second hello"));
        }
        if let Some(status) = refusal(shard, &hello) {
            answers.answer(peer, Operation::Hello, header, status);
            return Err(CloseReason::Refused(status));
        }
        if self.challenge(answers, peer, header, &hello)? {
            return Ok(());
        }
        self.greet(peer, Greeting::of(&hello));
        let welcome = self.welcome(shard);
        answers.items(peer, Operation::Hello, header.request, 1, |body| body.extend_from_slice(&welcome));
        Ok(())
    }

    /// Challenges a client that greets, if tickets are required; false if they are not.
    fn challenge(
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
        let Some(challenged) = gate.challenge(hello) else {
            self.counters.unauthenticated += 1;
            answers.answer(peer, Operation::Hello, header, Status::NoKey);
            return Err(CloseReason::Refused(Status::NoKey));
        };
        let challenged = session.challenged.insert(Box::new(challenged));
        let header = Header::reply(Kind::Reply(Operation::Hello), header.request, Status::Prove);
        answers.body(peer, header, 1, |body| body.extend_from_slice(&challenged.challenge));
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
        let had = session.pass.ticket();
        let wanted = TicketUse { fetches: challenged.hello.fetches, path: session.path, had };
        let checked = match gate.check(shard, &said, &proof, &wanted, now_ns) {
            Ok(checked) => checked,
            Err(status) => {
                self.counters.unauthenticated += 1;
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
        let Some(gate) = &mut self.gate else { return };
        let session = super::find(&mut self.sessions, peer);
        session.pass = gate.admit(peer.index, &session.pass, checked, now_ns);
        if !session.greeted {
            self.greet(peer, greeting);
        }
    }

    /// Encodes a welcome: this shard's identity, and the epoch of the map that it serves.
    fn welcome(&self, shard: &Ownership) -> Vec<u8> {
        let (identity, pool_bytes) = (shard.identity(), self.pool_bytes);
        let (node, incarnation) = (identity.node, identity.incarnation);
        Welcome { version: VERSION, node, incarnation, shard: identity.shard, epoch: shard.epoch(), pool_bytes }
            .encode()
    }

    /// Fences other connections of the same client: they are closed before the client's next request is handled, and no
    /// request that they sent and that was not carried out yet ever will be. A connection that does not exist (any
    /// more) needs no record, because no request is carried out before the welcome.
    pub(in crate::service) fn fence(
        &mut self,
        answers: &mut Answers,
        peer: PeerKey,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let mut named: Vec<u64> = items_of::<IdItem>(header, body)?.map(|item| item.id).collect();
        named.sort_unstable();
        let session = self.find(peer);
        let (client, own) = (session.greeting.client, session.greeting.connection);
        if named.binary_search(&own).is_ok() {
            return Err(CloseReason::Malformed("a fence of its own connection"));
        }
        let over = self.select(|session| {
            let Greeting { client: other, connection, .. } = session.greeting;
            session.greeted && other == client && named.binary_search(&connection).is_ok()
        });
        for peer in over {
            self.close(&mut answers.outputs, peer, CloseReason::Fenced);
        }
        answers.answer(peer, Operation::Fence, header, Status::Ok);
        Ok(())
    }
}

/// Returns the status with which a client is refused: it belongs to another cluster, or wants another shard. `None` if
/// it is not refused.
fn refusal(shard: &Ownership, hello: &Hello) -> Option<Status> {
    let me = shard.identity();
    if hello.version_min > VERSION || hello.version_max < VERSION || hello.cluster != me.cluster {
        return Some(Status::Incompatible);
    }
    let other_node = hello.node != NodeId(0) && hello.node != me.node;
    let other_incarnation = hello.incarnation != Incarnation(0) && hello.incarnation != me.incarnation;
    let other_shard = hello.node != NodeId(0) && hello.shard != me.shard;
    (other_node || other_incarnation || other_shard).then_some(Status::WrongOwner)
}
