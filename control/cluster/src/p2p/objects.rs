//! The catalog: which objects there are, by name and version, and who is a member of which swarm, for how long.

use std::collections::{BTreeMap, BTreeSet};

use super::locate::BufferLocation;
use super::member::{Failure, Hold, MemberReport, Place};
use super::object::{MAX_NAME_BYTES, ObjectError, ObjectSpec};
use super::ranks::{MAX_LABEL_BYTES, RankJoin, RankParent};
use super::shards::Interval;
use super::swarm::{Grant, Swarm};

/// Shards that a member has take little: so many are as much as one address.
const SHARDS_PER_ROW: usize = 16;

/// Limits of the catalog, and how long it remembers.
#[derive(Clone, Copy, Debug)]
pub struct ObjectsConfig {
    /// Objects, versions counted.
    pub objects: usize,
    /// Members of all swarms together.
    pub members: usize,
    /// Buffers, and shards, of all objects together, and what members say of them: the memory that this takes.
    pub table_rows: usize,
    /// How long a member is one without being heard, and an object is known that nobody has, in nanoseconds.
    pub lease_ns: u64,
    /// What chance begins with.
    pub seed: u64,
}

impl Default for ObjectsConfig {
    fn default() -> Self {
        Self { objects: 65_536, members: 65_536, table_rows: 16 << 20, lease_ns: 5_000_000_000, seed: 1 }
    }
}

/// The name of an object, of whatever version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectName<'a> {
    /// Whose.
    pub tenant: &'a str,
    /// Its name.
    pub name: &'a str,
}

impl<'a> ObjectName<'a> {
    /// The object of a tenant under a name.
    #[must_use]
    pub const fn new(tenant: &'a str, name: &'a str) -> Self {
        Self { tenant, name }
    }

    /// A version of it.
    fn version(self, version: u64) -> ObjectKey {
        ObjectKey { tenant: self.tenant.to_owned(), name: self.name.to_owned(), version }
    }

    fn not_found(self, version: Option<u64>) -> ObjectError {
        ObjectError::NotFound { name: self.name.to_owned(), version }
    }
}

/// A version of an object, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Whose.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
}

/// An object as listings have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectRow {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// All its bytes.
    pub total_bytes: u64,
    /// The length of a shard.
    pub shard_bytes: u64,
    /// How many shards there are.
    pub shards: u32,
    /// Its members.
    pub members: u32,
}

/// All objects and their swarms. Members are known by numbers that are not given twice.
#[derive(Debug)]
pub struct Objects {
    config: ObjectsConfig,
    by_key: BTreeMap<ObjectKey, u64>,
    swarms: BTreeMap<u64, (ObjectKey, Swarm)>,
    /// By member: its object.
    members: BTreeMap<u64, u64>,
    /// By client: its members.
    clients: BTreeMap<u64, BTreeSet<u64>>,
    /// Which swarms are to be looked at when.
    due: BTreeSet<(u64, u64)>,
    grants: Vec<Grant>,
    table_rows: usize,
    last: u64,
    leases_ns: u64,
}

impl Objects {
    /// None, from this time on. Numbers of members begin after `first`, which differs from incarnation to incarnation
    /// of a catalog.
    #[must_use]
    pub fn new(config: ObjectsConfig, first: u64, now_ns: u64) -> Self {
        Self {
            config,
            by_key: BTreeMap::new(),
            swarms: BTreeMap::new(),
            members: BTreeMap::new(),
            clients: BTreeMap::new(),
            due: BTreeSet::new(),
            grants: Vec::new(),
            table_rows: 0,
            last: first >> 1,
            leases_ns: now_ns + config.lease_ns,
        }
    }

    /// How long a member is one without being heard, in nanoseconds.
    #[must_use]
    pub const fn lease_ns(&self) -> u64 {
        self.config.lease_ns
    }

    /// Says what an object is; its version is the answer. Without a version it is the newest one if that is equal, and
    /// else the one after it.
    ///
    /// # Errors
    /// When it makes no sense, is another object than the one of this name and version, or is one too many.
    pub fn publish(
        &mut self,
        now_ns: u64,
        name: ObjectName<'_>,
        version: Option<u64>,
        spec: ObjectSpec,
    ) -> Result<u64, ObjectError> {
        check_name(name.name)?;
        spec.check()?;
        let digest = spec.digest();
        let newest = self.newest(name);
        let version = match (version, newest) {
            (Some(version), _) => version,
            (None, None) => 1,
            (None, Some((newest, id))) if self.swarms.get(&id).is_some_and(|(_, one)| one.digest() == digest) => newest,
            (None, Some((newest, _))) => newest + 1,
        };
        // The one after the greatest could not be.
        if version == 0 || version == u64::MAX {
            return Err(ObjectError::Malformed(format!("version {version}: give one from 1 to {}", u64::MAX - 1)));
        }
        let key = name.version(version);
        if let Some((_, swarm)) = self.by_key.get(&key).and_then(|id| self.swarms.get_mut(id)) {
            if swarm.digest() != digest {
                return Err(ObjectError::Differs { name: name.name.to_owned(), version });
            }
            swarm.touch(now_ns);
            return Ok(version);
        }
        let rows = rows_of(&spec);
        if self.by_key.len() >= self.config.objects {
            return Err(ObjectError::Limit { what: "objects", most: self.config.objects });
        }
        if self.table_rows + rows > self.config.table_rows {
            return Err(ObjectError::Limit { what: "rows of tables", most: self.config.table_rows });
        }
        self.last += 1;
        self.table_rows += rows;
        let swarm = Swarm::new(spec, self.config.seed ^ self.last, now_ns);
        self.by_key.insert(key.clone(), self.last);
        self.swarms.insert(self.last, (key, swarm));
        Ok(version)
    }

    fn newest(&self, name: ObjectName<'_>) -> Option<(u64, u64)> {
        self.by_key.range(name.version(0)..=name.version(u64::MAX)).next_back().map(|(key, &id)| (key.version, id))
    }

    /// The newest version of which sources have all; the newest that has members where there is none. A version that
    /// was published and is not held, or not any more, hides none that is.
    fn newest_held(&self, name: ObjectName<'_>) -> Option<(u64, u64)> {
        let held = |id: &u64| self.swarms.get(id).is_some_and(|(_, swarm)| !swarm.roster().is_empty());
        let versions = || self.by_key.range(name.version(0)..=name.version(u64::MAX)).rev().filter(|(_, id)| held(id));
        let whole = versions().find(|(_, id)| {
            self.swarms.get(id).is_some_and(|(_, swarm)| swarm.roster().is_whole(swarm.spec().layout.shards()))
        });
        whole.or_else(|| versions().next()).map(|(key, &id)| (key.version, id))
    }

    fn id_of(&self, name: ObjectName<'_>, version: Option<u64>) -> Result<(u64, u64), ObjectError> {
        let found = match version {
            None => self.newest_held(name),
            Some(version) => self.by_key.get(&name.version(version)).map(|&id| (version, id)),
        };
        found.ok_or_else(|| name.not_found(version))
    }

    /// What an object is; where no version is named, of the newest that its sources have all of.
    ///
    /// # Errors
    /// When it is not there; without a version, also when nobody has any.
    pub fn find(&self, name: ObjectName<'_>, version: Option<u64>) -> Result<(u64, &ObjectSpec), ObjectError> {
        let (version, id) = self.id_of(name, version)?;
        Ok((version, self.swarms[&id].1.spec()))
    }

    /// Who has an object, and how many shards no source has.
    ///
    /// # Errors
    /// When it is not there.
    pub fn describe(
        &self,
        name: ObjectName<'_>,
        version: Option<u64>,
    ) -> Result<(Vec<MemberReport>, u32), ObjectError> {
        let (_, id) = self.id_of(name, version)?;
        let swarm = &self.swarms[&id].1;
        Ok((swarm.roster().rows(), swarm.roster().lost(swarm.spec().layout.shards())))
    }

    /// Some of those who have all of a buffer and may be asked for it: those of the same host, those of the same rack,
    /// others; of equals another one first for each `client`.
    ///
    /// # Errors
    /// When the object is not there, or has no such buffer.
    pub fn locate(
        &self,
        name: ObjectName<'_>,
        version: u64,
        buffer: usize,
        near: &Place,
        client: u64,
    ) -> Result<Vec<BufferLocation>, ObjectError> {
        let (_, id) = self.id_of(name, Some(version))?;
        let swarm = &self.swarms[&id].1;
        let layout = &swarm.spec().layout;
        swarm.roster().locate(layout, buffer, near, client).ok_or_else(|| {
            let buffers = layout.sizes().len();
            ObjectError::Malformed(format!("buffer {buffer} of an object that has {buffers}"))
        })
    }

    /// A process becomes a member; its number is the answer. `digest` is that of what it takes the object to be.
    ///
    /// # Errors
    /// When the object is not there or another one, what is said makes no sense, or it is one member too many.
    pub fn hold(
        &mut self,
        now_ns: u64,
        name: ObjectName<'_>,
        version: u64,
        digest: u128,
        hold: Hold,
    ) -> Result<u64, ObjectError> {
        let (_, id) = self.id_of(name, Some(version))?;
        let labels = [&hold.segment, &hold.place.host, &hold.place.rack];
        if let Some(label) = labels.into_iter().find(|label| label.len() > MAX_LABEL_BYTES) {
            let text = format!("a label of {} bytes: at most {MAX_LABEL_BYTES}", label.len());
            return Err(ObjectError::Malformed(text));
        }
        if self.members.len() >= self.config.members {
            return Err(ObjectError::Limit { what: "members", most: self.config.members });
        }
        let Some((_, swarm)) = self.swarms.get_mut(&id) else {
            return Err(name.not_found(Some(version)));
        };
        if swarm.digest() != digest {
            return Err(ObjectError::Differs { name: name.name.to_owned(), version });
        }
        let (client, number) = (hold.client, self.last + 1);
        let rows = hold.addresses.len() + swarm.spec().layout.shards() as usize / SHARDS_PER_ROW + 1;
        if self.table_rows + rows > self.config.table_rows {
            return Err(ObjectError::Limit { what: "rows of tables", most: self.config.table_rows });
        }
        swarm.join(number, hold, now_ns, now_ns.saturating_add(self.config.lease_ns))?;
        self.table_rows += rows;
        self.last = number;
        self.members.insert(number, id);
        self.clients.entry(client).or_default().insert(number);
        self.settle(id);
        Ok(number)
    }

    fn swarm_of(&mut self, client: u64, member: u64) -> Result<(u64, &mut Swarm), ObjectError> {
        let unknown = ObjectError::UnknownMember { member };
        if !self.clients.get(&client).is_some_and(|members| members.contains(&member)) {
            return Err(unknown);
        }
        let id = self.members.get(&member).copied();
        id.and_then(|id| Some((id, &mut self.swarms.get_mut(&id)?.1))).ok_or(unknown)
    }

    /// What a member got, and what it could not get from whom it was told.
    ///
    /// # Errors
    /// When it is not a member, or not any more.
    pub fn report(
        &mut self,
        now_ns: u64,
        client: u64,
        member: u64,
        got: &[Interval],
        failed: &[Failure],
    ) -> Result<(), ObjectError> {
        let (id, swarm) = self.swarm_of(client, member)?;
        swarm.report(member, got, failed, now_ns);
        self.settle(id);
        Ok(())
    }

    /// A member is a rank of a job from now on: whom it fetches a half of the shards from by their schedule, if that
    /// one is there. To be asked again if not.
    ///
    /// # Errors
    /// When it is not a member, or what is said makes no sense or is not what the job's other ranks say.
    pub fn join_ranks(
        &mut self,
        client: u64,
        member: u64,
        join: &RankJoin,
        half: usize,
    ) -> Result<Option<RankParent>, ObjectError> {
        self.swarm_of(client, member)?.1.join_ranks(member, join, half)
    }

    /// A member wants shards from whoever has them; `failed` is what a rank did not get by its schedule.
    ///
    /// # Errors
    /// When it is not a member, or the object has no such shards.
    pub fn want(
        &mut self,
        now_ns: u64,
        client: u64,
        member: u64,
        want: &[Interval],
        failed: &[Failure],
    ) -> Result<(), ObjectError> {
        let (id, swarm) = self.swarm_of(client, member)?;
        swarm.want(member, want, failed, now_ns)?;
        self.settle(id);
        Ok(())
    }

    /// A client lives: those of its members that are known.
    pub fn renew(&mut self, now_ns: u64, client: u64) -> Vec<u64> {
        let members: Vec<u64> = self.clients.get(&client).into_iter().flatten().copied().collect();
        let lease_ns = now_ns.saturating_add(self.config.lease_ns);
        for &member in &members {
            if let Ok((id, swarm)) = self.swarm_of(client, member) {
                swarm.renew(member, now_ns, lease_ns);
                self.settle(id);
            }
        }
        members
    }

    /// A member is about to go: nothing more is fetched from it. How many fetches from it go on is the answer; where
    /// there are none, or it does not wait for them, it is gone.
    ///
    /// # Errors
    /// When it is not a member, or not any more.
    pub fn release(&mut self, now_ns: u64, client: u64, member: u64, wait: bool) -> Result<usize, ObjectError> {
        let (id, swarm) = self.swarm_of(client, member)?;
        let readers = swarm.leave(member);
        if readers == 0 || !wait {
            self.forget(id, member, now_ns);
        }
        self.settle(id);
        Ok(readers)
    }

    fn forget(&mut self, id: u64, member: u64, now_ns: u64) {
        self.members.remove(&member);
        let Some((_, swarm)) = self.swarms.get_mut(&id) else { return };
        let shards = swarm.spec().layout.shards() as usize;
        let Some((client, addresses)) = swarm.drop_member(member, now_ns) else { return };
        self.table_rows -= addresses + shards / SHARDS_PER_ROW + 1;
        if let Some(members) = self.clients.get_mut(&client) {
            members.remove(&member);
            if members.is_empty() {
                self.clients.remove(&client);
            }
        }
    }

    /// Objects of a tenant whose names begin with this, by name and version, after the one given.
    #[must_use]
    pub fn list(&self, tenant: &str, prefix: &str, after: Option<(&str, u64)>, most: usize) -> Vec<ObjectRow> {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        let key = |name: &str, version| ObjectKey { tenant: tenant.to_owned(), name: name.to_owned(), version };
        let from = match after {
            Some((name, version)) if name >= prefix => Excluded(key(name, version)),
            _ => Included(key(prefix, 0)),
        };
        let found = self.by_key.range((from, Unbounded));
        let found = found.take_while(|(key, _)| key.tenant == tenant && key.name.starts_with(prefix)).take(most);
        let row = |(key, id): (&ObjectKey, &u64)| {
            let swarm = &self.swarms.get(id)?.1;
            Some(ObjectRow {
                name: key.name.clone(),
                version: key.version,
                total_bytes: swarm.spec().layout.total_bytes(),
                shard_bytes: swarm.spec().layout.shard_bytes(),
                shards: swarm.spec().layout.shards(),
                members: swarm.roster().len() as u32,
            })
        };
        found.filter_map(row).collect()
    }

    /// Everything that a client was told to fetch and has not reported yet: for one that may have missed some.
    #[must_use]
    pub fn told(&self, client: u64) -> Vec<Grant> {
        let members = self.clients.get(&client).into_iter().flatten();
        let swarm = |member| Some((member, &self.swarms.get(self.members.get(member)?)?.1));
        members.filter_map(swarm).flat_map(|(&member, swarm)| swarm.told(member)).collect()
    }

    /// Lets time pass.
    pub fn tick(&mut self, now_ns: u64) {
        if self.leases_ns <= now_ns {
            self.leases_ns = now_ns + self.config.lease_ns / 4;
            self.expire(now_ns);
        }
        while let Some(&(at_ns, id)) = self.due.first()
            && at_ns <= now_ns
        {
            self.due.pop_first();
            let Some((_, swarm)) = self.swarms.get_mut(&id) else { continue };
            if swarm.due_ns() <= now_ns {
                swarm.look(now_ns);
                self.settle(id);
            }
        }
    }

    fn expire(&mut self, now_ns: u64) {
        let lease_ns = self.config.lease_ns;
        let ids: Vec<u64> = self.swarms.keys().copied().collect();
        for id in ids {
            for member in self.swarms[&id].1.roster().expired(now_ns) {
                self.forget(id, member, now_ns);
            }
            self.settle(id);
            let (key, swarm) = &self.swarms[&id];
            if swarm.roster().is_empty() && swarm.empty_since_ns().saturating_add(lease_ns) <= now_ns {
                self.by_key.remove(key);
                self.table_rows -= rows_of(swarm.spec());
                self.swarms.remove(&id);
            }
        }
    }

    /// When [`Self::tick`] is to be called, if something is to happen then.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        let looks = self.due.first().map(|&(at_ns, _)| at_ns);
        let leases = (!self.swarms.is_empty()).then_some(self.leases_ns);
        [looks, leases].into_iter().flatten().min()
    }

    /// What clients are to be told, in this order.
    pub fn poll_grants(&mut self) -> Vec<Grant> {
        std::mem::take(&mut self.grants)
    }

    /// Takes what a swarm wants to be told, and remembers when it is to be looked at.
    fn settle(&mut self, id: u64) {
        let Some((_, swarm)) = self.swarms.get_mut(&id) else { return };
        self.grants.extend(std::iter::from_fn(|| swarm.poll_grant()));
        let due_ns = swarm.due_ns();
        if due_ns != u64::MAX {
            self.due.insert((due_ns, id));
        }
    }
}

fn rows_of(spec: &ObjectSpec) -> usize {
    spec.layout.sizes().len() + spec.layout.shards() as usize + spec.about.len() / 16
}

fn check_name(name: &str) -> Result<(), ObjectError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        let text = format!("a name of {} bytes: give 1 to {MAX_NAME_BYTES}", name.len());
        return Err(ObjectError::Malformed(text));
    }
    Ok(())
}
