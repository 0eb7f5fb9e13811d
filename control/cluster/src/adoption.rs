//! Adoption: a control plane that lost its state takes over the newest map that living members follow.
//!
//! A state without any map is one of a new cluster, or of one whose state was lost: a wiped etcd, a state file that is
//! gone. Members tell the two apart, as they follow a map. So nobody is given slots before there was time for members
//! to offer theirs ([`Offer`]): a member that is not known does that before it begins a new incarnation, in which it
//! would drop what it has. The newest map of the state that most members follow is adopted, with its owners,
//! incarnations and layout, and nothing moves by that.
//!
//! Its epoch is raised by `EPOCH_GAP`: a later map of the lost state may have been told to somebody who is not heard,
//! and no epoch has two maps. Members of the map that have not offered have their usual grace. Whoever owns nothing by
//! it and has not offered is left out, and joins anew. Tenants, segments and drains are not in maps: operators, and
//! their owners, say them again.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::message::MAX_VERSION_BYTES;
use crate::rejection::Rejection;

/// A member's map, offered to a control plane that may have lost its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Which state its map is of.
    pub state: u64,
    /// The map that it follows: it has the member in its present incarnation.
    pub map: ClusterMap,
    /// The member as it joined, with the share that it is to have.
    pub member: Member,
    /// Bytes it contributes.
    pub capacity_bytes: u64,
    /// Version of its program.
    pub version: String,
    /// A digest of its devices' identities, and since which epoch no incarnation of it went without them.
    pub devices: Option<(u128, Epoch)>,
}

/// The offers of members to a control plane without a map, until it adopts one.
pub(crate) struct Adoption {
    /// Before that, nobody is made a member by joining.
    wait_until_ns: u64,
    /// When what was offered is adopted at the latest; none before the first offer.
    adopt_at_ns: Option<u64>,
    /// Clients wait for the map: it is adopted, or nobody offers one in time.
    awaited: bool,
    offers: BTreeMap<NodeId, Offer>,
    /// Nodes that asked to join in another incarnation: they have nothing to offer.
    joins: BTreeSet<NodeId>,
}

impl Adoption {
    /// Members may offer their maps; without a first offer by then, a node that joins is the first of a new cluster.
    pub(crate) const fn new(now_ns: u64, wait_until_ns: u64) -> Self {
        let awaited = now_ns < wait_until_ns;
        Self { wait_until_ns, adopt_at_ns: None, awaited, offers: BTreeMap::new(), joins: BTreeSet::new() }
    }

    /// When time changes something: what was offered is adopted, or clients wait no longer.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.adopt_at_ns.or_else(|| self.awaited.then_some(self.wait_until_ns))
    }

    /// True while clients wait for the map.
    pub(crate) const fn is_awaited(&self) -> bool {
        self.awaited
    }

    /// Clients wait no longer; members may still offer.
    pub(crate) const fn await_no_longer(&mut self) {
        self.awaited = false;
    }

    /// True once a member has offered a map, so that the time of the adoption is set.
    pub(crate) const fn has_offers(&self) -> bool {
        self.adopt_at_ns.is_some()
    }

    /// True once the wait has timed out without an offer: then this is a new cluster.
    pub(crate) const fn is_over(&self, now_ns: u64) -> bool {
        self.adopt_at_ns.is_none() && now_ns >= self.wait_until_ns
    }

    /// A node asks to join, and has nothing to offer. When adoption will be over.
    pub(crate) fn note_join(&mut self, node: NodeId) -> u64 {
        self.joins.insert(node);
        self.adopt_at_ns.unwrap_or(self.wait_until_ns)
    }

    /// Takes an offer: what was offered is adopted at the returned time at the latest, which is `latest_ns` for the
    /// first one. `last_epoch` is beyond what counting can have reached, and `most` members may offer.
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

    /// The offer of a member of this state, in the incarnation that the map has.
    pub(crate) fn offer_of(&self, state: u64, member: &Member) -> Option<&Offer> {
        let same = |offer: &&Offer| offer.state == state && offer.member.incarnation == member.incarnation;
        self.offers.get(&member.node).filter(same)
    }

    /// The newest map of the state that most members follow.
    pub(crate) fn newest(&self) -> Option<&Offer> {
        let mut followers: BTreeMap<u64, usize> = BTreeMap::new();
        for offer in self.offers.values() {
            *followers.entry(offer.state).or_default() += 1;
        }
        self.offers.values().max_by_key(|offer| (followers[&offer.state], offer.map.epoch, offer.state))
    }

    /// Every member of the newest map was heard: waiting longer brings no further offer.
    pub(crate) fn is_complete(&self) -> bool {
        let heard = |member: &Member| self.offers.contains_key(&member.node) || self.joins.contains(&member.node);
        self.newest().is_some_and(|newest| newest.map.members.iter().all(heard))
    }
}
