// Charts: what they show comes as plain values, plotly.js draws it.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon"];
const PATTERNS = ["", "/", ".", "x", "\\", "-", "+", "|"];
const MARKED = 40; // points from which on markers would hide the line
const PAPER_WIDTH = 660; // pixels of a printed page
const views = new Map(); // by chart: what its reader has chosen

/** Text that plotly would take for markup. */
const text = (value) =>
  String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

const shorten = (value, most) => (value.length > most ? `${value.slice(0, most - 1)}…` : value);

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

/** A mean that forgets: of the last `span` values, about. */
function smoothed(values, span) {
  const keep = 1 - 1 / span;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

/** The first place whose value is not below another one; values grow. */
function firstFrom(values, least) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Places of a long line that are drawn: of every stretch the smallest and the largest value, and a
 * gap. Stretches of what is zoomed into are shorter, down to single points.
 */
function thinned(x, y, range) {
  const count = y.length;
  const [begin, end] = range ? [...range].sort((a, b) => a - b) : [Infinity, Infinity];
  // A point more on either side: lines go on beyond the edges.
  const from = Math.max(0, firstFrom(x, begin) - 1);
  const to = Math.min(count, firstFrom(x, end) + 2);
  const stretches = [[0, from, count], [from, to, to - from], [to, count, count]];
  const kept = new Set([0]);
  for (const [first, last, whole] of stretches) {
    const length = Math.max(1, Math.ceil((2 * whole) / facts.points));
    for (let start = first; start < last; start += length) {
      let [low, high, gap] = [-1, -1, -1];
      for (let i = start; i < Math.min(start + length, last); i += 1) {
        if (y[i] === null) gap = i;
        else {
          if (low < 0 || y[i] < y[low]) low = i;
          if (high < 0 || y[i] > y[high]) high = i;
        }
      }
      for (const i of [low, high, gap].sort((a, b) => a - b)) if (i >= 0) kept.add(i);
    }
  }
  return [...kept.add(count - 1)];
}

const isLong = (series) => series.style !== "bar" && series.style !== "task"
  && series.style !== "area" && series.y.length > facts.points;

/** A trace with the points that are drawn. */
function shortened(trace, range) {
  const places = thinned(trace.x, trace.y, range);
  return { ...trace, x: places.map((i) => trace.x[i]), y: places.map((i) => trace.y[i]) };
}

function line(series, view, look, name, colour) {
  const x = series.x[Math.min(view.way, series.x.length - 1)];
  const marked = series.y.length <= MARKED && series.style !== "step";
  const dash = series.style === "dashed" ? "dash" : DASHES[look >= 8 ? 1 : 0];
  return {
    type: "scatter",
    mode: marked ? "lines+markers" : "lines",
    name,
    x,
    y: series.y,
    line: {
      color: colour,
      width: 2,
      dash: series.style === "step" ? DASHES[look % DASHES.length] : dash,
      shape: series.style === "step" ? "hv" : "linear",
    },
    marker: { symbol: SYMBOLS[look % SYMBOLS.length], size: 6, color: colour },
    hovertemplate: `%{x}: %{y:.5g}<extra>${name}</extra>`,
  };
}

function pattern(look, colour, tone) {
  return {
    // Those that share a colour differ in their pattern.
    shape: PATTERNS[(look + 3 * Math.floor(look / 8)) % PATTERNS.length],
    size: 7,
    solidity: 0.16,
    bgcolor: colour,
    fgcolor: tone.paper,
  };
}

/** An edge apart from the next task, where there is room for one. */
function edges(lengths) {
  const whole = lengths.reduce((sum, length) => sum + length, 0);
  return lengths.map((length) => (length > whole / 500 ? 1 : 0));
}

function bars(chart, series, view, look, name, colour, tone) {
  const places = series.x[Math.min(view.way, series.x.length - 1)];
  const isTask = series.style === "task";
  const labels = series.y.map((value) => (typeof value === "string" ? text(value) : value));
  const trace = {
    type: "bar",
    name,
    orientation: chart.is_across ? "h" : "v",
    x: chart.is_across ? places : places.map(text),
    y: labels,
    customdata: labels,
    marker: {
      color: colour,
      line: { color: tone.paper, width: isTask ? edges(places) : 0 },
      pattern: pattern(look, colour, tone),
    },
    hovertemplate: chart.is_across
      ? `%{customdata}<br>%{x:.5g} ${text(chart.x[0])}<extra>${name}</extra>`
      : `%{x}<br>%{y:.5g} ${text(chart.y)}<extra>${name}</extra>`,
  };
  if (series.base) trace.base = series.base;
  if (series.label) {
    Object.assign(trace, {
      text: series.label.map(text),
      textposition: "inside",
      insidetextanchor: "middle",
      textangle: 0,
      constraintext: "inside",
      textfont: { color: tone.paper, size: 11 },
      marker: { ...trace.marker, pattern: { ...trace.marker.pattern, solidity: 0.12 } },
    });
  }
  if (series.hover) {
    trace.hovertext = series.hover.map(text);
    trace.hovertemplate = "%{hovertext}: %{x:.4g}, from %{base:.4g}<extra></extra>";
  }
  return trace;
}

function area(series, look, name, colour, tone) {
  const trace = {
    type: "scatter",
    mode: "lines",
    stackgroup: "all",
    name,
    x: series.x[0],
    y: series.y,
    line: { color: colour, width: 1, shape: "hv" },
    fillcolor: colour,
    fillpattern: pattern(look, colour, tone),
    hovertemplate: `%{y:.5g}<extra>${name}</extra>`,
  };
  if (series.hover) {
    trace.text = series.hover.map(text);
    trace.hovertemplate = `%{y:.5g} after %{text}<extra>${name}</extra>`;
  }
  return trace;
}

function traces(chart, view, tone) {
  return chart.series.flatMap((series) => {
    const name = text(series.name);
    const colour = tone.series[series.look % tone.series.length];
    if (series.style === "bar" || series.style === "task") {
      return [bars(chart, series, view, series.look, name, colour, tone)];
    }
    if (series.style === "area") return [area(series, series.look, name, colour, tone)];
    const drawn = (trace) => (isLong(series) ? shortened(trace, view.ranges.xaxis) : trace);
    const raw = line(series, view, series.look, name, colour);
    if (!chart.smooths || view.span < 2) return [drawn(raw)];
    // Of all values, not of those that are drawn.
    const mean = { ...raw, y: smoothed(series.y, view.span), mode: "lines" };
    mean.line = { ...raw.line, dash: DASHES[series.look % DASHES.length] };
    raw.line = { ...raw.line, width: 1 };
    return [drawn({ ...raw, mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip",
                    hovertemplate: null }), drawn(mean)];
  });
}

function axis(title, tone) {
  return {
    title: { text: text(title), standoff: 8 },
    gridcolor: tone.line,
    linecolor: tone.line,
    zerolinecolor: tone.line,
    tickcolor: tone.line,
    automargin: true,
    exponentformat: "power",
    minexponent: 6,
    separatethousands: true,
  };
}

/** Stages and operators by name, from above. */
function namedAxis(chart, tone, width) {
  const titles = chart.names.length ? chart.names : chart.series[0].y;
  const isTimeline = chart.series.some((series) => series.style === "task");
  const most = width < 500 ? 16 : 44;
  return {
    ...axis("", tone),
    type: isTimeline ? "linear" : "category",
    autorange: isTimeline ? false : "reversed",
    range: isTimeline ? [titles.length - 0.5, -0.5] : undefined,
    tickmode: "array",
    tickvals: isTimeline ? titles.map((_, i) => i) : titles.map(text),
    ticktext: titles.map((title) => text(shorten(title, most))),
    categoryorder: "array",
    categoryarray: titles.map(text),
    fixedrange: true,
    showgrid: false,
  };
}

/** The value that lines never leave, if there is one. */
function onlyValue(chart) {
  if (chart.is_across || chart.stacks) return null;
  let only = null;
  for (const series of chart.series) {
    for (const value of series.y) {
      if (value === null) continue;
      if (only !== null && value !== only) return null;
      only = value;
    }
  }
  return only;
}

/** Epochs and updates have no halves. */
function wholeTicks(chart, view) {
  if (!/^(epoch|update)$/.test(chart.x[view.way])) return {};
  const places = chart.series.flatMap((series) => series.x[view.way]).filter(Number.isFinite);
  const reach = places.reduce((a, b) => Math.max(a, b), -Infinity)
    - places.reduce((a, b) => Math.min(a, b), Infinity);
  return reach <= 12 ? { dtick: 1 } : {};
}

function layout(chart, view, tone, width) {
  const title = chart.x[Math.min(view.way, chart.x.length - 1)];
  const found = {
    width,
    height: chart.height,
    autosize: false,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: tone.ink },
    margin: { l: 48, r: 12, t: 8, b: 36 },
    // On a phone there is room for what it is, but not for in what.
    xaxis: { ...axis(width < 500 ? title.split(",")[0] : title, tone),
             ...wholeTicks(chart, view) },
    yaxis: chart.is_across ? namedAxis(chart, tone, width) : axis(chart.y, tone),
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    showlegend: chart.series.length > 1,
    barmode: chart.stacks ? "stack" : "overlay",
    bargap: 0.25,
    uniformtext: { mode: "hide", minsize: 8 },
    hoverlabel: { bgcolor: tone.paper, font: { color: tone.ink }, bordercolor: tone.line,
                  align: "left" },
    // A finger that scrolls the page must not be caught by a picture.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    shapes: [],
    annotations: [],
  };
  const isBar = chart.series.some((series) => series.style === "bar");
  if (isBar && !chart.is_across) Object.assign(found.xaxis, { type: "category", nticks: 12 });
  if (chart.stacks && !chart.is_across) found.yaxis.rangemode = "tozero";
  const only = onlyValue(chart);
  // Around a single value plotly would show a wide axis with nothing to read off.
  if (only) Object.assign(found.yaxis, { range: [0, 2 * only].sort((a, b) => a - b) });
  if (view.log && !chart.is_across) {
    Object.assign(found.yaxis, { type: "log", range: undefined });
  }
  if (chart.most !== null) {
    found.shapes.push({ type: "line", x0: chart.most, x1: chart.most, y0: 0, y1: 1, yref: "paper",
                        line: { color: tone.alarm, width: 2, dash: "dash" } });
  }
  for (const [name, range] of Object.entries(view.ranges)) {
    Object.assign(found[name], { range: range.slice(), autorange: false });
  }
  return found;
}

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset",
                 scrollZoom: false, showTips: false };

function viewOf(name) {
  if (!views.has(name)) {
    const count = Math.max(...facts.charts[name].series.map((series) => series.y.length), 0);
    // A tenth of the curve hides what it does; a hundredth shows it.
    const span = facts.charts[name].smooths && count > 200 ? Math.round(count / 100) : 1;
    views.set(name, { way: 0, span, log: false, ranges: {} });
  }
  return views.get(name);
}

/** Draw a chart, or draw it anew after any change. */
function draw(figure, forPaper = false) {
  const name = figure.dataset.chart;
  const chart = facts.charts[name];
  if (!chart || !isReady()) return;
  const plot = figure.querySelector(".plot");
  const view = viewOf(name);
  const tone = colours();
  const width = forPaper ? Math.min(PAPER_WIDTH, plot.clientWidth || PAPER_WIDTH)
                         : plot.clientWidth;
  const isFirst = !plot.layout;
  Plotly.react(plot, traces(chart, view, tone), layout(chart, view, tone, width), CONFIG);
  if (isFirst) {
    plot.style.minHeight = "";
    plot.on("plotly_relayout", () => {
      remember(plot, view);
      // Another part has other points.
      if (facts.charts[name].series.some(isLong)) draw(figure);
    });
  }
  if (!forPaper) done.add(name);
}

/** Where the reader has zoomed to, so that it lasts. */
function remember(plot, view) {
  view.ranges = {};
  for (const name of ["xaxis", "yaxis"]) {
    const { autorange, range, fixedrange } = plot.layout[name];
    if (autorange === false && range && !fixedrange) view.ranges[name] = range.slice();
  }
}

/** What is seen of an axis; `layout` does not say it where nothing has changed in a drawing. */
const rangeOf = (plot, name) => plot._fullLayout[name].range;

function zoom(figure, factor) {
  if (!ensure(figure)) return;
  const plot = figure.querySelector(".plot");
  const [a, b] = rangeOf(plot, "xaxis");
  const middle = (a + b) / 2;
  const half = ((b - a) / 2) * factor;
  Plotly.relayout(plot, { "xaxis.range": [middle - half, middle + half] });
}

function pan(figure, name, part) {
  if (!ensure(figure)) return;
  const plot = figure.querySelector(".plot");
  if (plot.layout[name].fixedrange) return;
  const [a, b] = rangeOf(plot, name);
  const step = (b - a) * part;
  Plotly.relayout(plot, { [`${name}.range`]: [a + step, b + step] });
}

function reset(figure) {
  viewOf(figure.dataset.chart).ranges = {};
  draw(figure);
}

/** The buttons of a chart, once. */
function addTools(figure) {
  const tools = figure.querySelector(".tools");
  const name = figure.dataset.chart;
  const chart = facts.charts[name];
  if (tools.children.length || !chart) return;
  const view = viewOf(name);
  const id = (part) => `${figure.id}-${part}`;
  const title = figure.querySelector("h3").textContent;
  if (chart.smooths) {
    const input = make("input", { type: "range", id: id("span"), min: 0, max: 10, step: 1,
                                  "aria-label": `${title}: smoothing` });
    const told = () => {
      input.setAttribute("aria-valuetext",
                         view.span < 2 ? "none" : `about ${view.span} executions`);
    };
    input.value = String(Math.round(Math.log2(view.span)));
    told();
    input.addEventListener("input", () => {
      view.span = 2 ** Number(input.value);
      told();
      draw(figure);
    });
    tools.append(make("label", { for: id("span") }, "Smooth "), input);
  }
  if (chart.ways.length > 1) {
    const press = button(id("way"), `${title}: over ${chart.ways[1]}`, `over ${chart.ways[1]}`,
      () => {
        view.way = 1 - view.way;
        view.ranges = {};
        press.setAttribute("aria-pressed", String(view.way === 1));
        draw(figure);
      });
    press.setAttribute("aria-pressed", "false");
    tools.append(press);
  }
  if (chart.log) {
    const press = button(id("log"), `${title}: logarithmic axis`, "log", () => {
      view.log = !view.log;
      delete view.ranges.yaxis;
      press.setAttribute("aria-pressed", String(view.log));
      draw(figure);
    });
    press.setAttribute("aria-pressed", "false");
    tools.append(press);
  }
  tools.append(
    button(id("in"), `${title}: zoom in`, "+", () => zoom(figure, 0.5)),
    button(id("out"), `${title}: zoom out`, "−", () => zoom(figure, 2)),
    button(id("reset"), `${title}: show all`, "reset", () => reset(figure)),
  );
  follower.observe(figure);
}

document.addEventListener("keydown", (event) => {
  const figure = event.target;
  if (!(figure instanceof HTMLElement) || !figure.matches("figure.chart")) return;
  if (event.ctrlKey || event.metaKey || event.altKey || !isReady()) return;
  const view = viewOf(figure.dataset.chart);
  const acts = {
    ArrowLeft: () => pan(figure, "xaxis", -0.2),
    ArrowRight: () => pan(figure, "xaxis", 0.2),
    "+": () => zoom(figure, 0.5),
    "=": () => zoom(figure, 0.5),
    "-": () => zoom(figure, 2),
    0: () => reset(figure),
  };
  // Up and down scroll the page, unless the picture is zoomed into.
  if (view.ranges.yaxis) {
    acts.ArrowUp = () => pan(figure, "yaxis", 0.2);
    acts.ArrowDown = () => pan(figure, "yaxis", -0.2);
  }
  const act = acts[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
