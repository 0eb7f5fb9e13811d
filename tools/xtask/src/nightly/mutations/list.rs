//! List of mutations: for each a piece of a file, its replacement, and the invariant that it breaks.

/// Simulation that must find a mutation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Host {
    /// Shards with memory only.
    World,
    /// Like `World`, while slots migrate away and back and shards miss maps.
    MissedEpochs,
    /// Shards with faulty disks.
    Tiers,
    /// A shard whose disk loses writes of records.
    LostWrites,
    /// A shard whose disk loses its power often.
    PowerFailures,
    /// Slots with two replicas.
    Replicas,
    /// Like `Replicas`, with few objects that are replaced often and read by all.
    HotObjects,
    /// Slots with two replicas, of which one is damaged in memory now and then.
    FlippedBits,
    /// Slots with two replicas on disks, of which one is damaged now and then.
    DamagedRecords,
    /// Slots with two replicas on disks, whose nodes die and leave.
    RecordedReplicas,
    /// Slots with two replicas, and a node that falls silent.
    Silence,
    /// Nodes that keep their memory.
    KeptMemory,
    /// Like `KeptMemory`, with upgrades of running nodes.
    Upgrades,
    /// Shards with far memory behind little DRAM.
    FarMemory,
    /// Tenants with quotas of SSD bytes.
    Quotas,
    /// Slots with two replicas and disks, while all nodes die at once.
    CopiesAgain,
    /// All nodes leave within moments, and come back.
    Departures,
    /// Shards that require tickets, and a control plane on hosts whose clocks differ and jump.
    Clocks,
    /// A control plane that loses its state.
    LostState,
    /// Like `LostState`, while nodes come and go with their disks.
    LostStateWithDisks,
    /// Members of process groups.
    Collectives,
    /// Shards over a store that all see, while nodes die, restart and end in order.
    SharedTier,
}

/// Planted bug.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mutation {
    /// Name on the command line.
    pub(super) name: &'static str,
    /// Invariant that the bug breaks.
    pub(super) invariant: &'static str,
    /// Path of the file, from the root of the tree.
    pub(super) file: &'static str,
    /// Text that the file contains once.
    pub(super) find: &'static str,
    /// Replacement of the text.
    pub(super) replace: &'static str,
    /// Simulation that must find the bug.
    pub(super) host: Host,
}

/// All mutations.
pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "stale-reservation-is-held",
        invariant: "a descriptor carries a generation, so a late writer cannot reach reused memory",
        file: "dataplane/store/src/generational.rs",
        find: "Slot { generation: g, content: Content::Held(value) } if *g == generation => Some(*value),",
        replace: "Slot { generation: g, content: Content::Held(value) } if *g >= generation => Some(*value),",
        host: Host::World,
    },
    Mutation {
        name: "stale-handle-is-taken-back",
        invariant: "a peer returns what it pins, and nothing of a later holder of the same index",
        file: "dataplane/store/src/service/shard/sessions/held.rs",
        find: "let held = self.holder(index) == Some((session, generation));",
        replace: "let held = self.holder(index).is_some_and(|(holder, g)| holder == session && g >= generation);",
        host: Host::World,
    },
    Mutation {
        name: "stale-answer-is-taken",
        invariant: "a duplicated reply changes no request that reuses the index of the completed one",
        file: "dataplane/client/src/tables/table.rs",
        find: "        let entry = self.entries.get(index as usize)?;
        (entry.generation == generation && entry.live).then_some(&entry.value)",
        replace: "        let entry = self.entries.get(index as usize)?;
        (entry.generation >= generation && entry.live).then_some(&entry.value)",
        host: Host::World,
    },
    Mutation {
        name: "lost-removal-raises-no-floor",
        invariant: "a removed object does not come back when the device lost the tombstone",
        file: "dataplane/tier/src/recovery.rs",
        find: "        self.report.lost_removals += 1;
        contents.raise_floor(floor, device);",
        replace: "        self.report.lost_removals += 1;
        let _ = (floor, device, contents);",
        host: Host::LostWrites,
    },
    Mutation {
        name: "put-checksum-is-not-compared",
        invariant: "a visible object consists of the bytes of one put",
        file: "dataplane/store/src/service/puts/mod.rs",
        find: "let outcome = if computed == Some(expected) {",
        replace: "let outcome = if computed.is_some() {",
        host: Host::World,
    },
    Mutation {
        name: "get-checksum-is-not-compared",
        invariant: "a get returns all bytes of the put that made its version",
        file: "dataplane/client/src/client/inputs.rs",
        find: "let good = entry.answer.expected_checksum.is_none() || entry.answer.expected_checksum == checksum;",
        replace: "let good = entry.answer.expected_checksum.is_none() || checksum.is_some();",
        host: Host::World,
    },
    Mutation {
        name: "replaced-object-is-freed-under-its-readers",
        invariant: "the old bytes of an object are freed when their pins are gone",
        file: "dataplane/store/src/store/space.rs",
        find: "        if self.order.stick(entries, id, |entries| entries.unpin(id)) > 0 {",
        replace: "        if self.order.stick(entries, id, |entries| entries.unpin(id)) > 1 {",
        host: Host::World,
    },
    Mutation {
        name: "fence-closes-nothing",
        invariant: "no request of an abandoned connection is carried out after later requests of its client",
        file: "dataplane/store/src/service/shard/sessions/handshake.rs",
        find: "        for peer in over {
            self.close(&mut answers.outputs, peer, CloseReason::Fenced);
        }",
        replace: "        drop(over);",
        host: Host::World,
    },
    Mutation {
        name: "missed-epochs-are-not-noticed",
        invariant: "a shard that may have missed an owner of its slots does not serve objects from before",
        file: "dataplane/store/src/service/objects/owners.rs",
        find: "epoch.0 > heard.0 + 1 && standing.since > heard && !told;",
        replace: "epoch.0 > heard.0 + 1 && standing.since > heard && !told && heard > epoch;",
        host: Host::MissedEpochs,
    },
    Mutation {
        name: "taken-over-object-beats-a-newer-put",
        invariant: "an imported object was neither put nor removed at the importer since its slot came",
        file: "dataplane/store/src/service/migration/imports.rs",
        find: "        if let Some(object) = self.objects.get_mut(&digest) {
            object.void = true;
        }
        let is_new = self.masks.insert(digest);",
        replace: "        let is_new = true;",
        host: Host::World,
    },
    Mutation {
        name: "removal-does-not-wait-for-copies",
        invariant: "when a removal is acknowledged, the replica owner has no replica of the object",
        file: "dataplane/store/src/service/replication/removals.rs",
        find: "(0..digests.len()).filter(|at| self.is_outstanding(digests[*at])).collect()",
        replace: "(0..digests.len()).filter(|at| self.is_outstanding(digests[*at]) && *at > digests.len()).collect()",
        host: Host::Replicas,
    },
    Mutation {
        name: "damaged-object-is-given-up",
        invariant: "an object that is damaged in memory is not missing while another node has its bytes",
        file: "dataplane/store/src/service/damage/repairs.rs",
        find: "    let owners = shard.replicas.owners_of(digest.slot());
    objects.copies(digest).at.iter().filter_map(|number| owners.get(number).copied()).collect()",
        replace: "    let owners = shard.replicas.owners_of(digest.slot());
    objects.copies(digest).at.iter().skip(1).filter_map(|number| owners.get(number).copied()).collect()",
        host: Host::FlippedBits,
    },
    Mutation {
        name: "damaged-replica-stays",
        invariant: "once all faults are over, no copy of an object is damaged",
        file: "dataplane/store/src/service/damage/scrub.rs",
        find: "        if check == Check::Damaged || readers.is_some() {",
        replace: "        if readers.is_some() {",
        host: Host::FlippedBits,
    },
    Mutation {
        name: "damaged-record-is-given-up",
        invariant: "an object whose record on an SSD is damaged is not missing while another node has it",
        file: "dataplane/store/src/service/damage/records.rs",
        find: "    let has = |number: &usize| at.is_empty() || at.has(*number);",
        replace: "    let has = |number: &usize| at.is_empty() && at.has(*number);",
        host: Host::DamagedRecords,
    },
    Mutation {
        name: "damaged-replica-record-is-given-up",
        invariant: "once disks were scrubbed, every record that was damaged is there again",
        file: "dataplane/store/src/service/tiering/ssd/mod.rs",
        find: "            true => shard.replicas.relation(slot).is_some(),",
        replace: "            true => shard.replicas.relation(slot).is_some_and(|_| !readers.is_empty()),",
        host: Host::DamagedRecords,
    },
    Mutation {
        name: "record-of-a-removed-replica-stays",
        invariant: "no replica of a removed object is left on an SSD when the removal is acknowledged",
        file: "dataplane/store/src/service/objects/removals.rs",
        find: "            if is_recorded {",
        replace: "            if is_recorded && at > 1 << 20 {",
        host: Host::RecordedReplicas,
    },
    Mutation {
        name: "replica-of-an-evicted-object-stays",
        invariant: "no replica of a removed object is left, though its owner had it on the SSD only",
        file: "dataplane/store/src/service/replication/removals.rs",
        find: "            digests.iter().for_each(|digest| objects.orphan_detached(*digest));",
        replace: "            digests.iter().skip(1 << 20).for_each(|digest| objects.orphan_detached(*digest));",
        host: Host::RecordedReplicas,
    },
    Mutation {
        name: "late-report-ends-a-newer-export",
        invariant: "the report of an import ends no later export of the slot",
        file: "dataplane/store/src/service/shard/exports.rs",
        find: "        if since > epoch {",
        replace: "        let epoch = epoch.max(since);
        if since > epoch {",
        host: Host::RecordedReplicas,
    },
    Mutation {
        name: "report-before-the-last-object",
        invariant: "when an export ends, the new owner has every object of the slot",
        file: "dataplane/store/src/service/migration/sources.rs",
        find: "            && self.open == 0
            && self.unwritten.is_empty()",
        replace: "            && self.unwritten.is_empty()",
        host: Host::RecordedReplicas,
    },
    Mutation {
        name: "lost-report-is-not-repeated",
        invariant: "every export ends once everything was imported, so that replicas are recorded",
        file: "dataplane/store/src/service/migration/reports.rs",
        find: "        if !done {
            report.backoff.failed(now_ns);",
        replace: "        if !done && report.slots.is_empty() {
            report.backoff.failed(now_ns);",
        host: Host::DamagedRecords,
    },
    Mutation {
        name: "cancelled-batch-leaves-its-io",
        invariant: "when a call returns, no transfer is in flight on the caller's buffers",
        file: "dataplane/client/src/router/mod.rs",
        find: "            if slice.state == SliceState::Queued {
                self.traffic.leave_lane(index);
                self.complete(index, status);
            } else {
                self.traffic.reset_lane(lane, cause);
            }",
        replace: "            if slice.state == SliceState::Queued || lane < u32::MAX {
                self.traffic.leave_lane(index);
                self.complete(index, status);
            } else {
                self.traffic.reset_lane(lane, cause);
            }",
        host: Host::World,
    },
    Mutation {
        name: "deadline-ends-nothing",
        invariant: "every wait has a deadline: a batch is complete soon after its own",
        file: "dataplane/client/src/client/inputs.rs",
        find: "            self.router.end_batch(batch, Status::DeadlineExceeded, Cause::Deadline);",
        replace: "            let _ = (batch, Cause::Deadline);",
        host: Host::World,
    },
    Mutation {
        name: "read-of-the-device-is-believed",
        invariant: "no byte that a device corrupted is served",
        file: "dataplane/tier/src/log/reads.rs",
        find: "if sum(memory, to) == read.entry.checksum() { Ok(()) } else { Err(Miss::Damaged) }",
        replace: "if sum(memory, to) != 0 || read.entry.checksum() != 1 { Ok(()) } else { Err(Miss::Damaged) }",
        host: Host::Tiers,
    },
    Mutation {
        name: "removal-leaves-no-mark-on-the-device",
        invariant: "a removed object never returns, over all incarnations of a disk",
        file: "dataplane/tier/src/log/calls.rs",
        find: "        let may_be_there = self.contents.is_doubtful(is_reclaiming, durable_sequence);
        if known.is_none() && !may_be_there && !self.contents.replacements.may_return(digest) {",
        replace: "        let may_be_there = self.contents.is_doubtful(is_reclaiming, durable_sequence);
        if known.is_none() || !may_be_there {",
        host: Host::Tiers,
    },
    Mutation {
        name: "epoch-is-used-again",
        invariant: "one epoch has one map, over restarts of the control plane",
        file: "control/cluster/src/membership/maps.rs",
        find: "(self.map.epoch, self.map.replicas) = (header.epoch, header.replicas);",
        replace: "(self.map.epoch, self.map.replicas) = (Epoch(header.epoch.0.saturating_sub(1)), header.replicas);",
        host: Host::World,
    },
    Mutation {
        name: "object-is-replaced-without-being-asked",
        invariant: "a put without replace leaves an existing object",
        file: "dataplane/store/src/store/put.rs",
        find: "            if !entry.replaces() {
                self.counters.exists_conflicts += 1;",
        replace: "            if !entry.replaces() && id == former {
                self.counters.exists_conflicts += 1;",
        host: Host::World,
    },
    Mutation {
        name: "reservation-of-a-gone-peer-stays",
        invariant: "reservations of a peer are freed when it is gone",
        file: "dataplane/store/src/service/mod.rs",
        find: "            store.abort(reservation).expect(\"a session's reservation is held\");
        }
    }",
        replace: "            let _ = (reservation, &store);
        }
    }",
        host: Host::World,
    },
    Mutation {
        name: "pins-of-a-gone-peer-stay",
        invariant: "pins of a peer are freed when it is gone",
        file: "dataplane/store/src/service/mod.rs",
        find: "            store.unpin(pin).expect(\"a session's pin is held\");
        }
        for reservation",
        replace: "            let _ = pin;
        }
        for reservation",
        host: Host::World,
    },
    Mutation {
        name: "slot-that-left-is-still-put-to",
        invariant: "an object is committed at the owner of its slot only",
        file: "dataplane/store/src/service/puts/mod.rs",
        find: "        if !shard.ownership.owns(digest) {",
        replace: "        if !shard.ownership.owns(digest) && digest.0 == 0 {",
        host: Host::World,
    },
    Mutation {
        name: "second-owner-reads-without-being-asked",
        invariant: "a replica serves only failover reads",
        file: "dataplane/store/src/service/shard/rights.rs",
        find: "        let reads = context.flags.has(FrameFlags::READ_REPLICA) && !context.fetches;",
        replace: "        let reads = !context.fetches;",
        host: Host::HotObjects,
    },
    Mutation {
        name: "flush-covers-later-writes",
        invariant: "an object acknowledged as durable survives every crash",
        file: "dataplane/tier/src/log/flushes.rs",
        find: "            self.durable = self.covered_mark;",
        replace: "            self.durable = self.written;",
        host: Host::PowerFailures,
    },
    Mutation {
        name: "ticket-time-from-the-clock",
        invariant: "ticket time continues from its durable value, whatever the host's clock shows",
        file: "dataplane/ticket/src/time.rs",
        find: "            Some(durable_s) => durable_s,",
        replace: "            Some(_) => host_s,",
        host: Host::Clocks,
    },
    Mutation {
        name: "one-time-line-for-all",
        invariant: "a ticket is compared on the time line of its key",
        file: "dataplane/ticket/src/time.rs",
        find: "            (Some(_), None) => TimeLine::of(told_s, now_s),",
        replace: "            (Some(_), None) => TimeLine::default(),",
        host: Host::LostState,
    },
    Mutation {
        name: "empty-state-is-a-new-cluster",
        invariant: "a control plane without a map adopts the map of living members",
        file: "control/cluster/src/cluster/start.rs",
        find: "adoption_wait_ns.filter(|_| epoch == Epoch(0))",
        replace: "adoption_wait_ns.filter(|_| epoch != Epoch(0))",
        host: Host::LostState,
    },
    Mutation {
        name: "adoption-forgets-who-owned-what",
        invariant: "a map is adopted together with the layout that it is of",
        file: "control/cluster/src/membership/maps.rs",
        find: "        self.layout = Layout { since, claims: claims(map).unwrap_or(0), former };",
        replace: "        self.layout = Layout { since: Epoch(0), claims: 0, former: former.filter(|_| \
                  since == Epoch(0)) };",
        host: Host::LostStateWithDisks,
    },
    Mutation {
        name: "tenants-see-memory-only",
        invariant: "a tenant can read and remove its acknowledged objects in every tier",
        file: "dataplane/store/src/service/claims.rs",
        find: "        context.tenant.is_some()
            && matches!(",
        replace: "        context.tenant == Some(u32::MAX)
            && matches!(",
        host: Host::Tiers,
    },
    Mutation {
        name: "the-dead-inherit-slots",
        invariant: "slots do not pass to an owner that is dead too",
        file: "control/cluster/src/membership/failures.rs",
        find: "        self.members.iter().any(may_be_dead)",
        replace: "        dead.is_empty() && self.members.iter().any(may_be_dead)",
        host: Host::CopiesAgain,
    },
    Mutation {
        name: "late-slots-are-not-walked",
        invariant: "a pending replica stays pending until it exists",
        file: "dataplane/store/src/service/shard/mod.rs",
        find: "        if gains {\n            self.effects.note(Effect::SlotsServed);",
        replace: "        if gains && epoch == Epoch(0) {\n            self.effects.note(Effect::SlotsServed);",
        host: Host::CopiesAgain,
    },
    Mutation {
        name: "importer-lists-an-ssd-in-recovery",
        invariant: "what a node had on its SSD when a slot migrated is imported",
        file: "dataplane/store/src/service/lists.rs",
        find: "flags & ONE == 0 && (local.is_recovering() || !context.fetches && is_comparing())",
        replace: "flags & ONE == 0 && !context.fetches && (local.is_recovering() || is_comparing())",
        host: Host::Departures,
    },
    Mutation {
        name: "stale-frame-is-used",
        invariant: "a frame of a former view has no effect",
        file: "dataplane/collective/src/member.rs",
        find: "if head.epoch < self.membership.view.epoch {",
        replace: "if head.epoch + 1 < self.membership.view.epoch {",
        host: Host::Collectives,
    },
    Mutation {
        name: "member-works-on-in-a-fence",
        invariant: "the progress of a fenced member is final",
        file: "dataplane/collective/src/member.rs",
        find: "        if status.is_changing && self.participates() {",
        replace: "        if status.is_changing && self.participates() && status.view.epoch == 0 {",
        host: Host::Collectives,
    },
    Mutation {
        name: "confirmation-is-not-awaited",
        invariant: "no member completes a long operation before all have their results",
        file: "dataplane/collective/src/execution.rs",
        find: "        self.is_prepared() && (self.keeps_result() || is_confirmed())",
        replace: "        self.is_prepared() && (self.keeps_result() || is_confirmed() || self.confirmed.len() > 0)",
        host: Host::Collectives,
    },
    Mutation {
        name: "fetched-result-is-not-awaited",
        invariant: "a member that lacks a result gets it from one that has it",
        file: "dataplane/collective/src/member.rs",
        find: "                if received == Some(total) {",
        replace: "                if received.is_none_or(|received| received == total) {",
        host: Host::Collectives,
    },
    Mutation {
        name: "ring-works-in-the-source",
        invariant: "the source of an operation stays as it is until all have the result",
        file: "dataplane/collective/src/schedule/pipeline.rs",
        find: "    let whole = Span::new(Buffer::Work, 0, setting.part);\n    let source",
        replace: "    let whole = Span::new(Buffer::Target, 0, setting.part);\n    let source",
        host: Host::Collectives,
    },
    Mutation {
        name: "joiner-begins-with-the-first-operation",
        invariant: "a joiner continues the sequence of the others",
        file: "dataplane/collective/src/member.rs",
        find: "            self.completed = complete;\n",
        replace: "            self.completed = complete.min(self.completed);\n",
        host: Host::Collectives,
    },
    Mutation {
        name: "silent-owner-is-waited-for",
        invariant: "what two nodes have is found soon, although one of them is silent",
        file: "dataplane/client/src/router/mod.rs",
        find: "                ReplicaUse::No => Hedge::At(ReplicaUse::Requested),\n                // It was sent",
        replace: "                ReplicaUse::No => continue,\n                // It was sent",
        host: Host::Silence,
    },
    Mutation {
        name: "image-counts-before-it-is-complete",
        invariant: "an image of memory is complete or nothing",
        file: "dataplane/store/src/service/image_file.rs",
        find: "        write_phase(file, ImagePhase::Writing)?;\n        let (mut at",
        replace: "        write_phase(file, ImagePhase::Complete)?;\n        let (mut at",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "memory-in-use-keeps-its-image",
        invariant: "an image is restored once",
        file: "dataplane/store/src/service/image_file.rs",
        find: "        if self.pending.is_some() && !service.inspect().awaits_map() {",
        replace: "        if self.pending.is_some() && service.inspect().awaits_map() {",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "image-of-another-node-is-used",
        invariant: "memory of another node, or of another cluster, is refused",
        file: "dataplane/store/src/service/image_file.rs",
        find: "            if (&theirs.cluster, theirs.node) != (&identity.cluster, identity.node) {",
        replace: "            if theirs.cluster != identity.cluster {",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "image-is-not-compared-with-its-checksum",
        invariant: "a damaged image does not count",
        file: "dataplane/store/src/image.rs",
        find: "        if !is_whole || payload_checksum(bytes) != self.contents_checksum {",
        replace: "        if !is_whole {",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "kept-objects-of-slots-that-others-had",
        invariant: "nothing of a slot that another node had meanwhile is served from kept memory",
        file: "dataplane/store/src/service/kept_memory.rs",
        find: "        contents.retain(unit_bytes, |object| object.replica || known.has(object.digest.slot()));",
        replace: "        contents.retain(unit_bytes, |object| known.has(object.digest.slot()) || origin.epoch.0 > 0);",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "lent-memory-is-used-again",
        invariant: "what a process may still write to is withheld",
        file: "dataplane/store/src/service/kept_memory.rs",
        find: "collect(is_kept, lends);",
        replace: "collect(is_kept, lends && false);",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "former-process-serves-again",
        invariant: "after its last word, a running process never serves",
        file: "control/cluster/src/handover.rs",
        find: "            (State::Over, _) => (State::Over, RunningStep::End),",
        replace: "            (State::Over, _) => (State::Resuming, RunningStep::Resume),",
        host: Host::Upgrades,
    },
    Mutation {
        name: "successor-does-not-wait-for-the-last-word",
        invariant: "a successor serves when it has the last word",
        file: "control/cluster/src/handover.rs",
        find: "            (State::Asking, SuccessorInput::Passed) => (State::Confirming, SuccessorStep::Confirm),",
        replace: "            (State::Asking, SuccessorInput::Passed) => (State::Serving, SuccessorStep::Serve),",
        host: Host::Upgrades,
    },
    Mutation {
        name: "object-moves-under-its-readers",
        invariant: "an object that others read stays where it is",
        file: "dataplane/store/src/store/space.rs",
        find: "let (bytes, is_shared) = (entry.bytes(), entry.pins() > 1);",
        replace: "let (bytes, is_shared) = (entry.bytes(), entry.pins() > 1 << 20);",
        host: Host::FarMemory,
    },
    Mutation {
        name: "tail-stays-behind",
        invariant: "an object that moves keeps its name",
        file: "dataplane/store/src/store/space.rs",
        find: "        copies.copy(tail_from, space.pool.tail_at(entry), bytes);",
        replace: "        let _ = (tail_from, bytes);",
        host: Host::FarMemory,
    },
    Mutation {
        name: "eviction-drops-at-once",
        invariant: "what DRAM evicts moves to far memory while that has room",
        file: "dataplane/store/src/store/space.rs",
        find: "        demote(self, id).or_else(|| drop_one(self, id))",
        replace: "        drop_one(self, id).or_else(|| demote(self, id))",
        host: Host::FarMemory,
    },
    Mutation {
        name: "far-object-is-not-compared",
        invariant: "damage in far memory is found and repaired as in DRAM",
        file: "dataplane/store/src/service/damage/scrub.rs",
        find: "if shard.peek(digest).is_none_or(|object| object.is_on_device) {",
        replace: "if shard.peek(digest).is_none_or(|object| object.is_on_device || object.is_far) {",
        host: Host::FarMemory,
    },
    Mutation {
        name: "records-exceed-their-limit",
        invariant: "no tenant has more on SSDs than its quota",
        file: "dataplane/tier/src/contents/accounts.rs",
        find: "at.used_bytes.saturating_add(bytes) > *limit)",
        replace: "at.used_bytes.saturating_add(bytes / 2) > *limit)",
        host: Host::Quotas,
    },
    Mutation {
        name: "removed-tenant-keeps-its-records",
        invariant: "the removal of a tenant frees its share of the SSDs",
        file: "control/cluster/src/tenants.rs",
        find: "        if may {\n            self.ssd.insert(name.to_owned(), REMOVED);\n        }\n",
        replace: "",
        host: Host::Quotas,
    },
    Mutation {
        name: "weights-that-contradict-are-taken",
        invariant: "settings of a tenant do not contradict each other",
        file: "control/cluster/src/tenants.rs",
        find: "if self.ssd_bytes == Some(0) =>",
        replace: "if self.ssd_bytes == Some(1) =>",
        host: Host::Quotas,
    },
    Mutation {
        name: "late-restart-is-a-departure",
        invariant: "a restart in order moves no slot, however late its last message",
        file: "control/cluster/src/membership.rs",
        find: "|devices| devices.incarnation >= incarnation);",
        replace: "|devices| devices.incarnation == incarnation);",
        host: Host::KeptMemory,
    },
    Mutation {
        name: "released-slots-fall-out-of-a-checkpoint",
        invariant: "a shard that has lost slots keeps their index in the store for their new owners",
        file: "dataplane/shared/src/log.rs",
        find: "        self.valid.with(&released, |valid, released| valid | released)",
        replace: "        self.valid.with(&released, |valid, _| valid)",
        host: Host::SharedTier,
    },
    Mutation {
        name: "shard-ends-before-its-takeover",
        invariant: "a shard that ends in order has made what it was taking over part of a checkpoint",
        file: "dataplane/shared/src/tier.rs",
        find: "self.clock.is_known() && self.takeovers.is_empty();",
        replace: "self.clock.is_known();",
        host: Host::SharedTier,
    },
];
