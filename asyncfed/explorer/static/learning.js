// Metrics against step, virtual time, messages or bytes: all runs in one chart, with the cursor on each curve.
import { RUN_COLOURS } from "./colours.js";
import { swatch } from "./panel.js";
import { bytes, make, number, shape, table, tickText, ticks } from "./words.js";

export const AXES = { step: "step or round", virtual_time: "virtual time", bytes: "bytes sent", messages: "messages" };
const HIDDEN = new Set(["phase", "step", "virtual_time", "bytes", "messages", "delivered", "lost", "outer_step"]);
const WORDS = { loss: "test loss", train_loss: "training loss", accuracy: "accuracy", accuracy_p10: "accuracy, 10th percentile of clients",
  validation_loss: "validation loss", validation_accuracy: "validation accuracy", consensus: "consensus distance" };
const FIRST = ["accuracy", "loss", "accuracy_p10", "train_loss", "validation_accuracy", "validation_loss"];
const [WIDE, TALL, LEFT_SIDE, BOTTOM] = [420, 240, 52, 42];

export class LearningView {
  constructor(root, store, source) {
    Object.assign(this, { store, source });
    this.charts = root.appendChild(make("div", { class: "charts" }));
    this.last = root.appendChild(make("div", { class: "last" }));
    this.stop = store.on(["shown", "axis", "runs", "theme"], () => this.load());
    this.stopMarking = store.on(["cursor"], () => this.mark());
    this.load();
  }

  close() {
    this.stop();
    this.stopMarking();
  }

  async load() {
    const { store, source } = this;
    const runs = store.shown.map((place) => store.runs[place]);
    const answers = await Promise.all(runs.map((run) => source.get(run, "metrics").catch((error) => ({ metrics: {}, error }))));
    this.runs = runs.map((run, place) => ({ run, metrics: answers[place].metrics }));
    const names = [...new Set(this.runs.flatMap(({ metrics }) => Object.keys(metrics)))]
      .filter((name) => !HIDDEN.has(name) && this.runs.some(({ metrics }) => metrics[name]?.some((value) => value !== null)));
    names.sort((one, other) => rank(one) - rank(other));
    this.charts.replaceChildren(...names.map((name) => this.chart(name)));
    if (!names.length) this.charts.replaceChildren(make("p", { class: "empty" }, "No evaluation was recorded yet."));
    this.mark();
    this.conclude(names);
  }

  chart(name) {
    const { axis } = this.store;
    const curves = this.runs.map(({ run, metrics }) => ({ run, points: points(metrics, axis, name) })).filter(({ points: some }) => some.length);
    const xs = range(curves.flatMap(({ points: some }) => some.map(([x]) => x)));
    let ys = range(curves.flatMap(({ points: some }) => some.map(([, y]) => y)));
    const log = ys[0] > 0 && ys[1] > 30 * ys[0] && !name.startsWith("accuracy");
    if (name.includes("accuracy")) ys = [Math.max(0, Math.min(ys[0], 0.95) - 0.05), Math.min(1, Math.max(ys[1] + 0.03, ys[0] + 0.1))];
    if (ys[0] === ys[1]) ys = [ys[0] - 0.5, ys[1] + 0.5];
    const across = (x) => LEFT_SIDE + ((x - xs[0]) / (xs[1] - xs[0] || 1)) * (WIDE - LEFT_SIDE - 12);
    const share = log ? (y) => Math.log(y / ys[0]) / Math.log(ys[1] / ys[0]) : (y) => (y - ys[0]) / (ys[1] - ys[0]);
    const up = (y) => TALL - BOTTOM - share(y) * (TALL - BOTTOM - 12);
    const drawing = shape("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": this.words(name, curves) });
    this.axes(drawing, xs, ys, across, up, log, axis);
    for (const { run, points: some } of curves) {
      const path = some.map(([x, y], place) => `${place ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
      drawing.append(shape("path", { d: path, class: "curve", stroke: RUN_COLOURS[run.number % RUN_COLOURS.length] }));
      if (some.length <= 40) some.forEach(([x, y]) => drawing.append(shape("circle", { cx: across(x), cy: up(y), r: 1.9, fill: RUN_COLOURS[run.number % RUN_COLOURS.length] })));
    }
    const marks = drawing.appendChild(shape("g", { class: "marks" }));
    const figure = make("figure", { class: "chart", "data-metric": name }, make("figcaption", {}, WORDS[name] ?? name.replaceAll("_", " "), log ? make("span", { class: "faint" }, " (log)") : null), drawing);
    const readout = make("div", { class: "readout" });
    figure.append(readout);
    Object.assign(figure, { curves, across, up, marks, readout });
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      const x = xs[0] + (((event.clientX - box.left) / box.width) * WIDE - LEFT_SIDE) / (WIDE - LEFT_SIDE - 12) * (xs[1] - xs[0]);
      this.point(figure, x);
    });
    drawing.addEventListener("pointerleave", () => this.mark());
    drawing.addEventListener("click", () => { if (figure.time != null) this.store.set({ cursor: figure.time }); });
    return figure;
  }

  axes(drawing, xs, ys, across, up, log, axis) {
    const places = ticks(xs[0], xs[1], 6);
    for (const x of places) {
      const words = axis === "bytes" ? bytes(x) : tickText(x, places.length > 1 ? places[1] - places[0] : 1);
      drawing.append(shape("line", { x1: across(x), x2: across(x), y1: 8, y2: TALL - BOTTOM, class: "grid" }),
        shape("text", { x: across(x), y: TALL - BOTTOM + 16, class: "tick", "text-anchor": "middle" }, words));
    }
    drawing.append(shape("text", { x: WIDE - 12, y: TALL - 4, class: "tick", "text-anchor": "end" }, this.axisWords));
    const levels = log ? logTicks(ys) : ticks(ys[0], ys[1], 5);
    for (const y of levels) {
      drawing.append(shape("line", { x1: LEFT_SIDE, x2: WIDE - 12, y1: up(y), y2: up(y), class: "grid" }),
        shape("text", { x: LEFT_SIDE - 7, y: up(y) + 4, class: "tick", "text-anchor": "end" }, log ? number(y, 2) : tickText(y, levels.length > 1 ? levels[1] - levels[0] : 1)));
    }
  }

  /** With a server, a step is a round. */
  get axisWords() {
    return this.store.axis === "step" && this.runs.every(({ run }) => run.server != null) ? "round" : AXES[this.store.axis];
  }

  words(name, curves) {
    return `${WORDS[name] ?? name} against ${this.axisWords}. ` + curves.map(({ run, points: some }) =>
      `${run.name}: from ${number(some[0][1])} to ${number(some.at(-1)[1])}`).join("; ");
  }

  /** Where every curve is at the cursor: its last evaluation by then. */
  mark() {
    for (const figure of this.charts.children) {
      if (!figure.curves) continue;
      this.show(figure, this.store.cursor == null ? [] : figure.curves.map(({ run, points: some }) =>
        ({ run, at: some.filter(([, , time]) => time <= this.store.cursor + 1e-9).at(-1) })));
    }
  }

  point(figure, x) {
    const near = figure.curves.map(({ run, points: some }) => ({ run,
      at: some.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)) }));
    figure.time = near[0]?.at[2];
    this.show(figure, near);
  }

  show(figure, found) {
    const known = found.filter(({ at }) => at);
    figure.marks.replaceChildren(...known.map(({ run, at }) => shape("circle", { cx: figure.across(at[0]), cy: figure.up(at[1]), r: 4.5,
      class: "mark", fill: RUN_COLOURS[run.number % RUN_COLOURS.length] })));
    const axis = this.store.axis;
    figure.readout.replaceChildren(...known.map(({ run, at }) => coloured(run, `${number(at[1])} at ${axis === "bytes" ? bytes(at[0]) : number(at[0])}`)));
  }

  /** The last evaluation of every run, as a table. */
  conclude(names) {
    const rows = this.runs.filter(({ metrics }) => metrics.step?.length).map(({ run, metrics }) =>
      [coloured(run, run.name), number(metrics.step.at(-1)), number(metrics.virtual_time.at(-1)), bytes(metrics.bytes.at(-1)),
        ...names.map((name) => number(metrics[name]?.at(-1)))]);
    this.last.replaceChildren(rows.length ? table(["run", "step", "virtual time", "sent", ...names.map((name) => WORDS[name] ?? name.replaceAll("_", " "))], rows,
      { right: names.map((_, place) => place + 4).concat([1, 2, 3]), caption: "The last evaluation" }) : "");
  }
}

export function coloured(run, words) {
  return make("span", { class: "coloured" }, swatch(RUN_COLOURS[run.number % RUN_COLOURS.length]), words);
}

function points(metrics, axis, name) {
  const found = [];
  (metrics[name] ?? []).forEach((value, row) => {
    if (value !== null && metrics[axis]?.[row] != null) found.push([metrics[axis][row], value, metrics.virtual_time[row]]);
  });
  return found;
}

function range(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function logTicks([low, high]) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const times of high / low > 1000 ? [1] : [1, 2, 5]) {
      const value = times * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found;
}

function rank(name) {
  const place = FIRST.indexOf(name);
  return place < 0 ? FIRST.length : place;
}
