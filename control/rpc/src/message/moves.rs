//! Messages about when a node gets its share of the slots, and loses it: its devices, what has moved, and draining.

use bincode::de::{Decode, Decoder};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};
use kvplane_proto::map::ClusterMap;

use crate::message::{Join, MapReply};

/// Asks which incarnation of a node is known last: the next one has a greater number, whatever the clock of its host
/// says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetIncarnation {
    /// Which node.
    pub node: u64,
}

/// The answer to [`GetIncarnation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LastIncarnation {
    /// The incarnation of that incarnation; 0 where none is known.
    pub incarnation: u64,
}

/// A member that the control plane does not know says which map it follows, before it begins a new incarnation: the
/// control plane may have lost its state, and goes on with what members say of it. Refused as an unknown member's where
/// it has not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferMap {
    /// The member as it joined, and bytes and version as it said them.
    pub join: Join,
    /// Which state of the control plane the map is of.
    pub state: u64,
    /// The map.
    pub map: ClusterMap,
    /// A digest of its devices' identities; 0 for none.
    pub devices: u128,
    /// Since which epoch no incarnation of the node went without them.
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

/// An incarnation of a node that is about to join says which devices it has: what is on them counts only if no
/// incarnation of the node went without them. An incarnation that does not say it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AttachDevices {
    /// Who.
    pub node: u64,
    /// Which incarnation.
    pub incarnation: u64,
    /// A digest of the devices' identities.
    pub devices: u128,
}

/// The answer to [`AttachDevices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct DevicesKept {
    /// What is on the devices counts if they last heard of a map of this epoch, or of a later one.
    pub since: u64,
}

/// Says that a member follows a map, and has all that moved to it by this one or earlier ones; of every map, as
/// liveness probes wait for that. The first comes before the first heartbeat, with epoch 0: more will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SettleReport {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// The map's epoch.
    pub epoch: u64,
}

/// Asks whether members other than this one wait for what moved to them. A node that is to end asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetMoves {
    /// Which member.
    pub node: u64,
    /// Its incarnation, where it is about to end: while it asks so, it gets no slots, and loses none.
    pub ends: Option<u64>,
}

/// The answer to [`GetMoves`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Moves {
    /// Other members that have not said yet that they have all that moved to them by the last map that moved slots.
    pub unsettled: u32,
    /// Whether the member itself has not.
    pub behind: bool,
}

/// Has a member give its slots away, for the rest of its incarnation or until [`Undrain`]: it stays reachable, and
/// their new owners fetch what was in them.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Drain {
    /// Which member.
    pub node: u64,
    /// In which incarnation; an operator passes none.
    pub incarnation: Option<u64>,
}

/// Gives a member its share of the slots again that was drained, or is being drained.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Undrain {
    /// Which member.
    pub node: u64,
    /// In which incarnation; an operator passes none.
    pub incarnation: Option<u64>,
}
