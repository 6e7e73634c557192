// Asks the server every few seconds and shows what it says.

const STATS_MS = 2000, TREE_MS = 15000, WINDOW_S = 30, MOST_EVENTS = 200;
let paused = false, model = "default";
let locked = false; // nothing is asked for until there is another key
const icicle = new Icicle();
const unitTop = () => 1;
const sumTop = (all) => Math.max(1, ...all.map((values) => Object.values(values).reduce((a, b) => a + (b || 0), 0)));
const asSaid = (names) => (a, b) => names.indexOf(a) - names.indexOf(b);
const hitChart = new Chart($("hit-chart"), { most: unitTop, text: share, empty: "no prompts", order: undefined });
const blockChart = new Chart($("block-chart"), { stacked: true, whole: true, most: sumTop, text: count, empty: "nothing is held",
  order: asSaid(["held", "kept", "free"]) });
const missChart = new Chart($("miss-chart"), { stacked: true, whole: true, most: sumTop, text: count, empty: "nothing was missed",
  order: asSaid(Object.values(REASONS)) });

function trouble(message) {
  $("trouble").hidden = !message;
  $("trouble").textContent = message || "";
}

function refused(error) {
  if (error instanceof Refused && error.status === 401) {
    locked = true;
    trouble(apiKey ? error.message : "This server asks for a key.");
    askForKey();
  } else if (error instanceof Refused) trouble(error.message);
  else trouble("The server does not answer; trying again.");
  $("about").textContent = "not connected";
}

function askForKey() {
  if ($("key-dialog").open) return;
  $("key-dialog").returnValue = ""; // Escape leaves what was there before
  $("key-dialog").showModal();
}

async function pollStats() {
  const key = apiKey;
  const [recent, lately] = await Promise.all([
    askJson(`/v1/cache/stats?window=${WINDOW_S}s&by=tenant`), askJson("/v1/cache/stats?window=5m&by=tenant")]);
  if (key !== apiKey) return; // this is no more for the one who looks
  model = recent.model;
  trouble("");
  $("about").textContent = `${recent.model}, ${recent.scope === "server" ? "the whole server" : "tenant " + recent.tenant}`
    + (recent.deterministic ? ", deterministic" : "") + (recent.enabled ? "" : ", sharing is off");
  showFacts(lately);
  showQueue(lately);
  const now = Date.now(), rates = {}, colours = {}, missed = {};
  const names = [...lately.queue, ...lately.window.rows].map((row) => row.tenant).filter((name) => name !== null);
  names.sort().forEach(colourOf); // the same colours at each visit
  for (const row of recent.window.rows) {
    const name = row.tenant === null ? "other" : row.tenant;
    rates[name] = row.hit_rate;
    colours[name] = colourOf(row.tenant);
    for (const [reason, tokens] of Object.entries(row.missed || {}))
      if (tokens) missed[REASONS[reason] || reason] = (missed[REASONS[reason] || reason] || 0) + tokens;
  }
  hitChart.add(now, rates, colours);
  const reasons = Object.entries(REASONS).filter(([, words]) => words in missed);
  missChart.add(now, missed, Object.fromEntries(reasons.map(([reason, words]) => [words, reasonColour(reason)])));
  const blocks = { held: recent.blocks.used, kept: recent.blocks.cached };
  if (recent.blocks.free !== null) blocks.free = recent.blocks.free;
  blockChart.add(now, blocks, { held: COLOURS[3], kept: COLOURS[0], free: "#b6bcc8" });
}

function showFacts(stats) {
  const total = stats.window.rows.reduce((sum, row) => {
    sum.queried += row.tokens.queried;
    sum.hit += row.tokens.hit.device + (row.tokens.hit.host || 0);
    sum.requests += row.requests;
    return sum;
  }, { queried: 0, hit: 0, requests: 0 });
  const lately = "last " + span(Math.max(1, stats.window.interval_s));
  const blocks = stats.blocks, life = stats.residency?.block_lifetime_s;
  const facts = [
    [share(total.queried ? total.hit / total.queried : null), `hit rate, ${lately}`],
    [count(total.hit), `prompt tokens not computed, of ${count(total.queried)}`],
    [count(total.requests), `requests, ${lately}`],
    [blocks.total === null ? count(blocks.resident) : share(blocks.used / blocks.total),
      blocks.total === null ? "blocks resident" + (blocks.quota === null ? "" : ` of a quota of ${count(blocks.quota)}`)
        : `of ${count(blocks.total)} blocks in use` + (blocks.pinned ? `, ${count(blocks.pinned)} pinned` : "")],
    [`${count(stats.requests_running)} / ${count(stats.requests_waiting)}`, "running / waiting"],
  ];
  if (life) facts.push([life.p50 === null ? "–" : span(life.p50), "median life of a block"]);
  $("facts").replaceChildren(...facts.map(([value, words]) =>
    make("div", { class: "fact" }, make("b", {}, value), make("span", {}, words))));
}

function showQueue(stats) {
  const rows = new Map();
  for (const row of stats.queue) rows.set(row.tenant, { ...row, work: 0, hit: null, evicted: null });
  for (const row of stats.window.rows) {
    const name = row.tenant === null ? "other" : row.tenant;
    const known = rows.get(name) || { tenant: name, running: 0, waiting: 0 };
    rows.set(name, { ...known, work: row.tokens.computed + row.tokens.generated, hit: row.hit_rate,
      evicted: row.evictions ? row.evictions.suffered : null });
  }
  if (!rows.size) { $("queue").replaceChildren(make("p", { class: "empty" }, "Nobody has asked anything yet.")); return; }
  const all = [...rows.values()].sort((a, b) => b.work - a.work), shared = stats.scope === "server";
  const sum = all.reduce((total, row) => total + row.work, 0);
  const weights = all.reduce((total, row) => total + (row.weight || 0), 0);
  const names = ["tenant", "running", "waiting", "tokens worked", ...(shared ? ["share of work"] : []), "hit rate", "blocks evicted"];
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))));
  table.append(make("tbody", {}, ...all.map((row) => make("tr", {},
    make("td", { title: row.tenant }, row.tenant), make("td", {}, count(row.running)), make("td", {}, count(row.waiting)),
    make("td", {}, count(row.work)),
    ...(shared ? [make("td", {}, shareBar(row, sum ? row.work / sum : 0, weights))] : []),
    make("td", {}, share(row.hit)), make("td", {}, count(row.evicted))))));
  $("queue").replaceChildren(table);
  $("queue-note").textContent = "work in the last 5 minutes"
    + (shared && all.length > 1 ? "; mark: what a tenant is due by its weight while all ask" : "");
}

// How much of the work was a tenant's, and a mark at what would be its due.
function shareBar(row, part, weights) {
  const due = row.weight && weights ? row.weight / weights : null;
  const bar = make("span", { class: "bar", role: "img",
    "aria-label": share(part) + (due === null ? "" : `, due ${share(due)} by weight ${row.weight}`) },
    make("i", { style: { width: 100 * part + "%", background: colourOf(row.tenant) } }));
  if (due !== null && due < 1) bar.append(make("b", { style: { left: 100 * due + "%" } }));
  bar.setAttribute("title", bar.getAttribute("aria-label"));
  return bar;
}

async function pollTree() {
  const key = apiKey, reply = await askJson("/v1/cache/tree?depth=200&limit=10000&text=true");
  if (key === apiKey) icicle.show(reply);
}

// Events come as a stream that fetch reads: an EventSource could not send a key.
async function followEvents(signal) {
  const reply = await ask("/v1/cache/events", undefined, signal);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {") || paused || signal.aborted) continue;
      showEvent(JSON.parse(line.slice(6)));
    }
  }
}

function showEvent(event) {
  const { tokens, queried_tokens: queried, ...counts } = event.counts;
  if (tokens !== undefined) counts[queried === undefined ? "tokens" : `of ${count(queried)} tokens`] = tokens;
  const words = Object.entries(counts).map(([unit, n]) => `${count(n)} ${unit.replaceAll("_", " ")}`).join(", ");
  const time = clock(event.time ? event.time * 1000 : Date.now());
  $("events").prepend(make("li", {}, make("time", {}, time), make("b", {}, event.type),
    make("span", {}, (event.tenant ? event.tenant + ": " : "") + words)));
  while ($("events").children.length > MOST_EVENTS) $("events").lastChild.remove();
}

async function attempt(work) {
  const key = apiKey;
  await work().catch((error) => { if (key === apiKey) refused(error); }); // else it was another's
}

// What took long is asked for less often: a page that is looked at must not slow the server down.
async function keepAt(work, milliseconds) {
  for (;;) {
    const began = performance.now();
    if (!paused && !locked && !document.hidden) await attempt(work);
    await new Promise((go) => setTimeout(go, Math.max(milliseconds, 20 * (performance.now() - began))));
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  memory.set(() => localStorage, "radixkv-theme", theme);
  icicle.draw();
}

$("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
});
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("key").addEventListener("click", askForKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "use") return;
  apiKey = $("key-input").value.trim();
  $("key-input").value = "";
  memory.set(() => sessionStorage, "radixkv-key", apiKey);
  locked = false;
  listening?.abort();
  for (const chart of [hitChart, blockChart, missChart]) chart.clear();
  for (const part of ["facts", "queue", "events", "explained"]) $(part).replaceChildren();
  icicle.show({ nodes: [] });
  attempt(pollStats);
  attempt(pollTree);
});
$("tree-colour").addEventListener("change", (event) => { icicle.colour = event.target.value; icicle.draw(); });
$("tree-refresh").addEventListener("click", () => attempt(pollTree));

let listening = null;
async function listenForGood() {
  for (;;) {
    listening = new AbortController();
    if (!locked) await followEvents(listening.signal).catch(() => {});
    await new Promise((go) => setTimeout(go, STATS_MS));
  }
}

setTheme(memory.get(() => localStorage, "radixkv-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
setUpExplain(() => model);
keepAt(pollStats, STATS_MS);
keepAt(pollTree, TREE_MS);
listenForGood();
