// The page around the charts: when they are drawn, tables that sort and fold, looks, and paper.

const root = document.documentElement;

/** A task after so many milliseconds: the browser may show what is there, and hear its reader. */
const pause = (time = 0) => new Promise((next) => setTimeout(next, time));

/** When what is there has been shown; a page that is behind others is not shown. */
const shown = () =>
  document.hidden ? pause() : new Promise((next) => requestAnimationFrame(() => setTimeout(next)));

/** Say what went wrong, on top of the page. */
const complain = (message) =>
  Object.assign(byId("trouble"), { textContent: message, hidden: false });

/** Draw a chart that is due; the others can be drawn also where it can't. Whether it has a picture. */
function ensure(figure) {
  try {
    if (isReady() && isDue(figure)) draw(figure);
  } catch (error) {
    figure.classList.add("undrawn");
    complain(`"${figure.querySelector("h3").textContent}" can't be drawn: ${error.message}`);
  }
  return Boolean(figure.querySelector(".plot").layout);
}

const drawAll = () => figures().forEach(ensure);

/** Windows between a chart and what is seen; 0 for one in sight. */
function distance(figure) {
  const { top, bottom } = figure.getBoundingClientRect();
  return Math.max(0, top - innerHeight, -bottom) / innerHeight;
}

/** Draw what is due and at most so many windows away, the nearest first: at once what is in sight. */
async function drawInTurn(most = 1) {
  while (isReady()) {
    const [nearest] = figures().filter(isDue).sort((a, b) => distance(a) - distance(b));
    if (!nearest || distance(nearest) > most) return;
    if (distance(nearest)) await pause();
    ensure(nearest);
  }
}

let folded = []; // parts that are open on paper alone
const unfold = (open) => folded.forEach((part) => part.toggleAttribute("open", open));

addEventListener("beforeprint", () => {
  root.dataset.printing = "";
  folded = all("details:not([open])");
  unfold(true);
  if (isReady()) drawAll();
  else if (byId("trouble").hidden) complain("The pictures were not there yet when this was printed.");
});

addEventListener("afterprint", () => {
  delete root.dataset.printing;
  unfold(false);
  drawInTurn();
});

/** Put the rows of a table into the order of a column; what is not known is the last. */
function sort(table, column, direction) {
  const valueOf = ({ cells }) => {
    const { dataset, textContent } = cells[column];
    return dataset.value === undefined ? textContent.trim() : Number(dataset.value);
  };
  const isNothing = (value) => value === "" || value === "–" || Number.isNaN(value);
  const compare = (a, b) =>
    typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  const rows = Array.from(table.tBodies[0].rows, (row) => [valueOf(row), row]);
  rows.sort(([a], [b]) => isNothing(a) - isNothing(b)
    || (direction === "ascending" ? compare(a, b) : compare(b, a)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  all("thead th", table).forEach((head, i) => {
    head.setAttribute("aria-sort", i === column ? direction : "none");
  });
}

/** Hide the layers within those that are folded. */
function applyFolds() {
  let closed = Infinity;
  for (const row of all(".tree tbody tr")) {
    const depth = Number(row.dataset.depth);
    if (depth <= closed) closed = Infinity;
    row.hidden = depth > closed;
    if (!row.hidden && row.querySelector(".fold[aria-expanded='false']")) closed = depth;
  }
}

function fold(press, open) {
  press.setAttribute("aria-expanded", String(open));
  applyFolds();
}

/** Sort by the column of a head, numbers from the largest on; the other way at a second time. */
function sortBy(head) {
  const [first, other] = head.classList.contains("number")
    ? ["descending", "ascending"] : ["ascending", "descending"];
  const direction = head.getAttribute("aria-sort") === first ? other : first;
  sort(head.closest("table"), head.cellIndex, direction);
}

document.addEventListener("click", ({ target }) => {
  const press = target.closest("button");
  if (press?.matches(".chart button")) act(press.closest("figure"), press.dataset.key);
  else if (press?.matches(".sorts button")) sortBy(press.closest("th"));
  else if (press?.matches(".fold")) fold(press, press.getAttribute("aria-expanded") !== "true");
});

// As in other trees: left closes, right opens.
document.addEventListener("keydown", (event) => {
  if (!event.target.matches?.(".fold") || !/^Arrow(Left|Right)$/.test(event.key)) return;
  event.preventDefault();
  fold(event.target, event.key === "ArrowRight");
});

function addLooks() {
  const other = () => (look.colorScheme === "dark" ? "light" : "dark");
  const change = () => {
    byId("theme").textContent = other();
    byId("theme").setAttribute("aria-label", `Change to the ${other()} look`);
    drawInTurn();
  };
  change();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", change);
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
  await unpack();
  await drawInTurn(0);
  if (figures().some((figure) => !isDue(figure))) {
    await shown();
    performance.mark("seen");
  }
  await drawInTurn();
  performance.mark("drawn");
}

/** Draw charts that come near as the page scrolls, or as it changes and has rested from that. */
function followReader() {
  let wait = 0;
  addEventListener("scroll", () => drawInTurn());
  new ResizeObserver(() => {
    clearTimeout(wait);
    wait = setTimeout(drawInTurn, 100);
  }).observe(byId("main"));
}

async function open() {
  const opened = openPictures().catch((error) => {
    complain(error.message);
    figures().forEach((figure) => figure.classList.add("undrawn"));
  });
  addLooks();
  // Who is quick waits for the pictures.
  byId("print").addEventListener("click", () => opened.then(() => print()));
  followReader();
  await opened;
  if (document.body.hasAttribute("data-live")) follow();
}

open();
