// When charts are drawn: those in sight first, those near it in their turn, the others later.

const done = new Set(); // names of charts whose pictures are up to date
const figures = () => Array.from(document.querySelectorAll("figure.chart"));
const isReady = () => typeof Plotly !== "undefined";

/** The next task: the browser may show what is there, and hear its reader, before. */
const pause = () => new Promise((next) => setTimeout(next));

/** When what is there has been shown; a page that is behind others is not shown. */
const shown = () =>
  new Promise((next) => {
    if (document.hidden) setTimeout(next);
    else requestAnimationFrame(() => setTimeout(next));
  });

/** Say what went wrong, on top of the page. */
function complain(message) {
  byId("trouble").textContent = message;
  byId("trouble").hidden = false;
}

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

const isInSight = (figure) => distance(figure) === 0;

/** Draw what is due and at most so many windows away, one chart a task, the nearest first. */
async function drawInTurn(most = 1) {
  for (;;) {
    const due = figures().filter((figure) => !done.has(figure.dataset.chart));
    const near = due.map((figure) => [distance(figure), figure]).filter(([far]) => far <= most);
    if (!near.length || !isReady()) return;
    attempt(near.reduce((a, b) => (b[0] < a[0] ? b : a))[1]);
    await pause();
  }
}

/** Draw all anew after a change: at once what is in sight, the others when they are near. */
function redraw() {
  done.clear();
  figures().filter(isInSight).forEach((figure) => attempt(figure));
  drawInTurn();
}

// Each chart that comes near calls for its turn.
const follower = new IntersectionObserver(() => drawInTurn(), { rootMargin: "100% 0px" });

// Who comes by keyboard finds the picture there.
document.addEventListener("focusin", (event) => {
  const figure = event.target.closest("figure.chart");
  if (figure) ensure(figure);
});

function followWidth() {
  let width = byId("main").clientWidth;
  let wait = 0;
  new ResizeObserver(() => {
    if (byId("main").clientWidth === width) return;
    width = byId("main").clientWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 100);
  }).observe(byId("main"));
}

function followPrinting() {
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.printing = "";
    // Paper can't be unfolded.
    for (const part of document.querySelectorAll("details:not([open])")) {
      part.open = true;
      part.dataset.closed = "";
    }
    drawAll(true);
    if (!isReady() && byId("trouble").hidden) {
      complain("The pictures were not there yet when this was printed.");
    }
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.printing;
    for (const part of document.querySelectorAll("details[data-closed]")) {
      part.open = false;
      delete part.dataset.closed;
    }
    redraw();
  });
}
