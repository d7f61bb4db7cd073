//! Selection of the worker for a prompt.
//!
//! Theory of operation. Candidates without a connection are left out while another candidate has a connection: a worker that is STALE, or where
//! nothing listens, takes a prompt only if no other worker can. The score of each of the rest is that of `prefix-aware` (`score`): the
//! share of the prompt that it must compute, 0 to 1, plus what its requests add. A request counts as `REQUEST_TOKENS` tokens of work, so a
//! cached prefix is worth what computing it costs, and a short or shared prefix does not outweigh a queue. Of candidates with equal scores
//! the one that computes less is chosen, since avoided work helps all requests. Candidates that are equal in that too are chosen in
//! rotation; each process begins at a random place, so that many routers do not send to one worker at once.
//!
//! *Loads* are requests in flight: those of the request if it gives any. Otherwise they are the requests that engines report of themselves
//! and the selections since (`loads`); a candidate without a recent report has the mean of the others, so that it neither draws nor loses
//! prompts. If no engine reports, the recent selections of this process count.
//!
//! *Tiers without removals*: what an EXACT worker holds on them is believed as if it were DEGRADED, and the rest of its prefix as EXACT.

use std::fmt::Write;

use serde::Deserialize;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::loads::EngineLoads;
use crate::score::{self, LoadWeights, TierWeights};
use crate::ties::{Tie, Ties};
use crate::trust::{State, Trust};
use crate::weights::Weights;
use kvevents_index::holders::placements::TIERS;

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
    /// All tiers whose medium is not known: they have the lowest weight of all.
    Other,
}

/// Weights of cached tokens, trust states and loads.
#[derive(Clone, Debug, Deserialize)]
pub struct Terms {
    tiers: Weights<Tier>,
    trust: Weights<State>,
    wait_weight: f64,
    load_weight: f64,
}

impl Terms {
    /// Returns these terms with the weights of a request, which take precedence.
    pub fn updated(
        &self,
        tiers: &Weights<Tier>,
        trust: &Weights<State>,
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
    fn weight_of_trust(&self, state: State) -> f64 {
        let given = self.trust.0.iter().find(|(of, _)| *of == state);
        given.map_or(0.0, |(_, weight)| *weight)
    }
}

/// Requests that are added to those of each candidate where they are compared with the mean. Otherwise one request in an idle fleet
/// would be many times the mean, and outweigh a long cached prefix; docs/adr/0008-prefix-aware-score.md has figures.
const BASE_REQUESTS: f64 = 4.0;

/// Tokens of work that a request counts as, as in `kvevents.routing.policies`.
const REQUEST_TOKENS: f64 = 256.0;

/// Loads above this count as this, so that no product is infinite.
const MAX_REQUESTS: f64 = 1e12;

/// Times the mean requests of the others above which a candidate's cache does not count, and the requests up to which it always does.
/// With 2 and 16, as in `kvevents.routing`, the busiest of 16 engines had 1.8 times the mean while one system prompt spread.
const GUARD: f64 = 1.25;
const GUARD_REQUESTS: f64 = 8.0;

/// Tokens by tier; none for a worker that the index did not find.
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

/// The trust of one worker.
#[derive(Debug, serde::Serialize)]
pub struct WorkerTrust<'a> {
    /// Its name.
    pub instance: &'a str,
    /// Its rank.
    pub rank: i64,
    /// The trust in it.
    pub trust: &'a Trust,
}

/// Where the loads of a choice come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFrom {
    /// Without any.
    None,
    /// The request gives them.
    Request,
    /// Engines have reported them.
    Engines,
    /// The recent selections of this process.
    Selections,
}

/// Why a candidate has its score.
#[derive(Debug, serde::Serialize)]
pub struct Considered<'a> {
    /// Its name.
    pub instance: &'a str,
    /// Its rank.
    pub rank: i64,
    /// The score, the smaller the better.
    pub score: f64,
    /// The share of the prompt that it would compute.
    pub uncached: f64,
    /// What its requests add to the score.
    pub load: f64,
    /// Whether its cache did not count because of its requests.
    pub hot: bool,
    /// Tokens of the prompt that it holds, over all tiers.
    pub tokens: u32,
    /// These tokens by tier.
    pub tiers: Tiers,
    /// The trust in them.
    pub trust: &'a Trust,
    /// Tiers that the state of its stream is not about.
    pub inexact_tiers: &'a [String],
    /// The requests that counted as its load; None if the mean of the others did.
    pub requests: Option<f64>,
}

/// `/v1/select`.
#[derive(Debug, serde::Serialize)]
pub struct Selected<'a> {
    /// Its name.
    pub instance: &'a str,
    /// Its rank.
    pub rank: i64,
    /// The score, the smaller the better.
    pub score: f64,
    /// The trust in what it holds of the prompt.
    pub trust: &'a Trust,
    /// A sentence about the choice.
    pub why: String,
    /// Where the loads come from.
    pub load_from: LoadFrom,
    /// All candidates with a connection, the chosen one first, if they are asked for.
    pub considered: Option<Vec<Considered<'a>>>,
    /// The candidates that were left out, if they are asked for.
    pub unreachable: Option<Vec<WorkerTrust<'a>>>,
}

/// A candidate for a choice.
#[derive(Debug)]
pub struct Contender<'a> {
    /// Its name.
    pub instance: &'a str,
    /// Its rank.
    pub rank: i64,
    /// Its source name; None for a worker that is not followed.
    pub source: Option<&'a str>,
    /// The load that the request gives.
    pub load: Option<f64>,
    /// Tiers from which its engine announces no removals.
    pub stores_only: &'a [String],
    /// The trust in what it holds of the prompt, for the answer.
    pub trust: &'a Trust,
    /// The state of its stream, whether or not some of these blocks might be gone.
    pub state: State,
    /// How far it is from taking a request; 0 for a worker with a connection.
    pub distance: u8,
    /// Its match of the prompt over all tiers.
    pub tokens: u32,
    /// Tokens of it that are certainly there.
    pub certain: u32,
    /// Its match of the prompt by tier.
    pub tiers: Tiers,
}

impl<'a> Contender<'a> {
    /// Tiers that the state of its stream is not about.
    fn inexact_tiers(&self) -> &'a [String] {
        match self.state {
            State::Exact => self.stores_only,
            _ => &[], // nothing of it is exact
        }
    }
}

/// The requests of candidates, in their order.
struct Loads {
    from: LoadFrom,
    /// None if they are unknown; then the mean of the others counts.
    requests: Vec<Option<f64>>,
}

impl Loads {
    fn of_contenders(contenders: &[&Contender<'_>], engines: &EngineLoads) -> Self {
        if contenders.iter().any(|one| one.load.is_some()) {
            return Self {
                from: LoadFrom::Request,
                requests: (contenders.iter().map(|one| Some(one.load.unwrap_or(0.0).min(MAX_REQUESTS)))).collect(),
            };
        }
        let reported = |one: &&Contender<'_>| one.source.and_then(|source| engines.requests(source, one.rank));
        let requests: Vec<Option<f64>> = contenders.iter().map(reported).collect();
        if requests.iter().any(Option::is_some) {
            return Self {
                from: LoadFrom::Engines,
                requests,
            };
        }
        let selected = |one: &&Contender<'_>| one.source.and_then(|source| engines.recent_selections(source, one.rank));
        let selections: Vec<Option<f64>> = contenders.iter().map(selected).collect();
        if selections.iter().all(Option::is_none) {
            return Self {
                from: LoadFrom::None,
                requests: selections,
            };
        }
        Self {
            from: LoadFrom::Selections,
            requests: selections.into_iter().map(|count| Some(count.unwrap_or(0.0))).collect(),
        }
    }

    /// The requests that count for each candidate.
    fn counted(&self) -> Vec<f64> {
        let known: Vec<f64> = self.requests.iter().flatten().copied().collect();
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        self.requests.iter().map(|requests| requests.unwrap_or(mean)).collect()
    }
}

/// The inputs of a choice besides the candidates.
#[derive(Debug)]
pub struct Question<'a> {
    /// Tenant, group and model, which distinguish workers of equal names.
    pub scope: [&'a str; 3],
    /// Length of the prompt.
    pub prompt_tokens: usize,
    /// How a tie is resolved.
    pub tie: Tie,
    /// Whether the answer lists the other candidates.
    pub explain: bool,
    /// Whether the engine will compute the whole prompt, whatever it has cached.
    pub ignores_cache: bool,
}

/// Returns the choice among candidates of the control plane, as msgpack, with its own `ties`.
///
/// # Errors
/// If the question has another shape, or no candidates.
pub fn select_among(question: &[u8], ties: &Ties, loads: &EngineLoads) -> Result<Vec<u8>, String> {
    #[derive(Deserialize)]
    struct Given {
        instance: String,
        rank: i64,
        source: Option<String>,
        load: Option<f64>,
        stores_only: Vec<String>,
        trust: Trust,
        state: State,
        distance: u8,
        tokens: u32,
        certain: u32,
        tiers: Option<[u32; TIERS.len()]>,
    }

    impl Given {
        fn contender(&self) -> Contender<'_> {
            Contender {
                instance: &self.instance,
                rank: self.rank,
                source: self.source.as_deref(),
                load: self.load,
                stores_only: &self.stores_only,
                trust: &self.trust,
                state: self.state,
                distance: self.distance,
                tokens: self.tokens,
                certain: self.certain,
                tiers: Tiers(self.tiers),
            }
        }
    }

    #[derive(Deserialize)]
    struct Input {
        scope: [String; 3],
        prompt_tokens: usize,
        tie: Tie,
        explain: bool,
        ignores_cache: bool,
        terms: Terms,
        candidates: Vec<Given>,
    }

    let input: Input = rmp_serde::from_slice(question).map_err(|error| error.to_string())?;
    let contenders: Vec<Contender<'_>> = input.candidates.iter().map(Given::contender).collect();
    let question = Question {
        scope: input.scope.each_ref().map(String::as_str),
        prompt_tokens: input.prompt_tokens,
        tie: input.tie,
        explain: input.explain,
        ignores_cache: input.ignores_cache,
    };
    let selected = choose(&contenders, &question, &input.terms, (ties, loads)).ok_or("there are no candidates")?;
    rmp_serde::to_vec_named(&selected).map_err(|error| error.to_string())
}

/// Returns the candidate with the smallest score, and the reason. None without candidates.
pub fn choose<'a>(
    contenders: &[Contender<'a>],
    question: &Question<'_>,
    terms: &Terms,
    (ties, engines): (&Ties, &EngineLoads),
) -> Option<Selected<'a>> {
    let distances: Vec<u8> = contenders.iter().map(|one| one.distance).collect();
    let reachable: Vec<&Contender<'a>> = score::nearest(&distances).into_iter().map(|at| &contenders[at]).collect();
    let weights = TierWeights::new(terms.tiers.0.iter().map(|(_, weight)| *weight));
    // Positions in `TIERS`; that of other tiers is behind its end.
    let tiers: Vec<usize> = terms.tiers.0.iter().map(|(tier, _)| *tier as usize).collect();
    let loads = Loads::of_contenders(&reachable, engines);
    let candidate = |(one, requests): (&&Contender<'a>, f64)| {
        let held = one.tiers.0.unwrap_or_default();
        let reach = |at: usize| held.get(tiers[at]).map_or(0, |tokens| (*tokens).into());
        let (tokens, whole) = (one.tokens.into(), question.prompt_tokens as u64);
        let uncertain_weight = terms.weight_of_trust(State::Degraded);
        let believed = score::trust_weight(tokens, one.certain.into(), terms.weight_of_trust(one.state), uncertain_weight);
        let inexact = one.inexact_tiers();
        let credit = if question.ignores_cache {
            0.0
        } else if inexact.is_empty() {
            believed * weights.saved(tokens, whole, reach)
        } else {
            let has_other = inexact.iter().any(|name| !TIERS.contains(&name.as_str()));
            let is_inexact = |at: usize| {
                TIERS
                    .get(tiers[at])
                    .map_or(has_other, |tier| inexact.iter().any(|name| name == tier))
            };
            let factor = |at: usize| if is_inexact(at) { uncertain_weight } else { believed };
            (weights.multiplied(factor, if has_other { uncertain_weight } else { believed })).saved(tokens, whole, reach)
        };
        score::Candidate {
            credit,
            work: REQUEST_TOKENS * requests,
            requests,
        }
    };
    let candidates: Vec<score::Candidate> = reachable.iter().zip(loads.counted()).map(candidate).collect();
    let load_weights = LoadWeights {
        wait: terms.wait_weight,
        mean: terms.load_weight,
        base: REQUEST_TOKENS * BASE_REQUESTS,
        guard: GUARD,
        guard_requests: GUARD_REQUESTS,
    };
    let scores = score::weigh(&candidates, question.prompt_tokens as u64, &load_weights);
    let equal = score::best_of(&scores);
    let names = equal
        .iter()
        .map(|&at| (question.scope, reachable[at].instance, reachable[at].rank));
    let keys: Vec<u64> = names.map(|name| ties.key(name)).collect();
    let picked = ties.pick(question.tie, &keys);
    ties.took(*keys.get(picked)?);
    let at = equal[picked];
    if let Some(source) = reachable[at].source {
        engines.count_selection(source, reachable[at].rank);
    }
    let mut considered: Vec<Considered<'a>> = (reachable.iter().zip(&scores).zip(&loads.requests))
        .map(|((one, score), requests)| Considered {
            instance: one.instance,
            rank: one.rank,
            score: score.score,
            uncached: score.uncached,
            load: score.load,
            hot: score.is_hot,
            tokens: one.tokens,
            tiers: one.tiers,
            trust: one.trust,
            inexact_tiers: one.inexact_tiers(),
            requests: *requests,
        })
        .collect();
    let counts = (reachable.len(), equal.len(), contenders.len() - reachable.len());
    let why = why(question, &considered[at], loads.from, reachable[at].distance > 0, counts);
    let chosen = considered.remove(at);
    Some(Selected {
        instance: chosen.instance,
        rank: chosen.rank,
        score: chosen.score,
        trust: chosen.trust,
        why,
        load_from: loads.from,
        unreachable: question.explain.then(|| {
            let left = contenders.iter().filter(|one| one.distance != reachable[at].distance);
            left.map(|one| WorkerTrust {
                instance: one.instance,
                rank: one.rank,
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
    })
}

/// Returns a sentence about a choice, with the numbers of candidates, of equal ones, and of those that were left out.
fn why(
    question: &Question<'_>,
    chosen: &Considered<'_>,
    from: LoadFrom,
    is_unconnected: bool,
    (candidates, equal, left_out): (usize, usize, usize),
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
    let mut among = match equal {
        1 => format!("the best of {candidates}"),
        _ => format!("one of {equal} equally good candidates, chosen {way}"),
    };
    if left_out > 0 {
        let _ = write!(among, "; {left_out} without a connection were left out");
    } else if is_unconnected {
        among.push_str("; no candidate is connected");
    }
    let load = match (from, chosen.requests) {
        (LoadFrom::None, _) => String::new(),
        (_, Some(requests)) if requests.round() == 1.0 => " (1 request)".to_owned(),
        (_, Some(requests)) => format!(" ({requests:.0} requests)"),
        (_, None) => " (unknown, so the mean of the others)".to_owned(),
    };
    let hot = if chosen.hot {
        " (its cache does not count, since it has too many requests)"
    } else {
        ""
    };
    format!(
        "{} rank {} is {}{reason}, holds {} of {} tokens{tiers}, must compute {:.0}%{hot}, and its load{load} counts {:.2}: score {:.3}, \
         {among}.",
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

/// A number with a comma between thousands.
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
