//! Messages of `src/kvevents/service/proto/kvevents/v1/query.proto`, and of the standard `grpc.health.v1`.
//!
//! Each has the fields of a body of `/v1`: requests are converted to these bodies for the control plane, and its answers are converted
//! back. So both planes answer calls as they answer HTTP requests.

use std::collections::HashMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A request of `/v1`, with the fields that all of them have.
macro_rules! request {
    ($name:ident { $($(#[$meta:meta])* $visible:vis $field:ident: $kind:ty,)* }) => {
        #[derive(Clone, PartialEq, prost::Message, Serialize)]
        pub(crate) struct $name {
            #[prost(string, tag = "1")]
            #[serde(skip_serializing_if = "String::is_empty")]
            model: String,
            #[prost(string, tag = "2")]
            #[serde(skip_serializing_if = "String::is_empty")]
            tenant: String,
            #[prost(string, tag = "3")]
            #[serde(skip_serializing_if = "String::is_empty")]
            group: String,
            #[prost(string, tag = "4")]
            #[serde(skip_serializing_if = "String::is_empty")]
            lora: String,
            #[prost(int64, optional, tag = "5")]
            #[serde(skip_serializing_if = "Option::is_none")]
            lora_id: Option<i64>,
            #[prost(string, tag = "6")]
            #[serde(skip_serializing_if = "String::is_empty")]
            salt: String,
            #[prost(message, repeated, tag = "7")]
            mm: Vec<Media>,
            #[prost(bool, tag = "8")]
            expected: bool,
            #[prost(bool, tag = "9")]
            whole_prompt: bool,
            $($(#[$meta])* $visible $field: $kind,)*
        }
    };
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub(crate) struct Media {
    #[prost(oneof = "MediaId", tags = "1, 2")]
    id: Option<MediaId>,
    #[prost(uint32, tag = "3")]
    start: u32,
    #[prost(uint32, tag = "4")]
    length: u32,
}

#[derive(Clone, PartialEq, prost::Oneof, Serialize)]
#[serde(untagged)]
pub(crate) enum MediaId {
    #[prost(string, tag = "1")]
    Name(String),
    #[prost(uint64, tag = "2")]
    Number(u64),
}

request!(MatchRequest {
    #[prost(uint32, repeated, tag = "10")]
    pub(crate) tokens: Vec<u32>,
});

request!(MatchManyRequest {
    #[prost(message, repeated, tag = "10")]
    pub(crate) prompts: Vec<Prompt>,
});

request!(SelectRequest {
    #[prost(uint32, repeated, tag = "10")]
    pub(crate) tokens: Vec<u32>,
    #[prost(message, repeated, tag = "11")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    candidates: Vec<Candidate>,
    #[prost(map = "string, double", tag = "12")]
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    tiers: HashMap<String, f64>,
    #[prost(double, optional, tag = "13")]
    #[serde(skip_serializing_if = "Option::is_none")]
    load_weight: Option<f64>,
    #[prost(map = "string, double", tag = "14")]
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    trust: HashMap<String, f64>,
    #[prost(int32, tag = "15")]
    #[serde(serialize_with = "tie")]
    tie: i32,
    #[prost(double, tag = "16")]
    expect_seconds: f64,
    #[prost(bool, tag = "17")]
    explain: bool,
    #[prost(double, optional, tag = "18")]
    #[serde(skip_serializing_if = "Option::is_none")]
    wait_weight: Option<f64>,
    #[prost(bool, tag = "19")]
    ignores_cache: bool,
});

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(transparent)]
pub(crate) struct Prompt {
    #[prost(uint32, repeated, tag = "1")]
    pub(crate) tokens: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub(crate) struct Candidate {
    #[prost(string, tag = "1")]
    instance: String,
    #[prost(uint32, tag = "2")]
    rank: u32,
    #[prost(double, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<f64>,
}

fn tie<S: Serializer>(tie: &i32, to: S) -> Result<S::Ok, S::Error> {
    match tie {
        0 | 1 => to.serialize_str("rotate"),
        2 => to.serialize_str("random"),
        3 => to.serialize_str("first"),
        other => to.serialize_i32(*other), // which is refused
    }
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct Trust {
    #[prost(int32, tag = "1")]
    #[serde(deserialize_with = "state")]
    state: i32,
    #[prost(string, tag = "2")]
    reason: String,
    #[prost(string, repeated, tag = "3")]
    reason_codes: Vec<String>,
    #[prost(bool, tag = "4")]
    attested: bool,
}

const STATES: [&str; 6] = ["", "CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE"];

fn state<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    let name = String::deserialize(from)?;
    Ok(STATES.iter().position(|known| *known == name).unwrap_or(0) as i32)
}

/// A list, or null for an empty one.
fn listed<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct WorkerTrust {
    #[prost(string, tag = "1")]
    instance: String,
    #[prost(uint32, tag = "2")]
    rank: u32,
    #[prost(message, optional, tag = "3")]
    trust: Option<Trust>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct Held {
    #[prost(string, tag = "1")]
    instance: String,
    #[prost(uint32, tag = "2")]
    rank: u32,
    #[prost(uint32, tag = "3")]
    tokens: u32,
    #[prost(map = "string, uint32", tag = "4")]
    tiers: HashMap<String, u32>,
    #[prost(message, optional, tag = "5")]
    trust: Option<Trust>,
    #[prost(uint32, tag = "6")]
    certain: u32,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct MatchResponse {
    #[prost(uint64, tag = "1")]
    prompt_tokens: u64,
    #[prost(message, repeated, tag = "2")]
    workers: Vec<Held>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct PromptMatch {
    #[prost(uint64, tag = "1")]
    prompt_tokens: u64,
    #[prost(message, repeated, tag = "2")]
    holders: Vec<Held>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct MatchManyResponse {
    #[prost(message, repeated, tag = "1")]
    matches: Vec<PromptMatch>,
    #[prost(message, repeated, tag = "2")]
    workers: Vec<WorkerTrust>,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct Considered {
    #[prost(string, tag = "1")]
    instance: String,
    #[prost(uint32, tag = "2")]
    rank: u32,
    #[prost(double, tag = "3")]
    score: f64,
    #[prost(double, tag = "4")]
    uncached: f64,
    #[prost(double, tag = "5")]
    load: f64,
    #[prost(uint32, tag = "6")]
    tokens: u32,
    #[prost(map = "string, uint32", tag = "7")]
    tiers: HashMap<String, u32>,
    #[prost(message, optional, tag = "8")]
    trust: Option<Trust>,
    #[prost(string, repeated, tag = "9")]
    inexact_tiers: Vec<String>,
    #[prost(double, optional, tag = "10")]
    requests: Option<f64>,
    #[prost(bool, tag = "11")]
    hot: bool,
}

#[derive(Clone, PartialEq, prost::Message, Deserialize)]
pub(crate) struct SelectResponse {
    #[prost(string, tag = "1")]
    instance: String,
    #[prost(uint32, tag = "2")]
    rank: u32,
    #[prost(double, tag = "3")]
    score: f64,
    #[prost(message, optional, tag = "4")]
    trust: Option<Trust>,
    #[prost(string, tag = "5")]
    why: String,
    #[prost(message, repeated, tag = "6")]
    #[serde(deserialize_with = "listed")]
    considered: Vec<Considered>,
    #[prost(message, repeated, tag = "7")]
    #[serde(deserialize_with = "listed")]
    unreachable: Vec<WorkerTrust>,
    #[prost(string, tag = "8")]
    load_from: String,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthCheckRequest {
    /// Name of a service; empty for the whole server.
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthCheckResponse {
    /// 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN.
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}
