//! Flags of Mooncake's tebench for what is not here yet: taken with the values that mean "off", refused by name with
//! others.

use clap::Args;

/// Flags whose only accepted value is their default.
#[derive(Args, Clone)]
pub(super) struct Later {
    /// Accelerator of this side: there is none yet.
    #[arg(long = "local_gpu_id", default_value = "0", value_parser = ["0"])]
    local_gpu_id: String,
    /// Accelerator of the target: there is none yet.
    #[arg(long = "target_gpu_id", default_value = "0", value_parser = ["0"])]
    target_gpu_id: String,
    /// Mixed kinds of memory: not yet.
    #[arg(long = "seg_type_mix", default_value = "", value_parser = [""])]
    seg_type_mix: String,
    /// A notification with each batch: not yet.
    #[arg(long = "notifi", default_value = "false", value_parser = ["false"])]
    notifi: String,
    /// Metadata servers: none are needed.
    #[arg(long = "metadata_url_list", default_value = "", value_parser = [""])]
    metadata_url_list: String,
    /// Threads with tight deadlines: not yet.
    #[arg(long = "deadline_tight_threads", default_value = "0", value_parser = ["0"])]
    deadline_tight_threads: String,
    /// Arbitration by deadlines: not yet.
    #[arg(long = "deadline_bw_arbitration", default_value = "false", value_parser = ["false"])]
    deadline_bw_arbitration: String,
    /// Classes of service: not yet.
    #[arg(long = "qos_classes", default_value = "", value_parser = [""])]
    qos_classes: String,
    /// Classes of service: not yet.
    #[arg(long = "qos_classes_json", default_value = "", value_parser = [""])]
    qos_classes_json: String,
    /// Classes of work: not yet.
    #[arg(long = "workload_classes_json", default_value = "", value_parser = [""])]
    workload_classes_json: String,
    /// Capacity to share among classes: not yet.
    #[arg(long = "qos_link_capacity_gbps", default_value = "0", value_parser = ["0"])]
    qos_link_capacity_gbps: String,
    /// Records of classes: not yet.
    #[arg(long = "qos_output_jsonl", default_value = "", value_parser = [""])]
    qos_output_jsonl: String,
    /// Hint of a transport: see --xport_type.
    #[arg(long = "tent_transport_hint", default_value = "unspec", value_parser = ["unspec"])]
    tent_transport_hint: String,
    /// Intent of transfers: not yet.
    #[arg(long = "tent_intent_type", default_value = "unspec", value_parser = ["unspec"])]
    tent_intent_type: String,
}
