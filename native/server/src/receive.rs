//! Receives the bodies of requests, within limits of time and memory.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};

use crate::body::InProgress;
use crate::problems::Problem;
use crate::settings::Limits;

/// Why a body was not received.
pub(crate) enum BodyFailure {
    /// The body exceeds the size limit.
    TooLarge,
    Refused(Problem),
    /// The client has left.
    ClientGone,
}

/// Receives a whole body, within the time limit of its request and the memory limit of all requests.
pub(crate) async fn receive(progress: &InProgress, mut body: Incoming, limits: &Limits) -> Result<Bytes, BodyFailure> {
    let mut first = Bytes::new();
    let mut all: Option<BytesMut> = None;
    let deadline = progress
        .connection
        .deadline()
        .unwrap_or_else(|| Instant::now() + limits.request());
    loop {
        let frame = match tokio::time::timeout_at(deadline.into(), body.frame()).await {
            Err(_) => return Err(BodyFailure::Refused(Problem::too_slow(limits.request_seconds))),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(failure(&error)),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        let size = all.as_ref().map_or(first.len(), BytesMut::len) + data.len();
        if size > limits.max_body_bytes {
            return Err(BodyFailure::TooLarge);
        }
        if !progress.hold(size) {
            return Err(BodyFailure::Refused(Problem::too_much_at_once(limits.max_received_bytes)));
        }
        match &mut all {
            None if first.is_empty() => first = data,
            None => {
                // A client can announce any length, so at most 1 MiB is reserved before bytes arrive.
                let expected = usize::try_from(body.size_hint().lower()).unwrap_or(0).min(1 << 20);
                let mut joined = BytesMut::with_capacity(size + expected);
                joined.extend_from_slice(&first);
                joined.extend_from_slice(&data);
                all = Some(joined);
            }
            Some(joined) => joined.extend_from_slice(&data),
        }
    }
    progress.note_body_received();
    Ok(all.map_or(first, BytesMut::freeze))
}

/// Returns why a body could not be read further. RFC 9112 (7.1 and 8) asks for an answer to a body that is malformed, or ends early.
fn failure(error: &hyper::Error) -> BodyFailure {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause {
        Some(cause)
            if matches!(
                cause.kind(),
                ErrorKind::InvalidInput | ErrorKind::InvalidData | ErrorKind::UnexpectedEof
            ) =>
        {
            BodyFailure::Refused(Problem::malformed(format!("the body cannot be read: {cause}")))
        }
        _ => BodyFailure::ClientGone,
    }
}
