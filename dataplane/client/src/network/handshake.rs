//! Tickets in the handshake: a shard that requires a ticket sends a challenge, and the client proves that it holds one.
//!
//! A client with a credential rejects a shard that requires no ticket, and one that does not prove in turn that it
//! knows the secret. So an impostor at a shard's address learns the client's hello and nothing else. After the
//! credential is renewed, connected lanes prove the new one and continue.

use std::sync::Arc;

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId};
use kvplane_proto::message::{Hello, Kind, Operation, Welcome};
use kvplane_proto::status::Status;
use kvplane_ticket::{CHALLENGE_BYTES, Challenge, Credential, HandshakeTranscript, PROOF_BYTES};

use super::fences::connection_number;
use crate::types::{Config, LaneId, PeerAddress};

/// Challenge of a lane, and our nonce and credential in its last proof.
pub(crate) struct LaneChallenge {
    challenge: Challenge,
    own: [u8; CHALLENGE_BYTES],
    credential: Arc<Credential>,
}

/// Reason to reject a connection: the status with which its slices fail, and a text.
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) why: String,
}

impl Refusal {
    pub(crate) fn new(status: Status, why: &str) -> Self {
        Self { status, why: why.to_owned() }
    }

    /// Creates the refusal of a peer that refuses the connection.
    pub(crate) fn by_peer(status: Status) -> Self {
        Self { status, why: format!("the peer at this address refuses the connection: {status}") }
    }

    fn unauthenticated(what: &str) -> Self {
        Self {
            status: Status::Unauthorized,
            why: format!("the peer at this address is no shard of this cluster: {what}"),
        }
    }
}

/// Authentication of the client to shards that require tickets.
#[derive(Default)]
pub(crate) struct Handshakes {
    credential: Option<Arc<Credential>>,
    /// Number of proofs made.
    proofs: u64,
}

impl Handshakes {
    /// Sets the credential to prove from now on; returns false if it was set already.
    pub(crate) fn set_credential(&mut self, credential: Arc<Credential>) -> bool {
        let is_new = self.credential.as_ref() != Some(&credential);
        self.credential = Some(credential);
        is_new
    }

    /// Returns true if the client has a credential.
    pub(crate) const fn has_credential(&self) -> bool {
        self.credential.is_some()
    }

    /// Returns the proof that answers a challenge, if the client has a credential; records it as the lane's last one.
    fn prove(
        &mut self,
        config: &Config,
        last: &mut Option<Box<LaneChallenge>>,
        hello: &[u8],
        challenge: Challenge,
    ) -> Option<(Header, Vec<u8>)> {
        self.proofs += 1;
        let credential = Arc::clone(self.credential.as_ref()?);
        let own = credential.number(config.client, self.proofs);
        let body = credential.prove(own, &HandshakeTranscript { challenge: &challenge, hello }).encode();
        *last = Some(Box::new(LaneChallenge { challenge, own, credential }));
        Some((Header::request(Kind::Request(Operation::Prove), RequestId::default()).with_body(&body, 1), body))
    }

    /// Returns the proof of a renewed credential for a lane that was challenged.
    pub(crate) fn prove_again(
        &mut self,
        config: &Config,
        last: &mut Option<Box<LaneChallenge>>,
        hello: &[u8],
    ) -> Option<(Header, Vec<u8>)> {
        let challenge = last.as_ref()?.challenge;
        self.prove(config, last, hello, challenge)
    }

    /// Handles a challenge. Returns the frame to send, or the reason not to use the shard.
    pub(crate) fn challenged(
        &mut self,
        config: &Config,
        last: &mut Option<Box<LaneChallenge>>,
        hello: &[u8],
        body: &[u8],
    ) -> Result<(Header, Vec<u8>), Refusal> {
        let challenge = body
            .try_into()
            .map_err(|_| Refusal::new(Status::Incompatible, "the peer at this address sent no valid challenge"))?;
        self.prove(config, last, hello, challenge).ok_or_else(|| {
            Refusal::new(
                Status::Prove,
                "the shard requires a ticket, and the control plane has issued none to this client",
            )
        })
    }

    /// Verifies the shard's own proof. Returns the welcome without it: the whole body if neither side has a ticket.
    pub(crate) fn checked_welcome<'a>(
        &self,
        last: Option<&LaneChallenge>,
        hello: &[u8],
        operation: Operation,
        body: &'a [u8],
    ) -> Result<&'a [u8], Refusal> {
        match (operation, &self.credential, last) {
            (Operation::Hello, None, None) => Ok(body),
            (Operation::Prove, _, Some(LaneChallenge { challenge, own, credential })) => {
                let (welcome, answer) = body
                    .split_last_chunk::<PROOF_BYTES>()
                    .ok_or_else(|| Refusal::unauthenticated("it sent no proof"))?;
                let said = HandshakeTranscript { challenge, hello };
                match credential.is_answered(own, &said, welcome, answer) {
                    true => Ok(welcome),
                    false => Err(Refusal::unauthenticated("its proof is wrong")),
                }
            }
            _ => Err(Refusal::unauthenticated("it requires no ticket")),
        }
    }
}

/// Returns the hello of a lane with this number, which is the same on every call.
pub(crate) fn hello(config: &Config, address: &PeerAddress, number: u16, id: LaneId) -> Vec<u8> {
    let hello = Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: config.client,
        node: address.node,
        incarnation: address.incarnation,
        shard: address.shard,
        lane: number,
        connection: connection_number(id),
        fetches: config.fetches,
        cluster: config.cluster.clone(),
    };
    hello.encode()
}

/// Returns an error if a welcome is not from the expected peer.
pub(crate) fn check_peer(wanted: &PeerAddress, welcome: &Welcome) -> Result<(), Refusal> {
    let other = wanted.node != NodeId(0) && (wanted.node, wanted.shard) != (welcome.node, welcome.shard)
        || wanted.incarnation != Incarnation(0) && wanted.incarnation != welcome.incarnation;
    if welcome.version == VERSION && !other {
        return Ok(());
    }
    let why = format!("another peer listens at this address: {:?}, not {:?}", welcome.node, wanted.node);
    Err(Refusal { status: if other { Status::WrongOwner } else { Status::Incompatible }, why })
}
