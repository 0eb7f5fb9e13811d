//! Whether members that fall silent are still there. The ports of a process that is dead refuse connections: then
//! nobody needs to wait until its heartbeats are missed for long, and the second owners take over within a second or
//! so.
//!
//! Silence alone is never enough here, nor is a port that cannot be reached: what is slow, stopped or behind a network
//! that is down has the whole deadline. A refusal counts only from ports that this control plane has reached in the
//! same life before, as a firewall refuses too.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvplane_cluster::Input;
use kvplane_proto::ids::{Incarnation, NodeId};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::control::Control;

/// How often members are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long one look at a port may take.
const WITHIN: Duration = Duration::from_millis(250);
/// Members that are looked at together.
const AT_ONCE: usize = 32;

/// One life of a node.
pub(crate) type Life = (NodeId, Incarnation);

/// What is behind the ports of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// Somebody listens at all of them.
    Somebody,
    /// Each refuses connections.
    Nobody,
    /// Neither is sure.
    Nothing,
}

/// Looks for as long as it is asked to.
pub(crate) async fn watch(control: Arc<Control>) {
    // Whether the ports of a life were reached when it was new.
    let mut reached: BTreeMap<Life, bool> = BTreeMap::new();
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let Ok((lives, doors)) = control.doors(&reached, AT_ONCE) else { continue };
        reached.retain(|life, _| lives.contains(life));
        let mut open = JoinSet::new();
        for (life, ports) in doors {
            open.spawn(async move { (life, knock_at(&ports).await) });
        }
        while let Some(Ok(((node, incarnation), found))) = open.join_next().await {
            if let Entry::Vacant(first) = reached.entry((node, incarnation)) {
                first.insert(found == Found::Somebody);
            } else if found == Found::Nobody {
                tracing::warn!(node = node.0, incarnation = incarnation.0, "nobody listens at its ports any more");
                // A refusal says that it is a member no more.
                let _ = control.handle(Input::Refused { node, incarnation });
            }
        }
    }
}

async fn knock_at(ports: &[SocketAddr]) -> Found {
    let (mut refused, mut taken) = (0, 0);
    for port in ports {
        match timeout(WITHIN, TcpStream::connect(port)).await {
            Ok(Ok(_)) => taken += 1,
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => refused += 1,
            // Slow, or nowhere.
            Ok(Err(_)) | Err(_) => return Found::Nothing,
        }
    }
    match ports.len() {
        0 => Found::Nothing,
        all if all == taken => Found::Somebody,
        all if all == refused => Found::Nobody,
        _ => Found::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_port_that_is_closed_refuses_and_one_of_two_says_nothing() {
        let here = || tokio::net::TcpListener::bind("127.0.0.1:0");
        let (one, other) = (here().await.unwrap(), here().await.unwrap());
        let ports = [one.local_addr().unwrap(), other.local_addr().unwrap()];
        assert_eq!(knock_at(&ports).await, Found::Somebody);
        drop(other);
        assert_eq!(knock_at(&ports).await, Found::Nothing);
        drop(one);
        assert_eq!(knock_at(&ports).await, Found::Nobody);
        assert_eq!(knock_at(&[]).await, Found::Nothing);
    }
}
