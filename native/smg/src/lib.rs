//! Subscribes to the KV cache events of workers of SMG (Shepherd Model Gateway) over gRPC.
//!
//! Theory of operation. A worker of SMG has a servicer in front of its engine. The servicer forwards the engine's events as the gRPC stream
//! `SubscribeKvEvents` (`smg-grpc-proto` 0.4.28, `common.proto`). The stream does not identify the process of the engine. There are two
//! servicers. The stream of the Rust servicer begins with the whole history or with a snapshot. The stream of the Python servicer begins
//! with the next batch. So each call requests all batches from the first one on. It numbers the arriving batches from 0: consecutively, but
//! with one number skipped for each loss. The numbered stream is like that of a ZeroMQ publisher, so `kvevents.stream` determines its
//! trust. Each call is another incarnation.
#![deny(missing_docs)]

mod messages;
mod numbers;
mod payload;
mod subscription;

pub use subscription::{Arrival, Subscription};
