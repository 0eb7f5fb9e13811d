//! State of nodes beside their membership: reports, orders and their answers, quota leases of tenants.

pub(crate) mod follow;
pub(crate) mod reports;
pub(crate) mod shards;
pub(crate) mod tenants;
pub(crate) mod tiers;

use std::collections::BTreeSet;

use kvplane_cluster::{Cluster, MemberState, MemberView};

use crate::nodes::follow::Follow;
use crate::nodes::shards::Shards;
use crate::nodes::tenants::TenantQuotas;
use crate::nodes::tiers::Tiers;

/// State of nodes beside their membership; in memory only. It ends with the incarnation that it belongs to.
pub(crate) struct NodeStates {
    pub(crate) tiers: Tiers,
    pub(crate) shards: Shards,
    pub(crate) follow: Follow,
    pub(crate) tenants: TenantQuotas,
}

impl NodeStates {
    /// Creates the state while nothing is known. With `strict_tenants` only configured tenants may put.
    pub(crate) fn new(strict_tenants: bool) -> Self {
        Self {
            tiers: Tiers::default(),
            shards: Shards::default(),
            follow: Follow::default(),
            tenants: TenantQuotas::new(strict_tenants),
        }
    }

    /// Drops the state of nodes that are not members any more.
    pub(crate) fn forget_gone(&mut self, cluster: &Cluster) {
        let Self { tiers, shards, follow, tenants } = self;
        tiers.retain(|node, incarnation| {
            let is_it = |view: &MemberView<'_>| {
                let member = view.member;
                (member.node.0, member.incarnation.0) == (node, incarnation) && view.state != MemberState::Left
            };
            cluster.members().any(|view| is_it(&view))
        });
        let live: BTreeSet<(u64, u64)> = cluster
            .members()
            .filter(|view| !matches!(view.state, MemberState::Dead | MemberState::Left))
            .map(|view| (view.member.node.0, view.member.incarnation.0))
            .collect();
        shards.retain(|node, incarnation| live.contains(&(node, incarnation)));
        follow.retain(|node, incarnation| live.contains(&(node, incarnation)));
        tenants.retain(|node, incarnation| live.contains(&(node, incarnation)));
    }
}
