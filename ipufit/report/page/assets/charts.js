"use strict";

// Charts: their figures come as plotly.py has made them; what their reader chooses is added here.

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(byId("data").textContent);
const figures = () => Array.from(document.querySelectorAll("figure.chart"));
const isReady = () => typeof Plotly !== "undefined";
const views = new Map(); // by chart: what its reader has chosen
const done = new Set(); // names of charts whose pictures are up to date

/** A mean that forgets: of the last `span` values, about. */
function smoothed(values, span) {
  const keep = 1 - 1 / span;
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

/** Places of a long line to draw: the extremes and gaps of each stretch; short ones in a range. */
function thinned(x, y, range) {
  const firstFrom = (least) => (x.findIndex((place) => place >= least) + y.length + 1)
    % (y.length + 1);
  const [begin, end] = range ? [...range].sort((a, b) => a - b) : [-Infinity, Infinity];
  // A point more on either side: lines go on beyond the edges.
  const [from, to] = [Math.max(0, firstFrom(begin) - 1), Math.min(y.length, firstFrom(end) + 2)];
  const kept = new Set([0, y.length - 1]);
  for (const [first, last, whole] of [[0, from, y.length], [from, to, to - from],
                                      [to, y.length, y.length]]) {
    const length = Math.max(1, Math.ceil((2 * whole) / facts.points));
    for (let start = first; start < last; start += length) {
      const places = Array.from({ length: Math.min(length, last - start) }, (_, i) => start + i);
      const values = places.filter((i) => y[i] !== null);
      const gap = places.find((i) => y[i] === null);
      if (gap !== undefined) kept.add(gap);
      if (values.length) {
        kept.add(values.reduce((a, b) => (y[b] < y[a] ? b : a)));
        kept.add(values.reduce((a, b) => (y[b] > y[a] ? b : a)));
      }
    }
  }
  return [...kept].sort((a, b) => a - b);
}

const isLong = ({ type, stackgroup, y }) =>
  type === "scatter" && !stackgroup && y.length > facts.points;

/** The traces of a chart: over which places, how smooth, and with as many points as can be seen. */
function traces({ data }, view) {
  return data.flatMap((trace) => {
    const whole = { ...trace, x: (view.isTimed && trace.meta?.time) || trace.x };
    const drawn = (each) => {
      if (!isLong(each)) return each;
      const places = thinned(each.x, each.y, view.ranges.xaxis);
      return { ...each, x: places.map((i) => each.x[i]), y: places.map((i) => each.y[i]) };
    };
    if (view.span < 2) return [drawn(whole)];
    // Of all values, not of those that are drawn.
    const mean = { ...whole, mode: "lines", y: smoothed(trace.y, view.span) };
    mean.line = { ...trace.line, dash: trace.meta.dash };
    const behind = { mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip" };
    const line = { ...trace.line, width: 1 };
    return [drawn({ ...whole, ...behind, line, hovertemplate: null }), drawn(mean)];
  });
}

function layout(chart, view, width) {
  const shown = structuredClone(chart.layout);
  // A finger that scrolls the page must not be caught by a picture.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  Object.assign(shown, { width, dragmode, template: facts.look });
  const changes = {
    ...(width < 500 && chart.layout.meta.narrow),
    ...(view.isTimed && chart.layout.meta.time),
    ...(view.isLog && { "yaxis.type": "log", "yaxis.range": undefined }),
  };
  for (const [name, range] of Object.entries(view.ranges)) {
    Object.assign(changes, { [`${name}.range`]: range.slice(), [`${name}.autorange`]: false });
  }
  for (const [path, value] of Object.entries(changes)) {
    const [last, ...names] = path.split(".").reverse();
    names.reduceRight((part, name) => part[name], shown)[last] = value;
  }
  return shown;
}

/** A part of a figure in the colours of the present look; it comes in those of the light one. */
function coloured(part, palette, key = "") {
  if (typeof part === "string") return key.endsWith("color") ? palette[part] ?? part : part;
  if (Array.isArray(part)) {
    const isFlat = !part.some((each) => each instanceof Object);
    return isFlat ? part : part.map((each) => coloured(each, palette));
  }
  if (!(part instanceof Object)) return part;
  const entries = Object.entries(part);
  return Object.fromEntries(entries.map(([name, each]) => [name, coloured(each, palette, name)]));
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const entries = Object.entries(facts.colours);
  return Object.fromEntries(entries.map(([light, name]) => [light, style.getPropertyValue(name)]));
}

function viewOf(name) {
  const { span } = facts.charts[name].layout.meta;
  if (!views.has(name)) views.set(name, { span, isTimed: false, isLog: false, ranges: {} });
  return views.get(name);
}

/** Draw a chart, or draw it anew after any change; on paper in the width of a page. */
function draw(figure, forPaper = false) {
  const name = figure.dataset.chart;
  const chart = facts.charts[name];
  const plot = figure.querySelector(".plot");
  const view = viewOf(name);
  const width = forPaper ? Math.min(660, plot.clientWidth || 660) : plot.clientWidth;
  const isFirst = !plot.layout;
  const parts = { data: traces(chart, view), layout: layout(chart, view, width) };
  const shown = coloured(parts, palette());
  Plotly.react(plot, shown.data, shown.layout, facts.config);
  if (isFirst) {
    plot.style.minHeight = "";
    plot.on("plotly_relayout", () => {
      for (const axis of ["xaxis", "yaxis"]) {
        const { autorange, range, fixedrange } = plot.layout[axis];
        delete view.ranges[axis];
        if (autorange === false && range && !fixedrange) view.ranges[axis] = range.slice();
      }
      // Another part of a long line has other points.
      if (facts.charts[name].data.some(isLong)) draw(figure);
    });
  }
  if (!forPaper) done.add(name);
}

// What a key, or a button with its name, shows of an axis: from and to, in parts of what is seen.
const MOVES = {
  ArrowLeft: ["xaxis", -0.2, 0.8],
  ArrowRight: ["xaxis", 0.2, 1.2],
  ArrowDown: ["yaxis", -0.2, 0.8],
  ArrowUp: ["yaxis", 0.2, 1.2],
  "+": ["xaxis", 0.25, 0.75],
  "=": ["xaxis", 0.25, 0.75],
  "-": ["xaxis", -0.5, 1.5],
};

/** Do what a key of a chart stands for; whether it stands for something. */
function act(figure, key) {
  const view = viewOf(figure.dataset.chart);
  const [axis, from, to] = MOVES[key] ?? [];
  // Up and down scroll the page, unless the picture is zoomed into.
  if ((key !== "0" && !axis) || (axis === "yaxis" && !view.ranges.yaxis)) return false;
  if (key === "0") view.ranges = {};
  if (!ensure(figure)) return true;
  const plot = figure.querySelector(".plot");
  if (!axis) draw(figure);
  else if (!plot.layout[axis].fixedrange) {
    // `layout` does not say what is seen where nothing has changed in a drawing.
    const [a, b] = plot._fullLayout[axis].range;
    Plotly.relayout(plot, { [`${axis}.range`]: [a + (b - a) * from, a + (b - a) * to] });
  }
  return true;
}

document.addEventListener("keydown", (event) => {
  if (!event.target.matches?.("figure.chart") || !isReady()) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (act(event.target, event.key)) event.preventDefault();
});

document.addEventListener("click", (event) => {
  const press = event.target.closest(".chart .tools button");
  if (!press) return;
  const figure = press.closest(".chart");
  const view = viewOf(figure.dataset.chart);
  const { key, choice } = press.dataset;
  if (key) {
    act(figure, key);
    return;
  }
  view[choice] = !view[choice];
  press.setAttribute("aria-pressed", String(view[choice]));
  // Other places, or other values, are seen in whole at first.
  if (choice === "isTimed") view.ranges = {};
  else delete view.ranges.yaxis;
  draw(figure);
});

document.addEventListener("input", (event) => {
  if (!event.target.matches(".chart .tools input")) return;
  const figure = event.target.closest(".chart");
  const view = viewOf(figure.dataset.chart);
  view.span = 2 ** Number(event.target.value);
  const text = view.span < 2 ? "none" : `about ${view.span} executions`;
  event.target.setAttribute("aria-valuetext", text);
  draw(figure);
});
