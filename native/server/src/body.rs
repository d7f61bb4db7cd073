//! Bodies of answers, and the bodies of requests as they are received.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::HeaderMap;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use tokio::sync::mpsc;

use crate::connections::{Connection, Connections};
use crate::problems::Problem;

/// A request that counts as being in progress until its answer is complete, or given up.
pub(crate) struct InProgress {
    connections: Arc<Connections>,
    pub(crate) connection: Arc<Connection>,
    /// Bytes of its body that are held.
    held: AtomicUsize,
}

impl InProgress {
    pub(crate) fn new(connections: Arc<Connections>, connection: Arc<Connection>) -> Self {
        connections.has_head(&connection, Instant::now());
        Self {
            connections,
            connection,
            held: AtomicUsize::new(0),
        }
    }

    /// Notes how many bytes of the body are held. Returns false if that is too much.
    fn hold(&self, size: usize) -> bool {
        let is_held = self
            .connections
            .hold(&self.connection, self.held.load(Ordering::Relaxed), size);
        if is_held {
            self.held.store(size, Ordering::Relaxed);
        }
        is_held
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.hold(0);
        self.connections.has_answered(&self.connection, Instant::now());
    }
}

/// The body of an answer.
pub(crate) enum Body {
    /// All of it.
    Full(Full<Bytes>),
    /// As the control plane sends it.
    Forwarded {
        body: Incoming,
        /// Until the end of the body, or until the client gives it up.
        _progress: InProgress,
    },
    /// A message of gRPC, and the status behind it.
    Message {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// Messages of gRPC as they come, and the status behind them.
    Messages {
        messages: mpsc::Receiver<Bytes>,
        trailers: Option<HeaderMap>,
        _progress: InProgress,
    },
}

impl Body {
    pub(crate) fn full(bytes: Bytes) -> Self {
        Self::Full(Full::new(bytes))
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Full(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
            Self::Forwarded { body, .. } => Pin::new(body).poll_frame(cx),
            Self::Message { data, trailers } => {
                let data = data.take().map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            Self::Messages { messages, trailers, .. } => {
                let data = ready!(messages.poll_recv(cx)).map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(body) => body.is_end_stream(),
            Self::Forwarded { body, .. } => body.is_end_stream(),
            Self::Message { trailers, .. } | Self::Messages { trailers, .. } => trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(body) => body.size_hint(),
            Self::Forwarded { body, .. } => body.size_hint(),
            Self::Message { .. } | Self::Messages { .. } => SizeHint::default(),
        }
    }
}

/// Why a body was not received.
pub(crate) enum Unreceived {
    /// It has more bytes than a body may have.
    TooLarge,
    Refused(Problem),
    /// The client has left.
    Gone,
}

/// Receives a whole body, within the time that its request has and the memory that all requests have together.
pub(crate) async fn receive(
    progress: &InProgress,
    mut body: Incoming,
    limits: &crate::settings::Limits,
) -> Result<Bytes, Unreceived> {
    let mut first = Bytes::new();
    let mut all: Option<BytesMut> = None;
    let deadline = progress
        .connection
        .deadline()
        .unwrap_or_else(|| Instant::now() + limits.request());
    loop {
        let frame = match tokio::time::timeout_at(deadline.into(), body.frame()).await {
            Err(_) => return Err(Unreceived::Refused(Problem::too_slow(limits.request_seconds))),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(Unreceived::Gone),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        let size = all.as_ref().map_or(first.len(), BytesMut::len) + data.len();
        if size > limits.max_body_bytes {
            return Err(Unreceived::TooLarge);
        }
        if !progress.hold(size) {
            return Err(Unreceived::Refused(Problem::too_much_at_once(limits.max_received_bytes)));
        }
        match &mut all {
            None if first.is_empty() => first = data,
            None => {
                // An announced length is only a claim.
                let expected = usize::try_from(body.size_hint().lower()).unwrap_or(0).min(1 << 20);
                let mut joined = BytesMut::with_capacity(size + expected);
                joined.extend_from_slice(&first);
                joined.extend_from_slice(&data);
                all = Some(joined);
            }
            Some(joined) => joined.extend_from_slice(&data),
        }
    }
    progress.connections.is_answering(&progress.connection, Instant::now());
    Ok(all.map_or(first, BytesMut::freeze))
}
