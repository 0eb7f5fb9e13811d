//! `kvplane ctl cert`: a cluster's authority and its certificates, made and replaced without a running cluster.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand, ValueEnum};
use kvplane::private_directory;
use kvplane::rpc::{Authority, ClusterName, Grant, Role, Scope};

use crate::command::Failure;

const DAY: Duration = Duration::from_secs(86_400);

/// Certificates.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Make the cluster's authority: ca.pem, which everybody needs, and ca.key, which nobody else may see.
    Init(Place),
    /// Issue a certificate with its key, and put ca.pem beside them. Files that are there are replaced.
    Issue(Issue),
    /// Make a new key for the authority; certificates of the former one count until it is retired.
    Rotate(Place),
    /// End the trust in the former key of the authority, when everything has been issued anew.
    Retire(Place),
}

/// Where the authority is.
#[derive(Args)]
pub(crate) struct Place {
    /// The authority's directory: mode 0700, made if its parent exists. A control plane's --state is one.
    #[arg(long, value_name = "DIRECTORY")]
    authority: PathBuf,
}

/// A new certificate.
#[derive(Args)]
pub(crate) struct Issue {
    #[command(flatten)]
    place: Place,
    /// What its holder may do.
    role: RoleChoice,
    /// The only node that it is for; without it, all.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    node_id: Option<u64>,
    /// The only tenant that it is for; without it, all.
    #[arg(long, conflicts_with = "node_id")]
    tenant: Option<String>,
    /// How long it counts.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Where to put it: mode 0700, made if its parent exists.
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
}

/// Roles in certificates.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleChoice {
    /// A control plane.
    Control,
    /// A storage node.
    Node,
    /// Puts and gets objects.
    Client,
    /// Reads load and what becomes of objects.
    Scheduler,
    /// Operates the cluster.
    Admin,
}

impl From<RoleChoice> for Role {
    fn from(choice: RoleChoice) -> Self {
        match choice {
            RoleChoice::Control => Self::Control,
            RoleChoice::Node => Self::Node,
            RoleChoice::Client => Self::Client,
            RoleChoice::Scheduler => Self::Scheduler,
            RoleChoice::Admin => Self::Admin,
        }
    }
}

pub(crate) fn run(cluster: &str, action: &Action) -> Result<(), Failure> {
    let cluster = ClusterName::new(cluster)?;
    match action {
        Action::Init(Place { authority }) => {
            private_directory(authority)?;
            if authority.join("ca.pem").exists() {
                return Err(format!("{} has an authority already; rotate makes a new key", authority.display()).into());
            }
            Authority::load_or_generate(authority, &cluster)?;
            println!("authority of cluster {cluster} in {}: keep ca.key to yourself", authority.display());
        }
        Action::Issue(issue) => issue.run(&cluster)?,
        Action::Rotate(Place { authority }) => {
            Authority::rotate(authority, &cluster)?;
            println!(
                "a new key signs; the former one is trusted still. Next: give everybody the new ca.pem, issue all \
                 certificates anew, then retire the former key"
            );
        }
        Action::Retire(Place { authority }) => {
            Authority::retire(authority, &cluster)?;
            println!("one key is trusted. Give everybody the new ca.pem: where it is not, the former key counts still");
        }
    }
    Ok(())
}

impl Issue {
    fn run(&self, cluster: &ClusterName) -> Result<(), Failure> {
        let authority = Authority::load(&self.place.authority, cluster)?;
        let scope = match (self.node_id, &self.tenant) {
            // The tenant may have been said before `cert`, too.
            (Some(_), Some(_)) => return Err("a certificate is for a node or for a tenant: leave out one".into()),
            (Some(node), None) => Scope::Node(node),
            (None, Some(tenant)) => Scope::tenant(tenant)?,
            (None, None) => Scope::Any,
        };
        let role = Role::from(self.role);
        let grant = Grant { scope: scope.clone(), ..Grant::of(role) }.lasting(SystemTime::now(), DAY * self.days);
        let identity = authority.grant(&grant)?;
        private_directory(&self.out)?;
        // Whom to trust comes first: a process that looks in between trusts both the old and the new.
        authority.trust().write(&self.out)?;
        identity.write(&self.out, role.name())?;
        println!("{role} for {scope}, {} days, in {}", self.days, self.out.display());
        Ok(())
    }
}
