//! Adoption: a control plane that lost its state takes over the newest map that living members follow.
//!
//! A state without any map is one of a new cluster, or of one whose state was lost: a wiped etcd, a state file that is
//! gone. Members tell the two apart, as they follow a map. So nobody is given slots before there was time for members
//! to offer theirs ([`Offer`]): a member that is not known does that before it begins a new incarnation, in which it
//! would drop what it has. The newest map of the state that most members follow is adopted, with its owners,
//! incarnations and layout, and nothing moves by that.
//!
//! Its epoch is raised by [`EPOCH_GAP`]: a later map of the lost state may have been told to somebody who is not heard,
//! and no epoch has two maps. Members of the map that have not offered have their usual grace. Whoever owns nothing by
//! it and has not offered is left out, and joins anew. Tenants, segments and drains are not in maps: operators, and
//! their owners, say them again.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, NodeId};
use kvplane_proto::map::{ClusterMap, Member};

use crate::cluster::{Cluster, Evidence, Row, claims};
use crate::devices::Devices;
use crate::message::{Change, MAX_VERSION_BYTES, Output, Reply};
use crate::record::{Layout, Record};
use crate::rejection::Rejection;
use crate::start::LAST_EPOCH;
use crate::state::MemberState;

/// By how much the epoch of an adopted map is raised: more maps than were published while no member heard any.
pub(crate) const EPOCH_GAP: u64 = 1000;

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

    /// The newest map of the state that most members follow.
    fn newest(&self) -> Option<&Offer> {
        let mut followers: BTreeMap<u64, usize> = BTreeMap::new();
        for offer in self.offers.values() {
            *followers.entry(offer.state).or_default() += 1;
        }
        self.offers.values().max_by_key(|offer| (followers[&offer.state], offer.map.epoch, offer.state))
    }

    /// Every member of the newest map was heard: waiting longer brings no further offer.
    fn is_complete(&self) -> bool {
        let heard = |member: &Member| self.offers.contains_key(&member.node) || self.joins.contains(&member.node);
        self.newest().is_some_and(|newest| newest.map.members.iter().all(heard))
    }
}

impl Cluster {
    /// Refuses who would be made a member while a lost state may still be offered. Without offers, the wait ends with
    /// its time: then this is a new cluster.
    pub(crate) fn refuse_while_adopting(&mut self, node: NodeId) -> Result<(), Rejection> {
        let Some(adoption) = &mut self.adoption else { return Ok(()) };
        if adoption.adopt_at_ns.is_none() && self.now_ns >= adoption.wait_until_ns {
            self.adoption = None;
            return Ok(());
        }
        adoption.joins.insert(node);
        let at_ns = adoption.adopt_at_ns.unwrap_or(adoption.wait_until_ns);
        let retry_after_ns = at_ns.saturating_sub(self.now_ns).clamp(1, self.config.heartbeat_interval_ns);
        if adoption.is_complete() {
            self.adopt();
        }
        Err(Rejection::Adopting { retry_after_ns })
    }

    /// A member that is not known offers the map that it follows.
    pub(crate) fn offer(&mut self, offer: Offer) -> Result<Reply, Rejection> {
        let (node, incarnation) = (offer.member.node, offer.member.incarnation);
        let Some(adoption) = &mut self.adoption else {
            // It may have been adopted meanwhile; then it goes on.
            return match self.expect_live(node, incarnation) {
                Ok(()) => Ok(Reply::Offered),
                Err(Rejection::Unknown { .. }) => Err(Rejection::OfferRefused { node }),
                Err(rejection) => Err(rejection),
            };
        };
        offer.map.validate().and_then(|()| offer.member.validate()).map_err(Rejection::Member)?;
        if offer.version.len() > MAX_VERSION_BYTES {
            return Err(Rejection::Version { bytes: offer.version.len() });
        }
        let is_in_map = offer.map.member(node).is_some_and(|member| member.incarnation == incarnation);
        if !is_in_map || offer.state == 0 || offer.map.epoch.0 > LAST_EPOCH.0 - EPOCH_GAP {
            return Err(Rejection::OfferRefused { node });
        }
        if adoption.offers.len() >= self.config.limits.members && !adoption.offers.contains_key(&node) {
            return Err(Rejection::TooManyMembers { limit: self.config.limits.members });
        }
        adoption.offers.insert(node, offer);
        let latest_ns = self.now_ns.saturating_add(self.config.heartbeat_deadline_ns);
        let at_ns = *adoption.adopt_at_ns.get_or_insert(latest_ns);
        if adoption.is_complete() {
            self.adopt();
        } else {
            self.arm(Some(at_ns));
        }
        Ok(Reply::Offered)
    }

    /// True while members of a lost state may still offer their map: clients wait for the map that is adopted, or for
    /// [`Output::BeganEmpty`].
    #[must_use]
    pub fn awaits_offers(&self) -> bool {
        self.adoption.as_ref().is_some_and(|adoption| adoption.awaited)
    }

    /// Adopts what was offered, if it is time. Without an offer, clients wait no longer; members may still offer.
    pub(crate) fn adopt_due(&mut self) {
        let now_ns = self.now_ns;
        let Some(adoption) = self.adoption.as_mut().filter(|adoption| adoption.due_ns().is_some_and(|at| at <= now_ns))
        else {
            return;
        };
        if adoption.adopt_at_ns.is_some() {
            self.adopt();
        } else {
            adoption.awaited = false;
            self.outputs.push_back(Output::BeganEmpty);
        }
    }

    /// Goes on with the newest map that was offered, as after a restart.
    fn adopt(&mut self) {
        let Some(adoption) = self.adoption.take() else { return };
        let Some(newest) = adoption.newest() else { return };
        let (state, map) = (newest.state, newest.map.clone());
        let graced_ns = self.now_ns.saturating_add(self.config.restart_grace_ns);
        for member in &map.members {
            let same = |offer: &&Offer| offer.state == state && offer.member.incarnation == member.incarnation;
            let row = match adoption.offers.get(&member.node).filter(same) {
                Some(offer) => self.row_of_offer(offer),
                None if member.weight == 0 => continue,
                None => Row {
                    member: member.clone(),
                    state: MemberState::Active,
                    capacity_bytes: 0,
                    version: String::new(),
                    load: None,
                    heard_ns: graced_ns,
                    heard: false,
                    joined_ns: self.now_ns,
                    ended: Epoch(0),
                    shared: false,
                    settled: None,
                    newcomer: false,
                    seen: Evidence::default(),
                },
            };
            self.rows.insert(member.node, row);
        }
        let since = map.former.as_ref().map_or(map.epoch, |former| former.since);
        // Of a map that says nothing of the layout before, only its beginning is known.
        let former = map.former.clone().filter(|former| !former.began.is_empty());
        self.layout = Layout { since, claims: claims(&map).unwrap_or(0), former };
        self.map.epoch = Epoch(map.epoch.0 + EPOCH_GAP);
        self.map.replicas = map.replicas;
        self.map_changed = map.replicas != self.config.replicas;
        self.restore_shares();
        self.map.members = self.map_members();
        self.changes.push(Change::Put(Record::Layout(self.layout.clone())));
        if !self.map_changed {
            self.note_layout(&[]);
        }
        self.changes.push(Change::Put(self.header()));
        self.changes.extend(self.rows.values().map(|row| Change::Put(row.record())));
        self.outputs.push_back(Output::Adopt { state, changes: core::mem::take(&mut self.changes) });
        self.outputs.push_back(Output::MapChanged(self.map.clone()));
        self.counters.adoptions += 1;
        self.rearm();
    }

    fn row_of_offer(&mut self, offer: &Offer) -> Row {
        let (node, incarnation) = (offer.member.node, offer.member.incarnation);
        if let Some((devices, since)) = offer.devices {
            let said = Devices { node, incarnation, devices, since };
            self.devices.insert(node, said);
            self.changes.push(Change::Put(Record::Devices(said)));
        }
        Row {
            member: offer.member.clone(),
            state: MemberState::Active,
            capacity_bytes: offer.capacity_bytes,
            version: offer.version.clone(),
            load: None,
            heard_ns: self.now_ns,
            heard: true,
            joined_ns: self.now_ns,
            ended: Epoch(0),
            shared: false,
            settled: None,
            newcomer: false,
            seen: Evidence::default(),
        }
    }
}
