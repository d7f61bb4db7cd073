//! Queries: from the body of a request to that of its answer.

use std::borrow::Cow;
use std::sync::Arc;

use parking_lot::RwLock;
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};

use crate::answers::{self, MatchAnswer, MatchManyAnswer, PromptMatch, Row};
use crate::fleet::{Candidates, Table, monotonic};
use crate::json_tokens;
use crate::messages::{MatchManyRequest, MatchRequest, SelectRequest};
use crate::metrics::Metrics;
use crate::requests::{self, Candidate, HashQuery, Match, MatchMany, Media, Names, Object, Query, Select};
use crate::select;
use crate::settings::Limits;
use kvevents_index::holders::placements::LEVELS;
use kvevents_index::keys;
use kvevents_index::{Index, Matches};
use kvevents_routing::{EngineLoads, Terms, Ties, Trust, WorkerTrust};

/// A query that is answered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    Query,
    QueryByHash,
    Match,
    MatchMany,
    Select,
}

impl Question {
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/query" => Self::Query,
            "/query_by_hash" => Self::QueryByHash,
            "/v1/match" => Self::Match,
            "/v1/match_many" => Self::MatchMany,
            "/v1/select" => Self::Select,
            _ => return None,
        })
    }

    /// Whether its answer can be msgpack; answers in formats of other services are JSON.
    pub(crate) fn is_ours(self) -> bool {
        !matches!(self, Self::Query | Self::QueryByHash)
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Query => "/query",
            Self::QueryByHash => "/query_by_hash",
            Self::Match => "/v1/match",
            Self::MatchMany => "/v1/match_many",
            Self::Select => "/v1/select",
        }
    }
}

/// The encoding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Msgpack,
    /// Token ids as 32-bit numbers; the other fields are in the query string.
    Raw,
}

/// The parts of a request besides its body.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) format: Format,
    /// Whether the answer is msgpack.
    pub(crate) wants_msgpack: bool,
    pub(crate) query_string: Option<String>,
}

/// The parts for a gRPC message, which is read and answered as JSON.
const OF_MESSAGE: Head = Head {
    format: Format::Json,
    wants_msgpack: false,
    query_string: None,
};

/// Answers queries from the current table.
pub(crate) struct Endpoints {
    table: RwLock<Option<Arc<Table>>>,
    limits: Limits,
    pub(crate) metrics: Metrics,
    ties: Ties,
    loads: Arc<EngineLoads>,
    terms: Terms,
    unfollowed: (Trust, u8),
}

impl Endpoints {
    pub(crate) fn new(limits: Limits, terms: Terms, metrics: Metrics, loads: Arc<EngineLoads>) -> Self {
        Self {
            table: RwLock::default(),
            limits,
            metrics,
            ties: Ties::by_chance(),
            loads,
            terms,
            unfollowed: select::unfollowed(),
        }
    }

    /// Answers from another table from now on, as `Table::read` reads it.
    pub(crate) fn replace(&self, changes: &[u8], index: Arc<Index>) -> Result<(), String> {
        let table = Table::read(changes, index, self.table().as_deref())?;
        let before = self.table.write().replace(Arc::new(table));
        drop(before); // without the lock
        Ok(())
    }

    /// Returns the body of the answer. None for a query that is not answered here, which is forwarded.
    pub(crate) fn answer(&self, question: Question, head: &Head, body: &[u8]) -> Option<Vec<u8>> {
        let is_raw = head.format == Format::Raw;
        if (is_raw && question != Question::Match)
            || (!is_raw && head.query_string.as_deref().is_some_and(|text| !text.is_empty()))
        {
            return None;
        }
        let table = self.table()?;
        match question {
            Question::Query => self.query(
                &table,
                self.read_prompt(head, body, "token_ids", |request: &mut Query| &mut request.token_ids)?,
            ),
            Question::QueryByHash => self.query_by_hash(&table, &self.read(head, body)?),
            Question::Match => {
                let request = if is_raw {
                    raw(head.query_string.as_deref().unwrap_or_default(), body)?
                } else {
                    self.read_prompt(head, body, "tokens", |request: &mut Match| &mut request.tokens)?
                };
                self.one_match(&table, &request, head)
            }
            Question::MatchMany => self.many_matches(&table, &self.read(head, body)?, head),
            Question::Select => self.select(
                &table,
                &self.read_prompt(head, body, "tokens", |request: &mut Select| &mut request.tokens)?,
                head,
            ),
        }
    }

    /// Answers a gRPC message, as JSON.
    pub(crate) fn answer_match(&self, mut message: MatchRequest) -> Option<Vec<u8>> {
        let tokens = Some(std::mem::take(&mut message.tokens));
        let table = self.table()?;
        let mut request: Match = self.read_message(&message)?;
        request.tokens = tokens;
        self.one_match(&table, &request, &OF_MESSAGE)
    }

    pub(crate) fn answer_match_many(&self, mut message: MatchManyRequest) -> Option<Vec<u8>> {
        let prompts = std::mem::take(&mut message.prompts);
        let table = self.table()?;
        let mut request: MatchMany = self.read_message(&message)?;
        request.prompts = Some(prompts.into_iter().map(|prompt| prompt.tokens).collect());
        self.many_matches(&table, &request, &OF_MESSAGE)
    }

    pub(crate) fn answer_select(&self, mut message: SelectRequest) -> Option<Vec<u8>> {
        let tokens = Some(std::mem::take(&mut message.tokens));
        let table = self.table()?;
        let mut request: Select = self.read_message(&message)?;
        request.tokens = tokens;
        self.select(&table, &request, &OF_MESSAGE)
    }

    /// A message without its token ids.
    fn read_message<T: DeserializeOwned>(&self, message: &impl Serialize) -> Option<T> {
        self.read(&OF_MESSAGE, &serde_json::to_vec(message).ok()?)
    }

    fn table(&self) -> Option<Arc<Table>> {
        self.table.read().clone()
    }

    fn read<T: DeserializeOwned>(&self, head: &Head, body: &[u8]) -> Option<T> {
        if body.len() > self.limits.max_json_bytes {
            return None;
        }
        match head.format {
            Format::Json => serde_json::from_slice(body).ok().map(|Object(request)| request),
            Format::Msgpack => {
                let mut reader = rmp_serde::Deserializer::new(body);
                let Object(request) = Object::deserialize(&mut reader).ok()?;
                reader.get_ref().is_empty().then_some(request)
            }
            Format::Raw => None,
        }
    }

    /// Reads a prompt, whose token ids do not count towards the limit of JSON.
    fn read_prompt<T: DeserializeOwned>(
        &self,
        head: &Head,
        body: &[u8],
        name: &str,
        place: impl FnOnce(&mut T) -> &mut Option<Vec<u32>>,
    ) -> Option<T> {
        if head.format != Format::Json {
            return self.read(head, body);
        }
        let (rest, prompt) = json_tokens::lift(body, name)?;
        let mut request = self.read(head, &rest)?;
        *place(&mut request) = Some(prompt);
        Some(request)
    }

    // --- the index

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

    /// How much of a prompt each worker holds. `scopes` are those of the candidates, with the items of the request.
    fn find(&self, table: &Table, scopes: &[kvevents_index::Scope], tokens: &[u32], options: &Options) -> Vec<Row> {
        // Engines recompute the last token, and with it the block that it is in.
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
        self.metrics.lookup(tokens.len(), longest(&rows));
        rows
    }

    // --- the endpoints

    fn query(&self, table: &Table, request: Query) -> Option<Vec<u8>> {
        let tokens = request.token_ids.as_deref()?;
        self.check_tokens(tokens.len())?;
        let found = table.candidates(&request.scope()?)?;
        let options = Options {
            expected: false,
            whole_prompt: request.whole_prompt,
        };
        let rows = self.find(table, &found.within, tokens, &options);
        self.field(
            table,
            &found,
            rows,
            (request.model_name.is_some(), request.instance_id.as_ref(), request.block_size),
        )
    }

    fn query_by_hash(&self, table: &Table, request: &HashQuery) -> Option<Vec<u8>> {
        let mut given = [&request.block_hashes, &request.seq_hashes, &request.block_hash]
            .into_iter()
            .flatten();
        let (hashes, None) = (given.next()?, given.next()) else {
            return None;
        };
        if hashes.len() > self.limits.max_hashes {
            return None;
        }
        let mut keys = hashes.iter().map(requests::Id::hash).collect::<Option<Vec<u64>>>()?;
        if request.block_hashes.is_some() {
            keys::chain(None, &mut keys);
        }
        let found = table.candidates(&request.scope()?)?;
        let mut rows = Vec::new();
        for scope in &found.within {
            for size in &found.block_sizes {
                let matches = table.index.match_rolling_keys(&keys, Some(*size), &scope.model)?;
                self.rows(table, &matches, &mut rows);
            }
        }
        self.metrics.lookup(0, longest(&rows));
        self.field(
            table,
            &found,
            rows,
            (request.model_name.is_some(), request.instance_id.as_ref(), request.block_size),
        )
    }

    /// An answer in the format of Dynamo or of Mooncake.
    fn field(
        &self,
        table: &Table,
        found: &Candidates,
        mut rows: Vec<Row>,
        (is_dynamo, instance, block_size): (bool, Option<&requests::Id>, Option<u64>),
    ) -> Option<Vec<u8>> {
        if block_size == Some(0) {
            return None;
        }
        // Those that are not EXACT might hold more than is known, and their trust says so.
        add_others(&mut rows, &found.inexact);
        let instance = instance.filter(|_| !is_dynamo).map(requests::Id::text);
        rows.retain(|row| {
            let worker = table.worker(row.place);
            !worker.is_hidden
                && instance.as_ref().is_none_or(|name| worker.instance == *name)
                && (block_size.is_none() || worker.block_size.is_none() || worker.block_size == block_size)
        });
        Some(if is_dynamo {
            answers::dynamo(table, &rows)
        } else {
            answers::mooncake(table, &found.scope.tenant, &rows)
        })
    }

    fn one_match(&self, table: &Table, request: &Match, head: &Head) -> Option<Vec<u8>> {
        let tokens = request.tokens.as_deref()?;
        self.check_tokens(tokens.len())?;
        let found = table.candidates(&request.scope().filter(|_| request.has_good_names())?)?;
        let options = Options {
            expected: request.expected,
            whole_prompt: request.whole_prompt,
        };
        let scopes = with_items(&found, &request.mm)?;
        let mut rows = self.find(table, &scopes, tokens, &options);
        add_others(&mut rows, &found.workers);
        let answer = MatchAnswer {
            prompt_tokens: tokens.len(),
            workers: answers::held(table, &rows),
        };
        encode_answer(&answer, head)
    }

    fn many_matches(&self, table: &Table, request: &MatchMany, head: &Head) -> Option<Vec<u8>> {
        let prompts = request.checked()?;
        self.check_tokens(prompts.iter().map(Vec::len).sum())?;
        let found = table.candidates(&request.scope().filter(|_| request.has_good_names())?)?;
        let options = Options {
            expected: request.expected,
            whole_prompt: request.whole_prompt,
        };
        let mut matches = Vec::with_capacity(prompts.len());
        let scopes = with_items(&found, &request.mm)?;
        for tokens in prompts {
            let rows = self.find(table, &scopes, tokens, &options);
            matches.push(PromptMatch {
                prompt_tokens: tokens.len(),
                holders: answers::held(table, &rows),
            });
        }
        let trust = |&place: &u32| {
            let worker = table.worker(place);
            WorkerTrust {
                instance: &worker.instance,
                rank: worker.rank,
                trust: &worker.trust,
            }
        };
        let answer = MatchManyAnswer {
            matches,
            workers: found.workers.iter().map(trust).collect(),
        };
        encode_answer(&answer, head)
    }

    fn select(&self, table: &Table, request: &Select, head: &Head) -> Option<Vec<u8>> {
        let tokens = request.tokens.as_deref()?;
        self.check_tokens(tokens.len())?;
        if !request.is_sound()
            || !request.has_good_names()
            || request
                .candidates
                .as_ref()
                .is_some_and(|some| some.len() > self.limits.max_candidates)
        {
            return None;
        }
        let found = table.candidates(&request.scope()?)?;
        let all = |place: &u32| Candidate::new(&table.worker(*place).instance, table.worker(*place).rank);
        let candidates: Vec<Candidate> = match &request.candidates {
            Some(given) => given.iter().map(|Object(one)| one.clone()).collect(),
            None => found.workers.iter().map(all).collect(),
        };
        let options = Options {
            expected: request.expected,
            whole_prompt: request.whole_prompt,
        };
        let scopes = with_items(&found, &request.mm)?;
        let rows = self.find(table, &scopes, tokens, &options);
        let (selected, place) = select::select(
            table,
            &found,
            request,
            &candidates,
            &rows,
            tokens.len(),
            (&self.unfollowed, &self.terms, &self.ties, &self.loads),
        )?;
        if request.expect_seconds > 0.0
            && let Some(place) = place
        {
            table.expect(place, &found.scope, tokens, request.expect_seconds);
        }
        encode_answer(&selected, head)
    }

    fn check_tokens(&self, count: usize) -> Option<()> {
        (count <= self.limits.max_tokens).then_some(())
    }
}

/// How a prompt is looked up.
struct Options {
    expected: bool,
    whole_prompt: bool,
}

/// Returns the scopes of candidates with the items of a request. None for too many items.
fn with_items<'a>(found: &'a Candidates, media: &[Object<Media>]) -> Option<Cow<'a, [kvevents_index::Scope]>> {
    let items = requests::items(media)?;
    if items.is_empty() {
        return Some(Cow::Borrowed(&found.within));
    }
    let with_items = |scope: &kvevents_index::Scope| kvevents_index::Scope {
        items: items.clone(),
        ..scope.clone()
    };
    Some(found.within.iter().map(with_items).collect())
}

fn longest(rows: &[Row]) -> u32 {
    rows.iter().map(|row| row.tokens).max().unwrap_or(0)
}

/// Adds the rows of workers that hold nothing.
fn add_others(rows: &mut Vec<Row>, workers: &[u32]) {
    let holders = rows.len();
    if holders * workers.len() <= 4_096 {
        for &place in workers {
            if rows[..holders].iter().all(|row| row.place != place) {
                rows.push(Row::nothing(place));
            }
        }
        return;
    }
    let known: std::collections::HashSet<u32> = rows.iter().map(|row| row.place).collect();
    let others = workers.iter().filter(|place| !known.contains(place));
    rows.extend(others.map(|&place| Row::nothing(place)));
}

/// Reads a raw prompt, with everything else in the query string.
fn raw(query_string: &str, body: &[u8]) -> Option<Match> {
    let (numbers, rest) = body.as_chunks::<4>();
    if !rest.is_empty() {
        return None;
    }
    let mut request = requests::of_query_string(query_string)?;
    request.tokens = Some(numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect());
    Some(request)
}

fn encode_answer<T: Serialize>(answer: &T, head: &Head) -> Option<Vec<u8>> {
    if head.wants_msgpack {
        rmp_serde::to_vec_named(answer).ok()
    } else {
        serde_json::to_vec(answer).ok()
    }
}
