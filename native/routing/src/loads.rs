//! The work of each worker: the requests that the worker's engine reports, and the requests that this process has sent to the worker.
//!
//! Theory of operation. A *reading* is the number of requests that an engine reports, at the time of the report. Selections and
//! reservations of this process after that time are added to it, and reservations that finish after that time are subtracted. The next
//! reading replaces these corrections. So a client that left without notice costs nothing after the next report. Readings that are too old
//! do not count.
//!
//! If the engine of a worker does not report, the open reservations of the worker count until they are finished or expire. The end of a
//! selection without a reservation is unknown. So such a selection counts as a request that decays by half in each `HALF_LIFE`. Only the
//! proportions between workers matter then, and these are correct for any duration of requests. A worker that joins while other workers
//! have requests begins with their mean number of requests. This number is halved after each `HALF_LIFE`, since some of these requests
//! might have ended without notice.
//!
//! A reservation is *waiting* until its first token, and *decoding* from then on. A waiting reservation counts as the tokens that its
//! worker must compute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

use crate::reservations::{
    Reservation, ReservationCounts, ReservationRequest, Reservations, ReservedPrompt, TooManyReservations, Update,
};
use crate::work::{DecayingCount, Reading, RequestCount, Work, WorkNumber};

/// Number of workers above which idle workers are forgotten. It is four times the number of workers that a service follows by default.
const FORGETTING_WORKERS: usize = 16_384;

/// The work of each worker, which its source name and rank identify, and the reservations. Any thread can use this value.
#[derive(Debug)]
pub struct Loads {
    max_age: Duration,
    state: Mutex<State>,
}

/// Data that a choice reads and changes under one lock, so that the second of two concurrent choices takes the first into account.
#[derive(Debug)]
pub(crate) struct State {
    max_age: Duration,
    numbers: HashMap<String, HashMap<i64, WorkNumber>>,
    work: HashMap<WorkNumber, Work>,
    next: WorkNumber,
    pub(crate) reservations: Reservations,
}

impl Loads {
    /// Creates a value without workers. Readings older than `max_age` do not count. At most `max_reservations` reservations can be open.
    pub fn new(max_age: Duration, max_reservations: usize) -> Self {
        Self {
            max_age,
            state: Mutex::new(State {
                max_age,
                numbers: HashMap::new(),
                work: HashMap::new(),
                next: 0,
                reservations: Reservations::new(max_reservations),
            }),
        }
    }

    /// Locks the state, and ends the reservations that have expired.
    pub(crate) fn lock(&self, now: Instant) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let State { reservations, work, .. } = &mut *state;
        reservations.expire(now, work);
        state
    }

    /// Stores a reading that arrived `age` ago. The reading is ignored if it is older than the stored one.
    pub fn report(&self, source: &str, rank: i64, requests: f64, age: Duration) {
        let now = Instant::now();
        let Some(arrived) = now.checked_sub(age) else { return };
        let mut state = self.state.lock();
        let number = state.number(source, rank, now, (0.0, 0.0));
        let Some(work) = state.work.get_mut(&number) else { return };
        if work.reading.is_none_or(|known| known.arrived < arrived) {
            work.reading = Some(Reading {
                requests,
                arrived,
                begun: 0,
                ended: 0,
            });
        }
    }

    /// Adds a worker. Its numbers of requests and choices begin with the means of its `peers`' reservations and choices. Does nothing if
    /// the worker is known.
    pub fn join(&self, source: &str, rank: i64, peers: &[(String, i64)]) {
        let now = Instant::now();
        let mut state = self.lock(now);
        let known: Vec<&Work> = (peers.iter()).filter_map(|(source, rank)| state.of(source, *rank)).collect();
        let mean = |of: &dyn Fn(&Work) -> f64| known.iter().map(|work| of(work)).sum::<f64>() / known.len().max(1) as f64;
        let begin = (mean(&|work| work.reserved() as f64), mean(&|work| work.chosen(now)));
        state.number(source, rank, now, begin);
    }

    /// Forgets a worker. Its reservations stay open, but count for no worker.
    pub fn remove(&self, source: &str, rank: i64) {
        let mut state = self.state.lock();
        let Some(ranks) = state.numbers.get_mut(source) else { return };
        let number = ranks.remove(&rank);
        if ranks.is_empty() {
            state.numbers.remove(source);
        }
        if let Some(number) = number {
            state.work.remove(&number);
        }
    }

    /// The number of requests of a worker: the number that its engine has reported, corrected by requests that began or ended after the
    /// report. None without a recent reading.
    pub fn requests(&self, source: &str, rank: i64) -> Option<f64> {
        let now = Instant::now();
        let state = self.lock(now);
        state.of(source, rank)?.reported_requests(now, self.max_age)
    }
}

impl State {
    /// The work of a worker; None if the worker is unknown.
    pub(crate) fn of(&self, source: &str, rank: i64) -> Option<&Work> {
        self.work.get(self.numbers.get(source)?.get(&rank)?)
    }

    /// The reservations, and the work of all workers.
    pub(crate) fn parts(&mut self) -> (&mut Reservations, &mut HashMap<WorkNumber, Work>) {
        (&mut self.reservations, &mut self.work)
    }

    /// Returns the ID of a worker's record. A new worker begins with the given numbers of requests and choices, which decay.
    fn number(&mut self, source: &str, rank: i64, now: Instant, (requests, chosen): (f64, f64)) -> WorkNumber {
        if let Some(number) = self.numbers.get(source).and_then(|ranks| ranks.get(&rank)) {
            return *number;
        }
        if self.work.len() >= FORGETTING_WORKERS {
            self.forget_idle(now);
        }
        let number = self.next;
        self.next += 1;
        self.work.insert(number, Work::new(now, requests, chosen));
        self.numbers.entry(source.to_owned()).or_default().insert(rank, number);
        number
    }

    fn forget_idle(&mut self, now: Instant) {
        let (work, max_age) = (&mut self.work, self.max_age);
        work.retain(|_, one| !one.is_idle(now, max_age));
        self.numbers.retain(|_, ranks| {
            ranks.retain(|_, number| work.contains_key(number));
            !ranks.is_empty()
        });
    }

    /// The number of requests of a worker; None if it is unknown.
    pub(crate) fn requests(&self, source: &str, rank: i64, now: Instant) -> Option<RequestCount> {
        let work = self.of(source, rank)?;
        Some(match work.reported_requests(now, self.max_age) {
            Some(requests) => RequestCount::Reported(requests),
            None => RequestCount::Sent(work.sent_requests(now)),
        })
    }

    /// Counts a request that was sent to a worker, with or without a reservation. Returns the ID of the worker's record.
    pub(crate) fn begin(&mut self, (source, rank): (&str, i64), now: Instant, is_reserved: bool) -> WorkNumber {
        let number = self.number(source, rank, now, (0.0, 0.0));
        if let Some(work) = self.work.get_mut(&number) {
            work.choose(now);
            if let Some(reading) = &mut work.reading {
                reading.begun += 1;
            }
            if !is_reserved {
                work.unreserved = DecayingCount {
                    count: work.unreserved.at(now) + 1.0,
                    at: now,
                };
            }
        }
        number
    }
}

impl State {
    /// Ends the open reservation of this name, if there is one. Returns an error if the limit then permits no further reservation.
    pub(crate) fn make_room(&mut self, id: Option<&str>) -> Result<(), TooManyReservations> {
        let (reservations, workers) = self.parts();
        reservations.check_room(id)?;
        if let Some(id) = id {
            reservations.replace(id, workers);
        }
        Ok(())
    }

    /// Adds a reservation. `worker` is the source and the rank of the worker; None if the service does not follow the worker.
    pub(crate) fn reserve(
        &mut self,
        wanted: &ReservationRequest<'_>,
        reserved: ReservedPrompt,
        worker: Option<(&str, i64)>,
        now: Instant,
    ) -> Reservation {
        let number = worker.map(|worker| self.begin(worker, now, true));
        let (reservations, workers) = self.parts();
        if let Some(work) = number.and_then(|number| workers.get_mut(&number)) {
            work.reserve(reserved.uncached_tokens);
        }
        reservations.add((wanted.id, wanted.time), reserved, number, now)
    }
}

impl Loads {
    /// Returns a reservation; None if it is not open.
    pub fn reservation(&self, id: &str) -> Option<Reservation> {
        let now = Instant::now();
        let state = self.lock(now);
        let (id, open) = state.reservations.open.get_key_value(id)?;
        Some(open.view(id, now))
    }

    /// Changes a reservation and returns it. Returns None if the reservation is not open.
    pub fn update(&self, id: &str, update: &Update) -> Option<Reservation> {
        self.update_at(id, update, Instant::now())
    }

    fn update_at(&self, id: &str, update: &Update, now: Instant) -> Option<Reservation> {
        let mut state = self.lock(now);
        let (reservations, workers) = state.parts();
        reservations.update(id, update, now, workers)
    }

    /// Ends a reservation, and returns its last state. Returns None if the reservation is not open.
    pub fn finish(&self, id: &str) -> Option<Reservation> {
        self.finish_at(id, Instant::now())
    }

    fn finish_at(&self, id: &str, now: Instant) -> Option<Reservation> {
        let mut state = self.lock(now);
        let (reservations, workers) = state.parts();
        let (id, open) = reservations.end(id, workers, true)?;
        reservations.counts.finished += 1;
        Some(open.view(&id, now))
    }

    /// Returns the `limit` reservations that expire first, in this order.
    pub fn reservations(&self, limit: usize) -> Vec<Reservation> {
        let now = Instant::now();
        let state = self.lock(now);
        let Reservations { open, ends, .. } = &state.reservations;
        (ends.values().take(limit))
            .filter_map(|id| Some(open.get(id)?.view(id, now)))
            .collect()
    }

    /// Returns the counters of reservations.
    pub fn reservation_counts(&self) -> ReservationCounts {
        let state = self.lock(Instant::now());
        ReservationCounts {
            open: state.reservations.open.len(),
            ..state.reservations.counts
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::work::HALF_LIFE;

    const NOW: Duration = Duration::ZERO;

    fn loads() -> Loads {
        Loads::new(Duration::from_secs(60), 100)
    }

    fn select(loads: &Loads, rank: i64) {
        let now = Instant::now();
        loads.lock(now).begin(("a", rank), now, false);
    }

    fn sent(loads: &Loads, now: Instant) -> f64 {
        loads.lock(now).of("a", 0).map_or(0.0, |work| work.sent_requests(now))
    }

    #[test]
    fn selections_count_until_the_next_reading() {
        let loads = loads();
        assert_eq!(loads.requests("a", 0), None);
        select(&loads, 0);
        loads.report("a", 0, 3.0, NOW);
        select(&loads, 0);
        select(&loads, 0);
        select(&loads, 1);
        assert_eq!(loads.requests("a", 0), Some(5.0));
        loads.report("a", 0, 4.0, NOW);
        assert_eq!(loads.requests("a", 0), Some(4.0));
    }

    #[test]
    fn selections_decay_without_readings() {
        let loads = loads();
        for _ in 0..4 {
            select(&loads, 0);
        }
        let now = Instant::now();
        assert!((3.9..=4.0).contains(&sent(&loads, now)));
        let later = sent(&loads, now + HALF_LIFE);
        assert!((1.9..=2.0).contains(&later), "{later}");
        assert_eq!(sent(&loads, now + 20 * HALF_LIFE), 0.0);
        loads.remove("a", 0);
        assert_eq!(sent(&loads, now), 0.0);
        assert!(loads.lock(now).numbers.is_empty());
    }

    #[test]
    fn an_older_reading_is_ignored_and_one_that_is_too_old_does_not_count() {
        let loads = loads();
        loads.report("a", 0, 3.0, Duration::from_secs(1));
        loads.report("a", 0, 9.0, Duration::from_secs(2));
        assert_eq!(loads.requests("a", 0), Some(3.0));
        loads.report("a", 1, 3.0, Duration::from_secs(61));
        assert_eq!(loads.requests("a", 1), None);
    }

    #[test]
    fn idle_workers_are_forgotten() {
        let loads = loads();
        let now = Instant::now();
        let mut state = loads.lock(now);
        for rank in 0..FORGETTING_WORKERS as i64 {
            state.begin(("a", rank), now, false);
        }
        state.begin(("b", 0), now + 20 * HALF_LIFE, false);
        assert_eq!((state.work.len(), state.numbers.len()), (1, 1));
    }

    #[test]
    fn a_worker_that_joins_begins_with_the_mean_of_its_peers() {
        let loads = loads();
        let now = Instant::now();
        let peers = ["a", "b", "other"].map(|name| (name.to_owned(), 0));
        loads.join("a", 0, &peers);
        for worker in [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("other", 0)] {
            let mut state = loads.lock(now);
            let number = state.begin(worker, now, true);
            state.work.get_mut(&number).unwrap().reserve(1);
        }
        loads.join("c", 0, &peers[..2]);
        loads.join("a", 0, &peers[..2]);
        let later = Instant::now();
        let sent = |name: &str, at: Instant| loads.lock(now).of(name, 0).unwrap().sent_requests(at);
        assert_eq!(sent("a", later), 3.0);
        assert_eq!(sent("c", later), 2.0);
        assert_eq!(sent("c", later + HALF_LIFE), 1.0);
        let chosen = loads.lock(later).of("c", 0).unwrap().chosen(later);
        assert!((1.99..=2.0).contains(&chosen), "{chosen}");
    }

    // --- reservations

    const WORKERS: [&str; 3] = ["a", "b", "c"];
    const LIMIT: usize = 12;

    /// An action of a client. There are few names, so that clients reuse names of other clients and of ended reservations.
    #[derive(Clone, Debug)]
    enum Step {
        Reserve {
            id: Option<u8>,
            worker: usize,
            tokens: u64,
            seconds: u64,
        },
        Update {
            id: u8,
            first_token: bool,
            seconds: Option<u64>,
        },
        Finish {
            id: u8,
        },
        Report {
            worker: usize,
            requests: u64,
        },
        Remove {
            worker: usize,
        },
        Wait {
            seconds: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let (worker, id) = (0..WORKERS.len(), 0..20_u8);
        prop_oneof![
            4 => (prop::option::of(id.clone()), worker.clone(), 0..2_000_u64, 1..40_u64)
                .prop_map(|(id, worker, tokens, seconds)| Step::Reserve { id, worker, tokens, seconds }),
            3 => (id.clone(), any::<bool>(), prop::option::of(1..40_u64))
                .prop_map(|(id, first_token, seconds)| Step::Update { id, first_token, seconds }),
            3 => id.prop_map(|id| Step::Finish { id }),
            1 => (worker.clone(), 0..9_u64).prop_map(|(worker, requests)| Step::Report { worker, requests }),
            1 => worker.prop_map(|worker| Step::Remove { worker }),
            2 => (1..20_u64).prop_map(|seconds| Step::Wait { seconds }),
        ]
    }

    /// A reservation in the model. `worker` is the position of its worker in `WORKERS`, and the number of times that this worker was
    /// removed before.
    #[derive(Clone, Debug)]
    struct Known {
        id: String,
        worker: (usize, usize),
        tokens: u64,
        decodes: bool,
        seconds: u64,
        end: Instant,
    }

    fn reserved(tokens: u64) -> ReservedPrompt {
        ReservedPrompt {
            tenant: "t".into(),
            group: "g".into(),
            model: "m".into(),
            instance: "i".into(),
            rank: 0,
            url: None,
            prompt_tokens: 2_000,
            uncached_tokens: tokens,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

        /// The counts of each worker equal those of a model that lists all reservations. Clients can omit, repeat or invent calls.
        #[test]
        fn counts_equal_those_of_a_list(steps in prop::collection::vec(step(), 1..250)) {
            let loads = Loads::new(Duration::from_secs(5), LIMIT);
            let mut now = Instant::now();
            let mut known: Vec<Known> = Vec::new();
            let mut removed = [0; WORKERS.len()];
            let mut made = 0;
            for step in steps {
                match step {
                    Step::Reserve { id, worker, tokens, seconds } => {
                        let id = id.map(|id| id.to_string());
                        let mut state = loads.lock(now);
                        known.retain(|one| one.end > now);
                        let is_replaced = known.iter().any(|one| Some(&one.id) == id.as_ref());
                        let room = state.make_room(id.as_deref());
                        prop_assert_eq!(room.is_ok(), is_replaced || known.len() < LIMIT);
                        if room.is_ok() {
                            known.retain(|one| Some(&one.id) != id.as_ref());
                            let wanted = ReservationRequest { id: id.as_deref(), time: Duration::from_secs(seconds) };
                            let place = Some((WORKERS[worker], 0));
                            let reservation = state.reserve(&wanted, reserved(tokens), place, now);
                            made += 1;
                            prop_assert!(id.is_none_or(|id| id == reservation.id));
                            known.push(Known {
                                id: reservation.id, worker: (worker, removed[worker]), tokens, decodes: false, seconds,
                                end: now + Duration::from_secs(seconds),
                            });
                        }
                    }
                    Step::Update { id, first_token, seconds } => {
                        let time = seconds.map(Duration::from_secs);
                        let update = Update { first_token, output_tokens: None, time };
                        let updated = loads.update_at(&id.to_string(), &update, now);
                        let open = known.iter_mut().find(|one| one.id == id.to_string() && one.end > now);
                        prop_assert_eq!(updated.is_some(), open.is_some());
                        if let Some(open) = open {
                            open.decodes |= first_token;
                            open.seconds = seconds.unwrap_or(open.seconds);
                            open.end = now + Duration::from_secs(open.seconds);
                        }
                    }
                    Step::Finish { id } => {
                        let before = known.len();
                        let ended = loads.finish_at(&id.to_string(), now);
                        known.retain(|one| one.end > now);
                        let open = known.len();
                        known.retain(|one| one.id != id.to_string());
                        prop_assert_eq!(ended.is_some(), known.len() < open, "{} of {}", open, before);
                    }
                    Step::Report { worker, requests } => loads.report(WORKERS[worker], 0, requests as f64, Duration::ZERO),
                    Step::Remove { worker } => {
                        loads.remove(WORKERS[worker], 0);
                        removed[worker] += 1;
                    }
                    Step::Wait { seconds } => now += Duration::from_secs(seconds),
                }
                known.retain(|one| one.end > now);
                let state = loads.lock(now);
                prop_assert_eq!(state.reservations.open.len(), known.len());
                prop_assert_eq!(state.reservations.ends.len(), known.len());
                for (worker, name) in WORKERS.iter().enumerate() {
                    let own = || known.iter().filter(|one| one.worker == (worker, removed[worker]));
                    let waiting: u64 = own().filter(|one| !one.decodes).map(|one| one.tokens).sum();
                    let work = state.of(name, 0);
                    prop_assert_eq!(work.map_or(0, Work::reserved), own().count() as u64);
                    let all = own().count() as f64;
                    let decoding = own().filter(|one| one.decodes).count() as f64;
                    prop_assert_eq!(work.map_or(0.0, |work| work.tokens(all, 256.0)), waiting as f64 + 256.0 * decoding);
                }
            }
            let counts = loads.lock(now).reservations.counts;
            prop_assert_eq!(counts.made, made);
            prop_assert_eq!(counts.made, counts.finished + counts.expired + counts.replaced + known.len() as u64);
        }
    }

    #[test]
    fn a_report_replaces_counted_requests() {
        let loads = Loads::new(Duration::from_secs(60), LIMIT);
        let now = Instant::now();
        let reserve = |seconds: u64| {
            let wanted = ReservationRequest {
                id: None,
                time: Duration::from_secs(seconds),
            };
            loads.lock(now).reserve(&wanted, reserved(100), Some(("a", 0)), now).id
        };
        let [first, second] = [reserve(60), reserve(60)];
        assert_eq!(loads.requests("a", 0), None, "no engine reports");
        loads.report("a", 0, 5.0, Duration::ZERO);
        reserve(60);
        assert_eq!(loads.requests("a", 0), Some(6.0));
        loads.finish(&first);
        assert_eq!(loads.requests("a", 0), Some(5.0), "the engine has one fewer");
        loads.report("a", 0, 0.0, Duration::ZERO);
        assert_eq!(loads.requests("a", 0), Some(0.0), "their clients have left");
        loads.finish(&second);
        assert_eq!(loads.requests("a", 0), Some(0.0), "not below none");
        let state = loads.lock(now);
        assert_eq!(state.of("a", 0).unwrap().tokens(0.0, 256.0), 0.0);
    }

    #[test]
    fn names_are_not_repeated() {
        let loads = Loads::new(Duration::from_secs(60), 1_000);
        let now = Instant::now();
        let wanted = ReservationRequest {
            id: None,
            time: Duration::from_secs(60),
        };
        let mut state = loads.lock(now);
        let names: std::collections::HashSet<String> = (0..1_000)
            .map(|_| state.reserve(&wanted, reserved(1), None, now).id)
            .collect();
        assert_eq!(names.len(), 1_000);
        assert!(names.iter().all(|name| name.len() == 32));
    }
}
