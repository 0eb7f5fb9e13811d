//! Tickets on connections: a shard that wants one challenges, and we prove that we hold it.
//!
//! A client with a credential believes no shard that does not ask for it, and that does not prove in its turn that it
//! knows the secret: a stranger at a shard's address learns what we greet it with and nothing else. With a newer
//! credential, what is connected proves that one too and goes on.

use std::sync::Arc;

use kvplane_proto::frame::{Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, RequestId};
use kvplane_proto::message::{Hello, Kind, Operation, Welcome};
use kvplane_proto::status::Status;
use kvplane_ticket::{CHALLENGE_BYTES, Challenge, Credential, HandshakeTranscript, PROOF_BYTES};

use super::fences::connection_number;
use super::lane::Lane;
use crate::types::{Config, LaneId, PeerAddress};

/// What a lane was challenged with, and the number of ours in its last proof.
pub(crate) struct LaneChallenge {
    challenge: Challenge,
    own: [u8; CHALLENGE_BYTES],
    credential: Arc<Credential>,
}

/// Why a connection is not used: what its slices fail with, and the same in words.
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) why: String,
}

impl Refusal {
    pub(crate) fn new(status: Status, why: &str) -> Self {
        Self { status, why: why.to_owned() }
    }

    /// The peer itself refuses us.
    pub(crate) fn by_peer(status: Status) -> Self {
        Self { status, why: format!("who listens there refuses us: {status}") }
    }

    fn stranger(what: &str) -> Self {
        Self { status: Status::Unauthorized, why: format!("who listens there is no shard of our cluster: {what}") }
    }
}

/// What shards are shown that want a ticket.
#[derive(Default)]
pub(crate) struct Handshakes {
    credential: Option<Arc<Credential>>,
    /// How many proofs were made.
    proofs: u64,
}

impl Handshakes {
    /// Proves this ticket from now on; false where it does already.
    pub(crate) fn set_credential(&mut self, credential: Arc<Credential>) -> bool {
        let is_new = self.credential.as_ref() != Some(&credential);
        self.credential = Some(credential);
        is_new
    }

    /// Whether there is something to prove.
    pub(crate) const fn has_credential(&self) -> bool {
        self.credential.is_some()
    }

    /// The proof that answers a challenge, if there is something to prove.
    fn prove(
        &mut self,
        config: &Config,
        lane: &mut Lane,
        hello: &[u8],
        challenge: Challenge,
    ) -> Option<(Header, Vec<u8>)> {
        self.proofs += 1;
        let credential = Arc::clone(self.credential.as_ref()?);
        let own = credential.number(config.client, self.proofs);
        let body = credential.prove(own, &HandshakeTranscript { challenge: &challenge, hello }).encode();
        lane.connection.challenged = Some(Box::new(LaneChallenge { challenge, own, credential }));
        Some((Header::request(Kind::Request(Operation::Prove), RequestId::default()).with_body(&body, 1), body))
    }

    /// The proof that a lane sends once more, with a newer credential, if it was challenged.
    pub(crate) fn prove_again(&mut self, config: &Config, lane: &mut Lane, hello: &[u8]) -> Option<(Header, Vec<u8>)> {
        let challenge = lane.connection.challenged.as_ref()?.challenge;
        self.prove(config, lane, hello, challenge)
    }

    /// A shard challenges a lane: what to send, or why the shard is not used.
    pub(crate) fn challenged(
        &mut self,
        config: &Config,
        lane: &mut Lane,
        hello: &[u8],
        body: &[u8],
    ) -> Result<(Header, Vec<u8>), Refusal> {
        let challenge =
            body.try_into().map_err(|_| Refusal::new(Status::Incompatible, "who listens there sends no challenge"))?;
        self.prove(config, lane, hello, challenge).ok_or_else(|| {
            Refusal::new(Status::Prove, "the shard wants a ticket, and the control plane that we asked gives none")
        })
    }

    /// What is left of a welcome when the shard's own proof was checked: all of it where neither side has a ticket.
    pub(crate) fn checked_welcome<'a>(
        &self,
        lane: &Lane,
        hello: &[u8],
        operation: Operation,
        body: &'a [u8],
    ) -> Result<&'a [u8], Refusal> {
        match (operation, &self.credential, &lane.connection.challenged) {
            (Operation::Hello, None, None) => Ok(body),
            (Operation::Prove, _, Some(challenged)) => {
                let LaneChallenge { challenge, own, credential } = &**challenged;
                let (welcome, answer) =
                    body.split_last_chunk::<PROOF_BYTES>().ok_or_else(|| Refusal::stranger("it proves nothing"))?;
                let said = HandshakeTranscript { challenge, hello };
                match credential.is_answered(own, &said, welcome, answer) {
                    true => Ok(welcome),
                    false => Err(Refusal::stranger("its proof is wrong")),
                }
            }
            _ => Err(Refusal::stranger("it wants no ticket")),
        }
    }
}

/// The greeting of a lane, the same however often it is made.
pub(crate) fn hello(config: &Config, address: &PeerAddress, lane: &Lane, id: LaneId) -> Vec<u8> {
    let hello = Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: config.client,
        node: address.node,
        incarnation: address.incarnation,
        shard: address.shard,
        lane: lane.number,
        connection: connection_number(id),
        fetches: config.fetches,
        cluster: config.cluster.clone(),
    };
    hello.encode()
}

/// Whether a welcome is from the peer that was to be reached.
pub(crate) fn check_peer(wanted: &PeerAddress, welcome: &Welcome) -> Result<(), Refusal> {
    let other = wanted.node != NodeId(0) && (wanted.node, wanted.shard) != (welcome.node, welcome.shard)
        || wanted.incarnation != Incarnation(0) && wanted.incarnation != welcome.incarnation;
    if welcome.version == VERSION && !other {
        return Ok(());
    }
    let why = format!("who listens there is another than the peer: {:?}, not {:?}", welcome.node, wanted.node);
    Err(Refusal { status: if other { Status::WrongOwner } else { Status::Incompatible }, why })
}
