// A page that is served while a run goes on asks how it goes on.

const EVERY = 2000; // milliseconds
const PATIENCE = 3; // failures in a row until the server is taken to be gone
const SAID_EVERY = 30000; // milliseconds between two announcements
// What the reader has changed, and an update leaves as it is.
const OWN = new Set(["open", "hidden", "aria-sort", "aria-expanded", "aria-pressed"]);

/** Make a part of the page like another one, and leave focus, scroll and pictures alone. */
function morph(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.matches(".plot, .chart .tools")) return;
  for (const name of new Set([...old.getAttributeNames(), ...next.getAttributeNames()])) {
    if (OWN.has(name) || old.getAttribute(name) === next.getAttribute(name)) continue;
    if (next.hasAttribute(name)) old.setAttribute(name, next.getAttribute(name));
    else old.removeAttribute(name);
  }
  const wanted = Array.from(next.childNodes);
  wanted.forEach((child, i) => {
    const present = old.childNodes[i];
    // A part with a name may have come to another place.
    const named = child.id && Array.from(old.children).find((each) => each.id === child.id);
    const isAlike = present?.nodeName === child.nodeName && !present.id && !child.id;
    if (!named && !isAlike) old.insertBefore(child, present ?? null);
    else {
      if (named && named !== present) old.insertBefore(named, present);
      morph(named || present, child);
    }
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

const parsed = (html) => {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
};

const known = new Map(); // by part of the page, what was sent for it last

/** Whether something new was sent. */
function isNew(key, value) {
  const sent = JSON.stringify(value);
  const isOld = known.get(key) === sent;
  known.set(key, sent);
  return !isOld;
}

/** Bring the page up to date; whether anything has changed. */
function update(state) {
  let changed = false;
  for (const [name, part] of [["navigation", state.navigation], ["subtitle", state.subtitle]]) {
    const next = byId(name).cloneNode();
    next.append(parsed(part));
    morph(byId(name), next);
  }
  const main = byId("main");
  facts.charts = state.charts;
  state.order.forEach((anchor, i) => {
    if (!isNew(`section ${anchor}`, state.sections[anchor])) return;
    changed = true;
    const next = parsed(state.sections[anchor]).firstElementChild;
    // Rows have to meet rows: in the order that the reader has chosen.
    next.querySelectorAll("table.sorts").forEach(applySort);
    if (byId(anchor)) morph(byId(anchor), next);
    else main.insertBefore(next, main.children[i] ?? null);
    enhance(byId(anchor));
  });
  Array.from(main.children, (part) => state.order.includes(part.id) || part.remove());
  for (const figure of figures()) {
    const name = figure.dataset.chart;
    const isChanged = isNew(`chart ${name}`, state.charts[name]);
    changed ||= isChanged;
    // A chart that has come, or come anew, has no picture yet.
    if (isChanged || !figure.querySelector(".plot").layout) done.delete(name);
  }
  drawInTurn();
  return changed;
}

/** Follow a run until it is over or its server is gone. */
function follow() {
  const clock = () => new Date().toLocaleTimeString("en-GB");
  let [failures, updated, spoken, last] = [0, clock(), -Infinity, ""];

  // What is seen changes often; what is said aloud, rarely.
  const tell = (line, isNews) => {
    byId("live-shown").textContent = line;
    if (!isNews && performance.now() - spoken < SAID_EVERY) return;
    byId("live-said").textContent = line;
    spoken = performance.now();
  };

  const ask = async () => {
    let state;
    byId("live-again").hidden = true;
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      state = await answer.json();
    } catch {
      failures += 1;
      if (failures < PATIENCE) setTimeout(ask, EVERY);
      else {
        tell(`The server is gone; this is the run as it was at ${updated}. `, true);
        byId("live-again").hidden = false;
      }
      return;
    }
    failures = 0;
    if (update(state)) updated = clock();
    tell(`${state.status}, updated ${updated}`, state.status !== last);
    last = state.status;
    if (state.status === "running") setTimeout(ask, EVERY);
  };
  byId("live-again").addEventListener("click", () => {
    failures = 0;
    ask();
  });
  tell(`running, updated ${updated}`, true);
  ask();
}
