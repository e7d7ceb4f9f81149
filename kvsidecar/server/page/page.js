// Draws /status, with the words of `kvsidecar top`. Texts come from clients too: they are only ever set as text.
"use strict";

const EVERY_MS = 1000;
const FORGOTTEN_SECONDS = 10; // between two readings, after which the charts begin again
const HISTORY = 60; // columns of a chart
const RANKS = 32; // the busiest
const SPACES = 8; // namespaces, and shares: the largest
const TEXT = 96; // characters of a client's text
const HIDDEN = "Their names are hidden here, because --socket-mode 0660 or a policy lets only some users see them: \
kvsidecar engines shows them to these.";
const byId = (id) => document.getElementById(id);
let lostSince = null;
let now = null; // the last reading
let before = null; // the one before, of the same daemon; null if there is none, or a too old one
let span = 0; // seconds between the two
let past = []; // rates, the oldest first, and the seconds that each is of

function observe(told) {
  const passed = told.epoch === now?.epoch ? told.uptime_seconds - now.uptime_seconds : Infinity;
  if (!passed) return; // the same reading, which others look at too
  before = passed > FORGOTTEN_SECONDS ? null : now;
  now = told;
  span = passed;
  if (!before) past = [];
  else {
    const [stored, loaded] = [perSecond("jobs", "stored_bytes"), perSecond("jobs", "loaded_bytes")];
    past = [...past, { span, stored, loaded, hits: hitRate() }].slice(-HISTORY);
  }
}

function perSecond(part, field) {
  return before && (now[part][field] - before[part][field]) / span;
}

function hitRate() {
  const [loaded, needed] = [perSecond("lookups", "loaded_tokens"), perSecond("lookups", "needed_tokens")];
  return needed ? Math.min(1, loaded / needed) : null; // a load may be reported later than what its prompt needed
}

function inUnits(value, step, units, decimals) {
  let unit = 0;
  for (; value.toFixed(decimals) >= step && unit < units.length - 1; unit++) value /= step;
  return `${Number(value.toFixed(decimals))} ${units[unit]}`;
}

const size = (nbytes) => inUnits(nbytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], 2);
const rate = (value) => value == null ? "-" : inUnits(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1);
const grouped = (count) => Math.round(count).toLocaleString("en");
const share = (part, whole) => whole ? part / whole : 0;
const percent = (value) => `${Math.round(100 * value)}%`;
const listed = (...texts) => texts.filter(Boolean).join(", ");
const cut = (value) => value.length > TEXT ? `${value.slice(0, TEXT - 1)}…` : value;
const shortDevice = (uuid) => cut(uuid.split("-", 2).join("-"));
const usedOf = (used, total) => `${size(used)} of ${size(total)} used`;

function duration(seconds) {
  if (seconds < 59.95) return `${Number(seconds.toFixed(1))} s`;
  const hours = Math.round(seconds) >= 3600;
  const rounded = Math.round(hours ? seconds / 60 : seconds);
  const [whole, rest] = [Math.floor(rounded / 60), rounded % 60];
  return `${whole} ${hours ? "h" : "min"}${rest ? ` ${rest} ${hours ? "min" : "s"}` : ""}`;
}

function text(id, value) {
  byId(id).textContent = value;
}

function element(tag, className, value = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = value;
  return made;
}

function part([name, share]) {
  const made = element("i", name);
  made.style.width = `${100 * share}%`;
  made.title = name;
  return made;
}

function section(name, made) {
  byId(`${name}-section`).hidden = !made.length;
  byId(name).replaceChildren(...made);
}

// Columns of shares, oldest first, and below them the time that they span and what a whole column is.
function spark(shares, highest) {
  const made = element("div", "");
  const columns = element("div", "spark");
  for (const each of shares) {
    const column = element("i", "");
    column.style.height = `${100 * each}%`;
    columns.append(column);
  }
  const seconds = past.reduce((sum, each) => sum + each.span, 0);
  const below = element("div", "span");
  if (past.length) below.append(element("span", "", `last ${Math.round(seconds)} s`), element("span", "", highest));
  made.append(columns, below);
  return made;
}

function flow(name, field, nbytes, jobs) {
  const rates = past.map((each) => each[field]);
  const highest = Math.max(0, ...rates);
  const row = element("div", "row");
  row.append(element("span", "", name), element("b", "", rate(rates.at(-1))));
  row.append(spark(rates.map((each) => share(each, highest)), highest ? `at most ${rate(highest)}` : ""));
  row.append(element("span", "quiet", `${size(nbytes)} in ${grouped(jobs)} ${jobs === 1 ? "job" : "jobs"}`));
  return row;
}

// The parts of the bar that are there, and what is free.
function legend(parts) {
  const free = Math.max(0, 1 - parts.reduce((sum, [, share]) => sum + share, 0));
  return [...parts, ["free", free]].filter(([, share]) => share).map(([name, share]) => {
    const made = element("li", "");
    made.append(element("i", name), `${name} ${share < 0.01 ? "<1%" : percent(share)}`);
    return made;
  });
}

// One that is not pinned holds no blocks, and does not look like an empty one.
function hasPool({ state, serves_kept, pinned_bytes, pool_bytes }) {
  return state === "draining" ? pinned_bytes >= pool_bytes : serves_kept || state === "ready";
}

function pool({ readiness, pool }) {
  const there = hasPool(readiness);
  const leased = pool.leased_bytes;
  const parts = Object.entries({
    leased, used: pool.used_bytes - leased, reserved: pool.reserved_bytes, quarantined: pool.quarantined_bytes,
    rounding: pool.rounding_bytes,
  }).map(([name, nbytes]) => [name, share(nbytes, pool.total_bytes)]);
  byId("pool-bar").className = there ? "bar" : "bar none";
  byId("pool-bar").replaceChildren(...(there ? parts.map(part) : []));
  byId("legend").replaceChildren(...(there ? legend(parts) : []));
  const pinned = `${size(readiness.pinned_bytes)} of ${size(readiness.pool_bytes)} pinned`;
  text("pool-text", there ? usedOf(pool.used_bytes, pool.total_bytes) : pinned);
  const details = listed(
    `${pool.blocks} blocks`,
    `${size(leased)} under ${pool.leases} leases`,
    pool.reserved_bytes && `${size(pool.reserved_bytes)} reserved`,
    pool.quarantined_bytes && `${size(pool.quarantined_bytes)} quarantined`,
    pool.rounding_bytes && `${size(pool.rounding_bytes)} lost to rounding`,
    pool.unzeroed_bytes && `${size(pool.unzeroed_bytes)} to be zeroed`,
    !["", "lru"].includes(pool.eviction) && `eviction by ${pool.eviction}`,
    pool.page_kind && `${pool.page_kind} pages`,
    pool.numa_nodes.length > 1 && `NUMA nodes ${pool.numa_nodes.join(", ")}`,
  );
  const kept = listed(
    `${pool.kept_blocks} blocks of an earlier daemon were kept`,
    pool.dropped_blocks && `${pool.dropped_blocks} were not`,
  );
  const start = pool.cold_start_reason ? `cold start: ${pool.cold_start_reason}` : kept;
  const outlives = pool.carrier ? `; outlives the daemon (${pool.carrier}); ${start}` : "";
  text("pool-details", there ? details + outlives : "");
}

function pin(readiness) {
  byId("pin").hidden = readiness.state !== "pinning";
  const pinned = share(readiness.pinned_bytes, readiness.pool_bytes);
  const eta = readiness.eta_seconds;
  byId("pin").firstElementChild.replaceChildren(part(["pinned", pinned]));
  byId("pin").lastElementChild.textContent = "pinned " + listed(
    percent(pinned), rate(readiness.pin_bytes_per_second), eta !== null && `${duration(eta)} left`,
  );
}

function hits({ needed_tokens: needed, loaded_tokens: loaded }) {
  const current = hitRate();
  text("hits-now", current === null ? "-" : percent(current));
  byId("hits-spark").replaceChildren(spark(past.map((each) => each.hits ?? 0), "of 100 %"));
  text("hits-total", needed ? `${percent(share(loaded, needed))} of ${grouped(needed)} tokens so far` : "no prompt so far");
}

// What saved tokens are worth, by what the reader has typed; kept in the browser.
function saved(tokens) {
  const prefill = Number(byId("prefill").value);
  const price = Number(byId("price").value);
  const current = perSecond("jobs", "loaded_tokens");
  text("saved-now", current === null ? "-" : grouped(current));
  text("saved-worth", "");
  text("saved-total", `${grouped(tokens)} tokens so far`);
  if (!prefill) return;
  const [engines, seconds] = [current / prefill, tokens / prefill];
  const worth = (hours, unit) => price && `${(hours * price).toFixed(2)} ${unit}`;
  text("saved-worth", listed(`now the prefill of ${engines.toFixed(2)} engines`, worth(engines, "€/h")));
  byId("saved-total").append(": ", listed(`${duration(seconds)} of prefill`, worth(seconds / 3600, "€")));
}

// A line with a bar.
function bar(name, filled, ...lines) {
  const made = element("div", "tier");
  const used = element("div", "bar");
  used.append(part(["used", filled]));
  made.append(element("b", "", name), used, ...lines);
  return made;
}

function tier(each) {
  const used = usedOf(each.used_bytes, each.capacity_bytes);
  const state = element("p", each.off ? "bad" : "", each.off ? `off: ${each.off}` : used);
  const budget = each.write_budget_bytes;
  return bar(each.name, share(each.used_bytes, each.capacity_bytes), state, element("p", "quiet", listed(
    `${each.blocks} shards`,
    each.kept_blocks && `${each.kept_blocks} of an earlier run`,
    `${size(each.read_bytes)} read`,
    `${size(each.written_bytes)} written`,
    each.failures && `${each.failures} failures`,
    budget !== null && `${size(budget)} may be written now`,
  )));
}

// What `kvsidecar status` calls them too.
function named(namespaces) {
  const names = namespaces.map((each) => each.served_name || each.namespace.model);
  const several = (name) => names.filter((each) => each === name).length > 1;
  return namespaces.map((each, at) => ({ ...each, name: names[at] + (several(names[at]) ? ` #${each.digest}` : "") }));
}

function namespace(each) {
  const needed = each.needed_tokens;
  return bar(cut(each.name), share(each.bytes, now.pool.total_bytes), element("p", "quiet", cut(listed(
    `${each.blocks} blocks`,
    size(each.bytes),
    needed && `hits ${percent(share(each.loaded_tokens, needed))} of ${grouped(needed)} tokens`,
    each.differs.length && `differs: ${each.differs.join(", ")}`,
  ))));
}

function tenant(each) {
  return bar(each.name, share(each.used_bytes, now.pool.total_bytes), element("p", "quiet", listed(
    `${size(each.used_bytes)} used`,
    `${size(each.guaranteed_bytes)} guaranteed`,
    each.max_bytes !== null && `at most ${size(each.max_bytes)}`,
  )));
}

function device({ uuid, down, copier_deaths: deaths }) {
  const died = deaths ? `, its copier died ${deaths}x` : "";
  return element("li", down ? "bad" : "", `${shortDevice(uuid)}: ${down || "works"}${died}`);
}

function refused([reason, count]) {
  const made = element("li", "", `${reason} ${count}`);
  const added = before ? count - (before.refusals[reason] ?? 0) : 0;
  if (added) made.append(element("span", "note", ` (+${added})`));
  return made;
}

function engine(rank) {
  const row = document.createElement("tr");
  for (const each of [cut(rank.instance) + (rank.idle ? " (idle)" : ""), `${rank.rank}/${rank.world_size}`,
    rate(rank.store), rate(rank.load)]) row.append(element("td", "", each));
  for (const each of [rank.jobs_running, shortDevice(rank.device), size(rank.imported_bytes),
    duration(rank.attached_seconds)]) row.append(element("td", "extra", each));
  return row;
}

function engines({ ranks, totals, partial }) {
  const earlier = new Map(before?.ranks.map((rank) => [rank.session, rank]));
  const rated = ranks.map((rank) => {
    const old = earlier.get(rank.session);
    const [store, load] = ["stored_bytes", "loaded_bytes"].map((field) => old && (rank[field] - old[field]) / span);
    return { ...rank, store, load, copies: old ? store + load : 0 };
  });
  const byName = (a, b) => a.instance.localeCompare(b.instance) || a.rank - b.rank;
  rated.sort((a, b) => b.copies - a.copies || b.jobs_running - a.jobs_running || byName(a, b));
  byId("engines").replaceChildren(...rated.slice(0, RANKS).sort(byName).map(engine));
  const attached = totals.attached_ranks;
  const left = attached - Math.min(ranks.length, RANKS);
  let note = "";
  if (!attached) note = "No engine is attached.";
  else if (partial) note = `${attached} attached. ${HIDDEN}`;
  else if (left) note = `and ${left} less busy: kvsidecar engines lists all`;
  text("engines-note", note);
}

function state(name) {
  text("state", name);
  byId("state").className = `badge ${name}`;
  document.title = `kvsidecar ${name}`;
}

function reason(value) {
  byId("reason").hidden = !value;
  text("reason", value);
}

function show(told) {
  observe(told);
  const { readiness, jobs } = told;
  state(readiness.state);
  text("about", `${told.version} on ${told.backend}, up ${duration(told.uptime_seconds)}`);
  reason(readiness.reason);
  pin(readiness);
  pool(told);
  byId("flow").replaceChildren(
    flow("Store", "stored", jobs.stored_bytes, jobs.stores_done),
    flow("Load", "loaded", jobs.loaded_bytes, jobs.loads_done),
  );
  text("jobs", `${jobs.running} running, ${jobs.queued} queued`);
  const evicting = perSecond("pool", "evicted_bytes");
  text("evicting", evicting ? `evicting ${rate(evicting)}` : "");
  hits(told.lookups);
  saved(jobs.loaded_tokens);
  byId("devices").replaceChildren(...told.devices.map(device));
  section("tiers", told.tiers.map(tier));
  section("namespaces", named(told.namespaces.slice(0, SPACES)).map(namespace));
  section("shares", told.shares.slice(0, SPACES).map(tenant));
  section("refused", Object.entries(told.refusals).sort(([, a], [, b]) => b - a).map(refused));
  engines(told);
}

async function look() {
  try {
    const headers = { "Cache-Control": "max-age=1" }; // the daemon renders once in a second for all who look
    const answer = await fetch("status", { cache: "no-store", headers, signal: AbortSignal.timeout(5 * EVERY_MS) });
    const told = await answer.json();
    lostSince = null;
    byId("lost").hidden = true;
    document.querySelector("main").classList.remove("lost");
    if (answer.ok) show(told);
    else {
      state("starting");
      reason(told.reason);
    }
  } catch (error) {
    lostSince ??= Date.now();
    state("lost");
    document.querySelector("main").classList.add("lost");
    byId("lost").hidden = false;
    const seconds = Math.round((Date.now() - lostSince) / 1000);
    text("lost", `No answer for ${seconds} s; the last one is shown below. Trying again.`);
  }
}

async function live() {
  if (!document.hidden) await look();
  setTimeout(live, EVERY_MS);
}

for (const id of ["prefill", "price"]) {
  byId(id).value = localStorage.getItem(`kvsidecar ${id}`) ?? "";
  byId(id).addEventListener("input", () => localStorage.setItem(`kvsidecar ${id}`, byId(id).value));
}
byId("worth").addEventListener("submit", (event) => event.preventDefault());
live();
