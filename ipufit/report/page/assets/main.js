// What happens when the page opens.

function addPageTools(ready) {
  const press = button("theme", "Light or dark", "", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    told();
    redraw();
  });
  const told = () => {
    press.textContent = isDark() ? "light" : "dark";
    press.setAttribute("aria-label", `Change to the ${press.textContent} look`);
  };
  told();
  dark.addEventListener("change", () => {
    told();
    redraw();
  });
  // Who is quick waits for the pictures.
  const paper = button("print", "Print this report", "print", () => ready.then(() => print()));
  byId("page-tools").append(press, paper);
}

/** Bring plotly.js when the text is seen, then draw what is in sight, and then what is near. */
async function openPictures() {
  await shown();
  // An address with a place in the page is on its way there.
  const isTextAlone = !location.hash && !figures().some(isInSight);
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
  followPrinting();
  const opened = openPictures().catch((error) => {
    complain(error.message);
    for (const figure of figures()) figure.classList.add("undrawn");
  });
  addPageTools(opened);
  enhanceTables(document);
  figures().forEach(addTools);
  await opened;
  if (document.body.hasAttribute("data-live")) follow();
}

open();
