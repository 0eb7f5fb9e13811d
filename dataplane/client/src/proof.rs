//! Tickets on connections: a shard that wants one challenges, and we prove that we hold it.
//!
//! A client with a credential believes no shard that does not ask for it, and that does not prove in its turn that it
//! knows the secret: a stranger at a shard's address learns what we greet it with and nothing else. With a newer
//! credential, what is connected proves that one too and goes on.

use std::sync::Arc;

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Hello, Kind, Operation};
use kvplane_proto::status::Status;
use kvplane_ticket::{CHALLENGE_BYTES, Challenge, Credential, HandshakeTranscript, PROOF_BYTES};

use super::Client;
use super::lane::Endpoint;
use super::types::LaneId;

use super::fences::connection_number;

/// What a lane was challenged with, and the number of ours in its last proof.
pub(super) struct LaneChallenge {
    challenge: Challenge,
    own: [u8; CHALLENGE_BYTES],
    credential: Arc<Credential>,
}

/// What becomes of a connection that an RDMA connection is to be talked about on.
pub enum Carrier {
    /// Send this, and wait.
    Send(Header, Vec<u8>),
    /// The peer knows us, and we know it: go on.
    Go,
    /// The peer refuses us, or is another: close it.
    Refused(Status, String),
}

impl Client {
    /// Proves this ticket from now on, also on what is connected. Without one, shards that want tickets refuse us.
    pub fn set_credential(&mut self, credential: Arc<Credential>, now_ns: u64) {
        self.now_ns = now_ns;
        if self.credential.as_ref() == Some(&credential) {
            return;
        }
        self.credential = Some(credential);
        for lane in 0..self.lanes.len() as u32 {
            let entry = &self.lanes[lane as usize];
            if let (Endpoint::Ready, Some(challenged)) = (entry.state, &entry.connection.challenged) {
                let (id, challenge) = (entry.id(lane), challenged.challenge);
                if let Some((header, body)) = self.proof(lane, challenge) {
                    let body = self.outbox.append(|out| out.extend_from_slice(&body));
                    self.send(id, header, body, 1, &[]);
                }
            }
        }
    }

    /// The greeting of a lane, the same however often it is asked for.
    pub(super) fn hello_of(&self, lane: u32) -> Vec<u8> {
        let entry = &self.lanes[lane as usize];
        let address = &self.peers[entry.peer.0 as usize].address;
        let hello = Hello {
            version_min: VERSION,
            version_max: VERSION,
            client: self.config.client,
            node: address.node,
            incarnation: address.incarnation,
            shard: address.shard,
            lane: entry.number,
            connection: connection_number(entry.id(lane)),
            fetches: self.config.fetches,
            cluster: self.config.cluster.clone(),
        };
        hello.encode()
    }

    /// The proof that answers a challenge, if there is something to prove.
    fn proof(&mut self, lane: u32, challenge: Challenge) -> Option<(Header, Vec<u8>)> {
        let hello = self.hello_of(lane);
        self.proofs += 1;
        let credential = Arc::clone(self.credential.as_ref()?);
        let own = credential.number(self.config.client, self.proofs);
        let body = credential.prove(own, &HandshakeTranscript { challenge: &challenge, hello: &hello }).encode();
        self.lanes[lane as usize].connection.challenged = Some(Box::new(LaneChallenge { challenge, own, credential }));
        Some((Header::request(Kind::Request(Operation::Prove), RequestId::default()).with_body(&body, 1), body))
    }

    /// A shard challenges a lane: what to send, or why it is refused.
    pub(super) fn challenged(&mut self, lane: u32, body: &[u8]) -> Result<(Header, Vec<u8>), (Status, String)> {
        let challenge =
            body.try_into().map_err(|_| (Status::Incompatible, "who listens there sends no challenge".to_owned()))?;
        let refused =
            || (Status::Prove, "the shard wants a ticket, and the control plane that we asked gives none".to_owned());
        self.proof(lane, challenge).ok_or_else(refused)
    }

    /// What is left of a welcome when the shard's own proof was checked: all of it where neither side has a ticket.
    pub(super) fn checked_welcome<'a>(
        &self,
        lane: u32,
        operation: Operation,
        body: &'a [u8],
    ) -> Result<&'a [u8], (Status, String)> {
        let stranger =
            |what: &str| (Status::Unauthorized, format!("who listens there is no shard of our cluster: {what}"));
        match (operation, &self.credential, &self.lanes[lane as usize].connection.challenged) {
            (Operation::Hello, None, None) => Ok(body),
            (Operation::Prove, _, Some(challenged)) => {
                let LaneChallenge { challenge, own, credential } = &**challenged;
                let (welcome, answer) =
                    body.split_last_chunk::<PROOF_BYTES>().ok_or_else(|| stranger("it proves nothing"))?;
                let said = HandshakeTranscript { challenge, hello: &self.hello_of(lane) };
                match credential.is_answered(own, &said, welcome, answer) {
                    true => Ok(welcome),
                    false => Err(stranger("its proof is wrong")),
                }
            }
            _ => Err(stranger("it wants no ticket")),
        }
    }

    /// A connection that an RDMA connection is to be talked about on is there.
    pub fn carrier_connected(&self, lane: LaneId) -> Carrier {
        if self.credential.is_none() || !self.is_current(lane) {
            return Carrier::Go;
        }
        let body = self.hello_of(lane.index);
        Carrier::Send(Header::request(Kind::Request(Operation::Hello), RequestId::default()).with_body(&body, 1), body)
    }

    /// A frame came on it, before it was given away.
    pub fn carrier_frame(&mut self, lane: LaneId, header: &Header, body: &[u8]) -> Carrier {
        if !self.is_current(lane) {
            return Carrier::Refused(Status::Cancelled, "nobody wants it any more".to_owned());
        }
        let refused = |(status, why)| Carrier::Refused(status, why);
        match (header.kind, header.status) {
            (Kind::Reply(Operation::Hello), Status::Prove) => match self.challenged(lane.index, body) {
                Ok((header, body)) => Carrier::Send(header, body),
                Err(why) => refused(why),
            },
            (Kind::Reply(operation @ (Operation::Hello | Operation::Prove)), Status::Ok) => {
                match self.checked_welcome(lane.index, operation, body) {
                    Ok(_) => Carrier::Go,
                    Err(why) => refused(why),
                }
            }
            (_, status) => refused((status, format!("who listens there refuses us: {status}"))),
        }
    }

    fn is_current(&self, lane: LaneId) -> bool {
        self.lanes.get(lane.index as usize).is_some_and(|entry| entry.generation == lane.generation)
    }

    /// The peer of a lane that is being connected refuses us: what waits for it fails with this, or waits in its turn.
    pub fn refused(&mut self, lane: LaneId, status: Status) {
        if let Some(entry) = self.current(lane) {
            entry.connection.refusal = Some(status);
        }
    }
}
