//! Reservations: requests that were sent to workers, until their clients finish them or they expire.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::work::{Progress, Work, WorkNumber};

/// A requested reservation.
#[derive(Clone, Copy, Debug)]
pub struct ReservationRequest<'a> {
    /// Name of the reservation, which replaces an open reservation of this name. None for a new name.
    pub id: Option<&'a str>,
    /// The time after which the reservation expires.
    pub time: Duration,
}

/// The prompt and the worker of a reservation.
#[derive(Clone, Debug, Serialize)]
pub struct ReservedPrompt {
    /// Tenant of the worker.
    pub tenant: String,
    /// Routing group of the worker.
    pub group: String,
    /// Model of the prompt.
    pub model: String,
    /// Name of the worker.
    pub instance: String,
    /// Rank of the worker.
    pub rank: i64,
    /// The URL at which the worker takes requests; None if it is not known.
    pub url: Option<String>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: u64,
    /// Number of tokens that the worker must compute.
    pub uncached_tokens: u64,
}

/// A reservation as answers show it.
#[derive(Clone, Debug, Serialize)]
pub struct Reservation {
    /// Name of the reservation.
    pub id: String,
    /// Prompt for which the reservation was made.
    #[serde(flatten)]
    pub reserved: ReservedPrompt,
    /// Progress of the request.
    pub progress: Progress,
    /// Number of tokens of the answer, as last reported by the client.
    pub output_tokens: u64,
    /// Number of seconds until the reservation expires.
    pub expires_in: f64,
}

/// Changes of a reservation. Each update also restarts the time until the reservation expires.
#[derive(Clone, Copy, Debug, Default)]
pub struct Update {
    /// Whether the request has its first token now; false changes nothing.
    pub first_token: bool,
    /// Number of tokens of the answer that were generated. A number below the known number is ignored.
    pub output_tokens: Option<u64>,
    /// The new time until expiry, which later updates restart; None for no change.
    pub time: Option<Duration>,
}

/// Counters of reservations.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ReservationCounts {
    /// Number of open reservations.
    pub open: usize,
    /// Number of reservations that were made.
    pub made: u64,
    /// Number of reservations that were finished.
    pub finished: u64,
    /// Number of reservations that expired.
    pub expired: u64,
    /// Number of reservations that another reservation of the same name has replaced.
    pub replaced: u64,
    /// Number of reservations that were refused because the maximum number was open.
    pub refused: u64,
}

/// The error if the maximum number of reservations is open.
#[derive(Clone, Copy, Debug)]
pub struct TooManyReservations {
    /// Maximum number of open reservations.
    pub limit: usize,
}

/// An open reservation.
#[derive(Debug)]
pub(crate) struct OpenReservation {
    reserved: ReservedPrompt,
    worker: Option<WorkNumber>,
    progress: Progress,
    output_tokens: u64,
    time: Duration,
    end: (Instant, u64),
}

impl OpenReservation {
    pub(crate) fn view(&self, id: &Arc<str>, now: Instant) -> Reservation {
        Reservation {
            id: id.to_string(),
            reserved: self.reserved.clone(),
            progress: self.progress,
            output_tokens: self.output_tokens,
            expires_in: self.end.0.saturating_duration_since(now).as_secs_f64(),
        }
    }
}

/// All open reservations.
#[derive(Debug)]
pub(crate) struct Reservations {
    pub(crate) open: HashMap<Arc<str>, OpenReservation>,
    /// The names of reservations, in the order in which the reservations expire.
    pub(crate) ends: BTreeMap<(Instant, u64), Arc<str>>,
    limit: usize,
    /// Counts up, so that new names, and the keys of `ends`, are unique.
    serial: u64,
    secrets: [RandomState; 2],
    pub(crate) counts: ReservationCounts,
}

impl Reservations {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            open: HashMap::new(),
            ends: BTreeMap::new(),
            limit,
            serial: 0,
            secrets: [RandomState::new(), RandomState::new()],
            counts: ReservationCounts::default(),
        }
    }

    /// Returns an error if a reservation of this name would exceed the limit.
    pub(crate) fn check_room(&mut self, id: Option<&str>) -> Result<(), TooManyReservations> {
        if self.open.len() < self.limit || id.is_some_and(|id| self.open.contains_key(id)) {
            return Ok(());
        }
        self.counts.refused += 1;
        Err(TooManyReservations { limit: self.limit })
    }

    /// Ends the open reservation of this name, if there is one; another reservation replaces it.
    pub(crate) fn replace(&mut self, id: &str, workers: &mut HashMap<WorkNumber, Work>) {
        if self.end(id, workers, true).is_some() {
            self.counts.replaced += 1;
        }
    }

    /// Adds a reservation, which counts as work of `worker`, and returns it. If it has no name, it gets an unpredictable one.
    pub(crate) fn add(
        &mut self,
        (id, time): (Option<&str>, Duration),
        reserved: ReservedPrompt,
        worker: Option<WorkNumber>,
        now: Instant,
    ) -> Reservation {
        self.serial += 1;
        let id: Arc<str> = id.map_or_else(|| self.name(), Arc::from);
        let end = (now + time, self.serial);
        let open = OpenReservation {
            reserved,
            worker,
            progress: Progress::Waiting,
            output_tokens: 0,
            time,
            end,
        };
        let view = open.view(&id, now);
        self.ends.insert(end, id.clone());
        self.open.insert(id, open);
        self.counts.made += 1;
        view
    }

    fn name(&self) -> Arc<str> {
        let [one, other] = self.secrets.each_ref().map(|secret| secret.hash_one(self.serial));
        format!("{one:016x}{other:016x}").into()
    }

    /// Ends the reservations that have expired.
    pub(crate) fn expire(&mut self, now: Instant, workers: &mut HashMap<WorkNumber, Work>) {
        while let Some((&(end, _), id)) = self.ends.first_key_value()
            && end <= now
        {
            let id = id.clone();
            self.end(&id, workers, false);
            self.counts.expired += 1;
        }
    }

    /// Removes a reservation, also from the work of its worker.
    pub(crate) fn end(
        &mut self,
        id: &str,
        workers: &mut HashMap<WorkNumber, Work>,
        is_finished: bool,
    ) -> Option<(Arc<str>, OpenReservation)> {
        let (id, open) = self.open.remove_entry(id)?;
        self.ends.remove(&open.end);
        if let Some(work) = open.worker.and_then(|worker| workers.get_mut(&worker)) {
            work.release(open.progress, open.reserved.uncached_tokens, is_finished);
        }
        Some((id, open))
    }

    pub(crate) fn update(
        &mut self,
        id: &str,
        update: &Update,
        now: Instant,
        workers: &mut HashMap<WorkNumber, Work>,
    ) -> Option<Reservation> {
        let (id, _) = self.open.get_key_value(id)?;
        let id = id.clone();
        let open = self.open.get_mut(&id)?;
        if update.first_token && open.progress == Progress::Waiting {
            open.progress = Progress::Decoding;
            if let Some(work) = open.worker.and_then(|worker| workers.get_mut(&worker)) {
                work.begin_decoding(open.reserved.uncached_tokens);
            }
        }
        open.output_tokens = open.output_tokens.max(update.output_tokens.unwrap_or(0));
        open.time = update.time.unwrap_or(open.time);
        self.serial += 1;
        self.ends.remove(&open.end);
        open.end = (now + open.time, self.serial);
        self.ends.insert(open.end, id.clone());
        Some(open.view(&id, now))
    }
}
