// How the clients differ at the end: the spread of a metric, the worst ten, and what data they had.
import { RUN_COLOURS, css, sequential } from "./colours.js";
import { coloured } from "./learning.js";
import { chooser, count, make, number, percent, shape, table, tickText, ticks } from "./words.js";

const PLAIN = new Set(["client", "steps", "samples"]);
const [SPREAD_WIDE, SPREAD_TALL] = [480, 250];

export class ClientsView {
  constructor(root, store, source) {
    Object.assign(this, { store, source, measure: null });
    this.root = root.appendChild(make("div", { class: "clients" }));
    this.stop = store.on(["shown", "runs", "theme"], () => this.load());
    this.load();
  }

  close() {
    this.stop();
  }

  async load() {
    const { store, source } = this;
    const runs = store.shown.map((place) => store.runs[place]);
    const answers = await Promise.all(runs.map((run) => source.get(run, "metrics").catch(() => ({ clients: {} }))));
    this.runs = runs.map((run, place) => ({ run, clients: answers[place].clients })).filter(({ clients }) => clients.client?.length);
    const measures = [...new Set(this.runs.flatMap(({ clients }) => Object.keys(clients)))].filter((name) => !PLAIN.has(name));
    if (!this.runs.length || !measures.length) {
      this.root.replaceChildren(make("p", { class: "empty" }, "Clients are judged one by one when a run ends; none of these has ended yet."));
      return;
    }
    if (!measures.includes(this.measure)) this.measure = measures.includes("accuracy") ? "accuracy" : measures[0];
    this.draw(measures);
  }

  draw(measures) {
    const text = this.measure === "accuracy" ? percent : number;
    const head = make("div", { class: "tools" }, chooser("metric", measures.map((name) => [name, name.replaceAll("_", " ")]), this.measure,
      (name) => { this.measure = name; this.draw(measures); }));
    const spread = this.spread();
    const worst = this.runs.map(({ run, clients }) => this.worst(run, clients, text));
    this.root.replaceChildren(head, spread, ...worst);
  }

  /** Every client as a dot, lowest first: the whole distribution, with its quartiles. */
  spread() {
    const known = this.runs.map(({ run, clients }) => ({ run, values: (clients[this.measure] ?? []).filter((value) => value != null).sort((a, b) => a - b) }))
      .filter(({ values }) => values.length);
    const all = known.flatMap(({ values }) => values);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    if (this.measure === "accuracy") [low, high] = [Math.min(low, 0.5), 1];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const right = (share) => 56 + share * (SPREAD_WIDE - 76);
    const up = (value) => SPREAD_TALL - 34 - ((value - low) / (high - low)) * (SPREAD_TALL - 50);
    const drawing = shape("svg", { viewBox: `0 0 ${SPREAD_WIDE} ${SPREAD_TALL}`, role: "img", "aria-label": known.map(({ run, values }) =>
      `${run.name}: ${values.length} clients, lowest ${number(values[0])}, median ${number(quantile(values, 0.5))}, highest ${number(values.at(-1))}`).join("; ") });
    const levels = ticks(low, high, 5);
    for (const level of levels) {
      drawing.append(shape("line", { x1: 56, x2: SPREAD_WIDE - 20, y1: up(level), y2: up(level), class: "grid" }),
        shape("text", { x: 48, y: up(level) + 4, class: "tick", "text-anchor": "end" }, tickText(level, levels[1] - levels[0] || 1)));
    }
    for (const share of [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]) {
      drawing.append(shape("line", { x1: right(share), x2: right(share), y1: 12, y2: SPREAD_TALL - 34, class: "grid" }),
        shape("text", { x: right(share), y: SPREAD_TALL - 16, class: "tick", "text-anchor": "middle" }, `${share * 100}%`));
    }
    for (const { run, values } of known) {
      const colour = RUN_COLOURS[run.number % RUN_COLOURS.length];
      const place = (row) => right(values.length > 1 ? row / (values.length - 1) : 0.5);
      drawing.append(shape("path", { class: "curve", stroke: colour, d: values.map((value, row) => `${row ? "L" : "M"}${place(row).toFixed(1)} ${up(value).toFixed(1)}`).join("") }));
      if (values.length <= 400) values.forEach((value, row) => drawing.append(shape("circle", { cx: place(row), cy: up(value), r: values.length <= 60 ? 3.2 : 1.8, fill: colour })));
    }
    const rows = known.map(({ run, values }) => [coloured(run, run.name), count(values.length),
      ...[0, 0.1, 0.5, 0.9, 1].map((share) => number(quantile(values, share))), number(values.reduce((sum, value) => sum + value, 0) / values.length)]);
    return make("section", { class: "spread" }, make("h3", {}, `${this.measure.replaceAll("_", " ")} of the clients, lowest first`), drawing,
      table(["run", "clients", "lowest", "10%", "median", "90%", "highest", "mean"], rows, { right: [1, 2, 3, 4, 5, 6, 7] }));
  }

  worst(run, clients, text) {
    const up = !/loss|error|distance/.test(this.measure);
    const order = [...clients.client.keys()].filter((row) => clients[this.measure]?.[row] != null)
      .sort((one, other) => (up ? 1 : -1) * (clients[this.measure][one] - clients[this.measure][other]) || one - other).slice(0, 10);
    const slot = make("div", { class: "counts" });
    const rows = order.map((row) => [this.store.name(run, clients.client[row]), text(clients[this.measure][row]), count(clients.samples?.[row]), count(clients.steps?.[row])]);
    const worst = table(["client", this.measure.replaceAll("_", " "), "test samples", "steps"], rows, { right: [1, 2, 3], caption: `The worst ten of ${run.name}`,
      pick: (place) => this.store.set({ selection: { kind: "node", run: run.number, node: clients.client[order[place]] } }) });
    this.source.get(run, "classes").then(({ counts, facts }) => {
      if (facts.classes) slot.replaceChildren(classCounts(this.store, run, counts, facts.classes, order.map((row) => clients.client[row])));
    }).catch(() => {});
    return make("section", { class: "worst", "data-run": run.number }, worst, slot);
  }
}

/** Training samples by client and class, as a picture; a screen reader hears the rows. */
export function classCounts(store, run, counts, classes, clients) {
  const most = clients.reduce((high, client) => { for (let one = 0; one < classes; one += 1) high = Math.max(high, counts[client * classes + one]); return high; }, 1);
  const [side, left] = [Math.max(8, Math.min(22, 420 / classes)), 58];
  const drawing = shape("svg", { viewBox: `0 0 ${left + classes * side + 6} ${clients.length * 20 + 24}`, role: "img", "aria-label": clients.map((client) =>
    `${store.name(run, client)}: ${Array.from({ length: classes }, (_, one) => counts[client * classes + one]).join(" ")}`).join("; ") });
  drawing.style.maxWidth = `${left + classes * side + 6}px`;
  for (let one = 0; one < classes; one += Math.ceil(classes / 20)) {
    drawing.append(shape("text", { x: left + (one + 0.5) * side, y: 12, class: "tick", "text-anchor": "middle" }, String(one)));
  }
  clients.forEach((client, row) => {
    drawing.append(shape("text", { x: left - 6, y: 33 + row * 20, class: "tick", "text-anchor": "end" }, store.name(run, client).slice(0, 8)));
    for (let one = 0; one < classes; one += 1) {
      const value = counts[client * classes + one];
      const cell = shape("rect", { x: left + one * side, y: 20 + row * 20, width: side - 1, height: 18, rx: 2, class: value ? "" : "none", fill: css(sequential(0.1 + 0.9 * Math.sqrt(value / most))) });
      cell.append(shape("title", {}, `class ${one}: ${value} samples`));
      drawing.append(cell);
    }
  });
  return make("figure", {}, make("figcaption", {}, "training samples of each class"), drawing);
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1);
  const low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}
