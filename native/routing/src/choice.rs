//! Selection of the worker for a prompt.
//!
//! Theory of operation. Candidates that take no requests are left out if another candidate takes them. So a worker that is drained or STALE,
//! or whose address does not accept connections, gets a prompt only if no other worker can take it. The score of each remaining candidate is the one
//! that `prefix-aware` computes (`score`). It is the share of the prompt that the candidate must compute, from 0 to 1, plus a load term for
//! its requests. In the load term, a request counts as `REQUEST_TOKENS` tokens of work. So a cached prefix saves as much as its computation
//! would cost, and a short or shared prefix does not outweigh a queue. Of candidates with equal scores, the one that computes least is
//! chosen, since avoided work helps all requests. Candidates that are equal in both values are chosen in rotation. The rotation of each
//! process begins at a random position, so that many routers do not send to one worker at the same time.
//!
//! *Loads* are the numbers of requests in flight. If the request states loads, they count. Otherwise the numbers that engines report count,
//! corrected by requests that were sent or finished after the report (`loads`). A candidate without a recent report then has the mean load
//! of the other candidates, so that it neither attracts nor repels prompts. If no engine reports, the reservations and the recent
//! selections of this process count. A reservation without a first token counts as the tokens that its worker must compute.
//!
//! *Sessions*: each session has its own worker, which is the same in all processes. The score of this worker is a little lower. So the
//! turns of a conversation stay together if the other terms of the scores are about equal.
//!
//! *Tiers without removals*: for some tiers, engines announce no removals. On these tiers, the blocks of an EXACT worker have the weight of
//! DEGRADED; on all other tiers, they have the weight of EXACT.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use serde::Deserialize;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::loads::{Loads, State};
use crate::reservations::{Reservation, ReservationRequest, ReservedPrompt, TooManyReservations};
use crate::score::{self, LoadWeights, TierWeights};
use crate::ties::{Tie, Ties};
use crate::trust::{State as TrustState, Trust};
use crate::weights::Weights;
use crate::work::RequestCount;
use kvevents_index::holders::placements::TIERS;
use kvevents_index::keys;

/// A tier that has a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Memory of the GPU.
    Gpu,
    /// Memory of the host.
    Cpu,
    /// Disks and remote stores.
    Disk,
    /// All tiers whose medium is unknown; they have the lowest weight.
    Other,
}

/// The weights of cached tokens, trust states and loads in a score.
#[derive(Clone, Debug, Deserialize)]
pub struct ScoreWeights {
    tiers: Weights<Tier>,
    trust: Weights<TrustState>,
    wait_weight: f64,
    load_weight: f64,
}

impl ScoreWeights {
    /// Returns a copy of these weights, with the changes that a request states.
    pub fn updated(
        &self,
        tiers: &Weights<Tier>,
        trust: &Weights<TrustState>,
        wait_weight: Option<f64>,
        load_weight: Option<f64>,
    ) -> Self {
        Self {
            tiers: self.tiers.updated(tiers),
            trust: self.trust.updated(trust),
            wait_weight: wait_weight.unwrap_or(self.wait_weight),
            load_weight: load_weight.unwrap_or(self.load_weight),
        }
    }

    /// Returns the weight of a trust state.
    fn weight_of_trust(&self, state: TrustState) -> f64 {
        let entry = self.trust.0.iter().find(|(known, _)| *known == state);
        entry.map_or(0.0, |(_, weight)| *weight)
    }
}

/// Number that is added to the requests of each candidate before they are compared with the mean. Without this number, one request in an
/// idle fleet would be many times the mean, and outweigh a long cached prefix (figures: docs/adr/0008-prefix-aware-score.md).
const BASE_REQUESTS: f64 = 4.0;

/// Number of tokens of work as which a request counts, as in `kvevents.routing.policies`.
const REQUEST_TOKENS: f64 = 256.0;

/// Reduction of the score of a session's own worker: another worker is chosen only if its score is lower by more than a tenth of the
/// prompt.
const SESSION_BONUS: f64 = 0.1;

/// Maximum load. A larger load counts as this number, so that no product is infinite.
const MAX_REQUESTS: f64 = 1e12;

/// The cache of a candidate with at most this number of requests counts, except if the candidate was chosen too often in the last minute.
const GUARD_REQUESTS: f64 = 8.0;

/// The number of cached tokens on each tier; None for a worker that the index does not know.
#[derive(Clone, Copy, Debug)]
pub struct Tiers(pub Option<[u32; 3]>);

impl Serialize for Tiers {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let tokens = self.0.as_ref().map_or(&[][..], |tokens| tokens);
        let mut map = to.serialize_map(Some(tokens.len()))?;
        for (name, tokens) in TIERS.iter().zip(tokens) {
            map.serialize_entry(name, tokens)?;
        }
        map.end()
    }
}

/// Maps the names of a worker's labels to their values.
pub type Labels = BTreeMap<String, String>;

/// The trust in one worker.
#[derive(Debug, serde::Serialize)]
pub struct WorkerTrust<'a> {
    /// Name of the worker's instance.
    pub instance: &'a str,
    /// Rank of the worker.
    pub rank: i64,
    /// The URL at which the instance takes requests; None if it is not known.
    pub url: Option<&'a str>,
    /// Labels of the instance.
    pub labels: &'a Labels,
    /// The trust in the worker.
    pub trust: &'a Trust,
}

/// The source of the loads of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFrom {
    /// No loads are known.
    None,
    /// The request has stated the loads.
    Request,
    /// Engines have reported the loads.
    Engines,
    /// The loads are the reservations and the recent selections of this process.
    Selections,
}

/// A candidate, and the terms of its score.
#[derive(Debug, serde::Serialize)]
pub struct ExplainedCandidate<'a> {
    /// Name of the instance.
    pub instance: &'a str,
    /// Rank of the worker.
    pub rank: i64,
    /// The URL at which the instance takes requests; None if it is not known.
    pub url: Option<&'a str>,
    /// Labels of the instance.
    pub labels: &'a Labels,
    /// The score, the smaller the better.
    pub score: f64,
    /// The share of the prompt that the candidate would compute.
    pub uncached: f64,
    /// The load term of the score.
    pub load: f64,
    /// Whether the candidate's cache did not count because the candidate had too many requests.
    pub hot: bool,
    /// Whether the candidate is the session's own worker, whose score is reduced.
    pub session: bool,
    /// Number of tokens of the prompt that the candidate holds, over all tiers.
    pub tokens: u32,
    /// For each tier, the number of tokens of the prompt that the candidate holds.
    pub tiers: Tiers,
    /// The trust in these tokens.
    pub trust: &'a Trust,
    /// Tiers to which the state EXACT of the candidate's stream does not apply, since the engine announces no removals from them.
    pub inexact_tiers: &'a [String],
    /// The number of requests that counted as the candidate's load; None if the mean of the other candidates counted.
    pub requests: Option<f64>,
}

/// The answer of `/v1/select`.
#[derive(Debug, serde::Serialize)]
pub struct Selection<'a> {
    /// Name of the instance.
    pub instance: &'a str,
    /// Rank of the worker.
    pub rank: i64,
    /// The URL at which the instance takes requests; None if it is not known.
    pub url: Option<&'a str>,
    /// Labels of the instance.
    pub labels: &'a Labels,
    /// Whether the worker can be reached. If false, no candidate can be reached, and nothing is reserved.
    pub usable: bool,
    /// The score, the smaller the better.
    pub score: f64,
    /// The trust in the blocks of the prompt that the worker holds.
    pub trust: &'a Trust,
    /// A sentence that explains the choice.
    pub why: String,
    /// The source of the loads.
    pub load_from: LoadFrom,
    /// The reservation, if the request asked for one.
    pub reservation: Option<Reservation>,
    /// If the request asks for an explanation: all candidates that could be chosen, the chosen one first.
    pub considered: Option<Vec<ExplainedCandidate<'a>>>,
    /// If the request asks for an explanation: the candidates that were left out.
    pub unreachable: Option<Vec<WorkerTrust<'a>>>,
}

/// A candidate for a choice.
#[derive(Debug)]
pub struct Contender<'a> {
    /// Name of the instance.
    pub instance: &'a str,
    /// Rank of the worker.
    pub rank: i64,
    /// The URL at which the instance takes requests, if the URL is known.
    pub url: Option<&'a str>,
    /// Labels of the instance.
    pub labels: &'a Labels,
    /// Source of the worker in the index; None for a worker that the service does not follow.
    pub source: Option<&'a str>,
    /// The load that the request states.
    pub load: Option<f64>,
    /// Tiers from which the engine announces no removals.
    pub stores_only: &'a [String],
    /// The trust in the worker's blocks of the prompt, as the answer states it.
    pub trust: &'a Trust,
    /// The state of the worker's stream; it does not depend on whether some of these blocks might be gone.
    pub state: TrustState,
    /// The distance of the worker from taking requests: 0 if it takes them.
    pub distance: u8,
    /// Why the worker takes no requests even if its stream is connected: `drained` or `not ready`; empty if only the stream decides.
    pub obstacle: &'a str,
    /// Number of tokens of the prompt that the worker holds, over all tiers.
    pub tokens: u32,
    /// Number of these tokens that the worker certainly holds.
    pub certain: u32,
    /// For each tier, the number of tokens of the prompt that the worker holds.
    pub tiers: Tiers,
}

impl<'a> Contender<'a> {
    /// Tiers to which the state EXACT of the candidate's stream does not apply; empty in any other state.
    fn inexact_tiers(&self) -> &'a [String] {
        match self.state {
            TrustState::Exact => self.stores_only,
            _ => &[], // no tier is exact
        }
    }
}

/// The known numbers of requests of the candidates.
struct KnownLoads {
    from: LoadFrom,
    /// Returns the number of requests of each candidate. If it is None, the mean of the other candidates counts.
    requests: Vec<Option<f64>>,
}

impl KnownLoads {
    fn of_contenders(contenders: &[&Contender<'_>], state: &State, now: Instant) -> Self {
        if contenders.iter().any(|one| one.load.is_some()) {
            return Self {
                from: LoadFrom::Request,
                requests: (contenders.iter().map(|one| Some(one.load.unwrap_or(0.0).min(MAX_REQUESTS)))).collect(),
            };
        }
        let known = |one: &&Contender<'_>| one.source.and_then(|source| state.requests(source, one.rank, now));
        let known: Vec<Option<RequestCount>> = contenders.iter().map(known).collect();
        if known.iter().any(|one| matches!(one, Some(RequestCount::Reported(_)))) {
            let reported = |one: &Option<RequestCount>| match one {
                Some(RequestCount::Reported(requests)) => Some(*requests),
                Some(RequestCount::Sent(_)) | None => None,
            };
            return Self {
                from: LoadFrom::Engines,
                requests: known.iter().map(reported).collect(),
            };
        }
        let sent = |one: &Option<RequestCount>| match one {
            Some(RequestCount::Sent(requests) | RequestCount::Reported(requests)) => *requests,
            None => 0.0,
        };
        let sent: Vec<f64> = known.iter().map(sent).collect();
        if sent.iter().all(|requests| *requests == 0.0) {
            return Self {
                from: LoadFrom::None,
                requests: vec![None; sent.len()],
            };
        }
        Self {
            from: LoadFrom::Selections,
            requests: sent.into_iter().map(Some).collect(),
        }
    }

    /// Returns the number of requests that counts for each candidate.
    fn counted(&self) -> Vec<f64> {
        let known: Vec<f64> = self.requests.iter().flatten().copied().collect();
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        self.requests.iter().map(|requests| requests.unwrap_or(mean)).collect()
    }

    /// Returns the work, in tokens, of a candidate with `requests` requests.
    fn work(&self, one: &Contender<'_>, requests: f64, state: &State) -> f64 {
        let work = one.source.and_then(|source| state.of(source, one.rank));
        match work.filter(|_| self.from != LoadFrom::Request) {
            Some(work) => work.tokens(requests, REQUEST_TOKENS),
            None => REQUEST_TOKENS * requests,
        }
    }
}

/// The inputs of a choice besides the candidates.
#[derive(Debug)]
pub struct Question<'a> {
    /// Tenant, group and model, which distinguish workers that have the same name.
    pub scope: [&'a str; 3],
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// The rule by which one of several equal candidates is chosen.
    pub tie: Tie,
    /// Whether the answer must list all candidates.
    pub explain: bool,
    /// Whether the engine will compute the whole prompt, cached tokens included.
    pub ignores_cache: bool,
    /// The session to which the prompt belongs.
    pub session: Option<&'a str>,
    /// The requested reservation.
    pub reserve: Option<ReservationRequest<'a>>,
}

/// Returns the credit of a candidate: the share of the prompt that its cache saves, 0 to 1.
fn credit(one: &Contender<'_>, question: &Question<'_>, terms: &ScoreWeights, weights: &TierWeights) -> f64 {
    if question.ignores_cache {
        return 0.0;
    }
    // The position in `TIERS`; that of `Tier::Other` is the end of `TIERS`.
    let tier = |at: usize| terms.tiers.0[at].0 as usize;
    let held = one.tiers.0.unwrap_or_default();
    let reach = |at: usize| held.get(tier(at)).map_or(0, |tokens| (*tokens).into());
    let (tokens, whole) = (one.tokens.into(), question.prompt_tokens as u64);
    let uncertain_weight = terms.weight_of_trust(TrustState::Degraded);
    let believed = score::trust_weight(tokens, one.certain.into(), terms.weight_of_trust(one.state), uncertain_weight);
    let inexact = one.inexact_tiers();
    if inexact.is_empty() {
        return believed * weights.saved_share(tokens, whole, reach);
    }
    let has_other = inexact.iter().any(|name| !TIERS.contains(&name.as_str()));
    let is_inexact = |at: usize| (TIERS.get(tier(at))).map_or(has_other, |tier| inexact.iter().any(|name| name == tier));
    let factor = |at: usize| if is_inexact(at) { uncertain_weight } else { believed };
    (weights.with_factors(factor, if has_other { uncertain_weight } else { believed })).saved_share(tokens, whole, reach)
}

/// Returns the factor of the load guard. The cache of a candidate does not count if its requests exceed the mean of the other candidates
/// multiplied by this factor.
///
/// The factor is 1.25 if caches save at most three quarters of the prompt. With a factor of 2, the busiest of 16 engines had 1.8 times the
/// mean requests until all engines had cached a common system prompt. If the best cache saves more, the factor is larger: such prompts, for
/// example those of agents, are slow on other workers.
fn guard_factor(credits: &[f64]) -> f64 {
    let uncached = 1.0 - credits.iter().copied().fold(0.0, f64::max);
    (1.0 + (0.125 / uncached.max(0.0)).powi(2)).clamp(1.25, 2.0)
}

/// Returns the number of requests above which the cache of a candidate does not count. The slices have a number for each candidate.
pub fn max_requests(requests: &[f64], credits: &[f64]) -> f64 {
    score::max_share(requests.iter().copied(), guard_factor(credits)).max(GUARD_REQUESTS)
}

/// Returns the position of a session's own worker. Rendezvous hashing makes it the same in each process.
fn own_worker(session: &str, workers: &[&Contender<'_>]) -> Option<usize> {
    let hash = |at: &usize| keys::item_text(&format!("{session}\x1f{}\x1f{}", workers[*at].instance, workers[*at].rank));
    (0..workers.len()).max_by_key(hash)
}

/// Returns the candidate with the smallest score, and the terms of its score. Returns None if `contenders` is empty.
///
/// # Errors
/// If the requested reservation would exceed the limit.
pub fn choose<'a>(
    contenders: &[Contender<'a>],
    question: &Question<'_>,
    terms: &ScoreWeights,
    (ties, loads): (&Ties, &Loads),
) -> Result<Option<Selection<'a>>, TooManyReservations> {
    let now = Instant::now();
    let distances: Vec<u8> = contenders.iter().map(|one| one.distance).collect();
    let reachable: Vec<&Contender<'a>> = score::nearest(&distances).into_iter().map(|at| &contenders[at]).collect();
    let weights = TierWeights::new(terms.tiers.0.iter().map(|(_, weight)| *weight));
    let credits: Vec<f64> = (reachable.iter()).map(|one| credit(one, question, terms, &weights)).collect();
    let own = question.session.and_then(|session| own_worker(session, &reachable));

    let mut state = loads.lock(now);
    if let Some(wanted) = &question.reserve {
        state.make_room(wanted.id)?;
    }
    let known = KnownLoads::of_contenders(&reachable, &state, now);
    let candidate = |((one, requests), credit): ((&&Contender<'a>, f64), &f64)| score::Candidate {
        credit: *credit,
        work: known.work(one, requests, &state),
        requests,
        chosen: one
            .source
            .and_then(|source| state.of(source, one.rank))
            .map_or(0.0, |work| work.chosen(now)),
    };
    let candidates: Vec<score::Candidate> = (reachable.iter().zip(known.counted()).zip(&credits)).map(candidate).collect();
    let load_weights = LoadWeights {
        wait: terms.wait_weight,
        mean: terms.load_weight,
        base: REQUEST_TOKENS * BASE_REQUESTS,
        guard: guard_factor(&credits),
        guard_requests: GUARD_REQUESTS,
    };
    let mut scores = score::weigh(&candidates, question.prompt_tokens as u64, &load_weights);
    if let Some(own) = own.map(|at| &mut scores[at]).filter(|own| !own.is_hot) {
        own.score -= SESSION_BONUS;
    }
    let equal = score::best_of(&scores);
    let names = equal
        .iter()
        .map(|&at| (question.scope, reachable[at].instance, reachable[at].rank));
    let keys: Vec<u64> = names.map(|name| ties.key(name)).collect();
    let picked = ties.pick(question.tie, &keys);
    let Some(&key) = keys.get(picked) else { return Ok(None) };
    ties.record_choice(key);
    let at = equal[picked];
    let reservation = state.count(reachable[at], credits[at], question, now);
    drop(state);
    let place = ChosenCandidate {
        at,
        equal: equal.len(),
        own,
    };
    Ok(Some(answer(
        contenders,
        (&reachable, &scores),
        &known,
        question,
        &place,
        reservation,
    )))
}

impl State {
    /// Counts a request that will be sent to a worker. Makes the requested reservation, if any, if the worker can be reached.
    fn count(&mut self, one: &Contender<'_>, credit: f64, question: &Question<'_>, now: Instant) -> Option<Reservation> {
        let worker = one.source.map(|source| (source, one.rank));
        let Some(wanted) = question.reserve.filter(|_| one.distance == 0) else {
            worker.map(|worker| self.begin(worker, now, false));
            return None;
        };
        let [tenant, group, model] = question.scope.map(str::to_owned);
        let uncached_tokens = ((1.0 - credit) * question.prompt_tokens as f64).round() as u64;
        let reserved = ReservedPrompt {
            tenant,
            group,
            model,
            instance: one.instance.to_owned(),
            rank: one.rank,
            url: one.url.map(str::to_owned),
            prompt_tokens: question.prompt_tokens as u64,
            uncached_tokens,
        };
        Some(self.reserve(&wanted, reserved, worker, now))
    }
}

/// The result of a choice; positions are those among the candidates that could be chosen.
struct ChosenCandidate {
    /// The position of the chosen candidate.
    at: usize,
    /// Number of candidates that are as good as the chosen one, including it.
    equal: usize,
    /// The position of the session's own worker.
    own: Option<usize>,
}

fn answer<'a>(
    contenders: &[Contender<'a>],
    (reachable, scores): (&[&Contender<'a>], &[score::Score]),
    known: &KnownLoads,
    question: &Question<'_>,
    place: &ChosenCandidate,
    reservation: Option<Reservation>,
) -> Selection<'a> {
    let at = place.at;
    let mut considered: Vec<ExplainedCandidate<'a>> = (reachable.iter().zip(scores).zip(&known.requests).enumerate())
        .map(|(position, ((one, score), requests))| ExplainedCandidate {
            instance: one.instance,
            rank: one.rank,
            url: one.url,
            labels: one.labels,
            score: score.score,
            uncached: score.uncached,
            load: score.load,
            hot: score.is_hot,
            session: place.own == Some(position) && !score.is_hot,
            tokens: one.tokens,
            tiers: one.tiers,
            trust: one.trust,
            inexact_tiers: one.inexact_tiers(),
            requests: *requests,
        })
        .collect();
    let is_usable = reachable[at].distance == 0;
    let counts = (reachable.len(), place.equal);
    let why = explain(
        question,
        &considered[at],
        known.from,
        counts,
        &describe_unusable(contenders, is_usable),
    );
    let chosen = considered.remove(at);
    Selection {
        instance: chosen.instance,
        rank: chosen.rank,
        url: chosen.url,
        labels: chosen.labels,
        usable: is_usable,
        score: chosen.score,
        trust: chosen.trust,
        why,
        load_from: known.from,
        reservation,
        unreachable: question.explain.then(|| {
            let left = contenders.iter().filter(|one| one.distance != reachable[at].distance);
            left.map(|one| WorkerTrust {
                instance: one.instance,
                rank: one.rank,
                url: one.url,
                labels: one.labels,
                trust: one.trust,
            })
            .collect()
        }),
        considered: question.explain.then(|| {
            considered.sort_by(|one, other| {
                (one.score.total_cmp(&other.score))
                    .then(one.uncached.total_cmp(&other.uncached))
                    .then((one.instance, one.rank).cmp(&(other.instance, other.rank)))
            });
            considered.insert(0, chosen);
            considered
        }),
    }
}

/// Returns the end of the sentence that explains a choice: which candidates take no requests, if any, and why.
fn describe_unusable(contenders: &[Contender<'_>], is_usable: bool) -> String {
    let mut counts = BTreeMap::<&str, usize>::new();
    for one in contenders.iter().filter(|one| one.distance > 0) {
        let obstacle = if one.obstacle.is_empty() {
            one.trust.state.name()
        } else {
            one.obstacle
        };
        *counts.entry(obstacle).or_default() += 1;
    }
    let counted: Vec<String> = counts.iter().map(|(obstacle, count)| format!("{count} {obstacle}")).collect();
    match (is_usable, counts.values().sum::<usize>()) {
        (true, 0) => String::new(),
        (true, left_out) => format!("; {left_out} left out: {}", counted.join(", ")),
        (false, _) => format!("; no candidate takes requests: {}", counted.join(", ")),
    }
}

/// Returns a sentence that explains a choice and ends with `unusable`. Of the `candidates` that could be chosen, `equal` are equally good.
fn explain(
    question: &Question<'_>,
    chosen: &ExplainedCandidate<'_>,
    from: LoadFrom,
    (candidates, equal): (usize, usize),
    unusable: &str,
) -> String {
    let mut tiers = String::new();
    let mut reached = 0;
    for (name, &tokens) in TIERS.iter().zip(chosen.tiers.0.as_ref().map_or(&[][..], |tokens| tokens)) {
        if tokens > reached {
            let before = if reached > 0 { ", " } else { "" };
            let word = if reached > 0 { "including" } else { "on" };
            let _ = write!(tiers, "{before}{} {word} {name}", with_thousands(tokens as usize));
            reached = tokens;
        }
    }
    let tiers = if tiers.is_empty() { tiers } else { format!(" ({tiers})") };
    let reason = &chosen.trust.reason;
    let reason = if reason.is_empty() {
        String::new()
    } else {
        format!(" ({reason})")
    };
    let way = match question.tie {
        Tie::Rotate => "in turn",
        Tie::Random => "by chance",
        Tie::First => "as the first",
    };
    let among = match equal {
        1 => format!("the best of {candidates}"),
        _ => format!("one of {equal} equally good candidates, chosen {way}"),
    };
    let load = match (from, chosen.requests) {
        (LoadFrom::None, _) => String::new(),
        (_, Some(requests)) if requests.round() == 1.0 => " (1 request)".to_owned(),
        (_, Some(requests)) => format!(" ({requests:.0} requests)"),
        (_, None) => " (unknown, so the mean of the other candidates)".to_owned(),
    };
    let hot = if chosen.hot {
        " (its cache does not count, since it has more than its share of requests)"
    } else {
        ""
    };
    format!(
        "{} rank {} is {}{reason}, holds {} of {} tokens{tiers}, must compute {:.0}%{hot}, and its load{load} counts {:.2}: score {:.3}, \
         {among}{unusable}.",
        chosen.instance,
        chosen.rank,
        chosen.trust.state.name(),
        with_thousands(chosen.tokens as usize),
        with_thousands(question.prompt_tokens),
        chosen.uncached * 100.0,
        chosen.load,
        chosen.score,
    )
}

/// A number as text, with commas between groups of three digits.
fn with_thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut found = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            found.push(',');
        }
        found.push(digit);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_grouped() {
        let shown: Vec<String> = [0, 12, 999, 1_000, 1_234_567].into_iter().map(with_thousands).collect();
        assert_eq!(shown, ["0", "12", "999", "1,000", "1,234,567"]);
    }
}
