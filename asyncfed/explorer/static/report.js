// A report: the same views on what stands in the page, below one another.
import { Details } from "./details.js";
import { EmbeddedSource } from "./source.js";
import { SpaceTimePanel } from "./spacetime.js";
import { Store } from "./store.js";
import { openView } from "./views.js";
import { coloured } from "./learning.js";
import { make, number } from "./words.js";

const embedded = JSON.parse(document.getElementById("data").textContent);
const embeddedSource = new EmbeddedSource(embedded);
const everyRun = embedded.runs.map((run, place) => ({ ...run.state, number: place, names: run.answers.about?.names ?? null }));
const drawn = everyRun.filter((run) => "edges" in embedded.runs[run.number].answers).map((run) => run.number);

/** What is selected anywhere is told at the side. */
const told = new Store({ runs: everyRun, shown: drawn.length ? drawn : [0] });

function section(id, shown, values = {}) {
  const root = document.getElementById(id);
  if (!root) return null;
  const store = new Store({ runs: everyRun, shown, ...values });
  store.on(["selection"], () => told.set({ selection: store.selection }));
  told.on(["selection", "theme"], () => store.set({ selection: told.selection, theme: told.theme }));
  return { root, store };
}

for (const [id, shown] of [["learning", everyRun.map((run) => run.number)], ["network", drawn], ["matrix", drawn], ["clients", everyRun.map((run) => run.number)]]) {
  const place = section(id, shown);
  if (place) openView(id, place.root, place.store, embeddedSource);
}

const overview = section("spacetime", drawn);
if (overview) {
  const grid = overview.root.appendChild(make("div", { class: "panels" }));
  for (const number_ of drawn) {
    const run = everyRun[number_];
    const detail = embedded.runs[number_].detail;
    const add = (words, store) => {
      const box = grid.appendChild(make("section", { class: "panel", "aria-label": words }, make("h3", {}, coloured(run, words))));
      new SpaceTimePanel(box, store, embeddedSource, run);
    };
    add(`${run.name}: the whole run`, section("spacetime", [number_]).store);
    if (detail) add(`${run.name}: every message from ${number(detail[0], 5)} to ${number(detail[1], 5)}`, section("spacetime", [number_], { window: detail }).store);
  }
}

new Details(document.getElementById("details"), told, embeddedSource);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => told.set({ theme: {} }));
document.documentElement.dataset.ready = "yes";
