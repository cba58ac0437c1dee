"use strict";

// Everything here reads what the page brings; it asks no other place for anything.

const byId = (id) => document.getElementById(id);
const facts = JSON.parse(byId("data").textContent);

/** An element with attributes; text stays text. */
function make(name, attributes = {}, ...parts) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...parts);
  return node;
}

/** A button with a name. */
function button(id, label, text, act) {
  const node = make("button", { type: "button", id, title: label, "aria-label": label }, text);
  node.addEventListener("click", act);
  return node;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
};

/** The colours of the present look, from the style sheet. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    ink: read("--ink"),
    quiet: read("--quiet"),
    line: read("--line"),
    paper: read("--paper"),
    alarm: read("--alarm"),
    series: Array.from({ length: 8 }, (_, i) => read(`--c${i}`)),
  };
}
