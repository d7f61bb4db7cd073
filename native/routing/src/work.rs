//! The work of one worker: requests that its engine has reported, and requests that this process has sent.

use std::time::{Duration, Instant};

use serde::Serialize;

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Progress {
    /// The request has no token yet.
    Waiting,
    /// The first token has been sent.
    Decoding,
}

/// The ID of a worker's record. A worker that is removed and added again gets a record with a new ID.
pub(crate) type WorkNumber = u64;

/// Time in which a selection decays to half a request, if the engine does not report.
pub(crate) const HALF_LIFE: Duration = Duration::from_secs(10);

/// Time in which a choice decays by half, where workers are compared by their choices. The time is long, so that a lasting preference for
/// one worker counts, but a burst of requests does not.
const CHOICE_HALF_LIFE: Duration = Duration::from_secs(60);

/// Maximum decayed number of requests that counts as 0.
const NEGLIGIBLE_REQUESTS: f64 = 0.01;

/// A number of requests that decays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecayingCount {
    pub(crate) count: f64,
    /// The time at which the number was `count`.
    pub(crate) at: Instant,
}

impl DecayingCount {
    pub(crate) fn at(self, now: Instant) -> f64 {
        self.halved(now, HALF_LIFE)
    }

    fn halved(self, now: Instant, half_life: Duration) -> f64 {
        let halvings = now.saturating_duration_since(self.at).as_secs_f64() / half_life.as_secs_f64();
        let count = self.count * (-halvings).exp2();
        if count > NEGLIGIBLE_REQUESTS { count } else { 0.0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) requests: f64,
    pub(crate) arrived: Instant,
    /// Number of requests that this process has sent to the worker after the time `arrived`.
    pub(crate) begun: u64,
    /// Number of reservations that were finished after the time `arrived`.
    pub(crate) ended: u64,
}

/// The work of one worker, as far as this process knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) reading: Option<Reading>,
    /// Number of selections without a reservation; it decays.
    pub(crate) unreserved: DecayingCount,
    /// Number of selections and reservations together; it decays.
    chosen: DecayingCount,
    /// Number of requests with which the worker began, and the time of the beginning.
    initial: (f64, Instant),
    /// Number of waiting reservations, which have no token yet.
    waiting: u64,
    /// Number of tokens that the worker must compute for waiting reservations.
    waiting_tokens: u64,
    /// Number of decoding reservations, which have their first token.
    decoding: u64,
}

impl Work {
    /// The work of a new worker that begins with `requests` requests and `chosen` choices.
    pub(crate) fn new(now: Instant, requests: f64, chosen: f64) -> Self {
        Self {
            reading: None,
            unreserved: DecayingCount { count: 0.0, at: now },
            chosen: DecayingCount { count: chosen, at: now },
            initial: (requests, now),
            waiting: 0,
            waiting_tokens: 0,
            decoding: 0,
        }
    }

    /// Whether the worker can be forgotten: it has no reservation, and no other request counts.
    pub(crate) fn is_idle(&self, now: Instant, max_age: Duration) -> bool {
        self.reserved() == 0
            && self.reported_requests(now, max_age).is_none()
            && self.unreserved.at(now) == 0.0
            && self.initial_requests(now) == 0.0
    }

    /// Counts a choice of the worker.
    pub(crate) fn choose(&mut self, now: Instant) {
        self.chosen = DecayingCount {
            count: self.chosen(now) + 1.0,
            at: now,
        };
    }

    /// The decayed number of choices of the worker.
    pub(crate) fn chosen(&self, now: Instant) -> f64 {
        self.chosen.halved(now, CHOICE_HALF_LIFE)
    }

    /// Number of open reservations.
    pub(crate) fn reserved(&self) -> u64 {
        self.waiting + self.decoding
    }

    /// The number of requests that the engine has reported, corrected by requests that began or ended after the report. None without a
    /// recent reading.
    pub(crate) fn reported_requests(&self, now: Instant, max_age: Duration) -> Option<f64> {
        let reading = self
            .reading
            .filter(|reading| now.saturating_duration_since(reading.arrived) <= max_age)?;
        Some((reading.requests + reading.begun as f64 - reading.ended as f64).max(0.0))
    }

    /// The number of requests as this process knows it: reservations, decayed selections, and requests with which the worker began.
    pub(crate) fn sent_requests(&self, now: Instant) -> f64 {
        self.reserved() as f64 + self.unreserved.at(now) + self.initial_requests(now)
    }

    /// Returns how many of the requests with which the worker began count: the number is halved at the end of each `HALF_LIFE`. With a
    /// gradual decay, a new worker would get every prompt in the first seconds.
    fn initial_requests(&self, now: Instant) -> f64 {
        let (requests, at) = self.initial;
        let halvings = (now.saturating_duration_since(at).as_secs_f64() / HALF_LIFE.as_secs_f64()).floor();
        let left = requests * (-halvings).exp2();
        if left > NEGLIGIBLE_REQUESTS { left } else { 0.0 }
    }

    /// The work, in tokens, of `requests` requests. A request without a reservation, or with its first token, counts as `each` tokens.
    ///
    /// If there are fewer requests than waiting reservations, some reservations have ended without notice, so the waiting ones count in
    /// proportion.
    pub(crate) fn tokens(&self, requests: f64, each: f64) -> f64 {
        let waiting = self.waiting as f64;
        let share = if waiting > requests { requests / waiting } else { 1.0 };
        share * self.waiting_tokens as f64 + each * (requests - waiting).max(0.0)
    }

    /// Counts a reservation for which the worker must compute `tokens` tokens.
    pub(crate) fn reserve(&mut self, tokens: u64) {
        self.waiting += 1;
        self.waiting_tokens += tokens;
    }

    /// Records that a reservation has its first token, so that it is decoding.
    pub(crate) fn begin_decoding(&mut self, tokens: u64) {
        self.waiting -= 1;
        self.waiting_tokens -= tokens;
        self.decoding += 1;
    }

    /// Subtracts a reservation that was finished or has expired. If it was finished, its request has just left the engine, but the reading
    /// still counts this request.
    pub(crate) fn release(&mut self, progress: Progress, tokens: u64, is_finished: bool) {
        match progress {
            Progress::Waiting => {
                self.waiting -= 1;
                self.waiting_tokens -= tokens;
            }
            Progress::Decoding => self.decoding -= 1,
        }
        if let Some(reading) = &mut self.reading
            && is_finished
        {
            reading.ended += 1;
        }
    }
}

/// The source of a worker's number of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RequestCount {
    /// The engine has reported it.
    Reported(f64),
    /// This process has counted it.
    Sent(f64),
}
