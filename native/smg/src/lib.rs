//! Subscribes to the KV cache events of workers of SMG (Shepherd Model Gateway) over gRPC.
//!
//! Theory of operation. A worker of SMG has a servicer in front of its engine, which relays the engine's events as the gRPC stream
//! `SubscribeKvEvents` (`smg-grpc-proto` 0.4.28, `common.proto`). The stream has no identity of the engine, and two servicers fill
//! it differently: that in Rust begins with the whole history or with a snapshot, that in Python with what comes next. So each call
//! begins with the first batch and numbers its batches by itself: without a hole while nothing is missing, and with one for each
//! loss. Such a stream is that of a ZeroMQ publisher, and `kvevents.stream` decides what it is worth. Each call is another incarnation.
#![deny(missing_docs)]

mod messages;
mod numbers;
mod payload;
mod subscription;

pub use subscription::{Arrival, Subscription};
