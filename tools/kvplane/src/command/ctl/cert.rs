//! `kvplane ctl cert`: creates and renews a cluster's authority and certificates, without a running cluster.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand, ValueEnum};
use kvplane::private_directory;
use kvplane::rpc::{Authority, ClusterName, Grant, Role, Scope};

use crate::command::Failure;

const DAY: Duration = Duration::from_secs(86_400);

/// Operations on certificates.
#[derive(Subcommand)]
pub(crate) enum Action {
    /// Create the cluster's authority: ca.pem, which every process needs, and ca.key, which must stay secret.
    Init(AuthorityDirectory),
    /// Issue a certificate with its key, and write ca.pem beside them. Existing files are replaced.
    Issue(Issue),
    /// Create a new key for the authority. Certificates of the former key stay valid until it is retired.
    Rotate(AuthorityDirectory),
    /// Retire the former key of the authority, after all certificates are issued anew.
    Retire(AuthorityDirectory),
}

/// Location of the authority.
#[derive(Args)]
pub(crate) struct AuthorityDirectory {
    /// Directory of the authority, with mode 0700; created if its parent exists. The --state of a control plane is such
    /// a directory.
    #[arg(long, value_name = "DIRECTORY")]
    authority: PathBuf,
}

/// Certificate to issue.
#[derive(Args)]
pub(crate) struct Issue {
    #[command(flatten)]
    place: AuthorityDirectory,
    /// Role of the certificate, which decides its permissions.
    role: RoleChoice,
    /// Number of the only node that may use the certificate. Default: any node.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    node_id: Option<u64>,
    /// Only tenant that the certificate gives access to. Default: all tenants.
    #[arg(long, conflicts_with = "node_id")]
    tenant: Option<String>,
    /// Validity of the certificate, in days.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
    /// Directory of the certificate, with mode 0700; created if its parent exists.
    #[arg(long, value_name = "DIRECTORY")]
    out: PathBuf,
}

/// Role of a certificate.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleChoice {
    /// Control plane.
    Control,
    /// Storage node.
    Node,
    /// Client that puts and gets objects.
    Client,
    /// Scheduler that reads loads and events of objects, and calls the Conductor.
    Scheduler,
    /// Operator of the cluster.
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
        Action::Init(AuthorityDirectory { authority }) => {
            private_directory(authority)?;
            if authority.join("ca.pem").exists() {
                return Err(format!(
                    "{} has an authority already; use `kvplane ctl cert rotate` for a new key",
                    authority.display()
                )
                .into());
            }
            Authority::load_or_generate(authority, &cluster)?;
            println!("authority of cluster {cluster} in {}: keep ca.key secret", authority.display());
        }
        Action::Issue(issue) => issue.run(&cluster)?,
        Action::Rotate(AuthorityDirectory { authority }) => {
            Authority::rotate(authority, &cluster)?;
            println!(
                "a new key signs; the former one is trusted still. Next: give everybody the new ca.pem, issue all \
                 certificates anew, then retire the former key"
            );
        }
        Action::Retire(AuthorityDirectory { authority }) => {
            Authority::retire(authority, &cluster)?;
            println!("one key is trusted. Distribute the new ca.pem: processes without it still trust the former key");
        }
    }
    Ok(())
}

impl Issue {
    fn run(&self, cluster: &ClusterName) -> Result<(), Failure> {
        let authority = Authority::load(&self.place.authority, cluster)?;
        let scope = match (self.node_id, &self.tenant) {
            // The global `--tenant` may stand before `cert`, too.
            (Some(_), Some(_)) => {
                return Err("a certificate is for a node or for a tenant: use either --node-id or --tenant".into());
            }
            (Some(node), None) => Scope::Node(node),
            (None, Some(tenant)) => Scope::tenant(tenant)?,
            (None, None) => Scope::Any,
        };
        let role = Role::from(self.role);
        let grant = Grant { scope: scope.clone(), ..Grant::of(role) }.lasting(SystemTime::now(), DAY * self.days);
        let identity = authority.grant(&grant)?;
        private_directory(&self.out)?;
        // ca.pem is written first: a process that reads the directory in between trusts the old and the new key.
        authority.trust().write(&self.out)?;
        identity.write(&self.out, role.name())?;
        println!("{role} for {scope}, {} days, in {}", self.days, self.out.display());
        Ok(())
    }
}
