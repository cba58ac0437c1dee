// A page that is served while a run goes on asks how it goes on.

const EVERY = 2000; // milliseconds
const PATIENCE = 3; // failures in a row until the server is taken to be gone
const SAID_EVERY = 30000; // milliseconds between two announcements
// What the reader has changed, and an update leaves as it is.
const OWN = new Set(["open", "hidden", "aria-sort", "aria-expanded"]);

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
    const match = child.id ? Array.from(old.children).find(({ id }) => id === child.id)
      : present?.nodeName === child.nodeName && !present.id && present;
    if (!match || match !== present) old.insertBefore(match || child, present ?? null);
    if (match) morph(match, child);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

const sent = {}; // by part of the page, what was sent for it last

function isNew(key, value) {
  const [before, now] = [sent[key], JSON.stringify(value)];
  sent[key] = now;
  return now !== before;
}

/** Bring the page up to date. */
function update({ charts, navigation, sections, subtitle }) {
  const main = byId("main");
  facts.charts = charts;
  for (const [name, html] of Object.entries({ navigation, subtitle, ...sections })) {
    if (!isNew(name, html)) continue;
    const parsed = document.createElement("template");
    parsed.innerHTML = html;
    const next = parsed.content.firstElementChild;
    // Rows have to meet rows: in the order that the reader has chosen.
    for (const table of all("table.sorts", next)) {
      const head = byId(table.id)?.querySelector("[aria-sort$='ending']");
      if (head) sort(table, head.cellIndex, head.getAttribute("aria-sort"));
    }
    if (byId(name)) morph(byId(name), next);
    else main.insertBefore(next, main.children[Object.keys(sections).indexOf(name)] ?? null);
    enhance(byId(name));
  }
  Array.from(main.children, (part) => part.id in sections || part.remove());
  for (const figure of figures()) {
    const name = figure.dataset.chart;
    const isChanged = isNew(`chart ${name}`, charts[name]);
    // A chart that has come, or come anew, has no picture yet.
    if (isChanged || !figure.querySelector(".plot").layout) done.delete(name);
  }
  drawInTurn();
}

/** The news of the run, as text; empty where its server does not answer. */
const ask = () =>
  fetch("state", { cache: "no-store" })
    .then((answer) => (answer.ok ? answer.text() : ""))
    .catch(() => "");

/** Follow a run until it is over or its server is gone. */
function follow() {
  const clock = () => new Date().toLocaleTimeString("en-GB");
  let [updated, spoken, last, status] = [clock(), -Infinity, "", ""];

  // What is seen changes often; what is said aloud, rarely.
  const tell = (line, isNews) => {
    byId("live-shown").textContent = line;
    if (!isNews && performance.now() - spoken < SAID_EVERY) return;
    byId("live-said").textContent = line;
    spoken = performance.now();
  };

  const goOn = async (failures) => {
    const text = await ask();
    if (text) {
      const state = JSON.parse(text);
      if (text !== last) {
        update(state);
        updated = clock();
      }
      tell(`${state.status}, updated ${updated}`, state.status !== status);
      [last, status] = [text, state.status];
      if (status === "running") setTimeout(goOn, EVERY, 0);
    } else if (failures + 1 < PATIENCE) setTimeout(goOn, EVERY, failures + 1);
    else {
      tell(`The server is gone; this is the run as it was at ${updated}. `, true);
      byId("live-again").hidden = false;
    }
  };
  byId("live-again").addEventListener("click", () => {
    byId("live-again").hidden = true;
    goOn(0);
  });
  tell(`running, updated ${updated}`, true);
  goOn(0);
}
