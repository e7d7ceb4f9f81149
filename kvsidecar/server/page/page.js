// Shows what page.json says. Texts come from clients too: they are only ever set as text.
"use strict";

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
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

function flow(each) {
  const row = element("div", "row");
  const spark = element("div", "spark");
  for (const share of each.history) {
    const column = element("i", "");
    column.style.height = `${100 * share}%`;
    spark.append(column);
  }
  row.append(element("span", "", each.name), element("b", "", each.rate), spark, element("span", "quiet", each.total));
  return row;
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
  for (const column of ["engine", "rank", "store", "load", "jobs", "device", "mapped", "attached"]) {
    row.append(element("td", "", String(each[column])));
  }
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
  else if (!told.names) note = `${told.attached} attached. Their names are shown to users of the socket: kvsidecar engines`;
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
  byId("pool-bar").replaceChildren(...told.pool.parts.map((each) => part(each.name, each.share)));
  text("pool-text", told.pool.text);
  text("pool-details", told.pool.details.join("; "));
  byId("flow").replaceChildren(...told.flow.map(flow));
  text("jobs", told.jobs);
  text("evicting", told.evicting && `evicting ${told.evicting}`);
  text("hits-now", told.hits.now);
  text("hits-total", told.hits.total);
  byId("devices").replaceChildren(...told.devices.map(device));
  byId("tiers-section").hidden = !told.tiers.length;
  byId("tiers").replaceChildren(...told.tiers.map(tier));
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
    if (answer.ok) show(told);
    else {
      state("starting");
      byId("reason").hidden = false;
      text("reason", told.reason);
    }
  } catch (error) {
    lostSince ??= Date.now();
    state("lost");
    byId("lost").hidden = false;
    const seconds = Math.round((Date.now() - lostSince) / 1000);
    text("lost", `No answer for ${seconds} s; the last one is shown below. Trying again.`);
  }
}

async function live() {
  if (!document.hidden) await look();
  setTimeout(live, EVERY_MS);
}

live();
