//! Tests of `kvplane p2p reshard`: a checkpoint written by four ranks of tensor parallelism, fetched by three of tensor
//! times two of pipeline parallelism, between real processes; and again after one of two members with the same rank's
//! bytes is killed.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Process, Workplace, finish, text};

const ROWS: u64 = 12;
const COLUMNS: u64 = 24;

/// Tensors in two dimensions: name, dimension that is cut, and stage of the pipeline.
const TENSORS: [(&str, Option<usize>, u64); 6] = [
    ("layers.0.up", Some(0), 0),
    ("layers.0.down", Some(1), 0),
    ("layers.0.norm", None, 0),
    ("layers.1.up", Some(0), 1),
    ("layers.1.down", Some(1), 1),
    ("layers.1.norm", None, 1),
];

/// Rank: its name, and of each of its tensors the offset and the shape.
struct Rank {
    name: String,
    has: Vec<(usize, [u64; 2], [u64; 2])>,
}

fn ranks(tp: u64, pp: u64) -> Vec<Rank> {
    let mut ranks = Vec::new();
    for stage in 0..pp {
        for rank in 0..tp {
            let mut has = Vec::new();
            for (tensor, &(_, cut, of_stage)) in TENSORS.iter().enumerate() {
                if pp > 1 && of_stage != stage {
                    continue;
                }
                let (mut offset, mut shape) = ([0, 0], [ROWS, COLUMNS]);
                if let Some(cut) = cut {
                    shape[cut] /= tp;
                    offset[cut] = rank * shape[cut];
                }
                has.push((tensor, offset, shape));
            }
            let name = if pp > 1 { format!("pp{stage}-tp{rank}") } else { format!("tp{rank}") };
            ranks.push(Rank { name, has });
        }
    }
    ranks
}

fn manifest(ranks: &[Rank]) -> Value {
    let tensor = |&(name, cut, _): &(&str, Option<usize>, u64)| {
        json!({ "tensor_id": name, "global_shape": [ROWS, COLUMNS], "dtype": "float16", "itemsize": 2,
                "shard_dims": cut.into_iter().collect::<Vec<_>>() })
    };
    let fragment = |&(tensor, offset, shape): &(usize, [u64; 2], [u64; 2])| {
        json!({ "tensor_id": TENSORS[tensor].0, "global_offset": offset, "local_shape": shape,
                "nbytes": 2 * shape[0] * shape[1] })
    };
    let part = |rank: &Rank| {
        let fragments: Vec<Value> = rank.has.iter().map(fragment).collect();
        json!({ "participant_id": rank.name, "fragments": fragments })
    };
    json!({ "resource_kind": "model_weight", "resource_id": "m", "revision": "7",
            "tensors": TENSORS.iter().map(tensor).collect::<Vec<_>>(),
            "parts": ranks.iter().map(part).collect::<Vec<_>>() })
}

/// Returns the bytes of a box, which identify their location.
fn bytes(&(tensor, offset, shape): &(usize, [u64; 2], [u64; 2])) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in offset[0]..offset[0] + shape[0] {
        for column in offset[1]..offset[1] + shape[1] {
            let word = (tensor as u16) << 12 | (row * COLUMNS + column) as u16;
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

fn packed(rank: &Rank) -> Vec<u8> {
    rank.has.iter().flat_map(bytes).collect()
}

fn safetensors(rank: &Rank) -> Vec<u8> {
    // The tensors lie in another order than in the manifest.
    let (mut table, mut data) = (serde_json::Map::new(), Vec::new());
    for part in rank.has.iter().rev() {
        let from = data.len();
        data.extend(bytes(part));
        let entry = json!({ "dtype": "F16", "shape": part.2, "data_offsets": [from, data.len()] });
        table.insert(TENSORS[part.0].0.to_owned(), entry);
    }
    let table = serde_json::to_vec(&table).unwrap();
    [&(table.len() as u64).to_le_bytes()[..], &table, &data].concat()
}

/// Checks a rank's file: every tensor, by name.
fn check(path: &Path, rank: &Rank) {
    let file = fs::read(path).unwrap();
    let table = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (head, data) = file[8..].split_at(table);
    let head: Value = serde_json::from_slice(head).unwrap();
    assert_eq!(head.as_object().unwrap().len(), rank.has.len());
    for part in &rank.has {
        let entry = &head[TENSORS[part.0].0];
        assert_eq!((&entry["dtype"], &entry["shape"]), (&json!("F16"), &json!(part.2)));
        let at = |which: usize| entry["data_offsets"][which].as_u64().unwrap() as usize;
        assert_eq!(data[at(0)..at(1)], bytes(part), "{} of {}", TENSORS[part.0].0, rank.name);
    }
}

fn put(place: &Workplace, name: &str, path: &Path) -> Process {
    let process = Process::start(place.command(&["p2p", "put", name, text(path), "--shard", "64KiB"]));
    process.wait_for("serves");
    process
}

#[test]
fn a_checkpoint_of_four_ranks_is_pulled_by_three_times_two() {
    let place = Workplace::new("reshard");
    let _dev = place.dev("16M", &[]);
    let (source, target) = (ranks(4, 1), ranks(3, 2));
    let source_json = place.file("source.json", manifest(&source).to_string().as_bytes());
    let target_json = place.file("target.json", manifest(&target).to_string().as_bytes());
    // Two ranks are in one object, in either format, and the others in objects of their own.
    let directory = place.path("checkpoint");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("tp0.safetensors"), safetensors(&source[0])).unwrap();
    fs::write(directory.join("tp1.bin"), packed(&source[1])).unwrap();
    let _whole = put(&place, "ckpt", &directory);
    let _third = put(&place, "ckpt/tp2", &place.file("two.safetensors", &safetensors(&source[2])));
    let fourth = place.file("three.bin", &packed(&source[3]));
    let mut killed = put(&place, "ckpt/tp3", &fourth);
    let _other = put(&place, "ckpt/tp3", &fourth);
    let out = place.path("out");
    let reshard =
        ["p2p", "reshard", "ckpt", text(&out), "--source", text(&source_json), "--target", text(&target_json)];
    let one = |rank: &Rank| {
        let mut command = place.command(&reshard);
        command.args(["--participant", &rank.name]);
        Process::start(command)
    };
    let pulling: Vec<Process> = target.iter().map(one).collect();
    for (mut process, rank) in pulling.into_iter().zip(&target) {
        process.wait_for(&format!("has {:?}", rank.name));
        assert!(process.ended().success());
        check(&out.join(format!("{}.safetensors", rank.name)), rank);
    }
    // One of two members with the fourth rank's bytes is killed; the other serves them. All ranks are fetched by one
    // command, packed.
    killed.kill();
    let found = finish(place.command(&[&reshard[..], &["--packed"]].concat()), &[]).text();
    assert_eq!(found.lines().count(), 6, "{found}");
    for rank in &target {
        assert_eq!(fs::read(out.join(format!("{}.bin", rank.name))).unwrap(), packed(rank), "{}", rank.name);
    }
    refuses(&place, &reshard, &source);
}

/// Requests that cannot be served are refused with a reason, and leave nothing behind.
fn refuses(place: &Workplace, reshard: &[&str], source: &[Rank]) {
    let refused = |arguments: &[&str], words: &[&str]| finish(place.command(arguments), &[]).failed(1, words);
    // The directory is locked by a get.
    let get = fs::File::open(place.path("out")).unwrap();
    get.try_lock().unwrap();
    refused(reshard, &["out: ", "fetches into it: wait until it has ended"]);
    drop(get);
    refused(&[reshard, &["--participant", "tp9"]].concat(), &["no participant \"tp9\"", "pp0-tp0"]);
    // One rank is missing from the manifest, and then its bytes are.
    let missing = place.file("missing.json", manifest(&source[..3]).to_string().as_bytes());
    let mut arguments = reshard.to_vec();
    arguments[5] = text(&missing);
    refused(&arguments, &["layers.0.up", "[9:12, 0:24]", "which no source has"]);
    let mut more = manifest(source);
    more["parts"][3]["participant_id"] = json!("nobody");
    let more = place.file("more.json", more.to_string().as_bytes());
    arguments[5] = text(&more);
    refused(&arguments, &["no file \"nobody\"", "ckpt/nobody"]);
    // A file does not match the manifest.
    let mut wrong = manifest(source);
    wrong["tensors"][0]["dtype"] = json!("bfloat16");
    let wrong_json = place.file("wrong.json", wrong.to_string().as_bytes());
    arguments[5] = text(&wrong_json);
    arguments[7] = text(&wrong_json);
    refused(&arguments, &["tp0.safetensors", "layers.0.up", "F16", "BF16"]);
    assert!(!place.path("out").join("tp0.safetensors").exists());
}
