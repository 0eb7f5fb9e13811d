//! `kvplane ctl tenants`: lists tenants with their quotas, use of memory and weights, and changes them.

use clap::{Args, Subcommand};
use kvplane::ControlLink;
use kvplane::rpc::message::{ListTenants, RemoveTenant, SetTenant, Tenant, TenantStatus};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::size;

/// Operations on tenants.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// List the tenants with their quotas and their use of memory.
    List {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Create a tenant or change it. Settings that are not given stay as they are.
    Set(Set),
    /// Remove a tenant. Its objects stay until they are removed or evicted.
    Remove {
        /// Name of the tenant.
        name: String,
        /// Remove the tenant even if it has objects.
        #[arg(long)]
        force: bool,
    },
}

/// Settings of a tenant.
#[derive(Args)]
pub(crate) struct Set {
    /// Name of the tenant; `default` is the tenant of clients that name none.
    name: String,
    /// Quota of the tenant: most memory of all nodes that its objects may take, in bytes.
    #[arg(long, value_name = "BYTES", value_parser = size::parse_some)]
    memory: Option<u64>,
    /// Remove the tenant's quota.
    #[arg(long, conflicts_with = "memory")]
    no_limit: bool,
    /// Weight of the tenant among tenants without a quota, from 1 to 1000: they divide the memory that the quotas leave
    /// in proportion to their weights.
    #[arg(long)]
    weight: Option<u32>,
}

/// Name of a tenant in the protocol, where the default tenant is the empty name.
pub(super) fn internal(name: &str) -> String {
    if name == "default" { String::new() } else { name.to_owned() }
}

pub(super) fn external(name: &str) -> &str {
    if name.is_empty() { "default" } else { name }
}

pub(super) fn run(link: &ControlLink, action: &Action) -> Result<(), Failure> {
    match action {
        Action::List { json } => list(link, *json),
        Action::Set(set) => {
            let name = internal(&set.name);
            let former = link.call(ListTenants)?.tenants.into_iter().find(|tenant| tenant.name == name);
            let former = former.unwrap_or(TenantStatus { weight: 1, ..TenantStatus::default() });
            let dram_bytes = if set.no_limit { None } else { set.memory.or(former.dram_bytes) };
            let tenant = Tenant { name, dram_bytes, weight: set.weight.unwrap_or(former.weight) };
            link.call(SetTenant { tenant })?;
            println!("tenant {} is set; nodes apply it within a heartbeat", external(&set.name));
            Ok(())
        }
        Action::Remove { name, force } => {
            link.call(RemoveTenant { name: internal(name), only_empty: !force })?;
            println!("tenant {} is removed", external(name));
            Ok(())
        }
    }
}

fn list(link: &ControlLink, as_json: bool) -> Result<(), Failure> {
    let list = link.call(ListTenants)?;
    if as_json {
        let tenants: Vec<Value> = list.tenants.iter().map(tenant_json).collect();
        println!("{:#}", json!({ "strict": list.strict, "pool_bytes": list.pool_bytes, "tenants": tenants }));
        return Ok(());
    }
    println!("{:24}  {:>12}  {:>12}  {:>6}  {:>12}  {:>8}", "tenant", "used", "quota", "weight", "evicted", "refused");
    for tenant in &list.tenants {
        let name = external(&tenant.name);
        let quota = tenant.dram_bytes.map_or_else(|| "none".to_owned(), size::show);
        let (used, evicted) = (size::show(tenant.used_bytes), size::show(tenant.evicted_bytes));
        println!("{name:24}  {used:>12}  {quota:>12}  {:>6}  {evicted:>12}  {:>8}", tenant.weight, tenant.refused);
    }
    if list.strict {
        println!("other tenants may not put");
    }
    Ok(())
}

fn tenant_json(tenant: &TenantStatus) -> Value {
    json!({
        "name": external(&tenant.name),
        "is_set": tenant.is_set,
        "quota_bytes": tenant.dram_bytes,
        "leased_bytes": tenant.leased_bytes,
        "used_bytes": tenant.used_bytes,
        "evicted_bytes": tenant.evicted_bytes,
        "refused": tenant.refused,
        "weight": tenant.weight,
    })
}
