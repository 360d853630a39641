// The five views, each for the runs that are shown: side by side, or overlaid.
import { ClientsView } from "./clients.js";
import { AXES, LearningView, coloured } from "./learning.js";
import { MatrixPanel, SORTS } from "./matrix.js";
import { LAYOUTS, NetworkPanel } from "./network.js";
import { QUANTITIES, quantitiesOf } from "./quantities.js";
import { SpaceTimePanel } from "./spacetime.js";
import { chooser, make } from "./words.js";

export const VIEWS = { network: "Network", spacetime: "Space-time", matrix: "Matrix", learning: "Learning", clients: "Clients" };

/** A view in an element; `close` ends it. */
export function openView(view, root, store, source) {
  const tools = root.appendChild(make("div", { class: "tools" }));
  const parts = [];
  const opened = { close: () => { parts.splice(0).forEach((part) => part.close()); root.replaceChildren(); }, parts };
  if (view === "learning") {
    tools.append(chooser("against", Object.entries(AXES), store.axis, (axis) => store.set({ axis })));
    parts.push(new LearningView(root, store, source));
    return opened;
  }
  if (view === "clients") {
    tools.remove();
    parts.push(new ClientsView(root, store, source));
    return opened;
  }
  const grid = root.appendChild(make("div", { class: "panels" }));
  const panel = (Kind, run, words, ...more) => {
    const box = grid.appendChild(make("section", { class: "panel", "aria-label": words }));
    if (store.shown.length > 1) box.append(make("h2", {}, coloured(run, words)));
    parts.push(new Kind(box, store, source, run, ...more));
  };
  const runs = store.shown.map((place) => store.runs[place]);
  const Kind = { network: NetworkPanel, spacetime: SpaceTimePanel, matrix: MatrixPanel }[view];
  for (const run of runs) panel(Kind, run, run.name);
  if (view === "matrix" && runs.length > 1) {
    for (const run of runs.slice(1)) {
      if (run.nodes === runs[0].nodes) panel(MatrixPanel, run, `${run.name} − ${runs[0].name}`, runs[0]);
    }
  }
  grid.dataset.count = String(parts.length);
  const fill = () => fillTools(view, tools, store, source, runs.map((run) => run.number));
  parts.push({ close: store.on(["runs"], fill) });
  fill();
  return opened;
}

/** The choices of a view; made anew where others have become possible, for a run is taken up bit by bit. */
async function fillTools(view, tools, store, source, places) {
  if (view === "spacetime") {
    tools.replaceChildren(make("span", { class: "faint" }, "Wheel or pinch: zoom time. Shift and wheel, or on the names: zoom lanes. Drag: move. Click: cursor, or an arrow."));
    return;
  }
  const runs = places.map((place) => store.runs[place]);
  const tables = await Promise.all(runs.map((run) => source.get(run, "edges", store.asked).catch(() => ({ facts: {}, sender: [] }))));
  const known = quantitiesOf(tables);
  if (!known.some(([name]) => name === store.quantity)) known.push([store.quantity, QUANTITIES[store.quantity].words]);
  const graph = await source.get(runs[0], "graph").catch(() => ({}));
  const layouts = Object.entries(LAYOUTS).filter(([name]) => (name !== "own" || graph.x) && (name !== "server" || runs[0].server != null));
  const possible = JSON.stringify([known, layouts]);
  if (tools.dataset.possible === possible) return;
  tools.dataset.possible = possible;
  tools.replaceChildren(chooser("show", known, store.quantity, (quantity) => store.set({ quantity })));
  if (view === "matrix") tools.append(chooser("sort by", Object.entries(SORTS), store.sort, (sort) => store.set({ sort })));
  if (view === "network") {
    tools.append(chooser("layout", [["", "automatic"], ...layouts], store.layout ?? "", (layout) => store.set({ layout: layout || null })));
  }
}
