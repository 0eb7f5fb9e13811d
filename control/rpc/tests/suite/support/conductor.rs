//! Messages of the Conductor, for tests of their encoding.

use kvplane_rpc::codec::{decode, encode};
use kvplane_rpc::conductor::*;
use kvplane_rpc::placement::*;

use super::Show;

fn context() -> PromptContext {
    let [tenant, model, lora, salt] = ["t", "m", "l", "s"].map(str::to_owned);
    PromptContext { tenant, model, lora, block_tokens: 16, salt }
}

pub(crate) fn show_requests(show: Show<'_>) {
    let (tenant, instance) = ("t".to_owned(), "i".to_owned());
    let [publisher, replay, topic] = ["p", "r", "k"].map(str::to_owned);
    let register = RegisterInstance {
        instance: instance.clone(),
        incarnation: 2,
        tenant: tenant.clone(),
        model: "m".to_owned(),
        block_tokens: 16,
        token_bytes: 3,
        part: InstancePart::Decode,
        capacity_tokens: 4,
        report_ns: 5,
        address: "a".to_owned(),
        events: Some(EventSource { publisher, replay, topic }),
    };
    show("RegisterInstance", encode(&register));
    let group = "g".to_owned();
    let stage = Some(PipelineMembership { group, stage: 1, stages: 2, chunk_tokens: 1_024, activation_bytes: 3 });
    let capabilities = InstanceCapabilities { layer_wise: true, layers: 4, stage };
    show("RegisterCapabilities", encode(&RegisterCapabilities { register, capabilities }));
    let gone = DeregisterInstance { tenant: tenant.clone(), instance: instance.clone(), incarnation: 2 };
    show("DeregisterInstance", encode(&gone));
    let (t, i) = (tenant.clone(), instance.clone());
    let steps = DecodeSteps { steps: 7, took_ns: 8, tokens: 9, requests: 10 };
    let load = ReportLoad {
        tenant: t,
        instance: i,
        incarnation: 2,
        load: InstanceLoad { seq: 3, queued_tokens: 4, decode_tokens: 5, decodes: 6, steps },
    };
    show("ReportLoad", encode(&load));
    let (lora, salt) = ("l".to_owned(), "s".to_owned());
    let (l, s) = (lora.clone(), salt.clone());
    let changes = vec![
        BlockChange::Stored { lora: l, salt: s, tier: BlockTier::Ssd, parent: Some(7), hashes: vec![8] },
        BlockChange::Removed { lora, salt, tier: Some(BlockTier::Dram), hashes: vec![9] },
        BlockChange::Cleared,
    ];
    let kind = CacheReport::Snapshot;
    show(
        "ReportCache",
        encode(&ReportCache {
            tenant: tenant.clone(),
            instance: instance.clone(),
            incarnation: 2,
            batch: CacheBatch { seq: 3, kind, changes },
        }),
    );
    let (tier, parent, hashes, contents, part_tokens) = (BlockTier::Gpu, Some(7), vec![8, 9], vec![10, 11], 5);
    let changes = vec![BlockChange::StoredTokens(StoredTokens { tier, parent, hashes, contents, part_tokens })];
    let batch = CacheBatch { seq: 4, kind: CacheReport::Goes, changes };
    let (t, i) = (tenant.clone(), instance.clone());
    show("ReportCache of tokens", encode(&ReportCache { tenant: t, instance: i, incarnation: 2, batch }));
    let changes = vec![BlockChange::Moved { from: BlockTier::Gpu, to: BlockTier::Ssd, hashes: vec![8] }];
    let batch = CacheBatch { seq: 5, kind: CacheReport::Goes, changes };
    show("ReportCache of moves", encode(&ReportCache { tenant, instance, incarnation: 2, batch }));
    let query = QueryPrefix { context: context(), hashes: vec![8], most: 3, tier: BlockTier::Ssd };
    show("QueryPrefix", encode(&query));
    let schedule = Schedule {
        client: 1,
        request: "r".to_owned(),
        context: context(),
        tokens: 17,
        hashes: vec![8],
        wait_ns: 5,
        mode: ScheduleMode::Now,
        barred: vec!["b".to_owned()],
    };
    show("Schedule", encode(&schedule));
    let terms = RequestTerms {
        class: "c".to_owned(),
        flow: "f".to_owned(),
        priority: Some(-1),
        ttft_ns: Some(6),
        output_tokens: 7,
        session: "e".to_owned(),
    };
    let output = RequestOutput { tokens: 11, decode_ns: 12 };
    let on_terms = ScheduleOnTerms { schedule, terms, ended: vec![9], finished: vec![(10, output)] };
    show("ScheduleOnTerms", encode(&on_terms));
    show("ScheduleWithGroups", encode(&ScheduleWithGroups { on_terms }));
    let step = RequestStep::PrefillDone { reused_tokens: 2, took_ns: 3 };
    show("UpdateRequest", encode(&UpdateRequest { reservation: 1, step }));
    let step = RequestStep::Finished(output);
    show("UpdateRequest of an output", encode(&UpdateRequest { reservation: 1, step }));
    show("Reschedule", encode(&Reschedule { reservation: 1, failed: vec!["b".to_owned()] }));
    show("WatchInstances", encode(&WatchInstances));
    show("WatchAssignments", encode(&WatchAssignments { client: 1 }));
    show("ExplainRequest", encode(&ExplainRequest { request: "r".to_owned() }));
    show("ExplainPlacement", encode(&ExplainPlacement { request: "r".to_owned() }));
    show("HoldInstance", encode(&HoldInstance { instance: "i".to_owned(), held: true }));
    show("SetPlacement", encode(&SET));
    show("ShowPlacement", encode(&ShowPlacement));
    show("ShowCopies", encode(&ShowCopies));
    show("SetClass", encode(&SetClass { class: "c".to_owned(), terms: Some(CLASS) }));
    show("SetWeight", encode(&weight()));
    show("ShowService", encode(&ShowService));
    show("ShowFeeds", encode(&ShowFeeds));
    show("ShowLimits", encode(&ShowLimits));
}

const CLASS: ClassTerms = ClassTerms { priority: 3, ttft_ns: Some(4) };

fn weight() -> SetWeight {
    SetWeight { tenant: "t".to_owned(), flow: "f".to_owned(), weight: Some(200) }
}

const SET: SetPlacement = SetPlacement { policy: PlacementPolicy::Kvplane, ttft_ns: 1, tbt_ns: 2 };

fn assignment() -> Assignment {
    Assignment {
        reservation: 1,
        prefill: "p".into(),
        decode: Some("d".into()),
        reuse_tokens: 2,
        sources: vec![FetchSource { instance: Some("i".into()), tokens: 3 }],
        keep: true,
        wait_ns: 4,
        prefill_ns: 5,
        lease_ns: 6,
    }
}

fn group() -> AssignedGroup {
    let instance = "i".into();
    let stage = AssignedStage { instance, first_layer: 1, layers: 2, load_tokens: 3, wait_ns: 4, busy_ns: 5 };
    AssignedGroup { name: "g".into(), chunk_tokens: 1_024, stages: vec![stage] }
}

pub(crate) fn show_replies(show: Show<'_>) {
    let shown = ServiceShown { classes: vec![("c".to_owned(), CLASS)], weights: vec![weight()] };
    show("ServiceShown", encode(&shown));
    show("InstanceRegistered", encode(&InstanceRegistered { fresh: true, suspect_after_ns: 5 }));
    show("CacheTaken", encode(&CacheTaken { next: 3, wanted: CacheWanted::Replay }));
    let instance: std::sync::Arc<str> = "i".into();
    let holder =
        PrefixHolder { instance: instance.clone(), gpu_tokens: 1, dram_tokens: 2, ssd_tokens: 3, degraded: true };
    show("PrefixHolders", encode(&PrefixHolders { holders: vec![holder], pooled_tokens: 4 }));
    show("ScheduleReply", encode(&ScheduleReply::Queued { reservation: 1, position: 2, eta_ns: 3 }));
    let row = InstanceStatus {
        instance: instance.clone(),
        incarnation: 2,
        tenant: "t".to_owned(),
        model: "m".to_owned(),
        block_tokens: 16,
        part: InstancePart::Mixed,
        address: "a".to_owned(),
        suspect: true,
        degraded: false,
        prefills: 1,
        wait_ns: 2,
        decode_tokens: 3,
        decodes: 4,
        silent_ns: 5,
        decode_factor_permille: 6,
    };
    let model = ModelStatus {
        tenant: "t".to_owned(),
        model: "m".to_owned(),
        block_tokens: 16,
        instances: 1,
        waiting: 2,
        requests: 3,
        blocks: 4,
        forgotten_blocks: 5,
        tokens: 6,
        reused_tokens: 7,
        error_permille: 8,
        mismatch: true,
        decode: DecodeStatus {
            base_ns: 9,
            token_ps: 10,
            request_ns: 11,
            reports: 12,
            error_permille: 13,
            output_p50: 14,
            output_p90: 15,
            output_error_permille: 16,
            output_within_permille: 17,
        },
        sessions: 18,
    };
    show("InstanceTable", encode(&InstanceTable { version: 9, instances: vec![row], models: vec![model] }));
    let answer = ScheduleReply::Assigned(assignment());
    show("PlacementNotice", encode(&PlacementNotice { request: "r".into(), answer }));
    let candidate =
        CandidateStatus { instance, takes: true, held_tokens: 1, wait_ns: 2, egress_wait_ns: 3, factor_permille: 4 };
    let answer = ScheduleReply::Refused { why: ScheduleRefusal::Lost, retry_after_ns: 7 };
    let explained = RequestExplained { answer, now: Some(assignment()), candidates: vec![candidate], pooled_tokens: 9 };
    show("RequestExplained", encode(&explained));
    let answer = ScheduleReply::AssignedGroup(GroupAssignment { assignment: assignment(), group: group() });
    show("ScheduleReply of a group", encode(&answer));
    let explained = PlacementExplained { explained, group: Some(group()), group_now: None };
    show("PlacementExplained", encode(&explained));
    show("InstanceHeld", encode(&InstanceHeld { requests: 3 }));
    show("Placement", encode(&Placement { set: SET, held: vec!["i".to_owned()] }));
    let (most_bytes, bytes, prefixes, coming, made, failed, forgotten) = (1, 2, 3, 4, 5, 6, 7);
    let shown = CopiesShown { most_bytes, possible: true, bytes, prefixes, coming, made, failed, forgotten };
    show("CopiesShown", encode(&shown));
    let feed = FeedShown { instance: "i".into(), next: 1, newest: 2, unconfirmed: true, degraded: true };
    show("FeedsShown", encode(&FeedsShown { feeds: vec![feed] }));
    let (models, instances, queued, requests, prompt_blocks) = ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10));
    show("LimitUse", encode(&LimitUse { models, instances, queued, requests, prompt_blocks, wait_ns: 11 }));
}

/// No message may panic.
pub(crate) fn decode_as_all(frame: &[u8]) {
    let _ = decode::<RegisterInstance>(frame);
    let _ = decode::<ReportLoad>(frame);
    let _ = decode::<ReportCache>(frame);
    let _ = decode::<QueryPrefix>(frame);
    let _ = decode::<Schedule>(frame);
    let _ = decode::<ScheduleReply>(frame);
    let _ = decode::<InstanceTable>(frame);
    let _ = decode::<RequestExplained>(frame);
    let _ = decode::<RegisterCapabilities>(frame);
    let _ = decode::<ScheduleWithGroups>(frame);
    let _ = decode::<PlacementExplained>(frame);
}
