//! Bodies of answers. A request is in progress until its answer ends.
//!
//! An answer counts as unread until it is sent ([`Connections::add_unsent`]). It is sent in parts: hyper owns each part, and drops it after
//! writing it. So an answer is sent when hyper drops its last part, whatever HTTP/2 windows the client grants.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body as _, Frame, SizeHint};
use hyper::{HeaderMap, Version};
use tokio::sync::mpsc;

use crate::connections::{Connection, Connections};

/// A request that is in progress until its answer is complete or given up.
pub(crate) struct InProgress {
    connections: Arc<Connections>,
    pub(crate) connection: Arc<Connection>,
    /// Number of bytes of the request's body that are held in memory.
    held: AtomicUsize,
}

impl InProgress {
    pub(crate) fn new(connections: Arc<Connections>, connection: Arc<Connection>, version: Version) -> Self {
        connections.note_head(&connection, version == Version::HTTP_2, Instant::now());
        Self {
            connections,
            connection,
            held: AtomicUsize::new(0),
        }
    }

    /// Records that the body was received completely.
    pub(crate) fn note_body_received(&self) {
        self.connections.note_request_received(&self.connection, Instant::now());
    }

    /// Records how many bytes of the body are held in memory. Returns false if so many bytes exceed the limit.
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
        self.connections.note_answered(&self.connection, Instant::now());
    }
}

/// The body of an answer.
pub(crate) enum Body {
    /// The whole body.
    Full(Full<Bytes>),
    /// Pieces that the control plane sends, in this order.
    Pieces(PieceStream),
    /// A gRPC message, and the status that follows it.
    Message {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// Several gRPC messages, in this order, and the status that follows the last one.
    Stream(tonic::body::Body),
}

impl Body {
    pub(crate) fn full(bytes: Bytes) -> Self {
        Self::Full(Full::new(bytes))
    }

    pub(crate) fn message(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        match trailers {
            None => Self::full(data),
            trailers => Self::Message {
                data: Some(data),
                trailers,
            },
        }
    }

    /// Length of the body in bytes. Returns 0 if the length is unknown; then each frame counts when it arrives.
    fn length(&self) -> usize {
        match self {
            Self::Full(_) => self.size_hint().lower() as usize,
            Self::Message { data, .. } => data.as_ref().map_or(0, Bytes::len),
            Self::Pieces(_) | Self::Stream(_) => 0,
        }
    }
}

/// The error of an answer that has begun and that the control plane has given up.
#[derive(Debug)]
pub(crate) struct AbortedAnswer;

impl std::fmt::Display for AbortedAnswer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("the answer was given up")
    }
}

impl std::error::Error for AbortedAnswer {}

/// An answer that the control plane sends in pieces.
pub(crate) struct PieceStream {
    receiver: mpsc::Receiver<Bytes>,
    is_complete: Arc<AtomicBool>,
    /// Called when a piece was taken, and when no further piece will be taken.
    on_change: Box<dyn Fn() + Send>,
}

impl PieceStream {
    /// `is_complete` is set before the last sender is dropped, unless the answer was given up.
    pub(crate) fn new(
        receiver: mpsc::Receiver<Bytes>,
        is_complete: Arc<AtomicBool>,
        on_change: impl Fn() + Send + 'static,
    ) -> Self {
        Self {
            receiver,
            is_complete,
            on_change: Box::new(on_change),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, AbortedAnswer>>> {
        let piece = ready!(self.receiver.poll_recv(cx));
        if piece.is_some() {
            (self.on_change)();
        }
        let is_aborted = piece.is_none() && !self.is_complete.load(Ordering::Acquire);
        Poll::Ready(if is_aborted { Some(Err(AbortedAnswer)) } else { piece.map(Ok) })
    }
}

impl Drop for PieceStream {
    fn drop(&mut self) {
        self.receiver.close();
        (self.on_change)();
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = AbortedAnswer;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AbortedAnswer>>> {
        match self.get_mut() {
            Self::Full(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
            Self::Pieces(pieces) => pieces.poll(cx).map_ok(Frame::data),
            Self::Message { data, trailers } => {
                let data = data.take().map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(Frame::trailers)).map(Ok))
            }
            // Errors of the stream are dropped, since its trailers report them.
            Self::Stream(body) => Poll::Ready(ready!(Pin::new(body).poll_frame(cx)).and_then(Result::ok).map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(body) => body.is_end_stream(),
            Self::Pieces(_) => false,
            Self::Message { trailers, .. } => trailers.is_none(),
            Self::Stream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(body) => body.size_hint(),
            Self::Pieces(_) | Self::Message { .. } | Self::Stream(_) => SizeHint::default(),
        }
    }
}

/// Maximum number of bytes of a part: one HTTP/2 frame.
const MAX_PART_BYTES: usize = 1 << 14;

/// Some bytes of an answer; they count as unread until this value is dropped.
struct UnreadBytes {
    connection: Arc<Connection>,
    number: u64,
}

impl UnreadBytes {
    fn new(progress: &InProgress, size: usize) -> Arc<Self> {
        let connection = progress.connection.clone();
        let number = progress.connections.add_unsent(&connection, size, Instant::now());
        Arc::new(Self { connection, number })
    }
}

impl Drop for UnreadBytes {
    fn drop(&mut self) {
        self.connection.remove_unsent(self.number);
    }
}

/// A part of an answer. Hyper drops the part after writing it.
struct Part {
    bytes: Bytes,
    unsent: Arc<UnreadBytes>,
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
pub(crate) struct OutgoingBody {
    body: Body,
    /// The rest of the present frame, which was not sent yet.
    rest: Bytes,
    /// The unread bytes: those of the whole answer or, if its length is unknown, those of the present frame.
    unsent: Option<Arc<UnreadBytes>>,
    has_length: bool,
    /// The request, which is in progress until the body ends or the client leaves.
    progress: InProgress,
}

impl OutgoingBody {
    pub(crate) fn new(body: Body, progress: InProgress) -> Self {
        let length = body.length();
        Self {
            body,
            rest: Bytes::new(),
            unsent: (length > 0).then(|| UnreadBytes::new(&progress, length)),
            has_length: length > 0,
            progress,
        }
    }
}

impl hyper::body::Body for OutgoingBody {
    type Data = Bytes;
    type Error = AbortedAnswer;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, AbortedAnswer>>> {
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
                this.unsent = (!this.rest.is_empty()).then(|| UnreadBytes::new(&this.progress, this.rest.len()));
            }
        }
        let bytes = this.rest.split_to(this.rest.len().min(MAX_PART_BYTES));
        let data = match &this.unsent {
            Some(unsent) => Bytes::from_owner(Part {
                bytes,
                unsent: unsent.clone(),
            }),
            None => bytes,
        };
        if this.rest.is_empty() && !this.has_length {
            this.unsent = None; // the last part has the unread bytes
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
