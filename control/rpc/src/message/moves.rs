//! Messages about a node's ownership of slots: its devices, migrations, and draining.

pub use kvplane_cluster::Moves;

use bincode::de::{Decode, Decoder};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};
use kvplane_proto::map::ClusterMap;

use crate::message::{Join, MapReply};

/// Requests the last known incarnation of a node: the next incarnation takes a greater number, whatever its host's
/// clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GetIncarnation {
    pub node: u64,
}

/// The reply to [`GetIncarnation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LastIncarnation {
    /// Number of the last incarnation; 0 if none is known.
    pub incarnation: u64,
}

/// Requests the last incarnation of a node that was a member: the one whose slots the next incarnation may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GetLastMember {
    pub node: u64,
}

/// The reply to [`GetLastMember`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LastMember {
    /// Number of the incarnation; 0 if none is known.
    pub incarnation: u64,
}

/// Offers a member's map to a control plane that does not know the member, before the node begins a new incarnation:
/// the control plane may have lost its state, and then adopts a map that members offer. If it has not lost its state,
/// it refuses the offer as it refuses an unknown member.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct OfferMap {
    /// The member as it joined, with its capacity and version.
    pub join: Join,
    /// Identity of the cluster state that the map belongs to.
    pub state: u64,
    pub map: ClusterMap,
    /// Digest of the identities of the node's devices; 0 for none.
    pub devices: u128,
    /// Epoch since which no incarnation of the node ran without these devices.
    pub since: u64,
}

impl Encode for OfferMap {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.join.encode(encoder)?;
        self.state.encode(encoder)?;
        MapReply { map: self.map.clone() }.encode(encoder)?;
        self.devices.encode(encoder)?;
        self.since.encode(encoder)
    }
}

impl<Context> Decode<Context> for OfferMap {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let (join, state) = (Join::decode(decoder)?, u64::decode(decoder)?);
        let map = MapReply::decode(decoder)?.map;
        Ok(Self { join, state, map, devices: u128::decode(decoder)?, since: u64::decode(decoder)? })
    }
}

/// Reports the devices of an incarnation that is about to join: the devices' contents count only if no incarnation of
/// the node ran without them. An incarnation without this report has no devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct AttachDevices {
    pub node: u64,
    pub incarnation: u64,
    /// Digest of the devices' identities.
    pub devices: u128,
}

/// The reply to [`AttachDevices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct DevicesKept {
    /// Least epoch: the devices' contents count if the last map recorded on them has this epoch or a later one.
    pub since: u64,
}

/// Reports that a member follows a map and has received all objects that this map and earlier ones moved to it. Sent
/// for every map, as liveness probes wait for it. The first report comes before the first heartbeat, with epoch 0: it
/// announces that others will follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SettleReport {
    pub node: u64,
    pub incarnation: u64,
    /// Epoch of the map.
    pub epoch: u64,
}

/// Requests the state of migrations to other members; sent by a node that is to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GetMoves {
    pub node: u64,
    /// The node's incarnation, if it is about to shut down: while it repeats this call, it neither gets nor loses
    /// slots.
    pub ends: Option<u64>,
}

/// Drains a member, for the rest of its incarnation or until [`Undrain`]: the member stays reachable, and the new
/// owners of its slots import their objects.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Drain {
    pub node: u64,
    /// None if an operator drains the member.
    pub incarnation: Option<u64>,
}

/// Ends the draining of a member, which gets its share of the slots again.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Undrain {
    pub node: u64,
    /// None if an operator undrains the member.
    pub incarnation: Option<u64>,
}
