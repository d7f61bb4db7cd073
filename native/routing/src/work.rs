//! The work of one worker: the requests that the worker's engine has reported, and the requests that this process has sent to the worker.

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

/// The ID of a worker's record. If a worker is removed and added again, its record has a new ID.
pub(crate) type WorkNumber = u64;

/// Time after which a selection counts only as half a request, if the worker's engine does not report.
pub(crate) const HALF_LIFE: Duration = Duration::from_secs(10);

/// Time after which a choice counts only half when workers are compared by their choices. This time is long, so that a lasting preference
/// for one worker counts, and not a burst of requests.
const CHOICE_HALF_LIFE: Duration = Duration::from_secs(60);

/// A decayed number of requests counts as 0 if it is not above this number.
const NEGLIGIBLE: f64 = 0.01;

/// Requests that decay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decaying {
    pub(crate) count: f64,
    /// The time at which `count` was the exact number.
    pub(crate) at: Instant,
}

impl Decaying {
    pub(crate) fn at(self, now: Instant) -> f64 {
        self.halved(now, HALF_LIFE)
    }

    fn halved(self, now: Instant, half_life: Duration) -> f64 {
        let halvings = now.saturating_duration_since(self.at).as_secs_f64() / half_life.as_secs_f64();
        let count = self.count * (-halvings).exp2();
        if count > NEGLIGIBLE { count } else { 0.0 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) requests: f64,
    pub(crate) arrived: Instant,
    /// Number of requests that this process has sent to the worker after the reading.
    pub(crate) begun: u64,
    /// Number of reservations that were finished after the reading.
    pub(crate) ended: u64,
}

/// The work of one worker, according to the data of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) reading: Option<Reading>,
    /// Decaying number of selections without a reservation.
    pub(crate) unreserved: Decaying,
    /// Decaying number of selections and reservations together.
    chosen: Decaying,
    /// Number of requests with which the worker began, and the time at which the worker began.
    initial: (f64, Instant),
    /// Number of reservations that have no token yet.
    waiting: u64,
    /// Number of tokens that the worker must compute for reservations that have no token yet.
    waiting_tokens: u64,
    /// Number of reservations that have their first token.
    decoding: u64,
}

impl Work {
    /// The work of a worker that begins with `requests` requests and `chosen` choices.
    pub(crate) fn new(now: Instant, requests: f64, chosen: f64) -> Self {
        Self {
            reading: None,
            unreserved: Decaying { count: 0.0, at: now },
            chosen: Decaying { count: chosen, at: now },
            initial: (requests, now),
            waiting: 0,
            waiting_tokens: 0,
            decoding: 0,
        }
    }

    /// Whether the worker can be forgotten: it has no reservation and no other request that counts.
    pub(crate) fn is_nothing(&self, now: Instant, max_age: Duration) -> bool {
        self.reserved() == 0
            && self.reported(now, max_age).is_none()
            && self.unreserved.at(now) == 0.0
            && self.begun_with(now) == 0.0
    }

    /// Counts a choice of the worker.
    pub(crate) fn choose(&mut self, now: Instant) {
        self.chosen = Decaying {
            count: self.chosen(now) + 1.0,
            at: now,
        };
    }

    /// The decayed number of choices of the worker.
    pub(crate) fn chosen(&self, now: Instant) -> f64 {
        self.chosen.halved(now, CHOICE_HALF_LIFE)
    }

    /// Open reservations.
    pub(crate) fn reserved(&self) -> u64 {
        self.waiting + self.decoding
    }

    /// The number of requests that the engine has reported, corrected by requests that have begun and ended after the report. None if there
    /// is no recent reading.
    pub(crate) fn reported(&self, now: Instant, max_age: Duration) -> Option<f64> {
        let reading = self
            .reading
            .filter(|reading| now.saturating_duration_since(reading.arrived) <= max_age)?;
        Some((reading.requests + reading.begun as f64 - reading.ended as f64).max(0.0))
    }

    /// Number of requests according to this process alone: reservations, decayed selections, and initial requests.
    pub(crate) fn sent(&self, now: Instant) -> f64 {
        self.reserved() as f64 + self.unreserved.at(now) + self.begun_with(now)
    }

    /// Returns how many of the worker's initial requests still count: this number is halved at the end of each `HALF_LIFE`. A gradual decay
    /// would give a new worker every prompt in the first seconds.
    fn begun_with(&self, now: Instant) -> f64 {
        let (requests, at) = self.initial;
        let halvings = (now.saturating_duration_since(at).as_secs_f64() / HALF_LIFE.as_secs_f64()).floor();
        let left = requests * (-halvings).exp2();
        if left > NEGLIGIBLE { left } else { 0.0 }
    }

    /// The work, in tokens, of `requests` requests. A request that is not reserved, or has its first token, counts as `each` tokens.
    ///
    /// If the worker has fewer requests than waiting reservations, some of these reservations have ended unnoticed, so the waiting
    /// reservations count in proportion.
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

    /// Records that a reservation has its first token.
    pub(crate) fn begin_decoding(&mut self, tokens: u64) {
        self.waiting -= 1;
        self.waiting_tokens -= tokens;
        self.decoding += 1;
    }

    /// Subtracts a reservation. If the reservation was finished and did not expire, its request has just left the engine; the reading does
    /// not show this.
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

/// The source of a worker's requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Requests {
    /// The requests that the engine has reported.
    Reported(f64),
    /// Requests that this process has sent.
    Sent(f64),
}
