//! Catalog of the P2P store: objects by name and version, and the members of each object's swarm with their leases.

use std::collections::{BTreeMap, BTreeSet};

use bincode::{Decode, Encode};

use super::locate::ObjectPlace;
use super::member::{FetchFailure, Hold, ObjectMember, PeerLocation};
use super::object::{MAX_NAME_BYTES, ObjectError, ObjectSpec};
use super::ranks::{MAX_LABEL_BYTES, RankJoin, RankParent};
use super::shards::Interval;
use super::swarm::{Grant, Swarm};

/// Number of a member's shards that cost as much memory as one table row: a shard is one bit or a few.
const SHARDS_PER_ROW: usize = 16;

/// Limits of the catalog, and the duration of leases.
#[derive(Clone, Copy, Debug)]
pub struct ObjectsConfig {
    /// Maximum number of objects, counting versions.
    pub objects: usize,
    /// Maximum number of members of all swarms.
    pub members: usize,
    /// Maximum number of table rows: buffers and shards of all objects, and the reports of members; bounds the memory.
    pub table_rows: usize,
    /// Lease of a member, and time for which an object without members is remembered, in nanoseconds.
    pub lease_ns: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for ObjectsConfig {
    fn default() -> Self {
        Self { objects: 65_536, members: 65_536, table_rows: 16 << 20, lease_ns: 5_000_000_000, seed: 1 }
    }
}

/// Name of an object, without its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectName<'a> {
    pub tenant: &'a str,
    pub name: &'a str,
}

impl<'a> ObjectName<'a> {
    /// Returns the name of a tenant's object.
    #[must_use]
    pub const fn new(tenant: &'a str, name: &'a str) -> Self {
        Self { tenant, name }
    }

    /// Returns the key of a version of the object.
    fn version(self, version: u64) -> ObjectKey {
        ObjectKey { tenant: self.tenant.to_owned(), name: self.name.to_owned(), version }
    }

    fn not_found(self, version: Option<u64>) -> ObjectError {
        ObjectError::NotFound { name: self.name.to_owned(), version }
    }
}

/// Name and version of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectKey {
    pub tenant: String,
    pub name: String,
    pub version: u64,
}

/// Row of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectSummary {
    pub name: String,
    pub version: u64,
    /// Size of the object in bytes.
    pub total_bytes: u64,
    /// Length of a shard in bytes.
    pub shard_bytes: u64,
    pub shards: u32,
    /// Number of members.
    pub members: u32,
}

/// All objects and their swarms. Members are identified by numbers, which are never reused.
#[derive(Debug)]
pub struct Objects {
    config: ObjectsConfig,
    by_key: BTreeMap<ObjectKey, u64>,
    swarms: BTreeMap<u64, (ObjectKey, Swarm)>,
    /// By member: the number of its object.
    members: BTreeMap<u64, u64>,
    /// By client: its members.
    clients: BTreeMap<u64, BTreeSet<u64>>,
    /// Time of each swarm's next look.
    due: BTreeSet<(u64, u64)>,
    grants: Vec<Grant>,
    table_rows: usize,
    last: u64,
    leases_ns: u64,
}

impl Objects {
    /// Creates an empty catalog at `now_ns`. Numbers of members begin after `first`, which must differ between the
    /// incarnations of a catalog.
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

    /// Returns the lease of a member, in nanoseconds.
    #[must_use]
    pub const fn lease_ns(&self) -> u64 {
        self.config.lease_ns
    }

    /// Publishes an object; returns its version. Without a version, it is the newest one if the contents are equal,
    /// else the one after it.
    ///
    /// # Errors
    /// When the object is malformed, differs from the one of this name and version, or exceeds a limit.
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
        // A version after the greatest one could not exist.
        if version == 0 || version == u64::MAX {
            return Err(ObjectError::Malformed(format!(
                "version {version} is out of range: use 1 to {}",
                u64::MAX - 1
            )));
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
            return Err(ObjectError::Limit { what: "table rows", most: self.config.table_rows });
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

    /// Returns the newest version that its sources hold completely, or else the newest one with members. A published
    /// version without members does not hide an older one that has some.
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

    /// Returns the description of an object; without a version, of the newest one that its sources hold completely.
    ///
    /// # Errors
    /// When the object does not exist; without a version, also when no version has members.
    pub fn find(&self, name: ObjectName<'_>, version: Option<u64>) -> Result<(u64, &ObjectSpec), ObjectError> {
        let (version, id) = self.id_of(name, version)?;
        Ok((version, self.swarms[&id].1.spec()))
    }

    /// Returns the members that hold an object, and the number of shards that no source has.
    ///
    /// # Errors
    /// When the object does not exist.
    pub fn describe(
        &self,
        name: ObjectName<'_>,
        version: Option<u64>,
    ) -> Result<(Vec<ObjectMember>, u32), ObjectError> {
        let (_, id) = self.id_of(name, version)?;
        let swarm = &self.swarms[&id].1;
        Ok((swarm.roster().rows(), swarm.roster().lost(swarm.spec().layout.shards())))
    }

    /// Returns some of the members that have all of a buffer and may serve it: those of the same host first, then of
    /// the same rack, then others; among equals, the first one varies by `client`.
    ///
    /// # Errors
    /// When the object does not exist, or has no such buffer.
    pub fn locate(
        &self,
        name: ObjectName<'_>,
        version: u64,
        buffer: usize,
        near: &PeerLocation,
        client: u64,
    ) -> Result<Vec<ObjectPlace>, ObjectError> {
        let (_, id) = self.id_of(name, Some(version))?;
        let swarm = &self.swarms[&id].1;
        let layout = &swarm.spec().layout;
        swarm.roster().locate(layout, buffer, near, client).ok_or_else(|| {
            let buffers = layout.sizes().len();
            ObjectError::Malformed(format!("there is no buffer {buffer}: the object has {buffers} buffers"))
        })
    }

    /// Adds a process as a member; returns its number. `digest` is the one of the object that the process expects.
    ///
    /// # Errors
    /// When the object does not exist or differs, the announcement is malformed, or a limit is reached.
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
            return Err(ObjectError::Limit { what: "table rows", most: self.config.table_rows });
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

    /// Processes a member's report of received shards and failed fetches.
    ///
    /// # Errors
    /// When it is not a member, or not any more.
    pub fn report(
        &mut self,
        now_ns: u64,
        client: u64,
        member: u64,
        got: &[Interval],
        failed: &[FetchFailure],
    ) -> Result<(), ObjectError> {
        let (id, swarm) = self.swarm_of(client, member)?;
        swarm.report(member, got, failed, now_ns);
        self.settle(id);
        Ok(())
    }

    /// Makes a member a rank of a job; returns the parent of a half of the shards by the job's schedule, or `None` if
    /// that parent has not joined yet: the rank must ask again.
    ///
    /// # Errors
    /// When it is not a member, or the join is malformed or contradicts the job's other ranks.
    pub fn join_ranks(
        &mut self,
        client: u64,
        member: u64,
        join: &RankJoin,
        half: usize,
    ) -> Result<Option<RankParent>, ObjectError> {
        self.swarm_of(client, member)?.1.join_ranks(member, join, half)
    }

    /// Requests shards for a member from any source; `failed` are the fetches by its schedule that failed.
    ///
    /// # Errors
    /// When it is not a member, or the object has no such shards.
    pub fn want(
        &mut self,
        now_ns: u64,
        client: u64,
        member: u64,
        want: &[Interval],
        failed: &[FetchFailure],
    ) -> Result<(), ObjectError> {
        let (id, swarm) = self.swarm_of(client, member)?;
        swarm.want(member, want, failed, now_ns)?;
        self.settle(id);
        Ok(())
    }

    /// Renews the leases of a client's members; returns the members that are known.
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

    /// Releases a member: no further fetch from it begins. Returns the number of fetches from it in flight; the member
    /// is removed at once if that is 0 or it does not wait for them.
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

    /// Returns a tenant's objects whose names begin with `prefix`, by name and version, after the given one.
    #[must_use]
    pub fn list(&self, tenant: &str, prefix: &str, after: Option<(&str, u64)>, most: usize) -> Vec<ObjectSummary> {
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
            Some(ObjectSummary {
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

    /// Returns all grants of a client that are not reported yet, for a client that may have missed some.
    #[must_use]
    pub fn told(&self, client: u64) -> Vec<Grant> {
        let members = self.clients.get(&client).into_iter().flatten();
        let swarm = |member| Some((member, &self.swarms.get(self.members.get(member)?)?.1));
        members.filter_map(swarm).flat_map(|(&member, swarm)| swarm.told(member)).collect()
    }

    /// Advances time: expires leases, and looks at the due swarms.
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

    /// Returns the time of the next [`Self::tick`], if one is needed.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        let looks = self.due.first().map(|&(at_ns, _)| at_ns);
        let leases = (!self.swarms.is_empty()).then_some(self.leases_ns);
        [looks, leases].into_iter().flatten().min()
    }

    /// Takes the grants to be sent to clients, in order.
    pub fn poll_grants(&mut self) -> Vec<Grant> {
        std::mem::take(&mut self.grants)
    }

    /// Takes the grants of a swarm, and schedules its next look.
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
        let text = format!("a name of {} bytes: it must have 1 to {MAX_NAME_BYTES}", name.len());
        return Err(ObjectError::Malformed(text));
    }
    Ok(())
}
