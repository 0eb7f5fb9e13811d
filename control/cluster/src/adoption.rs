//! Adoption: a control plane that lost its state takes over the newest map that living members follow.
//!
//! A cluster state without a map belongs either to a new cluster or to one whose state was lost: a wiped etcd, a
//! deleted state file. Members tell the two apart, because they still follow a map. Therefore no node is given slots
//! before members had time to offer their maps ([`Offer`]): a member that the control plane does not know offers its
//! map before it begins a new incarnation, in which it would drop its objects. The control plane adopts the newest map
//! of the state that most members follow, with its owners, incarnations and layout; no slot migrates because of an
//! adoption.
//!
//! The epoch of the adopted map is raised by `EPOCH_GAP`: the lost state may have published a later map to members that
//! have not offered theirs, and two maps must never share an epoch. Members of the map that have not offered have the
//! usual restart grace. A member that owns nothing by the map and has not offered is left out, and joins again. Maps do
//! not contain tenants, segments and drains: operators and segment owners register them again.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::message::MAX_VERSION_BYTES;
use crate::rejection::Rejection;

/// A member's map, offered to a control plane that may have lost its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Identity of the cluster state that its map belongs to.
    pub state: u64,
    /// Map that the member follows; it contains the member in its present incarnation.
    pub map: ClusterMap,
    /// The member as it joined, with the weight that it is to have.
    pub member: Member,
    /// Bytes it contributes.
    pub capacity_bytes: u64,
    /// Version of its program.
    pub version: String,
    /// Digest of its devices' identities, and the epoch since which every incarnation of the node had these devices.
    pub devices: Option<(u128, Epoch)>,
}

/// The offers of members to a control plane without a map, until it adopts one.
pub(crate) struct Adoption {
    /// End of the wait for a first offer; until then a join makes no node a member.
    wait_until_ns: u64,
    /// Latest time of the adoption; none before the first offer.
    adopt_at_ns: Option<u64>,
    /// True while clients wait for the map: until an adoption, or until the wait times out without an offer.
    awaited: bool,
    offers: BTreeMap<NodeId, Offer>,
    /// Nodes that requested to join in another incarnation, and so have no map to offer.
    joins: BTreeSet<NodeId>,
}

impl Adoption {
    /// Begins to wait for offers; without a first offer by `wait_until_ns`, a node that joins is the first of a new
    /// cluster.
    pub(crate) const fn new(now_ns: u64, wait_until_ns: u64) -> Self {
        let awaited = now_ns < wait_until_ns;
        Self { wait_until_ns, adopt_at_ns: None, awaited, offers: BTreeMap::new(), joins: BTreeSet::new() }
    }

    /// Returns the next deadline: of the adoption, or of the clients' wait.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.adopt_at_ns.or_else(|| self.awaited.then_some(self.wait_until_ns))
    }

    /// Returns true while clients wait for the map.
    pub(crate) const fn is_awaited(&self) -> bool {
        self.awaited
    }

    /// Ends the clients' wait; members may still offer their maps.
    pub(crate) const fn await_no_longer(&mut self) {
        self.awaited = false;
    }

    /// Returns true once a member has offered a map, so that the time of the adoption is set.
    pub(crate) const fn has_offers(&self) -> bool {
        self.adopt_at_ns.is_some()
    }

    /// Returns true once the wait has timed out without an offer: this is a new cluster.
    pub(crate) const fn is_over(&self, now_ns: u64) -> bool {
        self.adopt_at_ns.is_none() && now_ns >= self.wait_until_ns
    }

    /// Notes the join of a node that has no map to offer. Returns the time at which adoption will be over.
    pub(crate) fn note_join(&mut self, node: NodeId) -> u64 {
        self.joins.insert(node);
        self.adopt_at_ns.unwrap_or(self.wait_until_ns)
    }

    /// Accepts an offer. Returns the latest time of the adoption, which is `latest_ns` for the first offer. Offers of
    /// an epoch beyond `last_epoch` are rejected as corrupt; at most `most` members may offer.
    pub(crate) fn offer(
        &mut self,
        offer: Offer,
        latest_ns: u64,
        last_epoch: Epoch,
        most: usize,
    ) -> Result<u64, Rejection> {
        let (node, incarnation) = (offer.member.node, offer.member.incarnation);
        offer.map.validate().and_then(|()| offer.member.validate()).map_err(Rejection::Member)?;
        if offer.version.len() > MAX_VERSION_BYTES {
            return Err(Rejection::Version { bytes: offer.version.len() });
        }
        let is_in_map = offer.map.member(node).is_some_and(|member| member.incarnation == incarnation);
        if !is_in_map || offer.state == 0 || offer.map.epoch > last_epoch {
            return Err(Rejection::OfferRefused { node });
        }
        if self.offers.len() >= most && !self.offers.contains_key(&node) {
            return Err(Rejection::TooManyMembers { limit: most });
        }
        self.offers.insert(node, offer);
        Ok(*self.adopt_at_ns.get_or_insert(latest_ns))
    }

    /// Returns the offer of a member of this state, in the incarnation that the map has.
    pub(crate) fn offer_of(&self, state: u64, member: &Member) -> Option<&Offer> {
        let same = |offer: &&Offer| offer.state == state && offer.member.incarnation == member.incarnation;
        self.offers.get(&member.node).filter(same)
    }

    /// Returns the newest map of the state that most members follow.
    pub(crate) fn newest(&self) -> Option<&Offer> {
        let mut followers: BTreeMap<u64, usize> = BTreeMap::new();
        for offer in self.offers.values() {
            *followers.entry(offer.state).or_default() += 1;
        }
        self.offers.values().max_by_key(|offer| (followers[&offer.state], offer.map.epoch, offer.state))
    }

    /// Returns true once every member of the newest map has offered or joined: a longer wait brings no further offer.
    pub(crate) fn is_complete(&self) -> bool {
        let heard = |member: &Member| self.offers.contains_key(&member.node) || self.joins.contains(&member.node);
        self.newest().is_some_and(|newest| newest.map.members.iter().all(heard))
    }
}
