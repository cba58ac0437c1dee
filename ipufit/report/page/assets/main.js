// What happens when the page opens.

function addPageTools() {
  const press = button("theme", "Light or dark", "", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    told();
    drawAll(false);
  });
  const told = () => {
    press.textContent = isDark() ? "light" : "dark";
    press.setAttribute("aria-label", `Change to the ${press.textContent} look`);
  };
  told();
  dark.addEventListener("change", () => {
    told();
    drawAll(false);
  });
  byId("page-tools").append(press, button("print", "Print this report", "print", () => print()));
}

async function open() {
  addPageTools();
  enhanceTables(document);
  figures().forEach(addTools);
  try {
    await unpack();
    followWidth();
    followPrinting();
    await drawInTurn();
    performance.mark("drawn");
    document.body.dataset.drawn = String(Math.round(performance.now()));
  } catch (error) {
    complain(error.message);
    for (const figure of figures()) figure.classList.add("undrawn");
  }
  if (document.body.hasAttribute("data-live")) follow();
}

open();
