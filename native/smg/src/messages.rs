//! The messages of `SubscribeKvEvents`, with the fields that this crate uses. The numbers of the fields are those of `smg-grpc-proto`
//! 0.4.28.

#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    #[prost(uint64, tag = "1")]
    pub start_sequence_number: u64,
    /// Whether the worker also sends records of its load before the first batch. Without them, an idle worker sends nothing, and the
    /// subscriber cannot see that it has accepted the call.
    #[prost(bool, tag = "2")]
    pub load_records_before_first_batch: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Batch {
    #[prost(uint64, tag = "1")]
    pub sequence_number: u64,
    #[prost(double, tag = "2")]
    pub timestamp: f64,
    #[prost(message, repeated, tag = "3")]
    pub events: Vec<Event>,
    #[prost(int32, optional, tag = "4")]
    pub dp_rank: Option<i32>,
    #[prost(message, optional, tag = "7")]
    pub snapshot: Option<Snapshot>,
    #[prost(message, optional, tag = "8")]
    pub load: Option<Load>,
}

/// A part of the state that a servicer knows.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Snapshot {
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Number of parts; 0 if the servicer does not state it.
    #[prost(uint32, tag = "2")]
    pub count: u32,
    /// Number of batches that the engine sent before the servicer began to record them, and that the servicer does not have.
    #[prost(uint64, tag = "4")]
    pub unknown_before: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Load {
    /// Whether the batch has no events and repeats the sequence number of another batch.
    #[prost(bool, tag = "9")]
    pub load_only: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Event {
    #[prost(oneof = "Data", tags = "2, 3, 4")]
    pub data: Option<Data>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Data {
    #[prost(message, tag = "2")]
    Stored(Stored),
    #[prost(message, tag = "3")]
    Removed(Removed),
    #[prost(message, tag = "4")]
    Cleared(Cleared),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Stored {
    #[prost(message, repeated, tag = "1")]
    pub blocks: Vec<Block>,
    #[prost(int64, optional, tag = "2")]
    pub parent_block_hash: Option<i64>,
    #[prost(int32, optional, tag = "3")]
    pub tier: Option<i32>,
    #[prost(string, optional, tag = "4")]
    pub medium: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    pub group_idx: Option<u32>,
    #[prost(string, optional, tag = "6")]
    pub kv_cache_spec_kind: Option<String>,
    #[prost(uint32, optional, tag = "7")]
    pub kv_cache_spec_sliding_window: Option<u32>,
    #[prost(int32, optional, tag = "8")]
    pub locality: Option<i32>,
    #[prost(string, optional, tag = "9")]
    pub ownership: Option<String>,
    #[prost(string, optional, tag = "11")]
    pub lora_name: Option<String>,
    #[prost(string, optional, tag = "12")]
    pub cache_salt: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Block {
    #[prost(int64, tag = "1")]
    pub block_hash: i64,
    #[prost(uint32, repeated, tag = "2")]
    pub token_ids: Vec<u32>,
    #[prost(int32, tag = "3")]
    pub block_size: i32,
    #[prost(int64, optional, tag = "4")]
    pub lora_id: Option<i64>,
    /// The number of the tier, minus one; only servicers that do not name tiers send this field.
    #[prost(int32, optional, tag = "5")]
    pub cache_level: Option<i32>,
    #[prost(message, repeated, tag = "6")]
    pub extra_keys: Vec<ExtraKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ExtraKey {
    #[prost(oneof = "Key", tags = "1, 2, 3, 4")]
    pub key: Option<Key>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Key {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bytes = "vec", tag = "2")]
    Blob(Vec<u8>),
    #[prost(int64, tag = "3")]
    Number(i64),
    #[prost(message, tag = "4")]
    Multimodal(Multimodal),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Multimodal {
    #[prost(string, tag = "1")]
    pub identifier: String,
    #[prost(int64, tag = "2")]
    pub offset: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Removed {
    #[prost(int64, repeated, tag = "1")]
    pub block_hashes: Vec<i64>,
    #[prost(int32, optional, tag = "2")]
    pub cache_level: Option<i32>,
    #[prost(int32, optional, tag = "3")]
    pub tier: Option<i32>,
    #[prost(string, optional, tag = "4")]
    pub medium: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    pub group_idx: Option<u32>,
    #[prost(int32, optional, tag = "6")]
    pub locality: Option<i32>,
    #[prost(string, optional, tag = "7")]
    pub ownership: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Cleared {}
