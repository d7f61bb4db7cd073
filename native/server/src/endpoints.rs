//! Answers queries: reads the bodies of requests, and writes the bodies of answers.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use hyper::Method;
use parking_lot::RwLock;
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};

use crate::answers::{self, MatchAnswer, MatchManyAnswer, PromptMatch, Row};
use crate::decisions::Decisions;
use crate::fleet::{Candidates, Scope, Table, monotonic};
use crate::json_tokens;
use crate::metrics::Metrics;
use crate::problems::{Declined, Problem};
use crate::proto::{MatchManyRequest, MatchRequest, SelectRequest};
use crate::requests::{self, Candidate, HashQuery, Match, MatchMany, Media, Names, Object, Query, ReservationUpdate, Select};
use crate::select;
use crate::settings::Limits;
use kvevents_index::holders::placements::LEVELS;
use kvevents_index::keys;
use kvevents_index::lookup::Matches;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_routing::{Loads, ScoreWeights, Ties, Trust, WorkerTrust};

/// A query that the data plane can answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    Query,
    QueryByHash,
    Match,
    MatchMany,
    Select,
    Reservation(ReservationAction),
}

/// The action of a request on a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReservationAction {
    Show,
    Update,
    Finish,
}

/// Path of reservations; in a request, the name of the reservation follows.
pub(crate) const RESERVATIONS: &str = "/v1/reservations/";

impl Question {
    /// Returns the query of a request; None if the control plane answers the request.
    pub(crate) fn of(method: &Method, path: &str) -> Option<Self> {
        if path.strip_prefix(RESERVATIONS).is_some_and(requests::is_id) {
            return Some(Self::Reservation(match *method {
                Method::GET => ReservationAction::Show,
                Method::POST => ReservationAction::Update,
                Method::DELETE => ReservationAction::Finish,
                _ => return None,
            }));
        }
        Some(match path {
            _ if method != Method::POST => return None,
            "/query" => Self::Query,
            "/query_by_hash" => Self::QueryByHash,
            "/v1/match" => Self::Match,
            "/v1/match_many" => Self::MatchMany,
            "/v1/select" => Self::Select,
            _ => return None,
        })
    }

    /// Whether the answer is in kvevents' own format. The data plane writes answers in the formats of other services as JSON, which the
    /// control plane converts to msgpack.
    pub(crate) fn has_own_format(self) -> bool {
        !matches!(self, Self::Query | Self::QueryByHash)
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Query => "/query",
            Self::QueryByHash => "/query_by_hash",
            Self::Match => "/v1/match",
            Self::MatchMany => "/v1/match_many",
            Self::Select => "/v1/select",
            Self::Reservation(_) => "/v1/reservations/{id}",
        }
    }
}

/// The encoding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Msgpack,
    /// Token ids as 32-bit numbers. All other fields of the request are in the query string.
    Raw,
}

/// The parts of a query besides its body.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) format: Format,
    /// Whether the client wants msgpack.
    pub(crate) wants_msgpack: bool,
    pub(crate) query_string: Option<String>,
    /// The name of the reservation, which the path contains.
    pub(crate) reservation: Option<String>,
}

/// The answer to a query.
pub(crate) struct QueryAnswer {
    pub(crate) body: Vec<u8>,
    /// Number of tokens of the prompt that the best worker holds.
    pub(crate) longest: u32,
}

type Answer = Result<QueryAnswer, Declined>;

/// Answers queries from the current table.
pub(crate) struct Endpoints {
    table: RwLock<Option<Arc<Table>>>,
    limits: Limits,
    pub(crate) metrics: Metrics,
    ties: Ties,
    pub(crate) loads: Arc<Loads>,
    pub(crate) decisions: Decisions,
    terms: ScoreWeights,
    unfollowed: (Trust, u8),
}

impl Endpoints {
    pub(crate) fn new(limits: Limits, terms: ScoreWeights, metrics: Metrics, loads: Arc<Loads>) -> Self {
        Self {
            table: RwLock::default(),
            limits,
            metrics,
            ties: Ties::by_chance(),
            loads,
            decisions: Decisions::default(),
            terms,
            unfollowed: select::unfollowed(),
        }
    }

    /// Changes the table. `change` is the JSON form of a `Change`. A query in progress continues with the old table.
    pub(crate) fn change_table(&self, change: &[u8], index: Arc<PrefixIndex>) -> Result<(), String> {
        let change = serde_json::from_slice(change).map_err(|error| error.to_string())?;
        let mut table = self.table.write();
        let table = table.get_or_insert_with(|| Arc::new(Table::new(index.clone())));
        Arc::make_mut(table).apply(change, index);
        Ok(())
    }

    /// Returns the body of the answer, or the error that the fleet causes. Returns None if the query must be forwarded to the control
    /// plane.
    pub(crate) fn answer(&self, question: Question, head: &Head, body: &[u8]) -> Option<Result<Vec<u8>, Problem>> {
        body_of(self.read_and_answer(question, head, body))
    }

    fn read_and_answer(&self, question: Question, head: &Head, body: &[u8]) -> Answer {
        let is_raw = head.format == Format::Raw;
        if (is_raw && question != Question::Match)
            || (!is_raw && head.query_string.as_deref().is_some_and(|text| !text.is_empty()))
        {
            return Err(Declined::Unread);
        }
        match question {
            Question::Query => {
                let request = self.read_prompt(head, body, "token_ids", |request: &mut Query| &mut request.token_ids)?;
                self.query(&request)
            }
            Question::QueryByHash => self.query_by_hash(&self.read(head, body)?),
            Question::Match => {
                let request = if is_raw {
                    raw_match(head.query_string.as_deref().unwrap_or_default(), body)?
                } else {
                    self.read_prompt(head, body, "tokens", |request: &mut Match| &mut request.tokens)?
                };
                self.one_match(&request, head.wants_msgpack)
            }
            Question::MatchMany => self.many_matches(&self.read(head, body)?, head.wants_msgpack),
            Question::Select => {
                let request = self.read_prompt(head, body, "tokens", |request: &mut Select| &mut request.tokens)?;
                self.select(&request, head.wants_msgpack)
            }
            Question::Reservation(verb) => {
                let update = match verb {
                    ReservationAction::Update => self.read(head, body)?,
                    ReservationAction::Show | ReservationAction::Finish => ReservationUpdate::default(),
                };
                let id = head.reservation.as_deref().unwrap_or_default();
                self.reservation(verb, id, &update, head.wants_msgpack)
            }
        }
    }

    /// Answers a query that the control plane has read: `fields` are the fields of its body as msgpack, without the token ids of a single
    /// prompt.
    pub(crate) fn answer_fields(
        &self,
        question: Question,
        path: &str,
        fields: &[u8],
        tokens: Vec<u32>,
        wants_msgpack: bool,
    ) -> Answer {
        let tokens = Some(tokens);
        match question {
            Question::Query => self.query(&Query {
                token_ids: tokens,
                ..read_msgpack(fields)?
            }),
            Question::QueryByHash => self.query_by_hash(&read_msgpack(fields)?),
            Question::Match => self.one_match(
                &Match {
                    tokens,
                    ..read_msgpack(fields)?
                },
                wants_msgpack,
            ),
            Question::MatchMany => self.many_matches(&read_msgpack(fields)?, wants_msgpack),
            Question::Select => self.select(
                &Select {
                    tokens,
                    ..read_msgpack(fields)?
                },
                wants_msgpack,
            ),
            Question::Reservation(verb) => {
                let id = path.strip_prefix(RESERVATIONS).unwrap_or_default();
                self.reservation(verb, id, &read_msgpack(fields)?, wants_msgpack)
            }
        }
    }

    /// Answers the gRPC message of a query with JSON.
    pub(crate) fn answer_match(&self, mut message: MatchRequest) -> Option<Result<Vec<u8>, Problem>> {
        let tokens = Some(std::mem::take(&mut message.tokens));
        let request = Match {
            tokens,
            ..self.read_message(&message)?
        };
        body_of(self.one_match(&request, false))
    }

    pub(crate) fn answer_match_many(&self, mut message: MatchManyRequest) -> Option<Result<Vec<u8>, Problem>> {
        let prompts = std::mem::take(&mut message.prompts);
        let prompts = Some(prompts.into_iter().map(|prompt| prompt.tokens).collect());
        let request = MatchMany {
            prompts,
            ..self.read_message(&message)?
        };
        body_of(self.many_matches(&request, false))
    }

    pub(crate) fn answer_select(&self, mut message: SelectRequest) -> Option<Result<Vec<u8>, Problem>> {
        let tokens = Some(std::mem::take(&mut message.tokens));
        let request = Select {
            tokens,
            ..self.read_message(&message)?
        };
        body_of(self.select(&request, false))
    }

    /// Answers a gRPC message about a reservation.
    pub(crate) fn answer_reservation(
        &self,
        verb: ReservationAction,
        id: &str,
        message: &impl Serialize,
    ) -> Option<Result<Vec<u8>, Problem>> {
        body_of(self.reservation(verb, id, &self.read_message(message)?, false))
    }

    /// Converts a message to a request. The token ids must already be removed from it.
    fn read_message<T: DeserializeOwned>(&self, message: &impl Serialize) -> Option<T> {
        let json = serde_json::to_vec(message).ok()?;
        read_json(&json).ok().filter(|_| json.len() <= self.limits.max_json_bytes)
    }

    fn table(&self) -> Result<Arc<Table>, Declined> {
        self.table.read().clone().ok_or(Declined::Unread)
    }

    /// Answers a query from the current table. If `check_present` then finds that a worker has left, answers the query again.
    fn with_table(&self, answer: impl Fn(&Table) -> Answer) -> Answer {
        loop {
            match answer(&*self.table()?) {
                Err(Declined::Outdated) => {}
                answer => return answer,
            }
        }
    }

    /// Checks, after a lookup, that no worker of the table has left. The index removes the blocks of a worker only after the table has lost
    /// the worker.
    fn check_present(&self, table: &Table) -> Result<(), Declined> {
        if table.is_part_of(&*self.table()?) {
            Ok(())
        } else {
            Err(Declined::Outdated)
        }
    }

    fn read<T: DeserializeOwned>(&self, head: &Head, body: &[u8]) -> Result<T, Declined> {
        match head.format {
            _ if body.len() > self.limits.max_json_bytes => Err(Declined::Unread),
            Format::Json => read_json(body),
            Format::Msgpack => read_msgpack(body),
            Format::Raw => Err(Declined::Unread),
        }
    }

    /// Reads the request with one prompt in a body. The token ids of the prompt do not count towards the limit of JSON.
    fn read_prompt<T: DeserializeOwned>(
        &self,
        head: &Head,
        body: &[u8],
        name: &str,
        place: impl FnOnce(&mut T) -> &mut Option<Vec<u32>>,
    ) -> Result<T, Declined> {
        if head.format != Format::Json {
            return self.read(head, body);
        }
        let (rest, prompt) = json_tokens::extract_array(body, name).ok_or(Declined::Unread)?;
        let mut request = self.read(head, &rest)?;
        *place(&mut request) = Some(prompt);
        Ok(request)
    }

    // --- lookups in the index

    fn rows(&self, table: &Table, matches: &Matches, rows: &mut Vec<Row>) {
        rows.reserve(matches.hits.len());
        for hit in &matches.hits {
            if let Some(place) = table.place(matches.worker(hit)) {
                let [gpu, cpu, disk, tokens] = hit.tokens;
                let certain = matches.certain(hit);
                rows.push(Row {
                    place,
                    gpu,
                    cpu,
                    disk,
                    tokens,
                    certain: certain[LEVELS - 1],
                    is_certain: matches.is_certain(hit),
                });
            }
        }
    }

    /// Returns the match of a prompt for each worker. `scopes` are those of the candidates, with the multimodal items of the request.
    fn find(
        &self,
        table: &Table,
        scopes: &[kvevents_index::Scope],
        tokens: &[u32],
        options: &LookupOptions,
    ) -> Result<Vec<Row>, Declined> {
        // Engines compute the last token in any case, so the block with this token does not count.
        let usable = if options.whole_prompt {
            tokens
        } else {
            tokens.split_last().map_or(tokens, |(_, rest)| rest)
        };
        let mut rows = Vec::new();
        for scope in scopes {
            let mut matches = table.index.match_prefix(tokens, usable.len(), scope);
            if options.expected {
                table.index.extend_by_overlay(usable, scope, monotonic(), &mut matches);
            }
            self.rows(table, &matches, &mut rows);
        }
        if scopes.len() > 1 {
            keep_longest(&mut rows);
        }
        self.check_present(table)?;
        self.metrics.lookup(tokens.len(), longest_match(&rows));
        Ok(rows)
    }

    // --- answers by endpoint

    fn query(&self, request: &Query) -> Answer {
        self.with_table(|table| {
            let tokens = request.token_ids.as_deref().ok_or(Declined::Unread)?;
            self.check_tokens(tokens.len())?;
            let found = table.candidates(&request.scope().ok_or(Declined::Unread)?)?;
            let options = LookupOptions {
                expected: false,
                whole_prompt: request.whole_prompt,
            };
            let rows = self.find(table, &found.within, tokens, &options)?;
            indexer_answer(
                table,
                &found,
                rows,
                (request.model_name.is_some(), request.instance_id.as_ref(), request.block_size),
            )
        })
    }

    fn query_by_hash(&self, request: &HashQuery) -> Answer {
        self.with_table(|table| {
            let mut given = [&request.block_hashes, &request.seq_hashes, &request.block_hash]
                .into_iter()
                .flatten();
            let (Some(hashes), None) = (given.next(), given.next()) else {
                return Err(Declined::Unread);
            };
            if hashes.len() > self.limits.max_hashes {
                return Err(Declined::Unread);
            }
            let keys = hashes.iter().map(requests::Id::hash).collect::<Option<Vec<u64>>>();
            let mut keys = keys.ok_or(Declined::Unread)?;
            if request.block_hashes.is_some() {
                keys::chain(None, &mut keys);
            }
            let found = table.candidates(&request.scope().ok_or(Declined::Unread)?)?;
            let mut rows = Vec::new();
            for scope in &found.within {
                for size in &found.block_sizes {
                    let matches = table.index.match_rolling_keys(&keys, Some(*size), &scope.model);
                    self.rows(table, &matches.ok_or(Declined::Unread)?, &mut rows);
                }
            }
            if found.within.len() > 1 {
                keep_longest(&mut rows);
            }
            self.check_present(table)?;
            self.metrics.lookup(0, longest_match(&rows));
            indexer_answer(
                table,
                &found,
                rows,
                (request.model_name.is_some(), request.instance_id.as_ref(), request.block_size),
            )
        })
    }

    fn one_match(&self, request: &Match, wants_msgpack: bool) -> Answer {
        self.with_table(|table| {
            let tokens = request.tokens.as_deref().ok_or(Declined::Unread)?;
            self.check_tokens(tokens.len())?;
            let found = table.candidates(&checked_scope(request)?)?;
            let options = LookupOptions {
                expected: request.expected,
                whole_prompt: request.whole_prompt,
            };
            let scopes = with_items(&found, &request.mm)?;
            let mut rows = self.find(table, &scopes, tokens, &options)?;
            let longest = longest_match(&rows);
            add_others(&mut rows, &found.workers);
            let answer = MatchAnswer {
                prompt_tokens: tokens.len(),
                workers: answers::trusted_matches(table, &rows),
            };
            encode_answer(&answer, longest, wants_msgpack)
        })
    }

    fn many_matches(&self, request: &MatchMany, wants_msgpack: bool) -> Answer {
        self.with_table(|table| {
            let prompts = request.checked().ok_or(Declined::Unread)?;
            self.check_tokens(prompts.iter().map(Vec::len).sum())?;
            let found = table.candidates(&checked_scope(request)?)?;
            let options = LookupOptions {
                expected: request.expected,
                whole_prompt: request.whole_prompt,
            };
            let mut matches = Vec::with_capacity(prompts.len());
            let scopes = with_items(&found, &request.mm)?;
            let (mut most, mut held_rows) = (0, 0);
            for tokens in prompts {
                let rows = self.find(table, &scopes, tokens, &options)?;
                most = most.max(longest_match(&rows));
                held_rows += rows.len();
                if held_rows > self.limits.max_rows {
                    return Err(Declined::Refused(Problem::too_many_rows(self.limits.max_rows)));
                }
                matches.push(PromptMatch {
                    prompt_tokens: tokens.len(),
                    holders: answers::trusted_matches(table, &rows),
                });
            }
            let trust = |&place: &u32| {
                let worker = table.worker(place);
                WorkerTrust {
                    instance: &worker.instance,
                    rank: worker.rank,
                    url: worker.url.as_deref(),
                    labels: &worker.labels,
                    trust: &worker.trust,
                }
            };
            let answer = MatchManyAnswer {
                matches,
                workers: found.workers.iter().map(trust).collect(),
            };
            encode_answer(&answer, most, wants_msgpack)
        })
    }

    fn select(&self, request: &Select, wants_msgpack: bool) -> Answer {
        self.with_table(|table| {
            let tokens = request.tokens.as_deref().ok_or(Declined::Unread)?;
            self.check_tokens(tokens.len())?;
            let given = request.candidates.as_deref();
            if !request.has_valid_fields() || given.is_some_and(|some| some.len() > self.limits.max_candidates) {
                return Err(Declined::Unread);
            }
            let found = table.candidates(&checked_scope(request)?)?;
            let all = |place: &u32| Candidate::new(&table.worker(*place).instance, table.worker(*place).rank);
            let candidates: Vec<Candidate> = match given {
                Some(given) => given.iter().map(|Object(one)| one.clone()).collect(),
                None => found.workers.iter().map(all).collect(),
            };
            let options = LookupOptions {
                expected: request.expected,
                whole_prompt: request.whole_prompt,
            };
            let scopes = with_items(&found, &request.mm)?;
            let rows = self.find(table, &scopes, tokens, &options)?;
            let is_sampled = self.decisions.is_due();
            let (mut selected, place) = select::select(
                table,
                &found,
                request,
                &candidates,
                &rows,
                (tokens.len(), request.explain || is_sampled, self.limits.reservation_seconds),
                (&self.unfollowed, &self.terms, &self.ties, &self.loads),
            )?;
            if is_sampled {
                self.decisions.add(&found.scope, tokens.len(), &selected);
                if !request.explain {
                    (selected.considered, selected.unreachable) = (None, None);
                }
            }
            if request.expect_seconds > 0.0
                && let Some(place) = place
            {
                table.expect(place, &found.scope, tokens, request.expect_seconds);
            }
            encode_answer(&selected, longest_match(&rows), wants_msgpack)
        })
    }

    fn reservation(&self, verb: ReservationAction, id: &str, update: &ReservationUpdate, wants_msgpack: bool) -> Answer {
        let reservation = match verb {
            ReservationAction::Show => self.loads.reservation(id),
            ReservationAction::Update => self.loads.update(id, &update.checked().ok_or(Declined::Unread)?),
            ReservationAction::Finish => self.loads.finish(id),
        };
        let reservation = reservation.ok_or_else(|| Declined::Refused(Problem::no_such_reservation(id)))?;
        encode_answer(&reservation, 0, wants_msgpack)
    }

    fn check_tokens(&self, count: usize) -> Result<(), Declined> {
        if count > self.limits.max_tokens {
            return Err(Declined::Unread);
        }
        Ok(())
    }
}

/// Returns an answer in the format of Dynamo or Mooncake.
fn indexer_answer(
    table: &Table,
    found: &Candidates,
    mut rows: Vec<Row>,
    (is_dynamo, instance, block_size): (bool, Option<&requests::Id>, Option<u64>),
) -> Answer {
    if block_size == Some(0) {
        return Err(Declined::Unread);
    }
    let longest = longest_match(&rows);
    // A worker that is not EXACT might hold more than is known. So each such worker is in the answer, with its trust.
    add_others(&mut rows, &found.inexact);
    let instance = instance.filter(|_| !is_dynamo).map(requests::Id::text);
    rows.retain(|row| {
        let worker = table.worker(row.place);
        !worker.is_hidden
            && instance.as_ref().is_none_or(|name| worker.instance == *name)
            && (block_size.is_none() || worker.block_size.is_none() || worker.block_size == block_size)
    });
    let body = if is_dynamo {
        answers::dynamo(table, &rows)
    } else {
        answers::mooncake(table, &found.scope.tenant, &rows)
    };
    Ok(QueryAnswer { body, longest })
}

/// Returns the scope of a request; None if `/v1` does not admit one of its names.
fn checked_scope(request: &impl Names) -> Result<Scope, Declined> {
    request.scope().filter(|_| request.has_good_names()).ok_or(Declined::Unread)
}

fn read_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Declined> {
    let Object(request) = serde_json::from_slice(body).map_err(|_| Declined::Unread)?;
    Ok(request)
}

fn read_msgpack<T: DeserializeOwned>(body: &[u8]) -> Result<T, Declined> {
    let mut reader = rmp_serde::Deserializer::new(body);
    match Object::deserialize(&mut reader) {
        Ok(Object(request)) if reader.get_ref().is_empty() => Ok(request),
        Ok(_) | Err(_) => Err(Declined::Unread),
    }
}

fn body_of(answer: Answer) -> Option<Result<Vec<u8>, Problem>> {
    match answer {
        Ok(answered) => Some(Ok(answered.body)),
        Err(Declined::Refused(problem)) => Some(Err(problem)),
        Err(Declined::Unread | Declined::Outdated) => None,
    }
}

/// How a prompt is looked up.
struct LookupOptions {
    expected: bool,
    whole_prompt: bool,
}

/// Returns the scopes of candidates, each with the multimodal items of a request.
fn with_items<'a>(found: &'a Candidates, media: &[Object<Media>]) -> Result<Cow<'a, [kvevents_index::Scope]>, Declined> {
    let items = requests::items(media).ok_or(Declined::Unread)?;
    if items.is_empty() {
        return Ok(Cow::Borrowed(&found.within));
    }
    let with_items = |scope: &kvevents_index::Scope| kvevents_index::Scope {
        items: items.clone(),
        ..scope.clone()
    };
    Ok(found.within.iter().map(with_items).collect())
}

fn longest_match(rows: &[Row]) -> u32 {
    rows.iter().map(|row| row.tokens).max().unwrap_or(0)
}

/// Removes all rows of each worker except its longest. A worker has several rows if it was looked up in several namespaces.
fn keep_longest(rows: &mut Vec<Row>) {
    let mut longest: HashMap<u32, u32> = HashMap::with_capacity(rows.len());
    for row in rows.iter() {
        let tokens = longest.entry(row.place).or_default();
        *tokens = row.tokens.max(*tokens);
    }
    if longest.len() < rows.len() {
        rows.retain(|row| longest.get(&row.place) == Some(&row.tokens) && longest.remove(&row.place).is_some());
    }
}

/// Adds rows of workers that hold no token.
fn add_others(rows: &mut Vec<Row>, workers: &[u32]) {
    let holders = rows.len();
    if holders * workers.len() <= 4_096 {
        for &place in workers {
            if rows[..holders].iter().all(|row| row.place != place) {
                rows.push(Row::empty(place));
            }
        }
        return;
    }
    let known: std::collections::HashSet<u32> = rows.iter().map(|row| row.place).collect();
    let others = workers.iter().filter(|place| !known.contains(place));
    rows.extend(others.map(|&place| Row::empty(place)));
}

/// Reads a raw prompt: its token ids. The other fields are in the query string.
fn raw_match(query_string: &str, body: &[u8]) -> Result<Match, Declined> {
    let (numbers, rest) = body.as_chunks::<4>();
    let request = requests::of_query_string(query_string).filter(|_| rest.is_empty());
    let tokens = Some(numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect());
    Ok(Match {
        tokens,
        ..request.ok_or(Declined::Unread)?
    })
}

fn encode_answer(answer: &impl Serialize, longest: u32, wants_msgpack: bool) -> Answer {
    let body = if wants_msgpack {
        rmp_serde::to_vec_named(answer).ok()
    } else {
        serde_json::to_vec(answer).ok()
    };
    let body = body.ok_or(Declined::Unread)?;
    Ok(QueryAnswer { body, longest })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::fleet::tests::{change, index, row};

    /// The index removes the blocks of a worker after the worker has left the table. So a lookup with the old table might not find these
    /// blocks.
    #[test]
    fn a_query_is_answered_again_if_a_worker_leaves_meanwhile() {
        let terms = serde_json::from_value(json!({"tiers": {}, "trust": {}, "wait_weight": 1.0, "load_weight": 1.0}));
        let loads = Arc::new(Loads::new(Duration::from_secs(1), 1));
        let endpoints = Endpoints::new(Limits::for_tests(), terms.unwrap(), Metrics::new(&[1.0], &[1.0]), loads);
        let (index, tries) = (index(), Cell::new(0));
        let apply = |removed: &[u32], workers| endpoints.change_table(&change(removed, &workers), index.clone()).unwrap();
        apply(&[], json!({"1": row("a", "EXACT"), "2": row("b", "EXACT")}));
        let answer = endpoints.with_table(|table| {
            match tries.replace(tries.get() + 1) {
                0 => apply(&[1], json!({})),
                _ => apply(&[], json!({"3": row("c", "EXACT")})),
            }
            endpoints.check_present(table)?;
            let longest = table.workers().count() as u32;
            Ok(QueryAnswer {
                body: Vec::new(),
                longest,
            })
        });
        assert_eq!((tries.get(), answer.unwrap().longest), (2, 1));
    }
}
