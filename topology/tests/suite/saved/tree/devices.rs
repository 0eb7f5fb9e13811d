//! Devices of a synthetic machine: the files by which the kernel describes them.

use super::{Builder, Settings, kib, list};
use std::collections::BTreeSet;

impl Builder {
    pub(super) fn gpu(&mut self, path: &str, set: &Settings<'_>) {
        self.function(path, set.get("class").copied().unwrap_or("030200"), set["id"], set);
    }

    /// Adds an interface: `nic PATH name=eth0 speed=25000 mtu=1500 up=yes`.
    pub(super) fn nic(&mut self, path: &str, set: &Settings<'_>) {
        let at = self.function(path, "020000", set.get("id").copied().unwrap_or("8086:1593"), set);
        self.netdev(set["name"], Some(&at), set);
    }

    fn netdev(&mut self, name: &str, device: Option<&str>, set: &Settings<'_>) {
        let at = device.map_or(format!("sys/devices/virtual/net/{name}"), |device| format!("{device}/net/{name}"));
        let up = set.get("up").is_none_or(|up| *up == "yes");
        for (file, text) in [
            ("flags", if up { "0x1003\n" } else { "0x1002\n" }),
            ("operstate", if up { "up\n" } else { "down\n" }),
            ("address", "02:00:00:00:00:01\n"),
            ("type", "1\n"),
        ] {
            self.tree.file(&format!("{at}/{file}"), text);
        }
        for queue in 0..set.get("queues").map_or(2, |queues| queues.parse().unwrap()) {
            self.tree.file(&format!("{at}/queues/rx-{queue}/rps_cpus"), "0\n");
        }
        self.tree.file(&format!("{at}/speed"), format!("{}\n", set.get("speed").unwrap_or(&"-1")));
        self.tree.file(&format!("{at}/mtu"), format!("{}\n", set.get("mtu").unwrap_or(&"1500")));
        self.tree.link(&format!("sys/class/net/{name}"), &at);
        if let Some(device) = device {
            self.tree.link(&format!("{at}/device"), device);
        }
    }

    /// Adds an RDMA device: `rdma PATH name=mlx5_0 netdev=ens1 speed=400000 mtu=9000 state=4:ACTIVE phys=5:LinkUp
    /// layer=Ethernet`.
    pub(super) fn rdma(&mut self, path: &str, set: &Settings<'_>) {
        let at = self.function(path, "020700", set.get("id").copied().unwrap_or("15b3:1021"), set);
        if let Some(netdev) = set.get("netdev") {
            self.netdev(netdev, Some(&at), set);
        }
        let device = format!("{at}/infiniband/{}", set["name"]);
        self.tree.link(&format!("{device}/device"), &at);
        self.rdma_files(&device, set);
    }

    fn rdma_files(&mut self, device: &str, set: &Settings<'_>) {
        let name = set["name"];
        let words =
            |name: &str, other: &'static str| set.get(name).map_or(other.to_owned(), |text| text.replace(':', ": "));
        let gigabits: u64 = set.get("speed").map_or(0, |speed| speed.parse::<u64>().unwrap() / 1_000);
        let port = format!("{device}/ports/1");
        for (file, text) in [
            ("state", words("state", "4: ACTIVE")),
            ("phys_state", words("phys", "5: LinkUp")),
            ("link_layer", words("layer", "Ethernet")),
            ("rate", format!("{gigabits} Gb/sec (4X NDR)")),
            ("lid", "0x0".to_owned()),
            ("lid_mask_count", "0".to_owned()),
        ] {
            self.tree.file(&format!("{port}/{file}"), text + "\n");
        }
        if let Some(netdev) = set.get("netdev") {
            self.tree.file(&format!("{port}/gid_attrs/ndevs/0"), format!("{netdev}\n"));
        }
        self.tree.file(&format!("{device}/node_guid"), "0000:0000:0000:0001\n");
        self.tree.file(&format!("{device}/sys_image_guid"), "0000:0000:0000:0001\n");
        self.tree.link(&format!("sys/class/infiniband/{name}"), device);
    }

    /// Adds a software device over an existing or virtual interface: `rxe rxe0 netdev=veth0 speed=10000`.
    pub(super) fn rxe(&mut self, name: &str, set: &Settings<'_>) {
        let netdev = set["netdev"];
        if !self.tree.base.join(format!("sys/class/net/{netdev}")).exists() {
            self.netdev(netdev, None, set);
        }
        let mut set = set.clone();
        set.insert("name", name);
        let device = format!("sys/devices/virtual/infiniband/{name}");
        self.tree.file(&format!("{device}/parent"), format!("{netdev}\n"));
        self.rdma_files(&device, &set);
    }

    /// Adds a drive with one namespace, and with as many queues as its node has CPUs: `nvme PATH name=nvme0
    /// size=3840G`.
    pub(super) fn nvme(&mut self, path: &str, set: &Settings<'_>) {
        let at = self.function(path, "010802", "144d:a80a", set);
        let name = set["name"];
        let controller = format!("{at}/nvme/{name}");
        let address = path.rsplit('/').next().unwrap();
        let node = set.get("node").copied().unwrap_or("-1");
        for (file, text) in [
            ("transport", "pcie"),
            ("address", &format!("0000:{address}")),
            ("model", "Synthetic Drive"),
            ("state", "live"),
            ("queue_count", "3"),
            ("subsysnqn", &format!("nqn.2026-01.example:{name}")),
            ("numa_node", node),
        ] {
            self.tree.file(&format!("{controller}/{file}"), format!("{text}\n"));
        }
        self.tree.link(&format!("{controller}/device"), &at);
        self.tree.link(&format!("sys/class/nvme/{name}"), &controller);
        self.disk(&format!("{controller}/{name}n1"), &format!("{name}n1"), &controller, set);
    }

    /// Adds a network drive: `fabric nvme4 transport=tcp address=traddr=10.0.0.1,trsvcid=4420 size=1024G`.
    pub(super) fn fabric(&mut self, name: &str, set: &Settings<'_>) {
        let controller = format!("sys/devices/virtual/nvme-fabrics/ctl/{name}");
        for (file, text) in [
            ("transport", set["transport"]),
            ("address", set["address"]),
            ("model", "Linux"),
            ("state", "live"),
            ("queue_count", "9"),
            ("subsysnqn", "nqn.2026-01.example:pool"),
            ("numa_node", "-1"),
        ] {
            self.tree.file(&format!("{controller}/{file}"), format!("{text}\n"));
        }
        self.tree.link(&format!("sys/class/nvme/{name}"), &controller);
        let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys9";
        self.tree.link(&format!("{subsystem}/{name}"), &controller);
        self.disk(&format!("{subsystem}/{name}n1"), &format!("{name}n1"), subsystem, set);
    }

    fn disk(&mut self, at: &str, name: &str, device: &str, set: &Settings<'_>) {
        for (file, text) in [
            ("size", (kib(set["size"]) * 2).to_string()),
            ("queue/rotational", "0".to_owned()),
            ("queue/logical_block_size", "512".to_owned()),
            ("dev", "259:0".to_owned()),
        ] {
            self.tree.file(&format!("{at}/{file}"), text + "\n");
        }
        let queues: usize = set.get("queues").map_or(0, |queues| queues.parse().unwrap());
        let all: BTreeSet<usize> = self.node_cpus.values().flatten().copied().collect();
        for queue in 0..queues {
            let mine: BTreeSet<usize> = all.iter().copied().filter(|cpu| cpu % queues == queue).collect();
            self.tree.file(&format!("{at}/mq/{queue}/cpu_list"), list(&mine).replace(',', ", "));
        }
        self.tree.link(&format!("{at}/device"), device);
        self.tree.link(&format!("sys/block/{name}"), at);
        self.tree.link(&format!("sys/class/block/{name}"), at);
    }
}
