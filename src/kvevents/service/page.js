"use strict";
// Everything that comes from the service is shown through text nodes: an engine's name may be anything, markup included.

const STATES = ["STALE", "DEGRADED", "CONNECTING", "REPLAYING", "EXACT"]; // the worst first, as the table sorts them
const TIERS = ["gpu", "cpu", "disk", "other"]; // as the index knows them; their counts in a match are cumulative in this order
const WINDOWS = [60, 120, 300, 600],
  SPARK_SAMPLES = 60,
  LOG_LINES = 100;
const SECONDS = {stats: 2, sources: 3, probes: 3, choices: 3, hidden: 30, longest: 15, patience: 10, silence: 40}; // a heartbeat comes every 15

// ---- Elements ------------------------------------------------------------------------------------------------------------

const $ = id => document.getElementById(id);

/** An element with properties (or attributes, where there is no such property) and children; strings become text. */
function make(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function draw(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Change the document only where something has changed: most rows stay the same in most polls. */
const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
const putClass = (element, name) => {
  if (element.className !== name) element.className = name;
};

/** Replace the children of an element if the facts that they show have changed. */
function replaceIfChanged(element, facts, children) {
  const shown = JSON.stringify(facts);
  if (element.shown !== shown) element.replaceChildren(...children());
  element.shown = shown;
}

const tierClass = tier => (TIERS.includes(tier) ? tier : "other");
const trustWord = state => make("span", {className: `trust ${state}`}, state);

// ---- Numbers -------------------------------------------------------------------------------------------------------------

const plain = new Intl.NumberFormat("en"),
  short = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});
const collator = new Intl.Collator("en", {numeric: true});
const count = n => (n < 1e8 ? plain.format(n) : short.format(n));
const pace = n => (n === null ? "–" : n > 0 && n < 10 ? n.toFixed(1) : plain.format(Math.round(n)));
const share = (part, whole) => (whole ? `${Math.floor((100 * part) / whole)} %` : "0 %"); // 100 % is said of all only
const several = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;
const sum = numbers => numbers.reduce((total, n) => total + n, 0);

/** The time, with the date if that is not today's. */
function clock(seconds) {
  const then = new Date(seconds * 1000),
    date =
      then.toDateString() === new Date().toDateString()
        ? ""
        : `${then.toLocaleDateString("en-GB", {day: "numeric", month: "short"})}, `;
  return date + then.toLocaleTimeString("en-GB");
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${n < 10 && unit ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

function span(seconds) {
  const s = Math.max(1, Math.floor(seconds)),
    minutes = Math.floor(s / 60),
    hours = Math.floor(s / 3600);
  if (s < 60) return `${s} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

function lag(seconds) {
  const size = Math.abs(seconds ?? 0),
    sign = seconds < 0 ? "−" : ""; // an engine's clock may be ahead of ours
  return seconds === null
    ? "–"
    : sign + (size < 1 ? `${Math.round(size * 1000)} ms` : size < 60 ? `${size.toFixed(1)} s` : span(size));
}

// ---- Contact with the service --------------------------------------------------------------------------------------------

/** What the service, or this page, has to say against a request: a Problem of `/v1`. Any other error is one of this page. */
class RefusedError extends Error {
  constructor({detail, hint = "", unreachable = false}) {
    super(detail);
    Object.assign(this, {hint, unreachable});
  }
}

/** What is lost when one of the ways to the service fails, the worst first. */
const LOSSES = {
  polling: {what: "No figures", effect: "All figures are from then."},
  sources: {what: "The fleet cannot be read", effect: "Its table is from then."},
  events: {what: "No live events", effect: `Figures are asked for every ${SECONDS.sources} seconds.`},
};

const contact = {
  token: recall(),
  locked: false, // a token is needed: nothing is asked until there is one
  broken: new Map(), // of LOSSES: since when, and the error
  skew: 0, // seconds that the service's clock is ahead of this one's, where it matters

  headers(more) {
    return this.token ? {...more, Authorization: `Bearer ${this.token}`} : more;
  },
  /** The service's time. While it does not answer its time stands still, since ages would otherwise blame the engines. */
  now() {
    return (this.broken.get("polling")?.since ?? Date.now() / 1000) + this.skew;
  },
  lose(what, error) {
    this.broken.set(what, {since: this.broken.get(what)?.since ?? Date.now() / 1000, error});
    showContact();
  },
  regain(what) {
    if (!this.broken.delete(what)) return;
    showContact();
    askAll(); // one way is open again: so may be the others
  },
};

function recall() {
  try {
    return sessionStorage.getItem("kvevents-token") ?? "";
  } catch {
    return "";
  } // a browser may keep nothing
}

/** The outcome of something that a network may come between. */
function reached(promise) {
  return promise.catch(error => {
    if (error instanceof RefusedError) throw error;
    throw new RefusedError({
      detail:
        error.name === "TimeoutError" ? `No answer within ${SECONDS.patience} seconds.` : "The service cannot be reached.",
      unreachable: true,
    });
  });
}

async function ask(path, body) {
  const {token} = contact;
  const request = {
    headers: contact.headers(body && {"Content-Type": "application/json"}),
    cache: body ? "no-store" : "no-cache", // listings have entity tags
    signal: AbortSignal.timeout(SECONDS.patience * 1000),
  };
  const answer = await reached(fetch(path, body ? {...request, method: "POST", body: JSON.stringify(body)} : request));
  const skew = (Date.parse(answer.headers.get("Date")) - Date.now()) / 1000;
  contact.skew = Math.abs(skew) > 2 ? skew : 0; // the header counts whole seconds
  return await read(answer, token);
}

async function read(answer, token) {
  const data = await answer.json().catch(() => null);
  if (answer.status === 401 && token === contact.token) lock(data); // else it is of a token that was replaced meanwhile
  // Not being ready is an answer too, though its status says 503; any other is a Problem.
  if (data === null || (!answer.ok && "detail" in data))
    throw new RefusedError(data ?? {detail: `The service answered with status ${answer.status}.`});
  return data;
}

function showContact() {
  const worst = Object.keys(LOSSES).find(what => contact.broken.has(what));
  document.body.classList.toggle("lost", worst === "polling");
  $("lost").hidden = !worst || contact.locked;
  if (!worst) return;
  const {since, error} = contact.broken.get(worst),
    {what, effect} = LOSSES[worst];
  putClass($("lost"), worst === "polling" ? "banner bad" : "banner warn");
  if (worst === "polling" && error.unreachable) showReady("NO ANSWER", "STALE", "");
  put(
    $("lost-why"),
    `${error.unreachable && worst === "polling" ? "Connection lost" : what} since ${clock(since)}: ${error.message} ${effect}`,
  );
}

function lock(problem) {
  if (contact.locked) return;
  contact.locked = true;
  put(
    $("locked-why"),
    [
      problem?.detail ?? "The service wants a token.",
      contact.token ? "The one in use is not accepted." : "",
      problem?.hint ?? "",
    ].join(" "),
  );
  $("locked").hidden = false;
  $("token").focus();
  showContact();
}

$("locked-form").addEventListener("submit", event => {
  event.preventDefault();
  contact.token = $("token").value.trim();
  try {
    sessionStorage.setItem("kvevents-token", contact.token);
  } catch {
    /* then it lasts as long as the page */
  }
  $("token").value = "";
  $("locked").hidden = true;
  contact.locked = false;
  askAll();
});

/** A request that is repeated: rarely while the page is hidden, and with growing pauses while it fails. */
class Poller {
  constructor(seconds, task) {
    Object.assign(this, {seconds, task, failures: 0, timer: 0, running: false, again: false});
  }
  /** Ask now. A call while an answer is under way asks once more after it. */
  async now() {
    this.again = this.running;
    if (this.running || contact.locked) return;
    clearTimeout(this.timer);
    this.running = true;
    try {
      await this.task();
      this.failures = 0;
    } catch (error) {
      this.failures++;
      if (!(error instanceof RefusedError)) console.error(error);
    }
    this.running = false;
    const wait = Math.min(this.seconds * 2 ** this.failures, Math.max(this.seconds, SECONDS.longest));
    const seconds = document.hidden ? Math.max(wait, SECONDS.hidden) : wait;
    this.timer = setTimeout(() => this.now(), this.again ? 500 : seconds * 1000 * (0.9 + 0.2 * Math.random()));
  }
}

// ---- The service in numbers ----------------------------------------------------------------------------------------------

let lookupsBefore = null;

function showReady(word, look, reason) {
  put($("ready"), word);
  putClass($("ready"), `trust ${look}`);
  put($("ready-why"), reason);
}

function showProbes({ready, why}, {status, warnings}) {
  if (status !== "ok") showReady("FAILED", "STALE", "Engines are no longer followed: restart this service.");
  else showReady(ready ? "READY" : "NOT READY", ready ? "EXACT" : "STALE", why);
  showFaults({warnings});
}

const tile = (name, big, more) => {
  put($(name), big);
  put($(`${name}-more`), more);
};

function showStats(stats) {
  const now = contact.now(),
    sources = sum(Object.values(stats.sources)),
    exact = stats.sources.EXACT ?? 0,
    limit = stats.memory_limit;
  const lookupRate =
    lookupsBefore && now > lookupsBefore.at ? (stats.lookups - lookupsBefore.lookups) / (now - lookupsBefore.at) : 0;
  lookupsBefore = {at: now, lookups: stats.lookups};
  document.title = sources ? `${exact}/${sources} exact · kvevents` : "kvevents";
  put($("about"), `version ${stats.version}, up ${span(stats.uptime_seconds)}`);
  tile("workers", count(stats.workers), `${exact} of ${several(sources, "source")} EXACT`);
  tile(
    "blocks",
    count(stats.blocks),
    `${count(stats.unique_blocks)} unique` + (stats.orphans ? `, ${several(stats.orphans, "orphan")}` : ""),
  );
  tile(
    "index",
    bytes(stats.index_bytes),
    (limit ? `${share(stats.index_bytes, limit)} of ${bytes(limit)}` : "no limit") +
      (stats.evicted ? `, ${count(stats.evicted)} evicted` : ""),
  );
  $("index-meter").hidden = !limit;
  $("index-meter").firstElementChild.style.width = `${limit ? Math.min(100, (100 * stats.index_bytes) / limit) : 0}%`;
  tile(
    "lookups",
    count(stats.lookups),
    (stats.lookups ? `${share(stats.hits, stats.lookups)} hits` : "none yet") +
      (lookupRate > 0 ? `, ${pace(lookupRate)}/s` : ""),
  );
  tile("batches", pace(stats.batches_per_second), `${count(stats.batches)} in all`);
  const off = stats.snapshot_seconds === null;
  const written = off
    ? "without state_dir none is written"
    : stats.snapshot_at === null
      ? "none written yet"
      : `at ${clock(stats.snapshot_at)}`;
  tile(
    "snapshot",
    stats.snapshot_at === null ? (off ? "off" : "none") : `${span(now - stats.snapshot_at)} ago`,
    stats.snapshot_fault ? `Fault: ${stats.snapshot_fault}` : written,
  );
  $("snapshot-more").classList.toggle("bad-text", Boolean(stats.snapshot_fault));
  showTiers(stats.tiers, stats.blocks);
}

/** A part of a bar, in the colour of its tier. */
function fill(tier, part, whole) {
  const made = make("span", {className: tierClass(tier)});
  made.style.width = `${(100 * part) / (whole || 1)}%`;
  return made;
}

const bar = (...parts) => make("div", {className: "bar", "aria-hidden": "true"}, ...parts); // its figures are beside it

function showTiers(tiers, blocks) {
  const total = sum(Object.values(tiers)),
    names = Object.keys(tiers).sort((a, b) => TIERS.indexOf(a) - TIERS.indexOf(b));
  $("tiers").replaceChildren(
    ...names.map(name => {
      const percent = make("small", {}, ` ${Math.round((100 * tiers[name]) / (total || 1))} %`);
      return make(
        "li",
        {},
        make("div", {className: "label"}, make("span", {}, name), make("span", {}, count(tiers[name]), percent)),
        bar(fill(name, tiers[name], total)),
      );
    }),
  );
  if (!names.length) $("tiers").append(make("li", {className: "soft"}, blocks ? "Not known." : "No blocks yet."));
}

const attention = {warnings: [], faults: {}};

/** What the service warns of, and what discovery could not find out. */
function showFaults(news) {
  Object.assign(attention, news);
  const found = Object.entries(attention.faults).flatMap(([origin, sentences]) =>
    sentences.map(sentence => [`discovery, ${origin}`, sentence]),
  );
  const lines = [...attention.warnings.map(warning => ["service", warning]), ...found];
  $("faults").hidden = !lines.length;
  replaceIfChanged($("faults-list"), lines, () =>
    lines.map(([origin, sentence]) => make("li", {}, make("bdi", {className: "soft"}, origin), `: ${sentence}`)),
  );
}

// ---- Charts --------------------------------------------------------------------------------------------------------------

/** One value over the last ten minutes, or as many as this page has seen. Where the service did not answer the curve is broken. */
class Chart {
  constructor(name, unit) {
    Object.assign(this, {svg: $(name), said: $(`${name}-now`), unit, points: [], cursor: null});
    this.svg.addEventListener("pointermove", event => {
      this.cursor = event.offsetX;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }
  add(value) {
    const at = Date.now() / 1000;
    this.points.push({at, value});
    while (this.points[0].at < at - WINDOWS.at(-1)) this.points.shift();
    if (!document.hidden) this.draw();
  }
  draw() {
    const width = this.svg.clientWidth,
      height = this.svg.clientHeight,
      left = 40,
      bottom = height - 18,
      head = 8,
      now = Date.now() / 1000;
    if (!width) return;
    const known = this.points.filter(point => point.value !== null),
      most = Math.max(0, ...known.map(point => point.value)),
      top = ceiling(Math.max(1, most));
    const seen = now - (this.points[0]?.at ?? now),
      shown = WINDOWS.find(seconds => seen <= seconds) ?? WINDOWS.at(-1);
    const x = at => (width - ((now - at) / shown) * (width - left)).toFixed(1),
      y = value => (bottom - (value / top) * (bottom - head)).toFixed(1);
    const parts = [];
    for (const value of [0, top / 2, top]) {
      parts.push(draw("line", {class: "grid", x1: left, x2: width, y1: y(value), y2: y(value)}));
      parts.push(draw("text", {x: left - 6, y: Number(y(value)) + 4, "text-anchor": "end"}, short.format(value)));
    }
    for (const [ago, anchor] of [
      [shown, "start"],
      [shown / 2, "middle"],
      [0, "end"],
    ]) {
      parts.push(
        draw(
          "text",
          {x: x(now - ago), y: height - 3, "text-anchor": anchor},
          ago ? `−${ago === 150 ? "2½ min" : span(ago)}` : "now",
        ),
      );
    }
    for (const run of this.runs()) {
      const line = run.map(point => `${x(point.at)},${y(point.value)}`).join("L");
      parts.push(
        draw("path", {class: "area", d: `M${x(run[0].at)},${bottom}L${line}L${x(run.at(-1).at)},${bottom}Z`}),
        draw("path", {class: "curve", d: `M${line}`}),
      );
    }
    const pointed = this.cursor === null ? now : now - ((width - this.cursor) / (width - left)) * shown;
    const near = known.reduce(
      (best, point) => (best && Math.abs(best.at - pointed) <= Math.abs(point.at - pointed) ? best : point),
      null,
    );
    if (near && this.cursor !== null)
      parts.push(draw("line", {class: "cursor", x1: x(near.at), x2: x(near.at), y1: head, y2: bottom}));
    this.svg.replaceChildren(...parts);
    put(this.said, near ? this.unit(near.value) + (this.cursor === null ? "" : ` at ${clock(near.at)}`) : "");
    this.svg.setAttribute(
      "aria-label",
      near ? `Now ${this.unit(known.at(-1).value)}; at most ${this.unit(most)} in the last ${span(seen)}` : "Nothing yet",
    );
  }
  runs() {
    const runs = [[]];
    for (const point of this.points) {
      if (point.value === null) runs.push([]);
      else runs.at(-1).push(point);
    }
    return runs.filter(run => run.length);
  }
}

/** The next round number, so that the scale does not breathe with every sample. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find(step => step * power >= value);
}

const charts = {blocks: new Chart("chart-blocks", count), batches: new Chart("chart-batches", value => `${pace(value)}/s`)};

// ---- Fleet ---------------------------------------------------------------------------------------------------------------

const COLUMNS = [
  {name: "Instance", of: row => row.view.instance},
  {name: "Rank", of: row => row.view.rank, number: true},
  {name: "Model", of: row => row.view.model},
  {name: "Trust", of: row => STATES.indexOf(row.view.trust.state)},
  {name: "Blocks", of: row => row.view.blocks, number: true, down: true},
  {name: "Batches/s", of: row => row.rate ?? -1, number: true, down: true},
  {name: "Last event", of: row => -(row.view.last_event ?? 0), number: true, down: true},
  {name: "Lag", of: row => row.view.lag_seconds ?? -1, number: true, down: true},
  {name: "Lost", of: row => row.view.lost, number: true, down: true},
  {name: "Restarts", of: row => row.view.resets, number: true, down: true},
];
const rows = new Map(); // identity -> Row
const sorting = {column: COLUMNS[3], down: false};
const shown = new Set(); // states; empty shows all
let fleetLoaded = false; // nothing is said of a fleet before the service has
let named = new Map(); // what events call a source -> its rows, since events name no tenant and no group

const identity = view => JSON.stringify([view.tenant, view.group, view.model, view.instance, view.rank]);
const nameOf = view => JSON.stringify([view.model, view.instance, view.rank]);
const label = view => `${view.instance} rank ${view.rank}`;

/** One source: its cells are made once and then only changed. */
class Row {
  constructor() {
    const cell = (column, className = "", ...children) =>
      make("td", {role: "cell", className, "data-label": column}, ...children);
    const number = column => cell(column, "number");
    Object.assign(this, {rates: [], rate: null, sampled: null, detail: null, view: null, words: ""});
    Object.assign(this, {
      name: make("bdi", {className: "clip"}),
      rank: number("Rank"),
      model: make("bdi", {className: "clip"}),
      scope: make("small"),
    });
    Object.assign(this, {
      trust: make("span"),
      reason: make("span"),
      since: make("small"),
      fault: make("div", {className: "bad-text"}),
      advice: make("div", {className: "soft"}),
    });
    Object.assign(this, {
      blocks: number("Blocks"),
      pace: make("span"),
      line: draw("path", {}),
      last: number("Last event"),
      lag: number("Lag"),
      lost: number("Lost"),
      restarts: number("Restarts"),
    });
    this.toggle = make("button", {type: "button", className: "toggle", "aria-expanded": "false"}, this.name);
    this.toggle.addEventListener("click", () => this.expand());
    const spark = draw(
      "svg",
      {class: "spark", viewBox: `0 0 ${SPARK_SAMPLES - 1} 18`, preserveAspectRatio: "none", "aria-hidden": "true"},
      this.line,
    );
    this.element = make(
      "tr",
      {role: "row"},
      make("th", {scope: "row", role: "rowheader", className: "name"}, this.toggle),
      this.rank,
      make("td", {role: "cell", className: "model"}, this.model, this.scope),
      make("td", {role: "cell", className: "why"}, this.trust, " ", this.reason, " ", this.since, this.fault, this.advice),
      this.blocks,
      cell("Batches/s", "number pace", this.pace, spark),
      this.last,
      this.lag,
      this.lost,
      this.restarts,
    );
  }
  /** What a poll says. An event that came while the answer was under way is newer than it. */
  take(view, at) {
    const before = this.view;
    if (before && before.since > view.since)
      Object.assign(view, {trust: before.trust, advice: before.advice, since: before.since});
    if (before && before.incarnation === view.incarnation && before.last_seq > view.last_seq) {
      Object.assign(view, {blocks: before.blocks, last_seq: before.last_seq, last_event: before.last_event});
    }
    this.sample(view, before, at);
    this.view = view;
    if (before && before.trust.state !== view.trust.state) changed(this, before.trust.state, view.since);
    const {state, reason} = view.trust;
    this.words = [label(view), view.model, view.tenant, view.group, view.endpoint, view.origin, state, reason, view.fault ?? ""]
      .join("\n")
      .toLowerCase();
    this.show();
  }
  sample(view, before, at) {
    if (before && at - this.sampled.at < SECONDS.sources / 2) return; // asked for out of turn: too short a time to count in
    const batches = before ? view.batches - this.sampled.batches : -1;
    this.rate = batches >= 0 ? batches / (at - this.sampled.at) : null; // fewer than before: registered again
    this.sampled = {at, batches: view.batches};
    if (this.rate === null) return;
    this.rates.push(this.rate);
    if (this.rates.length > SPARK_SAMPLES) this.rates.shift();
    const top = Math.max(...this.rates, 1e-9),
      first = SPARK_SAMPLES - this.rates.length;
    const points = this.rates.map((rate, i) => `${first + i},${(16.5 - (15 * rate) / top).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
  }
  show() {
    const {view} = this,
      scope = [
        ["tenant", view.tenant],
        ["group", view.group],
      ].filter(([, name]) => name !== "default");
    put(this.name, view.instance);
    this.name.title = view.instance;
    put(this.rank, String(view.rank));
    put(this.model, view.model);
    put(this.scope, scope.map(([kind, name]) => `${kind} ${name}`).join(", "));
    put(this.trust, view.trust.state);
    putClass(this.trust, `trust ${view.trust.state}`);
    put(this.reason, view.trust.reason || (view.trust.attested ? "attested by the engine" : ""));
    // An unreachable engine's fault is part of the reason already.
    const fault = view.fault && !view.trust.reason.includes(view.fault) ? `Fault: ${view.fault}` : "";
    put(this.fault, view.draining ? "Drained: selections leave it out." : fault);
    put(this.advice, view.advice);
    put(this.blocks, count(view.blocks));
    put(this.pace, pace(this.rate));
    put(this.lag, lag(view.lag_seconds));
    put(this.lost, view.lost ? `${count(view.lost)} in ${several(view.gap_count, "gap")}` : "0");
    this.lost.classList.toggle("bad-text", view.lost > 0);
    put(this.restarts, String(view.resets));
    this.age(contact.now());
    this.detail?.show(view);
  }
  age(now) {
    put(this.last, this.view.last_event === null ? "never" : `${span(now - this.view.last_event)} ago`);
    put(this.since, `for ${span(now - this.view.since)}`);
  }
  expand() {
    if (this.detail) this.detail.element.remove();
    this.detail = this.detail ? null : new Detail(this.view);
    if (this.detail) this.element.after(this.detail.element);
    this.toggle.setAttribute("aria-expanded", String(Boolean(this.detail)));
  }
}

const UNREGISTER = "Unregister",
  UNREGISTER_NOW = "Unregister and drop its blocks";

/** What to say of a request: `done`, or why the service has refused it. */
async function sentenceOf(request, done) {
  try {
    await request;
    return done;
  } catch (error) {
    if (!(error instanceof RefusedError)) throw error;
    return [error.message, error.hint].filter(Boolean).join(". ");
  }
}

/** What a row shows when it is opened. Values change in place, so that a reader can select and copy them. */
class Detail {
  constructor(view) {
    this.values = new Map();
    Object.assign(this, {where: make("dl"), counters: make("dl"), gaps: make("div"), rejects: make("div"), view});
    const parts = [
      ["Actions", this.actions()],
      ["Where", this.where],
      ["Counters", this.counters],
      ["Gap ledger", this.gaps],
      ["Rejected events", this.rejects],
    ];
    const facts = make(
      "div",
      {className: "facts"},
      ...parts.map(([title, part]) => make("div", {}, make("h3", {}, title), part)),
    );
    this.element = make("tr", {role: "row", className: "detail"}, make("td", {role: "cell", colSpan: COLUMNS.length}, facts));
    this.show(view);
  }
  actions() {
    const button = act => {
      const made = make("button", {type: "button", className: "button"});
      made.addEventListener("click", act);
      return made;
    };
    this.drain = button(() => this.act("/v1/drain", this.rank({draining: !this.view.draining})));
    this.unregister = button(() => {
      if (this.unregister.textContent === UNREGISTER) put(this.unregister, UNREGISTER_NOW);
      else this.act("/unregister", this.identity());
    });
    this.unregister.addEventListener("blur", () => put(this.unregister, UNREGISTER));
    this.said = make("output", {className: "problem"});
    put(this.unregister, UNREGISTER);
    return make("div", {className: "ask"}, this.drain, " ", this.unregister, " ", this.said);
  }
  rank(more) {
    const {instance, rank, tenant, group} = this.view;
    return {instance, rank, tenant, group, ...more};
  }
  identity() {
    const {instance, rank, model, tenant, group} = this.view;
    return {instance_id: instance, dp_rank: rank, model_name: model, tenant_id: tenant, routing_group: group};
  }
  async act(path, body) {
    put(this.said, await sentenceOf(ask(path, body), ""));
    pollers.sources.now();
  }
  show(view) {
    this.view = view;
    put(this.drain, view.draining ? "End draining" : "Drain");
    this.unregister.hidden = view.origin !== "http"; // discovery would name it again
    const seen = view.block_sizes.join(" and ") || "none yet",
      declared = view.declared_block_size,
      otherwise = view.block_sizes.some(size => size !== declared);
    this.set(this.where, "Events", view.endpoint);
    this.set(this.where, "Replay", view.replay_endpoint ?? "none: what is lost stays lost");
    this.set(this.where, "Named by", view.origin);
    this.set(
      this.where,
      "Block size",
      `${declared === null ? "not declared" : `${declared} declared`}, ${seen} seen`,
    ).classList.toggle("bad-text", declared !== null && otherwise);
    this.set(this.counters, "Newest batch", view.last_seq < 0 ? "none yet" : `number ${view.last_seq}`);
    const counters = {
      Batches: view.batches,
      "By replay": view.replayed,
      "In snapshots": view.compacted,
      "Held back": view.waiting,
      Orphans: view.orphans,
      Reconnects: view.reconnects,
    };
    for (const [name, n] of Object.entries(counters)) this.set(this.counters, name, count(n));
    const numbers = gap => (gap.first === gap.last ? `${gap.first}` : `${gap.first} – ${gap.last}`);
    this.table(
      this.gaps,
      ["Batches", "Incarnation", "At"],
      view.gaps.map(gap => [numbers(gap), String(gap.incarnation), clock(gap.at)]).reverse(),
    );
    this.table(
      this.rejects,
      ["Reason", "Events"],
      Object.entries(view.rejected).map(([reason, n]) => [reason, count(n)]),
    );
  }
  set(list, name, text) {
    if (!this.values.has(name)) {
      this.values.set(name, make("dd"));
      list.append(make("dt", {}, name), this.values.get(name));
    }
    put(this.values.get(name), text);
    return this.values.get(name);
  }
  table(place, names, lines) {
    const row = (tag, cells) => make("tr", {}, ...cells.map(cell => make(tag, {}, cell)));
    replaceIfChanged(place, lines, () => [
      lines.length
        ? make("table", {}, make("thead", {}, row("th", names)), make("tbody", {}, ...lines.map(line => row("td", line))))
        : make("span", {className: "soft"}, "None."),
    ]);
  }
}

function showSources(answer) {
  const at = Date.now() / 1000,
    present = new Set();
  fleetLoaded = true;
  named = new Map();
  for (const view of answer.sources) {
    const id = identity(view);
    present.add(id);
    if (!rows.has(id)) rows.set(id, new Row());
    const row = rows.get(id);
    row.take(view, at);
    named.set(nameOf(view), [...(named.get(nameOf(view)) ?? []), row]);
  }
  for (const [id, row] of rows) {
    if (present.has(id)) continue;
    row.detail?.element.remove();
    row.element.remove();
    rows.delete(id);
  }
  arrange();
  showFaults({faults: answer.faults});
  showModels();
}

/** Sort and filter. Only rows that must move are moved, and the one with the keyboard keeps it. */
function arrange() {
  const sign = sorting.down ? -1 : 1,
    {of} = sorting.column,
    body = $("fleet").tBodies[0],
    focused = document.activeElement;
  const compare = (a, b) => (typeof of(a) === "number" ? of(a) - of(b) : collator.compare(of(a), of(b)));
  const ordered = [...rows.values()].sort(
    (a, b) => sign * compare(a, b) || collator.compare(a.view.instance, b.view.instance) || a.view.rank - b.view.rank,
  );
  let next = body.firstElementChild;
  for (const element of ordered.flatMap(row => (row.detail ? [row.element, row.detail.element] : [row.element]))) {
    if (element === next) next = next.nextElementSibling;
    else body.insertBefore(element, next);
  }
  if (body.contains(focused) && document.activeElement !== focused) focused.focus({preventScroll: true});
  filter();
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean),
    totals = new Map(STATES.map(state => [state, 0]));
  let visible = 0;
  for (const row of rows.values()) {
    const {state} = row.view.trust,
      hide = !words.every(word => row.words.includes(word)) || (shown.size > 0 && !shown.has(state));
    totals.set(state, totals.get(state) + 1);
    if (row.element.hidden !== hide) row.element.hidden = hide;
    if (row.detail) row.detail.element.hidden = hide;
    visible += !hide;
  }
  for (const chip of $("states").children) {
    put(chip, `${totals.get(chip.value)} ${chip.value}`);
    chip.hidden = !totals.get(chip.value) && !shown.has(chip.value);
  }
  if (!fleetLoaded) return;
  put($("fleet-count"), visible === rows.size ? several(rows.size, "source") : `${visible} of ${several(rows.size, "source")}`);
  $("fleet").hidden = !visible;
  $("fleet-none").hidden = visible > 0;
  put(
    $("fleet-none"),
    rows.size
      ? "No source is like that."
      : "No source is registered yet. The form below names one, and so does a configuration file.",
  );
}

$("register").addEventListener("submit", async event => {
  event.preventDefault();
  const filled = [...new FormData($("register"))].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
  const body = Object.fromEntries(filled);
  if (body.block_size) body.block_size = Number(body.block_size);
  put($("register-said"), "Asking …");
  put($("register-said"), await sentenceOf(ask("/register", body), `${body.instance_id} is registered.`));
  pollers.sources.now();
});

function sortBy(column, down) {
  Object.assign(sorting, {column, down});
  COLUMNS.forEach((other, i) => {
    const head = $("fleet").tHead.rows[0].cells[i];
    if (other === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  $("sort").value = column.name;
  arrange();
}

for (const column of COLUMNS) {
  const button = make("button", {type: "button"}, column.name);
  button.addEventListener("click", () => sortBy(column, sorting.column === column ? !sorting.down : Boolean(column.down)));
  $("fleet").tHead.rows[0].append(
    make("th", {scope: "col", role: "columnheader", className: column.number ? "number" : ""}, button),
  );
  $("sort").append(make("option", {value: column.name}, `Sort by ${column.name.toLowerCase()}`));
}
for (const state of STATES) {
  const chip = make("button", {
    type: "button",
    className: `chip ${state}`,
    value: state,
    "aria-pressed": "false",
    hidden: true,
  });
  chip.addEventListener("click", () => {
    if (!shown.delete(state)) shown.add(state);
    chip.setAttribute("aria-pressed", String(shown.has(state)));
    filter();
  });
  $("states").append(chip);
}
$("sort").addEventListener("change", () => {
  const column = COLUMNS.find(({name}) => name === $("sort").value);
  sortBy(column, Boolean(column.down));
});
$("filter").addEventListener("input", filter);

// ---- Changes -------------------------------------------------------------------------------------------------------------

let unsaid = [];

function log(at, view, ...words) {
  $("log-none").hidden = true;
  $("log").prepend(make("li", {}, make("time", {}, clock(at)), make("bdi", {}, label(view)), ...words));
  while ($("log").children.length > LOG_LINES) $("log").lastElementChild.remove();
}

function changed(row, was, at) {
  const {state, reason} = row.view.trust;
  log(at, row.view, make("span", {}, trustWord(was), " → ", trustWord(state)), reason);
  unsaid.push(`${label(row.view)} is ${state}`);
}

/** A fleet that falls over is one sentence to listen to, not two hundred. */
function say() {
  if (unsaid.length)
    put($("said"), unsaid.length > 3 ? `${unsaid.length} sources have changed their state.` : `${unsaid.join(". ")}.`);
  unsaid = [];
}

// ---- Prompt --------------------------------------------------------------------------------------------------------------

function tokensOf(text) {
  const trimmed = text.trim();
  let items = trimmed
    .split(/[\s,;]+/)
    .filter(Boolean)
    .map(item => (/^\d+$/.test(item) ? Number(item) : item));
  if (trimmed.startsWith("[")) {
    try {
      items = JSON.parse(trimmed);
    } catch {
      throw new RefusedError({
        detail: "This begins like a JSON array, but is not valid JSON.",
        hint: "Numbers separated by commas or spaces do as well.",
      });
    }
  }
  const bad = items.findIndex(item => !Number.isInteger(item) || item < 0 || item > 0xffffffff);
  if (bad >= 0)
    throw new RefusedError({
      detail: `Item ${bad + 1}, ${JSON.stringify(items[bad])}, is no token id.`,
      hint: "Token ids are whole numbers from 0 to 4294967295. Text must be tokenized before: kvevents query does that.",
    });
  if (!items.length)
    throw new RefusedError({
      detail: "There are no token ids.",
      hint: "Separate them with commas or spaces, or paste a JSON array.",
    });
  return items;
}

function showHolders(answer) {
  const known = answer.workers.filter(held => held.tokens || held.trust.state !== "EXACT");
  const holders = known.sort((a, b) => b.tokens - a.tokens),
    longest = holders.filter(held => held.tokens).length,
    total = answer.prompt_tokens,
    best = longest ? holders[0] : null;
  const all = several(total, "token"),
    counted = several(longest, "worker holds", "workers hold");
  const head = best
    ? `${counted} a beginning of these ${all}; the longest, ${count(best.tokens)}, is on ${label(best)}.`
    : `No worker holds a beginning of these ${all}.`;
  $("found").replaceChildren(make("p", {}, head), make("ul", {className: "bars"}, ...holders.map(held => holder(held, total))));
}

function holder(held, total) {
  const own = ownTiers(held),
    name = make("bdi", {className: "clip", title: held.instance}, label(held)),
    {state, reason} = held.trust;
  const figures = make("span", {className: "held"}, `${several(held.tokens, "token")}, ${share(held.tokens, total)}`);
  return make(
    "li",
    {},
    make(
      "div",
      {className: "label"},
      make("span", {className: "worker"}, name, trustWord(state), make("small", {}, reason)),
      figures,
    ),
    bar(...own.map(([tier, tokens]) => fill(tier, tokens, total))),
    make(
      "small",
      {},
      ...own.map(([tier, tokens]) => make("span", {className: `key ${tierClass(tier)}`}, `${tier} ${count(tokens)}`)),
    ),
  );
}

/** The service counts a prefix on `cpu` with what the GPU holds of it; a bar needs what each tier adds. */
function ownTiers(held) {
  const own = [];
  let counted = 0;
  for (const tier of [...TIERS, ...Object.keys(held.tiers).filter(name => !TIERS.includes(name))]) {
    const tokens = Math.min(held.tiers[tier] ?? 0, held.tokens) - counted;
    if (tokens > 0) own.push([tier, tokens]);
    counted += Math.max(0, tokens);
  }
  return own;
}

function showProblem({message, hint}) {
  $("found").replaceChildren(
    make("div", {className: "banner bad"}, make("p", {className: "problem"}, message), make("small", {}, hint)),
  );
}

$("prompt").addEventListener("submit", async event => {
  event.preventDefault();
  const scope = Object.fromEntries(
    ["model", "tenant", "group", "lora", "salt"].map(name => [name, $(name).value.trim()]).filter(([, value]) => value),
  );
  try {
    showHolders(await ask("/v1/match", {tokens: tokensOf($("tokens").value), ...scope}));
  } catch (error) {
    if (!(error instanceof RefusedError)) throw error;
    showProblem(error);
  }
});
$("tokens").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt").requestSubmit();
});
$("tokens").addEventListener("input", () => {
  let said = "";
  try {
    said = several(tokensOf($("tokens").value).length, "token id");
  } catch {
    /* the query reports it */
  }
  put($("token-count"), said);
});

// ---- Selections ----------------------------------------------------------------------------------------------------------

/** What was chosen, why, and the parts of each candidate's score. Those that are open stay open. */
function showChoices({decisions}) {
  $("choices-part").hidden = !decisions.length;
  const open = new Set([...$("choices").querySelectorAll("details[open]")].map(made => made.dataset.at));
  replaceIfChanged($("choices"), decisions, () =>
    decisions.map(({at, model, prompt_tokens, selection}) => {
      const facts = `${model}, ${several(prompt_tokens, "token")}`;
      const head = make(
        "summary",
        {},
        make("time", {}, clock(at)),
        make("bdi", {}, label(selection)),
        make("small", {}, facts),
      );
      const parts = selection.considered.map(one =>
        make("li", {}, make("bdi", {}, label(one)), make("small", {}, scoreOf(one)), trustWord(one.trust.state)),
      );
      const left = selection.unreachable.map(one => make("li", {}, make("bdi", {}, label(one)), make("small", {}, "left out")));
      const made = make(
        "details",
        {open: open.has(String(at))},
        head,
        make("p", {}, selection.why),
        make("ul", {}, ...parts, ...left),
      );
      made.dataset.at = at;
      return make("li", {}, made);
    }),
  );
}

function scoreOf({score, uncached, load, requests, hot, session}) {
  const words = [`computes ${Math.round(100 * uncached)} %`, `load ${load.toFixed(2)}`];
  if (requests !== null) words.push(several(Math.round(requests), "request"));
  if (hot) words.push("more than its share of requests");
  if (session) words.push("of the session");
  return `score ${score.toFixed(3)}: ${words.join(", ")}`;
}

/** Models that the prompt box offers. */
function showModels() {
  const models = [...new Set([...rows.values()].map(({view}) => view.model))].sort(collator.compare);
  replaceIfChanged($("models"), models, () => models.map(value => make("option", {value})));
  if (!$("model").value && models.length) $("model").value = models[0];
}

// ---- Live ----------------------------------------------------------------------------------------------------------------

const EVENTS = {
  batches(row, event) {
    Object.assign(row.view, {blocks: event.blocks, last_seq: event.last_seq, last_event: event.at});
    row.show();
  },
  state(row, event) {
    if (event.at < row.view.since) return;
    if (event.trust.state === row.view.trust.state) {
      row.view.trust = event.trust;
      row.show();
      return;
    }
    Object.assign(row.view, {trust: event.trust, advice: "", since: event.at}); // the next poll has the advice
    row.show();
    changed(row, event.was, event.at);
    pollers.sources.now(); // for the rest of what has changed with it
    pollers.probes.now();
  },
  snapshot(row, event) {
    log(
      event.at,
      row.view,
      make("span", {}, "SNAPSHOT"),
      `of batches ${count(event.first)} to ${count(event.last)}; nothing of them is lost`,
    );
    pollers.sources.now();
  },
  loss(row, event) {
    log(event.at, row.view, make("span", {className: "trust DEGRADED"}, event.what.toUpperCase()), event.sentence);
    pollers.sources.now();
  },
};

let lastId = "";

function apply(text) {
  const lines = text.split(/\r?\n/),
    valuesOf = name => lines.filter(line => line.startsWith(`${name}: `)).map(line => line.slice(name.length + 2));
  lastId = valuesOf("id").at(-1) ?? lastId;
  const data = valuesOf("data").join("\n");
  if (!data) return; // a comment that keeps the connection open
  const event = JSON.parse(data),
    found = named.get(nameOf(event)) ?? [];
  if (found.length === 1) EVENTS[event.type]?.(found[0], event);
  else pollers.sources.now(); // a new source, one of several of that name, or so many events that some were left out
}

/** EventSource cannot send a token, so the stream is read by hand. Returns when it ends. */
async function listen() {
  const stop = new AbortController();
  let quiet = 0;
  const restartTimer = () => {
    clearTimeout(quiet);
    quiet = setTimeout(
      () => stop.abort(new RefusedError({detail: `Nothing has come for ${SECONDS.silence} seconds.`})),
      SECONDS.silence * 1000,
    );
  };
  restartTimer();
  const {token} = contact;
  const answer = await reached(
    fetch("/v1/events", {
      headers: contact.headers({Accept: "text/event-stream", ...(lastId && {"Last-Event-ID": lastId})}),
      cache: "no-store",
      signal: stop.signal,
    }),
  );
  if (!answer.ok) await read(answer, token);
  contact.regain("events");
  pollers.events.failures = 0;
  pollers.sources.now(); // changes before this connection
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const {value, done} = await reached(reader.read());
    restartTimer();
    if (done) throw new RefusedError({detail: "The service has ended the stream."});
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    parts.forEach(apply);
  }
}

/** Run a task; its failure is shown until it succeeds again. */
async function showingFailure(what, task) {
  try {
    await task();
    contact.regain(what);
  } catch (error) {
    contact.lose(what, error);
    throw error;
  }
}

async function askStats() {
  try {
    const stats = await ask("/v1/stats");
    showStats(stats);
    charts.blocks.add(stats.blocks);
    charts.batches.add(stats.batches_per_second);
  } catch (error) {
    for (const chart of Object.values(charts)) chart.add(null);
    throw error;
  }
}

const pollers = {
  stats: new Poller(SECONDS.stats, () => showingFailure("polling", askStats)),
  sources: new Poller(SECONDS.sources, () => showingFailure("sources", async () => showSources(await ask("/v1/sources")))),
  choices: new Poller(SECONDS.choices, async () => showChoices(await ask("/v1/select/explain"))),
  probes: new Poller(SECONDS.probes, async () => showProbes(...(await Promise.all([ask("/readyz"), ask("/health")])))),
  events: new Poller(1, () => showingFailure("events", listen)), // which succeeds only as long as it lasts
};

const askAll = () => {
  for (const poll of Object.values(pollers)) poll.now();
};

$("lost-now").addEventListener("click", askAll);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) askAll();
});
setInterval(() => {
  if (document.hidden) return;
  const now = contact.now();
  for (const row of rows.values()) if (!row.element.hidden) row.age(now);
  say();
}, 1000);
sortBy(sorting.column, sorting.down);
askAll();
