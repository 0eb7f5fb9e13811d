//! Messages about when a node gets its share of the slots, and loses it: its devices, what has moved, and draining.

/// A life of a node that is about to join says which devices it has: what is on them counts only if no life of the node
/// went without them. A life that does not say it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AttachDevices {
    /// Who.
    pub node: u64,
    /// Which life.
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

/// Says that a member has heard of a map, and has all that moved to it by this one or earlier ones. The first comes
/// before the first heartbeat, with epoch 0: more will come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Settled {
    /// Which member.
    pub node: u64,
    /// In which life.
    pub incarnation: u64,
    /// The map's epoch.
    pub epoch: u64,
}

/// Has a member give its slots away, for the rest of its life or until [`Undrain`]: it stays reachable, and their new
/// owners fetch what was in them.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Drain {
    /// Which member.
    pub node: u64,
    /// In which life; an operator passes none.
    pub incarnation: Option<u64>,
}

/// Gives a member its share of the slots again that was drained, or is being drained.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Undrain {
    /// Which member.
    pub node: u64,
    /// In which life; an operator passes none.
    pub incarnation: Option<u64>,
}
