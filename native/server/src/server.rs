//! Accepts connections, and routes each request to its answer.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::header::{ACCEPT, CONNECTION, CONTENT_TYPE, HOST, HeaderValue, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use parking_lot::{Mutex, RwLock};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore, watch};
use tonic_health::pb::health_check_response::ServingStatus;

use crate::body::{Body, InProgress, OutgoingBody};
use crate::connections::{Admission, CHECK_INTERVAL, Connection, Connections, Order, count};
use crate::control_plane::{ControlPlane, Event};
use crate::endpoints::{Endpoints, Format, Head, Question, RESERVATIONS, ReservationAction};
use crate::grpc;
use crate::metrics::Metrics;
use crate::policy::TOO_LARGE;
use crate::problems::{CLOSE, Declined, JSON, Problem};
use crate::receive::{BodyFailure, receive};
use crate::server_state::{MAX_SILENCE, Probes, ServerState};
use crate::settings::{Access, Settings, seconds};
use crate::socket::{MAX_HEAD, Socket};
use crate::tls;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_routing::Loads;

const MSGPACK: HeaderValue = HeaderValue::from_static("application/msgpack");
/// Maximum number of concurrent streams of one HTTP/2 connection.
const MAX_HTTP2_STREAMS: u32 = 128;

/// Why a server cannot start.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The error if the client has left.
#[derive(Debug)]
struct ClientGone;

impl std::fmt::Display for ClientGone {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("the client has left")
    }
}

impl std::error::Error for ClientGone {}

/// The running data plane.
pub struct Server {
    shared: Arc<ServerState>,
    runtime: Mutex<Option<Runtime>>,
}

impl Server {
    /// Starts to serve at a listening socket. `settings` are JSON. `waker` receives a byte when `take_events` has an event. Choices of
    /// workers read and change `loads`.
    ///
    /// # Errors
    /// If the settings cannot be read, a certificate cannot be used, or the system refuses to start threads.
    pub fn start(settings: &[u8], listener: TcpListener, waker: UnixStream, loads: Arc<Loads>) -> Result<Self, Failure> {
        let settings: Settings = serde_json::from_slice(settings)?;
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(settings.threads)
            .thread_name("kvevents-http")
            .enable_all()
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let shared = Arc::new(ServerState {
            connections: Arc::new(Connections::new(settings.limits.clone())),
            endpoints: Endpoints::new(
                settings.limits.clone(),
                settings.select.clone(),
                Metrics::new(&settings.depths, &settings.seconds),
                loads,
            ),
            control_plane: Arc::new(ControlPlane::new(waker)?),
            probes: RwLock::default(),
            silence: AtomicU32::new(0),
            heavy: Semaphore::new(settings.threads),
            is_draining: Notify::new(),
            watched_health: watch::Sender::new(Some(ServingStatus::NotServing)),
            tls: settings.tls.as_ref().map(tls::acceptor).transpose()?.map(RwLock::new),
            settings,
        });
        runtime.spawn(accept(shared.clone(), listener));
        runtime.spawn(sweep(shared.clone()));
        Ok(Self {
            shared,
            runtime: Mutex::new(Some(runtime)),
        })
    }

    /// Changes the table from which queries are answered. `change` is JSON: the workers that are new, have changed or have left.
    ///
    /// # Errors
    /// If the JSON cannot be read as a change.
    pub fn change_table(&self, change: &[u8], index: Arc<PrefixIndex>) -> Result<(), String> {
        self.shared.endpoints.change_table(change, index)
    }

    /// Takes the requests that the control plane must answer, and the IDs of answers in pieces that have changed.
    pub fn take_events(&self) -> VecDeque<Event> {
        self.shared.control_plane.take()
    }

    /// Answers a query that the control plane has read: `fields` are the fields of the body as msgpack, without the token ids of a single
    /// prompt. Returns the body of the answer, and the number of tokens that the best worker holds.
    ///
    /// # Errors
    /// None if the query cannot be answered now, since no worker serves its model or the index has failed.
    pub fn answer(
        &self,
        method: &str,
        path: &str,
        fields: &[u8],
        tokens: Vec<u32>,
        wants_msgpack: bool,
    ) -> Result<(Vec<u8>, u32), Option<Problem>> {
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| None)?;
        let question = Question::of(&method, path).ok_or(None)?;
        match self
            .shared
            .endpoints
            .answer_fields(question, path, fields, tokens, wants_msgpack)
        {
            Ok(answered) => Ok((answered.body, answered.longest)),
            Err(Declined::Unread | Declined::Outdated) => Err(None),
            Err(Declined::Refused(problem)) => Err(Some(problem)),
        }
    }

    /// Sets the answers to probes: the status and the body of the answers to `/livez` and `/readyz`.
    pub fn replace_probes(&self, live: (u16, Vec<u8>), ready: (u16, Vec<u8>)) {
        let answer = |(status, body): (u16, Vec<u8>)| {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, Bytes::from(body))
        };
        *self.shared.probes.write() = Some(Probes {
            live: answer(live),
            ready: answer(ready),
        });
        self.shared.silence.store(0, Ordering::Relaxed);
        self.shared.report_health();
    }

    /// Reads the certificate, the key and the authorities again; new connections use them.
    ///
    /// # Errors
    /// If the new files cannot be used; then the former files stay in use.
    pub fn reload_tls(&self) -> Result<(), Failure> {
        if let (Some(acceptor), Some(files)) = (&self.shared.tls, &self.shared.settings.tls) {
            *acceptor.write() = tls::acceptor(files)?;
        }
        Ok(())
    }

    /// Returns the counters as JSON.
    #[must_use]
    pub fn metrics(&self) -> Vec<u8> {
        let connections = &self.shared.connections;
        let all = serde_json::json!({
            "answers": self.shared.endpoints.metrics.json(),
            "connections": connections.by_state(),
            "opened": connections.opened(),
            "closed": *connections.closed.lock(),
            "refusals": *connections.refusals.lock(),
            "received": connections.received(),
            "unread": connections.unread(),
            "reservations": self.shared.endpoints.loads.reservation_counts(),
        });
        all.to_string().into_bytes()
    }

    /// Returns a sample of the newest choices as JSON.
    #[must_use]
    pub fn decisions(&self) -> Vec<u8> {
        self.shared.endpoints.decisions.json()
    }

    /// Returns the `limit` open reservations that expire first, as JSON.
    #[must_use]
    pub fn reservations(&self, limit: usize) -> Vec<u8> {
        let loads = &self.shared.endpoints.loads;
        serde_json::json!({"open": loads.reservation_counts().open, "reservations": loads.reservations(limit)})
            .to_string()
            .into_bytes()
    }

    /// Accepts no further connections, and waits for at most `time` seconds until the open connections have ended.
    pub fn drain(&self, time: f64) {
        let guard = self.runtime.lock();
        let Some(runtime) = guard.as_ref() else { return };
        self.shared.is_draining.notify_one();
        self.shared.watched_health.send_replace(None);
        let connections = &self.shared.connections;
        let end = Instant::now() + seconds(time);
        runtime.block_on(async {
            loop {
                connections.drain();
                if connections.is_empty() || Instant::now() >= end {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
    }

    /// Ends all connections, and stops the threads.
    pub fn close(&self) {
        self.shared.control_plane.close();
        self.shared.connections.abort_all();
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}

async fn sweep(shared: Arc<ServerState>) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        shared.connections.sweep(Instant::now());
        shared.silence.fetch_add(1, Ordering::Relaxed);
        shared.report_health();
    }
}

async fn accept(shared: Arc<ServerState>, listener: tokio::net::TcpListener) {
    let mut draining = pin!(shared.is_draining.notified());
    loop {
        let accepted = poll_fn(|cx| {
            if draining.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            listener.poll_accept(cx).map(Some)
        });
        match accepted.await {
            None => return,
            Some(Ok((stream, peer))) => {
                let admission = loop {
                    match shared.connections.admit(Instant::now()) {
                        Admission::Later => tokio::time::sleep(Duration::from_millis(1)).await,
                        admission => break admission,
                    }
                };
                if let Admission::Admitted(connection) = admission {
                    tokio::spawn(serve_connection(shared.clone(), connection, stream, peer.to_string()));
                }
            }
            // The process has the maximum number of open files, or the client has already left.
            Some(Err(_)) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve_connection(shared: Arc<ServerState>, connection: Arc<Connection>, stream: TcpStream, peer: String) {
    let _ = stream.set_nodelay(true);
    let ended = async {
        match &shared.tls {
            None => serve(&shared, &connection, stream, &peer).await,
            Some(acceptor) => {
                let handshake = acceptor.read().accept(stream);
                match tokio::time::timeout(shared.settings.limits.request(), handshake).await {
                    Ok(Ok(stream)) => serve(&shared, &connection, stream, &peer).await,
                    _ => count(&shared.connections.closed, "handshake"),
                }
            }
        }
    };
    run_unless_aborted(&connection, ended).await;
    shared.connections.remove(&connection);
}

/// Runs `work` until it is complete, or until the connection must end immediately.
async fn run_unless_aborted(connection: &Connection, work: impl Future<Output = ()>) {
    let mut work = pin!(work);
    let mut ordered = pin!(connection.ordered.notified());
    poll_fn(|cx| {
        while ordered.as_mut().poll(cx).is_ready() {
            ordered.set(connection.ordered.notified());
        }
        if connection.order() == Order::Abort {
            return Poll::Ready(());
        }
        work.as_mut().poll(cx)
    })
    .await;
}

async fn serve<S>(shared: &Arc<ServerState>, connection: &Arc<Connection>, stream: S, peer: &str)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = shared.settings.limits.clone();
    let keep_alive = limits.unread_time();
    let socket = Socket::new(stream, shared.connections.clone(), connection.clone(), limits);
    let service = service_fn(|request: Request<Incoming>| {
        let progress = InProgress::new(shared.connections.clone(), connection.clone(), request.version());
        handle(shared.clone(), progress, peer.to_owned(), request)
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD)
        .timer(TokioTimer::new());
    builder
        .http2()
        .max_concurrent_streams(MAX_HTTP2_STREAMS)
        .max_header_list_size(MAX_HEAD as u32)
        .keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive)
        .timer(TokioTimer::new());
    let mut served = pin!(builder.serve_connection(TokioIo::new(socket), service));
    let mut is_ending = false;
    poll_fn(|cx| {
        if !is_ending && connection.order() == Order::Close {
            is_ending = true;
            served.as_mut().graceful_shutdown();
        }
        served.as_mut().poll(cx).map(drop)
    })
    .await;
}

async fn handle(
    shared: Arc<ServerState>,
    progress: InProgress,
    peer: String,
    request: Request<Incoming>,
) -> Result<Response<OutgoingBody>, ClientGone> {
    let began = Instant::now();
    let is_reserved = progress.connection.is_reserved;
    let (mut head, body) = request.into_parts();
    if let Err(problem) = read_host(&mut head).and_then(|()| check_coding(&head)) {
        count(&shared.connections.refusals, problem.reason);
        let response = close_after(&progress.connection, problem.response());
        return Ok(response.map(|body| OutgoingBody::new(body, progress)));
    }
    let path = head.uri.path();
    let is_call = grpc::is_call(&head);
    let is_probe = if is_call {
        grpc::is_probe(&head)
    } else {
        shared.settings.probes.iter().any(|probe| probe == path)
    };
    let mut response = if is_reserved && !is_probe {
        let problem = Problem::too_many_clients(shared.settings.limits.max_clients);
        count(&shared.connections.refusals, problem.reason);
        let endpoint = shared.settings.access(&head).path;
        if !endpoint.is_empty() {
            let status = problem.status.as_u16();
            shared.endpoints.metrics.request(&endpoint, status, Duration::ZERO);
        }
        progress.connection.linger();
        if is_call { grpc::refuse(&problem) } else { problem.response() }
    } else if is_call {
        grpc::respond(&shared, &progress, &peer, (head, body), began).await
    } else {
        respond(&shared, &progress, &peer, (head, body), began).await?
    };
    if is_reserved {
        response.headers_mut().insert(CONNECTION, CLOSE);
    }
    progress.hold(0);
    Ok(response.map(|body| OutgoingBody::new(body, progress)))
}

/// Sets `Host` to the host in the target of the request, as RFC 9112 (3.2) requires. Returns an error for an HTTP/1.1 request without
/// exactly one `Host`, and for CONNECT, whose target is another server.
fn read_host(head: &mut Parts) -> Result<(), Problem> {
    if head.method == Method::CONNECT {
        return Err(Problem::not_a_proxy());
    }
    let hosts = head.headers.get_all(HOST).iter().count();
    if hosts > 1 || (hosts == 0 && head.version == Version::HTTP_11) {
        return Err(Problem::malformed(format!(
            "the request has {hosts} Host headers, expected 1"
        )));
    }
    if let Some(authority) = head.uri.authority() {
        let host = authority.as_str().rsplit('@').next().map(HeaderValue::from_str);
        if let Some(Ok(host)) = host {
            head.headers.insert(HOST, host);
        }
    }
    Ok(())
}

/// Returns an error for a body with another transfer coding than `chunked`, as RFC 9112 (6.1) asks for, or with several codings.
fn check_coding(head: &Parts) -> Result<(), Problem> {
    let codings: Vec<&[u8]> = (head.headers.get_all(TRANSFER_ENCODING).iter())
        .map(HeaderValue::as_bytes)
        .collect();
    let codings = codings.join(&b", "[..]);
    if codings.is_empty() || codings.eq_ignore_ascii_case(b"chunked") {
        return Ok(());
    }
    Err(Problem::unknown_coding(&String::from_utf8_lossy(&codings)))
}

async fn respond(
    shared: &ServerState,
    progress: &InProgress,
    peer: &str,
    (head, body): (Parts, Incoming),
    began: Instant,
) -> Result<Response<Body>, ClientGone> {
    let connection = &progress.connection;
    let path = head.uri.path();
    let has_body = !body.is_end_stream();
    let mut access = shared.settings.access(&head);
    if shared.settings.probes.iter().any(|probe| probe == path) {
        // The answer to a liveness probe never waits for the control plane.
        progress.note_body_received();
        let mut response = match answer_probe(shared, &head) {
            Some(response) => {
                shared
                    .endpoints
                    .metrics
                    .request(path, response.status().as_u16(), began.elapsed());
                response
            }
            None => forward(shared, &head, peer, &access, Bytes::new()).await,
        };
        if has_body {
            connection.linger();
            response.headers_mut().insert(CONNECTION, CLOSE);
        }
        return Ok(response);
    }
    let question = Question::of(&head.method, path).filter(|_| shared.settings.answers_queries);
    let query = question.and_then(|question| Some((question, parse_head(&head, question)?)));
    if body.size_hint().lower() > shared.settings.limits.max_body_bytes as u64 {
        access.refusal.get_or_insert(TOO_LARGE);
    }
    if has_body && !access.is_granted() {
        let answer = forward(shared, &head, peer, &access, Bytes::new()).await;
        return Ok(close_after(connection, answer));
    }
    let body = match receive(progress, body, &shared.settings.limits).await {
        Ok(body) => body,
        Err(BodyFailure::ClientGone) => return Err(ClientGone),
        Err(BodyFailure::Refused(problem)) => {
            count(&shared.connections.refusals, problem.reason);
            return Ok(close_after(connection, problem.response()));
        }
        Err(BodyFailure::TooLarge) => {
            access.refusal = Some(TOO_LARGE);
            let response = forward(shared, &head, peer, &access, Bytes::new()).await;
            return Ok(close_after(connection, response));
        }
    };
    if access.is_granted()
        && let Some((question, parsed)) = query
        && let Some(answered) = answer_query(shared, question, &parsed, &body).await
    {
        let response = match answered {
            Ok(body) => {
                let mut response = Response::new(Body::full(body.into()));
                let kind = if parsed.wants_msgpack { MSGPACK } else { JSON };
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            Err(problem) => {
                let mut response = problem.response();
                response.headers_mut().remove(CONNECTION);
                response
            }
        };
        let status = response.status().as_u16();
        shared.endpoints.metrics.request(question.path(), status, began.elapsed());
        return Ok(response);
    }
    Ok(forward(shared, &head, peer, &access, body).await)
}

/// Marks an answer as the last one of its connection, since the body of the request is not received.
fn close_after(connection: &Connection, mut response: Response<Body>) -> Response<Body> {
    connection.linger();
    response.headers_mut().insert(CONNECTION, CLOSE);
    response
}

/// Returns the answer to a probe. Returns None if the control plane must answer the probe.
fn answer_probe(shared: &ServerState, head: &Parts) -> Option<Response<Body>> {
    if head.method != Method::GET || wants_msgpack(head) != Some(false) {
        return None;
    }
    let probes = shared.probes.read();
    let probes = probes.as_ref()?;
    let (status, body) = match head.uri.path() {
        "/livez" if shared.silence.load(Ordering::Relaxed) > MAX_SILENCE => {
            let body = r#"{"status":"failed","warnings":["the control plane has not reported for 10 s"]}"#;
            (StatusCode::SERVICE_UNAVAILABLE, Bytes::from_static(body.as_bytes()))
        }
        "/livez" => probes.live.clone(),
        "/readyz" => probes.ready.clone(),
        _ => return None,
    };
    let mut response = Response::new(Body::full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    Some(response)
}

/// Returns whether the client wants msgpack instead of JSON. Returns None if `Accept` names several types; then the control plane chooses
/// the type.
fn wants_msgpack(head: &Parts) -> Option<bool> {
    let mut kinds = head.headers.get_all(ACCEPT).iter();
    match (kinds.next(), kinds.next()) {
        (None, _) => Some(false),
        (Some(kind), None) if kind == MSGPACK => Some(true),
        (Some(kind), None) if !kind.to_str().ok()?.to_ascii_lowercase().contains("msgpack") => Some(false),
        _ => None,
    }
}

/// Returns the parts of a query besides its body. Returns None if the data plane does not read the format of the body, or if the control
/// plane must choose the format of the answer.
fn parse_head(head: &Parts, question: Question) -> Option<Head> {
    let has_body = !matches!(
        question,
        Question::Reservation(ReservationAction::Show | ReservationAction::Finish)
    );
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    let kind = kind.unwrap_or_default().split(|byte| *byte == b';').next()?.trim_ascii();
    let is = |name: &str| kind.eq_ignore_ascii_case(name.as_bytes());
    let format = match () {
        () if !has_body => Format::Json,
        () if is("application/json") => Format::Json,
        () if is("application/msgpack") || is("application/x-msgpack") => Format::Msgpack,
        () if is("application/octet-stream") => Format::Raw,
        () => return None,
    };
    Some(Head {
        format,
        wants_msgpack: wants_msgpack(head).filter(|wanted| !wanted || question.has_own_format())?,
        query_string: head.uri.query().map(str::to_owned),
        reservation: head.uri.path().strip_prefix(RESERVATIONS).map(str::to_owned),
    })
}

/// Returns the answer of the index, or the error that the fleet causes. Returns None if the query must be forwarded to the control plane.
async fn answer_query(shared: &ServerState, question: Question, head: &Head, body: &Bytes) -> Option<Result<Vec<u8>, Problem>> {
    let work = || shared.endpoints.answer(question, head, body);
    shared.run(question, body.len(), work).await?
}

/// Forwards a request to the control plane, and returns its answer.
async fn forward(shared: &ServerState, head: &Parts, peer: &str, access: &Access, body: Bytes) -> Response<Body> {
    let answer = shared.ask(head, peer, access, body).await;
    answer.unwrap_or_else(|| Problem::service_ending().response())
}
