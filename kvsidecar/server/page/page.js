// Draws /status, with the words of `kvsidecar top`. Texts come from clients too: they are only ever set as text.
"use strict";

const EVERY_MS = 1000;
const WINDOW_SECONDS = 5; // that a rate is an average of, so that it can be read
const FORGOTTEN_SECONDS = 10; // between two readings, after which rates begin again
const COLUMN_SECONDS = 5; // that a column of a chart is an average of
const HISTORY = 60; // columns of a chart
const KEPT = "kvsidecar charts 1"; // what a reload of the page finds again; the number is that of its form
const RANKS = 32; // the busiest
const SPACES = 8; // namespaces, and shares: the largest
const TEXT = 96; // characters of a client's text
const NO_BREAK = "\u00a0"; // the space between a number and its unit
const HIDDEN = "Their names are hidden here, because --socket-mode 0660 or a policy lets only some users see them: \
kvsidecar engines shows them to these.";
const byId = (id) => document.getElementById(id);
let lostSince = null;
let now = null; // the last reading
let readings = []; // those of the window, of one daemon, the oldest first; the last one is `now`
let before = null; // the oldest of them; null if there is no other than `now`
let span = 0; // seconds between the two
let charts = null; // see `begun`

// The charts of one daemon: totals when the last column begins, and the columns before it, the oldest first.
function begun(told) {
  return { epoch: told.epoch, from: totals(told), columns: [] };
}

// What a reload has left, if this is still the same daemon.
function kept(told) {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT));
    return found?.epoch === told.epoch ? found : null;
  } catch {
    return null; // another site's page at this address, or a browser that keeps nothing
  }
}

function totals({ uptime_seconds: at, jobs, lookups }) {
  const { stored_bytes: stored, loaded_bytes: loaded } = jobs;
  return { at, stored, loaded, needed: lookups.needed_tokens, hit: lookups.loaded_tokens };
}

// Averages of the seconds between two totals.
function column(from, to) {
  const seconds = to.at - from.at;
  const [stored, loaded] = [(to.stored - from.stored) / seconds, (to.loaded - from.loaded) / seconds];
  return { span: seconds, stored, loaded, hits: hitRate(to.hit - from.hit, to.needed - from.needed) };
}

function observe(told) {
  const passed = told.epoch === now?.epoch ? told.uptime_seconds - now.uptime_seconds : Infinity;
  if (!passed) return; // the same reading, which others look at too
  now = told;
  readings = passed > FORGOTTEN_SECONDS ? [told] : [...readings, told];
  while (readings.length > 2 && told.uptime_seconds - readings[1].uptime_seconds >= WINDOW_SECONDS) readings.shift();
  before = readings.length > 1 ? readings[0] : null;
  span = before && told.uptime_seconds - before.uptime_seconds;
  addColumns(told);
}

// Ends the last column when it is full. Where nobody has looked for long, the average is that of several columns.
function addColumns(told) {
  if (charts?.epoch !== told.epoch) charts = kept(told) ?? begun(told);
  const seconds = told.uptime_seconds - charts.from.at;
  if (seconds < COLUMN_SECONDS) return;
  const count = Math.min(HISTORY, Math.floor(seconds / COLUMN_SECONDS));
  const made = { ...column(charts.from, totals(told)), span: seconds / count };
  charts.columns = [...charts.columns, ...Array(count).fill(made)].slice(-HISTORY);
  charts.from = totals(told);
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(charts));
  } catch { /* a reload begins anew */ }
}

// The columns, the last one as far as it is.
function past() {
  const last = totals(now).at > charts.from.at ? [column(charts.from, totals(now))] : [];
  return [...charts.columns, ...last].slice(-HISTORY);
}

function perSecond(part, field) {
  return before && (now[part][field] - before[part][field]) / span;
}

function hitRate(loaded, needed) {
  return needed ? Math.min(1, loaded / needed) : null; // a load may be reported later than what its prompt needed
}

function inUnits(value, step, units, decimals) {
  let unit = 0;
  for (; value.toFixed(decimals) >= step && unit < units.length - 1; unit++) value /= step;
  return Number(value.toFixed(decimals)) + NO_BREAK + units[unit];
}

const size = (nbytes) => inUnits(nbytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], 2);
const rate = (value) => value == null ? "-" : inUnits(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1);
const grouped = (count) => Math.round(count).toLocaleString("en");
const share = (part, whole) => whole ? part / whole : 0;
const percent = (value) => `${Math.round(100 * value)}%`;
const listed = (...texts) => texts.filter(Boolean).join(", ");
const cut = (value) => value.length > TEXT ? `${value.slice(0, TEXT - 1)}…` : value;
const shortDevice = (uuid) => cut(uuid.split("-", 2).join("-"));
const counted = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
const usedOf = (used, total) => `${size(used)} of ${size(total)} used`;

function duration(seconds) {
  if (seconds < 59.95) return `${Number(seconds.toFixed(1))}${NO_BREAK}s`;
  const hours = Math.round(seconds) >= 3600;
  const rounded = Math.round(hours ? seconds / 60 : seconds);
  const [whole, rest] = [Math.floor(rounded / 60), rounded % 60];
  const [large, small] = hours ? ["h", "min"] : ["min", "s"];
  return `${whole}${NO_BREAK}${large}${rest ? ` ${rest}${NO_BREAK}${small}` : ""}`;
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
  const seconds = Math.round(past().reduce((sum, each) => sum + each.span, 0));
  const below = element("div", "span");
  if (shares.length) below.append(element("span", "", `last ${duration(seconds)}`), element("span", "", highest));
  made.append(columns, below);
  return made;
}

function flow(name, field, nbytes, jobs) {
  const rates = past().map((each) => each[field]);
  const highest = Math.max(0, ...rates);
  const row = element("div", "row");
  row.append(element("span", "", name), element("b", "", rate(perSecond("jobs", `${field}_bytes`))));
  row.append(spark(rates.map((each) => share(each, highest)), highest ? `at most ${rate(highest)}` : ""));
  row.append(element("span", "quiet", `${size(nbytes)} in ${grouped(jobs)} ${jobs === 1 ? "job" : "jobs"}`));
  return row;
}

// The parts of the bar that are there, and what is free. What is leased is used, too.
function legend(parts) {
  const free = Math.max(0, 1 - parts.reduce((sum, [, share]) => sum + share, 0));
  const { used, leased } = Object.fromEntries(parts);
  const all = [["used", used + leased], ...parts.slice(1), ["free", free]];
  return all.filter(([, share]) => share).map(([name, share]) => {
    const made = element("li", "");
    made.append(element("i", name), `${name === "leased" ? "of which " : ""}${name} ${share < 0.01 ? "<1%" : percent(share)}`);
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
    used: pool.used_bytes - leased, leased, reserved: pool.reserved_bytes, quarantined: pool.quarantined_bytes,
    rounding: pool.rounding_bytes,
  }).map(([name, nbytes]) => [name, share(nbytes, pool.total_bytes)]);
  byId("pool-bar").className = there ? "bar" : "bar none";
  byId("pool-bar").replaceChildren(...(there ? parts.map(part) : []));
  byId("legend").replaceChildren(...(there ? legend(parts) : []));
  const pinned = `${size(readiness.pinned_bytes)} of ${size(readiness.pool_bytes)} pinned`;
  text("pool-text", there ? usedOf(pool.used_bytes, pool.total_bytes) : pinned);
  const details = listed(
    counted(pool.blocks, "block"),
    `${size(leased)} under ${counted(pool.leases, "lease")}`,
    pool.reserved_bytes && `${size(pool.reserved_bytes)} reserved`,
    pool.quarantined_bytes && `${size(pool.quarantined_bytes)} quarantined`,
    pool.rounding_bytes && `${size(pool.rounding_bytes)} lost to rounding`,
    pool.unzeroed_bytes && `${size(pool.unzeroed_bytes)} to be zeroed`,
    !["", "lru"].includes(pool.eviction) && `eviction by ${pool.eviction}`,
    pool.page_kind && `${pool.page_kind} pages`,
    pool.numa_nodes.length > 1 && `NUMA nodes ${pool.numa_nodes.join(", ")}`,
  );
  const kept = listed(
    `kept ${counted(pool.kept_blocks, "block")} of an earlier daemon`,
    pool.dropped_blocks && `lost ${pool.dropped_blocks}`,
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
  const current = hitRate(perSecond("lookups", "loaded_tokens"), perSecond("lookups", "needed_tokens"));
  text("hits-now", current === null ? "-" : percent(current));
  byId("hits-spark").replaceChildren(spark(past().map((each) => each.hits ?? 0), "of 100 %"));
  text("hits-total", needed ? `${percent(share(loaded, needed))} of ${grouped(needed)} tokens so far` : "no prompt so far");
}

// A price as `kvsidecar top` takes it: 20, $20 or 20 EUR. Says what so many hours cost, in the same currency.
function priceOf(typed) {
  const found = /^([^\d+-]*)(\d+(?:[.,]\d+)?)([^\d+-]*)$/.exec(typed);
  const amount = found && Number(found[2].replace(",", "."));
  return amount ? (hours) => `${found[1]}${(hours * amount).toFixed(2)}${found[3]}` : () => "";
}

// What saved tokens are worth, by what the reader has typed; kept in the browser.
function saved(tokens) {
  const prefill = Number(byId("prefill").value);
  const price = priceOf(byId("price").value.trim());
  const current = perSecond("jobs", "loaded_tokens");
  text("saved-now", current === null ? "-" : grouped(current));
  text("saved-worth", "");
  text("saved-total", `${grouped(tokens)} tokens so far`);
  if (!prefill) return;
  const [engines, seconds] = [current / prefill, tokens / prefill];
  const hourly = price(engines) && `${price(engines)}/h`;
  text("saved-worth", listed(`now the prefill of ${engines.toFixed(2)} engines`, hourly));
  byId("saved-total").append(": ", listed(`${duration(seconds)} of prefill`, price(seconds / 3600)));
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
    counted(each.blocks, "shard"),
    each.kept_blocks && `${each.kept_blocks} of an earlier run`,
    `${size(each.read_bytes)} read`,
    `${size(each.written_bytes)} written`,
    each.failures && counted(each.failures, "failure"),
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
    counted(each.blocks, "block"),
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
  const first = new Map(); // of each rank, the oldest reading of the window
  for (const reading of readings.slice(0, -1).reverse()) {
    for (const rank of reading.ranks) first.set(rank.session, [rank, now.uptime_seconds - reading.uptime_seconds]);
  }
  const rated = ranks.map((rank) => {
    const [old, passed] = first.get(rank.session) ?? [];
    const [store, load] = ["stored_bytes", "loaded_bytes"].map((field) => old && (rank[field] - old[field]) / passed);
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
  document.querySelector("main").hidden = false;
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
    document.querySelector("main").classList.toggle("lost", !answer.ok);
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
    text("lost", `No answer for ${seconds} s${now ? "; the last one is shown below" : ""}. Trying again.`);
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
