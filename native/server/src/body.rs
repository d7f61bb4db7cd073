//! Bodies of answers, and the requests that are in progress until their answers end.
//!
//! An answer counts as unread until it is sent ([`Connections::add_unsent`]). It is sent in parts, and each of them belongs to hyper until it
//! is written: so the last part that hyper drops ends the answer, whatever the client's HTTP/2 windows permit.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::{HeaderMap, Version};
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
    pub(crate) fn new(connections: Arc<Connections>, connection: Arc<Connection>, version: Version) -> Self {
        connections.has_head(&connection, version == Version::HTTP_2, Instant::now());
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
    Forwarded(Incoming),
    /// A message of gRPC, and the status after it.
    Message {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// Messages of gRPC as they come, and the status after them.
    Messages {
        messages: mpsc::Receiver<Bytes>,
        trailers: Option<HeaderMap>,
    },
}

impl Body {
    pub(crate) fn full(bytes: Bytes) -> Self {
        Self::Full(Full::new(bytes))
    }

    /// Bytes that it has, or will have. Frames of a body of unknown length count when they arrive.
    fn length(&self) -> usize {
        match self {
            Self::Full(_) | Self::Forwarded(_) => self.size_hint().lower() as usize,
            Self::Message { data, .. } => data.as_ref().map_or(0, Bytes::len),
            Self::Messages { .. } => 0,
        }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Full(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
            Self::Forwarded(body) => Pin::new(body).poll_frame(cx),
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
            Self::Forwarded(body) => body.is_end_stream(),
            Self::Message { trailers, .. } | Self::Messages { trailers, .. } => trailers.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(body) => body.size_hint(),
            Self::Forwarded(body) => body.size_hint(),
            Self::Message { .. } | Self::Messages { .. } => SizeHint::default(),
        }
    }
}

/// Maximum number of bytes of a part: those of one HTTP/2 frame.
const PART: usize = 1 << 14;

/// Bytes of an answer that count as unread until it is dropped.
struct Unsent {
    connection: Arc<Connection>,
    number: u64,
}

impl Unsent {
    fn new(progress: &InProgress, size: usize) -> Arc<Self> {
        let connection = progress.connection.clone();
        let number = progress.connections.add_unsent(&connection, size, Instant::now());
        Arc::new(Self { connection, number })
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.connection.remove_unsent(self.number);
    }
}

/// A part of an answer, which hyper drops when it is written.
struct Part {
    bytes: Bytes,
    unsent: Arc<Unsent>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.unsent.connection.has_progressed(self.unsent.number);
    }
}

/// The body of an answer that is being sent.
pub(crate) struct Sending {
    body: Body,
    /// The rest of the frame that is being sent.
    rest: Bytes,
    /// The answer; if its length is unknown, the frame that is being sent.
    unsent: Option<Arc<Unsent>>,
    has_length: bool,
    /// The request, in progress until the end of the body or until the client leaves.
    progress: InProgress,
}

impl Sending {
    pub(crate) fn new(body: Body, progress: InProgress) -> Self {
        let length = body.length();
        Self {
            body,
            rest: Bytes::new(),
            unsent: (length > 0).then(|| Unsent::new(&progress, length)),
            has_length: length > 0,
            progress,
        }
    }
}

impl hyper::body::Body for Sending {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        if this.rest.is_empty() {
            let frame = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => frame,
                other => return Poll::Ready(other),
            };
            this.rest = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            if !this.has_length {
                this.unsent = (!this.rest.is_empty()).then(|| Unsent::new(&this.progress, this.rest.len()));
            }
        }
        let bytes = this.rest.split_to(this.rest.len().min(PART));
        let data = match &this.unsent {
            Some(unsent) => Bytes::from_owner(Part {
                bytes,
                unsent: unsent.clone(),
            }),
            None => bytes,
        };
        if this.rest.is_empty() && !this.has_length {
            this.unsent = None; // the last part has it
        }
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() {
            return self.body.size_hint();
        }
        SizeHint::default()
    }
}
