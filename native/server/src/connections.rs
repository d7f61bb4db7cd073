//! Limits the number of client connections, their duration and their memory.
//!
//! Theory of operation. Each connection reports its progress, and [`Connections::sweep`] ends connections that exceed the time limit of
//! their state:
//!
//! | state | the connection | ends after |
//! |---|---|---|
//! | New | has sent nothing yet, or is in its TLS handshake | `request_seconds`, without an answer |
//! | Reading | is in the middle of a request: over HTTP/1.1 from its first byte on, over HTTP/2 from the end of its head | `request_seconds`, with 408 |
//! | Answering | waits for the service, which has its own time limits | never |
//! | Idle | is kept for the next request | `idle_seconds` |
//! | Closing | has got its last answer, of which a part may still be in transit | `CLOSING_TIME`; further input is discarded |
//!
//! In each state, a connection is closed if its client does not read its answers within `unread_seconds`. In this time, an answer must be
//! sent completely; or a part of it must be sent, and at least `MIN_READ_BYTES` bytes of all answers of the connection.
//!
//! At `max_clients` connections, a new connection replaces a connection without a request in progress. The replaced connection is the
//! oldest that is older than `YOUNG_TIME` and has sent no request. If it does not exist, the connection that has been idle for the longest
//! time is replaced. If each connection has a request in progress, the new connection is *reserved*: only probes are answered on it. There
//! are at most `reserved_clients` reserved connections. At this limit, the oldest reserved connection that does not wait for the service is
//! closed for the next one. So probes are answered however many idle or slow connections there are.
//!
//! Each connection can hold `FREE_BYTES` of its requests, of which there can be several over HTTP/2. All connections together can hold
//! `max_received_bytes` in addition. A request that would exceed this limit is refused. Answers that clients have not read take at most
//! `max_unread_bytes` in total. Above this limit, the connection with the most unread bytes is closed. An answer counts from its beginning
//! until it is sent, even if an HTTP/2 client grants no window for it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::settings::Limits;

/// Interval at which the deadlines of all connections are checked.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time in which a client can read its last answer and close the connection. If the service closed the connection while the client was
/// sending, the reset would destroy the answer.
pub(crate) const CLOSING_TIME: Duration = Duration::from_secs(2);
/// Age below which a connection without a request is not replaced, since its first request can have arrived without having been read.
const YOUNG_TIME: Duration = Duration::from_millis(50);
/// Number of request bytes that each connection can hold, regardless of what other connections hold.
pub(crate) const FREE_BYTES: usize = 1 << 16;
/// Number of bytes that a client must read in each period of `unread_seconds`, if it has not read the answer completely.
const MIN_READ_BYTES: u64 = 1 << 20;

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    New,
    Reading,
    Answering,
    Idle,
    Closing,
}

impl State {
    pub(crate) const ALL: [(Self, &str); 5] = [
        (Self::New, "new"),
        (Self::Reading, "reading"),
        (Self::Answering, "answering"),
        (Self::Idle, "idle"),
        (Self::Closing, "closing"),
    ];
}

/// An order to the task that serves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Order {
    GoOn,
    /// The task must complete the answers in progress, and then end.
    Close,
    /// The task must refuse the request, because the head of the request was not complete in time.
    Refuse,
    /// The task must end immediately.
    Abort,
}

/// An answer, or a part of an answer, that was not sent yet.
#[derive(Debug)]
struct Unsent {
    /// Number of bytes of memory that the answer takes.
    size: usize,
    clock: ReadDeadline,
    /// Whether a part of the answer was sent after the beginning of the time limit.
    has_progressed: bool,
}

/// A time limit in which a client must read.
#[derive(Clone, Copy, Debug)]
struct ReadDeadline {
    end: Instant,
    /// Value of `Inner::taken` at the beginning of the time limit.
    taken: u64,
}

#[derive(Debug)]
struct Inner {
    state: State,
    /// The time at which the state began.
    since: Instant,
    deadline: Option<Instant>,
    /// Whether the head of a request is being received.
    is_in_head: bool,
    /// Whether the connection has had a request over HTTP/2. If it has, arriving bytes can be other frames, such as answers to pings.
    is_http2: bool,
    /// Number of requests whose answers are not complete; there can be several over HTTP/2.
    active: usize,
    /// Number of request bytes of the connection that are held in memory.
    held: usize,
    /// Number of bytes that hyper has offered and the socket has not accepted yet.
    unwritten: usize,
    /// Number of bytes that the socket has accepted.
    taken: u64,
    /// The time limit of the unwritten bytes.
    stuck_at: Option<ReadDeadline>,
    /// Answers that were not sent yet, by ID.
    unsent: HashMap<u64, Unsent>,
    /// ID of the newest answer.
    answers: u64,
}

impl Inner {
    /// Number of bytes of answers that the client has not read.
    fn unread(&self) -> usize {
        self.unsent.values().map(|one| one.size).sum::<usize>().max(self.unwritten)
    }

    fn clock(&self, end: Instant) -> ReadDeadline {
        ReadDeadline { end, taken: self.taken }
    }

    /// Returns whether the client has failed to read in time, and restarts each time limit that has passed.
    fn is_stuck(&mut self, now: Instant, time: Duration) -> bool {
        let (again, taken) = (self.clock(now + time), self.taken);
        let mut is_stuck = false;
        let mut check = |clock: &mut ReadDeadline, has_progressed: bool| {
            if now >= clock.end {
                is_stuck |= !has_progressed || taken - clock.taken < MIN_READ_BYTES;
                *clock = again;
            }
        };
        if let Some(clock) = &mut self.stuck_at {
            check(clock, true);
        }
        for one in self.unsent.values_mut() {
            let has_ended = now >= one.clock.end;
            check(&mut one.clock, one.has_progressed);
            one.has_progressed &= !has_ended;
        }
        is_stuck
    }
}

/// The state of one connection.
#[derive(Debug)]
pub(crate) struct Connection {
    id: u64,
    /// Whether only probes are answered on the connection.
    pub(crate) is_reserved: bool,
    inner: Mutex<Inner>,
    order: AtomicU8,
    lingers: AtomicBool,
    /// Gives the task of the connection a new order, and wakes it.
    pub(crate) ordered: Notify,
}

impl Connection {
    pub(crate) fn order(&self) -> Order {
        match self.order.load(Ordering::Acquire) {
            0 => Order::GoOn,
            1 => Order::Close,
            2 => Order::Refuse,
            _ => Order::Abort,
        }
    }

    fn give(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::AcqRel);
        self.ordered.notify_one();
    }

    /// Records that the client might be sending when the last answer is written.
    pub(crate) fn linger(&self) {
        self.lingers.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lingers(&self) -> bool {
        self.lingers.load(Ordering::Relaxed)
    }

    fn state(&self) -> State {
        self.inner.lock().state
    }

    /// Records that a part of the answer with this ID was sent.
    pub(crate) fn has_progressed(&self, number: u64) {
        if let Some(unsent) = self.inner.lock().unsent.get_mut(&number) {
            unsent.has_progressed = true;
        }
    }

    /// Removes the answer with this ID, which was sent or dropped.
    pub(crate) fn remove_unsent(&self, number: u64) {
        self.inner.lock().unsent.remove(&number);
    }

    /// The time at which the request that is being received must be complete; None without such a time.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.inner.lock().deadline
    }
}

/// The decision on a new connection.
pub(crate) enum Admission {
    Admitted(Arc<Connection>),
    /// The connection must wait, for at most `YOUNG_TIME`: a young connection might have sent a request that was not read yet, or might
    /// end.
    Later,
    /// The maximum number of connections is reached.
    Refused,
}

/// The connections of each group, the oldest first.
#[derive(Debug, Default)]
struct Groups {
    next: u64,
    /// Connections that have not yet sent the complete head of a request.
    strangers: BTreeMap<u64, Arc<Connection>>,
    /// Connections that have sent the complete head of a request.
    known: BTreeMap<u64, Arc<Connection>>,
    /// Connections in excess of the limit, on which only probes are answered.
    reserved: BTreeMap<u64, Arc<Connection>>,
}

impl Groups {
    fn all(&self) -> impl Iterator<Item = &Arc<Connection>> {
        self.strangers
            .values()
            .chain(self.known.values())
            .chain(self.reserved.values())
    }
}

/// A count for each reason.
pub(crate) type Counts = Mutex<HashMap<&'static str, u64>>;

/// The state of all connections.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: Limits,
    groups: Mutex<Groups>,
    /// For each reason, the number of connections that the service has closed.
    pub(crate) closed: Counts,
    /// For each reason, the number of requests that were refused before their path was known.
    pub(crate) refusals: Counts,
    /// Number of request bytes that are held in excess of the `FREE_BYTES` of each connection.
    received: AtomicUsize,
}

pub(crate) fn count(counts: &Counts, reason: &'static str) {
    *counts.lock().entry(reason).or_default() += 1;
}

impl Connections {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            groups: Mutex::default(),
            closed: Mutex::default(),
            refusals: Mutex::default(),
            received: AtomicUsize::new(0),
        }
    }

    pub(crate) fn opened(&self) -> u64 {
        self.groups.lock().next
    }

    pub(crate) fn received(&self) -> usize {
        self.received.load(Ordering::Relaxed)
    }

    /// Number of bytes of answers that clients have not read.
    pub(crate) fn unread(&self) -> usize {
        self.groups.lock().all().map(|each| each.inner.lock().unread()).sum()
    }

    /// The number of connections in each state.
    pub(crate) fn by_state(&self) -> HashMap<&'static str, usize> {
        let mut found: HashMap<&'static str, usize> = State::ALL.iter().map(|(_, name)| (*name, 0)).collect();
        for each in self.groups.lock().all() {
            let state = each.state();
            let (_, name) = State::ALL
                .iter()
                .find(|(one, _)| *one == state)
                .expect("all states have names");
            *found.entry(name).or_default() += 1;
        }
        found
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.groups.lock().all().next().is_none()
    }

    // --- limits of the number of connections

    /// Decides on a new connection, and adds it if it is accepted.
    pub(crate) fn admit(&self, now: Instant) -> Admission {
        let mut guard = self.groups.lock();
        let groups = &mut *guard;
        let is_full = groups.strangers.len() + groups.known.len() >= self.limits.max_clients;
        let has_room = !is_full || self.make_room(groups, now);
        if !has_room && !groups.strangers.is_empty() {
            return Admission::Later;
        }
        groups.next += 1;
        let (id, is_reserved) = (groups.next, !has_room);
        if is_reserved && groups.reserved.len() >= self.limits.reserved_clients {
            let idle = groups
                .reserved
                .values()
                .find(|each| each.state() != State::Answering)
                .cloned();
            let Some(idle) = idle else {
                count(&self.closed, "full");
                return Admission::Refused;
            };
            self.abort(groups, &idle, "evicted");
        }
        let connection = Arc::new(Connection {
            id,
            is_reserved,
            inner: Mutex::new(Inner {
                state: State::New,
                since: now,
                deadline: Some(now + self.limits.request()),
                is_in_head: true,
                is_http2: false,
                active: 0,
                held: 0,
                unwritten: 0,
                taken: 0,
                stuck_at: None,
                unsent: HashMap::new(),
                answers: 0,
            }),
            order: AtomicU8::new(0),
            lingers: AtomicBool::new(false),
            ordered: Notify::new(),
        });
        let group = if is_reserved {
            &mut groups.reserved
        } else {
            &mut groups.strangers
        };
        group.insert(id, connection.clone());
        Admission::Admitted(connection)
    }

    fn make_room(&self, groups: &mut Groups, now: Instant) -> bool {
        let idle = |each: &&Arc<Connection>| !matches!(each.state(), State::Reading | State::Answering);
        let longest = groups.known.values().filter(idle).min_by_key(|each| each.inner.lock().since);
        let oldest = groups.strangers.values().next();
        let silent = oldest.filter(|each| now >= each.inner.lock().since + YOUNG_TIME);
        let Some(found) = silent.or(longest).cloned() else {
            return false;
        };
        self.abort(groups, &found, "evicted");
        true
    }

    fn abort(&self, groups: &mut Groups, connection: &Connection, reason: &'static str) {
        count(&self.closed, reason);
        self.forget(groups, connection);
        connection.give(Order::Abort);
    }

    fn forget(&self, groups: &mut Groups, connection: &Connection) {
        for group in [&mut groups.strangers, &mut groups.known, &mut groups.reserved] {
            group.remove(&connection.id);
        }
        let held = connection.inner.lock().held;
        self.hold(connection, held, 0);
    }

    /// Removes a connection that has ended.
    pub(crate) fn remove(&self, connection: &Connection) {
        self.forget(&mut self.groups.lock(), connection);
    }

    // --- the progress of connections

    /// Records that bytes have arrived on a connection. The first bytes of a request set its deadline; later bytes do not.
    pub(crate) fn note_received(&self, connection: &Connection, now: Instant) {
        let mut inner = connection.inner.lock();
        if matches!(inner.state, State::New | State::Idle) && !inner.is_http2 {
            inner.is_in_head = true;
            enter(&mut inner, State::Reading, now, Some(self.limits.request()));
        }
    }

    /// Records that the head of a request is complete. After this, connections without a request are replaced before this connection.
    pub(crate) fn note_head(&self, connection: &Arc<Connection>, is_http2: bool, now: Instant) {
        let is_new = {
            let mut inner = connection.inner.lock();
            let was_idle = inner.state == State::Idle;
            inner.is_in_head = false;
            inner.is_http2 = is_http2;
            inner.active += 1;
            if was_idle {
                // If the head arrived together with the previous request, or over HTTP/2, `note_received` has not begun this state.
                enter(&mut inner, State::Reading, now, Some(self.limits.request()));
            }
            !connection.is_reserved
        };
        if is_new {
            let mut groups = self.groups.lock();
            if groups.strangers.remove(&connection.id).is_some() {
                groups.known.insert(connection.id, connection.clone());
            }
        }
    }

    /// Records that a request was received completely.
    pub(crate) fn note_request_received(&self, connection: &Connection, now: Instant) {
        let mut inner = connection.inner.lock();
        if inner.state != State::Closing {
            enter(&mut inner, State::Answering, now, None);
        }
    }

    /// Records that an answer is complete.
    pub(crate) fn note_answered(&self, connection: &Connection, now: Instant) {
        let mut inner = connection.inner.lock();
        inner.active = inner.active.saturating_sub(1);
        if inner.active == 0 && inner.state != State::Closing {
            enter(&mut inner, State::Idle, now, Some(self.limits.idle()));
        }
    }

    /// Records that the client has closed its sending side. Returns whether the client might wait for an answer; the time for this is
    /// limited.
    pub(crate) fn note_left(&self, connection: &Connection, now: Instant) -> bool {
        let mut inner = connection.inner.lock();
        if inner.state == State::Answering && inner.active > 0 {
            inner.deadline.get_or_insert(now + CLOSING_TIME);
            return true;
        }
        false
    }

    /// Records that the last answer was written.
    pub(crate) fn note_closing(&self, connection: &Connection, now: Instant) {
        let mut inner = connection.inner.lock();
        if inner.state != State::Closing {
            enter(&mut inner, State::Closing, now, Some(CLOSING_TIME));
        }
    }

    // --- the memory of connections

    /// Records that the size of a request of a connection has changed from `before` to `size` bytes. Returns false, and changes nothing, if
    /// all connections together would exceed their limit.
    pub(crate) fn hold(&self, connection: &Connection, before: usize, size: usize) -> bool {
        let mut inner = connection.inner.lock();
        // The bytes of a removed connection do not count any more.
        let all = inner.held.saturating_sub(before) + size;
        let (was, is) = (inner.held.saturating_sub(FREE_BYTES), all.saturating_sub(FREE_BYTES));
        if is > was {
            let more = is - was;
            let before = self.received.fetch_add(more, Ordering::Relaxed);
            if before + more > self.limits.max_received_bytes {
                self.received.fetch_sub(more, Ordering::Relaxed);
                return false;
            }
        } else {
            self.received.fetch_sub(was - is, Ordering::Relaxed);
        }
        inner.held = all;
        true
    }

    /// Records that the socket has accepted `written` bytes of answers, and that `left` bytes wait.
    pub(crate) fn note_written(&self, connection: &Connection, written: usize, left: usize, now: Instant) {
        let mut inner = connection.inner.lock();
        inner.taken += written as u64;
        inner.unwritten = left;
        if left == 0 {
            inner.stuck_at = None;
            if inner.state == State::Closing && written > 0 {
                enter(&mut inner, State::Closing, now, Some(CLOSING_TIME));
            }
        } else if inner.stuck_at.is_none() {
            inner.stuck_at = Some(inner.clock(now + self.limits.unread_time()));
        }
    }

    /// Records an answer, or a part of an answer, of `size` bytes. Returns its ID.
    pub(crate) fn add_unsent(&self, connection: &Connection, size: usize, now: Instant) -> u64 {
        let mut inner = connection.inner.lock();
        inner.answers += 1;
        let (number, clock) = (inner.answers, inner.clock(now + self.limits.unread_time()));
        let unsent = Unsent {
            size,
            clock,
            has_progressed: false,
        };
        inner.unsent.insert(number, unsent);
        number
    }

    // --- the time of connections

    /// Ends connections whose deadline has passed.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut guard = self.groups.lock();
        let groups = &mut *guard;
        let mut unread: Vec<(usize, Arc<Connection>)> = Vec::new();
        let all: Vec<Arc<Connection>> = groups.all().cloned().collect();
        for connection in all {
            let mut inner = connection.inner.lock();
            let is_stuck = inner.is_stuck(now, self.limits.unread_time());
            // A closing connection that has unread answers ends only when the time limit of one of these answers passes.
            let has_unread = inner.stuck_at.is_some() || !inner.unsent.is_empty();
            let is_due =
                inner.deadline.is_some_and(|deadline| now >= deadline) && !(inner.state == State::Closing && has_unread);
            let (state, is_in_head, size) = (inner.state, inner.is_in_head, inner.unread());
            if is_due && (state == State::Idle || (state == State::Reading && is_in_head)) {
                enter(&mut inner, State::Closing, now, Some(CLOSING_TIME));
            }
            drop(inner);
            match state {
                _ if is_stuck => self.abort(groups, &connection, "unread"),
                _ if !is_due => {
                    if size > 0 {
                        unread.push((size, connection));
                    }
                }
                State::New => self.abort(groups, &connection, "silent"),
                State::Closing => self.abort(groups, &connection, "not-closed"),
                State::Idle => {
                    count(&self.closed, "idle");
                    connection.give(Order::Close);
                }
                State::Reading if is_in_head => connection.give(Order::Refuse),
                // The client has closed its sending side, and the answer was not complete in time.
                State::Answering => self.abort(groups, &connection, "left"),
                // The task that receives the body ends the request at the deadline.
                State::Reading => {}
            }
        }
        let mut total: usize = unread.iter().map(|(size, _)| size).sum();
        unread.sort_by_key(|(size, _)| *size);
        while total > self.limits.max_unread_bytes
            && let Some((size, largest)) = unread.pop()
        {
            total -= size;
            self.abort(groups, &largest, "unread-bytes");
        }
    }

    /// Ends connections that have sent nothing immediately, and all other connections after the answers to their requests.
    pub(crate) fn drain(&self) {
        let mut guard = self.groups.lock();
        let all: Vec<Arc<Connection>> = guard.all().cloned().collect();
        for connection in all {
            if connection.state() == State::New {
                self.abort(&mut guard, &connection, "draining");
            } else {
                connection.give(Order::Close);
            }
        }
    }

    /// Ends every connection.
    pub(crate) fn abort_all(&self) {
        let mut guard = self.groups.lock();
        let all: Vec<Arc<Connection>> = guard.all().cloned().collect();
        for connection in all {
            self.abort(&mut guard, &connection, "draining");
        }
    }
}

fn enter(inner: &mut Inner, state: State, now: Instant, time: Option<Duration>) {
    inner.state = state;
    inner.since = now;
    inner.deadline = time.map(|time| now + time);
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        connections: Connections,
        now: Instant,
    }

    impl Fixture {
        fn new(change: impl FnOnce(&mut Limits)) -> Self {
            let mut limits = Limits {
                max_clients: 3,
                reserved_clients: 2,
                request_seconds: 5.0,
                idle_seconds: 50.0,
                unread_seconds: 8.0,
                ..Limits::for_tests()
            };
            change(&mut limits);
            Self {
                connections: Connections::new(limits),
                now: Instant::now(),
            }
        }

        fn admit(&self) -> Arc<Connection> {
            match self.connections.admit(self.now) {
                Admission::Admitted(connection) => connection,
                _ => panic!("no room"),
            }
        }

        fn after(&mut self, seconds: f64) {
            self.now += Duration::from_secs_f64(seconds);
            self.connections.sweep(self.now);
        }

        /// Simulates a complete request.
        fn ask(&self, connection: &Arc<Connection>) {
            self.connections.note_received(connection, self.now);
            self.connections.note_head(connection, false, self.now);
            self.connections.note_request_received(connection, self.now);
        }

        fn closed(&self) -> Vec<(&'static str, u64)> {
            let mut found: Vec<_> = self
                .connections
                .closed
                .lock()
                .iter()
                .map(|(key, value)| (*key, *value))
                .collect();
            found.sort_unstable();
            found
        }
    }

    #[test]
    fn each_state_ends() {
        let mut scene = Fixture::new(|_| {});
        let [silent, slow, idle] = [scene.admit(), scene.admit(), scene.admit()];
        scene.connections.note_received(&slow, scene.now);
        scene.ask(&idle);
        scene.after(4.9);
        scene.connections.note_received(&slow, scene.now); // another byte
        assert!([&silent, &slow, &idle].iter().all(|each| each.order() == Order::GoOn));
        scene.after(0.2);
        assert_eq!(
            [silent.order(), slow.order(), idle.order()],
            [Order::Abort, Order::Refuse, Order::GoOn]
        );
        scene.after(1000.0);
        assert_eq!(
            idle.order(),
            Order::GoOn,
            "the service itself bounds how long an answer takes"
        );
        scene.connections.note_answered(&idle, scene.now);
        scene.after(49.9);
        assert_eq!(idle.order(), Order::GoOn);
        scene.after(0.2);
        assert_eq!(idle.order(), Order::Close);
        scene.after(CLOSING_TIME.as_secs_f64() + 0.1);
        assert_eq!([slow.order(), idle.order()], [Order::Abort, Order::Abort]);
        assert!(scene.connections.is_empty());
        assert_eq!(scene.closed(), [("idle", 1), ("not-closed", 2), ("silent", 1)]);
    }

    #[test]
    fn frames_between_requests_of_http_2_are_no_request() {
        let mut scene = Fixture::new(|_| {});
        let client = scene.admit();
        scene.connections.note_received(&client, scene.now);
        scene.connections.note_head(&client, true, scene.now);
        scene.connections.note_request_received(&client, scene.now);
        scene.connections.note_answered(&client, scene.now);
        for order in [Order::GoOn, Order::Close] {
            scene.connections.note_received(&client, scene.now);
            scene.after(25.1);
            assert_eq!(client.order(), order);
        }
    }

    #[test]
    fn a_new_connection_takes_the_place_of_an_idle_one() {
        let mut scene = Fixture::new(|_| {});
        let [first, busy, silent] = [scene.admit(), scene.admit(), scene.admit()];
        scene.ask(&first);
        scene.connections.note_answered(&first, scene.now);
        scene.ask(&busy);
        scene.now += Duration::from_secs(1);
        let newer = scene.admit();
        assert_eq!([silent.order(), first.order()], [Order::Abort, Order::GoOn]);
        assert!(!newer.is_reserved);
        scene.ask(&newer);
        let last = scene.admit();
        assert_eq!(
            [first.order(), last.order(), newer.order(), busy.order()],
            [Order::Abort, Order::GoOn, Order::GoOn, Order::GoOn]
        );
        assert_eq!(scene.closed(), [("evicted", 2)]);
    }

    #[test]
    fn a_young_connection_is_not_replaced() {
        let mut scene = Fixture::new(|_| {});
        let made = [scene.admit(), scene.admit(), scene.admit()];
        assert!(matches!(scene.connections.admit(scene.now), Admission::Later));
        for each in &made {
            scene.ask(each);
        }
        assert!(scene.admit().is_reserved);
        scene.connections.note_answered(&made[1], scene.now);
        scene.admit();
        scene.now += YOUNG_TIME;
        scene.admit();
        assert_eq!(scene.closed(), [("evicted", 2)]);
    }

    #[test]
    fn connections_above_the_limit_are_reserved() {
        let scene = Fixture::new(|_| {});
        for connection in [scene.admit(), scene.admit(), scene.admit()] {
            scene.ask(&connection);
        }
        let [one, two] = [scene.admit(), scene.admit()];
        assert!(one.is_reserved && two.is_reserved);
        let three = scene.admit();
        assert_eq!(one.order(), Order::Abort);
        assert!(three.is_reserved);
        scene.ask(&two);
        scene.ask(&three);
        assert!(matches!(scene.connections.admit(scene.now), Admission::Refused));
        assert_eq!(scene.closed(), [("evicted", 1), ("full", 1)]);
    }

    #[test]
    fn a_reserved_connection_without_a_complete_body_is_replaced() {
        let scene = Fixture::new(|limits| limits.max_clients = 1);
        scene.ask(&scene.admit());
        let [one, two] = [scene.admit(), scene.admit()];
        scene.ask(&one);
        scene.connections.note_received(&two, scene.now);
        scene.connections.note_head(&two, false, scene.now);
        assert!(scene.admit().is_reserved);
        assert_eq!([one.order(), two.order()], [Order::GoOn, Order::Abort]);
    }

    #[test]
    fn a_client_must_read_its_answers() {
        let mut scene = Fixture::new(|_| {});
        let made = [scene.admit(), scene.admit(), scene.admit()];
        for each in &made {
            scene.ask(each);
            scene.connections.note_written(each, 0, 5 << 20, scene.now);
        }
        let [slow, stuck, quick] = &made;
        for left in [4 << 20, 3 << 20] {
            scene.connections.note_written(slow, 1 << 20, left, scene.now);
            scene.connections.note_written(quick, left, 0, scene.now);
            scene.after(8.1);
            assert_eq!(
                [slow.order(), stuck.order(), quick.order()],
                [Order::GoOn, Order::Abort, Order::GoOn]
            );
        }
        scene.after(8.1);
        assert_eq!(slow.order(), Order::Abort);
        assert_eq!(scene.closed(), [("unread", 2)]);
    }

    #[test]
    fn each_answer_must_be_sent() {
        let mut scene = Fixture::new(|_| {});
        let made = [scene.admit(), scene.admit(), scene.admit()];
        let [stuck, slow, quick] = &made;
        let numbers = made.each_ref().map(|each| {
            scene.ask(each);
            scene.connections.add_unsent(each, 5 << 20, scene.now)
        });
        assert_eq!(scene.connections.unread(), 15 << 20);
        for _ in 0..2 {
            // The client reads other answers.
            scene.connections.note_written(stuck, 4 << 20, 0, scene.now);
            for (each, number, written) in [(slow, numbers[1], 1 << 10), (quick, numbers[2], 1 << 20)] {
                each.has_progressed(number);
                scene.connections.note_written(each, written, 0, scene.now);
            }
            scene.after(8.1);
            assert_eq!(
                made.each_ref().map(|each| each.order()),
                [Order::Abort, Order::Abort, Order::GoOn]
            );
        }
        quick.remove_unsent(numbers[2]);
        scene.after(100.0);
        assert_eq!((quick.order(), scene.connections.unread()), (Order::GoOn, 0));
        assert_eq!(scene.closed(), [("unread", 2)]);
    }

    #[test]
    fn an_answer_must_make_progress_in_each_period() {
        let mut scene = Fixture::new(|_| {});
        let client = scene.admit();
        scene.ask(&client);
        let number = scene.connections.add_unsent(&client, 5 << 20, scene.now);
        client.has_progressed(number);
        for order in [Order::GoOn, Order::Abort] {
            scene.connections.note_written(&client, 1 << 20, 0, scene.now);
            scene.after(8.1);
            assert_eq!(client.order(), order);
        }
    }

    #[test]
    fn unread_answers_of_all_connections_are_bounded() {
        let mut scene = Fixture::new(|limits| limits.max_unread_bytes = 1000);
        let made = [scene.admit(), scene.admit(), scene.admit()];
        for (each, size) in made.iter().zip([300, 600, 400]) {
            scene.ask(each);
            scene.connections.note_written(each, 0, size, scene.now);
        }
        scene.after(0.1);
        let orders: Vec<Order> = made.iter().map(|each| each.order()).collect();
        assert_eq!(orders, [Order::GoOn, Order::Abort, Order::GoOn]);
        assert_eq!(scene.connections.unread(), 700);
    }

    #[test]
    fn every_connection_may_hold_a_small_request() {
        let scene = Fixture::new(|limits| limits.max_received_bytes = 1000);
        let [large, small] = [scene.admit(), scene.admit()];
        assert!(scene.connections.hold(&large, 0, FREE_BYTES + 1000));
        assert!(scene.connections.hold(&small, 0, FREE_BYTES));
        assert!(!scene.connections.hold(&small, FREE_BYTES, FREE_BYTES + 1));
        scene.connections.remove(&large);
        assert!(scene.connections.hold(&small, FREE_BYTES, FREE_BYTES + 1));
        assert_eq!(scene.connections.received(), 1);
    }

    #[test]
    fn requests_of_one_connection_count_together() {
        let scene = Fixture::new(|limits| limits.max_received_bytes = 1000);
        let one = scene.admit();
        assert!(scene.connections.hold(&one, 0, FREE_BYTES));
        assert!(scene.connections.hold(&one, 0, 600));
        assert!(!scene.connections.hold(&one, 0, 401));
        assert!(scene.connections.hold(&one, FREE_BYTES, 0));
        assert_eq!(scene.connections.received(), 0);
        assert!(scene.connections.hold(&one, 0, FREE_BYTES + 400));
        assert_eq!(scene.connections.received(), 1000);
        scene.connections.remove(&one);
        assert!(scene.connections.hold(&one, 600, 0), "a request ends after its connection");
        assert_eq!(scene.connections.received(), 0);
    }
}
