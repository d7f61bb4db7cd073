//! Subscribes to the KV cache events of workers of SMG (Shepherd Model Gateway) over gRPC.
//!
//! Theory of operation. A worker of SMG has a servicer in front of its engine, which relays the engine's events as the gRPC stream
//! `SubscribeKvEvents` (`smg-grpc-proto` 0.4.28, `common.proto`). The stream does not identify the engine's process. The two servicers
//! begin the stream differently: the servicer in Rust begins with the whole history or with a snapshot, the servicer in Python with the
//! next batch. So each call requests all batches, beginning with the first. It numbers the arriving batches from 0: consecutively if
//! nothing is missing, and with one number skipped for each loss. The numbered stream is like the stream of a ZeroMQ publisher, and
//! `kvevents.stream` decides how far it is trusted. Each call is another incarnation.
#![deny(missing_docs)]

mod messages;
mod numbers;
mod payload;
mod subscription;

pub use subscription::{Arrival, Subscription};
