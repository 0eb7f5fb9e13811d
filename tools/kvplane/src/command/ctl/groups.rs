//! `kvplane ctl groups`: lists the worlds of processes, and shows the processes and groups of one.

use clap::Args;
use kvplane::ControlLink;
use kvplane::group_membership::{FailureMode, GroupRank, GroupSummary, MemberState, ProcessState, RankSet};
use kvplane::rpc::groups::{DescribeWorld, ListWorlds, WorldDescription, WorldFigures, WorldName};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::ctl::tenants::{external, internal};

/// Worlds of processes and their groups.
#[derive(Args)]
pub(crate) struct Groups {
    /// Name of a world of the tenant of --tenant, which is shown. Default: a list of all worlds.
    world: Option<String>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

impl Groups {
    /// Prints the list of worlds, of this tenant if one is named; or one world.
    pub(crate) fn run(&self, link: &ControlLink, tenant: Option<&str>) -> Result<(), Failure> {
        let tenant = tenant.map(internal);
        match &self.world {
            None => self.list(&worlds(link, tenant.as_deref())?),
            Some(world) => {
                let name = WorldName { tenant: tenant.unwrap_or_default(), world: world.clone() };
                self.show(&name, &link.call(DescribeWorld { world: name.clone() })?);
            }
        }
        Ok(())
    }

    fn list(&self, worlds: &[WorldFigures]) {
        if self.json {
            let worlds: Vec<Value> = worlds.iter().map(world_json).collect();
            return println!("{:#}", json!({ "worlds": worlds }));
        }
        println!(
            "{:24}  {:16}  {:>9}  {:>6}  {:>8}  {:>12}  {:>8}",
            "world", "tenant", "processes", "groups", "changing", "view changes", "excluded"
        );
        for WorldFigures { name, processes, groups, changing, view_changes, exclusions } in worlds {
            let (world, tenant) = (&name.world, external(&name.tenant));
            println!(
                "{world:24}  {tenant:16}  {processes:>9}  {groups:>6}  {changing:>8}  {view_changes:>12}  \
                 {exclusions:>8}"
            );
        }
    }

    fn show(&self, name: &WorldName, description: &WorldDescription) {
        let WorldDescription { processes, groups } = description;
        if self.json {
            return println!("{:#}", description_json(name, description));
        }
        let (world, tenant) = (&name.world, external(&name.tenant));
        println!("world {world} of tenant {tenant}: {} processes, {} groups", processes.len(), groups.len());
        println!("{:>4}  {:16}  {:8}  {:>9}  address", "rank", "incarnation", "state", "silent ms");
        for process in processes {
            let id = process.process.id;
            let (state, silent_ms) = (process_state(process.state), process.silent_ns / 1_000_000);
            let (rank, address) = (id.rank.0, &process.process.address);
            println!("{rank:>4}  {:016x}  {state:8}  {silent_ms:>9}  {address}", id.incarnation);
        }
        groups.iter().for_each(show_group);
    }
}

/// Lists all worlds, or those of a tenant.
fn worlds(link: &ControlLink, tenant: Option<&str>) -> Result<Vec<WorldFigures>, Failure> {
    let (mut worlds, mut after) = (Vec::<WorldFigures>::new(), None);
    loop {
        let page = link.call(ListWorlds { after })?;
        after = page.worlds.last().map(|last| last.name.clone());
        worlds.extend(page.worlds.into_iter().filter(|world| tenant.is_none_or(|tenant| world.name.tenant == tenant)));
        if !page.more || after.is_none() {
            return Ok(worlds);
        }
    }
}

fn show_group(group: &GroupSummary) {
    let GroupSummary { spec, view, changing_ns, members, .. } = group;
    let changing = changing_ns.map_or_else(String::new, |ns| format!(", changing for {} ms", ns / 1_000_000));
    println!();
    println!(
        "group {} ({:016x}): epoch {}, {} of at most {} members take part, {} operations, {}{changing}",
        spec.name,
        group.group.0,
        view.epoch,
        view.participants().len(),
        spec.max_size,
        view.resolution.completed,
        failure_mode(spec.failure_mode),
    );
    println!("{:>4}  {:>7}  state", "rank", "process");
    for ((rank, process), state) in (0u8..).zip(&spec.order).zip(members) {
        let failed = if view.failed.contains(GroupRank(rank)) { ", failed" } else { "" };
        println!("{rank:>4}  {:>7}  {}{failed}", process.0, member_state(*state));
    }
}

const fn process_state(state: ProcessState) -> &'static str {
    match state {
        ProcessState::Offline => "offline",
        ProcessState::Synced => "synced",
        ProcessState::Healthy => "healthy",
    }
}

const fn member_state(state: MemberState) -> &'static str {
    match state {
        MemberState::Absent => "absent",
        MemberState::Inactive => "inactive",
        MemberState::AwaitingActivation => "awaiting",
        MemberState::Active => "active",
    }
}

const fn failure_mode(mode: FailureMode) -> &'static str {
    match mode {
        FailureMode::Automatic => "automatic",
        FailureMode::Deferred => "deferred",
        FailureMode::Manual => "manual",
    }
}

fn world_json(world: &WorldFigures) -> Value {
    json!({
        "world": world.name.world,
        "tenant": external(&world.name.tenant),
        "processes": world.processes,
        "groups": world.groups,
        "changing": world.changing,
        "view_changes": world.view_changes,
        "exclusions": world.exclusions,
    })
}

fn description_json(name: &WorldName, description: &WorldDescription) -> Value {
    let processes: Vec<Value> = description
        .processes
        .iter()
        .map(|process| {
            json!({
                "rank": process.process.id.rank.0,
                "incarnation": format!("{:016x}", process.process.id.incarnation),
                "address": process.process.address,
                "state": process_state(process.state),
                "silent_ns": process.silent_ns,
            })
        })
        .collect();
    let groups: Vec<Value> = description.groups.iter().map(group_json).collect();
    let tenant = external(&name.tenant);
    json!({ "world": name.world, "tenant": tenant, "processes": processes, "groups": groups })
}

fn group_json(group: &GroupSummary) -> Value {
    let ranks = |set: RankSet<GroupRank>| set.iter().map(|rank| rank.0).collect::<Vec<u8>>();
    json!({
        "name": group.spec.name,
        "group": format!("{:016x}", group.group.0),
        "order": group.spec.order.iter().map(|rank| rank.0).collect::<Vec<u8>>(),
        "max_size": group.spec.max_size,
        "failure_mode": failure_mode(group.spec.failure_mode),
        "epoch": group.view.epoch,
        "active": ranks(group.view.active),
        "failed": ranks(group.view.failed),
        "completed": group.view.resolution.completed,
        "changing_ns": group.changing_ns,
        "members": group.members.iter().map(|state| member_state(*state)).collect::<Vec<_>>(),
        "proposals": group.proposals,
    })
}
