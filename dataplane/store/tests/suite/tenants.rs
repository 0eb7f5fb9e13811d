//! Tests of pins, groups and tenants' shares against a simple model of vectors, over a pool of objects of one size.
//! After every step the same objects exist.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, Version};
use kvplane_proto::message::ObjectPriority;
use kvplane_proto::tenants::TenantLease;
use kvplane_store::eviction::Eviction;
use kvplane_store::{Keep, ObjectPins, Replica, Reserve, ReserveError, Store, StoreConfig};
use proptest::prelude::*;

const POOL: u64 = 20;
const HARD_MOST: u64 = 5;
const GRANULE: u64 = 256;

#[derive(Clone, Debug)]
enum Op {
    Put { key: u8, tenant: u16, group: u64, soft_ns: u64, hard: bool, replace: bool, priority: ObjectPriority },
    Priority { key: u8, priority: ObjectPriority },
    Get { key: u8 },
    Unpin(usize),
    Remove { key: u8 },
    Tick(u64),
    Leases(Vec<Option<u64>>, Vec<u32>),
}

fn priority() -> impl Strategy<Value = ObjectPriority> {
    let of = |number| ObjectPriority::new(number).expect("it is in range");
    prop_oneof![2 => Just(ObjectPriority::NORMAL), 1 => (-4..=4i64).prop_map(of)]
}

fn op() -> impl Strategy<Value = Op> {
    let put = (0..40u8, 0..3u16, 0..4u64, 0..9u64, prop::bool::weighted(0.06), prop::bool::weighted(0.1), priority());
    let lease = || prop::option::weighted(0.4, 0..14u64);
    prop_oneof![
        20 => put.prop_map(|(key, tenant, group, soft, hard, replace, priority)| {
            // Tenants have disjoint keys.
            let (key, soft_ns) = (key + 64 * tenant as u8, if soft > 6 { soft } else { 0 });
            // Members of a group have one priority: otherwise the order in which they are evicted together, which is
            // that of their places in the arena, changes what others are charged.
            let of_group = [priority.number().into(), -3, 0, 2][group as usize];
            let priority = ObjectPriority::new(of_group).expect("it is in range");
            Op::Put { key, tenant, group, soft_ns, hard, replace, priority }
        }),
        8 => (0..40u8, 0..3u8).prop_map(|(key, tenant)| Op::Get { key: key + 64 * tenant }),
        6 => any::<usize>().prop_map(Op::Unpin),
        2 => (0..40u8, 0..3u8).prop_map(|(key, tenant)| Op::Remove { key: key + 64 * tenant }),
        2 => (0..40u8, 0..3u8, priority())
            .prop_map(|(key, tenant, priority)| Op::Priority { key: key + 64 * tenant, priority }),
        4 => (0..6u64).prop_map(Op::Tick),
        1 => (prop::collection::vec(lease(), 3), prop::collection::vec(1..4u32, 3))
            .prop_map(|(leases, weights)| Op::Leases(leases, weights)),
    ]
}

#[derive(Clone, Debug)]
struct Object {
    tenant: usize,
    group: u64,
    /// End of the soft pin, and the number of the put.
    until_ns: Option<(u64, u64)>,
    hard: bool,
    pins: usize,
    seen: u32,
    follows: bool,
    priority: ObjectPriority,
}

/// Model: each tenant's plain and softly pinned objects, oldest first.
#[derive(Default)]
struct Model {
    objects: BTreeMap<u8, Object>,
    plain: [Vec<u8>; 3],
    soft: [Vec<u8>; 3],
    /// Removed objects that are still pinned: the tenant, the pins, and whether it was hard pinned.
    doomed: Vec<(usize, usize, bool)>,
    touched: BTreeMap<(usize, u64), u32>,
    /// Objects of lower priorities that were evicted, of which a priority has not borne its sixteenth.
    charged: [BTreeMap<ObjectPriority, usize>; 3],
    leases: [Option<u64>; 3],
    weights: [u32; 3],
    now_ns: u64,
}

impl Model {
    fn used(&self, tenant: usize) -> u64 {
        let live = self.objects.values().filter(|object| object.tenant == tenant).count();
        (live + self.doomed.iter().filter(|doomed| doomed.0 == tenant && doomed.1 > 0).count()) as u64
    }

    fn all_used(&self) -> u64 {
        (0..3).map(|tenant| self.used(tenant)).sum()
    }

    fn stuck(&self, tenant: usize) -> u64 {
        let stuck = |object: &&Object| object.tenant == tenant && (object.pins > 0 || object.hard);
        let live = self.objects.values().filter(stuck).count();
        (live + self.doomed.iter().filter(|doomed| doomed.0 == tenant && doomed.1 > 0).count()) as u64
    }

    /// Returns the number of hard pinned objects, of one tenant or of all.
    fn hard(&self, tenant: Option<usize>) -> u64 {
        let of = |of: usize| tenant.is_none_or(|tenant| tenant == of);
        let live = self.objects.values().filter(|object| object.hard && of(object.tenant)).count();
        (live + self.doomed.iter().filter(|doomed| doomed.1 > 0 && doomed.2 && of(doomed.0)).count()) as u64
    }

    /// Returns the tenants with objects by their excess over their shares, largest first.
    fn by_excess(&self) -> Vec<(i64, usize)> {
        let active: Vec<usize> = (0..3).filter(|tenant| self.used(*tenant) > 0).collect();
        let leased: u64 = self.leases.iter().flatten().sum();
        let share_of_leased = |lease: u64| if leased > POOL { POOL * lease / leased } else { lease };
        let taken: u64 = active.iter().filter_map(|tenant| self.leases[*tenant]).map(share_of_leased).sum();
        let others = active.iter().filter(|tenant| self.leases[**tenant].is_none());
        let weights: u64 = others.map(|tenant| u64::from(self.weights[*tenant].max(1))).sum();
        let mut excess: Vec<(i64, usize)> = active
            .iter()
            .map(|tenant| {
                let share = match self.leases[*tenant] {
                    Some(lease) => share_of_leased(lease),
                    None => (POOL - taken) * u64::from(self.weights[*tenant].max(1)) / weights,
                };
                (self.used(*tenant) as i64 - share as i64, *tenant)
            })
            .collect();
        excess.sort_by_key(|(excess, tenant)| (-excess, *tenant));
        excess
    }

    fn recent(&mut self, key: u8) {
        let object = &self.objects[&key];
        if object.hard {
            return;
        }
        let lists = if object.until_ns.is_some() { &mut self.soft } else { &mut self.plain };
        lists[object.tenant].retain(|other| *other != key);
        lists[object.tenant].push(key);
    }

    fn touch(&mut self, key: u8) {
        let object = self.objects.get_mut(&key).expect("it is there");
        if object.group > 0 {
            let touched = self.touched.entry((object.tenant, object.group)).or_default();
            *touched += 1;
            (object.seen, object.follows) = (*touched, false);
        }
        self.recent(key);
    }

    fn group_touched(&self, object: &Object) -> u32 {
        self.touched.get(&(object.tenant, object.group)).copied().unwrap_or(0)
    }

    /// Returns the priorities of a tenant's plain objects that hold more than their floors, lowest first.
    fn above_floor(&self, tenant: usize) -> BTreeSet<ObjectPriority> {
        let plain = &self.plain[tenant];
        let held = |priority| plain.iter().filter(|key| self.objects[key].priority == priority).count();
        let all = plain.iter().map(|key| self.objects[key].priority);
        all.filter(|priority| held(*priority) * 16 > plain.len()).collect()
    }

    /// Returns the oldest plain object of a priority, or of any, that is not pinned.
    fn oldest(&self, tenant: usize, priority: Option<ObjectPriority>) -> Option<u8> {
        let is_of = |key: &&u8| priority.is_none_or(|priority| self.objects[key].priority == priority);
        self.plain[tenant].iter().filter(is_of).find(|key| self.objects[key].pins == 0).copied()
    }

    /// Returns the plain object that priorities name next.
    fn first_plain(&mut self, tenant: usize) -> Option<u8> {
        let above_floor = self.above_floor(tenant);
        for priority in &above_floor {
            if self.charged[tenant].get(priority).copied().unwrap_or(0) >= 16 {
                match self.oldest(tenant, Some(*priority)) {
                    Some(key) => return Some(key),
                    None => drop(self.charged[tenant].remove(priority)),
                }
            }
        }
        let lowest = above_floor.iter().find_map(|priority| self.oldest(tenant, Some(*priority)));
        let all: BTreeSet<_> = self.plain[tenant].iter().map(|key| self.objects[key].priority).collect();
        lowest.or_else(|| all.iter().find_map(|priority| self.oldest(tenant, Some(*priority))))
    }

    /// Charges the priorities above that of a plain object which is about to be evicted.
    fn charge_others(&mut self, key: u8) {
        let Object { tenant, priority, .. } = self.objects[&key];
        if !self.plain[tenant].contains(&key) {
            return;
        }
        for higher in self.above_floor(tenant).into_iter().filter(|higher| *higher > priority) {
            *self.charged[tenant].entry(higher).or_default() += 1;
        }
        let own = self.charged[tenant].entry(priority).or_default();
        *own = own.saturating_sub(16);
    }

    /// Returns the first object of a list that is not pinned and whose group was not accessed meanwhile.
    fn first(&mut self, tenant: usize, soft: bool) -> Option<u8> {
        loop {
            let key = match soft {
                true => *self.soft[tenant].iter().find(|key| self.objects[key].pins == 0)?,
                false => self.first_plain(tenant)?,
            };
            let touched = self.group_touched(&self.objects[&key]);
            let object = self.objects.get_mut(&key).expect("it is listed");
            if object.group == 0 || object.seen == touched {
                return Some(key);
            }
            (object.seen, object.follows) = (touched, false);
            self.recent(key);
        }
    }

    fn victim(&mut self, with_soft: bool) -> Option<u8> {
        let all = self.by_excess();
        for (_, tenant) in all.iter().filter(|(excess, _)| *excess > 0) {
            let found = self.first(*tenant, false).or_else(|| self.first(*tenant, true));
            if found.is_some() {
                return found;
            }
        }
        let plain = all.iter().find_map(|(_, tenant)| self.first(*tenant, false));
        plain.or_else(|| with_soft.then(|| all.iter().find_map(|(_, tenant)| self.first(*tenant, true))).flatten())
    }

    fn drop_object(&mut self, key: u8) -> Object {
        let object = self.objects.remove(&key).expect("it is there");
        self.plain[object.tenant].retain(|other| *other != key);
        self.soft[object.tenant].retain(|other| *other != key);
        self.forget_charges(object.tenant);
        let same = |other: &&Object| (other.tenant, other.group) == (object.tenant, object.group);
        if !self.objects.values().any(|other| same(&other)) {
            self.touched.remove(&(object.tenant, object.group));
        }
        object
    }

    /// A priority without plain objects owes nothing.
    fn forget_charges(&mut self, tenant: usize) {
        let (objects, plain) = (&self.objects, &self.plain[tenant]);
        let held: BTreeSet<_> = plain.iter().map(|key| objects[key].priority).collect();
        self.charged[tenant].retain(|priority, _| held.contains(priority));
    }

    fn set_priority(&mut self, key: u8, priority: ObjectPriority) {
        let object = self.objects.get_mut(&key).expect("it is there");
        if object.priority == priority {
            return;
        }
        object.priority = priority;
        let tenant = object.tenant;
        if self.plain[tenant].contains(&key) {
            self.recent(key);
        }
        self.forget_charges(tenant);
    }

    fn evict(&mut self, key: u8) {
        let object = self.objects[&key].clone();
        let touched = self.group_touched(&object);
        if object.group > 0 {
            let mates = self
                .objects
                .iter_mut()
                .filter(|(other, mate)| **other != key && (mate.tenant, mate.group) == (object.tenant, object.group));
            let mut going = Vec::new();
            for (other, mate) in mates.filter(|(_, mate)| !mate.hard && mate.until_ns.is_none()) {
                if mate.pins == 0 {
                    going.push(*other);
                } else {
                    (mate.follows, mate.seen) = (true, touched);
                }
            }
            for other in going {
                self.charge_others(other);
                let _ = self.drop_object(other);
            }
        }
        self.charge_others(key);
        self.drop_object(key);
    }

    fn expire(&mut self) {
        let now_ns = self.now_ns;
        let mut over: Vec<((u64, u64), u8)> =
            self.objects.iter().filter_map(|(key, o)| Some((o.until_ns?, *key))).collect();
        over.retain(|(until_ns, _)| until_ns.0 <= now_ns);
        over.sort_unstable();
        for (_, key) in over {
            let object = self.objects.get_mut(&key).expect("it is there");
            object.until_ns = None;
            let tenant = object.tenant;
            self.soft[tenant].retain(|other| *other != key);
            self.plain[tenant].push(key);
        }
    }

    /// Makes room for an object, or fails with the reason.
    fn make_room(&mut self, tenant: usize, hard: bool) -> Result<(), &'static str> {
        let tenants_most = self.leases[tenant].map_or(HARD_MOST, |lease| lease / 4);
        if hard && (self.hard(None) + 1 > HARD_MOST || self.hard(Some(tenant)) + 1 > tenants_most) {
            return Err("pin limit");
        }
        self.expire();
        while let Some(lease) = self.leases[tenant].filter(|lease| self.used(tenant) + 1 > *lease) {
            let may_fit = self.stuck(tenant) < lease;
            let victim = may_fit.then(|| self.first(tenant, false).or_else(|| self.first(tenant, true))).flatten();
            self.evict(victim.ok_or("quota")?);
        }
        if self.all_used() == POOL {
            let stuck: u64 = (0..3).map(|tenant| self.stuck(tenant)).sum();
            if stuck == POOL {
                return Err("no space");
            }
            let victim = self.victim(false).or_else(|| self.victim(true)).ok_or("no space")?;
            self.evict(victim);
        }
        Ok(())
    }
}

/// Store and its model, step by step.
struct Pair {
    store: Store,
    model: Model,
    pins: Vec<(PinId, Option<u8>, Option<usize>)>,
    puts: u64,
}

fn digest(key: u8) -> Digest {
    Digest(u128::from(key) + 1)
}

impl Pair {
    fn new() -> Self {
        let config = StoreConfig {
            eviction: Eviction::Lru,
            max_object_bytes: GRANULE,
            max_pins: 12,
            max_reservations: 4,
            max_objects: 200,
            hard_pin_percent: 25,
            ..StoreConfig::for_pool(POOL * GRANULE)
        };
        let mut store = Store::new(config, Version(1)).expect("it is valid");
        store.tenants_mut().set(&[1, 2].map(|number| TenantLease { number, dram_bytes: None, weight: 1 }));
        Self { store, model: Model { weights: [1; 3], ..Model::default() }, pins: Vec::new(), puts: 0 }
    }

    fn put(&mut self, op: &Op) {
        let Op::Put { key, tenant, group, soft_ns, hard, replace, priority } = *op else { return };
        let account = self.store.tenants().account_of(tenant.into()).expect("it was told");
        let keep = Keep { account, group, soft_pin_ns: soft_ns, hard_pin: hard, priority };
        let got = self.store.reserve_for(&Reserve { replace, keep, ..Reserve::plain(digest(key), GRANULE) });
        if !replace && self.model.objects.contains_key(&key) {
            assert_eq!(got, Err(ReserveError::Exists));
            self.model.touch(key);
            return;
        }
        let wanted = self.model.make_room(tenant.into(), hard);
        let got = got.map_err(|error| match error {
            ReserveError::Quota { .. } => "quota",
            ReserveError::PinLimit { .. } => "pin limit",
            ReserveError::NoSpace { .. } => "no space",
            other => panic!("{other}"),
        });
        assert_eq!(got.map(|_| ()), wanted, "{op:?}");
        let Ok((reservation, _)) = got else { return };
        self.store.commit(reservation, 0).expect("nobody else puts it");
        if self.model.objects.contains_key(&key) {
            self.remove_from_model(key);
        }
        self.puts += 1;
        let until_ns = (soft_ns > 0 && !hard).then_some((self.model.now_ns + soft_ns, self.puts));
        let tenant = usize::from(tenant);
        let seen = self.model.touched.get(&(tenant, group)).copied().unwrap_or(0);
        self.model
            .objects
            .insert(key, Object { tenant, group, until_ns, hard, pins: 0, seen, follows: false, priority });
        self.model.recent(key);
    }

    fn remove_from_model(&mut self, key: u8) {
        let object = self.model.drop_object(key);
        let at = self.model.doomed.len();
        self.model.doomed.push((object.tenant, object.pins, object.hard));
        for (_, held, doomed) in &mut self.pins {
            if *held == Some(key) {
                (*held, *doomed) = (None, Some(at));
            }
        }
    }

    fn unpin(&mut self, n: usize) {
        if self.pins.is_empty() {
            return;
        }
        let (pin, key, doomed) = self.pins.swap_remove(n % self.pins.len());
        self.store.unpin(pin).expect("it is held");
        if let Some(at) = doomed {
            self.model.doomed[at].1 -= 1;
            return;
        }
        let key = key.expect("of what is there or of what was removed");
        let touched = self.model.group_touched(&self.model.objects[&key]);
        let object = self.model.objects.get_mut(&key).expect("it is held");
        object.pins -= 1;
        if object.pins == 0 && object.group > 0 && !object.hard {
            let follows = std::mem::take(&mut object.follows) && object.seen == touched;
            if follows && object.until_ns.is_none() {
                self.model.charge_others(key);
                self.model.drop_object(key);
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Put { .. } => self.put(op),
            Op::Get { key } => match self.store.get(digest(*key)) {
                Ok((pin, _)) => {
                    self.model.touch(*key);
                    self.model.objects.get_mut(key).expect("it is there").pins += 1;
                    self.pins.push((pin, Some(*key), None));
                }
                Err(_) => assert!(self.pins.len() == 12 || !self.model.objects.contains_key(key)),
            },
            Op::Unpin(n) => self.unpin(*n),
            Op::Remove { key } => {
                let there = self.model.objects.contains_key(key);
                assert_eq!(self.store.remove(digest(*key)), there);
                if there {
                    self.remove_from_model(*key);
                }
            }
            Op::Priority { key, .. } if self.model.objects.get(key).is_some_and(|object| object.group > 0) => {}
            Op::Priority { key, priority } => {
                let set = ObjectPins::from(&mut self.store).set_priority(digest(*key), *priority);
                assert_eq!(set.is_ok(), self.model.objects.contains_key(key));
                if set.is_ok() {
                    self.model.set_priority(*key, *priority);
                }
            }
            Op::Tick(ns) => {
                self.model.now_ns += ns;
                self.store.tick(self.model.now_ns);
                // A clock that jumps back changes nothing.
                self.store.tick(self.model.now_ns / 2);
            }
            Op::Leases(leases, weights) => {
                let of = |number: usize| TenantLease {
                    number: number as u32,
                    dram_bytes: leases[number].map(|granules| granules * GRANULE),
                    weight: weights[number],
                };
                self.store.tenants_mut().set(&[0, 1, 2].map(of));
                (0..3).for_each(|at| (self.model.leases[at], self.model.weights[at]) = (leases[at], weights[at]));
            }
        }
        self.store.check();
        let there: BTreeSet<u8> = (0..=u8::MAX).filter(|key| self.store.exists(digest(*key))).collect();
        assert_eq!(there, self.model.objects.keys().copied().collect(), "after {op:?}");
        for used in self.store.tenants().uses() {
            assert_eq!(used.used_bytes, self.model.used(used.number as usize) * GRANULE, "tenant {}", used.number);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn pins_groups_and_shares_are_as_the_model_says(ops in prop::collection::vec(op(), 1..300)) {
        let mut pair = Pair::new();
        ops.iter().for_each(|op| pair.apply(op));
    }
}

fn put(store: &mut Store, key: u128, keep: Keep) -> Result<(), ReserveError> {
    let (reservation, _) = store.reserve_for(&Reserve { keep, ..Reserve::plain(Digest(key), GRANULE) })?;
    store.commit(reservation, 0).expect("nobody else puts it");
    Ok(())
}

#[test]
fn hard_pins_never_exhaust_the_pool() {
    let mut store = Store::new(StoreConfig::for_pool(100 * GRANULE), Version(1)).expect("it is valid");
    let hard = Keep { hard_pin: true, ..Keep::default() };
    let refused = (0..100).map(|key| put(&mut store, key, hard)).filter(Result::is_err).count();
    assert_eq!((refused, store.stats().kept.hard_bytes), (75, 25 * GRANULE));
    let error = put(&mut store, 1000, hard).expect_err("no more").to_string();
    assert_eq!(
        error,
        "6400 bytes are hard pinned, and 6400 may be: put the object without a hard pin, remove hard-pinned objects, \
         or raise the node's share of hard pins"
    );
    for key in 2000..2300 {
        put(&mut store, key, Keep::default()).expect("the others make room");
    }
    assert_eq!((0..25).filter(|key| store.exists(Digest(*key))).count(), 25);
    store.check();
}

#[test]
fn replicas_are_hard_pinned_within_the_limits() {
    let mut store = Store::new(StoreConfig::for_pool(100 * GRANULE), Version(1)).expect("it is valid");
    let keep = Keep { hard_pin: true, ..Keep::default() };
    for key in 0..30 {
        let wanted = Reserve { keep, replica: Replica::Second, ..Reserve::plain(Digest(key), GRANULE) };
        let (reservation, _) = store.reserve_for(&wanted).expect("without a pin, if need be");
        store.commit(reservation, 0).expect("it is new");
    }
    assert_eq!(store.stats().kept.hard_bytes, 25 * GRANULE);
    assert!(put(&mut store, 100, keep).is_err(), "pins are used up");
    for key in 2000..2300 {
        put(&mut store, key, Keep::default()).expect("the others make room");
    }
    assert_eq!((0..30).filter(|key| store.exists(Digest(*key))).count(), 25);
    store.check();
}

#[test]
fn a_tenants_burst_leaves_those_within_their_shares_alone() {
    let mut store = Store::new(StoreConfig::for_pool(100 * GRANULE), Version(1)).expect("it is valid");
    store.tenants_mut().set(&[TenantLease { number: 7, dram_bytes: None, weight: 1 }]);
    let other = Keep { account: store.tenants().account_of(7).expect("it was told"), ..Keep::default() };
    for key in 0..40 {
        put(&mut store, key, other).expect("there is room");
    }
    for key in 1000..3000 {
        put(&mut store, key, Keep::default()).expect("the tenant makes room for itself");
    }
    assert_eq!((0..40).filter(|key| store.exists(Digest(*key))).count(), 40);
    // With a lease, the tenant has no more than that, and makes room among its own objects.
    store.tenants_mut().set(&[TenantLease { number: 7, dram_bytes: Some(10 * GRANULE), weight: 1 }]);
    put(&mut store, 100, other).expect("it makes room for itself");
    let seven = store.tenants().uses().into_iter().find(|tenant| tenant.number == 7).expect("it is there");
    assert_eq!((seven.used_bytes, seven.lease_bytes), (10 * GRANULE, Some(10 * GRANULE)));
    store.check();
}
