//! Paths of Mooncake's conductor and of Dynamo's indexer, in JSON or MessagePack, for routers that use those.
//!
//! | request | action |
//! |---|---|
//! | `POST /register` | registers an engine or a master with its publisher of events, which is followed from then on |
//! | `POST /unregister` | unregisters it |
//! | `POST /query` | returns the holders of a prompt's prefix, by tokens, of engines of any hash scheme |
//! | `POST /query_by_hash` | the same query, by the hashes of an engine |
//! | `GET /global_view` | models, with the number of their known blocks |
//! | `GET /services` | engines and masters |
//!
//! An answer to a query has both shapes: `instances` with cumulative `gpu`, `cpu`, `disk` and `longest_matched`, and
//! the tenant's name with `GPU`, `CPU`, `DISK` and `DP`. A model that no instance serves has no holders. Blocks in the
//! shared store count as memory (`cpu`) of every instance that prefills. A query by tokens finds the blocks whose
//! events contain tokens, and by the hashes of vLLM's `sha256_cbor` with the registered seed all others;
//! `unfindable_blocks` (and `hash_mismatch`, its name in earlier versions) means that engines of the model hold blocks
//! that neither finds; `hash_mismatch` in `/global_view` means that schedulers hash otherwise than engines. `degraded`
//! means that the index lacks contents of the model's engines or of stores, as after a restart of the control plane;
//! `progress` then says how far it is.
//!
//! A body of type `application/msgpack` is MessagePack, and so is its answer; with `GET`, `Accept` decides. In
//! MessagePack, `token_ids` may be bytes: numbers of 32 bits, little-endian.

use std::collections::BTreeMap;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName};
use hyper::{Method, Request, StatusCode};
use kvplane_conductor::conductor::{PoolKey, QueryPrompt};
use kvplane_conductor::engine::hashes::{MAX_TOKENS, vllm};
use kvplane_conductor::engine::msgpack;
use kvplane_conductor::engine::tokens::TokenPrompt;
use kvplane_rpc::RefusalCode;
use kvplane_rpc::conductor::{
    DeregisterInstance, EventSource, InstancePart, PrefixHolder, PromptContext, RegisterInstance,
};
use serde_json::{Map, Value, json};

use crate::conductor::status::{pool_progress_as_json, progress_as_json};
use crate::conductor::{ConductorService, MasterSpec};
use crate::control::Control;
use crate::http::admin::answer_json;
use crate::http::{Answer, MSGPACK};

/// Most bytes of a body: two million tokens as text.
const BODY_BYTES: usize = 24 << 20;
/// Most bytes of a body in MessagePack: a value of one byte takes fifty once it is decoded.
const PACKED_BYTES: usize = 9 << 20;
/// Most holders in an answer.
const HOLDERS: usize = 1_024;
/// Greatest rank.
const RANKS: u64 = 65_535;
/// Most bytes of a master's name, tenant and model.
const NAME_BYTES: usize = 256;
/// Hash algorithms of vLLM that cannot be computed here from tokens; `sha256` is its default.
const FOREIGN_HASHES: [&str; 4] = ["sha256", "xxhash", "xxhash_cbor", "builtin"];
/// Most bytes of a hash seed.
const SEED_BYTES: usize = 64;

const PATHS: [&str; 6] = ["/register", "/unregister", "/query", "/query_by_hash", "/global_view", "/services"];

/// Returns the path's name in metrics, if it is one of these.
pub(crate) fn known(path: &str) -> Option<&'static str> {
    PATHS.into_iter().find(|known| *known == path)
}

/// Error of a request.
struct RequestError(StatusCode, String);

fn wrong(what: impl Into<String>) -> RequestError {
    RequestError(StatusCode::BAD_REQUEST, what.into())
}

impl From<kvplane_rpc::Refusal> for RequestError {
    fn from(refusal: kvplane_rpc::Refusal) -> Self {
        let status = match refusal.known_code() {
            Some(RefusalCode::NotFound) => StatusCode::NOT_FOUND,
            Some(RefusalCode::LimitReached | RefusalCode::ShuttingDown | RefusalCode::Storage) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::BAD_REQUEST,
        };
        Self(status, refusal.reason)
    }
}

/// Answers a path that [`known`] accepts.
pub(crate) async fn answer(control: &Control, path: &'static str, request: Request<Incoming>) -> Answer {
    let asks = if request.method() == Method::GET { ACCEPT } else { CONTENT_TYPE };
    let packed = is_packed(request.headers(), &asks);
    let result = match control.conductor() {
        Ok(conductor) => serve(conductor, path, request, packed).await,
        Err(refusal) => Err(refusal.into()),
    };
    let (status, value) = match result {
        Ok(value) => (StatusCode::OK, value),
        Err(RequestError(status, what)) => (status, json!({ "error": what })),
    };
    if !packed {
        return answer_json(status, &value);
    }
    let mut out = msgpack::Writer::default();
    pack(&value, &mut out);
    (status, MSGPACK, out.finish().into())
}

/// Returns true if a header names MessagePack, by any of its media types.
fn is_packed(headers: &HeaderMap, name: &HeaderName) -> bool {
    let said = headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let first = said.split([';', ',']).next().unwrap_or_default().trim().to_ascii_lowercase();
    [MSGPACK, "application/x-msgpack", "application/vnd.msgpack"].contains(&first.as_str())
}

/// Writes a JSON value as MessagePack. No answer has four billion values.
fn pack(value: &Value, out: &mut msgpack::Writer) {
    match value {
        Value::Null => out.nil(),
        Value::Bool(is) => out.bool(*is),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => out.uint(number),
            (None, Some(number)) => out.int(number),
            (None, None) => out.float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => out.text(text),
        Value::Array(values) => {
            out.array(values.len() as u32);
            values.iter().for_each(|value| pack(value, out));
        }
        Value::Object(fields) => {
            out.map(fields.len() as u32);
            for (name, value) in fields {
                out.text(name);
                pack(value, out);
            }
        }
    }
}

/// Converts MessagePack to JSON. Bytes become numbers of 32 bits.
fn unpacked(value: &msgpack::Value<'_>) -> Option<Value> {
    Some(match value {
        msgpack::Value::Nil => Value::Null,
        msgpack::Value::Bool(is) => (*is).into(),
        msgpack::Value::Int(number) => match u64::try_from(*number) {
            Ok(number) => number.into(),
            Err(_) => i64::try_from(*number).ok()?.into(),
        },
        msgpack::Value::Float(number) => (*number).into(),
        msgpack::Value::Text(text) => std::str::from_utf8(text).ok()?.into(),
        msgpack::Value::Bytes(bytes) => {
            let words = bytes.chunks(4).map(|word| Some(u32::from_le_bytes(word.try_into().ok()?).into()));
            Value::Array(words.collect::<Option<_>>()?)
        }
        msgpack::Value::Array(values) => Value::Array(values.iter().map(unpacked).collect::<Option<_>>()?),
        msgpack::Value::Map(fields) => {
            let fields = fields.iter().map(|(name, value)| Some((name.text()?.to_owned(), unpacked(value)?)));
            Value::Object(fields.collect::<Option<_>>()?)
        }
        msgpack::Value::Other => return None,
    })
}

async fn serve(
    conductor: &ConductorService,
    path: &str,
    request: Request<Incoming>,
    packed: bool,
) -> Result<Value, RequestError> {
    let reads = path == "/global_view" || path == "/services";
    let right = if reads { Method::GET } else { Method::POST };
    if *request.method() != right {
        return Err(RequestError(StatusCode::METHOD_NOT_ALLOWED, format!("only {right} is served here")));
    }
    if reads {
        return Ok(if path == "/services" { services(conductor) } else { global_view(conductor) });
    }
    let most = if packed { PACKED_BYTES } else { BODY_BYTES };
    let body = match Limited::new(request.into_body(), most).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => {
            return Err(RequestError(StatusCode::PAYLOAD_TOO_LARGE, format!("a body is at most {most} bytes")));
        }
        Err(_) => return Err(wrong("the body is incomplete")),
    };
    let body: Value = if packed {
        let read = msgpack::Value::read(&body).as_ref().and_then(unpacked);
        read.ok_or_else(|| wrong("the body is not MessagePack of strings, numbers, arrays and maps"))?
    } else {
        serde_json::from_slice(&body).map_err(|error| wrong(format!("the body is not JSON: {error}")))?
    };
    let fields = Fields(body.as_object().ok_or_else(|| wrong("the body must be an object"))?);
    match path {
        "/register" => register(conductor, &fields),
        "/unregister" => unregister(conductor, &fields),
        "/query" => {
            let context = fields.context()?;
            let tokens = fields.tokens()?;
            let seed = conductor.host.seed(&pool_of(&context));
            let salt = fields.text("cache_salt")?.unwrap_or_default();
            let lora = fields.text("lora_name")?.unwrap_or_default();
            // SHA-256 of all tokens costs more than the lookup.
            let needs_hashes =
                conductor.host.look(|conductor, _| QueryPrompt::needs_engine_hashes(conductor, &pool_of(&context)));
            let hashes = if needs_hashes {
                vllm(&tokens, context.block_tokens as usize, &seed, &lora, &salt)
            } else {
                Vec::new()
            };
            let prompt = TokenPrompt::new(&tokens, context.block_tokens as usize, &lora, &salt);
            query(conductor, &fields, &context, QueryPrompt::Tokens(&prompt, &hashes))
        }
        _ => query(conductor, &fields, &fields.context()?, QueryPrompt::Hashes(&fields.hashes()?)),
    }
}

/// Fields of a body.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn text(&self, name: &str) -> Result<Option<String>, RequestError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(wrong(format!("{name} must be a string"))),
        }
    }

    fn required(&self, name: &str) -> Result<String, RequestError> {
        self.text(name)?.filter(|text| !text.is_empty()).ok_or_else(|| wrong(format!("{name} is missing")))
    }

    fn number(&self, name: &str, most: u64) -> Result<Option<u64>, RequestError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_u64().filter(|number| *number <= most);
        number.map(Some).ok_or_else(|| wrong(format!("{name} must be a number from 0 to {most}")))
    }

    /// Returns the tenant; the default tenant has the empty name.
    fn tenant(&self) -> Result<String, RequestError> {
        Ok(self.text("tenant_id")?.filter(|tenant| tenant != "default").unwrap_or_default())
    }

    fn block_tokens(&self) -> Result<u32, RequestError> {
        let size = self.number("block_size", 1 << 20)?.filter(|size| *size > 0);
        size.map(|size| size as u32).ok_or_else(|| wrong("block_size is missing, or 0"))
    }

    fn context(&self) -> Result<PromptContext, RequestError> {
        let model = match self.text("model")? {
            Some(model) => model,
            None => self.required("model_name")?,
        };
        // A hash depends on adapter and salt already.
        let (lora, salt) = (String::new(), String::new());
        Ok(PromptContext { tenant: self.tenant()?, model, lora, block_tokens: self.block_tokens()?, salt })
    }

    fn tokens(&self) -> Result<Vec<u32>, RequestError> {
        let tokens = self.get("token_ids").and_then(Value::as_array);
        let tokens = tokens.ok_or_else(|| wrong("token_ids must be an array of numbers"))?;
        if tokens.len() > MAX_TOKENS {
            return Err(wrong(format!("{} tokens; at most {MAX_TOKENS}", tokens.len())));
        }
        let read = tokens.iter().map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok()));
        read.collect::<Option<_>>().ok_or_else(|| wrong("token_ids must be numbers below 2^32"))
    }

    /// Returns hashes as numbers, signed or not.
    fn hashes(&self) -> Result<Vec<u64>, RequestError> {
        let hashes = self.get("seq_hashes").or_else(|| self.get("block_hashes")).or_else(|| self.get("block_hash"));
        let hashes = hashes.and_then(Value::as_array).ok_or_else(|| wrong("seq_hashes must be an array of numbers"))?;
        let read = hashes.iter().map(|hash| hash.as_u64().or_else(|| hash.as_i64().map(|hash| hash as u64)));
        read.collect::<Option<_>>().ok_or_else(|| wrong("seq_hashes must be whole numbers of 64 bits"))
    }

    /// Returns the hash seed of a profile, a text or a number; none if the engine draws one at random.
    fn seed(&self) -> Result<Option<String>, RequestError> {
        let seed = match self.get("python_hash_seed") {
            Some(Value::Number(number)) => Some(number.to_string()),
            _ => self.text("python_hash_seed")?,
        };
        match seed {
            Some(seed) if seed.len() > SEED_BYTES => {
                Err(wrong(format!("python_hash_seed has at most {SEED_BYTES} bytes")))
            }
            seed => Ok(seed),
        }
    }

    /// Returns the name of an instance, with its rank.
    fn instance(&self) -> Result<String, RequestError> {
        let rank = self.number("dp_rank", RANKS)?.unwrap_or(0);
        Ok(format!("{}@{rank}", self.required("instance_id")?))
    }
}

fn pool_of(context: &PromptContext) -> PoolKey {
    let PromptContext { tenant, model, block_tokens, .. } = context.clone();
    PoolKey { tenant, model, block_tokens }
}

/// Registers a master of Mooncake, whose store counts for every instance.
fn register_master(conductor: &ConductorService, fields: &Fields<'_>) -> Result<Value, RequestError> {
    let spec = MasterSpec {
        name: fields.instance()?,
        tenant: fields.tenant()?,
        model: fields.text("modelname")?.unwrap_or_default(),
        block_tokens: fields.number("block_size", 1 << 20)?.unwrap_or(0) as u32,
        publisher: fields.required("endpoint")?,
    };
    if [&spec.name, &spec.tenant, &spec.model].iter().any(|text| text.len() > NAME_BYTES) {
        return Err(wrong(format!("names have at most {NAME_BYTES} bytes")));
    }
    let instance = spec.name.clone();
    let fresh = conductor.feeds.register_master(spec)?;
    Ok(json!({ "status": "registered successfully", "instance_id": instance, "fresh": fresh }))
}

fn register(conductor: &ConductorService, fields: &Fields<'_>) -> Result<Value, RequestError> {
    let engine = fields.required("type")?.to_ascii_lowercase();
    let is_vllm = match engine.as_str() {
        "vllm" => true,
        "sglang" | "tensorrt-llm" | "tensorrt_llm" | "trtllm" => false,
        "mooncake" => return register_master(conductor, fields),
        other => {
            let what = format!(
                "events of type {other:?} are not followed; those of vLLM, SGLang, TensorRT-LLM and Mooncake are"
            );
            return Err(RequestError(StatusCode::NOT_IMPLEMENTED, what));
        }
    };
    let instance = fields.instance()?;
    let (tenant, model) = (fields.tenant()?, fields.required("modelname")?);
    let block_tokens = fields.block_tokens()?;
    let (seed, by_tokens) = match fields.get("hash_profile") {
        None => (None, is_vllm),
        Some(profile) => {
            let profile = Fields(profile.as_object().ok_or_else(|| wrong("hash_profile must be an object"))?);
            let by_tokens = match profile.text("algorithm")?.as_deref() {
                None | Some("sha256_cbor") => is_vllm,
                // Only Python's serialization, or another hash, gives these: blocks are found by the tokens in events.
                Some(other) if FOREIGN_HASHES.contains(&other) => false,
                Some(other) => {
                    let known = FOREIGN_HASHES.join(", ");
                    return Err(wrong(format!("the hash algorithm {other:?} is not vLLM's: sha256_cbor, {known}")));
                }
            };
            (profile.seed()?, by_tokens)
        }
    };
    let source = EventSource {
        publisher: fields.required("endpoint")?,
        replay: fields.text("replay_endpoint")?.unwrap_or_default(),
        topic: String::new(),
    };
    let call = RegisterInstance {
        incarnation: 0,
        tenant,
        capacity_tokens: u64::from(u32::MAX),
        address: source.publisher.clone(),
        events: Some(source),
        ..RegisterInstance::new(instance.clone(), model, block_tokens, InstancePart::Mixed)
    };
    let registered = conductor.register_as(call, by_tokens, seed)?;
    Ok(json!({ "status": "registered successfully", "instance_id": instance, "fresh": registered.fresh }))
}

fn unregister(conductor: &ConductorService, fields: &Fields<'_>) -> Result<Value, RequestError> {
    let (tenant, instance) = (fields.tenant()?, fields.instance()?);
    let known = conductor.table().instances.iter().any(|row| *row.instance == *instance && row.tenant == tenant);
    if !known && conductor.feeds.unregister_master(&instance, &tenant)? {
        return Ok(json!({ "status": "unregistered successfully", "instance_id": instance }));
    }
    if !known {
        return Err(RequestError(StatusCode::NOT_FOUND, format!("there is no instance {instance:?} of that tenant")));
    }
    conductor.deregister(&DeregisterInstance { tenant, instance: instance.clone(), incarnation: 0 })?;
    Ok(json!({ "status": "unregistered successfully", "instance_id": instance }))
}

fn query(
    conductor: &ConductorService,
    fields: &Fields<'_>,
    context: &PromptContext,
    prompt: QueryPrompt<'_>,
) -> Result<Value, RequestError> {
    let only = fields.text("instance_id")?;
    let tenant = external(&context.tenant).to_owned();
    let pool = pool_of(context);
    // Hashes that a caller has are those of its engines.
    let by_tokens = matches!(prompt, QueryPrompt::Tokens(..));
    let has_unfindable = by_tokens && conductor.host.look(|conductor, _| conductor.has_unfindable_blocks(&pool));
    let incomplete = conductor.is_incomplete(&pool);
    let holders = match conductor.query_with_store(context, prompt, HOLDERS) {
        Ok(holders) => holders,
        Err(refusal) if refusal.known_code() == Some(RefusalCode::NotFound) => Vec::new(),
        Err(refusal) => return Err(refusal.into()),
    };
    let mut by_name: BTreeMap<&str, Vec<(&str, &PrefixHolder)>> = BTreeMap::new();
    for holder in &holders {
        let (name, rank) = holder.instance.rsplit_once('@').unwrap_or((&holder.instance, "0"));
        if only.as_ref().is_none_or(|only| only == name) {
            by_name.entry(name).or_default().push((rank, holder));
        }
    }
    let (mut instances, mut named) = (Map::new(), Map::new());
    for (name, ranks) in by_name {
        let most = |of: fn(&PrefixHolder) -> u32| ranks.iter().map(|(_, held)| of(held)).max().unwrap_or(0);
        let (gpu, cpu, disk) =
            (most(|held| held.gpu_tokens), most(|held| held.dram_tokens), most(|held| held.ssd_tokens));
        let dp: Map<String, Value> =
            ranks.iter().map(|(rank, held)| ((*rank).to_owned(), held.gpu_tokens.into())).collect();
        let each = ranks.iter().map(|(rank, held)| {
            let held = json!({ "gpu": held.gpu_tokens, "cpu": held.dram_tokens, "disk": held.ssd_tokens });
            ((*rank).to_owned(), held)
        });
        let each: Map<String, Value> = each.collect();
        let further = |tokens: u32, nearer: u32| if tokens > nearer { tokens } else { 0 };
        named.insert(
            name.to_owned(),
            json!({
                "longest_matched": disk, "GPU": gpu, "DP": dp, "CPU": further(cpu, gpu), "DISK": further(disk, cpu),
            }),
        );
        let shown = json!({
            "longest_matched": disk, "gpu": gpu, "dp": dp, "cpu": cpu, "disk": disk, "rank_matches": each,
        });
        instances.insert(name.to_owned(), shown);
    }
    let mut answer = Map::new();
    answer.insert(tenant, Value::Object(named));
    answer.insert("instances".to_owned(), Value::Object(instances));
    if has_unfindable {
        answer.insert("unfindable_blocks".to_owned(), true.into());
        // The name that it had here before; in `/global_view` that means something else.
        answer.insert("hash_mismatch".to_owned(), true.into());
    }
    if incomplete {
        answer.insert("degraded".to_owned(), true.into());
    }
    Ok(Value::Object(answer))
}

fn external(tenant: &str) -> &str {
    if tenant.is_empty() { "default" } else { tenant }
}

fn global_view(conductor: &ConductorService) -> Value {
    let contexts = conductor.rows().pools.into_iter().map(|row| {
        let progress = pool_progress_as_json(&row);
        let model = row.status;
        let pool =
            PoolKey { tenant: model.tenant.clone(), model: model.model.clone(), block_tokens: model.block_tokens };
        json!({
            "tenant_id": external(&model.tenant),
            "model_name": model.model,
            "block_size": model.block_tokens,
            "prefix_count": model.blocks,
            "instances": model.instances,
            "waiting": model.waiting,
            "hash_mismatch": model.mismatch,
            "unfindable_blocks": conductor.host.look(|conductor, _| conductor.has_unfindable_blocks(&pool)),
            "degraded": conductor.is_incomplete(&pool),
            "progress": progress,
        })
    });
    json!({ "contexts": contexts.collect::<Vec<_>>() })
}

fn services(conductor: &ConductorService) -> Value {
    let services = conductor.rows().instances.into_iter().map(|row| {
        let progress = row.progress.map(progress_as_json);
        let row = row.status;
        let mut service = service(&row.instance, &row.tenant, &row.model, row.block_tokens);
        service["endpoint"] = json!(row.address);
        service["degraded"] = json!(row.degraded);
        service["suspect"] = json!(row.suspect);
        service["progress"] = json!(progress);
        service
    });
    let masters = conductor.feeds.masters().into_iter().map(|(spec, degraded)| {
        let mut service = service(&spec.name, &spec.tenant, &spec.model, spec.block_tokens);
        service["type"] = json!("Mooncake");
        service["endpoint"] = json!(spec.publisher);
        service["degraded"] = json!(degraded);
        service
    });
    json!({ "services": services.chain(masters).collect::<Vec<_>>() })
}

/// Returns what an instance and a master have in common, for a name such as `engine@1` of rank 1.
fn service(name: &str, tenant: &str, model: &str, block_tokens: u32) -> Value {
    let (name, rank) = name.rsplit_once('@').unwrap_or((name, "0"));
    json!({
        "instance_id": name,
        "dp_rank": rank.parse::<u64>().unwrap_or(0),
        "tenant_id": external(tenant),
        "modelname": model,
        "block_size": block_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_survives_messagepack() {
        let value = json!({ "a": [true, false, null, -2, 0.5, "x", u64::MAX, i64::MIN], "b": {}, "c": [] });
        let mut out = msgpack::Writer::default();
        pack(&value, &mut out);
        let bytes = out.finish();
        assert_eq!(msgpack::Value::read(&bytes).as_ref().and_then(unpacked), Some(value));
    }
}
