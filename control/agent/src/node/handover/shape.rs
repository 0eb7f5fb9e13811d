//! Shape of a node: what a successor must have in common with the running process, so that the memory, the ports and
//! the SSDs of the one are those of the other.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kvplane_engine::IMAGE_FORMAT;
use kvplane_proto::ids::NodeId;
use serde_json::{Value, json};

use super::{HandoverError, PROTOCOL, message};

/// Reason why a node does not hand over.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum HandoverRefusal {
    /// The messages of the successor have another version.
    Protocol { ours: u32, theirs: u64 },
    /// The successor does not read the images that the running process writes.
    ImageFormat { writes: u32, reads: Vec<u64> },
    /// The running process has device pools, whose objects would be lost.
    DevicePools,
    /// The running process has far memory, whose objects would be lost.
    FarMemory,
    /// The processes differ in a setting.
    Setting { name: &'static str, running: String, new: String },
    /// The file system of the memory, or the host, has no room for the images.
    Room { free: u64, needed: u64 },
    /// Slots still migrate from or to the node.
    Moves { slots: u64, after: Duration },
    /// The node is draining, and has SSDs: its successor begins a new line of incarnations, which ends the drain.
    Draining { node: NodeId },
    /// The control plane, at which the successor has to join, does not answer.
    ControlAway { why: String },
    /// Another process is about to take over.
    Busy,
}

impl HandoverRefusal {
    /// Returns true if another attempt with the same programs and settings is refused, too.
    #[must_use]
    pub const fn is_lasting(&self) -> bool {
        match self {
            Self::Protocol { .. } | Self::ImageFormat { .. } | Self::Setting { .. } => true,
            Self::DevicePools | Self::FarMemory => true,
            Self::Room { .. } | Self::Moves { .. } | Self::Draining { .. } => false,
            Self::ControlAway { .. } | Self::Busy => false,
        }
    }
}

impl fmt::Display for HandoverRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol { ours, theirs } => write!(
                f,
                "the new process speaks version {theirs} of handovers, this one {ours}: restart the node if it keeps \
                 its memory (--keep-memory); otherwise drain it (kvplane ctl drain) and restart it"
            ),
            Self::ImageFormat { writes, reads } => write!(
                f,
                "this process writes images of format {writes}, the new one reads {reads:?}: drain the node \
                 (kvplane ctl drain) and restart it"
            ),
            Self::DevicePools => f.write_str(
                "objects in device pools are lost with this process: drain the node (kvplane ctl drain) and restart it",
            ),
            Self::FarMemory => f.write_str(
                "objects in far memory are lost with this process: drain the node (kvplane ctl drain) and restart it",
            ),
            Self::Setting { name, running, new } => write!(
                f,
                "{name} is {running} in this process and {new} in the new one: start that with the same setting, or \
                 restart the node"
            ),
            Self::Room { free, needed } => write!(
                f,
                "{free} bytes of memory are left, and the image of the node's objects needs {needed}: make the file \
                 system of --keep-memory larger (mount -o remount,size=); without one, free memory of the host"
            ),
            Self::Moves { slots, after } => {
                write!(f, "{slots} slots still migrate from or to the node after {} s: try again", after.as_secs())
            }
            Self::Draining { node } => write!(
                f,
                "the node is draining, and an upgrade of a node with SSDs would give it its slots back: cancel the \
                 drain first (kvplane ctl drain {node} --cancel), or stop the node once it is drained"
            ),
            Self::ControlAway { why } => write!(
                f,
                "the control plane does not answer, and without it the new process cannot serve: try again ({why})"
            ),
            Self::Busy => f.write_str("another process is about to take over"),
        }
    }
}

impl std::error::Error for HandoverRefusal {}

/// Shape of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeShape {
    /// Name of the cluster.
    pub cluster: String,
    /// Number of the node.
    pub node: NodeId,
    /// Number of shards.
    pub shards: u16,
    /// Size of the pool of a shard.
    pub pool_bytes: u64,
    /// Limit of objects of a shard.
    pub max_objects: u32,
    /// Address that the shards listen on.
    pub listen: IpAddr,
    /// Port of the first shard; 0 for whichever the running process has.
    pub port: u16,
    /// Directory of the kept memory; none if it is memfds.
    pub directory: Option<PathBuf>,
    /// Paths of the SSDs.
    pub ssds: Vec<PathBuf>,
    /// Number of device pools.
    pub device_pools: usize,
    /// True with far memory.
    pub has_far_memory: bool,
}

impl NodeShape {
    /// Returns the reason why a running node of this shape hands over to no process at all.
    pub(super) fn unfit(&self) -> Option<HandoverRefusal> {
        if self.device_pools > 0 {
            return Some(HandoverRefusal::DevicePools);
        }
        self.has_far_memory.then_some(HandoverRefusal::FarMemory)
    }

    /// Returns the first message of a successor of this shape.
    pub(super) fn hello(&self, software: &str) -> Value {
        let path = |path: &PathBuf| path.display().to_string();
        json!({
            "kind": "hello",
            "protocol": PROTOCOL,
            "software": software,
            "image_formats": [IMAGE_FORMAT],
            "cluster": self.cluster,
            "node": self.node.0,
            "shards": self.shards,
            "pool_bytes": self.pool_bytes,
            "max_objects": self.max_objects,
            "listen": self.listen.to_string(),
            "port": self.port,
            "directory": self.directory.as_ref().map(path),
            "far_memory": self.has_far_memory,
            "ssds": self.ssds.iter().map(path).collect::<Vec<_>>(),
        })
    }

    /// Compares the shape of the running process, at these ports, with the first message of a successor. Returns the
    /// reason why the running process refuses; `None` if it hands over.
    ///
    /// # Errors
    /// When the message is malformed.
    pub(super) fn objection(
        &self,
        ports: &[SocketAddr],
        hello: &Value,
    ) -> Result<Option<HandoverRefusal>, HandoverError> {
        let theirs = message::number(hello, "protocol")?;
        if theirs != u64::from(PROTOCOL) {
            return Ok(Some(HandoverRefusal::Protocol { ours: PROTOCOL, theirs }));
        }
        let reads = hello.get("image_formats").and_then(Value::as_array);
        let reads = reads.ok_or(HandoverError::Malformed { what: "image_formats" })?;
        let reads: Vec<u64> = reads.iter().filter_map(Value::as_u64).collect();
        if !reads.contains(&u64::from(IMAGE_FORMAT)) {
            return Ok(Some(HandoverRefusal::ImageFormat { writes: IMAGE_FORMAT, reads }));
        }
        if let Some(refusal) = self.unfit() {
            return Ok(Some(refusal));
        }
        let path = |value: &Value| value.as_str().map(str::to_owned);
        let ssds = hello.get("ssds").and_then(Value::as_array).ok_or(HandoverError::Malformed { what: "ssds" })?;
        let ssds: Vec<String> = ssds.iter().filter_map(path).collect();
        let ours: Vec<String> = self.ssds.iter().map(|path| path.display().to_string()).collect();
        let port = message::number(hello, "port")?;
        let known = ports.first().map_or(0, |first| u64::from(first.port()));
        let directory = |path: Option<String>| path.unwrap_or_else(|| "not set".to_owned());
        // Versions without far memory do not say it.
        let has_far_memory = hello.get("far_memory").and_then(Value::as_bool).unwrap_or(false);
        let far_memory = |is_set: bool| if is_set { "set" } else { "not set" }.to_owned();
        let number = |name| message::number(hello, name).map(|number| number.to_string());
        let settings = [
            ("the cluster", self.cluster.clone(), message::text(hello, "cluster")?.to_owned()),
            ("--node-id", self.node.0.to_string(), number("node")?),
            ("--shards", self.shards.to_string(), number("shards")?),
            ("the pool of a shard", self.pool_bytes.to_string(), number("pool_bytes")?),
            ("--pool-tier", far_memory(self.has_far_memory), far_memory(has_far_memory)),
            ("the limit of objects of a shard", self.max_objects.to_string(), number("max_objects")?),
            ("--listen", self.listen.to_string(), message::text(hello, "listen")?.to_owned()),
            ("--port", known.to_string(), if port == 0 { known } else { port }.to_string()),
            (
                "--keep-memory",
                directory(self.directory.as_ref().map(|path| path.display().to_string())),
                directory(hello.get("directory").and_then(path)),
            ),
            ("--ssd", format!("{ours:?}"), format!("{ssds:?}")),
        ];
        let other = settings.into_iter().find(|(_, running, new)| running != new);
        Ok(other.map(|(name, running, new)| HandoverRefusal::Setting { name, running, new }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> NodeShape {
        NodeShape {
            cluster: "prod".to_owned(),
            node: NodeId(7),
            shards: 2,
            pool_bytes: 1 << 30,
            max_objects: 1 << 18,
            listen: IpAddr::from([127, 0, 0, 1]),
            port: 0,
            directory: Some("/dev/shm/kept".into()),
            ssds: vec!["/dev/nvme0n1".into()],
            device_pools: 0,
            has_far_memory: false,
        }
    }

    fn objection(running: &NodeShape, hello: &Value) -> Option<HandoverRefusal> {
        running.objection(&[([127, 0, 0, 1], 7410).into()], hello).expect("a good message")
    }

    #[test]
    fn a_process_of_the_same_shape_takes_over() {
        let running = shape();
        assert_eq!(objection(&running, &running.hello("kvplane/0.1.0")), None);
        let same_port = NodeShape { port: 7410, ..shape() };
        assert_eq!(objection(&running, &same_port.hello("kvplane/0.2.0")), None);
        // Later versions may say more, and read several formats.
        let mut hello = running.hello("kvplane/9.0.0");
        hello["later"] = json!("whatever");
        hello["image_formats"] = json!([IMAGE_FORMAT + 1, IMAGE_FORMAT]);
        assert_eq!(objection(&running, &hello), None);
    }

    #[test]
    fn other_formats_and_settings_are_refused_by_name() {
        let (running, hello) = (shape(), shape().hello("kvplane/0.2.0"));
        let with = |name: &str, value: Value| {
            let mut hello = hello.clone();
            hello[name] = value;
            objection(&running, &hello).expect("refused").to_string()
        };
        let formats = with("image_formats", json!([IMAGE_FORMAT + 1]));
        let reads = format!("reads [{}]", IMAGE_FORMAT + 1);
        assert!(formats.contains(&reads) && formats.contains("kvplane ctl drain"), "{formats}");
        assert!(with("protocol", json!(2)).contains("version 2 of handovers"));
        let settings = [
            ("cluster", json!("other"), "the cluster is prod in this process and other"),
            ("node", json!(8), "--node-id is 7 in this process and 8"),
            ("shards", json!(3), "--shards is 2 in this process and 3"),
            ("pool_bytes", json!(4096), "the pool of a shard is 1073741824"),
            ("max_objects", json!(9), "the limit of objects of a shard is 262144"),
            ("listen", json!("10.0.0.1"), "--listen is 127.0.0.1"),
            ("port", json!(80), "--port is 7410 in this process and 80"),
            ("directory", json!("/tmp"), "--keep-memory is /dev/shm/kept in this process and /tmp"),
            ("directory", Value::Null, "and not set in the new one"),
            ("far_memory", json!(true), "--pool-tier is not set in this process and set in the new one"),
            ("ssds", json!([]), "--ssd is [\"/dev/nvme0n1\"]"),
        ];
        for (name, value, said) in settings {
            let text = with(name, value);
            assert!(text.contains(said), "{text}");
        }
        let memfds = NodeShape { directory: None, ..shape() };
        let text = objection(&memfds, &hello).expect("refused").to_string();
        assert!(text.contains("--keep-memory is not set in this process and /dev/shm/kept in the new one"), "{text}");
        assert_eq!(objection(&memfds, &memfds.hello("kvplane/0.2.0")), None);
        assert!(HandoverRefusal::FarMemory.is_lasting() && !HandoverRefusal::Busy.is_lasting());
        let far = NodeShape { has_far_memory: true, ..shape() };
        assert_eq!(objection(&far, &hello), Some(HandoverRefusal::FarMemory));
        let device_pools = NodeShape { device_pools: 1, ..shape() };
        assert_eq!(objection(&device_pools, &hello), Some(HandoverRefusal::DevicePools));
    }

    #[test]
    fn a_message_that_lacks_a_member_is_malformed() {
        let running = shape();
        let needed = ["protocol", "image_formats", "cluster", "node", "shards", "pool_bytes", "max_objects", "listen"];
        for name in needed.into_iter().chain(["port", "ssds"]) {
            let mut hello = running.hello("kvplane/0.1.0");
            hello.as_object_mut().expect("an object").remove(name);
            assert!(running.objection(&[], &hello).is_err(), "{name}");
        }
    }
}
