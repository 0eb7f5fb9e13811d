//! `kvplane ctl tenants`: lists tenants with their quotas and weights, and their use of memory and SSDs; changes them.

use clap::{Args, Subcommand};
use kvplane::ControlLink;
use kvplane::rpc::message::{
    ListTenantSsds, ListTenants, RemoveTenant, SetTenant, TenantChange, TenantSsdStatus, TenantStatus,
};
use serde_json::{Value, json};

use crate::command::Failure;
use crate::command::size;

/// Operations on tenants.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// List the tenants with their quotas and their use of memory and SSDs.
    List {
        /// Print as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Create a tenant or change it. Settings that are not given stay as they are.
    Set(Set),
    /// Remove a tenant without objects. By force, its objects in memory stay until they are removed or evicted, its
    /// records on SSDs are evicted, and its objects in the shared tier stay for their lifetime: a tenant of the same
    /// name, also one that is not set, finds what is left. Remove its objects first. The tenant `default` cannot be
    /// removed.
    Remove {
        /// Name of the tenant.
        name: String,
        /// Remove the tenant even if it has objects, or if a node that may have some has not reported.
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
    /// Quota of SSD bytes: most bytes that its objects may take on the SSDs of all nodes. Beyond it, its own oldest
    /// objects leave the SSDs; 0 keeps it off them, and its weight there for later.
    #[arg(long, value_name = "BYTES", value_parser = size::parse)]
    ssd: Option<u64>,
    /// Remove the tenant's quota of SSD bytes.
    #[arg(long, conflicts_with = "ssd")]
    no_ssd_limit: bool,
    /// Weight of the tenant's writes to and reads from an SSD that cannot keep up, from 1 to 1000; 1 by default.
    #[arg(long, value_name = "WEIGHT")]
    ssd_weight: Option<u32>,
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
            let quota = |no_limit: bool, bytes: Option<u64>| if no_limit { Some(None) } else { bytes.map(Some) };
            let change = TenantChange {
                name: internal(&set.name),
                dram_bytes: quota(set.no_limit, set.memory),
                weight: set.weight,
                ssd_bytes: quota(set.no_ssd_limit, set.ssd),
                ssd_weight: set.ssd_weight,
            };
            link.call(SetTenant { change })?;
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
    let (list, ssds) = (link.call(ListTenants)?, link.call(ListTenantSsds)?);
    let of = |name: &str| ssds.tenants.iter().find(|tenant| tenant.name == name).cloned().unwrap_or_default();
    if as_json {
        let tenants: Vec<Value> = list.tenants.iter().map(|tenant| tenant_json(tenant, &of(&tenant.name))).collect();
        let bytes = (list.pool_bytes, ssds.ssd_bytes);
        let shown = json!({ "strict": list.strict, "pool_bytes": bytes.0, "ssd_bytes": bytes.1, "tenants": tenants });
        println!("{shown:#}");
        return Ok(());
    }
    let (memory, ssd) = ("used         quota", "SSD used     SSD quota");
    println!(
        "{:24}  {memory:>26}  {:>6}  {:>12}  {:>8}  {ssd:>26}  {:>6}",
        "tenant", "weight", "evicted", "refused", "weight"
    );
    for tenant in &list.tenants {
        let name = external(&tenant.name);
        let quota = tenant.dram_bytes.map_or_else(|| "none".to_owned(), size::show);
        let (used, evicted) = (size::show(tenant.used_bytes), size::show(tenant.evicted_bytes));
        let ssd = of(&tenant.name);
        let on_ssd = size::show(ssd.used_bytes);
        let ssd_quota = ssd.ssd.ssd_bytes.map_or_else(|| "none".to_owned(), size::show);
        let (weight, refused, ssd_weight) = (tenant.weight, tenant.refused, ssd.ssd.weight.unwrap_or(1));
        print!("{name:24}  {used:>12}  {quota:>12}  {weight:>6}  {evicted:>12}  {refused:>8}");
        println!("  {on_ssd:>12}  {ssd_quota:>12}  {ssd_weight:>6}");
    }
    if list.strict {
        println!("other tenants may not put");
    }
    Ok(())
}

fn tenant_json(tenant: &TenantStatus, ssd: &TenantSsdStatus) -> Value {
    json!({
        "name": external(&tenant.name),
        "is_set": tenant.is_set,
        "quota_bytes": tenant.dram_bytes,
        "leased_bytes": tenant.leased_bytes,
        "used_bytes": tenant.used_bytes,
        "evicted_bytes": tenant.evicted_bytes,
        "refused": tenant.refused,
        "weight": tenant.weight,
        "ssd": {
            "quota_bytes": ssd.ssd.ssd_bytes,
            "leased_bytes": ssd.leased_bytes,
            "used_bytes": ssd.used_bytes,
            "evicted_bytes": ssd.evicted_bytes,
            "refused": ssd.refused,
            "weight": ssd.ssd.weight.unwrap_or(1),
        },
    })
}
