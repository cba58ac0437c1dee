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
  if (old.matches(".plot, .tools")) return;
  for (const { name } of Array.from(old.attributes)) {
    if (!OWN.has(name) && !next.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of Array.from(next.attributes)) {
    if (!OWN.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const wanted = Array.from(next.childNodes);
  wanted.forEach((child, i) => {
    const present = old.childNodes[i];
    if (!present) old.append(child);
    else if (present.nodeName !== child.nodeName || (present.id || "") !== (child.id || "")) {
      // A part that has come, or one that has gone.
      const later = child.id ? Array.from(old.childNodes).find((n) => n.id === child.id) : null;
      if (later) {
        old.insertBefore(later, present);
        morph(later, child);
      } else if (present.id && next.querySelector(`:scope > [id="${CSS.escape(present.id)}"]`)) {
        old.insertBefore(child, present);
      } else present.replaceWith(child);
    } else morph(present, child);
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
  const sent = typeof value === "string" ? value : JSON.stringify(value);
  if (known.get(key) === sent) return false;
  known.set(key, sent);
  return true;
}

function bringUpToDate(state) {
  let changed = false;
  if (isNew("navigation", state.navigation)) {
    morph(byId("navigation").firstElementChild, parsed(state.navigation).firstElementChild);
  }
  if (isNew("subtitle", state.subtitle)) {
    const subtitle = make("p");
    subtitle.append(parsed(state.subtitle));
    morph(byId("subtitle"), Object.assign(subtitle, { id: "subtitle" }));
  }
  const main = byId("main");
  facts.charts = state.charts;
  state.order.forEach((anchor, i) => {
    if (isNew(`section ${anchor}`, state.sections[anchor])) {
      changed = true;
      const next = parsed(state.sections[anchor]).firstElementChild;
      // Rows have to meet rows: in the order that the reader has chosen.
      for (const table of next.querySelectorAll("table.sorts")) applySort(table);
      const old = byId(anchor);
      if (old) morph(old, next);
      else main.insertBefore(next, main.children[i] || null);
      enhanceTables(byId(anchor));
    }
  });
  for (const section of Array.from(main.children)) {
    if (!state.order.includes(section.id)) section.remove();
  }
  for (const figure of figures()) {
    const name = figure.dataset.chart;
    if (!state.charts[name]) continue;
    addTools(figure);
    const isChanged = isNew(`chart ${name}`, state.charts[name]);
    changed = changed || isChanged;
    // A chart that has come, or come anew, has no picture yet.
    if (isChanged || !figure.querySelector(".plot").layout) done.delete(name);
  }
  drawInTurn();
  return changed;
}

const clock = () => new Date().toLocaleTimeString("en-GB");

/** Follow a run until it is over or its server is gone. */
function follow() {
  const place = byId("live");
  // What is seen changes often; what is said aloud, rarely.
  const shown = make("span", { "aria-hidden": "true", id: "live-shown" });
  const said = make("span", { class: "unseen", id: "live-said" });
  place.replaceChildren(shown, said);
  place.hidden = false;
  let failures = 0;
  let updated = clock();
  let spoken = -Infinity;
  let last = "";

  const tell = (line, isNews) => {
    shown.textContent = line;
    if (isNews || performance.now() - spoken > SAID_EVERY) {
      said.textContent = line;
      spoken = performance.now();
    }
  };

  const ask = async () => {
    let state;
    try {
      const answer = await fetch("state", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      state = JSON.parse(await answer.text());
    } catch {
      failures += 1;
      if (failures < PATIENCE) {
        setTimeout(ask, EVERY);
        return;
      }
      tell(`The server is gone; this is the run as it was at ${updated}. `, true);
      const again = button("live-again", "Ask the server again", "try again", () => {
        again.remove();
        failures = 0;
        ask();
      });
      if (!byId("live-again")) place.append(again);
      return;
    }
    failures = 0;
    if (bringUpToDate(state)) updated = clock();
    const news = state.status !== last;
    last = state.status;
    tell(`${state.status}, updated ${updated}`, news);
    if (state.status === "running") setTimeout(ask, EVERY);
  };
  tell(`running, updated ${updated}`, true);
  ask();
}
