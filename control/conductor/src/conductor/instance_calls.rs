//! Calls of instances, of operators about instances, and of the host for the durable state.

use super::Conductor;
use super::cache_feed::{BatchOutcome, CacheBatch, CacheTaken};
use super::durable::{Durable, DurableInstance};
use super::error::ConductorError;
use super::instance_spec::{InstanceLoad, InstanceSpec, Registration};
use super::instances::check_group;
use crate::scheduler::Request;

impl Conductor {
    /// Registers an instance. Idempotent; a later incarnation replaces an earlier one.
    ///
    /// # Errors
    /// When it is malformed, contradicts its registration in the same incarnation, belongs to an earlier incarnation,
    /// or a limit is reached.
    pub fn register(&mut self, spec: impl Into<InstanceSpec>, now_ns: u64) -> Result<Registration, ConductorError> {
        let mut spec: InstanceSpec = spec.into();
        spec.call.check(&spec.capabilities)?;
        spec.has_vllm_hashes &= spec.call.events.is_some();
        if let Some(again) = self.instances.register_again(&spec, now_ns, &mut self.pools)? {
            return Ok(again);
        }
        let call = &spec.call;
        check_group(call, &spec.capabilities, &self.instances)?;
        if let Some(known) = self.pools.find(&call.pool()).and_then(|number| self.pools.get(number)) {
            let bytes = known.token_bytes;
            if call.token_bytes != 0 && call.token_bytes != bytes {
                let what = format!(
                    "{} bytes of KV cache per token; other instances of this model have {bytes}",
                    call.token_bytes
                );
                return Err(ConductorError::Conflict { what });
            }
        }
        self.remove(&call.instance);
        let number = self.pools.get_or_make(call.pool(), call.token_bytes, &self.config)?;
        let entered = self.instances.enter(spec, number, now_ns, &mut self.pools);
        if entered.is_err() {
            self.pools.drop_unused(number);
        } else {
            self.poll(now_ns);
        }
        entered
    }

    /// Deregisters an instance, and notifies the clients of its requests. Returns false if there is no such instance.
    ///
    /// # Errors
    /// When a later incarnation of it is registered.
    pub fn deregister(&mut self, name: &str, incarnation: u64, now_ns: u64) -> Result<bool, ConductorError> {
        let is_there = self.instances.check_goes(name, incarnation)?;
        if is_there {
            self.remove(name);
            self.poll(now_ns);
        }
        Ok(is_there)
    }

    /// Removes an instance, and notifies the clients of its requests.
    fn remove(&mut self, name: &str) {
        let lost: Vec<Request> = self.instances.remove(name, &mut self.pools);
        lost.into_iter().for_each(|request| self.requests.orphan(request));
    }

    /// Notes the load report of an instance. A report older than the latest one only proves that the instance lives.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn report(
        &mut self,
        name: &str,
        incarnation: u64,
        load: InstanceLoad,
        now_ns: u64,
    ) -> Result<(), ConductorError> {
        if let Some(pool) = self.instances.report(name, incarnation, load, now_ns, &mut self.pools)? {
            self.requests.poll(pool, now_ns, &mut self.pools);
        }
        Ok(())
    }

    /// Holds an instance, or lets it accept requests again. Its requests continue, and peers may fetch from it. Its
    /// next incarnation is not held. Returns the number of requests that are booked there.
    ///
    /// # Errors
    /// When there is no such instance.
    pub fn hold(&mut self, name: &str, held: bool, now_ns: u64) -> Result<u32, ConductorError> {
        self.instances.hold(name, held, &mut self.pools)?;
        self.poll(now_ns);
        let known = self.instances.get(name);
        let known = known.ok_or_else(|| ConductorError::UnknownInstance { name: name.to_owned() })?;
        let Some(pool) = self.pools.get(known.pool) else { return Ok(0) };
        let prefills = known.numbers.prefill.map_or(0, |at| pool.scheduler.prefill_booked(at, now_ns).0);
        let decodes = known.numbers.decode.map_or(0, |at| pool.scheduler.decode_booked(at, now_ns).requests);
        Ok(prefills + decodes)
    }

    /// Excludes the instances that missed reports, and removes those that missed many. Returns the next time at which
    /// one will have.
    pub(super) fn look_at_instances(&mut self, now_ns: u64) -> Option<u64> {
        let silent = self.instances.silent(now_ns);
        for name in silent.suspects {
            // The instance was found above.
            let _ = self.instances.set_suspect(&name, true, &mut self.pools);
        }
        for name in silent.lost {
            self.remove(&name);
        }
        silent.next_ns
    }

    /// Applies a batch of changes of an instance's cache.
    ///
    /// # Errors
    /// When the instance is unknown, does not prefill, or the batch is too long or malformed.
    pub fn cache(
        &mut self,
        name: &str,
        incarnation: u64,
        batch: CacheBatch,
        now_ns: u64,
    ) -> Result<CacheTaken, ConductorError> {
        if let Some(known) = self.instances.get(name) {
            batch.check(known.spec.block_tokens)?;
        }
        let update = self.instances.take_batch(name, incarnation, &batch, now_ns)?;
        let (ack, clears, confirms) = match update.outcome {
            BatchOutcome::Duplicate(ack) | BatchOutcome::Gap(ack) => return Ok(ack),
            BatchOutcome::Taken { ack, clears, confirms, .. } => (ack, clears, confirms),
        };
        if clears {
            self.pools.clear(update.pool, update.at)?;
        }
        if let Some(pool) = self.pools.get_mut(update.pool) {
            pool.batches += 1;
            let mut by_hash_only = 0;
            for change in batch.changes {
                by_hash_only += pool.change_cache(update.at, change)?;
            }
            self.instances.note_by_hash_only(name, by_hash_only);
        }
        if confirms {
            self.pools.show_restored(update.pool, update.at)?;
        }
        Ok(ack)
    }

    /// Notes that the publisher of an instance has been unreachable for `for_ns`. The index may lack blocks of its
    /// cache then. After [`super::AWAY_SUSPECT_NS`] the instance is excluded, unless it was heard from otherwise or
    /// sends load reports, which are better evidence; after [`super::AWAY_FORGOTTEN_NS`] its blocks are dropped from
    /// the index, and the method returns true: its events must be read from the first on.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn away(&mut self, name: &str, incarnation: u64, for_ns: u64, now_ns: u64) -> Result<bool, ConductorError> {
        self.instances.away(name, incarnation, for_ns, now_ns, &mut self.pools)
    }

    /// Notes that the publisher of an instance is reachable, and that the missed events that it still had were
    /// processed.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn reached(&mut self, name: &str, incarnation: u64, now_ns: u64) -> Result<(), ConductorError> {
        if let Some(pool) = self.instances.reached(name, incarnation, now_ns, &mut self.pools)? {
            self.requests.poll(pool, now_ns, &mut self.pools);
        }
        Ok(())
    }

    /// Takes the changes of the durable state since the last call, one for each instance.
    pub fn take_durable(&mut self) -> Vec<Durable> {
        let changed = self.instances.take_changed();
        let mut durable: Vec<Durable> = changed
            .into_iter()
            .map(|name| match self.instances.durable(&name, &self.pools) {
                Some(instance) => Durable::Instance(Box::new(instance)),
                None => Durable::Gone(name),
            })
            .collect();
        if std::mem::take(&mut self.placement_changed) {
            durable.push(Durable::Placement(self.config.policy, self.config.scheduler.slo));
        }
        durable.extend(self.service.take_changes());
        durable
    }

    /// Returns true while [`Self::take_durable`] has changes to return.
    #[must_use]
    pub fn has_durable(&self) -> bool {
        self.placement_changed || self.service.has_changes() || self.instances.has_changed()
    }

    /// Restores an instance that was registered with an earlier Conductor. Its silence counts from `graced_ns` on,
    /// because it may have to reconnect first. If it had reported its cache it is degraded until the whole cache is
    /// known again.
    ///
    /// # Errors
    /// When a limit no longer allows it, or it contradicts another instance.
    pub fn restore(&mut self, kept: DurableInstance, graced_ns: u64) -> Result<(), ConductorError> {
        self.instances.check_restored(&kept)?;
        let number = self.pools.get_or_make(kept.spec.pool(), kept.pool_token_bytes, &self.config)?;
        self.instances.restore(kept, number, graced_ns, &mut self.pools)
    }
}
