//! Bodies of answers, and the requests that are in progress until their answers end.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::HeaderMap;
use hyper::body::{Frame, Incoming, SizeHint};
use tokio::sync::mpsc;

use crate::connections::{Connection, Connections};

/// A request that is in progress until its answer is complete or abandoned.
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

    /// Records that the body was received.
    pub(crate) fn is_answering(&self) {
        self.connections.is_answering(&self.connection, Instant::now());
    }

    /// Records how many bytes of the body are held. Returns false above the limit.
    pub(crate) fn hold(&self, size: usize) -> bool {
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
    /// The body of the control plane, as it arrives.
    Forwarded {
        body: Incoming,
        /// The request, in progress until the end of the body or until the client leaves.
        _progress: InProgress,
    },
    /// A message of gRPC, and the status after it.
    Message {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// Messages of gRPC as they come, and the status after them.
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
