// Shows what page.json says. Texts come from clients too: they are only ever set as text.
"use strict";

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
const HIDDEN = "Their names are hidden here, because --socket-mode 0660 or a policy lets only some users see them: \
kvsidecar engines shows them to these.";
let lostSince = null;

function text(id, value) {
  byId(id).textContent = value;
}

function element(tag, className, value = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = value;
  return made;
}

function part(name, share) {
  const made = element("i", name);
  made.style.width = `${100 * share}%`;
  made.title = name;
  return made;
}

function bar(parts) {
  const made = element("div", "bar");
  made.append(...parts);
  return made;
}

// Columns of shares, oldest first, and below them the time that they span and what a whole column is.
function spark(history, seconds, highest) {
  const made = element("div", "");
  const columns = element("div", "spark");
  for (const share of history) {
    const column = element("i", "");
    column.style.height = `${100 * (share ?? 0)}%`;
    columns.append(column);
  }
  const span = element("div", "span");
  if (history.length) span.append(element("span", "", `last ${seconds} s`), element("span", "", highest));
  made.append(columns, span);
  return made;
}

function flow(each) {
  const row = element("div", "row");
  row.append(element("span", "", each.name), element("b", "", each.rate));
  row.append(spark(each.history, each.seconds, each.highest), element("span", "quiet", each.total));
  return row;
}

// The parts of the bar that are there, and what is free. Without parts there is no pool, and none of it is free.
function legend(parts) {
  if (!parts.length) return [];
  const free = Math.max(0, 1 - parts.reduce((sum, each) => sum + each.share, 0));
  return [...parts, { name: "free", share: free }].filter((each) => each.share).map((each) => {
    const made = element("li", "");
    const percent = 100 * each.share;
    made.append(element("i", each.name), `${each.name} ${percent < 1 ? "<1" : Math.round(percent)}%`);
    return made;
  });
}

function seconds(value) {
  if (value < 90) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

// What saved tokens are worth, by what the reader has typed; kept in the browser.
function saved(told) {
  const prefill = Number(byId("prefill").value);
  const price = Number(byId("price").value);
  text("saved-now", told.rate === null ? "-" : Math.round(told.rate).toLocaleString("en"));
  text("saved-total", told.text);
  if (!prefill) {
    text("saved-worth", "");
    return;
  }
  const engines = (told.rate ?? 0) / prefill;
  const hours = told.tokens / prefill / 3600;
  let now = `now the prefill of ${engines.toFixed(2)} engines`;
  let all = `${seconds(told.tokens / prefill)} of prefill`;
  if (price) {
    now += `, ${(engines * price).toFixed(2)} €/h`;
    all += `, ${(hours * price).toFixed(2)} €`;
  }
  text("saved-worth", now);
  text("saved-total", `${told.text}: ${all}`);
}

function tier(each) {
  const made = element("div", "tier");
  made.append(element("b", "", each.name), bar([part("used", each.share)]));
  made.append(element("p", each.off ? "bad" : "", each.off ? `off: ${each.off}` : each.text));
  made.append(element("p", "quiet", each.details));
  return made;
}

function share(each) {
  const made = element("div", "tier");
  made.append(element("b", "", each.name), bar([part("used", each.share)]), element("p", "quiet", each.details));
  return made;
}

function device(each) {
  const died = each.deaths ? `, its copier died ${each.deaths}x` : "";
  return element("li", each.down ? "bad" : "", each.name + (each.down ? `: ${each.down}` : ": works") + died);
}

function refused(each) {
  const made = element("li", "", `${each.reason} ${each.count}`);
  if (each.new) made.append(element("span", "note", ` (+${each.new})`));
  return made;
}

function engine(each) {
  const row = document.createElement("tr");
  for (const column of ["engine", "rank", "store", "load"]) row.append(element("td", "", each[column]));
  for (const column of ["jobs", "device", "mapped", "attached"]) row.append(element("td", "extra", String(each[column])));
  return row;
}

function state(name) {
  text("state", name);
  byId("state").className = `badge ${name}`;
  document.title = `kvsidecar ${name}`;
}

function engines(told) {
  byId("engines").replaceChildren(...told.engines.map(engine));
  const left = told.attached - told.engines.length;
  let note = "";
  if (!told.attached) note = "No engine is attached.";
  else if (!told.names) note = `${told.attached} attached. ${HIDDEN}`;
  else if (left) note = `and ${left} less busy: kvsidecar engines lists all`;
  text("engines-note", note);
}

function show(told) {
  state(told.state);
  text("about", `${told.version} on ${told.backend}, up ${told.uptime}`);
  byId("reason").hidden = !told.reason;
  text("reason", told.reason);
  const pin = byId("pin");
  pin.hidden = !told.pin;
  if (told.pin) {
    pin.firstElementChild.replaceChildren(part("pinned", told.pin.share));
    pin.lastElementChild.textContent = `pinned ${told.pin.text}`;
  }
  byId("pool-bar").className = told.pool.parts.length ? "bar" : "bar none";
  byId("pool-bar").replaceChildren(...told.pool.parts.map((each) => part(each.name, each.share)));
  byId("legend").replaceChildren(...legend(told.pool.parts));
  text("pool-text", told.pool.text);
  text("pool-details", told.pool.details.join("; "));
  byId("flow").replaceChildren(...told.flow.map(flow));
  text("jobs", told.jobs);
  text("evicting", told.evicting && `evicting ${told.evicting}`);
  text("hits-now", told.hits.now);
  byId("hits-spark").replaceChildren(spark(told.hits.history, told.hits.seconds, "of 100 %"));
  text("hits-total", told.hits.total);
  saved(told.saved);
  byId("devices").replaceChildren(...told.devices.map(device));
  byId("tiers-section").hidden = !told.tiers.length;
  byId("tiers").replaceChildren(...told.tiers.map(tier));
  byId("namespaces-section").hidden = !told.namespaces.length;
  byId("namespaces").replaceChildren(...told.namespaces.map(share));
  byId("shares-section").hidden = !told.shares.length;
  byId("shares").replaceChildren(...told.shares.map(share));
  byId("refused-section").hidden = !told.refused.length;
  byId("refused").replaceChildren(...told.refused.map(refused));
  engines(told);
}

async function look() {
  try {
    const answer = await fetch("page.json", { cache: "no-store", signal: AbortSignal.timeout(5 * EVERY_MS) });
    const told = await answer.json();
    lostSince = null;
    byId("lost").hidden = true;
    document.querySelector("main").classList.remove("lost");
    if (answer.ok) show(told);
    else {
      state("starting");
      byId("reason").hidden = false;
      text("reason", told.reason);
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
