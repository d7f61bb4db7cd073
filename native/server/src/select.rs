//! `/v1/select`: from a fleet and what its workers hold of a prompt to a choice.

use std::collections::{HashMap, HashSet};

use crate::answers::Row;
use crate::fleet::{Candidates, Table};
use crate::requests::{Candidate, Select};
use kvevents_routing::{Contender, EngineLoads, Question, Selected, State, Terms, Tiers, Ties, Trust, choose};

/// The trust in a worker that is not followed, and how far it is from taking a request: a worker that is followed goes first.
pub(crate) fn unfollowed() -> (Trust, u8) {
    let trust = Trust {
        state: State::Stale,
        reason: "this service does not follow it".into(),
        reason_codes: vec!["not-followed".into()],
        attested: false,
    };
    (trust, NOT_CONNECTED)
}

/// The distance of a worker that has had no connection yet.
const NOT_CONNECTED: u8 = 1;

/// A choice, and the position of the chosen worker in the table if it is followed.
pub(crate) type Choice<'a> = (Selected<'a>, Option<u32>);

/// Chooses among the workers of a table, or among those that `named` names. None if none of these can be chosen.
pub(crate) fn select<'a>(
    table: &'a Table,
    found: &Candidates,
    request: &Select,
    named: &'a [Candidate],
    rows: &[Row],
    whole: usize,
    (unfollowed, terms, ties, loads): (&'a (Trust, u8), &Terms, &Ties, &EngineLoads),
) -> Option<Choice<'a>> {
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
            source: worker.map(|worker| worker.source.as_str()),
            load: one.load,
            stores_only: worker.map_or(&[], |worker| &worker.stores_only),
            trust,
            state,
            distance,
            tokens: row.map_or(0, |row| row.tokens),
            certain: row.map_or(0, |row| row.certain),
            tiers: row.map_or(Tiers(None), Row::tiers),
        }
    };
    let contenders: Vec<Contender<'a>> = reachable_by_scope(table, found, named, &places)?
        .iter()
        .map(contender)
        .collect();
    let question = Question {
        scope: [&found.scope.tenant, &found.scope.group, &found.scope.model],
        prompt_tokens: whole,
        tie: request.tie,
        explain: request.explain,
        ignores_cache: request.ignores_cache,
    };
    let terms = terms.updated(&request.tiers, &request.trust, request.wait_weight, request.load_weight);
    let selected = choose(&contenders, &question, &terms, (ties, loads))?;
    let place = places.get(&(selected.instance, selected.rank)).copied();
    Some((selected, place))
}

/// Candidates, without those of the same tenant and group that serve another model, LoRA or salt. None if no candidate is left, or if one
/// is given twice.
fn reachable_by_scope<'a>(
    table: &Table,
    found: &Candidates,
    named: &'a [Candidate],
    places: &HashMap<(&str, i64), u32>,
) -> Option<Vec<&'a Candidate>> {
    let others: HashSet<(&str, i64)> = (table.workers.iter())
        .filter(|worker| worker.scope.tenant == found.scope.tenant && worker.scope.group == found.scope.group)
        .map(|worker| (worker.instance.as_str(), worker.rank))
        .filter(|worker| !places.contains_key(worker))
        .collect();
    let is_other = |one: &&Candidate| others.contains(&(one.instance.as_str(), one.rank()));
    let candidates: Vec<&Candidate> = named.iter().filter(|one| !is_other(one)).collect();
    let mut seen = HashSet::new();
    let is_once = candidates.iter().all(|one| seen.insert((one.instance.as_str(), one.rank())));
    (is_once && !candidates.is_empty()).then_some(candidates)
}
