//! `/v1/select`: chooses a worker, given the fleet and the blocks of a prompt that each worker holds.

use std::collections::{HashMap, HashSet};

use crate::answers::Row;
use crate::fleet::{Candidates, Table};
use crate::problems::{Declined, Problem};
use crate::requests::{Candidate, Select};
use kvevents_routing::{Contender, Labels, Loads, Question, ScoreWeights, Selection, State, Tiers, Ties, Trust, choose};

/// Returns the trust in a worker that the service does not follow, and its distance. With this distance, workers that the service follows
/// take precedence.
pub(crate) fn unfollowed() -> (Trust, u8) {
    let trust = Trust {
        state: State::Stale,
        reason: "this service does not follow the worker".into(),
        reason_codes: vec!["not-followed".into()],
        attested: false,
    };
    (trust, UNCONNECTED_DISTANCE)
}

/// The distance of a worker that has never had a connection.
const UNCONNECTED_DISTANCE: u8 = 1;

/// The labels of a worker that the service does not follow.
static NO_LABELS: Labels = Labels::new();

/// A choice, and the position of the chosen worker in the table; None if the service does not follow the worker.
pub(crate) type Choice<'a> = (Selection<'a>, Option<u32>);

/// Chooses one of the `named` workers, which need not be in the table.
pub(crate) fn select<'a>(
    table: &'a Table,
    found: &Candidates,
    request: &Select,
    named: &'a [Candidate],
    rows: &[Row],
    (whole, explain, reservation_seconds): (usize, bool, f64),
    (unfollowed, terms, ties, loads): (&'a (Trust, u8), &ScoreWeights, &Ties, &Loads),
) -> Result<Choice<'a>, Declined> {
    let worker = |place: u32| (table.worker(place).instance.as_str(), table.worker(place).rank);
    let places: HashMap<(&str, i64), u32> = found.workers.iter().map(|&place| (worker(place), place)).collect();
    let held: HashMap<u32, &Row> = rows.iter().map(|row| (row.place, row)).collect();
    let contender = |one: &&'a Candidate| {
        let one: &'a Candidate = one;
        let place = places.get(&(one.instance.as_str(), one.rank())).copied();
        let row = place.and_then(|place| held.get(&place).copied());
        let is_certain = row.is_none_or(|row| row.is_certain);
        let worker = place.map(|place| table.worker(place));
        let (trust, state, distance) = worker.map_or((&unfollowed.0, unfollowed.0.state, unfollowed.1), |worker| {
            (worker.trust_in(is_certain), worker.weighed_state(), worker.distance)
        });
        Contender {
            instance: &one.instance,
            rank: one.rank(),
            url: worker.and_then(|worker| worker.url.as_deref()),
            labels: worker.map_or(&NO_LABELS, |worker| &worker.labels),
            source: worker.map(|worker| worker.source.as_str()),
            load: one.load,
            stores_only: worker.map_or(&[], |worker| &worker.stores_only),
            trust,
            state,
            distance,
            obstacle: worker.map_or("", |worker| &worker.obstacle),
            tokens: row.map_or(0, |row| row.tokens),
            certain: row.map_or(0, |row| row.certain),
            tiers: row.map_or(Tiers(None), Row::tiers),
        }
    };
    let mut contenders: Vec<Contender<'a>> = reachable_by_scope(table, found, named, &places)?
        .iter()
        .map(contender)
        .collect();
    contenders.retain(|one| request.labels.iter().all(|(name, value)| one.labels.get(name) == Some(value)));
    if contenders.is_empty() {
        return Err(Declined::Refused(Problem::no_such_labels(&request.labels)));
    }
    let question = Question {
        scope: [&found.scope.tenant, &found.scope.group, &found.scope.model],
        prompt_tokens: whole,
        tie: request.tie,
        explain,
        ignores_cache: request.ignores_cache,
        session: request.session.as_deref(),
        reserve: request.reservation(reservation_seconds),
    };
    let terms = terms.updated(&request.tiers, &request.trust, request.wait_weight, request.load_weight);
    let selected = choose(&contenders, &question, &terms, (ties, loads));
    let selected = selected.map_err(|refused| Declined::Refused(Problem::too_many_reservations(refused.limit)))?;
    let selected = selected.ok_or(Declined::Unread)?;
    let place = places.get(&(selected.instance, selected.rank)).copied();
    Ok((selected, place))
}

/// Returns the candidates without those workers of the request's tenant and group that serve another model, LoRA or salt.
fn reachable_by_scope<'a>(
    table: &Table,
    found: &Candidates,
    named: &'a [Candidate],
    places: &HashMap<(&str, i64), u32>,
) -> Result<Vec<&'a Candidate>, Declined> {
    let others: HashSet<(&str, i64)> = (table.workers())
        .filter(|(_, worker)| worker.scope.tenant == found.scope.tenant && worker.scope.group == found.scope.group)
        .map(|(_, worker)| (worker.instance.as_str(), worker.rank))
        .filter(|worker| !places.contains_key(worker))
        .collect();
    let is_other = |one: &&Candidate| others.contains(&(one.instance.as_str(), one.rank()));
    let candidates: Vec<&Candidate> = named.iter().filter(|one| !is_other(one)).collect();
    let mut seen = HashSet::new();
    if let Some(twice) = candidates
        .iter()
        .find(|one| !seen.insert((one.instance.as_str(), one.rank())))
    {
        let problem = Problem::duplicate_candidate(&twice.instance, twice.rank());
        return Err(Declined::Refused(problem));
    }
    if candidates.is_empty() {
        let problem = Problem::no_candidates(&found.scope.model, named.len());
        return Err(Declined::Refused(problem));
    }
    Ok(candidates)
}
