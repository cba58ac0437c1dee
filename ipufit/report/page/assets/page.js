// The page around the charts: when they are drawn, tables that sort and fold, looks, and paper.

/** The next task: the browser may show what is there, and hear its reader, before. */
const pause = () => new Promise((next) => setTimeout(next));

/** When what is there has been shown; a page that is behind others is not shown. */
const shown = () =>
  document.hidden ? pause() : new Promise((next) => requestAnimationFrame(() => setTimeout(next)));

/** Say what went wrong, on top of the page. */
const complain = (message) =>
  Object.assign(byId("trouble"), { textContent: message, hidden: false });

/** Draw a chart; the others can be drawn also where it can't. */
function attempt(figure, forPaper = false) {
  try {
    draw(figure, forPaper);
  } catch (error) {
    done.add(figure.dataset.chart);
    figure.classList.add("undrawn");
    complain(`"${figure.querySelector("h3").textContent}" can't be drawn: ${error.message}`);
  }
}

const drawAll = (forPaper) => figures().forEach((figure) => attempt(figure, forPaper));

/** Have the picture of a chart at once; whether there is one. */
function ensure(figure) {
  if (isReady() && !done.has(figure.dataset.chart)) attempt(figure);
  return Boolean(figure.querySelector(".plot").layout);
}

/** Windows between a chart and what is seen; 0 for one in sight. */
function distance(figure) {
  const { top, bottom } = figure.getBoundingClientRect();
  return Math.max(0, top - innerHeight, -bottom) / innerHeight;
}

/** Draw what is due and at most so many windows away, one chart a task, the nearest first. */
async function drawInTurn(most = 1) {
  while (isReady()) {
    const due = figures().filter((figure) => !done.has(figure.dataset.chart));
    const [nearest] = due.sort((a, b) => distance(a) - distance(b));
    if (!nearest || distance(nearest) > most) return;
    attempt(nearest);
    await pause();
  }
}

/** Draw all anew after a change: at once what is in sight, the others when they are near. */
function redraw() {
  done.clear();
  if (isReady()) figures().filter((figure) => !distance(figure)).forEach((each) => attempt(each));
  drawInTurn();
}

// Each chart that comes near calls for its turn; who comes by keyboard finds the picture there.
const follower = new IntersectionObserver(() => drawInTurn(), { rootMargin: "100% 0px" });
document.addEventListener("focusin", (event) => {
  const figure = event.target.closest("figure.chart");
  if (figure) ensure(figure);
});

function followWidth() {
  let [width, wait] = [byId("main").clientWidth, 0];
  new ResizeObserver(() => {
    if (byId("main").clientWidth === width) return;
    width = byId("main").clientWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 100);
  }).observe(byId("main"));
}

addEventListener("beforeprint", () => {
  document.documentElement.dataset.printing = "";
  // Paper can't be unfolded.
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = true;
    part.dataset.closed = "";
  }
  if (isReady()) drawAll(true);
  else if (byId("trouble").hidden) complain("The pictures were not there yet when this was printed.");
});

addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printing;
  for (const part of document.querySelectorAll("details[data-closed]")) {
    part.open = false;
    delete part.dataset.closed;
  }
  redraw();
});

const sorts = new Map(); // by table: the column and its direction

/** Put the rows of a table into the order that was asked for; what is not known is the last. */
function applySort(table) {
  const { column, direction } = sorts.get(table.id) ?? {};
  if (!direction) return;
  const valueOf = ({ cells: { [column]: cell } }) =>
    cell?.dataset.value === undefined ? cell?.textContent.trim() ?? "" : Number(cell.dataset.value);
  const isNothing = (value) => value === "" || value === "–" || Number.isNaN(value);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true }));
  const rows = Array.from(table.tBodies[0].rows, (row) => [valueOf(row), row]);
  rows.sort(([a], [b]) => isNothing(a) - isNothing(b)
    || (direction === "ascending" ? compare(a, b) : compare(b, a)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  Array.from(table.tHead.rows[0].cells).forEach((head, i) => {
    head.setAttribute("aria-sort", i === column ? direction : "none");
  });
}

/** Hide the layers within those that are folded. */
function applyFolds(tree) {
  let closed = Infinity;
  for (const row of tree.tBodies[0].rows) {
    const depth = Number(row.dataset.depth);
    if (depth <= closed) closed = Infinity;
    row.hidden = depth > closed;
    if (!row.hidden && row.querySelector(".fold[aria-expanded='false']")) closed = depth;
  }
}

/** Show the one of several tables whose button is pressed. */
function applyChoices(group) {
  const presses = Array.from(group.querySelectorAll(":scope > .tools button"));
  group.querySelectorAll(":scope > .choice").forEach((part, i) => {
    part.hidden = presses[i].getAttribute("aria-pressed") !== "true";
  });
}

function fold(press, open) {
  press.setAttribute("aria-expanded", String(open));
  applyFolds(press.closest("table"));
}

document.addEventListener("click", ({ target }) => {
  const press = target.closest("button");
  const head = target.closest("table.sorts thead th");
  if (press && head) {
    const [first, other] = head.classList.contains("number")
      ? ["descending", "ascending"] : ["ascending", "descending"];
    const direction = head.getAttribute("aria-sort") === first ? other : first;
    sorts.set(head.closest("table").id, { column: head.cellIndex, direction });
    applySort(head.closest("table"));
  } else if (press?.matches(".fold")) {
    fold(press, press.getAttribute("aria-expanded") !== "true");
  } else if (press?.matches(".choices > .tools button")) {
    for (const each of press.parentElement.children) {
      each.setAttribute("aria-pressed", String(each === press));
    }
    applyChoices(press.closest(".choices"));
  }
});

// As in other trees: left closes, right opens.
document.addEventListener("keydown", (event) => {
  if (!event.target.matches?.(".fold") || !/^Arrow(Left|Right)$/.test(event.key)) return;
  event.preventDefault();
  fold(event.target, event.key === "ArrowRight");
});

/** Let the parts of the page do what they can with a script; again, where they have changed. */
function enhance(part) {
  part.querySelectorAll(".choices").forEach(applyChoices);
  part.querySelectorAll("table.tree").forEach(applyFolds);
  part.querySelectorAll("figure.chart").forEach((figure) => follower.observe(figure));
}

function addLooks() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const other = () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    return isDark ? "light" : "dark";
  };
  const tell = () => {
    byId("theme").textContent = other();
    byId("theme").setAttribute("aria-label", `Change to the ${other()} look`);
  };
  const change = () => {
    tell();
    redraw();
  };
  tell();
  system.addEventListener("change", change);
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = other();
    change();
  });
}

/** plotly.js comes packed, which makes the page a third as long. */
async function unpack() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "This browser is too old to draw the pictures; Chrome 80, Firefox 113 and Safari 16.4 can. " +
        "The tables have all the numbers.",
    );
  }
  const letters = atob(byId("plotly").textContent);
  const packed = new Uint8Array(letters.length);
  // A loop takes a tenth of the time of Uint8Array.from with a function.
  for (let i = 0; i < letters.length; i += 1) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  script.remove();
  if (!isReady()) throw new Error("The pictures can't be drawn here.");
}

/** Bring plotly.js when the text is seen, then draw what is in sight, and then what is near. */
async function openPictures() {
  await shown();
  // An address with a place in the page is on its way there.
  const isTextAlone = !location.hash && figures().every(distance);
  if (isTextAlone) performance.mark("seen");
  await unpack();
  followWidth();
  await drawInTurn(0);
  if (!isTextAlone) {
    await shown();
    performance.mark("seen");
  }
  await drawInTurn();
  performance.mark("drawn");
  document.body.dataset.drawn = String(Math.round(performance.now()));
}

async function open() {
  const opened = openPictures().catch((error) => {
    complain(error.message);
    figures().forEach((figure) => figure.classList.add("undrawn"));
  });
  addLooks();
  // Who is quick waits for the pictures.
  byId("print").addEventListener("click", () => opened.then(() => print()));
  enhance(document);
  await opened;
  if (document.body.hasAttribute("data-live")) follow();
}

open();
