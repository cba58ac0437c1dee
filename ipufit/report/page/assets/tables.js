// Tables that sort, a tree that folds, and tables of which one is shown.

const sorts = new Map(); // by table: the column and its direction

function sortValue(row, column) {
  const cell = row.cells[column];
  if (!cell) return "";
  return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const isNothing = (value) => value === "" || value === "–" || Number.isNaN(value);

/** Put the rows of a table into the order that was asked for. */
function applySort(table) {
  const wish = sorts.get(table.id);
  if (!wish) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows, (row) => [sortValue(row, wish.column), row]);
  rows.sort(([a], [b]) => {
    // What is not known stands at the end either way.
    if (isNothing(a) || isNothing(b)) return isNothing(a) - isNothing(b);
    return wish.direction === "ascending" ? compare(a, b) : compare(b, a);
  });
  body.append(...rows.map(([, row]) => row));
  Array.from(table.tHead.rows[0].cells).forEach((head, i) => {
    head.setAttribute("aria-sort", i === wish.column ? wish.direction : "none");
  });
}

document.addEventListener("click", (event) => {
  const press = event.target.closest("table.sorts thead button");
  if (!press) return;
  const head = press.closest("th");
  const table = press.closest("table");
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const direction = head.getAttribute("aria-sort") === first ? other : first;
  sorts.set(table.id, { column: head.cellIndex, direction });
  applySort(table);
});

/** Hide the layers within those that are folded. */
function applyFolds(tree) {
  let closed = Infinity;
  for (const row of tree.tBodies[0].rows) {
    const depth = Number(row.dataset.depth);
    if (depth <= closed) closed = Infinity;
    row.hidden = depth > closed;
    const fold = row.querySelector(".fold");
    if (!row.hidden && fold && fold.getAttribute("aria-expanded") === "false") closed = depth;
  }
}

document.addEventListener("click", (event) => {
  const fold = event.target.closest(".tree .fold");
  if (!fold) return;
  const open = fold.getAttribute("aria-expanded") === "true";
  fold.setAttribute("aria-expanded", String(!open));
  applyFolds(fold.closest("table"));
});

// As in other trees: left closes, right opens.
document.addEventListener("keydown", (event) => {
  const fold = event.target.closest(".tree .fold");
  if (!fold || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
  event.preventDefault();
  fold.setAttribute("aria-expanded", String(event.key === "ArrowRight"));
  applyFolds(fold.closest("table"));
});

/** Show one of several tables, and switches for the others. */
function applyChoices(group) {
  const tools = group.querySelector(":scope > .tools");
  const parts = Array.from(group.querySelectorAll(":scope > .choice"));
  const show = (chosen) => {
    parts.forEach((part, i) => {
      part.hidden = i !== chosen;
    });
    Array.from(tools.children).forEach((press, i) => {
      press.setAttribute("aria-pressed", String(i === chosen));
    });
  };
  if (!tools.children.length) {
    parts.forEach((part, i) => {
      const name = part.dataset.choice;
      tools.append(button(`${group.id}-${i}`, `Show operators ${name}`, name, () => show(i)));
    });
  }
  const pressed = Array.from(tools.children).findIndex(
    (press) => press.getAttribute("aria-pressed") === "true",
  );
  show(Math.max(0, pressed));
}

/** Make what was sent without script do what it can; again, where it has changed. */
function enhanceTables(part) {
  for (const group of part.querySelectorAll(".choices")) applyChoices(group);
  for (const tree of part.querySelectorAll("table.tree")) applyFolds(tree);
}
