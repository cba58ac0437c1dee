"use strict";

// Charts: their figures come as plotly.py has made them; what their reader chooses is added here.

const byId = (id) => document.getElementById(id);
const all = (selector, part = document) => Array.from(part.querySelectorAll(selector));
const facts = JSON.parse(byId("data").textContent);
const figures = () => all("figure.chart");
const isReady = () => typeof Plotly !== "undefined";
const look = getComputedStyle(document.documentElement); // always as it is now
const drawn = new WeakMap(); // by figure, the state that its picture shows

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

const isLong = ({ type, stackgroup, y }) =>
  type === "scatter" && !stackgroup && y.length > facts.points;

/** Places of a long line to draw: the extremes and gaps of each stretch; short ones in a range. */
function thinned(x, y, range) {
  const [begin, end] = range ? [...range].sort((a, b) => a - b) : [-Infinity, Infinity];
  // A point more on either side: lines go on beyond the edges.
  const isSeen = x.map((_, i) => !(x[i + 1] < begin) && !(x[i - 1] > end));
  const [inner, outer] = [isSeen.filter(Boolean), x].map(({ length }) =>
    Math.max(1, Math.ceil((2 * length) / facts.points)));
  const stretches = {};
  y.forEach((value, i) => {
    const number = isSeen[i] ? Math.floor(i / inner) : -1 - Math.floor(i / outer);
    const places = (stretches[number] ??= {});
    if (value === null) places.gap ??= i;
    else {
      if (!(y[places.least] <= value)) places.least = i;
      if (!(y[places.most] >= value)) places.most = i;
    }
  });
  const kept = Object.values(stretches).flatMap((places) => Object.values(places));
  return [...new Set([0, y.length - 1, ...kept])].sort((a, b) => a - b);
}

/** The traces of a chart: over which places, how smooth, and with as many points as can be seen. */
function traces({ data }, { choices, span }, range) {
  const bounded = (trace) => {
    if (!isLong(trace)) return trace;
    const places = thinned(trace.x, trace.y, range);
    return { ...trace, x: places.map((i) => trace.x[i]), y: places.map((i) => trace.y[i]) };
  };
  return data.flatMap(({ meta, ...trace }) => {
    const whole = { ...trace, x: (choices.includes("time") && meta?.time) || trace.x };
    if (!(span >= 2)) return bounded(whole);
    // Of all values, not of those that are drawn.
    const mean = { ...whole, mode: "lines", y: smoothed(trace.y, span) };
    mean.line = { ...trace.line, dash: meta.dash };
    const behind = { mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip" };
    const line = { ...trace.line, width: 1 };
    return [bounded({ ...whole, ...behind, line, hovertemplate: null }), bounded(mean)];
  });
}

/** What of an axis its reader has zoomed into. */
function zoomed({ layout }, axis) {
  const { autorange, range, fixedrange } = layout?.[axis] ?? {};
  return autorange === false && range && !fixedrange ? { autorange, range } : undefined;
}

/** The layout of a chart, over which the changes lie that room and choices make. */
function layout({ layout: { meta, ...shown } }, { choices, width, span }, plot) {
  const changes = [width < 500 && "narrow", ...choices].map((name) => meta[name]);
  for (const axis of ["xaxis", "yaxis"]) {
    const ofAxis = [...changes.map((change) => change?.[axis]), zoomed(plot, axis)];
    shown[axis] = Object.assign({}, shown[axis], ...ofAxis);
  }
  // A finger that scrolls the page must not be caught by a picture.
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  // Lines that the reader hides stay hidden; with means there are twice as many.
  const legend = { uirevision: span >= 2 };
  return { ...shown, legend, width, dragmode, template: facts.look };
}

/** What a picture depends on besides its figure and its zoom; every look has an ink of its own. */
function stateOf(figure) {
  const { clientWidth } = figure.querySelector(".plot");
  const span = Number(figure.querySelector("[type='range']")?.dataset.span);
  const choices = all(".tools :checked", figure).map(({ value }) => value);
  return { width: clientWidth, ink: look.getPropertyValue("--ink"), span, choices };
}

/** Whether a chart has no picture, or one of another state. */
const isDue = (figure) =>
  !figure.matches(".undrawn") && drawn.get(figure) !== JSON.stringify(stateOf(figure));

/** Draw a chart as it is to be now. */
function draw(figure) {
  const chart = facts.charts[figure.dataset.chart];
  const plot = figure.querySelector(".plot");
  const state = stateOf(figure);
  drawn.set(figure, JSON.stringify(state));
  const parts = {
    data: traces(chart, state, zoomed(plot, "xaxis")?.range),
    layout: layout(chart, state, plot),
  };
  const coloured = (key, value) => (key.endsWith("color")
    ? value.replace(/^var\((.+)\)$/, (_, colour) => look.getPropertyValue(colour)) : value);
  const shown = JSON.parse(JSON.stringify(parts), coloured);
  const isFirst = !plot.layout;
  Plotly.react(plot, shown.data, shown.layout, facts.config);
  if (isFirst) {
    // Another part of a long line has other points.
    plot.on("plotly_relayout", () => facts.charts[figure.dataset.chart].data.some(isLong)
      && draw(figure));
  }
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
  const plot = figure.querySelector(".plot");
  const [axis, from, to] = MOVES[key] ?? [];
  // Up and down scroll the page, unless the picture is zoomed into.
  if ((key !== "0" && !axis) || (axis === "yaxis" && !zoomed(plot, axis))) return false;
  if (!ensure(figure)) return true;
  if (!axis) {
    plot.layout = {};
    draw(figure);
  } else if (!plot.layout[axis].fixedrange) {
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

document.addEventListener("input", ({ target }) => {
  const figure = target.closest("figure.chart");
  if (!figure) return;
  if (target.type === "range") {
    const span = 2 ** target.value;
    target.dataset.span = span;
    target.setAttribute("aria-valuetext", span < 2 ? "none" : `about ${span} executions`);
  } else {
    // Other places, or other values, are seen in whole at first.
    const { layout } = figure.querySelector(".plot");
    if (target.value === "time") delete layout?.xaxis;
    delete layout?.yaxis;
  }
  ensure(figure);
});
