// A page that is served while a run goes on asks how it goes on.

const EVERY = 2000; // milliseconds
const PATIENCE = 3; // failures in a row until the server is taken to be gone
const SAID_EVERY = 30000; // milliseconds between two announcements
// What the reader has changed, and an update leaves as it is.
const OWN = new Set(["open", "hidden", "aria-sort", "aria-expanded"]);

/** Make a part of the page like another one, and leave focus, scroll and pictures alone. */
function morph(old, next) {
  if (old.isEqualNode(next) || old.matches?.(".plot, .chart .tools")) return;
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = next.data;
    return;
  }
  for (const name of new Set([...old.getAttributeNames(), ...next.getAttributeNames()])) {
    if (OWN.has(name) || old.getAttribute(name) === next.getAttribute(name)) continue;
    if (next.hasAttribute(name)) old.setAttribute(name, next.getAttribute(name));
    else old.removeAttribute(name);
  }
  const wanted = Array.from(next.childNodes);
  wanted.forEach((child, i) => {
    const present = old.childNodes[i];
    // A part with a name may have come to another place.
    const match = child.id ? byId(child.id)
      : present?.nodeName === child.nodeName && !present.id && present;
    if (match !== present) old.insertBefore(match || child, present ?? null);
    if (match) morph(match, child);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

/** Bring the page up to date. */
function update({ charts, navigation, sections, subtitle }) {
  const next = document.createElement("template");
  const main = `<main id="main">${Object.values(sections).join("")}</main>`;
  next.innerHTML = subtitle + navigation + main;
  // Rows have to meet rows: in the order that the reader has chosen.
  for (const head of all("[aria-sort$='ending']")) {
    const table = next.content.getElementById(head.closest("table").id);
    if (table) sort(table, head.cellIndex, head.getAttribute("aria-sort"));
  }
  for (const part of next.content.children) morph(byId(part.id), part);
  applyFolds();
  for (const [name, chart] of Object.entries(charts)) {
    const isNew = JSON.stringify(chart) !== JSON.stringify(facts.charts[name]);
    if (isNew) drawn.delete(byId(`chart-${name}`));
  }
  facts.charts = charts;
  drawInTurn();
}

/** The news of the run, as text; empty where its server does not answer. */
const ask = () =>
  fetch("state", { cache: "no-store" })
    .then((answer) => (answer.ok ? answer.text() : ""))
    .catch(() => "");

/** Follow a run until it is over. */
async function follow() {
  const clock = () => new Date().toLocaleTimeString("en-GB");
  const again = byId("live-again");
  let [failures, updated, spoken, last, status] = [0, clock(), -Infinity, "", ""];

  // What is seen changes often; what is said aloud, rarely.
  const tell = (line, isNews) => {
    byId("live-shown").textContent = line;
    if (!isNews && performance.now() - spoken < SAID_EVERY) return;
    byId("live-said").textContent = line;
    spoken = performance.now();
  };

  tell(`running, updated ${updated}`, true);
  while (true) {
    const text = await ask();
    failures = text ? 0 : failures + 1;
    if (text) {
      const state = JSON.parse(text);
      if (text !== last) {
        update(state);
        updated = clock();
      }
      tell(`${state.status}, updated ${updated}`, state.status !== status);
      [last, status] = [text, state.status];
      if (status !== "running") return;
    } else if (failures === PATIENCE) {
      tell(`The server is gone; this is the run as it was at ${updated}. `, true);
      again.hidden = false;
      await new Promise((pressed) => again.addEventListener("click", pressed, { once: true }));
      again.hidden = true;
      failures = 0;
      continue;
    }
    await pause(EVERY);
  }
}
